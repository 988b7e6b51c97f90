-- History in full, and totals that outlive it.
--
-- Columns are described in kvdb/schema.toml, from which docs/schema.md is made.

ALTER TABLE requests ADD COLUMN matched_tokens INTEGER;
ALTER TABLE requests ADD COLUMN bytes_ram INTEGER NOT NULL DEFAULT 0;
ALTER TABLE requests ADD COLUMN bytes_remote INTEGER NOT NULL DEFAULT 0;
ALTER TABLE requests ADD COLUMN warmup_ms REAL;
ALTER TABLE requests ADD COLUMN queued_ms REAL;
ALTER TABLE requests ADD COLUMN first_sample_ms REAL;
ALTER TABLE requests ADD COLUMN behind_ms REAL;
ALTER TABLE requests ADD COLUMN unstored TEXT;

-- missed_prefixes reads this index alone.
CREATE INDEX requests_by_miss
    ON requests (namespace_id, miss_reason, deepest_block_id, computed_tokens, started_at)
    WHERE computed_tokens > 0 AND miss_reason IS NOT NULL;
-- The top levels of a prefix tree, without a walk through the rest.
CREATE INDEX blocks_by_depth ON blocks (namespace_id, depth);

-- Totals are kept by triggers, never trimmed (but for hours) and never taken back: a request counts
-- when its row was trimmed long ago. namespace_id 0 is "none", miss_reason '' is "nothing missed".
CREATE TABLE request_totals (
    namespace_id     INTEGER NOT NULL,
    tenant           TEXT NOT NULL,
    miss_reason      TEXT NOT NULL,
    requests         INTEGER NOT NULL,
    full_skips       INTEGER NOT NULL,
    prompt_tokens    INTEGER NOT NULL,
    restored_tokens  INTEGER NOT NULL,
    refilled_tokens  INTEGER NOT NULL,
    computed_tokens  INTEGER NOT NULL,
    generated_tokens INTEGER NOT NULL,
    bytes_read       INTEGER NOT NULL,
    bytes_ram        INTEGER NOT NULL,
    bytes_remote     INTEGER NOT NULL,
    restore_ms       REAL NOT NULL,
    timed_tokens     INTEGER NOT NULL,
    timed_ms         REAL NOT NULL,
    PRIMARY KEY (namespace_id, tenant, miss_reason)
) STRICT, WITHOUT ROWID;

CREATE TABLE hourly_totals (
    hour_at          INTEGER NOT NULL,
    namespace_id     INTEGER NOT NULL,
    tenant           TEXT NOT NULL,
    requests         INTEGER NOT NULL,
    full_skips       INTEGER NOT NULL,
    prompt_tokens    INTEGER NOT NULL,
    restored_tokens  INTEGER NOT NULL,
    refilled_tokens  INTEGER NOT NULL,
    computed_tokens  INTEGER NOT NULL,
    generated_tokens INTEGER NOT NULL,
    restore_ms       REAL NOT NULL,
    PRIMARY KEY (hour_at, namespace_id, tenant)
) STRICT, WITHOUT ROWID;

CREATE TABLE eviction_totals (
    day_at       INTEGER NOT NULL,
    namespace_id INTEGER NOT NULL,
    reason       TEXT NOT NULL,
    evictions    INTEGER NOT NULL,
    tokens       INTEGER NOT NULL,
    nbytes       INTEGER NOT NULL,
    PRIMARY KEY (day_at, namespace_id, reason)
) STRICT, WITHOUT ROWID;

CREATE TABLE write_totals (
    day_at       INTEGER NOT NULL,
    namespace_id INTEGER NOT NULL,
    shards       INTEGER NOT NULL,
    nbytes       INTEGER NOT NULL,
    PRIMARY KEY (day_at, namespace_id)
) STRICT, WITHOUT ROWID;

