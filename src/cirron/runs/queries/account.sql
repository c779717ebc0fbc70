-- The time between `:first_ns` and `:last_ns` of the session `:session` by name: training steps, what is
-- in them, and what is beside them. What is inside an evaluation or a checkpoint counts for it. A compilation
-- inside of a phase has that phase's name for its place.
SELECT
    name,
    CASE WHEN in_step THEN 'in step' WHEN name = 'compile' AND parent_name IN ('forward', 'backward')
        AND step_key IS NOT NULL THEN parent_name ELSE 'beside' END AS place,
    count(*) AS spans,
    CAST(sum(end_ns - start_ns) AS BIGINT) AS ns
FROM spans
WHERE session = :session AND start_ns >= :first_ns AND end_ns <= :last_ns AND NOT in_aside
    AND (is_training_step OR in_step OR name IN ('evaluation', 'prediction', 'checkpoint', 'compile',
        'trace', 'lower', 'logging', 'data_setup', 'data_teardown'))
GROUP BY name, CASE WHEN in_step THEN 'in step' WHEN name = 'compile' AND parent_name IN ('forward', 'backward')
        AND step_key IS NOT NULL THEN parent_name ELSE 'beside' END
ORDER BY name, place
