-- One row per rank and epoch outside any evaluation: its duration, its training steps, the time they waited for
-- data, its evaluations, and the last loss. An open epoch lasts until the last sign of life of its session.
WITH epochs AS (
    SELECT
        p.session, s.attempt, s.rank, s.session_id, p.key, p.id, p.epoch, p.pid, p.thread_id, p.start_ns, p.end_ns,
        GREATEST(COALESCE(p.end_ns, s.last_ns), p.start_ns) AS until_ns, p.cpu_ns, p.gpu_ns, p.memory_peak_bytes, p.error
    FROM spans p
    JOIN sessions s ON s.session = p.session
    WHERE p.name = 'epoch' AND NOT p.in_evaluation
),
steps AS (
    SELECT
        session,
        epoch_key,
        pid,
        thread_id,
        count(end_ns) AS steps,
        COALESCE(try_sum(end_ns - start_ns), 0) AS step_ns
    FROM training_steps
    GROUP BY session, epoch_key, pid, thread_id
),
inside AS (
    SELECT
        session,
        epoch_key,
        pid,
        thread_id,
        try_sum(CASE WHEN name = 'data_load' THEN end_ns - start_ns END) AS data_load_ns,
        try_sum(CASE WHEN name <> 'data_load' THEN end_ns - start_ns END) AS evaluation_ns
    FROM spans
    WHERE name IN ('data_load', 'evaluation', 'prediction') AND NOT in_evaluation AND epoch_key IS NOT NULL
    GROUP BY session, epoch_key, pid, thread_id
),
losses AS (
    SELECT session, epoch_key, max_by(loss, (loss_ns, start_ns, key)) AS loss
    FROM training_steps
    WHERE loss IS NOT NULL
    GROUP BY session, epoch_key
)
SELECT
    e.attempt,
    e.rank,
    e.session_id,
    e.epoch,
    e.start_ns,
    e.end_ns,
    e.until_ns - e.start_ns AS wall_ns,
    COALESCE(t.steps, 0) AS steps,
    COALESCE(t.step_ns, 0) AS step_ns,
    i.data_load_ns,
    i.evaluation_ns,
    e.cpu_ns,
    e.gpu_ns,
    e.memory_peak_bytes,
    l.loss,
    e.error
FROM epochs e
LEFT JOIN steps t ON t.session = e.session AND t.epoch_key = e.key
    AND t.pid IS NOT DISTINCT FROM e.pid AND t.thread_id IS NOT DISTINCT FROM e.thread_id
LEFT JOIN inside i ON i.session = e.session AND i.epoch_key = e.key
    AND i.pid IS NOT DISTINCT FROM e.pid AND i.thread_id IS NOT DISTINCT FROM e.thread_id
LEFT JOIN losses l ON l.session = e.session AND l.epoch_key = e.key
ORDER BY e.attempt, e.rank NULLS FIRST, e.session_id, e.start_ns, e.id
