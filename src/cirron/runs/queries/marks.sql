-- One row per mark, by time. `text` has the values that are not numbers.
SELECT
    s.run_id,
    s.attempt,
    COALESCE(m.rank, s.rank) AS rank,
    s.session_id,
    m.name,
    m.value,
    m.text,
    m.step,
    m.epoch,
    m.ts_ns,
    m.kind,
    m.value_type,
    m.span_name,
    m.span_id,
    m.id,
    m.attrs
FROM marks m
JOIN sessions s ON s.session = m.session
ORDER BY m.ts_ns NULLS FIRST, m.id, s.session_id
