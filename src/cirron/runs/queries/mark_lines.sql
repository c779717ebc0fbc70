-- The values of the mark `:name` between `:first` and `:last` on an axis, in `:width` buckets: how many, from where
-- to where, their mean, lowest, highest and last finite value, and how many are NaN or infinite. One line per session
-- of the rank `:rank` (-1: without a rank), or of all ranks with `:all_ranks`, at most `:lines`. The `:axis` is 'step'
-- (counted over the whole session), 'epoch' (with the part of it that is over), or 'time' (seconds since `:zero_ns`).
WITH chosen AS (
    SELECT session, last_ns
    FROM sessions
    WHERE :all_ranks OR COALESCE(rank, -1) = :rank
    ORDER BY attempt DESC, rank NULLS FIRST, session
    LIMIT :lines
),
begun AS (
    SELECT
        p.session,
        p.epoch,
        p.start_ns,
        COALESCE(p.end_ns, c.last_ns) AS end_ns,
        row_number() OVER (PARTITION BY p.session ORDER BY p.start_ns, p.key) AS nth
    FROM spans p
    JOIN chosen c ON c.session = p.session
    WHERE (:axis = 'step' AND p.is_training_step) OR (:axis = 'epoch' AND p.name = 'epoch' AND NOT p.in_evaluation)
),
-- The number of steps or epochs that had started at each value: a running count over both.
counted AS (
    SELECT
        *,
        count(nth) OVER (
            PARTITION BY session ORDER BY ts_ns, is_value, id ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ) AS begun
    FROM (
        SELECT m.session, m.ts_ns, m.id, m.value, 1 AS is_value, CAST(NULL AS BIGINT) AS nth
        FROM marks m
        JOIN chosen c ON c.session = m.session
        WHERE m.name = :name AND m.value IS NOT NULL
        UNION ALL
        SELECT session, start_ns, '', CAST(NULL AS DOUBLE), 0, nth
        FROM begun
    ) b
),
placed AS (
    SELECT
        v.session,
        v.ts_ns,
        v.id,
        CASE WHEN abs(v.value) < CAST('Infinity' AS DOUBLE) THEN v.value END AS finite,
        CASE :axis
            WHEN 'time' THEN (v.ts_ns - :zero_ns) / CAST(1000000000 AS DOUBLE)
            WHEN 'step' THEN GREATEST(v.begun - 1, 0)
            ELSE COALESCE(b.epoch + LEAST((v.ts_ns - b.start_ns) / CAST(GREATEST(b.end_ns - b.start_ns, 1) AS DOUBLE), 1), 0)
        END AS x
    FROM counted v
    LEFT JOIN begun b ON :axis = 'epoch' AND b.session = v.session AND b.nth = v.begun
    WHERE v.is_value = 1
),
whole AS (
    SELECT GREATEST(min(x), :first) AS low, LEAST(max(x), :last) AS high
    FROM placed
),
cut AS (
    SELECT
        p.*,
        LEAST(CAST(floor((p.x - w.low) * CAST(:width AS DOUBLE) / GREATEST(w.high - w.low, CAST(1e-9 AS DOUBLE))) AS BIGINT),
            :width - 1) AS bucket
    FROM placed p
    CROSS JOIN whole w
    WHERE p.x >= w.low AND p.x <= w.high
)
SELECT
    session,
    bucket,
    count(*) AS points,
    min(x) AS x,
    max(x) AS until,
    LEAST(GREATEST(avg(finite), min(finite)), max(finite)) AS mean, -- a sum of values near 1e308 is infinite
    min(finite) AS low,
    max(finite) AS high,
    max_by(finite, CASE WHEN finite IS NOT NULL THEN (x, ts_ns, id) END) AS "last",
    count(*) - count(finite) AS nonfinite
FROM cut
GROUP BY session, bucket
ORDER BY session, bucket
