-- The time of training steps between `:first_ns` and `:last_ns` of the session `:session` that no part of them
-- covers, by the parts before and after it, longest first.
WITH parts AS (
    SELECT parent_key AS step_key, name, start_ns, end_ns
    FROM spans
    WHERE session = :session AND in_step AND start_ns >= :first_ns AND end_ns <= :last_ns
    UNION ALL
    SELECT key AS step_key, 'the start of the step' AS name, start_ns, start_ns AS end_ns
    FROM spans
    WHERE session = :session AND is_training_step AND start_ns >= :first_ns AND end_ns <= :last_ns
    UNION ALL
    SELECT key AS step_key, 'the end of the step' AS name, end_ns AS start_ns, end_ns
    FROM spans
    WHERE session = :session AND is_training_step AND start_ns >= :first_ns AND end_ns <= :last_ns
)
SELECT before_name, after_name, try_sum(gap_ns) AS ns
FROM (
    SELECT
        lag(name) OVER earlier AS before_name,
        name AS after_name,
        start_ns - lag(end_ns) OVER earlier AS gap_ns
    FROM parts
    WINDOW earlier AS (PARTITION BY step_key ORDER BY start_ns, end_ns, name DESC)
) g
WHERE gap_ns > 0
GROUP BY before_name, after_name
ORDER BY ns DESC NULLS LAST, before_name, after_name
