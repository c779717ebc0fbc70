-- What the session `:session` did beside its steps between `:from_ns` and `:to_ns`: evaluations, checkpoints,
-- compilations and snapshots, the longest `:most`. One that is open lasts until `:until_ns`.
SELECT name, start_ns, COALESCE(end_ns, :until_ns) AS end_ns
FROM spans
WHERE session = :session AND NOT in_aside AND start_ns < :to_ns AND COALESCE(end_ns, :until_ns) > :from_ns
    AND name IN ('evaluation', 'prediction', 'checkpoint', 'compile', 'snapshot')
ORDER BY COALESCE(end_ns, :until_ns) - start_ns DESC, start_ns, key
LIMIT :most
