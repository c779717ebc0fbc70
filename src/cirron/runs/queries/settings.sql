-- The outermost epochs and fits of the session `:session`, and the session itself. Their attributes are the settings
-- of loader and model.
SELECT name, "index", end_ns - start_ns AS wall_ns, cpu_ns, memory_peak_bytes, attrs
FROM spans
WHERE session = :session AND depth <= 2 AND step_key IS NULL AND name IN ('epoch', 'fit', 'cirron.session')
ORDER BY start_ns, key
LIMIT 10000
