-- The ended training steps of each session of the attempt `:attempt`: how many, their median and longest, in
-- nanoseconds, the median of what is outside of backward, when the first began and when the last ended.
SELECT
    session,
    count(*) AS steps,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY end_ns - start_ns) AS median,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY end_ns - start_ns - COALESCE(backward_ns, 0)) AS own,
    max(end_ns - start_ns) AS worst,
    min(start_ns) AS first_ns,
    max(end_ns) AS last_ns
FROM training_steps
WHERE attempt = :attempt AND end_ns IS NOT NULL
GROUP BY session
ORDER BY session
