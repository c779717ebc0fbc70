-- The newest `:most` values of each mark of the session `:session`, oldest first.
SELECT name, step, epoch, ts_ns, value
FROM (
    SELECT *, row_number() OVER (PARTITION BY name ORDER BY ts_ns DESC NULLS LAST, id DESC) AS place
    FROM marks
    WHERE session = :session AND value IS NOT NULL
) m
WHERE place <= :most
ORDER BY ts_ns NULLS FIRST, id
