"""Steps and marks for charts: as many points as the chart has pixels, and no peak is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cirron.server import asked

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cirron.runs.opened import Run
    from cirron.runs.place import Place

MAX_OUTLIERS = 60
MAX_BANDS = 400
MAX_NAMES = 500
MAX_LINES = 16  # ranks on one chart
MAX_TEXTS = 100

_STEPS = """
WITH parts AS (
    SELECT
        CASE WHEN is_training_step THEN key ELSE parent_key END AS key,
        max(CASE WHEN is_training_step THEN epoch END) AS epoch,
        max(CASE WHEN is_training_step THEN step END) AS step,
        max(CASE WHEN is_training_step THEN start_ns END) AS start_ns,
        max(CASE WHEN is_training_step THEN end_ns END) AS end_ns,
        max(CASE WHEN is_training_step THEN error END) AS error,
        sum(CASE WHEN in_step AND name = 'data_load' THEN end_ns - start_ns END) AS data_load,
        sum(CASE WHEN in_step AND name = 'forward' THEN end_ns - start_ns END) AS forward,
        sum(CASE WHEN in_step AND name = 'backward' THEN end_ns - start_ns END) AS backward,
        sum(CASE WHEN in_step AND name = 'optimizer_step' THEN end_ns - start_ns END) AS optimizer_step,
        sum(CASE WHEN in_step AND name IN ('evaluation', 'prediction') THEN end_ns - start_ns END)
            AS evaluation,
        sum(CASE WHEN in_step AND name NOT IN ('data_load', 'forward', 'backward', 'optimizer_step',
            'evaluation', 'prediction') THEN end_ns - start_ns END) AS other,
        sum(CASE WHEN in_step THEN end_ns - start_ns ELSE 0 END) AS children,
        COALESCE(max(CASE WHEN is_training_step THEN gpu_ns END),
            sum(CASE WHEN in_step THEN gpu_ns END)) AS gpu,
        max(memory_peak_bytes) AS memory
    FROM spans
    WHERE session = :session AND (is_training_step OR in_step)
    GROUP BY CASE WHEN is_training_step THEN key ELSE parent_key END
),
numbered AS MATERIALIZED (
    SELECT *, end_ns - start_ns AS wall, row_number() OVER (ORDER BY start_ns, key) - 1 AS number
    FROM parts WHERE end_ns IS NOT NULL
)
"""  # noqa: E501
# All that a chart of steps needs of them, in one look.
_BUCKETS = """, seen AS (
    SELECT *, CAST(floor((number - :first) * CAST(:width AS DOUBLE)
        / GREATEST(LEAST(:last, (SELECT count(*) FROM numbered)) - :first, 1)) AS BIGINT) AS bucket
    FROM numbered WHERE number >= :first AND number < :last
),
whole AS (
    SELECT count(*) AS total, median(wall) AS median, quantile_cont(wall, 0.95) AS p95 FROM numbered
),
long AS (
    SELECT number, epoch, step, start_ns AS start, end_ns AS "end", wall, error
    FROM seen, whole WHERE wall > GREATEST(3 * median, 1.5 * p95) OR error IS NOT NULL
    ORDER BY error IS NULL, wall DESC LIMIT :most
),
buckets AS (
    SELECT min(number) AS first, max(number) AS last, min(start_ns) AS start, max(end_ns) AS "end",
        avg(wall) AS wall, max(wall) AS worst,
        CAST(sum(COALESCE(data_load, 0)) AS DOUBLE) / count(*) AS data_load,
        CAST(sum(COALESCE(forward, 0)) AS DOUBLE) / count(*) AS forward,
        CAST(sum(COALESCE(backward, 0)) AS DOUBLE) / count(*) AS backward,
        CAST(sum(COALESCE(optimizer_step, 0)) AS DOUBLE) / count(*) AS optimizer_step,
        CAST(sum(COALESCE(evaluation, 0)) AS DOUBLE) / count(*) AS evaluation,
        CAST(sum(COALESCE(other, 0)) AS DOUBLE) / count(*) AS other,
        CAST(sum(GREATEST(wall - children, 0)) AS DOUBLE) / count(*) AS self,
        CAST(sum(gpu) AS DOUBLE) / NULLIF(count(gpu), 0) AS gpu, max(memory) AS memory
    FROM seen GROUP BY bucket
)
SELECT total, median, p95, (SELECT list(long) FROM long) AS outliers,
    (SELECT list(buckets ORDER BY first) FROM buckets) AS buckets
