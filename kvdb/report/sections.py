"""What the page says: each section a heading, sentences with the numbers, and a figure or table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvdb.driver import Connection
from kvdb.functions import human_bytes
from kvdb.report import figures, words
from kvdb.report.blocks import AGES, HeldBlocks, Ints
from kvdb.report.figures import Figure
from kvdb.report.history import DAY_US, HOUR_US, History, Scope, Use
from kvdb.report.losses import REASONS, Evicted
from kvdb.report.misses import Miss
from kvdb.report.tree import Beginning, PrefixTree, Run

MOST_ROWS = 12
MOST_PREFIXES = 10


@dataclass(frozen=True, slots=True)
class Table:
    """Cells are plain text; the columns in ``numbers`` stand to the right."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Card:
    """One thing of a list: its number, facts about it, sentences, and texts to compare."""

    value: str
    facts: Sequence[str]
    sentences: Sequence[str]
    texts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Section:
    """``figure`` needs ``described``: what it shows, for whoever cannot see it. ``bars`` are
    (name, value, text at the bar), where they are not in the figure."""

    title: str
    sentences: Sequence[str]
    figure: Figure | None = None
    described: str = ""
    table: Table | None = None
    cards: Sequence[Card] = ()
    note: str = ""
    bars: Sequence[tuple[str, float, str]] = ()


@dataclass(frozen=True, slots=True)
class Tile:
    """One number at the head of the page."""

    value: str
    meaning: str


@dataclass(frozen=True, slots=True)
class NamespaceSize:
    """A namespace and what it holds now."""

    id: int
    model: str
    tenant: str
    live_blocks: int
    live_bytes: int


NAMESPACES = (
    "SELECT id, model, tenant, live_blocks, live_bytes FROM namespaces "
    "WHERE ?1 IS NULL OR id = ?1 ORDER BY id"
)


NO_REQUESTS = Section("Requests", ["The history holds no request that fits."])


def read_namespaces(connection: Connection, scope: Scope) -> list[NamespaceSize]:
    rows = connection.execute(NAMESPACES, (scope.namespace_id,))
    return [NamespaceSize(*row) for row in rows]


def head_tiles(history: History | None, blocks: int, used_bytes: int) -> list[Tile]:
    """The numbers at the head of a page; ``blocks`` are held, ``used_bytes`` on the disk."""
    tiles = []
    if history is not None:
        use = history.total
        tiles = [
            Tile(words.percent(use.hit_ratio), "of prompt tokens came from the store"),
            Tile(words.amount(use.restored_tokens), "tokens not computed again"),
            Tile(words.amount(use.requests), "requests"),
        ]
        if history.measured:
            tiles.insert(2, Tile(words.duration(use.seconds_saved), "saved"))
    return [*tiles, Tile(human_bytes(used_bytes), f"on disk, {words.plural(blocks, 'block')}")]


def tokens_section(history: History) -> Section:
    total = history.total
    return Section(
        "Tokens saved",
        [
            f"Of {words.plural(total.prompt_tokens, 'prompt token')}, "
            f"{words.amount(total.restored_tokens)} ({words.percent(total.hit_ratio)}) were "
            "restored from the store instead of being computed. "
            f"{_of(total.full_skips, total.requests)} needed no forward pass at all."
        ],
        figures.tokens_over_time(history),
        f"Bars: prompt tokens restored and computed, by {_period(history)}.",
    )


def seconds_section(history: History) -> Section:
    total = history.total
    title = "Time saved"
    if total.restored_tokens == 0:
        return Section(title, ["Nothing was restored, so no time was saved."])
    if not history.measured:
        sentence = "How long computing would have taken is not known: no request of these models "
        return Section(title, [sentence + "computed as many as 16 tokens yet."])
    unmeasured = ""
    if total.unmeasured_tokens:
        unmeasured = (
            f" {words.plural(total.unmeasured_tokens, 'token')} of models whose speed was never "
            "measured are not counted."
        )
    saved = words.duration(abs(total.seconds_saved))
    sentence = f"Computing the restored tokens would have taken {saved} longer than restoring them."
    if total.seconds_saved < 0:
        sentence = (
            f"Restoring took {saved} longer than computing would have: the store is too slow."
        )
    return Section(
        title,
        [sentence],
        figures.seconds_over_time(history),
        f"Bars: seconds saved, by {_period(history)}.",
        note="Restored tokens at each model's measured prefill speed, less the time that restoring "
        "them took." + unmeasured,
    )


