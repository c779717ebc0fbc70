"""Files of the user's project: `pyproject.toml` and `.env`, in the working directory or above it.

Such a file decides where records and keys are sent, and anyone who can write to a folder above can
put one there. A file is therefore used only if it belongs to the user or root. Reading it never
blocks: a pipe, a device or a huge file in its place is rejected. Runs on the user's thread, in
`ci.profile()` and `ci.env()`.
"""

from __future__ import annotations

import functools
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cirron import guard

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BYTES = 1_000_000

# A pipe is opened without waiting for its writer. Windows has neither flag nor problem.
FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class File(NamedTuple):
    """An existing file, and the reason if it must not be used."""

    path: Path
    is_inside: bool  # the project: the working directory, or a folder up to the one with `.git`
    content: bytes  # empty if it could not be read
    fault: str | None


def files(name: str) -> Iterator[File]:
    """The files with that name, nearest first. Folders with that name are skipped."""
    try:
        here = Path.cwd()
    except OSError:  # it was deleted, or is inside a folder without search permission
        return
    folders = (here, *here.parents)
    top = next((i for i, folder in enumerate(folders) if os.path.lexists(folder / ".git")), 0)
    for i, folder in enumerate(folders):
        path = folder / name
        try:
            mode = os.stat(path).st_mode
        except OSError:
            continue
        if not stat.S_ISDIR(mode):
            yield File(path, i <= top, *read(path, mode))


def read(path: Path, mode: int) -> tuple[bytes, str | None]:
    """The content of a file, and the reason if it must not be used."""
    if not stat.S_ISREG(mode):  # opening a pipe or a device can already have side effects
        return b"", "it is not a regular file"
    try:
        with open(os.open(path, FLAGS), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return b"", "it is not a regular file"
            content = file.read(MAX_BYTES + 1) or b""
        if len(content) > MAX_BYTES:
            return b"", f"it is larger than {MAX_BYTES:,} bytes"
        return content, distrust(path, status)
    except OSError as error:
        return b"", f"it could not be read: {error.strerror}"


def distrust(path: Path, status: os.stat_result) -> str | None:
    """Why another user may have written or placed this file; None if no other user could have.

    Root is trusted. For a link, both the link and its target are checked.
    """
    if not hasattr(os, "getuid"):  # Windows: os.stat() does not say who owns a file
        return None
    target = Path(os.path.realpath(path))
    owners = {
        "it": status.st_uid,
        "its folder": os.stat(path.parent).st_uid,
        "the link": os.lstat(path).st_uid,
        "the folder of its target": os.stat(target.parent).st_uid,
    }
    for what, owner in owners.items():
        if owner not in (os.getuid(), 0):
            return f"{what} belongs to user {owner}, and you are user {os.getuid()}"
    others = stat.S_IWOTH if is_private(status) else stat.S_IWOTH | stat.S_IWGRP
    if status.st_mode & others:
        return f"other users may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def is_private(status: os.stat_result) -> bool:
    """Whether the owner is the only member of the file's group: a private group per user.

    Such systems let the group write to every new file (umask 002). Root's group may have many
    members.
    """
    if not status.st_mode & stat.S_IWGRP or not status.st_gid:
        return False
    try:
        import grp
        import pwd

        owner, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except (ImportError, KeyError):
        return False
    return (owner.pw_gid, owner.pw_name) == (group.gr_gid, group.gr_name) and not (
        set(group.gr_mem) - {owner.pw_name}
    )


@functools.lru_cache(maxsize=64)
def tell(message: str) -> None:
    """Logs a warning, once per message."""
    guard.warn("%s", message)
