-- The marks of each rank after `:since_ns`, by time. The losses of steps are left out: `steps_since` has them.
SELECT s.session_id, m.rank, m.epoch, m.step, m.span_name, m.ts_ns AS end_ns, m.name, m.value, m.text
FROM marks m
JOIN sessions s ON s.session = m.session
WHERE m.ts_ns > :since_ns AND NOT (m.name = 'loss' AND m.step_key IS NOT NULL)
ORDER BY m.ts_ns, s.session_id, m.id