def tenants_section(history: History) -> Section:
    ranked = sorted(history.tenants.items(), key=lambda item: -item[1].prompt_tokens)
    rows = [_tenant_row(name or "(no tenant)", use) for name, use in ranked[:MOST_ROWS]]
    sentences = [
        "The share of each tenant's prompt tokens that were restored, those who ask most first."
    ]
    if rest := ranked[MOST_ROWS:]:
        others = Use()
        for _, use in rest:
            others.add(use)
        rows.append(_tenant_row(f"{len(rest):,} others", others))
    return Section(
        "Hit ratio by tenant", sentences, figures.hit_ratios(rows), "Bars: hit ratio by tenant."
    )


def _tenant_row(name: str, use: Use) -> tuple[str, float, str]:
    text = f"{words.percent(use.hit_ratio)} of {words.amount(use.prompt_tokens)} tokens"
    return name, use.hit_ratio, text


def capacity_section(
    namespaces: Sequence[NamespaceSize], used_bytes: int, max_bytes: int
) -> Section:
    rows = capacity_rows(namespaces)
    sentences = [
        f"The store takes {human_bytes(used_bytes)} on the disk; its limit is "
        f"{human_bytes(max_bytes)} ({words.percent(used_bytes / max_bytes)} of it is used)."
    ]
    if not rows:
        return Section("Capacity", [*sentences, "It holds no blocks."])
    return Section(
        "Capacity by namespace",
        sentences,
        figures.capacity(rows),
        "Bars: bytes of state by namespace.",
        note="A namespace is one model with one layout of its state; bars show the state itself, "
        "without the index.",
    )


def capacity_rows(namespaces: Sequence[NamespaceSize]) -> list[tuple[str, int, str]]:
    """(name, bytes, both in words) of the namespaces that hold most, and of the rest together."""
    held = sorted((n for n in namespaces if n.live_bytes), key=lambda n: -n.live_bytes)
    rows = [
        (namespace_name(n), n.live_bytes, f"{human_bytes(n.live_bytes)}, {_blocks(n.live_blocks)}")
        for n in held[:MOST_ROWS]
    ]
    if rest := held[MOST_ROWS:]:
        nbytes = sum(n.live_bytes for n in rest)
        blocks = sum(n.live_blocks for n in rest)
        rows.append((f"{len(rest):,} others", nbytes, f"{human_bytes(nbytes)}, {_blocks(blocks)}"))
    return rows


def namespace_name(namespace: NamespaceSize) -> str:
    """Several namespaces may be of one model; the number is the one that SQL knows."""
    tenant = f", {namespace.tenant}" if namespace.tenant else ""
    return f"#{namespace.id} {namespace.model or 'model without a name'}{tenant}"


def blocks_section(blocks: HeldBlocks, counts: Ints) -> Section:
    never = int(counts[:, 0].sum())
    old = int(counts[len(AGES) - 2 :, 0].sum())
    sentences = [
        f"Of {words.plural(len(blocks), 'block')}, {words.amount(never)} "
        f"({words.percent(never / len(blocks))}) were never used again after they were stored"
        + (f", {words.amount(old)} of them older than a week." if old else ".")
    ]
    note = "Age since a block was stored; a use is a request that restored it."
    if not blocks.complete:
        note += f" Only the oldest {words.amount(len(blocks))} blocks were looked at."
    return Section(
        "Age and heat of blocks",
        sentences,
        figures.age_and_heat(counts),
        "Bars: blocks by age, coloured by how often they were used.",
        note=note,
    )


def tree_section(
    tree: PrefixTree, names: Mapping[int, str], beginnings: Mapping[int, Beginning]
) -> Section:
    sentences = [
        "From left to right: how stored prompts begin, and where they part. The taller a box, the "
        "more tokens are stored in it and behind it; the redder, the more often it was used."
    ]
    return Section(
        "What prompts have in common",
        sentences,
        figures.icicle(tree, names, beginnings),
        "The tree of stored prefixes.",
        prefix_table((box for box in tree.boxes if box.hits), names, beginnings),
        note=_left_out(tree),
    )


def _left_out(tree: PrefixTree) -> str:
    if not tree.rests:
        return "All stored prefixes are drawn."
    branches = sum(rest.branches for rest in tree.rests)
    tokens = sum(rest.tokens for rest in tree.rests)
    return (
        f"Drawn are the heaviest {len(tree.boxes):,} pieces. Left out: {branches:,} lighter or "
        f"deeper {'branch' if branches == 1 else 'branches'}, {words.amount(tokens)} of "
        f"{words.plural(tree.tokens, 'token')} ({words.percent(tokens / tree.tokens)})."
    )


