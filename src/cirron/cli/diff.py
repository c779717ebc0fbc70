"""`cirron diff`: shows what changed between two runs.

Exit code 4: slower than allowed; 5: inconclusive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cirron.cli import output
from cirron.verdict.diff import diff as compare
from cirron.view import report as view

if TYPE_CHECKING:
    from cirron.runs.opened import Run
    from cirron.runs.place import Place

SLOWER = 4
UNCLEAR = 5


@click.command()
@click.argument("before", metavar="BEFORE")
@click.argument("after", metavar="AFTER")
@click.option(
    "--baseline", multiple=True, metavar="RUN", help="Another run like BEFORE; can be repeated."
)
@click.option(
    "--fail-on", metavar="5%", help="Exit with 4 if anything is slower by more than this."
)
@output.in_folder
@output.as_json
def diff(
    before: str,
    after: str,
    baseline: tuple[str, ...],
    fail_on: str | None,
    folder: str | None,
    is_json: bool,
) -> None:
    """Compare two runs by span name, with confidence intervals, and show where marks differ.

    BEFORE and AFTER are run ids, or the start of them; `cirron ls` lists them. A folder stands for
    its newest run.
    """
    limit = None if fail_on is None else share_of(fail_on)
    places: dict[str | None, Place] = {}

    def find(given: str) -> Run:
        where, wanted = output.folder_or_run(folder, given)
        with output.naming(wanted):
            place = places.get(where) or places.setdefault(where, output.open_place(where))
            return output.chosen(place, wanted)

    olds, new = [find(one) for one in (before, *baseline)], find(after)
    with output.status("comparing"):
        found = compare(olds, [new])
    verdict = None if limit is None else found.exceeds(limit)
    output.echo({**found.as_dict(), "is_slower": verdict} if is_json else view.changes(found))
    if found.is_inconclusive if limit is None else verdict is None:
        raise SystemExit(UNCLEAR)
    if verdict:
        raise SystemExit(SLOWER)


def share_of(text: str) -> float:
    """`5%` or `0.05` as a share. A plain `5` would be 500 %, which is surely a mistake."""
    is_percent = text.endswith("%")
    try:
        share = float(text.removesuffix("%")) / (100 if is_percent else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < (10 if is_percent else 1):
        raise click.UsageError(f"--fail-on takes a share such as 5% or 0.05, not {text!r}")
    return share
