"""``/metrics`` for Prometheus: what was asked and what it cost since the server started, and what
the store and the engines hold now. No label holds anything of a prompt."""

from __future__ import annotations

import asyncio
from collections import Counter as Count
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, get_args

from fastapi import Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from engine.events import End, Stats
from engine.http.levels import Router
from engine.http.service import Running, Service, State
from kvdb.errors import KvdbError

if TYPE_CHECKING:
    from kvdb.driver import Connection
    from kvdb.store import Store

router = Router("overview", tags=["Metrics"])

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
STATES: tuple[State, ...] = get_args(State)
# All of these are kept totals or few rows: a scrape must not read a large store through.
EVICTIONS = "SELECT reason, sum(evictions), sum(nbytes) FROM eviction_totals GROUP BY reason"
LIVE = "SELECT coalesce(sum(live_blocks), 0), coalesce(sum(live_tokens), 0) FROM namespaces"


class Metrics:
    """Counts what the service tells of the end of requests. Made once for each service."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "kvdb_requests",
            "Answers that ended, by what the store saved them and how they ended.",
            ("model", "skip", "outcome"),
            registry=self.registry,
        )
        self._prompt_tokens = Counter(
            "kvdb_prompt_tokens",
            "Prompt tokens by where their state came from.",
            ("model", "source"),
            registry=self.registry,
        )
        self._generated = Counter(
            "kvdb_generated_tokens", "Tokens generated.", ("model",), registry=self.registry
        )
        self._shared_steps = Counter(
            "kvdb_shared_decode_steps",
            "Decode steps that were made together with other requests.",
            ("model",),
            registry=self.registry,
        )
        self._first_token = Histogram(
            "kvdb_first_token_seconds",
            "Time to the first token, with waiting and loading.",
            ("model", "skip"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._prefill = Histogram(
            "kvdb_prefill_seconds",
            "Time in prefill of those that computed anything.",
            ("model",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._read = Counter(
            "kvdb_read_bytes",
            "Stored bytes restored, from disk or from the RAM tier.",
            ("source",),
            registry=self.registry,
        )
        self._from_disk = Counter(
            "kvdb_requests_reading_disk",
            "Requests that restored anything from disk.",
            registry=self.registry,
        )
        self._disk_ratio = Gauge(
            "kvdb_disk_read_ratio",
            "Share of the restored bytes that came from disk, not from the RAM tier.",
            registry=self.registry,
        )
        self._disk_bytes = self._ram_bytes = 0
        service.observe = self.count

    def count(self, model: str, item: End | BaseException) -> None:
        """An answer of ``model`` ended, or failed."""
        if isinstance(item, BaseException):
            self._requests.labels(model, "none", "error").inc()
            return
        stats = item.stats
        self._requests.labels(model, stats.skip, item.reason).inc()
        self._generated.labels(model).inc(stats.generated_tokens)
        self._shared_steps.labels(model).inc(stats.shared_steps)
        if stats.ttft_ms is not None:
            self._first_token.labels(model, stats.skip).observe(stats.ttft_ms / 1000)
        if item.index == 0:  # n answers have one prompt
            self._count_prompt(model, stats)

    def _count_prompt(self, model: str, stats: Stats) -> None:
        for source, tokens in (
            ("restored", stats.restored_tokens),
            ("refilled", stats.refilled_tokens),
            ("masked", stats.masked_tokens),
            ("computed", stats.computed_tokens),
        ):
            self._prompt_tokens.labels(model, source).inc(tokens)
        if stats.computed_tokens + stats.refilled_tokens:
            self._prefill.labels(model).observe(stats.prefill_ms / 1000)
        self._read.labels("disk").inc(stats.bytes_read)
        self._read.labels("ram").inc(stats.bytes_ram)
        self._read.labels("remote").inc(stats.bytes_remote)
        self._from_disk.inc(stats.bytes_read > 0)
        self._disk_bytes += stats.bytes_read
        self._ram_bytes += stats.bytes_ram
        if self._disk_bytes + self._ram_bytes:
            self._disk_ratio.set(self._disk_bytes / (self._disk_bytes + self._ram_bytes))


class Now:
    """What is there at this moment, as a collector."""

    def __init__(self, service: Service, running: Sequence[Running]) -> None:
        self._service, self._running = service, running

    def collect(self) -> Iterator[Metric]:
        yield from self._queue()
        yield from self._models()
        if self._service.store is not None:
            try:
                yield from _store(self._service.store)
            except KvdbError:  # it is gone: what is counted above goes on
                yield _gauge("kvdb_store_up", "Whether the store can be read.", 0)

    def _queue(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "kvdb_running_requests", "Requests that have not ended.", labels=("model", "state")
        )
        counted = Count((each.model, each.state) for each in self._running)
        for model in self._service.models:
            for state in STATES:
                family.add_metric((model, state), counted[model, state])
        yield family
        fill = GaugeMetricFamily(
            "kvdb_batch_fill_ratio",
            "Requests that decode, of those that could at once.",
            labels=("model",),
        )
        for served in self._service.models.values():
            fill.add_metric((served.name,), counted[served.name, "decode"] / served.max_running)
        yield fill

    def _models(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "kvdb_model_bytes", "Weights of the models in memory.", labels=("model",)
        )
        for state in self._service.pool.loaded():
            family.add_metric((state.name,), state.nbytes)
        yield family


def _store(store: Store) -> Iterator[Metric]:
    with store.database.read() as connection:
        used = store.limit.used(connection)
        (blocks, tokens), evictions = connection.execute(LIVE).fetchone(), _evictions(connection)
    yield _gauge("kvdb_store_up", "Whether the store can be read.", 1)
    yield _gauge("kvdb_store_bytes", "Size of the store's folder.", used)
    yield _gauge("kvdb_store_limit_bytes", "Most that it may have.", store.limit.max_bytes)
    yield _gauge("kvdb_store_blocks", "Blocks stored.", blocks)
    yield _gauge("kvdb_store_tokens", "Tokens whose state is stored.", tokens)
    yield from evictions
    ram = store.ram.stats()
    yield _gauge("kvdb_ram_bytes", "Size of the RAM tier.", ram.nbytes)
    yield _gauge("kvdb_ram_limit_bytes", "Most that it may have.", ram.budget)
    found = CounterMetricFamily(
        "kvdb_ram_lookups", "Parts looked for in the RAM tier.", labels=("result",)
    )
    found.add_metric(("hit",), ram.hits)
    found.add_metric(("miss",), ram.misses)
    yield found


def _evictions(connection: Connection) -> list[Metric]:
    counts = CounterMetricFamily(
        "kvdb_evictions", "Blocks and parts evicted, in all the store's life.", labels=("reason",)
    )
    nbytes = CounterMetricFamily("kvdb_evicted_bytes", "Their bytes.", labels=("reason",))
    for reason, number, size in connection.execute(EVICTIONS):
        counts.add_metric((reason,), number)
        nbytes.add_metric((reason,), size)
    return [counts, nbytes]


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Everything, in Prometheus's text format."""
    service: Service = request.app.state.service
    counted: Metrics = request.app.state.metrics
    moment = CollectorRegistry()
    moment.register(Now(service, service.running()))  # what runs is known on this thread only
    text = await asyncio.to_thread(
        lambda: generate_latest(counted.registry) + generate_latest(moment)
    )
    return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)
