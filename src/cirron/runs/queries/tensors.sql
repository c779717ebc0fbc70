-- The statistics of each tensor at each epoch, with those of its gradient. `change` is the relative change of the norm
-- since the previous snapshot.
WITH numbered AS (
    SELECT *, row_number() OVER (PARTITION BY session, span_key, tensor ORDER BY ts_ns, id) AS nth
    FROM snapshots
),
gradients AS (
    SELECT session, span_key, nth, substr(tensor, 1, length(tensor) - 5) AS tensor, norm, mean, std
    FROM numbered
    WHERE tensor LIKE '%.grad'
),
weights AS (
    SELECT *, lag(norm) OVER (PARTITION BY session, tensor ORDER BY ts_ns, id) AS norm_before
    FROM numbered
    WHERE tensor NOT LIKE '%.grad'
)
SELECT
    s.attempt,
    s.rank,
    s.session_id,
    w.tensor,
    w.epoch,
    w.shape,
    w.dtype,
    w.mean,
    w.std,
    w.min,
    w.max,
    w.norm,
    g.norm AS gradient_norm,
    g.mean AS gradient_mean,
    g.std AS gradient_std,
    abs(w.norm - w.norm_before) / NULLIF(w.norm_before, 0) AS change,
    w.attrs,
    w.ts_ns
FROM weights w
JOIN sessions s ON s.session = w.session
LEFT JOIN gradients g ON g.session = w.session AND g.span_key = w.span_key AND g.tensor = w.tensor AND g.nth = w.nth
ORDER BY s.attempt, s.rank NULLS FIRST, s.session_id, w.tensor, w.ts_ns, w.id
