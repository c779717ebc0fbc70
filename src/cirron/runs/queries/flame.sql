-- The spans of the session `:session` between `:from_ns` and `:to_ns` by path: how many, how many failed, their
-- time in that range, how much of it was in the thread of their parents, the longest and the median, in nanoseconds.
-- The `:most` paths with the lowest depth and the most time. An open span lasts until `:until_ns`.
SELECT
    path,
    min(name) AS name,
    depth,
    count(*) AS spans,
    count(error) AS errors,
    COALESCE(try_sum(LEAST(COALESCE(end_ns, :until_ns), :to_ns) - GREATEST(start_ns, :from_ns)), 9223372036854775807) AS ns,
    COALESCE(try_sum(CASE WHEN in_thread
        THEN LEAST(COALESCE(end_ns, :until_ns), :to_ns) - GREATEST(start_ns, :from_ns) ELSE 0 END), 9223372036854775807) AS in_thread,
    max(COALESCE(end_ns, :until_ns) - start_ns) AS worst,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY COALESCE(end_ns, :until_ns) - start_ns) AS median
FROM spans
WHERE session = :session AND start_ns < :to_ns AND COALESCE(end_ns, :until_ns) > :from_ns
GROUP BY path, depth
ORDER BY depth, ns DESC, path
LIMIT :most
