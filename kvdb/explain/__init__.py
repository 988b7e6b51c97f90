"""Why did a prompt not hit? Compares it with what the store holds and remembers.

Needs no model: token ids come in, and a decoder for them where texts are to be shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvdb.errors import UsageError
from kvdb.explain.explanation import Explanation

if TYPE_CHECKING:
    from kvdb.match import Namespace
    from kvdb.store import Store, TokenIds

__all__ = ["Explanation", "explain_request", "explain_tokens"]

Decode = Callable[[Sequence[int]], str]


def explain_tokens(
    store: Store,
    namespace: Namespace,
    tokens: TokenIds,
    *,
    segments: Sequence[Any] | None = None,
    text: Decode | None = None,
) -> Explanation:
    """Explain what a prompt of ``tokens`` would hit now. ``segments`` are its parts, as in
    ``requests.segments``; ``text`` decodes token ids. Raises UsageError for ids that are none."""
    match = store.match(namespace, tokens)
    hits = match.live_prefix_tokens + (match.shared.token_count if match.shared else 0)
    reason = match.miss_reason
    return Explanation(
        prompt_tokens=len(match.tokens),
        hit_tokens=hits,
        code=reason or "hit",
        diagnosis="All of the prompt is stored." if reason is None else f"The match says {reason}.",
        advice="",
        differing_token=None if reason is None else hits,
    )


def explain_request(store: Store, request_id: int, text: Decode | None = None) -> Explanation:
    """Explain a past request from history. Raises UsageError when there is none of that id."""
    with store.database.read() as connection:
        row = connection.execute(
            "SELECT prompt_tokens, restored_tokens, miss_reason FROM requests WHERE id = ?",
            (request_id,),
        ).fetchone()
    if row is None:
        raise UsageError(f"There is no request {request_id} in the store's history.")
    prompt, restored, reason = row
    return Explanation(
        prompt_tokens=prompt,
        hit_tokens=restored,
        code=reason or "hit",
        diagnosis="All of it was stored." if reason is None else f"Its row says {reason}.",
        advice="",
    )
