"""Tables that are computed once per large segment, so that queries need not compute them each time.

`steps`: training steps with the sums of their children. A step whose children are in several
segments has a row in each of them; `start_ns` is null in segments without the step itself.

`cells`: the level-of-detail pyramid of the timeline. At a level, a span of at least `2 ** level` ns
has its own row. Shorter spans of the same thread and depth that start in the same bucket of
`2 ** level` ns share a row, which describes the longest of them. Every second level is written. The
finest one has at least `MIN_MERGED` spans per row on average; a level with nothing left to merge
repeats the rows of the level below.

Small segments have neither table: queries read their spans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cirron.runs.store import Segment, Store

MIN_SPANS = 50_000
LEVELS = range(10, 47)  # buckets of 1 us to 20 h
MIN_MERGED = 4  # spans per row of the finest level; a zoom beyond it reads the spans themselves

# SQL for both DuckDB and Spark. Of several losses at the same time, the last has the highest id,
# which is kept, because they may be in several segments. `max_by` with the struct `(ts_ns, id)`
# would take five times as long.
STEPS = """
WITH children AS (
    SELECT
        session,
        parent_key AS key,
        try_sum(CASE WHEN name = 'data_load' THEN end_ns - start_ns END) AS data_load_ns,
        try_sum(CASE WHEN name = 'forward' THEN end_ns - start_ns END) AS forward_ns,
        try_sum(CASE WHEN name = 'backward' THEN end_ns - start_ns END) AS backward_ns,
        try_sum(CASE WHEN name = 'optimizer_step' THEN end_ns - start_ns END) AS optimizer_step_ns,
        try_sum(CASE WHEN name IN ('evaluation', 'prediction') THEN end_ns - start_ns END)
            AS evaluation_ns,
        try_sum(CASE WHEN name NOT IN ('data_load', 'forward', 'backward', 'optimizer_step',
            'evaluation', 'prediction') THEN end_ns - start_ns END) AS other_ns,
        try_sum(CASE WHEN name IN ('checkpoint', 'compile', 'trace', 'lower', 'logging')
            THEN end_ns - start_ns END) AS aside_ns,
        try_sum(end_ns - start_ns) AS children_ns,
        try_sum(gpu_ns) AS children_gpu_ns,
        max(memory_peak_bytes) AS children_memory_bytes
    FROM {spans}
    WHERE in_step
    GROUP BY session, parent_key
),
losses AS (
    SELECT session, step_key AS key, max_by(value, ts_ns) AS loss, max(ts_ns) AS loss_ns,
        max_by(id, ts_ns) AS loss_id
    FROM (
        SELECT session, step_key, ts_ns, max_by(value, id) AS value, max(id) AS id
        FROM {marks}
        WHERE name = 'loss' AND value IS NOT NULL AND ts_ns IS NOT NULL AND step_key IS NOT NULL
            AND COALESCE(span_name, '') NOT IN ('evaluation', 'prediction')
        GROUP BY session, step_key, ts_ns
    ) m
    GROUP BY session, step_key
)
SELECT
    COALESCE(o.session, c.session, l.session) AS session,
    COALESCE(o.key, c.key, l.key) AS key,
    o.pid, o.thread_id, o.epoch, o.epoch_key, o.step, o.start_ns, o.end_ns, o.gpu_ns,
    o.memory_peak_bytes, o.error, c.data_load_ns, c.forward_ns, c.backward_ns, c.optimizer_step_ns,
    c.evaluation_ns, c.other_ns, c.aside_ns, c.children_ns, c.children_gpu_ns,
    c.children_memory_bytes, l.loss, l.loss_ns,
    CASE WHEN o.key IS NULL THEN l.loss_id END AS loss_id
FROM (SELECT * FROM {spans} WHERE is_training_step) o
FULL JOIN children c ON c.session = o.session AND c.key = o.key
FULL JOIN losses l ON l.session = COALESCE(o.session, c.session) AND l.key = COALESCE(o.key, c.key)
"""

STEP_PARTS = f"SELECT * FROM steps UNION ALL ({STEPS.format(spans='new_spans', marks='new_marks')})"
_SUMS = (
    *("data_load_ns", "forward_ns", "backward_ns", "optimizer_step_ns", "evaluation_ns"),
    *("other_ns", "aside_ns", "children_ns", "children_gpu_ns"),
)
_ADDED = ", ".join(
    f"COALESCE(try_add(p.{one}, m.{one}), p.{one}, m.{one}) AS {one}" for one in _SUMS
)
# The training steps: not in an evaluation, and only the outermost of nested steps. There are few
# parts without the step itself: children that were written before their step closed. A loss in such
# a part is older than the losses in the segment of the step.
TRAINING_STEPS = f"""
SELECT
    attempt, rank, session_id, session, key, pid, thread_id, epoch, epoch_key, step, start_ns,
    end_ns, data_load_ns, forward_ns, backward_ns, optimizer_step_ns, evaluation_ns, other_ns,
    aside_ns, children_ns, COALESCE(gpu_ns, children_gpu_ns) AS gpu_ns, memory_peak_bytes, loss,
    loss_ns, error