FROM whole
"""
# What is beside the steps: an evaluation, a checkpoint, a compilation, a snapshot.
_BANDS = """
SELECT name, start_ns AS start, COALESCE(end_ns, :until) AS "end" FROM spans
WHERE session = :session AND NOT in_aside AND start_ns < :to_ns AND COALESCE(end_ns, :until) > :from_ns
    AND name IN ('evaluation', 'prediction', 'checkpoint', 'compile', 'snapshot')
ORDER BY COALESCE(end_ns, :until) - start_ns DESC LIMIT :most
"""  # noqa: E501
_BATCH = """
SELECT max(CAST(json_extract_string(attrs, '$.loader_batch_size') AS BIGINT)) FROM spans
WHERE session = :session AND depth <= 2 AND name IN ('epoch', 'fit')
"""


def of_session(
    run: Run, session: int, width: int, part: tuple[int, int] = (0, 2**53)
) -> dict[str, Any]:
    """The steps of a process, or a part of them, as so many buckets; and the longest ones."""
    first, last = part
    given = {"session": session, "width": width, "first": first, "last": last}
    found = run.sql(_STEPS + _BUCKETS, most=MAX_OUTLIERS, **given).rows()[0]
    return {**found, "buckets": found["buckets"] or [], "outliers": found["outliers"] or []}


def steps(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """The time of steps by phase, those that took much longer, and what was beside them."""
    run = asked.run_of(place, params)
    session = asked.session_of(run, params)
    wide = asked.width(params)
    first = asked.number(params, "first", 0, 2**53, 0)
    last = asked.number(params, "last", first + 1, 2**53, 2**53)

    def ask() -> dict[str, Any]:
        zero, given = run.started_ns, {"session": session.key}
        found = of_session(run, session.key, wide, (first, last))
        shown = found["buckets"]
        if not shown:
            return {**found, "bands": [], "batch_size": None}
        bands = run.sql(
            _BANDS,
            until=session.last_ns,
            from_ns=shown[0]["start"],
            to_ns=shown[-1]["end"] + 1,
            most=MAX_BANDS,
            **given,
        ).rows()
        for one in (*shown, *found["outliers"], *bands):
            one["start"] -= zero
            one["end"] -= zero
        batch = run.sql(_BATCH, **given).fetch().rows[0][0]
        bands.sort(key=lambda one: one["start"])
        return {**found, "bands": bands, "batch_size": batch}

    return asked.kept(run, ("steps", session.key, wide, first, last), ask)


_NAMES = """
SELECT name, count(value) AS points, count(text) AS texts,
    count(CASE WHEN isnan(value) OR abs(value) = CAST('Infinity' AS DOUBLE) THEN 1 END) AS nonfinite,
    max_by(value, (ts_ns, id)) AS last, max_by(text, (ts_ns, id)) AS last_text,
    max(kind = 'summary') AS is_summary
FROM marks WHERE session IN (SELECT session FROM sessions WHERE COALESCE(rank, -1) = :rank)
    AND contains(lower(name), lower(:search))
