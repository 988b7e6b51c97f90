-- Times *_at are Unix microseconds. last_access and prev_access are ticks of counters.tick:
-- last_access of the latest reference, prev_access of the latest one that counted (references
-- within one window count once). Row ids that handles keep are never used again (AUTOINCREMENT).

CREATE TABLE settings (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- age_ratio is fixed-point: 1048576 is 1 (see kvdb/retention.py).
CREATE TABLE counters (
    name  TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE namespaces (
    id           INTEGER PRIMARY KEY,
    fingerprint  BLOB NOT NULL UNIQUE CHECK (length(fingerprint) = 32),
    model        TEXT NOT NULL,
    identity     TEXT NOT NULL CHECK (json_valid(identity)),
    layout       TEXT NOT NULL CHECK (json_valid(layout)),
    block_tokens INTEGER NOT NULL,
    salt         BLOB NOT NULL,
    tenant       TEXT NOT NULL DEFAULT '',
    build        TEXT,
    created_at   INTEGER NOT NULL,
    used_at      INTEGER NOT NULL,
    live_blocks  INTEGER NOT NULL DEFAULT 0,
    live_tokens  INTEGER NOT NULL DEFAULT 0,
    live_bytes   INTEGER NOT NULL DEFAULT 0
) STRICT;

-- A build is code and hardware that computed state in a namespace, with the verdict of its check.
CREATE TABLE builds (
    id           INTEGER PRIMARY KEY,
    namespace_id INTEGER NOT NULL REFERENCES namespaces (id) ON DELETE CASCADE,
    digest       TEXT NOT NULL,
    description  TEXT NOT NULL CHECK (json_valid(description)),
    verdict      TEXT NOT NULL CHECK (verdict IN ('compatible', 'incompatible', 'unchecked')),
    difference   REAL,
    created_at   INTEGER NOT NULL,
    UNIQUE (namespace_id, digest)
) STRICT;

CREATE TABLE processes (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    uuid       TEXT NOT NULL UNIQUE CHECK (length(uuid) = 32),
    pid        INTEGER NOT NULL,
    program    TEXT NOT NULL,
    started_at INTEGER NOT NULL
) STRICT;

-- writing: its file may be partly there. live: published. dead: no part left, file to be unlinked.
CREATE TABLE shards (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    uuid         TEXT NOT NULL UNIQUE CHECK (length(uuid) = 32),
    state        TEXT NOT NULL CHECK (state IN ('writing', 'live', 'dead')),
    namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
    process_id   INTEGER REFERENCES processes (id),
    nbytes       INTEGER NOT NULL CHECK (nbytes >= 0),
    part_bytes   INTEGER NOT NULL DEFAULT 0,
    live_parts   INTEGER NOT NULL DEFAULT 0,
    live_bytes   INTEGER NOT NULL DEFAULT 0,
    created_at   INTEGER NOT NULL
) STRICT;
CREATE INDEX shards_by_state ON shards (state, process_id);
CREATE INDEX shards_by_process ON shards (process_id) WHERE process_id IS NOT NULL;
CREATE INDEX shards_mostly_dead ON shards (part_bytes - live_bytes)
    WHERE state = 'live' AND live_bytes * 2 < part_bytes;
CREATE INDEX shards_by_namespace ON shards (namespace_id);

-- refs = held child blocks + sequences whose tip it is; held = live, or refs > 0.
CREATE TABLE blocks (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    hash         BLOB NOT NULL UNIQUE CHECK (length(hash) = 32),
    parent_id    INTEGER REFERENCES blocks (id),
    namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
    depth        INTEGER NOT NULL CHECK (depth >= 0),
    token_count  INTEGER NOT NULL CHECK (token_count > 0),
    refs         INTEGER NOT NULL DEFAULT 0 CHECK (refs >= 0),
    state        TEXT NOT NULL CHECK (state IN ('live', 'evicted')),
    queue        TEXT NOT NULL CHECK (queue IN ('cold', 'hot')),
    origin       TEXT NOT NULL CHECK (origin IN ('prefill', 'decode', 'import')),
    exact        INTEGER NOT NULL CHECK (exact IN (0, 1)),
    build_id     INTEGER REFERENCES builds (id),
    created_at   INTEGER NOT NULL,
    last_access  INTEGER NOT NULL,
    prev_access  INTEGER NOT NULL,
    hits         INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX blocks_by_parent ON blocks (parent_id, id);
CREATE INDEX blocks_roots ON blocks (namespace_id, id) WHERE parent_id IS NULL;
CREATE INDEX blocks_victims_cold ON blocks (last_access, depth DESC)
    WHERE refs = 0 AND state = 'live' AND queue = 'cold';
CREATE INDEX blocks_victims_hot ON blocks (last_access, depth DESC)
    WHERE refs = 0 AND state = 'live' AND queue = 'hot';
CREATE INDEX blocks_history_cold ON blocks (last_access, depth DESC)
    WHERE refs = 0 AND state = 'evicted' AND queue = 'cold';
CREATE INDEX blocks_history_hot ON blocks (last_access, depth DESC)
    WHERE refs = 0 AND state = 'evicted' AND queue = 'hot';

-- Token ids as little-endian u32; extra keys as in the block hash. Kept while the block is held.
CREATE TABLE block_tokens (
    block_id INTEGER PRIMARY KEY REFERENCES blocks (id) ON DELETE CASCADE,
    tokens   BLOB NOT NULL,
    extra    BLOB NOT NULL
) STRICT;

CREATE TABLE parts (
    block_id   INTEGER NOT NULL REFERENCES blocks (id),
    part       TEXT NOT NULL,
    shard_id   INTEGER NOT NULL REFERENCES shards (id),
    offset     INTEGER NOT NULL CHECK (offset >= 0),
    nbytes     INTEGER NOT NULL CHECK (nbytes >= 0),
    raw_nbytes INTEGER NOT NULL CHECK (raw_nbytes >= 0),
    codec      TEXT NOT NULL,
    checksum   BLOB NOT NULL CHECK (length(checksum) = 16),
    PRIMARY KEY (block_id, part)
) STRICT, WITHOUT ROWID;
CREATE INDEX parts_by_shard ON parts (shard_id, offset);

-- A name, or a running request (process_id set), that holds one block: its tip.
CREATE TABLE sequences (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    name         TEXT UNIQUE,
    namespace_id INTEGER NOT NULL REFERENCES namespaces (id),
    tip_id       INTEGER REFERENCES blocks (id),
    process_id   INTEGER REFERENCES processes (id),
    tenant       TEXT NOT NULL DEFAULT '',
    expires_at   INTEGER,
    created_at   INTEGER NOT NULL,
    CHECK ((name IS NULL) <> (process_id IS NULL))
) STRICT;
CREATE INDEX sequences_by_tip ON sequences (tip_id);
CREATE INDEX sequences_by_expiry ON sequences (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX sequences_by_process ON sequences (process_id) WHERE process_id IS NOT NULL;

CREATE TABLE requests (
    id               INTEGER PRIMARY KEY,
    started_at       INTEGER NOT NULL,
    namespace_id     INTEGER REFERENCES namespaces (id),
    tenant           TEXT NOT NULL DEFAULT '',
    client           TEXT NOT NULL DEFAULT '',
    prompt_tokens    INTEGER NOT NULL,
    restored_tokens  INTEGER NOT NULL,
    refilled_tokens  INTEGER NOT NULL,
    computed_tokens  INTEGER NOT NULL,
    masked_tokens    INTEGER NOT NULL DEFAULT 0,
    generated_tokens INTEGER NOT NULL,
    skip             TEXT NOT NULL CHECK (skip IN ('full', 'refill', 'partial', 'approximate', 'none')),
    miss_reason      TEXT,
    deepest_block_id INTEGER,
    tip_id           INTEGER,
    segments         TEXT,
    bytes_read       INTEGER NOT NULL DEFAULT 0,
    load_ms          REAL,
    lookup_ms        REAL,
    restore_ms       REAL,
    prefill_ms       REAL,
    first_token_ms   REAL,
    total_ms         REAL,
    CHECK (restored_tokens + refilled_tokens + computed_tokens + masked_tokens = prompt_tokens)
) STRICT;
CREATE INDEX requests_by_time ON requests (started_at);

-- part is NULL when the whole block went.
CREATE TABLE evictions (
    id           INTEGER PRIMARY KEY,
    evicted_at   INTEGER NOT NULL,
    namespace_id INTEGER NOT NULL,
    block_hash   BLOB NOT NULL,
    depth        INTEGER NOT NULL,
    token_count  INTEGER NOT NULL,
    part         TEXT,
    reason       TEXT NOT NULL CHECK (reason IN ('limit', 'quota', 'manual', 'expired', 'damaged', 'missing', 'replaced')),
    nbytes       INTEGER NOT NULL,
    detail       TEXT
) STRICT;
CREATE INDEX evictions_by_hash ON evictions (block_hash);

-- Totals are kept by the database itself, so no writer can forget them.
CREATE TRIGGER parts_added AFTER INSERT ON parts BEGIN
    UPDATE shards SET live_parts = live_parts + 1, live_bytes = live_bytes + new.nbytes
        WHERE id = new.shard_id;
    UPDATE namespaces SET live_bytes = live_bytes + new.nbytes
        WHERE id = (SELECT namespace_id FROM shards WHERE id = new.shard_id);
END;
CREATE TRIGGER parts_removed AFTER DELETE ON parts BEGIN
    UPDATE shards SET live_parts = live_parts - 1, live_bytes = live_bytes - old.nbytes
        WHERE id = old.shard_id;
    UPDATE namespaces SET live_bytes = live_bytes - old.nbytes
        WHERE id = (SELECT namespace_id FROM shards WHERE id = old.shard_id);
END;
CREATE TRIGGER parts_moved AFTER UPDATE OF shard_id ON parts WHEN new.shard_id <> old.shard_id BEGIN
    UPDATE shards SET live_parts = live_parts - 1, live_bytes = live_bytes - old.nbytes
        WHERE id = old.shard_id;
    UPDATE shards SET live_parts = live_parts + 1, live_bytes = live_bytes + new.nbytes
        WHERE id = new.shard_id;
END;
CREATE TRIGGER blocks_added AFTER INSERT ON blocks BEGIN
    UPDATE namespaces SET live_blocks = live_blocks + 1, live_tokens = live_tokens + new.token_count
        WHERE id = new.namespace_id AND new.state = 'live';
    UPDATE counters SET value = value + 1 WHERE name = new.state || '_' || new.queue;
END;
CREATE TRIGGER blocks_removed AFTER DELETE ON blocks BEGIN
    UPDATE namespaces SET live_blocks = live_blocks - 1, live_tokens = live_tokens - old.token_count
        WHERE id = old.namespace_id AND old.state = 'live';
    UPDATE counters SET value = value - 1 WHERE name = old.state || '_' || old.queue;
END;
CREATE TRIGGER blocks_state_changed AFTER UPDATE OF state ON blocks WHEN new.state <> old.state BEGIN
    UPDATE namespaces SET
        live_blocks = live_blocks + iif(new.state = 'live', 1, -1),
        live_tokens = live_tokens + iif(new.state = 'live', new.token_count, -new.token_count)
        WHERE id = new.namespace_id;
END;
CREATE TRIGGER blocks_queue_changed AFTER UPDATE OF state, queue ON blocks
WHEN new.state <> old.state OR new.queue <> old.queue BEGIN
    UPDATE counters SET value = value - 1 WHERE name = old.state || '_' || old.queue;
    UPDATE counters SET value = value + 1 WHERE name = new.state || '_' || new.queue;
END;
-- shard_bytes is what shards take on the disk, in file system blocks of 4 KiB.
CREATE TRIGGER shards_added AFTER INSERT ON shards BEGIN
    UPDATE counters SET value = value + (new.nbytes + 4095) / 4096 * 4096
        WHERE name = 'shard_bytes';
END;
CREATE TRIGGER shards_resized AFTER UPDATE OF nbytes ON shards BEGIN
    UPDATE counters SET value = value + (new.nbytes + 4095) / 4096 * 4096
        - (old.nbytes + 4095) / 4096 * 4096 WHERE name = 'shard_bytes';
END;
CREATE TRIGGER shards_removed AFTER DELETE ON shards BEGIN
    UPDATE counters SET value = value - (old.nbytes + 4095) / 4096 * 4096
        WHERE name = 'shard_bytes';
END;

INSERT INTO counters (name, value) VALUES
    ('tick', 0),
    ('shard_bytes', 0),
    ('live_cold', 0),
    ('live_hot', 0),
    ('evicted_cold', 0),
    ('evicted_hot', 0),
    ('age_ratio', 2097152),
    ('cow_copies', 0),
    ('blocks_dropped', 0),
    ('blocks_too_large', 0),
    ('leftovers_swept', 0);

-- Views: built-in functions only, hashes as hex text. Any SQLite tool opens them.
CREATE VIEW block_usage AS
SELECT
    b.id,
    lower(hex(b.hash)) AS hash,
    lower(hex(p.hash)) AS parent_hash,
    n.model,
    b.namespace_id,
    b.depth,
    b.token_count,
    b.state,
    b.queue,
    b.refs,
    b.hits,
    b.origin,
    b.exact,
    (SELECT coalesce(sum(nbytes), 0) FROM parts WHERE block_id = b.id) AS nbytes,
    datetime(b.created_at / 1000000, 'unixepoch') AS created,
    b.last_access
FROM blocks AS b
JOIN namespaces AS n ON n.id = b.namespace_id
LEFT JOIN blocks AS p ON p.id = b.parent_id
WHERE b.state = 'live' OR b.refs > 0;

CREATE VIEW prefix_tree AS
WITH RECURSIVE tree (id, namespace_id, depth, tokens_before, path) AS (
    SELECT id, namespace_id, depth, 0, printf('%08d', id)
    FROM blocks WHERE parent_id IS NULL AND (state = 'live' OR refs > 0)
    UNION ALL
    SELECT c.id, c.namespace_id, c.depth, tree.tokens_before + p.token_count,
        tree.path || '/' || printf('%08d', c.id)
    FROM tree
    JOIN blocks AS p ON p.id = tree.id
    JOIN blocks AS c ON c.parent_id = tree.id AND (c.state = 'live' OR c.refs > 0)
)
SELECT tree.namespace_id, tree.path, tree.depth, tree.tokens_before, b.token_count,
    lower(hex(b.hash)) AS hash, b.state, b.hits, b.refs
FROM tree JOIN blocks AS b ON b.id = tree.id
ORDER BY tree.path;

CREATE VIEW sequence_blocks AS
WITH RECURSIVE chain (sequence_id, block_id) AS (
    SELECT id, tip_id FROM sequences WHERE tip_id IS NOT NULL
    UNION ALL
    SELECT chain.sequence_id, b.parent_id
    FROM chain JOIN blocks AS b ON b.id = chain.block_id WHERE b.parent_id IS NOT NULL
)
SELECT s.id AS sequence_id, s.name, b.depth, lower(hex(b.hash)) AS hash, b.token_count, b.state,
    b.refs
FROM chain
JOIN sequences AS s ON s.id = chain.sequence_id
JOIN blocks AS b ON b.id = chain.block_id;

CREATE VIEW hit_history AS
SELECT
    r.id,
    datetime(r.started_at / 1000000, 'unixepoch') AS started,
    n.model,
    r.tenant,
    r.client,
    r.skip,
    r.prompt_tokens,
    r.restored_tokens,
    r.refilled_tokens,
    r.computed_tokens,
    r.masked_tokens,
    r.generated_tokens,
    round(100.0 * r.restored_tokens / r.prompt_tokens, 1) AS hit_percent,
    r.first_token_ms,
    r.miss_reason
FROM requests AS r LEFT JOIN namespaces AS n ON n.id = r.namespace_id;

CREATE VIEW hourly_hits AS
SELECT
    strftime('%Y-%m-%d %H:00', started_at / 1000000, 'unixepoch') AS hour,
    count(*) AS requests,
    sum(prompt_tokens) AS prompt_tokens,
    sum(restored_tokens) AS restored_tokens,
    round(1.0 * sum(restored_tokens) / sum(prompt_tokens), 4) AS hit_ratio,
    sum(skip = 'full') AS full_skips
FROM requests GROUP BY hour ORDER BY hour;

-- Seconds saved: restored tokens at the measured prefill speed of that model, less restore time.
CREATE VIEW savings AS
WITH speed (namespace_id, ms_per_token) AS (
    SELECT namespace_id, sum(prefill_ms) / sum(computed_tokens + refilled_tokens)
    FROM requests WHERE computed_tokens + refilled_tokens >= 16 AND prefill_ms > 0
    GROUP BY namespace_id
)
SELECT
    n.model,
    r.namespace_id,
    count(*) AS requests,
    sum(r.restored_tokens) AS restored_tokens,
    round(sum(r.restored_tokens * speed.ms_per_token - coalesce(r.restore_ms, 0)) / 1000, 3)
        AS seconds_saved
FROM requests AS r
JOIN namespaces AS n ON n.id = r.namespace_id
LEFT JOIN speed ON speed.namespace_id = r.namespace_id
GROUP BY r.namespace_id;

CREATE VIEW tenant_usage AS
SELECT
    tenant,
    count(*) AS requests,
    sum(prompt_tokens) AS prompt_tokens,
    sum(restored_tokens) AS restored_tokens,
    sum(generated_tokens) AS generated_tokens,
    round(1.0 * sum(restored_tokens) / sum(prompt_tokens), 4) AS hit_ratio
FROM requests GROUP BY tenant;

CREATE VIEW capacity AS
SELECT
    n.id AS namespace_id,
    n.model,
    n.block_tokens,
    n.live_blocks,
    n.live_tokens,
    n.live_bytes,
    CASE WHEN n.live_tokens > 0 THEN n.live_bytes / n.live_tokens END AS bytes_per_token
FROM namespaces AS n;

CREATE VIEW missed_prefixes AS
SELECT
    r.miss_reason,
    n.model,
    lower(hex(b.hash)) AS deepest_hash,
    count(*) AS requests,
    sum(r.computed_tokens) AS computed_tokens,
    max(datetime(r.started_at / 1000000, 'unixepoch')) AS latest
FROM requests AS r
LEFT JOIN namespaces AS n ON n.id = r.namespace_id
LEFT JOIN blocks AS b ON b.id = r.deepest_block_id
WHERE r.computed_tokens > 0
GROUP BY r.miss_reason, n.model, b.hash
ORDER BY computed_tokens DESC;
