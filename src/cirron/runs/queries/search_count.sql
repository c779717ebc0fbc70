-- The number of spans of the session `:session` with `:text` in their name and the index `:number`, unless that is
-- null.
SELECT count(*) AS spans
FROM spans
WHERE session = :session AND contains(lower(name), lower(:text)) AND (:number IS NULL OR "index" = :number)