-- A prefill of fewer than 16 tokens says little about a model's speed.
CREATE TRIGGER requests_added AFTER INSERT ON requests BEGIN
    INSERT INTO request_totals VALUES (
        coalesce(new.namespace_id, 0), new.tenant, coalesce(new.miss_reason, ''),
        1, new.skip = 'full', new.prompt_tokens, new.restored_tokens, new.refilled_tokens,
        new.computed_tokens, new.generated_tokens, new.bytes_read, new.bytes_ram, new.bytes_remote,
        coalesce(new.restore_ms, 0.0),
        iif(new.computed_tokens + new.refilled_tokens >= 16 AND new.prefill_ms > 0,
            new.computed_tokens + new.refilled_tokens, 0),
        iif(new.computed_tokens + new.refilled_tokens >= 16 AND new.prefill_ms > 0,
            new.prefill_ms, 0.0)
    ) ON CONFLICT DO UPDATE SET
        requests = requests + 1,
        full_skips = full_skips + excluded.full_skips,
        prompt_tokens = prompt_tokens + excluded.prompt_tokens,
        restored_tokens = restored_tokens + excluded.restored_tokens,
        refilled_tokens = refilled_tokens + excluded.refilled_tokens,
        computed_tokens = computed_tokens + excluded.computed_tokens,
        generated_tokens = generated_tokens + excluded.generated_tokens,
        bytes_read = bytes_read + excluded.bytes_read,
        bytes_ram = bytes_ram + excluded.bytes_ram,
        bytes_remote = bytes_remote + excluded.bytes_remote,
        restore_ms = restore_ms + excluded.restore_ms,
        timed_tokens = timed_tokens + excluded.timed_tokens,
        timed_ms = timed_ms + excluded.timed_ms;
    INSERT INTO hourly_totals VALUES (
        new.started_at / 3600000000 * 3600000000, coalesce(new.namespace_id, 0), new.tenant,
        1, new.skip = 'full', new.prompt_tokens, new.restored_tokens, new.refilled_tokens,
        new.computed_tokens, new.generated_tokens, coalesce(new.restore_ms, 0.0)
    ) ON CONFLICT DO UPDATE SET
        requests = requests + 1,
        full_skips = full_skips + excluded.full_skips,
        prompt_tokens = prompt_tokens + excluded.prompt_tokens,
        restored_tokens = restored_tokens + excluded.restored_tokens,
        refilled_tokens = refilled_tokens + excluded.refilled_tokens,
        computed_tokens = computed_tokens + excluded.computed_tokens,
        generated_tokens = generated_tokens + excluded.generated_tokens,
        restore_ms = restore_ms + excluded.restore_ms;
END;
CREATE TRIGGER evictions_added AFTER INSERT ON evictions BEGIN
    INSERT INTO eviction_totals VALUES (
        new.evicted_at / 86400000000 * 86400000000, new.namespace_id, new.reason,
        1, new.token_count, new.nbytes
    ) ON CONFLICT DO UPDATE SET
        evictions = evictions + 1,
        tokens = tokens + excluded.tokens,
        nbytes = nbytes + excluded.nbytes;
END;
-- Only a process writes files: rebuild, which finds them written, names none.
CREATE TRIGGER shards_published AFTER UPDATE OF state ON shards
WHEN old.state = 'writing' AND new.state = 'live' AND old.process_id IS NOT NULL BEGIN
    INSERT INTO write_totals VALUES (
        new.created_at / 86400000000 * 86400000000, new.namespace_id, 1, new.nbytes
    ) ON CONFLICT DO UPDATE SET
        shards = shards + 1,
        nbytes = nbytes + excluded.nbytes;
END;

-- Settings are what users may write: a bad one would trim all history, or keep the store shut.
CREATE TRIGGER settings_added BEFORE INSERT ON settings BEGIN
    SELECT RAISE(ABORT, 'the setting max_bytes is a whole number of at least 16777216') WHERE new.key = 'max_bytes'
        AND (CAST(CAST(new.value AS INTEGER) AS TEXT) <> new.value
            OR CAST(new.value AS INTEGER) < 16777216);
    SELECT RAISE(ABORT, 'the setting min_free_bytes is a whole number of at least 0') WHERE new.key = 'min_free_bytes'
        AND (CAST(CAST(new.value AS INTEGER) AS TEXT) <> new.value
            OR CAST(new.value AS INTEGER) < 0);
    SELECT RAISE(ABORT, 'the setting history_requests is a whole number of at least 0') WHERE new.key = 'history_requests'
        AND (CAST(CAST(new.value AS INTEGER) AS TEXT) <> new.value
            OR CAST(new.value AS INTEGER) < 0);
    SELECT RAISE(ABORT, 'the setting history_evictions is a whole number of at least 0') WHERE new.key = 'history_evictions'
        AND (CAST(CAST(new.value AS INTEGER) AS TEXT) <> new.value
            OR CAST(new.value AS INTEGER) < 0);
    SELECT RAISE(ABORT, 'the setting history_hours is a whole number of at least 0') WHERE new.key = 'history_hours'
        AND (CAST(CAST(new.value AS INTEGER) AS TEXT) <> new.value
            OR CAST(new.value AS INTEGER) < 0);
