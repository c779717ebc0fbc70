-- Every `:every`-th training step of every rank of the attempt `:attempt` that started at `:first_ns` or later, by
-- phase. `self_ns` is the time that no child covers, `wait_ns` the time since the previous step of the same epoch.
SELECT
    rank,
    epoch,
    step,
    end_ns - start_ns AS wall_ns,
    data_load_ns,
    forward_ns,
    backward_ns,
    optimizer_step_ns,
    GREATEST(end_ns - start_ns - COALESCE(children_ns, 0), 0) AS self_ns,
    wait_ns
FROM (
    SELECT *, CASE WHEN step = lag(step) OVER earlier + 1 THEN GREATEST(start_ns - lag(end_ns) OVER earlier, 0) END AS wait_ns
    FROM training_steps
    WHERE attempt = :attempt AND rank IS NOT NULL AND end_ns IS NOT NULL AND start_ns >= :first_ns
    WINDOW earlier AS (PARTITION BY session, pid, thread_id, epoch_key ORDER BY start_ns, key)
) s
WHERE step % :every = 0
ORDER BY epoch, step, rank
