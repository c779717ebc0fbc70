"""`cirron clear`: deletes runs from a folder.

It deletes only regular files with cirron's exact file names, in folders that cirron created (see
`files.py`), of runs that have ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
import msgspec

from cirron import errors, files, wire
from cirron.cli import output
from cirron.record import clock
from cirron.runs import batches, untrusted
from cirron.view import tables, text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cirron.runs.opened import Run
    from cirron.runs.place import Place

UNITS_S = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
BLOB = re.compile(r"(?:weights|gradients)(?:-[0-9]{1,4})?\.safetensors")
# The folder of a snapshot, in the address of its files.
SNAPSHOT = re.compile(r".*/snapshots/([0-9a-f]{32})/[^/]+", re.S)


class DoomedFile(NamedTuple):
    """A file to delete."""

    path: Path
    size: int


class Age(click.ParamType[int]):
    """A duration such as 7d, in nanoseconds."""

    name = "age"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        match = re.fullmatch(r"([0-9]{1,6})([mhdw])", str(value))
        if match is None:
            self.fail(f"{value!r} is not an age; write 30m, 12h, 7d or 2w", param, ctx)
        return int(match[1]) * UNITS_S[match[2]] * 10**9


@click.command()
@click.argument("folder", metavar="[DIR]", required=False)
@click.option("--run", "wanted", metavar="ID", help="Delete this run: its id, or the start of it.")
@click.option(
    "--older-than", "age_ns", type=Age(), metavar="AGE", help="Ended longer ago than this: 7d."
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@output.as_json
def clear(
    folder: str | None, wanted: str | None, age_ns: int | None, yes: bool, is_json: bool
) -> None:
    """Delete runs from DIR: records, black boxes, raw values, and their part of the store.

    Deletes all runs that have ended, or only those that the options select, after asking. Files
    that cirron did not write are never touched.
    """
    root = Path(output.records_folder(folder))
    place = output.open_place(os.fspath(root))
    kept = [one.path for one in record_folders(root) if not one.is_ours and one.path.exists()]
    if kept or not any(one.is_ours for one in record_folders(root)):
        raise errors.SettingError(
            f"cirron did not create {text.plain(str(kept[0] if kept else root), 300)}, and deletes"
            " nothing in it: delete the folder yourself"
        )
    runs = list(place.runs.values()) if wanted is None else [place.runs[wanted]]
    running = [run for run in runs if run.state == "running"]
    if wanted is not None and running:
        raise errors.SettingError(f"run {text.plain(wanted)} is still running: stop it first")
    before_ns = clock.wall() - (age_ns or 0)
    chosen = [run for run in runs if run not in running and run.ended_ns <= before_ns]
    if not chosen:
        raise errors.UnknownRunError(
            "there is no run to delete" + (": one is running" if running else "")
        )
    with output.status("reading"):
        found = list(dict.fromkeys(files_of(root, chosen)))
    total = text.size(sum(file.size for file in found))
    if not yes:
        if not is_json:
            for run in chosen:
                output.echo(f"{text.plain(run.id)}, ended {tables.moment(run.ended_ns)}")
        runs_, files_ = text.plural(len(chosen), "run"), text.plural(len(found), "file")
        confirm(f"Delete {runs_} for good ({files_}, {total})?")
    removed = remove(root, place, chosen, found)
    names, left = [run.id for run in chosen], len(found) - removed
    said = f"deleted {text.plural(removed, 'file')} of {text.plural(len(chosen), 'run')}"
    output.echo({"runs": names, "files": removed, "left": left} if is_json else said)


def confirm(question: str) -> None:
    """Raises an error unless the user says yes."""
    try:
        is_wanted = click.confirm(question, err=True)
    except click.Abort:
        if text.is_terminal(sys.stdin):  # Ctrl-C
            raise
        said = "nothing was deleted, because there was no answer; --yes deletes without asking"
        raise click.ClickException(said) from None
    if not is_wanted:
        raise click.Abort


def record_folders(root: Path) -> Iterator[files.Folder]:
    """The folders of batches and black boxes."""
    for name, names in (("spool", files.BATCH), ("blackbox", files.BLACK_BOX)):
        folder = files.Folder(root / name, names)
        folder.find()
        yield folder


def files_of(root: Path, runs: list[Run]) -> Iterator[DoomedFile]:
    """The files that cirron wrote for these runs."""
    ids = {run.id for run in runs}
    for folder in record_folders(root):
        with contextlib.suppress(OSError):
            for entry in folder.entries() if folder.is_ours else ():
                if run_of(folder.path / entry.name) in ids:
                    yield DoomedFile(folder.path / entry.name, entry.size)
    snapshots = files.Folder(root / "snapshots", files.SPAN)
    snapshots.find()
    if not snapshots.is_ours:
        return
    sql = "SELECT DISTINCT blob_uri FROM snapshots WHERE blob_uri IS NOT NULL"
    for row in (row for run in runs for row in run.sql(sql)):
        match = SNAPSHOT.fullmatch(row["blob_uri"])
        inside = snapshots.path / match[1] if match else snapshots.path
        if match is None or os.path.islink(inside):
            continue
        with contextlib.suppress(OSError):
            for one in os.scandir(inside):
                status = one.stat(follow_symlinks=False)
                if BLOB.fullmatch(one.name) and stat.S_ISREG(status.st_mode):
                    yield DoomedFile(Path(one.path), status.st_size)


def run_of(path: Path) -> str | None:
    """The run that a batch or a black box names."""
    try:
        content = msgspec.json.decode(untrusted.read_file(path, batches.MAX_BYTES), type=BatchHead)
    except (OSError, untrusted.UnreadableError, *batches.UNREADABLE):
        return None
    return None if content.session is None else content.session.run_id


class BatchHead(msgspec.Struct):
    """What batches and black boxes have in common."""

    session: wire.Session | None = None


def remove(root: Path, place: Place, runs: list[Run], found: list[DoomedFile]) -> int:
    """Deletes the files, then the records in the store; returns the number of deleted files."""
    count = 0
    folders = set()
    with output.progress("deleting") as told:
        for file in found:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.path)
            count += 1
            told(count, len(found))
            if file.path.parent.parent.name == "snapshots":
                folders.add(file.path.parent)
    for folder in folders:
        with contextlib.suppress(OSError):  # something else is in there
            os.rmdir(folder)
    for store in place.stores:
        store.forget(run.id for run in runs)
    return count
