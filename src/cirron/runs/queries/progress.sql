-- How far the training of the session `:session` is: its ended steps, the last epoch and step, when the first step
-- started and the last one ended, and the number of steps in the second-to-last epoch.
WITH done AS (
    SELECT epoch, step, start_ns, end_ns, key
    FROM training_steps
    WHERE session = :session AND end_ns IS NOT NULL
),
whole AS (
    SELECT
        count(*) AS steps,
        max(epoch) AS epoch,
        max_by(step, CASE WHEN step IS NOT NULL THEN (start_ns, key) END) AS step,
        min(start_ns) AS first_ns,
        max(end_ns) AS last_ns
    FROM done
)
SELECT w.steps, w.epoch, w.step, w.first_ns, w.last_ns, count(d.key) AS steps_of_epoch_before
FROM whole w
LEFT JOIN done d ON d.epoch = w.epoch - 1
GROUP BY w.steps, w.epoch, w.step, w.first_ns, w.last_ns
