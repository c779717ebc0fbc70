-- The next span of the session `:session` after `:at_ns`, or the previous one if `:forward` is false, with `:text` in
-- its name and the index `:number`, unless that is null. An open span lasts until `:until_ns`.
SELECT id, name, "index", start_ns, COALESCE(end_ns, :until_ns) AS end_ns
FROM spans
WHERE session = :session AND contains(lower(name), lower(:text)) AND (:number IS NULL OR "index" = :number)
    AND CASE WHEN :forward THEN start_ns > :at_ns ELSE start_ns < :at_ns END
ORDER BY CASE WHEN :forward THEN start_ns ELSE -start_ns END, key
LIMIT 1
