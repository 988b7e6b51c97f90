"""What restoring saves on a GPU of its own memory (made for an NVIDIA H200 with MLX CUDA): a random
bf16 model of Llama-8B's shape and a prompt of 16 K tokens.

    python -m tests.bench.h200 [--tokens 16384] [--rounds 5] [--folder DIR] [--plain] [--tiny]

Prints one JSON object: milliseconds (median and worst of the rounds) and ratios to the cold prefill
of the same run, with the spread of the prefill against itself. Shards are in the page cache. A
section that fails is named under "errors", and the others go on. ``--tiny`` runs the same code on a
small model, on any machine. Takes about 3 minutes and 10 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import kvdb
from engine import End, Engine, EngineOptions, ModelOptions, Request, blas
from kvdb.store import Store
from tests.bench.random_model import use_random_weights

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128_256,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}
TINY = {
    **LLAMA_8B,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
}
Times = list[float]


class Bench:
    """One store, one model at a time, and what was measured."""

    def __init__(self, options: argparse.Namespace, store: Store) -> None:
        self.options = options
        self.store = store
        self.result: dict[str, Any] = {"tokens": options.tokens, "errors": {}}
        random = np.random.default_rng(0)
        vocabulary = (TINY if options.tiny else LLAMA_8B)["vocab_size"]
        self.prompt = random.integers(0, vocabulary, options.tokens).tolist()

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        except Exception:
            self.result["errors"][name] = traceback.format_exc(limit=-4)
        print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr)

    def add(self, name: str, times: Times) -> float:
        median = statistics.median(times)
        self.result[name] = {"median": round(median, 2), "worst": round(max(times), 2)}
        return median

    def ratio(self, name: str, value: float, goal: float) -> None:
        self.result[name] = {"ratio": round(value, 2), "goal": goal, "met": value >= goal}

    def ask(self, engine: Engine, tokens: list[int], **more: Any) -> Any:
        """The statistics of a request. Two tokens: a full skip of one would restore nothing."""
        more.setdefault("max_tokens", 2)
        *_, end = engine.generate(Request(tokens=tokens, ignore_eos=True, **more))
        assert isinstance(end, End)
        return end.stats

    def keep(self, engine: Engine, tokens: list[int]) -> Any:
        """Compute, store, and wait until it is all there."""
        stats = self.ask(engine, tokens)
        began = time.perf_counter()
        if not self.store.flush(200):
            raise RuntimeError("the writer is still at work")
        self.result["flush_s"] = round(time.perf_counter() - began, 2)
        return stats

    def rounds(self, measure: Callable[[], float]) -> Times:
        measure()  # kernels are compiled, buffers allocated
        return [measure() for _ in range(self.options.rounds)]


def cold(bench: Bench, engine: Engine) -> float:
    """Prefill as without a store, and its spread: the first half against the second."""

    def measure() -> float:
        return float(bench.ask(engine, bench.prompt, read=False, store=False).prefill_ms)

    times = bench.rounds(measure)
    bench.result["cold_spread"] = round(max(times) / min(times), 3)
    return bench.add("cold_prefill_ms", times)


def restores(bench: Bench, engine: Engine, name: str, *, ram: bool) -> float:
    """Restores of the whole prompt, without and with the RAM tier; the answer is begun too, since
    a cache is copied at its first append."""
    found: list[Any] = []

    def measure() -> float:
        stats = bench.ask(engine, bench.prompt, store=False)
        if stats.restored_tokens != len(bench.prompt) or (stats.bytes_read == 0) != ram:
            raise RuntimeError(f"not the restore that is meant: {stats}")
        found.append(stats)
        return float(stats.restore_ms)

    if ram:
        bench.ask(engine, bench.prompt, store=False)  # the first use lets it in
    times = bench.rounds(measure)
    if not ram:
        bench.result[f"{name}_first_read_ms"] = round(found[0].restore_ms, 2)
    bench.result[f"{name}_bytes"] = found[-1].bytes_ram if ram else found[-1].bytes_read
    bench.add(f"{name}_until_second_token_ms", [stats.total_ms for stats in found[1:]])
    return bench.add(f"{name}_restore_ms", times)


def tiers(store: Store, engine: Engine, nbytes: int) -> None:
    """Give the RAM tiers a budget, 0 for none."""
    store.ram.resize(0)
    engine.call(lambda worker: store.device_ram.resize(nbytes))


def first_tokens(bench: Bench, engine: Engine) -> None:
    """A full skip's first token, short and long."""
    short = bench.prompt[: max(len(bench.prompt) // 16, 1)]
    bench.keep(engine, short)
    medians = []
    for name, tokens in (("short", short), ("long", bench.prompt)):
        found: list[Any] = []

        def measure(tokens: list[int] = tokens, found: list[Any] = found) -> float:
            stats = bench.ask(engine, tokens, store=False)
            if stats.skip != "full":
                raise RuntimeError(f"no full skip: {stats}")
            found.append(stats)
            return float(stats.first_token_ms)

        medians.append(bench.add(f"full_skip_{name}_first_token_ms", bench.rounds(measure)))
        bench.result[f"full_skip_{name}_lookup_ms"] = round(found[-1].lookup_ms, 2)
    bench.result["full_skip"] = {
        "tokens": [len(short), len(bench.prompt)],
        "goal_ms": 15,
        "met": max(medians) <= 15,
    }


def routes(bench: Bench, engine: Engine) -> None:
    """What the pieces of a restore cost by themselves, in GB/s and ms."""
    match = bench.store.match(bench.store.namespaces()[0], bench.prompt)

    def measure(worker: Any) -> dict[str, float]:
        import mlx.core as mx

        from engine.cuda import open_uplink
        from engine.device import device_part
        from kvdb.prefetch import Wanted, stream_blocks

        spec = worker.layout.by_name["kv:0"]
        uplink = open_uplink()
        size = worker.block_tokens
        blocks = [block for block in match.blocks if block.token_count == size]
        wanted = [Wanted(block, ["kv:0"]) for block in blocks]
        places = bench.store.locate([block.id for block in blocks])
        total = spec.nbytes(size) * len(blocks)
        rates: dict[str, float] = {}

        def timed(name: str, action: Callable[[], Any]) -> Any:
            action()
            began = time.perf_counter()
            value = action()
            seconds = time.perf_counter() - began
            rates[f"{name}_ms"] = round(seconds * 1e3, 2)
            rates[f"{name}_GB_per_s"] = round(total / seconds / 1e9, 2)
            return value

        def only_read() -> None:
            for _ in stream_blocks(bench.store, wanted, places, uplink.staging):
                pass

        timed("read_ahead_without_upload", only_read)
        raw = uplink.staging.lend(spec.nbytes(size))
        mx.synchronize()

        def uploads() -> list[mx.array]:
            arrays = [device_part(raw, spec, size, uplink)[0] for _ in blocks]
            mx.eval(arrays)
            return arrays

        arrays = timed("upload_by_block", uploads)

        def join() -> None:
            mx.eval(mx.concatenate(arrays, axis=4))

        timed("join", join)

        def used() -> None:
            mx.eval(mx.concatenate(uploads(), axis=4))

        timed("upload_and_join", used)
        layers = [
            np.ones((2, *spec.tensors[0].full_shape(size * len(blocks))), np.uint16)
            for _ in spec.layers
        ]

        def by_layer() -> None:
            mx.eval([mx.array(layer).view(mx.bfloat16) + 0 for layer in layers])

        timed("upload_by_layer_and_use", by_layer)

        return rates

    bench.result["pieces"] = engine.call(measure)


def views(bench: Bench, engine: Engine) -> None:
    """Can the host write into the device's arrays, and how fast are they then used? By 1 GiB."""

    def measure(worker: Any) -> dict[str, Any]:
        import mlx.core as mx

        from engine.memory import unwritten
        from kvdb.layout import TensorSpec

        count = 4 if bench.options.tiny else 32
        spec = TensorSpec("x", "U16", (32 * 1024 * 512 // (64 if bench.options.tiny else 1),), None)
        source = np.ones(spec.shape, np.uint16)
        times: dict[str, Any] = {"bytes": count * spec.nbytes(1)}
        for attempt in range(2):
            began = time.perf_counter()
            arrays = unwritten([spec] * count, 1)
            allocated = time.perf_counter()
            for array in arrays:
                np.copyto(np.array(array, copy=False), source)
            written = time.perf_counter()
            sums = [array.astype(mx.uint32).sum() for array in arrays]
            mx.eval(sums)
            used = time.perf_counter()
            times[f"round_{attempt}"] = {
                "allocate_ms": round((allocated - began) * 1e3, 2),
                "write_ms": round((written - allocated) * 1e3, 2),
                "use_ms": round((used - written) * 1e3, 2),
                "right": all(int(s.item()) == source.size for s in sums),
            }
        return times

    bench.result["views"] = engine.call(measure)


def long_prompt(bench: Bench, engine: Engine, tokens: int, step: int) -> None:
    """A prompt beyond what one forward could take: memory and logits at two step lengths, and
    what a second request with it costs."""
    import mlx.core as mx

    vocabulary = (TINY if bench.options.tiny else LLAMA_8B)["vocab_size"]
    prompt = np.random.default_rng(1).integers(0, vocabulary, tokens).tolist()
    seen: list[np.ndarray[Any, Any]] = []
    engine.call(
        lambda worker: setattr(
            worker, "observe", lambda row: seen.append(np.array(row.astype(mx.float32)).ravel())
        )
    )
    found: dict[str, Any] = {"tokens": tokens}

    def ask(name: str, step: int, **options: Any) -> None:
        seen.clear()
        engine.call(lambda worker: (setattr(worker, "step", step), mx.reset_peak_memory()))
        stats = bench.ask(engine, prompt, **options)
        found[name] = {
            "step": step,
            "skip": stats.skip,
            "prefill_ms": round(stats.prefill_ms, 1),
            "restore_ms": round(stats.restore_ms, 1),
            "first_token_ms": round(stats.first_token_ms, 1),
            "peak_GB": round(engine.call(lambda worker: mx.get_peak_memory()) / 1e9, 2),
        }
        first = [logits.copy() for logits in seen]
        logits.setdefault("first", first)
        worst = max(
            float(np.abs(a - b).max() / np.abs(a).max())
            for a, b in zip(logits["first"], first, strict=True)
        )
        found[name] |= {"logits_differ": worst, "tokens_chosen": [int(r.argmax()) for r in first]}

    logits: dict[str, list[np.ndarray[Any, Any]]] = {}
    ask("cold", step, read=False, store=False)
    ask("cold_again", step, read=False, store=False)
    ask("cold_longer_steps", 4 * step, read=False, store=False)
    ask("stored", step)
    if not bench.store.flush(300):
        raise RuntimeError("the writer is still at work")
    ask("restored", step, store=False)
    engine.call(lambda worker: setattr(worker, "observe", None))
    bench.result["long"] = found


def run(bench: Bench) -> None:
    options = bench.options
    settings = EngineOptions(block_tokens=options.block_tokens, step=options.step)
    budget = 2 * options.tokens * (4096 if options.tiny else 160_000)
    prefill: float | None = None
    with Engine(bench.store, "random", options=settings) as engine:
        bench.result["step"] = engine.call(lambda worker: worker.step)
        bench.result["load_s"] = round(engine.call(lambda worker: worker.loaded.load_seconds), 1)
        with bench.section("cold"):
            prefill = cold(bench, engine)
        with bench.section("store"):
            stats = bench.keep(engine, bench.prompt)
            bench.result["prefill_while_storing_ms"] = round(stats.prefill_ms, 1)
            # Another prompt: the host's memory was locked by the first one.
            stats = bench.keep(engine, bench.prompt[::-1])
            bench.result["prefill_while_storing_again_ms"] = round(stats.prefill_ms, 1)
        with bench.section("disk"):
            tiers(bench.store, engine, 0)
            disk = restores(bench, engine, "disk", ram=False)
            if prefill is not None:
                bench.ratio("disk_faster", prefill / disk, 2)
        with bench.section("ram"):
            tiers(bench.store, engine, budget)
            ram = restores(bench, engine, "ram", ram=True)
            if prefill is not None:
                bench.ratio("ram_faster", prefill / ram, 50)
        with bench.section("full skip"):
            tiers(bench.store, engine, 0)
            first_tokens(bench, engine)
        with bench.section("pieces"):
            routes(bench, engine)
        with bench.section("views"):
            views(bench, engine)
        if options.long:
            with bench.section("long"):
                long_prompt(bench, engine, options.long, engine.call(lambda worker: worker.step))
    # MLX's CUDA kernels have no quantised product for most lengths: whole steps, then one token.
    bench.prompt = [*bench.prompt, 1]
    for bits in () if options.plain else (8, 4):
        with bench.section(f"{bits} bits"):
            model_options = ModelOptions(kv_bits=bits, kv_group_size=64)
            with Engine(
                bench.store, "random", model_options=model_options, options=settings
            ) as engine:
                tiers(bench.store, engine, 0)
                bench.ask(engine, bench.prompt, read=False, store=False)
                stats = bench.keep(engine, bench.prompt)
                bench.result[f"q{bits}_prefill_while_storing_ms"] = round(stats.prefill_ms, 1)
                quantised = restores(bench, engine, f"q{bits}", ram=False)
                if prefill is not None:
                    bench.ratio(f"q{bits}_faster", prefill / quantised, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-tokens", type=int, default=256)
    parser.add_argument("--long", type=int, default=0, help="tokens of a further, long prompt")
    parser.add_argument("--step", type=int, help="default: the device's")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--ahead", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the store is made and removed")
    parser.add_argument("--plain", action="store_true", help="without quantised caches")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.tokens = min(options.tokens, 512)
    began = time.perf_counter()
    blas.preload()
    import mlx.core as mx

    from engine import mlxlm

    if options.tiny and mlxlm.host_memory():  # the code of a device that is not here
        mlxlm.host_memory = lambda: False
        mlxlm.device_bytes = lambda: 1 << 30
    use_random_weights(TINY if options.tiny else LLAMA_8B, "bfloat16")
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        kvdb.open(
            Path(folder) / "store",
            max_bytes=(1 if options.tiny else 45) << 30,
            min_free_bytes=0,
            queue_bytes=20 << 30,
            ram=1 << 30,
            read_workers=options.workers,
            read_ahead=options.ahead,
        ) as store,
    ):
        bench = Bench(options, store)
        bench.result |= {
            "device": str(mx.default_device()),
            "info": {name: str(value) for name, value in mx.device_info().items()},
            "mlx": mx.__version__,
            "cores": os.cpu_count(),
        }
        run(bench)
        bench.result["seconds"] = round(time.perf_counter() - began, 1)
        json.dump(bench.result, sys.stdout, indent=2)
        print()


if __name__ == "__main__":
    main()
