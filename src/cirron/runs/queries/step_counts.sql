-- How many training steps of each session have ended.
SELECT session, count(*) AS steps
FROM training_steps
WHERE end_ns IS NOT NULL
GROUP BY session
ORDER BY session
