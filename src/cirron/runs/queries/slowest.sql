-- The number of training steps of the attempt `:attempt` in which each session was the slowest. Counts the time
-- outside backward, because ranks wait for each other there, plus the time since the previous step. Every `:every`-th
-- step counts, if all `:sessions` sessions did it.
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
