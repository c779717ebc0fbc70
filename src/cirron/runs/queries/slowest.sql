-- In how many training steps of the attempt `:attempt` each session was the slowest: outside of backward, in
-- which ranks wait for each other, and with the time since the step before. Each `:every`-th step counts, if all
-- `:sessions` sessions did it.
SELECT session, count(*) AS steps
FROM (
    SELECT max_by(session, (end_ns - start_ns - COALESCE(backward_ns, 0) + COALESCE(wait_ns, 0), session)) AS session
    FROM waited_steps
    WHERE attempt = :attempt AND COALESCE(step, 0) % :every = 0
    GROUP BY epoch, step
    HAVING count(DISTINCT session) = :sessions
) s
GROUP BY session
ORDER BY session
