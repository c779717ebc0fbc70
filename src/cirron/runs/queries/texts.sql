-- The newest `:most` texts of the mark `:name`, newest first.
SELECT epoch, step, ts_ns, text
FROM marks
WHERE name = :name AND text IS NOT NULL
ORDER BY ts_ns DESC NULLS LAST, id DESC
LIMIT :most
