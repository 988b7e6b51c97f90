"""``usage.kvdb``: what the cache did for a request, in one shape for all dialects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.events import Hold, Stats
    from kvdb.segments import Segment


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request: the prompt counts once, whatever the number of answers."""

    prompt: int
    cached: int
    generated: int
    kvdb: dict[str, Any]
    holds: tuple[Hold, ...] = ()


def usage_of(stats: Sequence[Stats], segments: Sequence[Segment] = ()) -> Usage:
    """The usage of a request whose answers ended with ``stats``, the first one first."""
    first = stats[0]
    generated = sum(each.generated_tokens for each in stats)
    told = _kvdb(first, segments)
    return Usage(first.prompt_tokens, first.restored_tokens, generated, told, first.holds)


def usage_of_all(usages: Sequence[Usage]) -> Usage:
    """The sum of several requests' usage; what the cache did is told for each."""
    if len(usages) == 1:
        return usages[0]
    return Usage(
        sum(usage.prompt for usage in usages),
        sum(usage.cached for usage in usages),
        sum(usage.generated for usage in usages),
        {"requests": [usage.kvdb for usage in usages]},
    )


def _kvdb(stats: Stats, segments: Sequence[Segment]) -> dict[str, Any]:
    times = {
        "load": stats.load_ms,
        "warmup": stats.warmup_ms,
        "queued": stats.queued_ms,
        "lookup": stats.lookup_ms,
        "restore": stats.restore_ms,
        "prefill": stats.prefill_ms,
        "first_token": stats.ttft_ms,
        "total": stats.total_ms,
    }
    found: dict[str, Any] = {
        "skip": stats.skip,
        "restored_tokens": stats.restored_tokens,
        "refilled_tokens": stats.refilled_tokens,
        "masked_tokens": stats.masked_tokens,
        "computed_tokens": stats.computed_tokens,
        "ms": {key: None if ms is None else round(ms, 2) for key, ms in times.items()},
    }
    for key in ("miss_reason", "unmasked", "kl"):
        if (value := getattr(stats, key)) is not None:
            found[key] = value
    if stats.matched_tokens < stats.prompt_tokens:
        found["diverged_at"] = {"token": stats.matched_tokens}
        if (where := _title(segments, stats.matched_tokens)) is not None:
            found["diverged_at"]["message"] = where
    if stats.held:
        found["held"] = True
    if stats.holds:
        found["marks"] = [asdict(hold) for hold in stats.holds]
    return found


def _title(segments: Sequence[Segment], token: int) -> str | None:
    """What people call the part of the prompt that ``token`` lies in."""
    tools = sum(segment.kind == "tool" for segment in segments)
    return next((part.title(tools) for part in segments if token < part.end), None)
