-- The training steps of each rank that ended after `:since_ns`, by end. `step_name` is `step` or `batch`.
SELECT
    t.session_id, t.rank, t.epoch, t.step, p.name AS step_name, t.end_ns, t.end_ns - t.start_ns AS wall_ns, t.data_load_ns, t.loss, t.error
FROM training_steps t
JOIN spans p ON p.session = t.session AND p.key = t.key
WHERE t.end_ns > :since_ns AND p.end_ns > :since_ns AND p.is_training_step
ORDER BY t.end_ns, t.session_id, t.key
