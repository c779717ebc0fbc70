"""The timeline: what a window of time shows of each thread, one span, a flame graph, a search."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from cirron.runs import engine
from cirron.server import asked
from cirron.view.html import colour_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cirron.runs.place import Place

MAX_ROWS = 60_000
MAX_DEPTH = 64
MAX_PATHS = 600
MAX_MARKS = 200
MAX_RANKS = 1_024
BINS = 40


def timeline(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """What each thread of a process does between two moments, by depth and bucket of time.

    A row is `[thread, depth, bucket, spans, busy, name, index, start, end, last end, errors, id]`;
    the span that it describes is the longest of those that begin in the bucket.
    """
    run = asked.run_of(place, params)
    session = asked.session_of(run, params)
    from_ns, to_ns = asked.window(params, run)
    wide = asked.width(params)
    rank = -1 if session.rank is None else session.rank
    given = {"width": wide, "from_ns": from_ns, "to_ns": to_ns}
    answer = run.query("timeline", first_rank=rank, last_rank=rank, max_depth=MAX_DEPTH, **given)
    # Of a rank there is a process for each attempt.
    rows = [row for row in answer.rows() if row["session_id"] == session.id]
    whole = engine.timeline(**given)  # the window in whole buckets
    zero, bucket_ns = run.started_ns, whole["bucket_ns"]
    threads: dict[tuple[Any, Any], int] = {}
    names: dict[str, int] = {}
    found = []
    for row in rows[:MAX_ROWS]:
        start, end = row["longest_start_ns"], row["longest_end_ns"]
        is_whole = row["spans"] == 1 or end - start >= bucket_ns
        found.append(
            [
                threads.setdefault((row["pid"], row["thread_id"]), len(threads)),
                row["depth"],
                row["bucket"],
                row["spans"],
                row["busy_ns"],
                names.setdefault(row["longest"], len(names)),
                row["longest_index"],
                start - zero,
                end - zero,
                row["last_end_ns"] - zero,
                row["errors"],
                row["longest_id"] if is_whole else None,
            ]
        )
    return {
        "session": str(session.key),
        "from": whole["from_ns"] - zero,
        "to": whole["to_ns"] - zero,
        "bucket": bucket_ns,
        "threads": [{"pid": pid, "thread": thread} for pid, thread in threads],
        "names": list(names),
        "colours": [colour_of(name) for name in names],
        "rows": found,
        "is_cut": len(rows) > MAX_ROWS,
        "open": [] if session.box is None else [one.id for one in session.box.spans[:MAX_DEPTH]],
    }


_SPAN = """
SELECT p.*, s.attempt, s.last_ns FROM spans p JOIN sessions s ON s.session = p.session
WHERE p.session = :session AND p.id = :id LIMIT 1
"""
_MARKS = """
SELECT name, value, text, kind, ts_ns - :zero AS at FROM marks
WHERE session = :session AND span_key = :key ORDER BY ts_ns, id LIMIT :most
"""
_SELF = """
SELECT CAST(COALESCE(sum(COALESCE(end_ns, :until) - start_ns), 0) AS BIGINT) FROM spans
WHERE session = :session AND parent_key = :key AND in_thread
"""
_ALIKE = """
WITH alike AS (
    SELECT end_ns - start_ns AS ns FROM spans
    WHERE session = :session AND path = :path AND end_ns IS NOT NULL
),
ends AS (SELECT min(ns) AS low, max(ns) AS high FROM alike)
SELECT CAST(LEAST(floor((ns - low) * CAST(:bins AS DOUBLE) / GREATEST(high - low, 1)), :bins - 1)
        AS BIGINT) AS bin,
    count(*) AS spans, count(CASE WHEN ns < :own THEN 1 END) AS faster, any_value(low) AS low,
    any_value(high) AS high, (SELECT median(ns) FROM alike) AS median
FROM alike CROSS JOIN ends GROUP BY bin ORDER BY bin
"""
_SAME_STEP = """
SELECT rank, start_ns - :zero AS start, COALESCE(end_ns, :until) - :zero AS "end",
    CAST(session AS VARCHAR) AS session FROM training_steps
