"""`cirron why`: shows what each rank of a dead or hanging run was doing."""

from __future__ import annotations

from pathlib import Path

import click

from cirron.cli import output
from cirron.verdict.why import why as look
from cirron.view import report as view


@click.command()
@click.argument("wanted", metavar="[RUN]", required=False)
@click.option(
    "--flight-recorder",
    "dumps",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder with dumps of PyTorch's Flight Recorder.",
)
@output.in_folder
@output.as_json
def why(wanted: str | None, dumps: Path | None, folder: str | None, is_json: bool) -> None:
    """Show where each rank of a run is, or was last. Ranks that differ come first."""
    found = look(output.open_run(folder, wanted), dumps)
    output.echo(found.as_dict() if is_json else view.reasons(found))
