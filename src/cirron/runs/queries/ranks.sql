-- The same training step on all ranks, with aligned clocks: when the first and the last rank started and ended it,
-- which rank was the slowest, and how far two of the clocks may be apart. A step that a process did several times (one
-- training after another) is `nth` 1, 2, ... If ranks tie, the lowest is named.
WITH steps AS (
    SELECT
        t.attempt, COALESCE(t.rank, 2147483647) AS rank, t.epoch, t.step, t.start_ns, t.end_ns, s.uncertainty_ns,
        row_number() OVER (PARTITION BY t.session, t.epoch, t.step ORDER BY t.start_ns, t.key) AS nth
    FROM training_steps t
    JOIN sessions s ON s.session = t.session
    WHERE t.end_ns IS NOT NULL
)
SELECT
    attempt,
    epoch,
    step,
    nth,
    count(*) AS ranks,
    min(start_ns) AS first_start_ns,
    max(start_ns) AS last_start_ns,
    min(end_ns) AS first_end_ns,
    max(end_ns) AS last_end_ns,
    min(end_ns - start_ns) AS fastest_ns,
    max(end_ns - start_ns) AS slowest_ns,
    NULLIF(max_by(rank, (end_ns - start_ns, -rank)), 2147483647) AS slowest_rank,
    NULLIF(max_by(rank, (end_ns, -rank)), 2147483647) AS last_rank,
    max(end_ns) - min(end_ns) AS spread_ns,
    2 * max(uncertainty_ns) AS uncertainty_ns
FROM steps
GROUP BY attempt, epoch, step, nth
ORDER BY attempt, epoch NULLS FIRST, step NULLS FIRST, nth