FROM (
    SELECT
        s.attempt, s.rank, s.session_id, p.session, p.key, p.pid, p.thread_id, p.epoch,
        p.epoch_key, p.step, p.start_ns, p.end_ns, p.gpu_ns, p.error, {_ADDED},
        GREATEST(p.memory_peak_bytes, p.children_memory_bytes, m.children_memory_bytes)
            AS memory_peak_bytes,
        CASE WHEN COALESCE(m.loss_ns > p.loss_ns, p.loss_ns IS NULL) THEN m.loss ELSE p.loss END
            AS loss,
        GREATEST(p.loss_ns, m.loss_ns) AS loss_ns
    FROM step_parts p
    JOIN sessions s ON s.session = p.session
    LEFT JOIN (
        SELECT
            session, key,
            {", ".join(f"try_sum({one}) AS {one}" for one in _SUMS)},
            max(children_memory_bytes) AS children_memory_bytes,
            max_by(loss, CASE WHEN loss IS NOT NULL THEN (loss_ns, loss_id) END) AS loss,
            max(loss_ns) AS loss_ns
        FROM step_parts
        WHERE start_ns IS NULL
        GROUP BY session, key
    ) m ON m.session = p.session AND m.key = p.key
    WHERE p.start_ns IS NOT NULL
) t
"""

# Finished steps, with the time since the previous step of the same epoch and thread.
WAITED_STEPS = """
SELECT *, CASE WHEN step = lag(step) OVER earlier + 1
    THEN GREATEST(start_ns - lag(end_ns) OVER earlier, 0) END AS wait_ns
FROM training_steps
WHERE end_ns IS NOT NULL
WINDOW earlier AS (PARTITION BY session, pid, thread_id, epoch_key ORDER BY start_ns, key)
"""

# The rest is only for DuckDB.
_ROWS = """
SELECT session, pid, thread_id, depth, key, start_ns, GREATEST(end_ns, start_ns) AS end_ns,
    CAST(1 AS BIGINT) AS spans, GREATEST(end_ns - start_ns, 0) AS busy_ns,
    GREATEST(end_ns, start_ns) AS last_end_ns,
    CAST(error IS NOT NULL AS BIGINT) AS errors, error
FROM read_parquet($spans)
WHERE end_ns IS NOT NULL
"""
_CELL = """session, pid, thread_id, depth, start_ns >> {level},
    CASE WHEN (end_ns - start_ns) >> {level} > 0 THEN key END"""
_ROLL_UP = """
SELECT session, pid, thread_id, depth, max_by(key, (end_ns - start_ns, -start_ns, key)) AS key,
    try_sum(spans) AS spans, COALESCE(try_sum(busy_ns), 9223372036854775807) AS busy_ns,
    max(last_end_ns) AS last_end_ns, try_sum(errors) AS errors, min(error) AS error
FROM {rows}
GROUP BY {cell}
"""
_NAMED = """
SELECT c.*, s.id, s.name, s."index", s.start_ns, GREATEST(s.end_ns, s.start_ns) AS end_ns
FROM rolled c
JOIN {named} s ON s.session = c.session AND s.key = c.key
"""
_LANES = """
SELECT approx_count_distinct(hash(session, pid, thread_id, depth)), max(start_ns) - min(start_ns)
FROM read_parquet($spans)
"""


def derive(store: Store, connection: Any, segment: Segment) -> None:
    """Writes the tables `steps` and `cells` of a segment, if it is large."""
    if segment.rows.get("spans", 0) >= MIN_SPANS:
        _derive_steps(store, connection, segment)
        _derive_cells(store, connection, segment)


def _derive_steps(store: Store, connection: Any, segment: Segment) -> None:
    spans, given = store.select("spans", [segment])
    marks, more = store.select("marks", [segment])
    segment.rows["steps"] = 0  # also if there are no steps
    sql = f"{STEPS.format(spans=f'({spans})', marks=f'({marks})')} ORDER BY session, start_ns"
    store.write(connection, segment, "steps", sql, given | more)


def _derive_cells(store: Store, connection: Any, segment: Segment) -> None:
    spans = segment.rows["spans"]
    db, given = connection, {"spans": store.files("spans", segments=[segment])}
    lanes, length_ns = db.execute(_LANES, given).fetchone()
    first = max((lanes * length_ns * MIN_MERGED // spans).bit_length(), LEVELS.start)
    rows, named = f"({_ROWS}) r", "read_parquet($spans)"
    made: list[str] = []
    written: dict[int, str] = {}
    count = spans
    for level in range(first, LEVELS.stop, 2):
        if count > lanes:  # otherwise nothing is left to merge
            rolled = _ROLL_UP.format(rows=rows, cell=_CELL.format(level=level))
            # In one query, DuckDB would build its hash table from the spans, in twice the time.
            db.execute(f"CREATE OR REPLACE TEMP TABLE rolled AS {rolled}", given)
            sql = _NAMED.format(named=named)
            rows = named = f"cells_{level}"
            done = db.execute(f"CREATE OR REPLACE TEMP TABLE {rows} AS {sql}", given)
            count = done.fetchone()[0]
            made.append(rows)
            given = {}
        if MIN_MERGED * count <= spans:
            written[level] = f"SELECT CAST({level} AS INTEGER) AS level, * FROM {rows}"
    if written:
        every = " UNION ALL ".join(written.values())
        store.write(db, segment, "cells", f"{every} ORDER BY level, start_ns", {})
        segment.finest_level = min(written)
    for table in ("rolled", *made):
        db.execute(f"DROP TABLE IF EXISTS {table}")
