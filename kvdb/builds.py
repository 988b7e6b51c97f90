"""Builds: code and hardware that computed state, and whether they agree with what is stored."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvdb.driver import Connection

FIND_BUILD = "SELECT id, verdict FROM builds WHERE namespace_id = ? AND digest = ?"
INSERT_BUILD = (
    "INSERT INTO builds (namespace_id, digest, description, verdict, created_at) "
    "VALUES (?1, ?2, ?3, iif((SELECT count(*) FROM builds WHERE namespace_id = ?1) = 0, "
    "'compatible', 'unchecked'), ?4) RETURNING id, verdict"
)
SET_VERDICT = "UPDATE builds SET verdict = ?, difference = ? WHERE id = ?"
DOUBT_OTHERS = (
    "UPDATE builds SET verdict = 'unchecked' "
    "WHERE namespace_id = (SELECT namespace_id FROM builds WHERE id = ?1) AND id <> ?1 "
    "AND verdict = 'compatible'"
)


@dataclass(frozen=True, slots=True)
class Build:
    """One row of ``builds``; ``verdict`` is compatible, incompatible or unchecked."""

    id: int
    digest: str
    verdict: str


def find_or_add_build(
    connection: Connection, namespace_id: int, digest: str, description: str, now: int
) -> Build:
    """The first build that a namespace meets defines it and is compatible."""
    row = connection.execute(FIND_BUILD, (namespace_id, digest)).fetchone()
    if row is None:
        row = connection.execute(INSERT_BUILD, (namespace_id, digest, description, now)).fetchone()
    return Build(row[0], digest, row[1])


def define(connection: Connection, build: Build) -> Build:
    """Let a build define its namespace, of which nothing is stored. Those that did so before, and
    may run still, were never compared with it: they are, when their state comes up."""
    connection.execute(DOUBT_OTHERS, (build.id,))
    return set_verdict(connection, build, True, 0.0)


def set_verdict(connection: Connection, build: Build, compatible: bool, difference: float) -> Build:
    verdict = "compatible" if compatible else "incompatible"
    connection.execute(SET_VERDICT, (verdict, difference, build.id))
    return replace(build, verdict=verdict)
