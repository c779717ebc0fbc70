-- One row per rank and ended training step: its duration, each phase, the time that no child covers (`self_ns`), and
-- its last loss. Children in other threads do not count. A time that was not measured is null.
SELECT
    attempt,
    rank,
    session_id,
    epoch,
    step,
    start_ns,
    end_ns,
    end_ns - start_ns AS wall_ns,
    data_load_ns,
    forward_ns,
    backward_ns,
    optimizer_step_ns,
    evaluation_ns,
    other_ns,
    GREATEST(end_ns - start_ns - COALESCE(children_ns, 0), 0) AS self_ns,
    gpu_ns,
    memory_peak_bytes,
    loss,
    error
FROM training_steps
WHERE end_ns IS NOT NULL
ORDER BY attempt, rank NULLS FIRST, session_id, start_ns, key
