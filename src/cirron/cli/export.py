"""`cirron export`: writes a run in the format of another tool."""

from __future__ import annotations

import click

from cirron import export as exports
from cirron.cli import output
from cirron.view import text


def formats() -> str:
    """The formats for the help, one per line."""
    width = max(map(len, exports.FORMS))
    return "\n".join(f"{name:<{width}}  {what}" for name, (_, what) in exports.FORMS.items())


@click.command(
    help=f"""Export a run for another tool: the latest, or the one whose id starts with RUN.

\b
{formats()}
"""
)
@click.argument("wanted", metavar="[RUN]", required=False)
@click.option(
    "--format", "form", type=click.Choice(list(exports.FORMS)), required=True, help="The format."
)
@click.option(
    "-o", "--output", "path", metavar="PATH", required=True, help="The file or folder to write."
)
@output.in_folder
def export(wanted: str | None, form: str, path: str, folder: str | None) -> None:
    exports.export(output.open_run(folder, wanted), form, path)
    output.echo(f"wrote {text.escape(path)}")
