-- Training steps of every rank of the attempt `:attempt`, that began at `:first_ns` or later, each
-- `:every`-th of them, by phase: what each rank did in the same step. What no child covers is `self_ns`.
SELECT
    rank,
    epoch,
    step,
    end_ns - start_ns AS wall_ns,
    data_load_ns,
    forward_ns,
    backward_ns,
    optimizer_step_ns,
    GREATEST(end_ns - start_ns - COALESCE(children_ns, 0), 0) AS self_ns
FROM training_steps
WHERE attempt = :attempt AND rank IS NOT NULL AND end_ns IS NOT NULL
    AND start_ns >= :first_ns AND step % :every = 0
ORDER BY epoch, step, rank
