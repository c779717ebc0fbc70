-- The values of all marks of the session `:session`, by time.
SELECT name, epoch, step, value
FROM marks
WHERE session = :session AND value IS NOT NULL
ORDER BY ts_ns NULLS FIRST, id
