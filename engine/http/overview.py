"""What the page at ``/`` shows, as JSON: what runs now, and the store's figures.

What runs is known in memory. The figures are read on a thread, one reading at a time, and kept:
however many look, the store is read at most a small share of the time, and nobody waits for it but
who asks first.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fastapi import Request

from engine.http.caller import caller_of
from engine.http.errors import route_class
from engine.http.levels import Router
from engine.http.openai_shapes import openai_error
from engine.http.service import Running, Service
from engine.prompt.tokenizer import namespace_decoder
from kvdb.errors import KvdbError
from kvdb.report import Live, Scope, read_live, words
from kvdb.report.sections import Card, Section, Table

if TYPE_CHECKING:
    from kvdb.report.figures import Figure
    from kvdb.report.tree import Decode
    from kvdb.store import Store

router = Router("overview", prefix="/v1/kvdb", tags=["Page"], route_class=route_class(openai_error))

Span = Literal["day", "week", "month", "all"]
DAYS: dict[Span, int | None] = {"day": 1, "week": 7, "month": 30, "all": None}
DAY_US = 86_400 * 1_000_000
# Figures are that old at most, unless reading them takes more than the share of the time.
LEAST_SECONDS = 5.0
MOST_SHARE = 0.05


@router.get("/overview")
async def overview(request: Request, span: Span = "week", seen: int = 0) -> dict[str, Any]:
    """What runs, and the store's figures of the latest ``span``; without these when they are the
    ones that were ``seen``. Only the admin key is shown how prompts begin and where they part."""
    service: Service = request.app.state.service
    figures: StoreFigures = request.app.state.figures
    running = service.running()  # known on this thread only
    kept = await figures.read(Wanted(span, texts=caller_of(request).admin))
    return {
        **await asyncio.to_thread(_now, service, running),
        "figures": None if kept.version == seen else {"version": kept.version, **kept.document},
    }


def _now(service: Service, running: Sequence[Running]) -> dict[str, Any]:
    now = service.now()
    memory = service.pool.guard.stats()
    loaded = {state.name: state for state in service.pool.loaded()}
    return {
        "state": "stopping" if service.stopping else "ready" if service.ready else "starting",
        "up_seconds": round(now - service.started),
        "running": [_running(each, now) for each in running],
        "models": [
            {
                "name": words.shown(name),
                **({"loaded": False} if name not in loaded else _loaded(asdict(loaded[name]))),
            }
            for name in service.models
        ],
        "memory": {
            "held": memory.held,
            "ceiling": memory.ceiling,
            "ram": memory.ram,
            "ram_budget": memory.ram_budget,
        },
    }


def _loaded(state: dict[str, Any]) -> dict[str, Any]:
    return {"loaded": True, **{key: state[key] for key in ("nbytes", "users", "pinned")}}


def _running(each: Running, now: float) -> dict[str, Any]:
    return {
        "id": each.id,
        "model": words.shown(each.model),
        "tenant": words.shown(each.tenant),
        "client": words.shown(each.client),
        "priority": each.priority,
        "state": each.state,
        "done": each.done,
        "total": each.total,
        "generated": each.generated,
        "seconds": round(max(now - each.since, 0), 1),
    }


class Wanted(NamedTuple):
    """Which figures; ``texts``: with what prompts say."""

    span: Span
    texts: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """Figures as they were read; ``due`` is when they are to be read again."""

    version: int
    document: dict[str, Any]
    due: float


class StoreFigures:
    """The figures of a store, kept. Every method runs on one event loop's thread."""

    def __init__(
        self, store: Store | None, *, seconds: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._seconds = seconds
        self._versions = itertools.count(1)
        self._kept: dict[Wanted, Kept] = {}
        self._readings: dict[Wanted, asyncio.Task[Kept]] = {}
        self._one = asyncio.Lock()
        self._decoders: dict[int, Decode] = {}

    async def read(self, wanted: Wanted) -> Kept:
        """The figures: those that are there, while newer ones are read."""
        kept = self._kept.get(wanted)
        if kept is not None and self._seconds() < kept.due:
            return kept
        if wanted not in self._readings:
            self._readings[wanted] = asyncio.create_task(self._renew(wanted))
        return await asyncio.shield(self._readings[wanted]) if kept is None else kept

    async def close(self) -> None:
        """Wait for what is being read: the store is about to close."""
        await asyncio.gather(*self._readings.values(), return_exceptions=True)

    async def _renew(self, wanted: Wanted) -> Kept:
        try:
            async with self._one:
                began = self._seconds()
                document = await asyncio.to_thread(self._document, wanted)
                now = self._seconds()
            due = now + max(LEAST_SECONDS, (now - began) / MOST_SHARE)
            kept = self._kept[wanted] = Kept(next(self._versions), document, due)
            return kept
        finally:
            del self._readings[wanted]

    def _document(self, wanted: Wanted) -> dict[str, Any]:
        store, days = self._store, DAYS[wanted.span]
        if store is None:
            return {"problem": "This server runs without a store."}
        since = None if days is None else store.environment.now_us() - days * DAY_US
        decoder = self._decoder if wanted.texts else lambda _: None
        try:
            return live_document(read_live(store, Scope(since_us=since), decoder))
        except KvdbError as error:
            return {"problem": f"The store cannot be read: {error}"}

    def _decoder(self, namespace_id: int) -> Decode | None:
        if self._store is not None and namespace_id not in self._decoders:
            decode = namespace_decoder(self._store, namespace_id)
            if decode is not None:
                self._decoders[namespace_id] = decode
        return self._decoders.get(namespace_id)


def live_document(live: Live) -> dict[str, Any]:
    """Figures as JSON; what others have named is on one line, and cut."""
    return {
        "at": live.at_us / 1e6,
        "tiles": [{"value": tile.value, "meaning": tile.meaning} for tile in live.tiles],
        "sections": [_section(section, live.period_us) for section in live.sections],
    }


def _section(section: Section, period_us: int) -> dict[str, Any]:
    return {
        "title": section.title,
        "sentences": [words.shown(sentence, 2000) for sentence in section.sentences],
        "figure": section.figure and _figure(section.figure, section.described, period_us),
        "bars": [
            {"name": words.shown(name), "value": value, "text": text}
            for name, value, text in section.bars
        ],
        "table": section.table and _table(section.table),
        "cards": [_card(card) for card in section.cards],
        "note": section.note,
    }


def _figure(figure: Figure, described: str, period_us: int) -> dict[str, Any]:
    """Stacked bars over time, without plotly's words for them."""
    layout, data = figure["layout"], figure["data"]
    return {
        "described": described,
        "unit": layout["yaxis"]["title"]["text"],
        "times": data[0]["x"],
        "period_ms": period_us / 1000,
        "series": [
            {"name": each["name"], "colour": each["marker"]["color"], "values": each["y"]}
            for each in data
        ],
    }


def _table(table: Table) -> dict[str, Any]:
    return {
        "headers": list(table.headers),
        "rows": [[words.shown(cell, 100) for cell in row] for row in table.rows],
        "numbers": sorted(table.numbers),
    }


def _card(card: Card) -> dict[str, Any]:
    return {
        "value": card.value,
        "facts": [words.shown(fact, 80) for fact in card.facts],
        "sentences": [words.shown(sentence, 2000) for sentence in card.sentences],
        "texts": {name: words.shown(text, 600) for name, text in card.texts.items()},
    }
