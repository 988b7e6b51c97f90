"""Questions of this domain as commands: hits, misses, savings, blocks, capacity, wear."""

from __future__ import annotations

from kvdb.cli.interrupts import noted_interrupts
from kvdb.functions import human_bytes
from kvdb.listing import hash_range
from kvdb.sandbox import SqlResult
from kvdb.shell.session import Session, ShellError
from kvdb.shell.tree import draw

HITS = """
    SELECT r.id, ago(r.started_at) AS "when", n.model, r.tenant, r.client, r.skip,
        r.prompt_tokens AS prompt, r.restored_tokens AS restored, r.computed_tokens AS computed,
        round(100.0 * r.restored_tokens / nullif(r.prompt_tokens, 0), 1) AS "hit %",
        round(r.first_token_ms, 1) AS "first ms", r.miss_reason
    FROM requests AS r LEFT JOIN namespaces AS n ON n.id = r.namespace_id
    ORDER BY r.id DESC LIMIT :count
"""
TOP = """
    WITH chosen AS (
        SELECT id FROM blocks WHERE state = 'live' OR refs > 0
        ORDER BY hits DESC, depth, id LIMIT :count
    )
    SELECT substr(u.hash, 1, 12) AS hash, u.model, u.depth, u.token_count AS tokens, u.hits,
        u.queue, human_bytes(u.nbytes) AS size,
        token_text(substr(t.tokens, 1, 128), u.namespace_id) AS text
    FROM chosen JOIN block_usage AS u ON u.id = chosen.id
    LEFT JOIN block_tokens AS t ON t.block_id = u.id
    ORDER BY u.hits DESC, u.depth, u.id
"""
# Depth first, so that what is cut off is a whole branch at the end.
TREE = """
    WITH RECURSIVE tree (id, depth) AS (
        SELECT id, depth FROM blocks
        WHERE (state = 'live' OR refs > 0)
            AND (:first_hash IS NULL AND parent_id IS NULL
                OR hash BETWEEN :first_hash AND :last_hash)
        UNION ALL
        SELECT c.id, c.depth FROM tree
        JOIN blocks AS c ON c.parent_id = tree.id AND (c.state = 'live' OR c.refs > 0)
        ORDER BY 2 DESC
        LIMIT :most
    )
    SELECT b.id, b.parent_id, lower(hex(b.hash)) AS hash, b.token_count, b.hits, b.state
    FROM tree JOIN blocks AS b ON b.id = tree.id
"""
TEXTS = """
    SELECT b.id, token_text(substr(t.tokens, 1, 4096), b.namespace_id)
    FROM json_each(:ids) AS wanted
    JOIN blocks AS b ON b.id = wanted.value
    JOIN block_tokens AS t ON t.block_id = b.id
"""
MISSES = """
    SELECT r.id, ago(r.started_at) AS "when", n.model, r.tenant, r.client,
        r.computed_tokens AS computed, r.prompt_tokens AS prompt,
        round(r.prefill_ms / 1000, 2) AS seconds, r.miss_reason
    FROM requests AS r LEFT JOIN namespaces AS n ON n.id = r.namespace_id
    WHERE r.computed_tokens > 0 AND r.id > (SELECT max(id) FROM requests) - 1000
    ORDER BY coalesce(r.prefill_ms, 0) DESC, r.computed_tokens DESC LIMIT 10
"""
REQUEST = "SELECT namespace_id FROM requests WHERE id = :id"
SAVINGS = """
    SELECT model, requests, prompt_tokens AS prompt, restored_tokens AS restored,
        round(100.0 * restored_tokens / nullif(prompt_tokens, 0), 1) AS "saved %",
        tokens_per_second AS "prefill tokens/s", seconds_saved AS "seconds saved"
    FROM savings ORDER BY seconds_saved DESC
"""
WEAR = """
    SELECT day, shards, human_bytes(nbytes) AS written FROM daily_wear ORDER BY day DESC LIMIT 30
"""
CAPACITY = """
    SELECT namespace_id AS namespace, model, tenant, block_tokens, live_blocks AS blocks,
        live_tokens AS tokens, human_bytes(live_bytes) AS size,
        human_bytes(bytes_per_token) AS "a token"
    FROM capacity ORDER BY live_bytes DESC
"""
BLOCK = """
    SELECT lower(hex(b.hash)) AS hash, lower(hex(p.hash)) AS parent, b.namespace_id AS namespace,
        n.model, b.depth, b.depth * n.block_tokens AS tokens_before, b.token_count, b.state,
        b.queue, b.refs, b.hits, b.origin, b.exact, ago(b.created_at) AS created,
        (SELECT count(*) FROM blocks AS c WHERE c.parent_id = b.id
            AND (c.state = 'live' OR c.refs > 0)) AS children,
        token_text(t.tokens, b.namespace_id) AS text, b.id
    FROM blocks AS b
    JOIN namespaces AS n ON n.id = b.namespace_id
    LEFT JOIN blocks AS p ON p.id = b.parent_id
    LEFT JOIN block_tokens AS t ON t.block_id = b.id
    WHERE b.hash BETWEEN :first_hash AND :last_hash LIMIT 20
"""
PARTS = """
    SELECT p.part, s.uuid AS shard, p.offset, p.nbytes, p.raw_nbytes, p.codec
    FROM parts AS p JOIN shards AS s ON s.id = p.shard_id WHERE p.block_id = :id ORDER BY p.part
"""
EVICTED = """
    SELECT lower(hex(block_hash)) AS hash, ago(evicted_at) AS evicted, reason, part,
        human_bytes(nbytes) AS size, detail
    FROM evictions WHERE block_hash BETWEEN :first_hash AND :last_hash
    ORDER BY id DESC LIMIT 20
"""
TREE_BLOCKS = 2000
FOR_PEOPLE = ("table", "lines", "markdown", "box")


