"""The table model × boundary × mode: stored, everything closed, opened again, restored, compared
with a cold run, and once more with damaged memory, which the comparison must notice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_model import Run, difference, prompt_tokens, run
from zoo import SPECIES, VOCABULARY, write_species

import kvdb
from engine import Engine, EngineOptions, ModelOptions
from engine.storage import Read, Storage
from kvdb.store import Store

BLOCK, STEP = 16, 32
RAM = 1 << 26
LENGTH = 75
PROMPT = prompt_tokens(LENGTH)
MODES = ("max", "exact")


def other(tokens: list[int], count: int) -> list[int]:
    """``count`` tokens that differ from ``tokens`` everywhere."""
    return [(tokens[i % len(tokens)] + 1) % (VOCABULARY - 1) for i in range(count)]


@dataclass(frozen=True)
class Case:
    """What one request stores (``stored``, with ``boundaries``, generating ``generated`` tokens)
    and how many tokens of it the next one, PROMPT, begins with."""

    name: str
    stored: list[int]
    common: int
    boundaries: tuple[int, ...] = ()
    hole: int | None = None


def diverging(at: int, length: int = LENGTH) -> list[int]:
    return [*PROMPT[:at], *other(PROMPT[at:], length - at)]


CASES = (
    Case("block end", PROMPT[:48], 48),
    Case("block end - 1", PROMPT[:47], 47),
    Case("block end + 1", PROMPT[:49], 49),
    Case("inside a block", diverging(56), 56),
    Case("inside the window", diverging(24, 34), 24),
    Case("before the window", diverging(30, 110), 30),
    Case("at a state boundary", diverging(53), 53, boundaries=(53,)),
    Case("last token", PROMPT[:-1], LENGTH - 1),
    Case("another last token", diverging(LENGTH - 1), LENGTH - 1),
    Case("whole prompt", PROMPT, LENGTH),
    Case("a hole", PROMPT, LENGTH, hole=1),
)


@dataclass(frozen=True)
class Row:
    """One line of the table. ``apart``, ``ram_apart`` and ``twin_apart`` are the largest
    differences of logits from the cold run's, relative to the largest of them: of the run restored
    from disk, of the one restored ``from_ram`` alone, and of the damaged one."""

    species: str
    case: str
    mode: str
    restored: int
    refilled: int
    skip: str
    apart: float
    ram_apart: float
    from_ram: bool
    twin_apart: float

    @property
    def limit(self) -> float:
        """What DESIGN allows. A value near a border of the quantiser may fall on its other side."""
        if self.mode == "exact":
            return 0.0
        return 1e-3 if SPECIES[self.species].options else 1e-4


class Damaging(Storage):
    """A store whose reads come back with the last block or state of each part zeroed: what a
    checksum that nobody checks would let through."""

    def __init__(self, inner: Storage, only: str | None = None) -> None:
        super().__init__(inner.store, inner.namespace, inner.build)
        self.only = only

    def read(self, match: Any, wants: Any) -> Read:
        result = super().read(match, wants)
        for want in wants:
            if self.only not in (None, want.part):
                continue
            spec = match.namespace.layout.by_name[want.part]
            ends = [match.blocks[i].end for i in want.blocks]
            ends += [match.shared.block.start + want.shared_tokens] if want.shared_tokens else []
            end = max(ends, default=0) - want.start
            for layer in want.buffers:
                for tensor, array in zip(spec.tensors, layer, strict=True):
                    if tensor.token_axis is None:
                        array[...] = 0
                    else:
                        array[:, :, max(0, end - BLOCK) : end] = 0
        return result


def use_space(engine: Engine, store: Store, number: int) -> Any:
    """Let the engine work in a key space of its own; returns the namespace."""

    def change(worker: Any) -> Any:
        namespace = store.namespace(
            worker.loaded.identity,
            worker.layout,
            block_tokens=BLOCK,
            salt=number.to_bytes(4, "little"),
        )
        build = store.build(namespace, "the build of this test", worker.description)
        worker.storage = Storage(store, namespace, build)
        return namespace

    return engine.call(change)


def make_hole(store: Store, namespace: Any, block: int) -> None:
    """Take a block's payload away, as damage does."""
    from kvdb.reader import Damaged

    match = store.match(namespace, PROMPT, share_tail=False)
    for name in match.blocks[block].parts:
        location = store.locate([match.blocks[block].id]).get((match.blocks[block].id, name))
        if location is not None:
            store.report_damage(location, Damaged("on purpose"))


