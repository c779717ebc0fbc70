-- The ended training steps of each session of the attempt `:attempt`: how many, their median and longest, in
-- nanoseconds, when the first began and when the last ended. `own` is the median of what is outside of backward,
-- with the time since the step before it.
SELECT
    session,
    count(*) AS steps,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY end_ns - start_ns) AS median,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY end_ns - start_ns - COALESCE(backward_ns, 0) + COALESCE(wait_ns, 0)) AS own,
    max(end_ns - start_ns) AS worst,
    min(start_ns) AS first_ns,
    max(end_ns) AS last_ns
FROM (
    SELECT *, CASE WHEN step = lag(step) OVER earlier + 1 THEN GREATEST(start_ns - lag(end_ns) OVER earlier, 0) END AS wait_ns
    FROM training_steps
    WHERE attempt = :attempt AND end_ns IS NOT NULL
    WINDOW earlier AS (PARTITION BY session, pid, thread_id, epoch_key ORDER BY start_ns, key)
) s
GROUP BY session
ORDER BY session
