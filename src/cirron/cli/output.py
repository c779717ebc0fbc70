"""Shared by all commands: finding the runs, and printing tables, JSON and progress.

On a terminal, rich draws tables, with colour unless NO_COLOR is set; in a pipe they are plain text.
Values from files go through `text.plain`, and into rich only as `Text`, which has no markup.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from cirron import errors
from cirron.runs import folders
from cirron.runs.folders import default_folder as default_folder
from cirron.view import tables, text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cirron.runs.opened import Run
    from cirron.runs.place import Place

SCHEMA = 1  # version of the --json output

STYLES = {
    "running": "green",
    "clean": "dim",
    "killed": "red",
    "signal": "yellow",
    "exception": "red",
}


class Seconds(click.FloatRange):
    """A number of seconds. NaN would pass any range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds: float = super().convert(value, param, ctx)
        if seconds != seconds:
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds


as_json = click.option("--json", "is_json", is_flag=True, help="Write JSON.")
in_folder = click.option("--dir", "folder", metavar="DIR", help="The folder with the runs.")


def open_place(folder: str | None) -> Place:
    """The runs in a folder, by default the one that a program started here would write to."""
    from cirron.runs.place import Place

    with status("reading"):
        return Place([default_folder(folder)])


def open_run(folder: str | None, wanted: str | None) -> Run:
    """A run by its id or the start of it, or the newest one of a folder."""
    folder, wanted = folder_or_run(folder, wanted)
    with naming(wanted):
        return chosen(open_place(folder), wanted)


def chosen(place: Place, wanted: str | None) -> Run:
    """The run that is wanted, or the newest one."""
    return place.runs.latest if wanted is None else place.runs[wanted]


def folder_or_run(folder: str | None, wanted: str | None) -> tuple[str | None, str | None]:
    """The folder and the run. In place of a run, its folder may be given."""
    is_folder = folder is None and wanted is not None and os.path.isdir(wanted)
    return (wanted, None) if is_folder else (folder, wanted)


@contextlib.contextmanager
def naming(given: str | None) -> Iterator[None]:
    """Errors say that the argument, which was no folder, is no run either."""
    try:
        yield
    except errors.UnknownRunError as error:
        if given is None or str(error).startswith("several runs"):  # start with it
            raise
        said = f"{text.plain(given)!r} is neither a folder nor a run: {error}"
        raise errors.UnknownRunError(said) from None


def echo(said: str | dict[str, Any] = "") -> None:
    """Prints text, or a dict as JSON. Characters that the terminal's encoding lacks are escaped."""
    if isinstance(said, dict):
        said = text.to_json({"schema": SCHEMA, **said})
    click.echo(text.encodable(said, sys.stdout))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], more: str = "") -> None:
    """Prints a table. Its cells must be safe for a terminal already.

    A table wider than the terminal is printed as plain lines, because rich would split columns in
    the middle of words and numbers.
    """
    lines = tables.aligned([columns, *rows])
    width = max(map(len, lines)) + tables.GAP
    if not text.is_terminal(sys.stdout) or not draw(columns, rows, width):
        for line in lines:
            echo(line)
    if more:
        echo(more)


def draw(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> bool:
    """Draws a table on the terminal. Returns False if the terminal is too narrow."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if width > console.width:
        return False
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, tables.GAP - 1, 0, 0))
    for name in columns:
        shown.add_column(Text(name), overflow="fold")
    for row in rows:
        cells = [text.encodable(one, sys.stdout) for one in row]
        shown.add_row(*(Text(one, style=STYLES.get(one, "")) for one in cells))
    console.print(shown)
    return True


@contextlib.contextmanager
def status(what: str) -> Iterator[None]:
    """Shows a status line on a terminal while the block runs."""
    if not text.is_terminal(sys.stderr):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal. Yields a function that takes (done, total)."""
    if not text.is_terminal(sys.stderr):
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def records_folder(folder: str | None) -> str:
    """The `.cirron` folder that contains the records."""
    return os.fspath(folders.find(default_folder(folder)))
