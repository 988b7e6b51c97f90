"""Every cause in a sentence, and what to do about it in another."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple


class Words(NamedTuple):
    diagnosis: str
    advice: str


NOTHING_TO_DO = "Nothing needs to change: what is computed now is stored for the next time."
KEEP_FRONT_STABLE = "Keep what changes out of the front of the prompt: put it in the last message."

CAUSES: Mapping[str, Words] = {
    "hit": Words("All of the prompt is stored.", ""),
    "empty_store": Words("The store was empty.", NOTHING_TO_DO),
    "new_namespace": Words("Nothing was stored for this model with these settings.", NOTHING_TO_DO),
    "unrelated": Words(
        "No stored prompt begins like this one.",
        "Start prompts that have something in common with the same text.",
    ),
    "new_content": Words(
        "From here on the prompt is new: everything before it is stored.", NOTHING_TO_DO
    ),
    "tools_reordered": Words(
        "The same {count} tools come in another order.",
        "Send the tools in a fixed order, for example sorted by name.",
    ),
    "tools_added": Words(
        "{added} more tool(s) than in the stored prompt.",
        "Send the same list of tools in every request of a conversation, new ones last.",
    ),
    "tools_removed": Words(
        "{removed} tool(s) of the stored prompt were left out.",
        "Send the same list of tools in every request of a conversation.",
    ),
    "tools_changed": Words(
        "The list of tools is another one: {added} new, {removed} gone.",
        "Send the same list of tools in every request of a conversation.",
    ),
    "tool_changed": Words(
        "The definition of a tool changed.",
        "Keep tool definitions constant; what varies belongs in a message.",
    ),
    "keys_reordered": Words(
        "The same JSON was written with its keys in another order.",
        "Serialise JSON with sorted keys.",
    ),
    "timestamp": Words(
        "A date or time differs from that of the stored prompt.",
        "Move the time to the end of the prompt, or round it to what is needed.",
    ),
    "unique_id": Words(
        "An id or number differs from that of the stored prompt.",
        "Move ids and counters to the end of the prompt, or leave them out.",
    ),
    "whitespace": Words(
        "Only whitespace differs.",
        "Build the text in one place, so that spaces and line ends come out the same.",
    ),
    "rerendered": Words(
        "The same content was rendered to other text: the chat template writes it in another way "
        "now, for example without its reasoning.",
        "Send messages back as they came, reasoning included, and keep the template's options "
        "constant; some templates drop earlier reasoning whatever is sent.",
    ),
    "retokenized": Words(
        "The text is the same, but its tokens are not those that the model had generated.",
        "Send token ids back instead of text where the API allows it.",
    ),
    "answer_changed": Words(
        "The answer in the prompt is not the one that the model gave.",
        "Send the model's answers back unchanged.",
    ),
    "template_changed": Words(
        "The chat template itself wrote other text here.",
        "Keep the template and its options constant, and give a system prompt of your own.",
    ),
    "messages_dropped": Words(
        "{count} earlier message(s) were left out, so all that follows moved.",
        "Shorten a conversation seldom and by a lot, or replace old messages by a summary once.",
    ),
    "messages_inserted": Words(
        "{count} message(s) were inserted before ones that are stored.",
        "Append messages at the end of the conversation.",
    ),
    "system_changed": Words("The system prompt is another one.", KEEP_FRONT_STABLE),
    "message_changed": Words(
        "An earlier message is another one.", "Do not edit messages that were sent before."
    ),
    "text_changed": Words("The text is another one from here on.", KEEP_FRONT_STABLE),
    "evicted": Words(
        "It was stored and evicted {when}{why}.",
        "{remedy}",
    ),
    "expired": Words(
        "It was held until {held} expired, and was then evicted {when}.",
        "Give the name or pin a longer life (--ttl), or renew it.",
    ),
    "damaged": Words(
        "It was stored, and found damaged {when}{detail}.",
        "Run kvdb verify --data to see whether more is damaged; check the disk.",
    ),
    "missing": Words(
        "It was stored, and its file was gone {when}.",
        "Do not remove files of the store; kvdb verify finds what else is gone.",
    ),
    "inexact": Words(
        "State is there, but may not be used: in exact mode as it was computed in other steps or "
        "by another build, else as its build computes something else.",
        "Use reuse = max, or keep to exact mode from the first request on.",
    ),
    "no_boundary": Words(
        "The first {stored} tokens are stored, but of sliding or recurrent layers nothing is that "
        "lets them go on behind token {reach}.",
        "Let prompts part where a message ends, or name the place as a boundary in the first one: "
        "such layers keep their state there.",
    ),
    "not_stored": Words(
        "Request {request} began with the same {count} tokens, but its state was not kept: {why}.",
        "{remedy}",
    ),
    "tokens_gone": Words(
        "The tokens of this request are no longer in the store; its row says: {reason}.", ""
    ),
    "other_model": Words("It is stored for {other}.", "Use the same model files for both."),
    "other_config": Words("It is stored for {other}.", "Use one config.json for both."),
    "other_adapter": Words("It is stored for {other}.", "Use the same adapter for both."),
    "other_kv_bits": Words("It is stored for {other}.", "Use one --kv-bits for both."),
    "other_block_size": Words("It is stored in {other}.", "Use one block_tokens for both."),
    "other_salt": Words(
        "It is stored for {other}.", "Tenants with salts of their own share nothing, on purpose."
    ),
    "other_build": Words(
        "It is stored for {other}, whose state is not the same.",
        "Nothing needs to change: another build computes its own state once.",
    ),
}

# Why a block was evicted, and what helps.
EVICTED: Mapping[str, tuple[str, str]] = {
    "limit": (
        ", because the store was full",
        "Give the store more room (max_bytes), or pin the prefix with kvdb pin.",
    ),
    "quota": (
        ", because its quota was used up",
        "Raise the quota (kvdb quota), or pin the prefix with kvdb pin.",
    ),
    "manual": (" by hand", "Pin what must stay with kvdb pin."),
    "replaced": (", because other state took its place", NOTHING_TO_DO),
    "forgotten": (
        "; why is no longer known",
        "Pin the prefix with kvdb pin, or keep a longer history (history_evictions).",
    ),
}

# What a request had of a remote, by requests.remote_decision.
REMOTE: Mapping[str, str] = {
    "loaded": "{tokens:,} tokens came from {name} ({nbytes:,} bytes){estimates}.",
    "recomputed": "{name} has more of it, but computing was estimated to be faster{estimates}.",
    "absent": "{name} had nothing more of it.",
    "late": "{name} did not answer within its budget.",
    "down": "{name} was not asked: it had failed before; kvdb remotes status says how.",
    "failed": "What {name} was to give did not come, or was wrong: it was computed.",
}

UNSTORED: Mapping[str, tuple[str, str]] = {
    "store_off": ("it was asked not to store (store=False)", "Let such requests store."),
    "cancelled": (
        "it was cancelled before it got so far",
        "Nothing needs to change: what was computed by then is stored.",
    ),
    "approximate": (
        "it was an approximate skip, and what is computed over masked blocks is not stored",
        "Send such prompts without approximate.",
    ),
    "too_large": (
        "a block of it is larger than the store takes",
        "Raise max_bytes: a block may take a quarter of it.",
    ),
    "queue_full": (
        "the disk was slower than the model, and the writer's queue was full",
        "Raise queue_bytes, or use a faster disk.",
    ),
    "limit": ("the store was full of what is held", "Raise max_bytes, or unpin something."),
    "quota": ("its quota was full of what is held", "Raise the quota, or unpin something."),
    "disk_full": ("the disk was full", "Free some disk, or lower min_free_bytes."),
    "wal_pinned": ("a reader kept the index's log from being cut", "kvdb doctor names the reader."),
}


def words(code: str, facts: Mapping[str, object]) -> Words:
    """Diagnosis and advice of a cause, filled in."""
    diagnosis, advice = CAUSES[code]
    return Words(diagnosis.format(**facts), advice.format(**facts))


def remote_words(
    name: str,
    decision: str,
    tokens: int,
    nbytes: int,
    load_ms: float | None,
    compute_ms: float | None,
) -> str:
    """What a request had of a remote, in a sentence."""
    estimates = ""
    if load_ms is not None and compute_ms is not None:
        estimates = f": {load_ms:,.0f} ms to load, {compute_ms:,.0f} ms to compute"
    return REMOTE[decision].format(name=name, tokens=tokens, nbytes=nbytes, estimates=estimates)


def why_unstored(reason: str | None) -> tuple[str, str]:
    """Why a request's state was not kept, and what helps."""
    if reason is None:
        return "it was dropped, or the process ended first", "Close the store before you exit."
    known = UNSTORED.get(reason)
    return known or (f"the writer dropped it ({reason})", "kvdb doctor may say more.")


def why_evicted(reason: str) -> tuple[str, str]:
    """Why a block was evicted, and what helps."""
    return EVICTED.get(reason) or (f" ({reason})", EVICTED["forgotten"][1])


def at_time(us: int | None) -> str:
    """``at 2026-11-30 10:22:01 UTC``, from Unix µs."""
    if us is None:
        return "some time ago"
    return f"at {datetime.fromtimestamp(us / 1e6, UTC):%Y-%m-%d %H:%M:%S} UTC"
