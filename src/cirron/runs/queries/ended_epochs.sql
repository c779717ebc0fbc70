-- The attributes of the epochs of the session `:session` that ended between `:first_ns` and `:last_ns`, as JSON.
SELECT epoch, attrs
FROM spans
WHERE session = :session AND name = 'epoch' AND end_ns >= :first_ns AND end_ns <= :last_ns
ORDER BY end_ns, key
