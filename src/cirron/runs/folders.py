"""Finds the folder with the records of a run, and limits how much of it is read."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from cirron import errors, settings

FOLDERS = ("spool", "blackbox")
RUN_ID = re.compile("[0-9a-f]{4,32}")  # or the start of one
BATCH_FILES = "[0-9]" * 20 + "-*.json"

# Only the newest files of a folder are read; black boxes are also limited in bytes.
MAX_FILES = 100_000
MAX_BOXES_BYTES = 2 * 2**30
TOO_MUCH = (
    f"holds more than the {MAX_FILES:,} files or {MAX_BOXES_BYTES:,} bytes that are read at once;"
    " some were left out. Move files to another folder and show that one"
)


def default_folder(given: str | None = None) -> str:
    """The given folder, or the one that a program started here writes to."""
    if given is not None:
        return given
    chosen = settings.resolve({}).output_dir
    return "." if chosen == settings.BY_NAME["output_dir"].default else chosen


def find(path: str | os.PathLike[str]) -> Path:
    """The folder with the records, given that folder, its `spool`, or the project folder.

    >>> find(".")
    PosixPath('.cirron')
    """
    given = Path(path)
    inside = given / ".cirron"
    for folder in (given, inside):
        if any(_is_folder(folder / name) for name in FOLDERS):
            return folder
    if _is_folder(given):
        if given.name in FOLDERS:
            return given.parent
        if given.resolve().name in FOLDERS:  # "." inside that folder
            return given.resolve().parent
        if any(given.glob(BATCH_FILES)):  # copied elsewhere
            return given
        if any(os.path.lexists(inside / name) for name in FOLDERS):
            return inside  # these are not folders; the reader reports what they are
        reason = "it contains no .cirron, spool or blackbox folder"
        if os.path.lexists(inside) and not _is_folder(inside):
            reason = "its .cirron is not a folder"
    else:
        reason = "it is not a folder" if os.path.lexists(given) else "the folder does not exist"
        if RUN_ID.fullmatch(str(given)) and not os.path.lexists(given):
            reason += f' (for the run with this id: ci.open(run="{given}"))'
    raise errors.UnknownRunError(
        f"no run found in {str(given)!r}: {reason}."
        " Record a run with `cirron run train.py` or ci.profile(), or name the folder that the"
        ' program ran in: cirron show FOLDER, cirron report --dir FOLDER, ci.open("FOLDER")'
    )


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except PermissionError:  # there may be records, so this must not count as an empty folder
        raise
    except (OSError, ValueError):  # nothing there, a loop of links, or a path with a NUL
        return False


def find_all(where: str | os.PathLike[str]) -> list[Path]:
    """The folders with records at a path: one, or one in each folder of ranks below it."""
    try:
        return [find(where)]
    except errors.SettingError:
        # Skip folders that contain only a server's own files.
        below = [
            one
            for one in sorted(Path(where).glob("*/.cirron"))
            if any(_is_folder(one / name) for name in FOLDERS)
        ]
        if not below:
            raise
        return below
