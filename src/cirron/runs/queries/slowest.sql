-- In how many training steps of the attempt `:attempt` each session was the slowest: outside of backward, in
-- which ranks wait for each other, and with the time since the step before. Each `:every`-th step counts, if all
-- `:sessions` sessions did it.
SELECT session, count(*) AS steps
FROM (
    SELECT max_by(session, (end_ns - start_ns - COALESCE(backward_ns, 0) + COALESCE(wait_ns, 0), session)) AS session
    FROM (
        SELECT *, CASE WHEN step = lag(step) OVER earlier + 1 THEN GREATEST(start_ns - lag(end_ns) OVER earlier, 0) END AS wait_ns
        FROM training_steps
        WHERE attempt = :attempt AND end_ns IS NOT NULL
        WINDOW earlier AS (PARTITION BY session, pid, thread_id, epoch_key ORDER BY start_ns, key)
    ) t
    WHERE COALESCE(step, 0) % :every = 0
    GROUP BY epoch, step
    HAVING count(DISTINCT session) = :sessions
) s
GROUP BY session
ORDER BY session