def hits(session: Session, arguments: list[str]) -> None:
    _show(session, session.ask(HITS, {"count": _count(arguments, 20)}), "No requests yet.")


def top(session: Session, arguments: list[str]) -> None:
    _show(session, session.ask(TOP, {"count": _count(arguments, 10)}), "Nothing is stored.")


def tree(session: Session, arguments: list[str]) -> None:
    bounds = _bounds(arguments[0]) if arguments else {"first_hash": None, "last_hash": None}
    result = session.ask(TREE, {**bounds, "most": TREE_BLOCKS + 1}, limit=TREE_BLOCKS)
    if not result.rows:
        session.say(f"No stored block begins with {arguments[0]}." if arguments else "No blocks.")
        return

    def texts(ids: str) -> dict[int, str]:
        found = session.ask(TEXTS, {"ids": ids}, limit=TREE_BLOCKS)
        return {id_: text for id_, text in found.rows if text}

    session.show_text(draw(result.rows, texts, session.room()))
    if result.capped:
        session.say(f"Only the first {TREE_BLOCKS} blocks are shown; .tree PREFIX shows a part.")


def miss(session: Session, arguments: list[str]) -> None:
    if not arguments:
        _show(session, session.ask(MISSES), "Nothing missed.")
        if session.interactive:
            session.say(".miss ID says why one did.")
        return
    request = whole_number(arguments[0].lstrip("#"), "a request's id")
    rows = session.ask(REQUEST, {"id": request}).rows
    # An import that ^C cuts short would leave half a module behind.
    with noted_interrupts() as interrupted:
        from kvdb.explain import explain_request

        namespace_id = rows[0][0] if rows else None
        text = None if namespace_id is None else session.decoder(namespace_id)
        explanation = explain_request(session.store, request, text)
    if interrupted():
        raise KeyboardInterrupt
    session.show_text("\n".join(explanation.lines()))


def savings(session: Session, _arguments: list[str]) -> None:
    result = session.ask(SAVINGS)
    _show(session, result, "No requests yet.")
    if len(result.rows) > 1:
        tokens = sum(row[3] or 0 for row in result.rows)
        seconds = sum(row[-1] or 0 for row in result.rows)
        session.say(f"In all {tokens:,} tokens and {seconds:,.1f} s of prefill were saved.")


def wear(session: Session, _arguments: list[str]) -> None:
    _show(session, session.ask(WEAR), "Nothing was written yet.")


def capacity(session: Session, _arguments: list[str]) -> None:
    _show(session, session.ask(CAPACITY), "Nothing is stored.")
    used, most = session.store.used_bytes(), session.store.limit.max_bytes
    session.say(f"{human_bytes(used)} of at most {human_bytes(most)} are used.")


def block(session: Session, arguments: list[str]) -> None:
    bounds = _bounds(arguments[0])
    found = session.ask(BLOCK, bounds)
    gone = session.ask(EVICTED, bounds)
    if not found.rows and not gone.rows:
        raise ShellError(f"No block begins with {arguments[0]}.")
    if len(found.rows) > 1:
        session.say(f"{len(found.rows)} blocks begin so; give more of the hash.")
        session.show_rows(found.columns[:4], [row[:4] for row in found.rows])
        return
    for row in found.rows:
        session.show_record(found.columns[:-1], row[:-1])
        parts = session.ask(PARTS, {"id": row[-1]})
        if parts.rows:
            session.show_rows(parts.columns, parts.rows)
    if gone.rows:
        session.say("It was evicted:" if found.rows else "Known only as evicted:")
        _show(session, gone, "")


def whole_number(text: str, what: str) -> int:
    """Raises ShellError."""
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise ShellError(f"{text!r} is not {what}.")
    return int(text)


def _count(arguments: list[str], otherwise: int) -> int:
    return whole_number(arguments[0], "a number of rows") if arguments else otherwise


def _bounds(prefix: str) -> dict[str, bytes | None]:
    try:
        first, last = hash_range(prefix)
    except ValueError as error:
        raise ShellError(f"{prefix!r} {error}.") from error
    return {"first_hash": first, "last_hash": last}


def _show(session: Session, result: SqlResult, otherwise: str) -> None:
    """Rows; for people without the columns in which nothing is said."""
    if not result.rows:
        session.say(otherwise)
        return
    if session.mode not in FOR_PEOPLE:
        session.show_rows(result.columns, result.rows)
        return
    kept = [
        n
        for n in range(len(result.columns))
        if any(row[n] not in (None, "") for row in result.rows)
    ]
    session.show_rows(
        [result.columns[n] for n in kept], [[row[n] for n in kept] for row in result.rows]
    )
