"""Reads untrusted files in a run's folder.

Nothing here blocks (on a FIFO), follows a link (to a device or a private file) or reads more than
its limit. All code that reads a run's folder opens files with this module.
"""

from __future__ import annotations

import heapq
import os
import stat
from typing import TypeAlias

from cirron import system

StrPath: TypeAlias = str | os.PathLike[str]

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFREG: "a regular file",
}


class UnreadableError(Exception):
    """Why a file or folder was not read, as the rest of a sentence that starts with its name."""


def read_file(path: StrPath, limit_bytes: int) -> bytes:
    """The content of a regular file, up to a limit in bytes.

    Raises FileNotFoundError if it does not exist, OSError if this process has too many files open,
    and UnreadableError for everything else.
    """
    try:
        with os.fdopen(system.open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit_bytes:
                raise UnreadableError(
                    f"is too large and was not read: {size:,} bytes; the limit is {limit_bytes:,}"
                )
            content = file.read(size + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in system.SHORTAGE:
            raise
        raise UnreadableError(_reason(path, error, stat.S_IFREG)) from None
    except MemoryError:
        raise UnreadableError("is too large for the memory of this machine") from None
    if len(content) != size:
        raise UnreadableError("changed while it was being read")
    return content


def list_files(folder: StrPath, suffix: str, limit: int) -> list[str]:
    """The names in a folder with this suffix, in descending order, up to a limit.

    Raises FileNotFoundError if it does not exist, and UnreadableError if it is not a folder.
    """
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise NotADirectoryError
        with os.scandir(folder) as entries:
            names = (entry.name for entry in entries if entry.name.endswith(suffix))
            return heapq.nlargest(limit, names)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableError(_reason(folder, error, stat.S_IFDIR)) from None


def shown(path: StrPath) -> str:
    r"""A path as text that any encoder takes: bytes that are not UTF-8 are written as `\xff`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _reason(path: StrPath, error: OSError, expected: int) -> str:
    try:
        kind = stat.S_IFMT(os.lstat(path).st_mode)
    except OSError:
        kind = expected
    if kind == expected:
        return f"cannot be read ({error.strerror or error})"
    if kind == stat.S_IFLNK:
        hint = "; name the folder that it leads to" if expected == stat.S_IFDIR else ""
        return f"is a symbolic link, which is not followed{hint}"
    return f"is {_KINDS.get(kind, 'something else')}, not {_KINDS[expected]}"
