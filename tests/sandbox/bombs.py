"""Statements that would take all time or memory there is: each one must be stopped."""
# ruff: noqa: S608 - all of it is ours

from __future__ import annotations

GROW = (
    "WITH RECURSIVE t(n, x) AS (SELECT 0, 'ab' UNION ALL SELECT n + 1, x || x FROM t WHERE n < {}) "
)
LARGEST = GROW.format(24) + ", big AS (SELECT x FROM t WHERE n = 24) "
SCHEMAS = ", ".join(f"sqlite_schema s{n}" for n in range(9))
USAGES = ", ".join(f"block_usage b{n}" for n in range(15))
COUNT = "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) "

BOMBS = {
    "endless recursion": COUNT + "SELECT count(*) FROM t",
    "endless recursion without duplicates": COUNT.replace("ALL ", "") + "SELECT max(n) FROM t",
    "endless rows that match nothing": COUNT + "SELECT n FROM t WHERE n < 0",
    "cross join": "SELECT count(*) FROM " + SCHEMAS,
    "cross join in a view": "SELECT max(b0.hits) FROM " + USAGES,
    "doubling strings": GROW.format(60) + "SELECT length(x) FROM t",
    "doubling strings and keeping them": GROW.format(25) + "SELECT x FROM t ORDER BY x DESC",
    "hex of hex": LARGEST + "SELECT length(hex(hex(hex(hex(x))))) FROM big",
    # Straight-line code: SQLite looks at neither deadline nor interrupt before its end.
    "a row of long functions": GROW.format(18)
    + f"SELECT {', '.join(f'length(hex(hex(hex(x || {n}))))' for n in range(1500))} FROM t "
    "WHERE n = 18",
    "200 MB in one value": GROW.format(27) + "SELECT x FROM t WHERE n = 27",
    "200 MB in many rows": COUNT + "SELECT n, hex('0123456789' || n || hex(n)) FROM t",
    "200 MB of wide text": GROW.replace("'ab'", "'😀é'").format(24)
    + "SELECT x FROM t WHERE n > 20",
    "a sorter": COUNT + "SELECT n FROM t ORDER BY -n",
    "distinct": COUNT + "SELECT DISTINCT hex(n) FROM t",
    "group by": COUNT + "SELECT count(*) FROM t GROUP BY hex(n)",
    "materialised": COUNT + ", m AS MATERIALIZED (SELECT n FROM t) SELECT count(*) FROM m",
    "group_concat": COUNT + "SELECT length(group_concat(hex(n))) FROM t",
    "window frames": "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t WHERE n < "
    "99999) SELECT sum(length(x)) FROM (SELECT group_concat(hex(n)) OVER (ORDER BY n) AS x FROM t)",
    "wide frames": "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t WHERE n < "
    "9999999) SELECT max(n) OVER (ROWS BETWEEN 9999999 PRECEDING AND 9999999 FOLLOWING) FROM t",
    "json array": COUNT + "SELECT json_group_array(json_object('n', n, 'x', hex(n))) FROM t",
    "json tree": GROW.replace("'ab'", "'[1,[2,[3]]],'").format(10) + "SELECT count(*) FROM t, "
    "json_tree('[' || x || '1]') a, json_tree('[' || x || '1]') b, json_tree('[' || x || '1]') c",
    "json in json": LARGEST
    + "SELECT json_array(json_quote(x), json_quote(x), json_quote(x)) FROM big",
    "like": GROW.format(21) + "SELECT x LIKE '%' || substr(x, 1, 40000) || 'b' FROM t",
    "like with wildcards": GROW.format(18)
    + "SELECT count(*) FROM t a, t b, t c, t d WHERE a.x || b.n || c.n || d.n LIKE "
    "'%a_a_a_a_a_a_a_a_a_a_b_b%'",
    "like over much": LARGEST + "SELECT x LIKE '%b_b' FROM big",
    "string_agg": COUNT + "SELECT length(string_agg(hex(n), hex(n))) FROM t",
    "char": "SELECT char(" + ",".join(["1114111"] * 900) + ") || s0.name FROM " + SCHEMAS,
    "tokens": LARGEST + "SELECT tokens(CAST(x AS BLOB)) FROM big",
}
