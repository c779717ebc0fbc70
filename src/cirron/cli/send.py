"""`cirron send`: sends what processes could not send before they ended."""

from __future__ import annotations

from pathlib import Path

import click

from cirron import errors, settings
from cirron.cli import output
from cirron.view import text


@click.command()
@click.argument("folder", metavar="[DIR]", required=False)
@click.option(
    "--timeout",
    type=output.Seconds(0.1, 86_400),
    default=600.0,
    show_default=True,
    help="Give up after this many seconds.",
)
@output.as_json
def send(folder: str | None, timeout: float, is_json: bool) -> None:
    """Send the batches in DIR that the endpoint does not have yet, oldest first.

    Processes with an API key leave them behind if they end before everything is sent. A later run
    with a key sends them too. Needs CIRRON_API_KEY, or api_key in pyproject.toml.
    """
    from cirron.ship import backlog

    values = settings.resolve({})
    if values.api_key is None:
        raise errors.SettingError("no API key found; set CIRRON_API_KEY=... and try again")
    root = Path(output.records_folder(folder))
    with output.progress("sending") as told:
        done = backlog.send(root, values.api_endpoint, values.api_key, wait_s=timeout, told=told)
    counts = [f"{done[name]} {name.replace('_', ' ')}" for name in done if name != "error"]
    output.echo(done if is_json else ", ".join(counts))
    if done["left"] or done["rejected"]:
        reason = text.plain(str(done["error"] or f"gave up after {timeout:g} s (--timeout)"))
        raise click.ClickException(f"not everything was sent: {reason}")
