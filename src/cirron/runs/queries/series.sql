-- The values of the mark `:name` by time.
SELECT s.attempt, s.rank, s.session_id, m.epoch, m.step, m.ts_ns, m.value, m.kind
FROM marks m
JOIN sessions s ON s.session = m.session
WHERE m.name = :name AND m.value IS NOT NULL
ORDER BY s.attempt, s.rank NULLS FIRST, s.session_id, m.ts_ns NULLS FIRST, m.id
