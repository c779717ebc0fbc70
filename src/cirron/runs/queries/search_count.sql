-- How many spans of the session `:session` have `:text` in their name, and the index `:number` if that is
-- not null.
SELECT count(*) AS spans
FROM spans
WHERE session = :session AND contains(lower(name), lower(:text)) AND (:number IS NULL OR "index" = :number)
