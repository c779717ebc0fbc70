"""Tables as text and HTML: query results, runs and lists of runs.

All text goes through `text.plain` and is escaped for HTML, because names are untrusted.
"""

from __future__ import annotations

import html
from datetime import datetime
from typing import TYPE_CHECKING, Any

from cirron.view import text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cirron.runs.opened import Run, Session

MAX_CELL = 40
GAP = 2  # between columns of text
# Columns that end in `_ns` but are not durations.
MOMENTS = {"start_ns", "end_ns", "ts_ns", "first_ns", "last_ns", "lowest_ns", "highest_ns"}


def cell(name: str, value: Any) -> str:
    """A value as a table shows it: durations and moments by the name of their column."""
    if value is None:
        return "-"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if name in MOMENTS or name.endswith(("_start_ns", "_end_ns")):
            return moment(int(value))
        if name.endswith("_ns"):
            return text.duration(round(value))
        if name.endswith("_bytes"):
            return text.size(value)
        if name in ("share", "goodput", "change"):
            return f"{100 * value:.1f}%"
    return text.plain(text.value(value), MAX_CELL)


def moment(ns: int | None, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """A moment in local time."""
    try:
        return "an unknown time" if ns is None else f"{datetime.fromtimestamp(ns / 1e9):{form}}"
    except (OverflowError, OSError, ValueError):  # a number that is not a time
        return str(ns)


def losses(session: Session) -> list[str]:
    """The counters of dropped records that are not zero."""
    counters = ({} if session.box is None else session.box.content).get("counters") or {}
    return [
        f"{text.plain(name)}={text.value(count)}"
        for name, count in counters.items()
        if ("drop" in name or name == "records_lost") and count
    ]


def cells(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[list[str]]:
    """The rows of a query result as text."""
    return [[cell(*pair) for pair in zip(columns, row, strict=True)] for row in rows]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines, with the columns aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [(" " * GAP).join(map(str.ljust, row, widths)).rstrip() for row in rows]


def as_text(columns: Sequence[str], rows: Sequence[tuple[Any, ...]], has_more: bool = False) -> str:
    lines = aligned([[text.plain(name, MAX_CELL) for name in columns], *cells(columns, rows)])
    return "\n".join([*lines, *(["..."] if has_more else [])] if rows else [lines[0], "(no rows)"])


def as_html(columns: Sequence[str], rows: Sequence[tuple[Any, ...]], has_more: bool = False) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(one)}</td>" for one in row) + "</tr>"
        for row in cells(columns, rows)
    )
    more = "<p>and more rows</p>" if has_more else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


RUN_COLUMNS = ("run", "state", "started", "lasted", "ranks", "attempts", "program")


def run_row(run: Run) -> tuple[str, ...]:
    """A run as a row of `RUN_COLUMNS`."""
    program = ", ".join(text.program_in_short(run.program)) or "-"
    return (
        text.plain(run.id),
        run.state,
        moment(run.started_ns),
        text.duration(run.ended_ns - run.started_ns),
        str(len(run.ranks) or "-"),
        str(len(run.attempts)),
        program,
    )


def run_line(run: Run) -> str:
    name, state, started, lasted, *_ = run_row(run)
    ranks = f", {len(run.ranks)} ranks" if len(run.ranks) > 1 else ""
    return f"<run {name}: {state}, started {started}, {lasted} long{ranks}>"


def runs_text(runs: Sequence[Run]) -> str:
    """A list of runs, newest last."""
    return as_text(RUN_COLUMNS, [run_row(run) for run in runs])


def runs_html(runs: Sequence[Run]) -> str:
    return as_html(RUN_COLUMNS, [run_row(run) for run in runs])
