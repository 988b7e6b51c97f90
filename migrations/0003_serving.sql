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

-- Responses of OpenAI's API that clients come back to: bounded for each tenant by number, bytes and
-- age (kvdb/responses.py).
CREATE TABLE responses (
    id          TEXT PRIMARY KEY,
    tenant      TEXT NOT NULL,
    previous_id TEXT,
    created_at  INTEGER NOT NULL,
    nbytes      INTEGER NOT NULL,
    input       TEXT NOT NULL,
    response    TEXT NOT NULL
) STRICT;
CREATE INDEX responses_by_tenant ON responses (tenant, created_at);
CREATE INDEX responses_by_age ON responses (created_at);

-- -- token memory --------------------------------------------------------------------------------

-- Token ids of answers, little-endian, for the prompts that go on from them (kvdb/answers.py).
CREATE TABLE answers (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    key        BLOB NOT NULL CHECK (length(key) = 32),
    tokens     BLOB NOT NULL CHECK (length(tokens) > 0 AND length(tokens) % 4 = 0),
    created_at INTEGER NOT NULL
) STRICT;
CREATE INDEX answers_by_key ON answers (key);
INSERT INTO counters (name, value) VALUES ('answer_bytes', 0);
-- A row takes about 128 bytes beside its tokens.
CREATE TRIGGER answers_added AFTER INSERT ON answers BEGIN
    UPDATE counters SET value = value + length(new.tokens) + 128 WHERE name = 'answer_bytes';
END;
CREATE TRIGGER answers_removed AFTER DELETE ON answers BEGIN
    UPDATE counters SET value = value - length(old.tokens) - 128 WHERE name = 'answer_bytes';
END;
