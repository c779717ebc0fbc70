-- How long the session `:session` trained, in steps that did not fail and without compilations, and what it
-- did beside its steps. Null: nothing of the kind has ended.
SELECT
    try_sum(CASE WHEN is_training_step AND error IS NULL THEN end_ns - start_ns
        WHEN is_compiling AND step_key IS NOT NULL THEN start_ns - end_ns END) AS step_ns,
    try_sum(CASE WHEN step_key IS NULL AND name IN ('evaluation', 'prediction') THEN end_ns - start_ns END)
        AS evaluation_ns,
    try_sum(CASE WHEN step_key IS NULL AND name = 'checkpoint' THEN end_ns - start_ns END) AS checkpoint_ns,
    try_sum(CASE WHEN is_compiling THEN end_ns - start_ns END) AS compile_ns,
    try_sum(CASE WHEN step_key IS NULL AND name IN ('data_load', 'data_setup', 'data_teardown') THEN end_ns - start_ns END) AS loading_ns
FROM (
    SELECT *, name IN ('compile', 'trace', 'lower')
        AND COALESCE(parent_name, '') NOT IN ('compile', 'trace', 'lower') AS is_compiling
    FROM spans
    WHERE session = :session AND end_ns IS NOT NULL AND NOT in_aside
) s
