"""`cirron compact`: merges the small files of a store."""

from __future__ import annotations

import click

from cirron.cli import output
from cirron.view import text


@click.command()
@click.argument("folder", metavar="[DIR]", required=False)
@click.option("--store", metavar="URL", help="Write to this store instead of the one in DIR.")
@output.as_json
def compact(folder: str | None, store: str | None, is_json: bool) -> None:
    """Bring the store of DIR up to date and merge its small files.

    The spool is not changed. The command may be repeated or interrupted at any time.
    """
    from cirron.runs import opened

    with output.status("compacting"):
        done = opened.compact(output.default_folder(folder), store=store)
    merged, removed = done["merged"], done["removed"]
    said = f"merged {text.plural(merged, 'segment')}, deleted {text.plural(removed, 'unused file')}"
    output.echo(done if is_json else said)
