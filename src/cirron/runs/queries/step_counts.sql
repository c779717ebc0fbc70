-- The number of ended training steps of each session.
SELECT session, count(*) AS steps
FROM training_steps
WHERE end_ns IS NOT NULL
GROUP BY session
ORDER BY session
