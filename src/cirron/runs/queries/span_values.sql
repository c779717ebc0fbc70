-- The marks of the span with the key `:key` in the session `:session`: the first `:most`, by time.
SELECT name, value, text, kind, ts_ns
FROM marks
WHERE session = :session AND span_key = :key
ORDER BY ts_ns NULLS FIRST, id
LIMIT :most
