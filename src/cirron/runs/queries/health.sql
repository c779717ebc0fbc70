-- The unhealthy tensors that the snapshots of the session `:session` found, as JSON.
SELECT epoch, attrs
FROM marks
WHERE session = :session AND name = 'training_health' AND attrs IS NOT NULL
ORDER BY ts_ns NULLS FIRST, id
