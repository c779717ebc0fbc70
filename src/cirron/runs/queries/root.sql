-- What is recorded of the session itself, as JSON.
SELECT max(attrs) AS attrs
FROM spans
WHERE path = 'cirron.session'
