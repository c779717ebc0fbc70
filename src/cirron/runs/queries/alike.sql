-- A histogram of the durations of the ended spans with the path `:path` in the session `:session`, in `:bins`
-- bins: how many spans, and how many took less than `:own_ns`. Each row also has the shortest, the longest and the
-- median of all, in nanoseconds.
WITH alike AS (
    SELECT end_ns - start_ns AS ns
    FROM spans
    WHERE session = :session AND path = :path AND end_ns IS NOT NULL
),
whole AS (
    SELECT min(ns) AS low, max(ns) AS high, percentile_cont(0.5) WITHIN GROUP (ORDER BY ns) AS median
    FROM alike
),
binned AS (
    SELECT
        CAST(LEAST(floor((a.ns - w.low) * CAST(:bins AS DOUBLE) / GREATEST(w.high - w.low, 1)), :bins - 1) AS BIGINT) AS bin,
        a.ns,
        w.low,
        w.high,
        w.median
    FROM alike a
    CROSS JOIN whole w
)
SELECT bin, count(*) AS spans, count(CASE WHEN ns < :own_ns THEN 1 END) AS faster, low, high, median
FROM binned
GROUP BY bin, low, high, median
ORDER BY bin
