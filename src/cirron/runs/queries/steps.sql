-- One row a training step that has ended, of each rank: how long it took, each of its phases, what no
-- child covers (`self_ns`), and the last loss that it marked. Children in other threads do not count.
-- A time that nobody measured is null.
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
