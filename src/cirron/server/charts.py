"""Steps and marks for charts: at most a point per pixel, with minimum and maximum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cirron.server import query

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cirron.runs.opened import Run
    from cirron.runs.place import Place

MAX_OUTLIERS = 60
MAX_BANDS = 400
MAX_NAMES = 500
MAX_LINES = 16  # ranks on one chart
MAX_TEXTS = 100
AXES = ("step", "epoch", "time")
WHOLE = ("total", "median", "p95")  # of all steps; each bucket's row repeats them


def of_session(
    run: Run, session: int, width: int, part: tuple[int, int] = (0, 2**53)
) -> dict[str, Any]:
    """The steps of a process, or a range of them, in `width` buckets; and the longest ones."""
    first, last = part
    given = {"session": session, "first": first, "last": last}
    rows = query.since_start(run, run.query("step_buckets", width=width, **given))
    longest = run.query("long_steps", most=MAX_OUTLIERS, **given)
    return {
        **{name: rows[0][name] for name in WHOLE},
        "buckets": [
            {name: value for name, value in row.items() if name not in WHOLE}
            for row in rows
            if row["first"] is not None
        ],
        "outliers": query.since_start(run, longest),
    }


def steps(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """Step time by phase, unusually long steps, and what ran between steps."""
    run = query.run_of(place, params)
    session = query.session_of(run, params)
    wide = query.width(params)
    first = query.number(params, "first", 0, 2**53, 0)
    last = query.number(params, "last", first + 1, 2**53, 2**53)

    def ask() -> dict[str, Any]:
        found = of_session(run, session.key, wide, (first, last))
        shown = found["buckets"]
        if not shown:
            return {**found, "bands": [], "batch_size": None}
        asides = run.query(
            "asides",
            session=session.key,
            until_ns=session.last_ns,
            from_ns=shown[0]["start"] + run.started_ns,
            to_ns=shown[-1]["end"] + run.started_ns + 1,
            most=MAX_BANDS,
        )
        bands = sorted(query.since_start(run, asides), key=lambda one: one["start"])
        return {**found, "bands": bands, "batch_size": batch_size(run, session.key)}

    return query.kept(run, ("steps", session.key, wide, first, last), ask)


def batch_size(run: Run, session: int) -> int | None:
    """The batch size, if the attributes of epochs or fits give it."""
    said = [query.attributes(row["attrs"]) for row in run.query("settings", session=session)]
    sizes = [one.get("loader_batch_size") for one in said]
    return max((one for one in sizes if isinstance(one, int)), default=None)


def marks(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """The mark names of a run: the loss first, then values per epoch."""
    run = query.run_of(place, params)
    rank = -1 if run.main.rank is None else run.main.rank
    found = run.query("mark_names", rank=rank, text=params.get("search", "")).rows()
    return {"names": found[:MAX_NAMES], "total": len(found)}


def mark(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """The values of a mark, one line per process: the main rank, or all ranks."""
    run = query.run_of(place, params)
    name = query.text(params, "name")
    axis = params.get("x", "step")
    if axis not in AXES:
        raise query.BadRequest(f"the parameter 'x' must be one of {', '.join(AXES)}")
    try:
        first, last = float(params.get("first", "-inf")), float(params.get("last", "inf"))
    except ValueError:
        raise query.BadRequest("the parameters 'first' and 'last' must be numbers") from None
    given: dict[str, Any] = {
        "name": name,
        "width": query.width(params),
        "first": first,
        "last": last,
        "all_ranks": params.get("ranks") == "all",
        "rank": -1 if run.main.rank is None else run.main.rank,
        "lines": MAX_LINES,
        "axis": axis,
        "zero_ns": run.started_ns,
    }
    rows = run.query("mark_lines", **given).rows()
    who = {one.key: one for one in run.sessions}
    lines: dict[int, dict[str, Any]] = {}
    for row in rows:
        one = who[row.pop("session")]
        line = lines.setdefault(
            one.key, {"session": str(one.key), "rank": one.rank, "attempt": one.attempt}
        )
        for key in ("x", "until", "points", "mean", "low", "high", "last", "nonfinite"):
            line.setdefault(key, []).append(row[key])
    texts = query.since_start(run, run.query("texts", name=name, most=MAX_TEXTS))
    return {"name": name, "axis": axis, "lines": list(lines.values()), "texts": texts}
