-- The attributes of the session's own span, as JSON.
SELECT max(attrs) AS attrs
FROM spans
WHERE path = 'cirron.session'
