-- The ended training steps `:first` to `:last` of the session `:session`, by start, in at most `:width` buckets of
-- equal size: which steps, when, the mean duration and the mean of each phase, and the longest, in nanoseconds. Each
-- row also has the number of all steps, their median and their 95th percentile. If there is no step in the range, a
-- single row has only these.
WITH numbered AS (
    SELECT *, end_ns - start_ns AS wall, row_number() OVER (ORDER BY start_ns, key) - 1 AS number
    FROM training_steps
    WHERE session = :session AND end_ns IS NOT NULL
),
whole AS (
    SELECT
        count(*) AS total,
        percentile_cont(0.5) WITHIN GROUP (ORDER BY wall) AS median,
        percentile_cont(0.95) WITHIN GROUP (ORDER BY wall) AS p95
    FROM numbered
),
seen AS (
    SELECT
        n.*,
        CAST(floor((n.number - :first) * CAST(:width AS DOUBLE) / GREATEST(LEAST(:last, w.total) - :first, 1)) AS BIGINT) AS bucket
    FROM numbered n
    CROSS JOIN whole w
    WHERE n.number >= :first AND n.number < :last
),
buckets AS (
    SELECT
        min(number) AS "first",
        max(number) AS "last",
        min(start_ns) AS start_ns,
        max(end_ns) AS end_ns,
        avg(wall) AS wall,
        max(wall) AS worst,
        avg(COALESCE(data_load_ns, 0)) AS data_load,
        avg(COALESCE(forward_ns, 0)) AS forward,
        avg(COALESCE(backward_ns, 0)) AS backward,
        avg(COALESCE(optimizer_step_ns, 0)) AS optimizer_step,
        avg(COALESCE(evaluation_ns, 0)) AS evaluation,
        avg(COALESCE(other_ns, 0)) AS other,
        avg(GREATEST(wall - COALESCE(children_ns, 0), 0)) AS self,
        avg(gpu_ns) AS gpu,
        max(memory_peak_bytes) AS memory
    FROM seen
    GROUP BY bucket
)
SELECT w.total, w.median, w.p95, b.*
FROM whole w
LEFT JOIN buckets b ON true
ORDER BY b."first"