WHERE attempt = :attempt AND epoch IS NOT DISTINCT FROM :epoch AND step IS NOT DISTINCT FROM :step
ORDER BY rank NULLS FIRST, start_ns LIMIT :most
"""


def span(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """One span: its times, attributes and marks, others of its path, its step on every rank."""
    run = asked.run_of(place, params)
    session = asked.session_of(run, params)
    rows = run.sql(_SPAN, session=session.key, id=asked.text(params, "id")).rows()
    if not rows:
        raise asked.BadRequest("the process has no span of this 'id'")
    one, zero, key = rows[0], run.started_ns, {"session": session.key}
    until = one["last_ns"] if one["end_ns"] is None else one["end_ns"]
    inside = run.sql(_SELF, key=one["key"], until=until, **key).fetch().rows[0][0]
    alike = run.sql(_ALIKE, path=one["path"], bins=BINS, own=until - one["start_ns"], **key).rows()
    same = []
    if one["step"] is not None and len(run.sessions) > 1:
        same = run.sql(
            _SAME_STEP,
            zero=zero,
            until=until,
            most=MAX_RANKS,
            **{name: one[name] for name in ("attempt", "epoch", "step")},
        ).rows()
    plain = ("id", "name", "index", "path", "depth", "epoch", "step", "error", "cpu_ns", "gpu_ns")
    return {
        **{name: one[name] for name in (*plain, "memory_peak_bytes", "thread_id", "pid", "mode")},
        "session": str(session.key),
        "rank": session.rank,
        "start": one["start_ns"] - zero,
        "end": until - zero,
        "is_open": one["end_ns"] is None,
        "self_ns": max(until - one["start_ns"] - inside, 0),
        "attrs": asked.attributes(one["attrs"]),
        "marks": run.sql(_MARKS, key=one["key"], zero=zero, most=MAX_MARKS, **key).rows(),
        "alike": alike,
        "same_step": same,
    }


_FLAME = """
SELECT path, depth, count(*) AS spans, count(error) AS errors,
    CAST(sum(LEAST(COALESCE(end_ns, :until), :to_ns) - GREATEST(start_ns, :from_ns)) AS BIGINT) AS ns,
    CAST(sum(CASE WHEN in_thread THEN LEAST(COALESCE(end_ns, :until), :to_ns)
        - GREATEST(start_ns, :from_ns) ELSE 0 END) AS BIGINT) AS in_thread,
    max(COALESCE(end_ns, :until) - start_ns) AS worst, median(COALESCE(end_ns, :until) - start_ns)
    AS median
FROM spans
WHERE session = :session AND start_ns < :to_ns AND COALESCE(end_ns, :until) > :from_ns
GROUP BY path, depth ORDER BY depth, ns DESC LIMIT :most
"""  # noqa: E501


def flame(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """The spans of a window by path: how many, how long, and how much of it no child covers."""
    run = asked.run_of(place, params)
    session = asked.session_of(run, params)
    from_ns, to_ns = asked.window(params, run)
    rows = run.sql(
        _FLAME,
        session=session.key,
        until=session.last_ns,
        from_ns=from_ns,
        to_ns=to_ns,
        most=MAX_PATHS,
    ).rows()
    inside: dict[str, int] = {}
    for row in rows:
        above = row["path"].rpartition("/")[0]
        inside[above] = inside.get(above, 0) + row.pop("in_thread")
    for row in rows:
        row["self"] = max(row["ns"] - inside.get(row["path"], 0), 0)
        row["colour"] = colour_of(row["path"].rpartition("/")[2])
    return {"from": from_ns - run.started_ns, "to": to_ns - run.started_ns, "paths": rows}


_FIND = """
SELECT id, name, "index", start_ns - :zero AS start, COALESCE(end_ns, :until) - :zero AS "end"
FROM spans
WHERE session = :session AND contains(lower(name), lower(:text))
    AND (:number IS NULL OR "index" = :number) AND CASE WHEN :forward THEN start_ns > :at
    ELSE start_ns < :at END
ORDER BY CASE WHEN :forward THEN start_ns ELSE -start_ns END LIMIT 1
"""
_COUNT = """
SELECT count(*) FROM spans WHERE session = :session AND contains(lower(name), lower(:text))
    AND (:number IS NULL OR "index" = :number)
"""


def find(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """The next span whose name has a text in it, as `step 812`, and how many there are."""
    run = asked.run_of(place, params)
    session = asked.session_of(run, params)
    wanted = asked.text(params, "text")
    match = re.fullmatch(r"(.*?)(?:\s+|\[)(\d{1,15})\]?", wanted)
    given = {
        "session": session.key,
        "text": match[1] if match else wanted,
        "number": int(match[2]) if match else None,
    }
    at = asked.number(params, "at", -(2**53), 2**53, -(2**53)) + run.started_ns
    forward = params.get("back") is None
    found = run.sql(
        _FIND, zero=run.started_ns, until=session.last_ns, at=at, forward=forward, **given
    ).rows()
    return {
        "found": found[0] if found else None,
        "total": run.sql(_COUNT, **given).fetch().rows[0][0],
    }
