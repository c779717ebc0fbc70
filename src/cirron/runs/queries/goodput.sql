-- How much of each attempt's time went into steps that counted: they did not fail, and no later attempt repeated
-- them. For the rank with the most steps. `gap_ns` is the time since the last sign of life of the previous attempt.
WITH counted AS (
    SELECT session, count(*) AS steps
    FROM training_steps
    WHERE end_ns IS NOT NULL
    GROUP BY session
),
chosen AS (
    SELECT *, first_ns - lag(last_ns) OVER (ORDER BY attempt) AS gap_ns
    FROM (
        SELECT s.session, s.attempt, s.rank, s.session_id, s.first_ns, s.last_ns, COALESCE(c.steps, 0) AS steps,
            row_number() OVER (
                PARTITION BY s.attempt ORDER BY COALESCE(c.steps, 0) DESC, s.rank NULLS LAST, s.session_id
            ) AS place
        FROM sessions s
        LEFT JOIN counted c ON c.session = s.session
    ) c
    WHERE place = 1
),
steps AS (
    SELECT
        t.session, t.attempt, t.epoch, t.step, t.end_ns - t.start_ns AS ns, t.error,
        row_number() OVER (PARTITION BY t.session, t.epoch, t.step ORDER BY t.start_ns, t.key) AS nth
    FROM training_steps t
    JOIN chosen c ON c.session = t.session
    WHERE t.end_ns IS NOT NULL
),
kept AS (
    SELECT *, max(attempt) OVER (PARTITION BY epoch, step, nth) AS last_attempt
    FROM steps
)
SELECT
    c.attempt,
    c.rank,
    c.session_id,
    c.steps,
    count(CASE WHEN k.attempt < k.last_attempt THEN 1 END) AS steps_done_again,
    c.last_ns - c.first_ns AS wall_ns,
    c.gap_ns,
    COALESCE(try_sum(k.ns), 0) AS step_ns,
    COALESCE(try_sum(CASE WHEN k.attempt = k.last_attempt AND k.error IS NULL THEN k.ns END), 0) AS good_ns,
    COALESCE(sum(CASE WHEN k.attempt = k.last_attempt AND k.error IS NULL THEN CAST(k.ns AS DOUBLE) END), 0)
        / NULLIF(c.last_ns - c.first_ns, 0) AS goodput
FROM chosen c
LEFT JOIN kept k ON k.session = c.session
GROUP BY c.attempt, c.rank, c.session_id, c.steps, c.first_ns, c.last_ns, c.gap_ns
ORDER BY c.attempt
