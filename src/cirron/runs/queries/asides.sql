-- The longest `:most` evaluations, checkpoints, compilations and snapshots of the session `:session` between
-- `:from_ns` and `:to_ns`. An open one lasts until `:until_ns`.
SELECT name, start_ns, COALESCE(end_ns, :until_ns) AS end_ns
FROM spans
WHERE session = :session AND NOT in_aside AND start_ns < :to_ns AND COALESCE(end_ns, :until_ns) > :from_ns
    AND name IN ('evaluation', 'prediction', 'checkpoint', 'compile', 'snapshot')
ORDER BY COALESCE(end_ns, :until_ns) - start_ns DESC, start_ns, key
LIMIT :most
