"""What HTTP costs on top of the engine, and how the server compares with mlx-lm's own.

    python -m tests.bench.http_speed [--tokens 400] [--model smollm2-135m] [--no-mlx-lm]

The server is a process of its own, with a tiny random chat model, so that little else is to be
seen. Milliseconds:

first_token   a prompt that is stored whole: until the first text of a stream is here, and the same
              of Engine.generate in this process, in turns; medians, and their difference.
cpu_a_token   CPU time of the server's event loop (its main thread) for each token of 8 streams.
idle          decode speed (tokens/s) of one stream alone, and beside 200 streams that wait for
              their turn.
light         a request for /health (or /v1/models) while a long prompt is computed; the slowest.

With --model, kvdb and ``mlx_lm.server`` (with the same BLAS) on the same real model: the time to
the first text of a prompt of about 1,000 tokens cold, hot, and after a restart of the server.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "engine"))
WORDS = "The quick brown fox jumps over the lazy dog and reads the weather of the city. "
MLX_LM = "from engine import blas; blas.preload(); from mlx_lm.server import main; main()"


class Server:
    """A server's process, its URL, and the name of its model."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, model: str) -> None:
        self.process, self.url, self.model = process, url, model
        self.client = httpx.Client(timeout=600)
        self.connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=3600)

    def body(self, text: str, **more: Any) -> dict[str, Any]:
        return {"model": self.model, "messages": [{"role": "user", "content": text}], **more}

    @contextmanager
    def stream(self, text: str, **more: Any) -> Iterator[Iterator[str]]:
        """The texts of an answer."""
        asked = self.body(text, stream=True, **more)
        with self.client.stream("POST", f"{self.url}/v1/chat/completions", json=asked) as answer:
            yield texts(answer.iter_lines())

    def first_text(self, text: str, **more: Any) -> float:
        """Milliseconds until the first text is here, for a client that does little itself and keeps
        its connection."""
        body = json.dumps(self.body(text, stream=True, **more)).encode()
        began = time.perf_counter()
        headers = {"content-type": "application/json"}
        self.connection.request("POST", "/v1/chat/completions", body, headers)
        lines = (line.decode() for line in self.connection.getresponse())
        next(texts(lines))
        took = (time.perf_counter() - began) * 1e3
        for _ in lines:
            pass
        return took

    def loop_seconds(self) -> float:
        """CPU seconds of the main thread."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def texts(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("data: {"):
            continue
        choices = json.loads(line[6:]).get("choices")
        if choices and (text := choices[0]["delta"].get("content")):
            yield text


@contextmanager
def kvdb_server(model: str, store: Path, *options: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "kvdb", "serve", "--model", model, "--store", str(store)]
    process = subprocess.Popen([*command, "--port", "0", *options], stderr=subprocess.PIPE)
    url = ""
    for line in process.stderr or ():
        if b" at http" in line:
            url = line.decode().split(" at ")[1].split("/v1")[0]
        if b" is ready" in line:
            break
    threading.Thread(target=lambda: (process.stderr or process).read(), daemon=True).start()
    try:
        yield Server(process, url, model)
    finally:
        process.terminate()
        process.wait()


@contextmanager
def mlx_lm_server(model: Path) -> Iterator[Server]:
    port = "18437"
    command = [sys.executable, "-c", MLX_LM, "--model", str(model), "--port", port]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    server = Server(process, f"http://127.0.0.1:{port}", "default_model")
    try:
        while True:
            try:
                server.client.get(f"{server.url}/health")
                break
            except httpx.ConnectError:
                time.sleep(0.05)
        server.first_text("Hi", max_tokens=1)  # it loads its model when it is first asked
        yield server
    finally:
        process.terminate()
        process.wait()


def first_token(server: Server, engine: Any, rounds: int = 30) -> dict[str, float]:
    from engine import Request, Token

    text = WORDS * 15
    request = Request(messages=server.body(text)["messages"], max_tokens=2)
    served, alone = [], []
    for number in range(rounds + 3):
        began = time.perf_counter()
        for event in engine.generate(request):
            if isinstance(event, Token):
                took = (time.perf_counter() - began) * 1e3
                break
        ours = server.first_text(text, max_tokens=2)
        if number >= 3:
            alone.append(took)
            served.append(ours)
    medians = statistics.median(served), statistics.median(alone)
    return {"http": medians[0], "engine": medians[1], "difference": medians[0] - medians[1]}


def cpu_a_token(server: Server, tokens: int, streams: int = 8) -> dict[str, float]:
    counts: list[int] = []

    def read(number: int) -> None:
        with server.stream(f"{number} {WORDS}", max_tokens=tokens, logit_bias={"1": -100}) as said:
            counts.append(sum(1 for _ in said))

    before = server.loop_seconds()
    threads = [threading.Thread(target=read, args=(number,)) for number in range(streams)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    spent = server.loop_seconds() - before
    return {
        "cpu_ms": spent * 1e3 / (streams * tokens),
        "tokens_per_second": streams * tokens / took,
    }


def idle(server: Server, tokens: int, streams: int = 200) -> dict[str, float]:
    """``server`` runs one request at a time."""

    def speed() -> float:
        """Of the later half: while the 200 arrive, they are not idle."""
        with server.stream(WORDS, max_tokens=6 * tokens, logit_bias={"1": -100}) as said:
            times = [time.perf_counter() for _ in said]
        half = len(times) // 2
        return (len(times) - 1 - half) / (times[-1] - times[half])

    alone = statistics.median(speed() for _ in range(3))
    results: list[float] = []
    with ExitStack() as stack:
        runner = threading.Thread(target=lambda: results.append(speed()))
        runner.start()
        time.sleep(0.2)
        clients = httpx.Client(timeout=600, limits=httpx.Limits(max_connections=None))
        asked = server.body(WORDS, stream=True, max_tokens=1, kvdb={"priority": "batch"})

        def wait() -> None:
            with suppress(httpx.HTTPError):  # its client is closed under it
                clients.post(f"{server.url}/v1/chat/completions", json=asked)

        for _ in range(streams):
            threading.Thread(target=wait, daemon=True).start()
        runner.join()
        stack.callback(clients.close)
    return {"alone": alone, "beside": results[0], "ratio": results[0] / alone}


def light(server: Server) -> dict[str, float]:
    path = "/health" if server.client.get(f"{server.url}/health").is_success else "/v1/models"
    text = f"{time.time()} " + WORDS * 180
    thread = threading.Thread(target=server.first_text, args=(text,), kwargs={"max_tokens": 1})
    thread.start()
    took = []
    client = httpx.Client()
    while thread.is_alive():
        began = time.perf_counter()
        client.get(f"{server.url}{path}")
        took.append((time.perf_counter() - began) * 1e3)
        time.sleep(0.01)
    return {"requests": len(took), "median": statistics.median(took), "slowest": max(took)}


def beside_mlx_lm(model: str, store: Path) -> dict[str, dict[str, float]]:
    from engine.models import resolve

    text = WORDS * 58  # about 1,000 tokens

    def ask(server: Server) -> tuple[float, float]:
        first = server.first_text(text, max_tokens=2)
        return first, statistics.median(server.first_text(text, max_tokens=2) for _ in range(7))

    found: dict[str, dict[str, float]] = {"kvdb": {}, "mlx_lm": {}}
    for name, start in (
        ("kvdb", lambda: kvdb_server(model, store)),
        ("mlx_lm", lambda: mlx_lm_server(resolve(model))),
    ):
        with start() as server:
            cold, hot = ask(server)
        with start() as server:
            server.first_text("Hi", max_tokens=1)
            restarted, _ = ask(server)
        found[name] = {"cold": cold, "hot": hot, "restarted": restarted}
    found["ratio"] = {
        key: found["mlx_lm"][key] / found["kvdb"][key] for key in ("cold", "hot", "restarted")
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--model", default="")
    options = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from engine import blas

    blas.preload()
    from chat_model import write_chat_model

    import kvdb
    from engine import Engine

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        tiny = str(write_chat_model(path / "tiny"))
        with (
            kvdb.open(path / "ours") as store,
            Engine(store, tiny) as engine,
            kvdb_server(tiny, path / "served") as server,
        ):
            found["first_token"] = first_token(server, engine)
            found["cpu_a_token"] = cpu_a_token(server, options.tokens)
            found["light"] = light(server)
        more = ("--max-running", "1", "--max-waiting", "300")
        with kvdb_server(tiny, path / "idle", *more) as server:
            found["idle"] = idle(server, options.tokens)
        if options.model:
            found["beside_mlx_lm"] = beside_mlx_lm(options.model, path / "real")
    print(json.dumps(found, indent=2, default=lambda value: round(value, 3)))


if __name__ == "__main__":
    main()
