-- The span `:id` of the session `:session`, and the time of its children in the same thread. An open span lasts until
-- the last sign of life of its session.
WITH one AS (
    SELECT p.*, s.attempt, COALESCE(p.end_ns, s.last_ns) AS until_ns
    FROM spans p
    JOIN sessions s ON s.session = p.session
    WHERE p.session = :session AND p.id = :id
),
inside AS (
    SELECT COALESCE(try_sum(COALESCE(c.end_ns, o.until_ns) - c.start_ns), 0) AS ns
    FROM spans c
    JOIN one o ON o.key = c.parent_key
    WHERE c.session = :session AND c.in_thread
)
SELECT
    o.key,
    o.id,
    o.name,
    o."index",
    o.path,
    o.depth,
    o.attempt,
    o.epoch,
    o.step,
    o.mode,
    o.error,
    o.pid,
    o.thread_id,
    o.start_ns,
    o.until_ns AS end_ns,
    o.end_ns IS NULL AS is_open,
    i.ns AS children_ns,
    o.cpu_ns,
    o.gpu_ns,
    o.memory_peak_bytes,
    o.attrs
FROM one o
CROSS JOIN inside i