def open_engine(store: Store | None, model: Path, species: str) -> Engine:
    options = ModelOptions(**SPECIES[species].options)
    return Engine(store, str(model), model_options=options, options=EngineOptions(BLOCK, STEP))


def apart(cold: Run, other: Run) -> float:
    """Difference from the cold run. A full skip's first logits are stored ones: the state behind
    them shows in the next."""
    first = 1 if other.stats.skip == "full" else 0
    return difference(cold.logits[first:], other.logits[first:])


def rows(folder: Path, species: str, mode: str, cases: tuple[Case, ...] = CASES) -> Iterator[Row]:
    """The rows of one model in one mode."""
    model = write_species(folder / "model", species)
    options: dict[str, Any] = {"reuse": mode, "max_tokens": 4, "ignore_eos": True}
    with open_engine(None, model, species) as engine:
        cold = run(engine, PROMPT, **options)
    path = folder / "store"
    with kvdb.open(path, min_free_bytes=0) as store, open_engine(store, model, species) as engine:
        for number, case in enumerate(cases):
            namespace = use_space(engine, store, number)
            keep = {**options, "max_tokens": 1, "boundaries": case.boundaries}
            run(engine, case.stored, **keep)
            if case.hole is not None:
                make_hole(store, namespace, case.hole)
    # As after a restart: nothing is left but what lies on the disk.
    with (
        kvdb.open(path, min_free_bytes=0, ram=RAM) as store,
        open_engine(store, model, species) as engine,
    ):
        for number, case in enumerate(cases):
            use_space(engine, store, number)
            warm = run(engine, PROMPT, store=False, **options)
            again = run(engine, PROMPT, store=False, **options)
            engine.call(lambda worker: setattr(worker, "storage", Damaging(worker.storage)))
            twin = run(engine, PROMPT, store=False, **options)
            stats = warm.stats
            yield Row(
                species,
                case.name,
                mode,
                stats.restored_tokens,
                stats.refilled_tokens,
                stats.skip,
                difference(cold.logits, warm.logits),
                difference(cold.logits, again.logits),
                again.stats.bytes_read == 0,
                apart(cold, twin),
            )


def document(every: list[Row]) -> str:
    """docs/cache_kinds.md: what is deterministic of the rows."""
    lines = [
        "# Cache kinds: what is restored, and that it is equal",
        "",
        "Written by `KVDB_WRITE_DOCS=1 pytest tests/engine/test_cache_table.py`; the same test "
        "fails when this page is not what it finds.",
        "",
        f"Tiny random models of mlx-lm's own architectures, blocks of {BLOCK} tokens, steps of "
        f"{STEP}, a prompt of {LENGTH} tokens. One request stores a beginning of it, engine and "
        "store are closed and opened again, and the prompt is asked: the numbers are the tokens "
        "restored (+ those refilled) of it. In every row the logits of all steps equal those of a "
        "cold run, bit for bit in `exact` mode, within 1e-4 of the largest in `max` mode (1e-3 "
        "with a quantised cache), and in every row that restores anything, the same run with one "
        "restored block or state zeroed in memory is told apart. All of it holds for the first "
        "restore, from disk, and for a second one, from the RAM tier alone.",
        "",
        "A recurrent layer's state is stored at boundaries only: before and behind a prompt's last "
        "token, at the end of its messages, where work was cut short, every stride; in `exact` "
        "mode at block ends and prompt ends. So less of a prompt that diverges elsewhere is "
        "restored, and a hole costs what lies between two states. Far behind a sequence's end "
        "states and window parts thin out (`kvdb/thinning.py`): of states four stay for each "
        "doubling of the distance, of places where a window is whole sixteen.",
        "",
    ]
    names = [case.name for case in CASES]
    for mode in MODES:
        lines += [f'## `reuse="{mode}"`', ""]
        lines += ["| model | cache classes | " + " | ".join(names) + " |"]
        lines += ["| --- | --- |" + " ---: |" * len(names)]
        for species, about in SPECIES.items():
            found = {row.case: row for row in every if (row.species, row.mode) == (species, mode)}
            cells = [
                f"{row.restored}" + (f" + {row.refilled}" if row.refilled else "")
                for row in (found[name] for name in names)
            ]
            lines.append(f"| {species} | {', '.join(about.classes)} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)
