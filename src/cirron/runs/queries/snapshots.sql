-- One row per tensor and epoch, by time.
SELECT
    s.run_id,
    s.attempt,
    COALESCE(t.rank, s.rank) AS rank,
    s.session_id,
    t.tensor,
    t.epoch,
    t.shape,
    t.dtype,
    t.mode,
    t.mean,
    t.std,
    t.min,
    t.max,
    t.norm,
    t.bins,
    t.counts,
    t.blob_uri,
    t.ts_ns,
    t.span_id,
    t.id,
    t.attrs
FROM snapshots t
JOIN sessions s ON s.session = t.session
ORDER BY t.ts_ns NULLS FIRST, t.tensor, t.id, s.session_id
