"""A whole server behind access control, on a tiny random model, with keys of every role."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import blas

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
blas.preload()  # before anything here imports mlx.core
sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))

import httpx  # noqa: E402
from chat_model import write_chat_model  # noqa: E402

import kvdb  # noqa: E402
from engine import EngineOptions, Pool, PooledModel, PoolOptions  # noqa: E402
from engine.http.access import AccessOptions, access_control  # noqa: E402
from engine.http.app import ROUTERS, create_app  # noqa: E402
from engine.http.connections import uvicorn_options  # noqa: E402
from engine.http.levels import Rules  # noqa: E402
from engine.http.service import Limits, Served, Service  # noqa: E402
from kvdb.keys import NewKey, create_key  # noqa: E402
from kvdb.store import Store  # noqa: E402
from tests.http.serving import serving  # noqa: E402

BLOCK = 16
KEYS = {"main": "", "admin": "", "a": "a", "b": "b", "gone": "gone"}


@dataclass(frozen=True)
class Guarded:
    """A server on ``port``; ``keys`` by what they are for."""

    port: int
    store: Store
    service: Service
    keys: dict[str, NewKey]
    client: httpx.Client

    def call(
        self, method: str, path: str, body: Any = None, *, key: str | None = None, **headers: str
    ) -> httpx.Response:
        """A request with the key called ``key``, or with none."""
        if key is not None:
            headers["authorization"] = f"Bearer {self.keys[key].text}"
        return self.client.request(
            method,
            path,
            json=body,
            headers={name.replace("_", "-"): value for name, value in headers.items()},
        )

    def get(self, method: str, path: str, body: Any = None, *, key: str | None = None) -> Any:
        """The document of an answer that must be good."""
        answer = self.call(method, path, body, key=key)
        assert answer.status_code < 300, answer.text
        return answer.json()


@contextmanager
def guarded(
    folder: Path,
    *,
    keyed: bool = True,
    step: int | None = None,
    limits: Limits | None = None,
    **options: Any,
) -> Iterator[Guarded]:
    """``options`` are those of AccessOptions. Everything is made in ``folder``."""
    model = folder / "model"
    if not model.exists():
        write_chat_model(model)
    access = AccessOptions(**options)
    engine = EngineOptions(BLOCK, step=step)
    with (
        kvdb.open(folder / "store", min_free_bytes=0, ram=64 << 20) as store,
        Pool(store, PoolOptions(default=PooledModel(engine_options=engine))) as pool,
    ):
        keys = {}
        for name, tenant in KEYS.items() if keyed else ():
            role = "tenant" if tenant else name
            keys[name] = create_key(store, role, tenant=tenant)  # type: ignore[arg-type]
        service = Service(pool, store, [Served(str(model), ("tiny",), 8)], limits)
        service.ready = True
        around = access_control(access, store, Rules(ROUTERS))
        with (
            serving(create_app(service, around), **uvicorn_options(access)) as port,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        ):
            yield Guarded(port, store, service, keys, client)
