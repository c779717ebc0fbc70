-- The tree of a run with one row per path, parents before children: how many spans, how long, and the time that no
-- child in the same thread covers. An open span lasts until the last sign of life of its session. A sum of more than
-- 64 bits (292 years) is null.
WITH timed AS (
    SELECT p.*, GREATEST(COALESCE(p.end_ns, s.last_ns) - p.start_ns, 0) AS ns
    FROM spans p
    JOIN sessions s ON s.session = p.session
),
own AS (
    SELECT
        path,
        depth,
        count(*) AS spans,
        count(*) - count(end_ns) AS open_spans,
        try_sum(ns) AS total_ns,
        percentile_cont(0.5) WITHIN GROUP (ORDER BY ns) AS median_ns,
        max(ns) AS worst_ns,
        try_sum(gpu_ns) AS gpu_ns,
        max(memory_peak_bytes) AS memory_peak_bytes,
        count(error) AS errors,
        min(start_ns) AS first_ns
    FROM timed
    GROUP BY path, depth
),
inside AS (
    SELECT substr(path, 1, length(path) - length(name) - 1) AS path, depth - 1 AS depth, try_sum(ns) AS ns
    FROM (SELECT path, name, depth, try_sum(ns) AS ns FROM timed WHERE in_thread GROUP BY path, name, depth) c
    GROUP BY substr(path, 1, length(path) - length(name) - 1), depth - 1
)
SELECT
    own.path,
    own.depth,
    own.spans,
    own.open_spans,
    own.total_ns,
    own.median_ns,
    own.worst_ns,
    own.total_ns - LEAST(COALESCE(inside.ns, 0), own.total_ns) AS self_ns,
    own.gpu_ns,
    own.memory_peak_bytes,
    own.errors,
    own.first_ns
FROM own
LEFT JOIN inside ON inside.path = own.path AND inside.depth = own.depth
ORDER BY replace(own.path, '/', chr(1)), own.depth
