-- The ended compilations of the session `:session` that started at `:first_ns` or later. Their attributes say why,
-- as JSON.
SELECT start_ns, end_ns - start_ns AS ns, attrs
FROM spans
WHERE session = :session AND name = 'compile' AND start_ns >= :first_ns AND end_ns IS NOT NULL
ORDER BY start_ns, key
