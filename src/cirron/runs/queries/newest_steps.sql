-- The newest `:most` training steps of the session `:session` that ended well, newest first, with what
-- the verdict rests on: `beside_ns` is what an evaluation, a checkpoint, a compilation or the loader's set-up took
-- in them. A compilation inside of a forward or a backward is not part of it. What is inside of scopes counts, too.
SELECT
    max(CASE WHEN is_training_step THEN epoch END) AS epoch,
    max(CASE WHEN is_training_step THEN step END) AS step,
    max(CASE WHEN is_training_step THEN start_ns END) AS start_ns,
    max(CASE WHEN is_training_step THEN end_ns - start_ns END) AS wall_ns,
    try_sum(CASE WHEN name = 'data_load' THEN end_ns - start_ns END) AS data_load_ns,
    try_sum(CASE WHEN name = 'forward' THEN end_ns - start_ns
        WHEN name = 'compile' AND parent_name = 'forward' THEN start_ns - end_ns END) AS forward_ns,
    try_sum(CASE WHEN name = 'backward' THEN end_ns - start_ns
        WHEN name = 'compile' AND parent_name = 'backward' THEN start_ns - end_ns END) AS backward_ns,
    try_sum(CASE WHEN name = 'optimizer_step' THEN end_ns - start_ns END) AS optimizer_step_ns,
    COALESCE(try_sum(CASE WHEN name IN ('evaluation', 'prediction', 'checkpoint', 'compile', 'trace', 'lower', 'logging',
        'data_setup', 'data_teardown') THEN end_ns - start_ns END), 0) AS beside_ns,
    GREATEST(max(CASE WHEN is_training_step THEN end_ns - start_ns END)
        - COALESCE(try_sum(CASE WHEN in_step THEN end_ns - start_ns END), 0), 0) AS self_ns,
    try_sum(CASE WHEN in_step THEN gpu_ns END) AS gpu_ns,
    max(memory_peak_bytes) AS memory_peak_bytes,
    COALESCE(try_sum(CASE WHEN name = 'forward' AND mode = 'eval' THEN end_ns - start_ns END), 0) AS evaluation_ns,
    count(CASE WHEN name = 'forward' THEN 1 END) AS forwards,
    max(CASE WHEN is_training_step THEN name END) AS name,
    max(CASE WHEN is_training_step AND name = 'batch' THEN attrs END) AS attrs
FROM spans
WHERE session = :session AND (is_training_step OR in_step OR step_key IS NOT NULL AND in_thread AND NOT in_aside
    AND (name IN ('evaluation', 'prediction', 'checkpoint', 'compile', 'trace', 'lower', 'logging',
            'data_setup', 'data_teardown')
        OR name IN ('data_load', 'forward', 'backward', 'optimizer_step')
            AND parent_name NOT IN ('data_load', 'forward', 'backward', 'optimizer_step')))
GROUP BY CASE WHEN is_training_step THEN key WHEN in_step THEN parent_key ELSE step_key END
HAVING max(CASE WHEN is_training_step THEN end_ns END) IS NOT NULL
    AND max(CASE WHEN is_training_step THEN error END) IS NULL
ORDER BY 3 DESC, 4 DESC, 2 NULLS FIRST, 1 NULLS FIRST
LIMIT :most
