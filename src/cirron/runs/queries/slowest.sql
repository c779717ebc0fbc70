-- In how many training steps of the attempt `:attempt` each session was the slowest. Each `:every`-th step
-- counts, if all `:sessions` sessions did it.
SELECT session, count(*) AS steps
FROM (
    SELECT max_by(session, (end_ns - start_ns, session)) AS session
    FROM training_steps
    WHERE attempt = :attempt AND end_ns IS NOT NULL AND COALESCE(step, 0) % :every = 0
    GROUP BY epoch, step
    HAVING count(DISTINCT session) = :sessions
) s
GROUP BY session
ORDER BY session
