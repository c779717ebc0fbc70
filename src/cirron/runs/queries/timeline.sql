-- The data of a timeline between `:from_ns` and `:to_ns`, in at most `:width` buckets of a power of two in
-- nanoseconds. For each rank, thread, depth and bucket: the longest span that starts there, the number of spans that
-- do, their total time, the last end, the number of errors, and one of the errors. A span of at least one bucket is
-- also shown if it started before the window; its time outside the window does not count. An open span lasts until the
-- last sign of life of its session.
WITH shown AS (
    SELECT session, attempt, rank, session_id, last_ns
    FROM sessions
    WHERE COALESCE(rank, -1) BETWEEN :first_rank AND :last_rank
),
-- Open spans, and the spans of segments without cells of this level.
single AS (
    SELECT p.session, p.pid, p.thread_id, p.depth, p.key, p.id, p.name, p."index", p.start_ns,
        GREATEST(COALESCE(p.end_ns, s.last_ns), p.start_ns) AS end_ns, p.error
    FROM span_levels p
    JOIN shown s ON s.session = p.session
    WHERE p.depth <= :max_depth AND p.start_ns < :to_ns
        AND (p.end_ns IS NULL OR (p.finest_level > :level AND p.end_ns >= :from_ns))
),
merged AS (
    SELECT session, pid, thread_id, depth, key, id, name, "index", start_ns, end_ns, spans, busy_ns, last_end_ns, errors, error
    FROM cells
    WHERE level BETWEEN :level - 1 AND :level AND depth <= :max_depth AND start_ns < :to_ns AND last_end_ns >= :from_ns
        AND session IN (SELECT session FROM shown)
    UNION ALL
    SELECT session, pid, thread_id, depth, key, id, name, "index", start_ns, end_ns, 1, end_ns - start_ns, end_ns,
        CASE WHEN error IS NULL THEN 0 ELSE 1 END, error
    FROM single
),
placed AS (
    SELECT
        *,
        CAST(floor((GREATEST(start_ns, :from_ns) - :from_ns) / :bucket_ns) AS BIGINT) AS bucket,
        (end_ns - start_ns, -start_ns, key) AS length
    FROM merged
    WHERE start_ns >= :from_ns OR (end_ns > :from_ns AND end_ns - start_ns >= :bucket_ns)
),
buckets AS (
    SELECT
        session,
        pid,
        thread_id,
        depth,
        bucket,
        try_sum(spans) AS spans,
        COALESCE(try_sum(CASE WHEN end_ns - start_ns >= :bucket_ns
            THEN LEAST(end_ns, :to_ns) - GREATEST(start_ns, :from_ns) ELSE busy_ns END), 9223372036854775807) AS busy_ns,
        max_by(id, length) AS longest_id,
        max_by(name, length) AS longest,
        CASE WHEN max_by("index" IS NOT NULL, length) THEN max_by("index", length) END AS longest_index,
        max_by(start_ns, length) AS longest_start_ns,
        max_by(end_ns, length) AS longest_end_ns,
        max(last_end_ns) AS last_end_ns,
        try_sum(errors) AS errors,
        min(error) AS error
    FROM placed
    GROUP BY session, pid, thread_id, depth, bucket
)
SELECT
    s.attempt,
    s.rank,
    s.session_id,
    b.pid,
    b.thread_id,
    b.depth,
    b.bucket,
    :from_ns + b.bucket * :bucket_ns AS bucket_start_ns,
    b.spans,
    b.busy_ns,
    b.longest_id,
    b.longest,
    b.longest_index,
    b.longest_start_ns,
    b.longest_end_ns,
    b.last_end_ns,
    b.errors,
    b.error
FROM buckets b
JOIN shown s ON s.session = b.session
ORDER BY s.attempt, s.rank NULLS FIRST, s.session_id, b.pid NULLS FIRST, b.thread_id NULLS FIRST, b.depth, b.bucket