def prefix_table(
    runs: Iterable[Run],
    names: Mapping[int, str],
    beginnings: Mapping[int, Beginning],
    reaches: Mapping[int, str] | None = None,
) -> Table | None:
    """The runs used most: what they spare is their tokens, as often as they were used. ``reaches``
    says in which part of a prompt they end, by their numbers, for a column of its own."""
    used = sorted(
        (run for run in runs if run.number in beginnings),
        key=lambda run: (-run.hits * (run.end - run.start), run.start - run.end),
    )[:MOST_PREFIXES]
    columns: dict[str, list[str]] = {
        "Model": [names.get(run.namespace_id, "(gone)") for run in used],
        "Tokens": [f"{run.start:,} to {run.end:,}" for run in used],
        "Used": [f"{run.hits:,}×" for run in used],
    }
    if reaches is not None:
        columns["Reaches into"] = [reaches.get(run.number, "") for run in used]
    texts = [_beginning(run, beginnings) for run in used]
    if any(texts):  # else no tokenizer is known
        columns["Begins with"] = texts
    columns["First block"] = [beginnings[run.number].hash[:12] for run in used]
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    return Table(list(columns), rows, frozenset({1, 2})) if rows else None


def _beginning(run: Run, beginnings: Mapping[int, Beginning]) -> str:
    text = beginnings[run.number].text or ""
    return f"… {text}" if text and run.start else text


def evictions_section(rows: Sequence[Evicted]) -> Section:
    if not rows:
        return Section("Blocks that left", ["Nothing was evicted."])
    by_reason: dict[str, int] = {}
    for row in rows:
        by_reason[row.reason] = by_reason.get(row.reason, 0) + row.blocks
    ranked = sorted(by_reason.items(), key=lambda item: -item[1])
    total = words.plural(sum(by_reason.values()), "block")
    counts = [
        f"{'all' if len(ranked) == 1 else words.amount(count)} {REASONS.get(reason, reason)}"
        for reason, count in ranked
    ]
    sentence = f"{total} left the store: {', '.join(counts)}."
    return Section(
        "Blocks that left",
        [sentence],
        figures.evictions(rows),
        "Bars: blocks evicted by reason, by day.",
    )


def wear_section(days: Mapping[int, int]) -> Section:
    if not days:
        return Section("Wear", ["Nothing was written."])
    total = sum(days.values())
    return Section(
        "Wear: what was written to the disk",
        [
            f"{human_bytes(total)} on {words.plural(len(days), 'day')}, "
            f"{human_bytes(max(days.values()))} on the busiest."
        ],
        figures.wear(days),
        "Bars: bytes written, by day.",
    )


def misses_section(misses: Sequence[Miss], names: Mapping[int, str]) -> Section:
    title = "The costliest misses"
    if not misses:
        return Section(title, ["No request missed."])
    return Section(
        title,
        [
            "What had to be computed because it was not, or no longer, stored: the misses that "
            "took longest, each with its reason and what would help."
        ],
        cards=[_miss_card(miss, names) for miss in misses],
    )


def _miss_card(miss: Miss, names: Mapping[int, str]) -> Card:
    times = "once" if miss.requests == 1 else f"{miss.requests:,} times"
    last = "" if miss.requests == 1 else "last "
    facts = [
        f"{words.plural(miss.computed_tokens, 'token')} computed, {times}",
        f"tenant {miss.tenant or '(none)'}",
        f"model {names.get(miss.namespace_id or 0, '(gone)')}",
        f"{last}at {words.moment(miss.latest_us)}",
    ]
    explanation = miss.explanation
    if explanation is None:
        return Card(words.duration(miss.seconds), facts, [f"The history says: {miss.reason}."])
    facts.append(f"explained by request {miss.request_id}")
    where = f" It stops in {explanation.where}." if explanation.where else ""
    texts = {"stored": explanation.stored_text, "asked": explanation.prompt_text}
    return Card(
        words.duration(miss.seconds),
        facts,
        [text for text in (explanation.diagnosis + where, explanation.advice) if text],
        {name: text for name, text in texts.items() if text},
    )


def _of(count: int, total: int) -> str:
    return f"{words.amount(count) if count else 'None'} of {words.plural(total, 'request')}"


def _blocks(count: int) -> str:
    return words.plural(count, "block")


def _period(history: History) -> str:
    return {HOUR_US: "hour", DAY_US: "day"}.get(history.period_us, "week")
