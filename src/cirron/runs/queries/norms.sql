-- The norm, mean and standard deviation of the tensors of the session `:session` at each epoch, by time.
SELECT epoch, tensor, norm, mean, std
FROM snapshots
WHERE session = :session AND epoch IS NOT NULL
ORDER BY ts_ns NULLS FIRST, id
