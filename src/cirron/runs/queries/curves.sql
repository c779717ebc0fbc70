-- All numeric marks in `:width` time buckets, with their peaks: the lowest and the highest finite value of a
-- bucket, the first and the last value, the number of values, and how many are NaN or infinite.
WITH whole AS (
    SELECT session, name, min(ts_ns) AS first_ns, max(ts_ns) AS last_ns
    FROM marks
    WHERE value IS NOT NULL
    GROUP BY session, name
),
points AS (
    SELECT
        m.session,
        m.name,
        m.ts_ns,
        m.id,
        m.value,
        CASE WHEN abs(m.value) < CAST('Infinity' AS DOUBLE) THEN m.value END AS finite,
        CAST(floor((m.ts_ns - w.first_ns) * CAST(:width AS DOUBLE) / (w.last_ns - w.first_ns + 1)) AS BIGINT) AS bucket
    FROM marks m
    JOIN whole w ON w.session = m.session AND w.name = m.name
    WHERE m.value IS NOT NULL
),
thinned AS (
    SELECT
        session,
        name,
        bucket,
        count(*) AS points,
        count(*) - count(finite) AS nonfinite,
        min(finite) AS lowest,
        min_by(ts_ns, CASE WHEN finite IS NOT NULL THEN (finite, ts_ns) END) AS lowest_ns,
        max(finite) AS highest,
        max_by(ts_ns, CASE WHEN finite IS NOT NULL THEN (finite, -ts_ns) END) AS highest_ns,
        min_by(value, (ts_ns, id)) AS first_value,
        min(ts_ns) AS first_ns,
        max_by(value, (ts_ns, id)) AS last_value,
        max(ts_ns) AS last_ns
    FROM points
    GROUP BY session, name, bucket
)
SELECT
    s.attempt,
    s.rank,
    s.session_id,
    t.name,
    t.bucket,
    t.points,
    t.nonfinite,
    t.lowest,
    t.lowest_ns,
    t.highest,
    t.highest_ns,
    t.first_value,
    t.first_ns,
    t.last_value,
    t.last_ns
FROM thinned t
JOIN sessions s ON s.session = t.session
ORDER BY s.attempt, s.rank NULLS FIRST, s.session_id, t.name, t.bucket
