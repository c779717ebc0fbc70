-- The mean and standard deviation of each gradient of the session `:session`, in the first and the last epoch with any.
WITH known AS (
    SELECT epoch, tensor, mean, std
    FROM snapshots
    WHERE session = :session AND epoch IS NOT NULL AND tensor LIKE '%.grad'
),
ends AS (SELECT min(epoch) AS low, max(epoch) AS high FROM known)
SELECT k.epoch, k.tensor, k.mean, k.std
FROM known k
JOIN ends e ON k.epoch = e.low OR k.epoch = e.high
ORDER BY k.epoch, k.tensor
