"""`cirron report`: explains on one screen why a run is slow, and what a fix would save."""

from __future__ import annotations

import re

import click

from cirron.cli import output
from cirron.verdict import report as report_on
from cirron.verdict.facts import gather
from cirron.verdict.whatif import PARTS, what_if
from cirron.view import report as view


@click.command()
@click.argument("wanted", metavar="[RUN]", required=False)
@click.option(
    "--what-if",
    "changed",
    metavar="PART=FACTORx",
    help="Predict the step time with one part changed: data_load=0.5x.",
)
@output.in_folder
@output.as_json
def report(wanted: str | None, changed: str | None, folder: str | None, is_json: bool) -> None:
    """Explain where a run's time goes, what to do about it, and how much that would save."""
    run = output.open_run(folder, wanted)
    if changed is not None:
        part, factor = parse(changed)
        predicted = what_if(gather(run), part, factor)
        gain = None if predicted.gain is None else vars(predicted.gain)
        as_json = {"run": run.id, "part": part, "factor": factor, "gain": gain}
        output.echo(as_json if is_json else view.what_if(part, factor, predicted))
        return
    with output.status("judging"):
        found = report_on(run)
    output.echo(found.as_dict() if is_json else view.render(found))


def of_batch(content: bytes, *, is_line: bool) -> str:
    """The verdict on the records of one batch of a process that ended without an error."""
    from cirron.runs.place import of_batch as open_batch

    found = report_on(open_batch(content))
    found.run["state"] = "clean"
    return view.line(found) if is_line else view.render(found)


def parse(text: str) -> tuple[str, float]:
    """`data_load=0.5x` as a part and a factor."""
    match = re.fullmatch(r"(\w+)=(\d+(?:\.\d+)?)x?", text)
    if match is None or match[1] not in PARTS:
        names = ", ".join(PARTS)
        raise click.UsageError(
            f"--what-if takes PART=FACTORx, such as data_load=0.5x, not {text!r}; PART is one of:"
            f" {names}"
        )
    return match[1], float(match[2])
