"""Why did a prompt not hit? Compares it with what the store holds and remembers.

Needs no model: token ids come in, and a decoder for them where texts are to be shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvdb import index
from kvdb.errors import UsageError
from kvdb.explain.assemble import explain
from kvdb.explain.case import Case, Decode
from kvdb.explain.explanation import Explanation
from kvdb.explain.keyspaces import KeySpace, find_space, key_space, key_spaces
from kvdb.explain.past import past_case
from kvdb.explain.remembered import past_remote
from kvdb.identity import as_tokens
from kvdb.match import Match, Namespace, find_match
from kvdb.segments import Segment, as_segments

if TYPE_CHECKING:
    from kvdb.shards import NamespaceRecord
    from kvdb.store import Store, TokenIds

__all__ = [
    "Decode",
    "Explanation",
    "KeySpace",
    "explain_request",
    "explain_tokens",
    "find_space",
    "key_spaces",
]


def explain_tokens(
    store: Store,
    namespace: Namespace | KeySpace,
    tokens: TokenIds,
    *,
    segments: Sequence[Segment | Mapping[str, Any]] | None = None,
    text: Decode | None = None,
) -> Explanation:
    """Explain what a prompt of ``tokens`` would hit now in ``namespace``, or in a key space that
    the store may not have. ``segments`` are the prompt's parts, as in ``requests.segments``;
    ``text`` decodes token ids. Raises UsageError for an empty prompt and for ids that are none."""
    array = as_tokens(tokens)
    if not len(array):
        raise UsageError("The prompt is empty.")
    parts = as_segments(segments or ())
    with store.database.read() as connection:
        if namespace.id is None:
            return explain(connection, Case(namespace, array, [], parts, text, 0, None, 0, 0))
        space = key_space(connection, namespace.id)
        if space is None or space.fingerprint != namespace.fingerprint:
            raise UsageError("The namespace belongs to another store.")
        record = index.namespace_record(connection, namespace.id)
        match = find_match(connection, _namespace(namespace.id, record), array)
        return explain(connection, _case(match, space, parts, text))


def explain_request(store: Store, request_id: int, text: Decode | None = None) -> Explanation:
    """Explain a past request by what it could meet: state older than itself. Its tokens are those
    of the chain it ended in; where they are gone, its row and its parts must do. Raises UsageError
    when there is no request of that id."""
    with store.database.read() as connection:
        case = past_case(connection, request_id, text)
        told = case if isinstance(case, Explanation) else explain(connection, case)
        return replace(told, remote=past_remote(connection, request_id))


def _namespace(id_: int, record: NamespaceRecord) -> Namespace:
    return Namespace(id_, record.fingerprint, record.model, record.layout, record.block_tokens)


def _case(match: Match, space: KeySpace, parts: Sequence[Segment], text: Decode | None) -> Case:
    matched, tip, reach = match.matched, match.tip_id, match.reach
    gone = sum(match.blocks[index].token_count for index in match.holes)
    hits = reach if match.namespace.layout.states else reach - gone
    if match.holes:  # what is behind a hole hits, but the hole is what is to be explained
        matched = match.holes[0]
        tip = match.blocks[matched - 1].id if matched else None
        reach = match.live_prefix_tokens
    return Case(
        space,
        match.tokens,
        match.hashes,
        parts,
        text,
        matched,
        tip,
        hits=hits,
        reach=reach,
        stored=match.live_prefix_tokens,
    )
