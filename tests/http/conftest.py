"""Fixtures: real servers on loopback with a tiny chat model, driven by the official clients."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from engine import blas

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
blas.preload()  # before anything here imports mlx.core
sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))

import httpx  # noqa: E402
import openai  # noqa: E402
from chat_model import TEMPLATE, write_chat_model  # noqa: E402

from engine import EngineOptions, Pool, PooledModel, PoolOptions, Request  # noqa: E402
from engine.http.access import AccessOptions, access_control  # noqa: E402
from engine.http.app import ROUTERS, create_app  # noqa: E402
from engine.http.connections import uvicorn_options  # noqa: E402
from engine.http.levels import Rules  # noqa: E402
from engine.http.service import Limits, Served, Service  # noqa: E402
from kvdb.durable import FileSystem  # noqa: E402
from kvdb.opening import Options, open_store  # noqa: E402
from kvdb.store import Store  # noqa: E402
from tests.http.serving import serving  # noqa: E402

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Running:
    """A server at ``url``, and what is behind it."""

    url: str
    service: Service
    pool: Pool
    store: Store | None

    # Making a client takes longer than most requests.
    @cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Post what json.dumps makes of ``body``, or bytes as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **headers}
        return self._http.post(f"{self.url}{path}", content=content, headers=headers)

    @cached_property
    def _http(self) -> httpx.Client:
        return httpx.Client(timeout=60)

    def one(self, sql: str) -> tuple[Any, ...]:
        """A row of the store, with all that is queued in it."""
        assert self.store is not None
        assert self.store.flush(30)
        with self.store.database.read() as connection:
            return tuple(connection.execute(sql).fetchone())


StartServer = Callable[..., Running]


# As Qwen's template writes calls: mlx-lm knows the form by it.
TOOL_TEMPLATE = TEMPLATE.replace(
    "{{- call.function | tojson }}",
    "{%- set tool_call = call.function %}"
    """{{- '{"name": "' + tool_call.name + '", "arguments": ' }}"""
    "{{- tool_call.arguments | tojson }}{{- '}' }}",
)
assert "tool_call.name" in TOOL_TEMPLATE


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "chat", template=TOOL_TEMPLATE)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVDB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, chat_folder: Path) -> Iterator[StartServer]:
    """Start servers that last until the module's tests are over. The model is called ``tiny``, and
    ``others`` as their folders."""
    with ExitStack() as stack:

        def start_server(
            *,
            limits: Limits | None = None,
            max_running: int = 8,
            step: int | None = None,
            max_tokens: int = 24,
            adapt: Callable[[Request], Request] | None = None,
            folder: Path | None = None,
            model: Path = chat_folder,
            others: Sequence[Path] = (),
            max_models: int | None = None,
            store: bool = True,
            fs: FileSystem | None = None,
        ) -> Running:
            path = folder or tmp_path_factory.mktemp("store") / "store"
            opened = open_store(path, Options(min_free_bytes=0), fs=fs) if store else None
            if opened is not None:
                stack.callback(opened.close)
            options = EngineOptions(BLOCK_TOKENS, step=step, max_running=max_running)
            pooled = PoolOptions(max_models, default=PooledModel(engine_options=options))
            pool = stack.enter_context(Pool(opened, pooled))
            served = [
                Served(str(path), (name,), max_tokens, max_running=max_running)
                for path, name in ((model, "tiny"), *((other, other.name) for other in others))
            ]
            service = Service(pool, opened, served, limits, adapt=adapt)
            access = AccessOptions()
            guard = access_control(access, opened, Rules(ROUTERS))
            app = create_app(service, guard)
            port = stack.enter_context(serving(app, **uvicorn_options(access)))
            return Running(f"http://127.0.0.1:{port}", service, pool, opened)

        yield start_server


@pytest.fixture(scope="module")
def server(start: StartServer) -> Running:
    """One server that a module's tests share."""
    return start()
