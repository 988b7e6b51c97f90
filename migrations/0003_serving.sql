-- What serving over HTTP remembers. Columns are described in kvdb/schema.toml.

-- Who may ask. Of a key only a salted hash is kept: it is shown once, when it is made. Rows stay
-- when a key is revoked, so that an id never means another key.
CREATE TABLE keys (
    id           INTEGER PRIMARY KEY,
    role         TEXT NOT NULL CHECK (role IN ('main', 'admin', 'tenant')),
    tenant       TEXT NOT NULL,
    name         TEXT NOT NULL,
    hash_salt    BLOB NOT NULL CHECK (length(hash_salt) = 16),
    hash         BLOB NOT NULL CHECK (length(hash) = 32),
    cache_salt   BLOB NOT NULL CHECK (length(cache_salt) IN (0, 32)),
    created_at   INTEGER NOT NULL,
    last_used_at INTEGER,
    revoked_at   INTEGER,
    CHECK ((role = 'tenant') = (tenant <> '')),
    CHECK (role = 'tenant' OR length(cache_salt) = 0)
) STRICT;

-- Approximate skips.

-- NULL where it was not measured.
ALTER TABLE requests ADD COLUMN kl REAL;
