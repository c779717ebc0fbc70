-- The compilations of the session `:session` that began at `:first_ns` or later and have ended; their
-- attributes say why, as JSON.
SELECT start_ns, end_ns - start_ns AS ns, attrs
FROM spans
WHERE session = :session AND name = 'compile' AND start_ns >= :first_ns AND end_ns IS NOT NULL
ORDER BY start_ns, key
