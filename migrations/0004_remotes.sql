-- Snapshots.

-- Where state came from and went to: one row for each export, and for each import that stored
-- something. digest is the SHA-256 of the snapshot's list of digests: equal content, equal digest.
CREATE TABLE snapshots (
    id         INTEGER PRIMARY KEY,
    direction  TEXT NOT NULL CHECK (direction IN ('export', 'import')),
    digest     TEXT NOT NULL CHECK (length(digest) = 64),
    name       TEXT NOT NULL,
    started_at INTEGER NOT NULL,
    ended_at   INTEGER,
    blocks     INTEGER NOT NULL,
    new_blocks INTEGER NOT NULL DEFAULT 0,
    nbytes     INTEGER NOT NULL
) STRICT;
CREATE INDEX snapshots_by_digest ON snapshots (digest);
