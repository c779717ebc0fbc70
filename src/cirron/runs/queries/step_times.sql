-- The ended training steps of each session of the attempt `:attempt`: how many, their median and longest duration in
-- nanoseconds, when the first started and the last ended. `own` is the median of the time outside backward plus the
-- time since the previous step.
SELECT
    session,
    count(*) AS steps,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY end_ns - start_ns) AS median,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY end_ns - start_ns - COALESCE(backward_ns, 0) + COALESCE(wait_ns, 0)) AS own,
    max(end_ns - start_ns) AS worst,
    min(start_ns) AS first_ns,
    max(end_ns) AS last_ns
FROM waited_steps
WHERE attempt = :attempt
GROUP BY session
ORDER BY session
