-- The statistics of each tensor of the session `:session` over the epochs, with the norm of its gradient: about
-- `:points` rows per tensor, including the last. `change` is the relative change of the norm since the previous
-- snapshot.
WITH weights AS (
    SELECT
        *,
        lag(norm) OVER (PARTITION BY tensor ORDER BY ts_ns, id) AS norm_before,
        row_number() OVER (PARTITION BY tensor ORDER BY ts_ns, id) - 1 AS number,
        count(*) OVER (PARTITION BY tensor) AS total,
        row_number() OVER (PARTITION BY span_key, tensor ORDER BY ts_ns, id) AS nth
    FROM snapshots
    WHERE session = :session AND tensor NOT LIKE '%.grad'
),
gradients AS (
    SELECT
        span_key,
        substr(tensor, 1, length(tensor) - 5) AS tensor,
        norm,
        row_number() OVER (PARTITION BY span_key, tensor ORDER BY ts_ns, id) AS nth
    FROM snapshots
    WHERE session = :session AND tensor LIKE '%.grad'
)
SELECT
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
    abs(w.norm - w.norm_before) / NULLIF(w.norm_before, 0) AS change,
    w.attrs,
    w.number = w.total - 1 AS is_last,
    w.total
FROM weights w
LEFT JOIN gradients g ON g.span_key = w.span_key AND g.tensor = w.tensor AND g.nth = w.nth
WHERE w.number % GREATEST(CAST(ceil(w.total / CAST(:points AS DOUBLE)) AS BIGINT), 1) = 0 OR w.number = w.total - 1
ORDER BY w.tensor, w.number
