-- The newest `:most` spans of each name and mode of the session `:session` that ended without an error, by end;
-- without the steps of evaluations and what they load, which have the names of the training's.
SELECT name, mode, wall_ns
FROM (
    SELECT name, mode, end_ns, key, end_ns - start_ns AS wall_ns,
        row_number() OVER (PARTITION BY name, mode ORDER BY end_ns DESC, key) AS place
    FROM spans
    WHERE session = :session AND end_ns IS NOT NULL AND error IS NULL
        AND NOT (in_evaluation AND name IN ('step', 'batch', 'data_load'))
) s
WHERE place <= :most
ORDER BY end_ns, key
