"""Files that we make: new ones, never through a link, readable by their owner alone.

A folder that we made holds the file `.cirron-folder`. Files are removed only from such a folder,
and only regular ones whose names have the exact form of ours.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from typing import TYPE_CHECKING, NamedTuple

from cirron import system

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


MARKER = ".cirron-folder"
MARKER_TEXT = b"Made by cirron, which may remove the files in here that it wrote.\n"
TMP = ".tmp"

# What files are called: batches, black boxes, and the state of a sender.
BATCH = re.compile(r"[0-9]{20}-[0-9a-f]{32}\.json")
BLACK_BOX = re.compile(r"[0-9a-f]{32}-[0-9]{1,10}\.json")
SENDER = re.compile(r"[0-9a-f]{16}")

# Who may read what is written: the modes of folders and of files.
MODES = {"private": (0o700, 0o600), "group": (0o750, 0o640), "all": (0o755, 0o644)}


class Entry(NamedTuple):
    """A file of ours in a folder."""

    name: str
    size: int
    modified_ns: int


class Folder:
    """A folder below `.cirron`, and what its own files are called. Made on first use."""

    def __init__(self, path: Path, names: re.Pattern[str], access: str = "private") -> None:
        self.path = path
        self.is_ours = False  # known once it was made or found
        self._names = names
        self._folder_mode, self._file_mode = MODES[access]
        self._is_wide = access != "private"

    def make(self) -> None:
        """Makes the folder, and those above it, unless it is there."""
        made = False
        for path in (self.path.parent, self.path):
            made = self._make(path)
        with os.scandir(self.path) as entries:
            is_new = made or next(entries, None) is None
        if is_new:
            with contextlib.suppress(FileExistsError):  # another process made it at the same time
                self._fill(MARKER, [MARKER_TEXT])
        self.is_ours = os.path.lexists(self.path / MARKER)

    def _make(self, path: Path, *, again: bool = True) -> bool:
        try:
            os.mkdir(path, self._folder_mode)
        except FileExistsError:
            return False
        except FileNotFoundError:
            if not again:  # the working directory was deleted
                raise
            os.makedirs(path.parent, exist_ok=True)
            return self._make(path, again=False)
        if self._is_wide:
            os.chmod(path, self._folder_mode)  # whatever the umask
        return True

    def put(self, name: str, pieces: list[bytes], *, durable: bool = False) -> None:
        """Puts a file in place whole: a reader sees the old one, or none, or the new one."""
        partial = name + TMP
        try:
            self._fill(partial, pieces, durable=durable)
        except FileExistsError:  # left by a process that was killed, or planted
            os.unlink(self.path / partial)
            self._fill(partial, pieces, durable=durable)
        try:
            os.replace(self.path / partial, self.path / name)
        except OSError:
            self._discard(partial)
            raise

    def _fill(self, name: str, pieces: list[bytes], *, durable: bool = False) -> None:
        try:
            file = self.create(name)
        except FileNotFoundError:  # not made yet, or removed since
            self.make()
            file = self.create(name)
        try:
            system.write_all(file, pieces)
            if durable:
                os.fsync(file)
        except OSError:
            self._discard(name)
            raise
        finally:
            os.close(file)

    def create(self, name: str) -> int:
        """A descriptor of a new file, which is the caller's to close."""
        file = system.create(self.path / name, self._file_mode)
        if self._is_wide and hasattr(os, "fchmod"):
            os.fchmod(file, self._file_mode)
        return file

    def read(self, name: str) -> bytes:
        """The content of a regular file."""
        with os.fdopen(system.open_regular(self.path / name), "rb") as file:
            return file.read()

    def entries(self, suffix: str = "") -> Iterator[Entry]:
        """The regular files whose names have the form of ours, in no order; `suffix` after it."""
        with os.scandir(self.path) as found:
            for entry in found:
                name = entry.name
                if not name.endswith(suffix) or not self.is_name(name.removesuffix(suffix)):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield Entry(name, status.st_size, status.st_mtime_ns)

    def is_name(self, name: str) -> bool:
        """Whether a file of ours could have this name."""
        return self._names.fullmatch(name) is not None

    def remove(self, name: str) -> bool:
        """Removes a file that `entries` gave, or that this process wrote. False: it was gone."""
        try:
            os.unlink(self.path / name)
        except FileNotFoundError:
            return False
        return True

    def _discard(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path / name)
