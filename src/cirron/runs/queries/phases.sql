-- Ended spans by name, and forwards by mode: how many, how long, and their share of the time of all sessions (nested
-- spans both count). A sum of more than 64 bits (292 years) is null.
WITH whole AS (SELECT sum(CAST(last_ns - first_ns AS DOUBLE)) AS ns FROM sessions)
SELECT
    name,
    mode,
    count(*) AS spans,
    try_sum(end_ns - start_ns) AS total_ns,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY end_ns - start_ns) AS median_ns,
    percentile_cont(0.95) WITHIN GROUP (ORDER BY end_ns - start_ns) AS p95_ns,
    percentile_cont(0.99) WITHIN GROUP (ORDER BY end_ns - start_ns) AS p99_ns,
    max(end_ns - start_ns) AS worst_ns,
    try_sum(gpu_ns) AS gpu_ns,
    count(gpu_ns) AS gpu_spans,
    max(memory_peak_bytes) AS memory_peak_bytes,
    count(error) AS errors,
    sum(CAST(end_ns - start_ns AS DOUBLE)) / NULLIF(max(whole.ns), 0) AS share
FROM spans
CROSS JOIN whole
WHERE end_ns IS NOT NULL
GROUP BY name, mode
ORDER BY total_ns DESC NULLS FIRST, name, mode NULLS FIRST
