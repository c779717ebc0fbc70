"""`cirron ls`: the runs in a folder, newest first."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from cirron.cli import output
from cirron.view import tables, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cirron.runs.opened import Run

COLUMNS = (*tables.RUN_COLUMNS[:-1], "script", "tags")
SHORTEST = 8
GENERATED = re.compile("[0-9a-f]{32}")


@click.command()
@click.argument("folder", metavar="[DIR]", required=False)
@output.as_json
def ls(folder: str | None, is_json: bool) -> None:
    """List the runs in DIR, newest first.

    The first column is the part of each run's id that other commands need as RUN.
    """
    found = output.open_place(folder).runs
    runs = [found[one] for one in found][::-1]
    if is_json:
        output.echo({"runs": [as_dict(run) for run in runs]})
        return
    short = prefixes([run.id for run in runs])
    output.table(COLUMNS, [row(run, short[run.id]) for run in runs])


def row(run: Run, name: str) -> list[str]:
    program = run.program
    return [
        text.plain(name),
        *tables.run_row(run)[1:-1],
        text.plain(program.script or "-"),
        text.tags(program) or "-",
    ]


def prefixes(ids: Sequence[str]) -> dict[str, str]:
    """The shortest unique start of each id, at least 8 characters.

    Ids that the user or a launcher has chosen are names, and not shortened.
    """
    found = {one: one for one in ids}
    ordered = sorted(ids)
    for at, one in enumerate(ordered):
        if not GENERATED.fullmatch(one):
            continue
        beside = ordered[max(0, at - 1) : at] + ordered[at + 1 : at + 2]
        length = SHORTEST
        while length < len(one) and any(other.startswith(one[:length]) for other in beside):
            length += 1
        found[one] = one[:length]
    return found


def as_dict(run: Run) -> dict[str, Any]:
    """A run as JSON, without its records."""
    return {
        "run_id": run.id,
        "state": run.state,
        "started_ns": run.started_ns,
        "ended_ns": run.ended_ns,
        "ranks": run.ranks,
        "attempts": run.attempts,
        "program": run.program,
        "sessions": [
            {"id": one.id, "rank": one.rank, "pid": one.pid, "state": one.state}
            for one in run.sessions
        ],
    }
