-- The newest `:most` failed spans of the session `:session` that ran in the thread of their parent. If several
-- ended at the same time, the outer spans come first.
SELECT path, epoch, step, "index", start_ns
FROM spans
WHERE session = :session AND error IS NOT NULL AND end_ns IS NOT NULL AND in_thread
ORDER BY end_ns DESC, depth, key
LIMIT :most
