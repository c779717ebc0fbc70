-- The compilations of the session `:session` that began at `:first_ns` or later and have ended.
SELECT start_ns, end_ns - start_ns AS ns
FROM spans
WHERE session = :session AND name = 'compile' AND start_ns >= :first_ns AND end_ns IS NOT NULL
ORDER BY start_ns, key
