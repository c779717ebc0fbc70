-- How long each rank waited for data inside training steps: the total, its share of the steps' time, and the number
-- of steps in which it was more than half of the step.
SELECT
    attempt,
    rank,
    session_id,
    count(*) AS steps,
    try_sum(end_ns - start_ns) AS step_ns,
    try_sum(COALESCE(data_load_ns, 0)) AS data_load_ns,
    sum(CAST(COALESCE(data_load_ns, 0) AS DOUBLE)) / NULLIF(sum(CAST(end_ns - start_ns AS DOUBLE)), 0) AS share,
    count(CASE WHEN data_load_ns > end_ns - start_ns - data_load_ns THEN 1 END) AS stalled_steps,
    max(data_load_ns) AS worst_ns
FROM training_steps
WHERE end_ns IS NOT NULL
GROUP BY attempt, rank, session_id
ORDER BY attempt, rank NULLS FIRST, session_id
