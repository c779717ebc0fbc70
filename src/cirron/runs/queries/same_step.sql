-- The training step `:step` of the epoch `:epoch` and the attempt `:attempt` on every rank, at most `:most`. An open
-- step lasts until `:until_ns`.
SELECT rank, session, start_ns, COALESCE(end_ns, :until_ns) AS end_ns
FROM training_steps
WHERE attempt = :attempt AND epoch IS NOT DISTINCT FROM :epoch AND step IS NOT DISTINCT FROM :step
ORDER BY rank NULLS FIRST, start_ns, session, key
LIMIT :most
