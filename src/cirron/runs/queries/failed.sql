-- The newest `:most` spans of the session `:session` that failed, each in the thread of its parent; of those
-- that ended at one moment the outer ones first.
SELECT path, epoch, step, "index", start_ns
FROM spans
WHERE session = :session AND error IS NOT NULL AND end_ns IS NOT NULL AND in_thread
ORDER BY end_ns DESC, depth, key
LIMIT :most
