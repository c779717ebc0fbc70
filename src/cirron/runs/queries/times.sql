-- Where the time of each rank's training thread went. The columns are parts of `wall_ns` and do not overlap: an
-- evaluation, a checkpoint, a compilation or a snapshot inside a step counts as such and not for the step, and
-- everything inside it counts for it. `loading_ns` is data loading outside steps. `idle_ns` is the time when no span
-- below the session was open. An open span lasts until the last sign of life of its session.
WITH ended AS (
    SELECT session, pid, thread_id, min(depth) AS depth, min(start_ns) AS start_ns,
        sum(CASE WHEN key = step_key THEN CAST(end_ns - start_ns AS DOUBLE) END) AS step_ns
    FROM spans
    GROUP BY session, pid, thread_id
),
opened AS (
    SELECT p.session, p.pid, p.thread_id, sum(CAST(s.last_ns - p.start_ns AS DOUBLE)) AS step_ns
    FROM spans p
    JOIN sessions s ON s.session = p.session
    WHERE p.end_ns IS NULL AND p.key = p.step_key
    GROUP BY p.session, p.pid, p.thread_id
),
threads AS (
    SELECT e.session, e.pid, e.thread_id,
        row_number() OVER (
            PARTITION BY e.session
            ORDER BY COALESCE(e.step_ns, 0) + COALESCE(o.step_ns, 0) DESC, e.depth, e.start_ns, e.pid, e.thread_id
        ) AS place
    FROM ended e
    LEFT JOIN opened o ON o.session = e.session
        AND o.pid IS NOT DISTINCT FROM e.pid AND o.thread_id IS NOT DISTINCT FROM e.thread_id
),
named AS (
    SELECT
        p.session,
        p.start_ns,
        COALESCE(p.end_ns, s.last_ns) AS end_ns,
        p.step_key IS NOT NULL AND p.step_key <> p.key AS is_in_step,
        CASE
            WHEN p.name IN ('step', 'batch') THEN 'step'
            WHEN p.name IN ('evaluation', 'prediction') THEN 'evaluation'
            WHEN p.name IN ('compile', 'trace', 'lower') THEN 'compile'
            WHEN p.name IN ('data_load', 'data_setup', 'data_teardown') THEN 'loading'
            WHEN p.name IN ('checkpoint', 'snapshot') THEN p.name
        END AS part,
        COALESCE(p.parent_name, 'cirron.session') = 'cirron.session' AND p.name <> 'cirron.session' AS is_top,
        p.in_aside,
        p.is_training_step
    FROM spans p
    JOIN sessions s ON s.session = p.session
    JOIN threads t ON t.session = p.session AND t.place = 1
        AND t.pid IS NOT DISTINCT FROM p.pid AND t.thread_id IS NOT DISTINCT FROM p.thread_id
    -- Only spans inside the next two: most spans are in neither, and need no join.
    WHERE p.is_training_step OR COALESCE(p.parent_name, 'cirron.session') = 'cirron.session'
        OR p.name IN ('evaluation', 'prediction', 'compile', 'trace', 'lower', 'checkpoint', 'snapshot')
        OR (p.name IN ('data_load', 'data_setup', 'data_teardown') AND (p.step_key IS NULL OR p.step_key = p.key))
),
parts AS (
    SELECT session, part, is_in_step, end_ns - start_ns AS ns
    FROM named
    WHERE part IS NOT NULL AND NOT in_aside
        AND (part <> 'step' OR is_training_step) AND (part <> 'loading' OR NOT is_in_step)
),
summed AS (
    SELECT
        session,
        try_sum(CASE WHEN part = 'step' THEN ns WHEN is_in_step THEN -ns ELSE 0 END) AS step_ns,
        try_sum(CASE WHEN part = 'evaluation' THEN ns ELSE 0 END) AS evaluation_ns,
        try_sum(CASE WHEN part = 'checkpoint' THEN ns ELSE 0 END) AS checkpoint_ns,
        try_sum(CASE WHEN part = 'compile' THEN ns ELSE 0 END) AS compile_ns,
        try_sum(CASE WHEN part = 'snapshot' THEN ns ELSE 0 END) AS snapshot_ns,
        try_sum(CASE WHEN part = 'loading' THEN ns ELSE 0 END) AS loading_ns,
        try_sum(CASE WHEN part = 'step' OR NOT is_in_step THEN ns ELSE 0 END) AS ns
    FROM parts
    GROUP BY session
),
covered AS (
    SELECT session, try_sum(GREATEST(end_ns - GREATEST(start_ns, COALESCE(before_ns, start_ns)), 0)) AS ns
    FROM (
        SELECT session, start_ns, end_ns,
            max(end_ns) OVER (
                PARTITION BY session ORDER BY start_ns, end_ns ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ) AS before_ns
        FROM named
        WHERE is_top
    ) x
    GROUP BY session
)
SELECT
    s.attempt,
    s.rank,
    s.session_id,
    s.last_ns - s.first_ns AS wall_ns,
    COALESCE(p.step_ns, 0) AS step_ns,
    COALESCE(p.evaluation_ns, 0) AS evaluation_ns,
    COALESCE(p.checkpoint_ns, 0) AS checkpoint_ns,
    COALESCE(p.compile_ns, 0) AS compile_ns,
    COALESCE(p.snapshot_ns, 0) AS snapshot_ns,
    COALESCE(p.loading_ns, 0) AS loading_ns,
    GREATEST(COALESCE(c.ns, 0) - COALESCE(p.ns, 0), 0) AS other_ns,
    GREATEST(s.last_ns - s.first_ns - COALESCE(c.ns, 0), 0) AS idle_ns
FROM sessions s
LEFT JOIN summed p ON p.session = s.session
LEFT JOIN covered c ON c.session = s.session
ORDER BY s.attempt, s.rank NULLS FIRST, s.session_id
