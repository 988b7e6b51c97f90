"""From a case to its explanation: the first cause that can be proven, in order of proof."""

from __future__ import annotations

import json
from collections.abc import Mapping

from kvdb.driver import Connection
from kvdb.explain.case import Case, Neighbour, equal_parts, part_title, reusable
from kvdb.explain.causes import Sides, find_cause
from kvdb.explain.explanation import Explanation
from kvdb.explain.keyspaces import differences
from kvdb.explain.neighbours import PastRequest, nearest, recent_requests
from kvdb.explain.remembered import Loss, find_elsewhere, find_loss, seconds_per_token
from kvdb.explain.wording import at_time, why_evicted, why_unstored, words

FIRST_BLOCK = (
    "SELECT created_at FROM blocks WHERE id NOT IN (SELECT value FROM json_each(?)) "
    "ORDER BY id LIMIT 1"
)
HELD = "SELECT 1 FROM block_tokens WHERE block_id = ?"
# What another namespace or a lost request has more than the nearest stored chain must be this
# much to be the better explanation.
CLEARLY_MORE = 16
# Causes after which there is nothing to save: the prompt says something else.
NEW = ("new_content", "unrelated")


def explain(connection: Connection, case: Case) -> Explanation:
    """Explain a case inside one read transaction."""
    if case.reach >= len(case.tokens) and case.hits >= case.reach:
        return _say(connection, case, "hit", {})
    loss = find_loss(connection, case)
    if loss is not None and case.matched * case.space.block_tokens + loss.tokens > case.reach:
        return _lost(connection, case, loss)
    requests = recent_requests(connection, case) if case.space.id is not None else []
    neighbour = nearest(connection, case, requests) if case.space.id is not None else None
    shared = max(case.reach, neighbour.shared if neighbour else 0)
    elsewhere = find_elsewhere(connection, case)
    if elsewhere is not None and elsewhere.tokens >= shared + CLEARLY_MORE:
        found = differences(case.space, elsewhere.space)
        phrases = [phrase for _, phrase in found]
        facts = {"other": " and ".join(phrases)}
        neighbour_name = f"namespace {elsewhere.space.id}"
        return _say(
            connection,
            case,
            found[0][0],
            facts,
            at=case.reach,
            saving=elsewhere.tokens - case.hits,
            neighbour=neighbour_name,
        )
    for request in requests:
        end = equal_parts(case.segments, request.segments)
        if end < shared + CLEARLY_MORE:
            break
        if not _held(connection, request):  # else its tokens have been compared
            return _never_stored(connection, case, request, end)
    if neighbour is None or not neighbour.shared:
        return _nothing_near(connection, case, neighbour)
    return _parted(connection, case, neighbour)


def _parted(connection: Connection, case: Case, neighbour: Neighbour) -> Explanation:
    at = neighbour.shared
    sides = Sides(case, neighbour)
    cause = find_cause(sides)
    if case.lacks_boundary and (cause.code in NEW or at >= len(case.tokens)):
        return _no_boundary(connection, case, neighbour.name)
    saving = 0
    if cause.code not in NEW:
        saving = max(reusable(case, neighbour), at - case.reach)
    ended = at >= len(neighbour.tokens)
    return _say(
        connection,
        case,
        cause.code,
        cause.facts,
        at=at,
        where=cause.where,
        saving=saving,
        neighbour=neighbour.name,
        stored_text=None if ended else sides.around(neighbour.tokens),
        prompt_text=sides.around(case.tokens) if at < len(case.tokens) else None,
    )


def _nothing_near(connection: Connection, case: Case, neighbour: Neighbour | None) -> Explanation:
    """Nothing stored continues what matched, or nothing begins like the prompt at all."""
    if case.lacks_boundary:
        return _no_boundary(connection, case, None)
    if case.matched:
        return _say(connection, case, "new_content", {}, at=case.reach)
    code = "unrelated"
    if neighbour is None:
        oldest = connection.execute(FIRST_BLOCK, (json.dumps(sorted(case.own)),)).fetchone()
        code = "empty_store" if oldest is None or oldest[0] >= case.before else "new_namespace"
    name = None if neighbour is None else neighbour.name
    return _say(connection, case, code, {}, at=0 if neighbour else None, neighbour=name)


def _no_boundary(connection: Connection, case: Case, neighbour: str | None) -> Explanation:
    facts = {"stored": case.stored, "reach": case.reach}
    return _say(
        connection,
        case,
        "no_boundary",
        facts,
        at=case.reach,
        saving=case.stored - case.hits,
        neighbour=neighbour,
    )


def _lost(connection: Connection, case: Case, loss: Loss) -> Explanation:
    code = loss.reason if loss.reason in ("damaged", "missing") else "evicted"
    if code == "evicted" and loss.expired is not None:
        code = "expired"
    why, remedy = why_evicted(loss.reason)
    facts = {
        "when": at_time(loss.at),
        "why": why,
        "remedy": remedy,
        "detail": f" ({loss.detail})" if loss.detail else "",
        "held": loss.expired,
    }
    at = case.matched * case.space.block_tokens
    block = case.hashes[case.matched].hex()[:16]
    return _say(
        connection,
        case,
        code,
        facts,
        at=max(at, case.reach),
        saving=max(0, at + loss.tokens - case.reach),
        neighbour=f"evicted block {block}",
    )


def _held(connection: Connection, request: PastRequest) -> bool:
    if request.tip_id is None or request.unstored is not None:
        return False
    return connection.execute(HELD, (request.tip_id,)).fetchone() is not None


def _never_stored(
    connection: Connection, case: Case, request: PastRequest, end: int
) -> Explanation:
    why, remedy = why_unstored(request.unstored)
    if request.unstored is None and request.tip_id is not None:
        why, remedy = "it is no longer in the store", "Give the store more room (max_bytes)."
    facts = {"request": request.id, "count": end, "why": why, "remedy": remedy}
    return _say(
        connection,
        case,
        "not_stored",
        facts,
        at=case.reach,
        saving=end - case.hits,
        neighbour=f"request {request.id}",
    )


def _say(
    connection: Connection,
    case: Case,
    code: str,
    facts: Mapping[str, object],
    *,
    at: int | None = None,
    where: str | None = None,
    saving: int = 0,
    neighbour: str | None = None,
    stored_text: str | None = None,
    prompt_text: str | None = None,
) -> Explanation:
    diagnosis, advice = words(code, facts)
    speed = seconds_per_token(connection, case.space.id) if saving else None
    return Explanation(
        prompt_tokens=len(case.tokens),
        hit_tokens=case.hits,
        code=code,
        diagnosis=diagnosis,
        advice=advice,
        differing_token=at,
        where=part_title(case.segments, at) if where is None else where,
        stored_text=stored_text,
        prompt_text=prompt_text,
        saving_tokens=saving,
        saving_seconds=None if speed is None else round(speed * saving, 3),
        neighbour=neighbour,
    )
