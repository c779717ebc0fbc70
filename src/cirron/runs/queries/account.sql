-- The time between `:first_ns` and `:last_ns` of the session `:session` by name: training steps, what is
-- in them, and what is beside them, with scopes of the program that hold no training step. What is inside
-- an evaluation or a checkpoint counts for it, but for compilations in evaluations. Of what is inside of
-- something in a step, the place is that thing's name; of what is inside of a scope beside them, that scope's
-- name after `beside/`. Forward passes outside of steps are predictions if the model is in eval mode.
WITH above AS (
    SELECT string_agg(path, ' ') AS paths
    FROM (SELECT DISTINCT path FROM spans WHERE session = :session AND is_training_step) p
)
SELECT name, place, count(*) AS spans, COALESCE(try_sum(end_ns - start_ns), 9223372036854775807) AS ns
FROM (
    SELECT
        CASE WHEN name <> 'forward' OR step_key IS NOT NULL THEN name WHEN mode = 'eval' THEN 'prediction'
            ELSE 'forward outside steps' END AS name,
        start_ns, end_ns,
        CASE WHEN in_step THEN 'in step' WHEN in_evaluation THEN 'evaluation'
            WHEN step_key IS NOT NULL AND NOT is_training_step THEN regexp_extract(path, '/(step|batch)/([^/]+)', 2)
            WHEN NOT is_training_step AND parent_name NOT IN ('cirron.session', 'epoch', 'fit')
                THEN concat('beside/', regexp_extract(path, '^(.*/)?(cirron.session|epoch|fit)/([^/]+)/', 3))
            ELSE 'beside' END AS place
    FROM spans
    WHERE session = :session AND start_ns >= :first_ns AND end_ns <= :last_ns
        AND (NOT in_aside AND (is_training_step OR in_step OR name IN ('evaluation', 'prediction', 'checkpoint',
                'compile', 'trace', 'lower', 'logging', 'data_setup', 'data_teardown')
            OR step_key IS NOT NULL AND in_thread AND name IN ('data_load', 'forward', 'backward', 'optimizer_step')
                AND parent_name NOT IN ('data_load', 'forward', 'backward', 'optimizer_step')
            OR step_key IS NULL AND in_thread AND parent_name IN ('cirron.session', 'epoch', 'fit')
                AND name NOT IN ('epoch', 'fit', 'data_load', 'backward', 'optimizer_step')
                AND instr((SELECT paths FROM above), concat(path, '/')) = 0)
        OR in_evaluation AND name IN ('compile', 'trace', 'lower')
            AND parent_name NOT IN ('compile', 'trace', 'lower', 'checkpoint'))
) s
GROUP BY name, place
ORDER BY name, place
