-- The histograms and statistics of the tensor `:name` of the session `:session`, and of its gradient, over the
-- epochs: about `:most` of each, including the last.
WITH numbered AS (
    SELECT
        *,
        row_number() OVER (PARTITION BY tensor ORDER BY ts_ns, id) - 1 AS number,
        count(*) OVER (PARTITION BY tensor) AS total
    FROM snapshots
    WHERE session = :session AND tensor IN (:name, concat(:name, '.grad'))
)
SELECT tensor <> :name AS is_gradient, epoch, ts_ns, mean, std, min, max, norm, bins, counts
FROM numbered
WHERE number % GREATEST(CAST(ceil(total / CAST(:most AS DOUBLE)) AS BIGINT), 1) = 0 OR number = total - 1
ORDER BY tensor, number
