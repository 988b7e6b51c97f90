"""A store's own request history as a trace, as far as its rows still tell.

A request's row names the block its prompt and answer end in, its *tip*; the rows of blocks, live or
evicted, lead from there to the root. Retention forgets rows of blocks evicted long ago, and a
request whose tip was forgotten, or never stored, is known only to the deepest block that it found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvdb.driver import Connection, Database
from kvdb.errors import KvdbError
from kvdb.simulate.trace import Trace

REQUESTS_PER_READ = 100  # a long read would pin the WAL
REQUESTS = (
    "SELECT id, namespace_id, tip_id, deepest_block_id, prompt_tokens, generated_tokens "
    "FROM requests WHERE id > ? ORDER BY id LIMIT ?"
)
BLOCK = "SELECT parent_id, token_count, namespace_id FROM blocks WHERE id = ?"


@dataclass(slots=True)
class Coverage:
    """How many requests the history has, and how many could be replayed whole or in part."""

    requests: int = 0
    whole: int = 0
    in_part: int = 0

    @property
    def lost(self) -> int:
        return self.requests - self.whole - self.in_part


class _Block(NamedTuple):
    parent_id: int | None
    token_count: int
    namespace_id: int


def read_history(database: Database) -> tuple[Trace, Coverage]:
    """The requests of a store, oldest first. Raises KvdbError when none can be replayed."""
    trace, coverage = Trace(), Coverage()
    blocks: dict[int, _Block] = {}
    last = 0
    while True:
        with database.read() as connection:
            rows = connection.execute(REQUESTS, (last, REQUESTS_PER_READ)).fetchall()
            for row in rows:
                _add(connection, blocks, trace, coverage, row)
        if not rows:
            break
        last = rows[-1][0]
    if coverage.requests == 0:
        raise KvdbError("The store's history holds no requests yet; give a trace with --trace.")
    if trace.references == 0:
        raise KvdbError(
            f"None of the {coverage.requests} requests in the store's history can be replayed: "
            "their blocks were not stored or are forgotten."
        )
    return trace, coverage


def _add(
    connection: Connection,
    blocks: dict[int, _Block],
    trace: Trace,
    coverage: Coverage,
    row: tuple[int, int | None, int | None, int | None, int, int],
) -> None:
    _, namespace_id, tip_id, deepest_id, prompt_tokens, generated_tokens = row
    coverage.requests += 1
    tokens = prompt_tokens + generated_tokens
    chain = _chain(connection, blocks, tip_id, namespace_id, tokens)
    if chain:
        coverage.whole += 1
    else:
        chain = _chain(connection, blocks, deepest_id, namespace_id, tokens)
        coverage.in_part += bool(chain)
    if chain:
        # Blocks of the answer alone are stored, and were not looked up.
        start, counted = 0, 0
        for _, token_count in chain:
            counted += start < prompt_tokens
            start += token_count
        trace.add([block_id for block_id, _ in chain], counted)


def _chain(
    connection: Connection,
    blocks: dict[int, _Block],
    block_id: int | None,
    namespace_id: int | None,
    tokens: int,
) -> list[tuple[int, int]]:
    """``(id, tokens)`` of the blocks from the root to a block. Empty if a row is gone, or is of
    another namespace or of more tokens than the request had, as ids may be after a rebuild."""
    chain = []
    while block_id is not None:
        block = blocks.get(block_id)
        if block is None:
            row = connection.execute(BLOCK, (block_id,)).fetchone()
            if row is None:
                return []
            block = blocks[block_id] = _Block._make(row)
        tokens -= block.token_count
        if block.namespace_id != namespace_id or tokens < 0:
            return []
        chain.append((block_id, block.token_count))
        block_id = block.parent_id
    chain.reverse()
    return chain