GROUP BY name
ORDER BY name <> 'loss', NOT max(kind = 'summary'), count(*) DESC, name
"""  # noqa: E501


def marks(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """The marks of a run by name: the loss first, then those that sum up an epoch."""
    run = asked.run_of(place, params)
    rank = -1 if run.main.rank is None else run.main.rank
    found = run.sql(_NAMES, rank=rank, search=params.get("search", "")).rows()
    return {"names": found[:MAX_NAMES], "total": len(found)}


_TEXTS = """
SELECT epoch, step, ts_ns - :zero AS at, text FROM marks
WHERE name = :name AND text IS NOT NULL ORDER BY ts_ns DESC LIMIT :most
"""
# A point's place on each axis. Steps are counted over the whole of a process.
_POINTS = """
WITH chosen AS (
    SELECT * FROM sessions WHERE :all_ranks OR COALESCE(rank, -1) = :rank
    ORDER BY attempt DESC, rank NULLS FIRST, session LIMIT :lines
),
named AS (
    SELECT m.session, m.ts_ns, m.id, m.value FROM marks m
    JOIN chosen c ON c.session = m.session WHERE m.name = :name AND m.value IS NOT NULL
),
placed AS (
    SELECT n.*, {x} AS x FROM named n {join}
),
whole AS (
    SELECT GREATEST(min(x), :first) AS low, LEAST(max(x), :last) AS high FROM placed
),
cut AS (
    SELECT p.*, CASE WHEN abs(value) < CAST('Infinity' AS DOUBLE) THEN value END AS finite,
        LEAST(CAST(floor((x - low) * CAST(:width AS DOUBLE) / GREATEST(high - low, 1e-9)) AS BIGINT),
            :width - 1) AS bucket
    FROM placed p CROSS JOIN whole WHERE x >= low AND x <= high
)
SELECT session, bucket, count(*) AS points, min(x) AS x, max(x) AS until, avg(finite) AS mean,
    min(finite) AS low, max(finite) AS high, max_by(finite, (x, ts_ns, id)) AS last,
    count(*) - count(finite) AS nonfinite
FROM cut GROUP BY session, bucket ORDER BY session, bucket
"""  # noqa: E501
_AXES = {
    "step": (
        "COALESCE(t.number, 0)",
        "ASOF LEFT JOIN (SELECT session, start_ns, row_number() OVER (PARTITION BY session"
        " ORDER BY start_ns) - 1 AS number FROM spans WHERE is_training_step"
        " AND session IN (SELECT session FROM chosen)) t"
        " ON t.session = n.session AND n.ts_ns >= t.start_ns",
    ),
    "epoch": (
        "COALESCE(t.epoch + LEAST((n.ts_ns - t.start_ns) / CAST(GREATEST(t.end_ns - t.start_ns, 1)"
        " AS DOUBLE), 1), 0)",
        "ASOF LEFT JOIN (SELECT p.session, p.epoch, p.start_ns, COALESCE(p.end_ns, c.last_ns)"
        " AS end_ns FROM spans p JOIN chosen c ON c.session = p.session WHERE p.name = 'epoch'"
        " AND NOT p.in_evaluation) t ON t.session = n.session AND n.ts_ns >= t.start_ns",
    ),
    "time": ("(n.ts_ns - :zero) / 1e9", ""),
}


def mark(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """A mark's values as lines, one a process: of the main rank, or of all ranks."""
    run = asked.run_of(place, params)
    name = asked.text(params, "name")
    axis = params.get("x", "step")
    if axis not in _AXES:
        raise asked.BadRequest(f"the parameter 'x' must be one of {', '.join(_AXES)}")
    try:
        first, last = float(params.get("first", "-inf")), float(params.get("last", "inf"))
    except ValueError:
        raise asked.BadRequest("the parameters 'first' and 'last' must be numbers") from None
    place_of, join = _AXES[axis]
    given: dict[str, Any] = {
        "name": name,
        "width": asked.width(params),
        "first": first,
        "last": last,
        "all_ranks": params.get("ranks") == "all",
        "rank": -1 if run.main.rank is None else run.main.rank,
        "lines": MAX_LINES,
    }
    if axis == "time":
        given["zero"] = run.started_ns
    rows = run.sql(_POINTS.format(x=place_of, join=join), **given).rows()
    who = {one.key: one for one in run.sessions}
    lines: dict[int, dict[str, Any]] = {}
    for row in rows:
        one = who[row.pop("session")]
        line = lines.setdefault(
            one.key, {"session": str(one.key), "rank": one.rank, "attempt": one.attempt}
        )
        for key in ("x", "until", "points", "mean", "low", "high", "last", "nonfinite"):
            line.setdefault(key, []).append(row[key])
    texts = run.sql(_TEXTS, name=name, zero=run.started_ns, most=MAX_TEXTS).rows()
    return {"name": name, "axis": axis, "lines": list(lines.values()), "texts": texts}
