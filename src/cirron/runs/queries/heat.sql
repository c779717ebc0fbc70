-- The mean duration of the training steps of each session of the attempt `:attempt`, in `:width` buckets of the time
-- between `:from_ns` and `:to_ns`, and the first step of each bucket. With `:own`, the time outside backward plus the
-- time since the previous step.
SELECT session, bucket, CAST(floor(avg(ns)) AS BIGINT) AS wall_ns, min(step) AS step
FROM (
    SELECT
        session,
        step,
        end_ns - start_ns + CASE WHEN :own THEN COALESCE(wait_ns, 0) - COALESCE(backward_ns, 0) ELSE 0 END AS ns,
        CAST(floor((start_ns - :from_ns) * CAST(:width AS DOUBLE) / GREATEST(:to_ns - :from_ns, 1)) AS BIGINT) AS bucket
    FROM waited_steps
    WHERE attempt = :attempt AND start_ns >= :from_ns AND start_ns < :to_ns
) s
GROUP BY session, bucket
ORDER BY session, bucket
