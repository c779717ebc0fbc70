-- One row per span, by start. `marks` and `attrs` are JSON. An open span has no end.
SELECT
    s.run_id,
    s.attempt,
    COALESCE(p.rank, s.rank) AS rank,
    s.session_id,
    p.id,
    p.parent_id,
    p.name,
    p."index",
    p.path,
    p.depth,
    p.epoch,
    p.step,
    p.start_ns,
    p.end_ns,
    p.end_ns - p.start_ns AS wall_ns,
    p.cpu_ns,
    p.gpu_ns,
    p.memory_peak_bytes,
    p.mode,
    p.error,
    p.thread_id,
    p.pid,
    p.attrs,
    m.marks
FROM spans p
JOIN sessions s ON s.session = p.session
LEFT JOIN span_marks m ON m.session = p.session AND m.span_key = p.key
ORDER BY p.start_ns, p.depth, p.id, s.session_id
