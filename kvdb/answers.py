"""Token memory: the ids of answers, by a key that engines make of what was answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvdb.driver import Connection
from kvdb.identity import Tokens

# Answers to one prompt that are kept, as those of many tries.
MAX_PER_KEY = 64
MAX_AGE_US = 90 * 24 * 3600 * 1_000_000
# Rows looked at in one transaction when old ones go.
TRIM_ROWS = 256

FORGET_EQUAL = "DELETE FROM answers WHERE key = ? AND tokens = ?"
INSERT_ANSWER = "INSERT INTO answers (key, tokens, created_at) VALUES (?, ?, ?)"
FIND = "SELECT tokens FROM answers WHERE key = ? ORDER BY id DESC LIMIT ?"
FORGET_MORE = (
    "DELETE FROM answers WHERE id IN "
    "(SELECT id FROM answers WHERE key = ? ORDER BY id DESC LIMIT -1 OFFSET ?)"
)
OLDEST = "SELECT id, length(tokens) + 128, created_at FROM answers ORDER BY id LIMIT ?"
FORGET = "DELETE FROM answers WHERE id <= ?"
NBYTES = "SELECT value FROM counters WHERE name = 'answer_bytes'"


@dataclass(frozen=True, slots=True)
class Answer:
    """The token ids of one answer; ``key``, 32 bytes, says what it answered."""

    key: bytes
    tokens: Tokens


def remember_answer(connection: Connection, answer: Answer, now_us: int) -> None:
    """Write one row, the newest of its key; an equal one goes, and the oldest of many."""
    tokens = answer.tokens.tobytes()
    connection.execute(FORGET_EQUAL, (answer.key, tokens))
    connection.execute(INSERT_ANSWER, (answer.key, tokens, now_us))
    connection.execute(FORGET_MORE, (answer.key, MAX_PER_KEY))


def find_answers(connection: Connection, keys: Sequence[bytes]) -> Mapping[bytes, list[Tokens]]:
    """The answers under some keys, newest first."""
    found: dict[bytes, list[Tokens]] = {}
    for key in keys:
        rows = connection.execute(FIND, (key, MAX_PER_KEY)).fetchall()
        found[key] = [np.frombuffer(tokens, dtype="<u4") for (tokens,) in rows]
    return found


def trim_answers(connection: Connection, max_bytes: int, now_us: int) -> None:
    """Forget the oldest answers beyond ``max_bytes``, and those older than 90 days; some at a
    time."""
    (nbytes,) = connection.execute(NBYTES).fetchone()
    last = None
    rows = connection.execute(OLDEST, (TRIM_ROWS,))
    for id_, size, created_at in rows:
        if nbytes <= max_bytes and created_at >= now_us - MAX_AGE_US:
            break
        nbytes -= size
        last = id_
    rows.close()
    if last is not None:
        connection.execute(FORGET, (last,))