END;
CREATE TRIGGER settings_changed BEFORE UPDATE ON settings BEGIN
    SELECT RAISE(ABORT, 'the setting max_bytes is a whole number of at least 16777216') WHERE new.key = 'max_bytes'
        AND (CAST(CAST(new.value AS INTEGER) AS TEXT) <> new.value
            OR CAST(new.value AS INTEGER) < 16777216);
    SELECT RAISE(ABORT, 'the setting min_free_bytes is a whole number of at least 0') WHERE new.key = 'min_free_bytes'
        AND (CAST(CAST(new.value AS INTEGER) AS TEXT) <> new.value
            OR CAST(new.value AS INTEGER) < 0);
    SELECT RAISE(ABORT, 'the setting history_requests is a whole number of at least 0') WHERE new.key = 'history_requests'
        AND (CAST(CAST(new.value AS INTEGER) AS TEXT) <> new.value
            OR CAST(new.value AS INTEGER) < 0);
    SELECT RAISE(ABORT, 'the setting history_evictions is a whole number of at least 0') WHERE new.key = 'history_evictions'
        AND (CAST(CAST(new.value AS INTEGER) AS TEXT) <> new.value
            OR CAST(new.value AS INTEGER) < 0);
    SELECT RAISE(ABORT, 'the setting history_hours is a whole number of at least 0') WHERE new.key = 'history_hours'
        AND (CAST(CAST(new.value AS INTEGER) AS TEXT) <> new.value
            OR CAST(new.value AS INTEGER) < 0);
END;

-- What an older program recorded is counted too; of writes, the shards that are still there.
INSERT INTO request_totals
SELECT coalesce(namespace_id, 0), tenant, coalesce(miss_reason, ''),
    count(*), sum(skip = 'full'), sum(prompt_tokens), sum(restored_tokens), sum(refilled_tokens),
    sum(computed_tokens), sum(generated_tokens), sum(bytes_read), 0, 0,
    coalesce(sum(restore_ms), 0.0),
    sum(iif(computed_tokens + refilled_tokens >= 16 AND prefill_ms > 0,
        computed_tokens + refilled_tokens, 0)),
    sum(iif(computed_tokens + refilled_tokens >= 16 AND prefill_ms > 0, prefill_ms, 0.0))
FROM requests GROUP BY 1, 2, 3;
INSERT INTO hourly_totals
SELECT started_at / 3600000000 * 3600000000, coalesce(namespace_id, 0), tenant,
    count(*), sum(skip = 'full'), sum(prompt_tokens), sum(restored_tokens), sum(refilled_tokens),
    sum(computed_tokens), sum(generated_tokens), coalesce(sum(restore_ms), 0.0)
FROM requests GROUP BY 1, 2, 3;
INSERT INTO eviction_totals
SELECT evicted_at / 86400000000 * 86400000000, namespace_id, reason,
    count(*), sum(token_count), sum(nbytes)
FROM evictions GROUP BY 1, 2, 3;
INSERT INTO write_totals
SELECT created_at / 86400000000 * 86400000000, namespace_id, count(*), sum(nbytes)
FROM shards WHERE state = 'live' GROUP BY 1, 2;

DROP VIEW prefix_tree;
DROP VIEW hit_history;
DROP VIEW hourly_hits;
DROP VIEW savings;
DROP VIEW tenant_usage;
DROP VIEW capacity;
DROP VIEW missed_prefixes;

-- Only a last block is short, and nothing stands on it: tokens_before follows from the depth. The
-- path is found upwards and for the rows asked for, so that a filter spares the rest of the tree.
CREATE VIEW prefix_tree AS
SELECT
    b.namespace_id,
    (
        WITH RECURSIVE up (parent_id, path) AS (
            SELECT b.parent_id, printf('%010d', b.id)
            UNION ALL
            SELECT a.parent_id, printf('%010d/', a.id) || up.path
            FROM up JOIN blocks AS a ON a.id = up.parent_id
        )
        SELECT path FROM up WHERE parent_id IS NULL
    ) AS path,
    b.depth,
    b.depth * n.block_tokens AS tokens_before,
    b.token_count,
    lower(hex(b.hash)) AS hash,
    (SELECT lower(hex(p.hash)) FROM blocks AS p WHERE p.id = b.parent_id) AS parent_hash,
    b.state,
    b.hits,
    b.refs
FROM blocks AS b
LEFT JOIN namespaces AS n ON n.id = b.namespace_id
WHERE b.state = 'live' OR b.refs > 0;

CREATE VIEW hit_history AS
SELECT
    r.id,
    datetime(r.started_at / 1000000, 'unixepoch') AS started,
    n.model,
    r.tenant,
    r.client,
    r.skip,
    r.prompt_tokens,
    r.matched_tokens,
    r.restored_tokens,
    r.refilled_tokens,
    r.computed_tokens,
    r.masked_tokens,
    r.generated_tokens,
    round(100.0 * r.restored_tokens / r.prompt_tokens, 1) AS hit_percent,
    r.first_token_ms,
    r.miss_reason,
    r.load_ms,
    r.warmup_ms,
    r.queued_ms,
    r.lookup_ms,
    r.restore_ms,
    r.prefill_ms,
    r.first_sample_ms,
    r.behind_ms,
    coalesce(
        r.load_ms + r.warmup_ms + coalesce(r.queued_ms, 0.0) + r.lookup_ms + r.restore_ms
            + r.prefill_ms + r.first_sample_ms - r.behind_ms,
        coalesce(r.load_ms, 0.0) + r.first_token_ms
    ) AS ttft_ms,
    r.total_ms,
    r.bytes_ram,
    r.bytes_read,
    r.bytes_remote
