-- The ended training steps `:first` to `:last` of the session `:session`, by start, that failed or took far longer
-- than the others: more than three medians, and 1.5 times the 95th percentile. At most `:most`, the longest.
WITH numbered AS (
    SELECT *, end_ns - start_ns AS wall, row_number() OVER (ORDER BY start_ns, key) - 1 AS number
    FROM training_steps
    WHERE session = :session AND end_ns IS NOT NULL
),
whole AS (
    SELECT
        percentile_cont(0.5) WITHIN GROUP (ORDER BY wall) AS median,
        percentile_cont(0.95) WITHIN GROUP (ORDER BY wall) AS p95
    FROM numbered
)
SELECT n.number, n.epoch, n.step, n.start_ns, n.end_ns, n.wall, n.error
FROM numbered n
CROSS JOIN whole w
WHERE n.number >= :first AND n.number < :last
    AND (n.wall > GREATEST(3 * w.median, 1.5 * w.p95) OR n.error IS NOT NULL)
ORDER BY n.error IS NULL, n.wall DESC, n.number
LIMIT :most
