-- The marks of the rank `:rank` (-1: without a rank) whose name contains `:text`: how many values and texts, how many
-- values are NaN or infinite, the last of each, and whether any is a summary. The loss comes first, then summaries, then
-- the marks with the most values.
SELECT name, points, texts, nonfinite, "last", last_text, is_summary
FROM (
    SELECT
        name,
        count(*) AS marks,
        count(value) AS points,
        count(text) AS texts,
        count(CASE WHEN isnan(value) OR abs(value) = CAST('Infinity' AS DOUBLE) THEN 1 END) AS nonfinite,
        max_by(value, CASE WHEN value IS NOT NULL THEN (ts_ns, id) END) AS "last",
        max_by(text, CASE WHEN text IS NOT NULL THEN (ts_ns, id) END) AS last_text,
        max(COALESCE(kind, '') = 'summary') AS is_summary
    FROM marks
    WHERE session IN (SELECT session FROM sessions WHERE COALESCE(rank, -1) = :rank) AND contains(lower(name), lower(:text))
    GROUP BY name
) m
ORDER BY name <> 'loss', NOT is_summary, marks DESC, name
