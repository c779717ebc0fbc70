"""The command line: `cirron`. One file a command; this one only puts them together."""

from __future__ import annotations

import click

from cirron._version import __version__
from cirron.cli import show


@click.group(name="cirron")
@click.version_option(__version__, prog_name="cirron")
def main() -> None:
    """Shows what training runs did."""


main.add_command(show.show)
