-- Sharing state through remotes. Columns are described in kvdb/schema.toml.

-- Where machines share blocks. options is a JSON object without secrets. Rates are moving averages
-- of what this store's processes measured; down_until is when a remote that failed is tried again.
CREATE TABLE remotes (
    id               INTEGER PRIMARY KEY AUTOINCREMENT,
    name             TEXT NOT NULL UNIQUE CHECK (length(name) > 0),
    url              TEXT NOT NULL,
    options          TEXT NOT NULL DEFAULT '{}',
    reads            INTEGER NOT NULL DEFAULT 1 CHECK (reads IN (0, 1)),
    writes           INTEGER NOT NULL DEFAULT 1 CHECK (writes IN (0, 1)),
    budget_ms        INTEGER NOT NULL CHECK (budget_ms > 0),
    created_at       INTEGER NOT NULL,
    asked            INTEGER NOT NULL DEFAULT 0,
    found            INTEGER NOT NULL DEFAULT 0,
    got              INTEGER NOT NULL DEFAULT 0,
    got_bytes        INTEGER NOT NULL DEFAULT 0,
    put              INTEGER NOT NULL DEFAULT 0,
    put_bytes        INTEGER NOT NULL DEFAULT 0,
    present          INTEGER NOT NULL DEFAULT 0,
    rejected         INTEGER NOT NULL DEFAULT 0,
    failed           INTEGER NOT NULL DEFAULT 0,
    late             INTEGER NOT NULL DEFAULT 0,
    dropped          INTEGER NOT NULL DEFAULT 0,
    bytes_per_second REAL,
    round_trip_ms    REAL,
    last_error       TEXT,
    last_error_at    INTEGER,
    down_until       INTEGER
) STRICT;

-- What a request had of remotes. remote_decision is NULL where none was asked: there was none, or
-- everything was here.
ALTER TABLE requests ADD COLUMN remote TEXT;
ALTER TABLE requests ADD COLUMN remote_decision TEXT CHECK (remote_decision IN
    ('loaded', 'recomputed', 'absent', 'late', 'down', 'failed'));
ALTER TABLE requests ADD COLUMN remote_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE requests ADD COLUMN remote_ms REAL;
ALTER TABLE requests ADD COLUMN load_estimate_ms REAL;
ALTER TABLE requests ADD COLUMN compute_estimate_ms REAL;

DROP VIEW hit_history;

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
    r.bytes_remote,
    r.remote,
    r.remote_decision,
    r.remote_tokens
FROM requests AS r LEFT JOIN namespaces AS n ON n.id = r.namespace_id;
