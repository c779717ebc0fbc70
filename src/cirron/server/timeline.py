"""The timeline: lanes, one span, the flame graph and the search."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from cirron.runs import engine
from cirron.server import query
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
    """The spans of a process in a time range, by thread, depth and time bucket.

    A row is `[thread, depth, bucket, spans, busy, name, index, start, end, last end, errors, id]`.
    It describes the longest span that starts in the bucket.
    """
    run = query.run_of(place, params)
    session = query.session_of(run, params)
    from_ns, to_ns = query.window(params, run)
    wide = query.width(params)
    rank = -1 if session.rank is None else session.rank
    given = {"width": wide, "from_ns": from_ns, "to_ns": to_ns}
    answer = run.query("timeline", first_rank=rank, last_rank=rank, max_depth=MAX_DEPTH, **given)
    # A rank has one process per attempt.
    rows = [row for row in answer.rows() if row["session_id"] == session.id]
    whole = engine.timeline(**given)  # the range, extended to whole buckets
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


def span(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """One span: times, attributes, marks, other spans of its path, and its step on all ranks."""
    run = query.run_of(place, params)
    session = query.session_of(run, params)
    mine = {"session": session.key}
    rows = query.since_start(run, run.query("span", id=query.text(params, "id"), **mine))
    if not rows:
        raise query.BadRequest("the process has no span with this 'id'")
    one = rows[0]
    wall_ns = one["end"] - one["start"]
    marks = run.query("span_values", key=one.pop("key"), most=MAX_MARKS, **mine)
    same = []
    if one["step"] is not None and len(run.sessions) > 1:
        which = {name: one[name] for name in ("attempt", "epoch", "step")}
        until_ns = one["end"] + run.started_ns
        steps = run.query("same_step", until_ns=until_ns, most=MAX_RANKS, **which)
        same = [{**row, "session": str(row["session"])} for row in query.since_start(run, steps)]
    return {
        **one,
        "session": str(session.key),
        "rank": session.rank,
        "self_ns": max(wall_ns - one["children_ns"], 0),
        "attrs": query.attributes(one["attrs"]),
        "marks": query.since_start(run, marks),
        "alike": run.query("alike", path=one["path"], bins=BINS, own_ns=wall_ns, **mine).rows(),
        "same_step": same,
    }


def flame(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """The spans of a time range by path: count, total time and self time."""
    run = query.run_of(place, params)
    session = query.session_of(run, params)
    from_ns, to_ns = query.window(params, run)
    rows = run.query(
        "flame",
        session=session.key,
        until_ns=session.last_ns,
        from_ns=from_ns,
        to_ns=to_ns,
        most=MAX_PATHS,
    ).rows()
    inside: dict[str, int] = {}
    for row in rows:
        # Names may contain slashes, and very long paths are truncated.
        above = row["path"].removesuffix(row["name"]).removesuffix("/") if row["depth"] else ""
        inside[above] = inside.get(above, 0) + row.pop("in_thread")
        row |= {"parent": above, "colour": colour_of(row["name"])}
    for row in rows:
        row["self"] = max(row["ns"] - inside.get(row["path"], 0), 0)
    return {"from": from_ns - run.started_ns, "to": to_ns - run.started_ns, "paths": rows}


def find(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """The next span that matches a text such as `step 812`, and the number of matches."""
    run = query.run_of(place, params)
    session = query.session_of(run, params)
    wanted = query.text(params, "text")
    match = re.fullmatch(r"(.*?)(?:\s+|\[)(\d{1,15})\]?", wanted)
    given = {
        "session": session.key,
        "text": match[1] if match else wanted,
        "number": int(match[2]) if match else None,
    }
    at = query.number(params, "at", -(2**53), 2**53, -(2**53)) + run.started_ns
    forward = params.get("back") is None
    window = {"until_ns": session.last_ns, "at_ns": at, "forward": forward}
    found = query.since_start(run, run.query("search", **window, **given))
    return {
        "found": found[0] if found else None,
        "total": run.query("search_count", **given).fetch().rows[0][0],
    }