FROM requests AS r LEFT JOIN namespaces AS n ON n.id = r.namespace_id;

CREATE VIEW hourly_hits AS
SELECT
    strftime('%Y-%m-%d %H:00', hour_at / 1000000, 'unixepoch') AS hour,
    sum(requests) AS requests,
    sum(prompt_tokens) AS prompt_tokens,
    sum(restored_tokens) AS restored_tokens,
    round(1.0 * sum(restored_tokens) / sum(prompt_tokens), 4) AS hit_ratio,
    sum(full_skips) AS full_skips
FROM hourly_totals GROUP BY hour_at ORDER BY hour_at;

-- Seconds saved: restored tokens at the measured prefill speed of that model, less restore time.
CREATE VIEW savings AS
SELECT
    n.model,
    nullif(t.namespace_id, 0) AS namespace_id,
    sum(t.requests) AS requests,
    sum(t.prompt_tokens) AS prompt_tokens,
    sum(t.restored_tokens) AS restored_tokens,
    round(1000.0 * sum(t.timed_tokens) / nullif(sum(t.timed_ms), 0.0), 1) AS tokens_per_second,
    round(
        (sum(t.restored_tokens) * sum(t.timed_ms) / nullif(sum(t.timed_tokens), 0)
            - sum(t.restore_ms)) / 1000, 3
    ) AS seconds_saved
FROM request_totals AS t
LEFT JOIN namespaces AS n ON n.id = t.namespace_id
GROUP BY t.namespace_id;

CREATE VIEW tenant_usage AS
SELECT
    tenant,
    sum(requests) AS requests,
    sum(prompt_tokens) AS prompt_tokens,
    sum(restored_tokens) AS restored_tokens,
    sum(generated_tokens) AS generated_tokens,
    round(1.0 * sum(restored_tokens) / sum(prompt_tokens), 4) AS hit_ratio
FROM request_totals GROUP BY tenant;

CREATE VIEW capacity AS
SELECT
    n.id AS namespace_id,
    n.model,
    n.block_tokens,
    n.live_blocks,
    n.live_tokens,
    n.live_bytes,
    CASE WHEN n.live_tokens > 0 THEN n.live_bytes / n.live_tokens END AS bytes_per_token,
    n.tenant
FROM namespaces AS n;

-- The subquery is sorted before names are looked up, so that a LIMIT spares most look-ups.
CREATE VIEW missed_prefixes AS
SELECT
    m.miss_reason,
    (SELECT model FROM namespaces WHERE id = m.namespace_id) AS model,
    (SELECT lower(hex(hash)) FROM blocks WHERE id = m.deepest_block_id) AS deepest_hash,
    m.requests,
    m.computed_tokens,
    datetime(m.latest_at / 1000000, 'unixepoch') AS latest,
    m.namespace_id
FROM (
    SELECT namespace_id, miss_reason, deepest_block_id, count(*) AS requests,
        sum(computed_tokens) AS computed_tokens, max(started_at) AS latest_at
    FROM requests WHERE computed_tokens > 0 AND miss_reason IS NOT NULL
    GROUP BY namespace_id, miss_reason, deepest_block_id
    ORDER BY computed_tokens DESC
) AS m;

CREATE VIEW miss_reasons AS
SELECT
    t.miss_reason,
    n.model,
    nullif(t.namespace_id, 0) AS namespace_id,
    sum(t.requests) AS requests,
    sum(t.prompt_tokens) AS prompt_tokens,
    sum(t.computed_tokens) AS computed_tokens
FROM request_totals AS t
LEFT JOIN namespaces AS n ON n.id = t.namespace_id
WHERE t.miss_reason <> ''
GROUP BY t.miss_reason, t.namespace_id
ORDER BY computed_tokens DESC;

CREATE VIEW daily_evictions AS
SELECT
    date(day_at / 1000000, 'unixepoch') AS day,
    reason,
    sum(evictions) AS evictions,
    sum(tokens) AS tokens,
    sum(nbytes) AS nbytes
FROM eviction_totals GROUP BY day_at, reason ORDER BY day_at, reason;

CREATE VIEW daily_wear AS
SELECT
    date(day_at / 1000000, 'unixepoch') AS day,
    sum(shards) AS shards,
    sum(nbytes) AS nbytes
FROM write_totals GROUP BY day_at ORDER BY day_at;
