"""Creates cirron's files: always new ones, never through a link, readable only by their owner.

Folders that cirron created are listed in the file `.cirron-made` next to them. Files are removed
only from such a folder, and only regular files whose names have exactly cirron's format.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
from typing import TYPE_CHECKING, NamedTuple

from cirron import system

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


MADE = ".cirron-made"
MADE_TEXT = ": made by cirron, which may remove the files that it wrote in there\n"
MADE_BYTES = 65_536  # a larger file is not cirron's
# Errors of opening a link, a folder, a FIFO, or another user's file in its place.
NOT_OUR_LIST = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EACCES, errno.EPERM)
TMP = ".tmp"

# The formats of file names: batches, black boxes, the state of a sender, the snapshots of a span.
BATCH = re.compile(r"[0-9]{20}-[0-9a-f]{32}\.json")
BLACK_BOX = re.compile(r"[0-9a-f]{32}-[0-9]{1,10}\.json")
SENDER = re.compile(r"[0-9a-f]{16}")
SPAN = re.compile(r"[0-9a-f]{32}")

# Modes of folders and files, by the setting `access`.
MODES = {"private": (0o700, 0o600), "group": (0o750, 0o640), "all": (0o755, 0o644)}


class Entry(NamedTuple):
    """A file of cirron's in a folder."""

    name: str
    size: int
    modified_ns: int


class Folder:
    """A folder in `.cirron`, and the format of its file names. Created on first use."""

    def __init__(self, path: Path, names: re.Pattern[str], access: str = "private") -> None:
        self.path = path
        self.is_ours = False  # whether cirron created it; set by `make` and `find`
        self._names = names
        self._folder_mode, self._file_mode = MODES[access]
        self._is_wide = access != "private"

    def make(self) -> None:
        """Creates the folder and its parent, unless they exist.

        The parent may be a link, for example to a larger disk. The folder itself may not: readers
        do not follow it.
        """
        self._make(self.path.parent)
        self._refuse_link()
        is_new = self._make(self.path)
        if not is_new:
            with os.scandir(self.path) as entries:
                is_new = next(entries, None) is None
        if is_new and not self._is_listed():
            self._list()
        self.find()

    def _refuse_link(self) -> None:
        if os.path.islink(self.path):
            raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed")

    def make_inside(self, name: str) -> None:
        """Creates a folder in this one, unless it exists."""
        self._make(self.path / name)

    def find(self) -> None:
        """Finds out whether cirron created the folder."""
        self.is_ours = not os.path.islink(self.path) and self._is_listed()

    def _list(self) -> None:
        path = self.path.parent / MADE
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | system.SAFE
        try:
            file = os.open(path, flags, self._file_mode)
        except OSError as error:
            if error.errno in NOT_OUR_LIST:
                return  # files are still written, and only this process's own are removed
            raise
        try:
            self._widen(file)
            os.write(file, (self.path.name + MADE_TEXT).encode())
        finally:
            os.close(file)

    def _is_listed(self) -> bool:
        try:
            lines = system.read_regular(self.path.parent / MADE, MADE_BYTES)
        except OSError:
            return False
        return f"\n{self.path.name}{MADE_TEXT}".encode() in b"\n" + lines

    def _make(self, path: Path) -> bool:
        try:
            try:
                os.mkdir(path, self._folder_mode)
            except FileNotFoundError:
                os.makedirs(path.parent, exist_ok=True)  # the user's own folders, with their umask
                os.mkdir(path, self._folder_mode)
        except FileExistsError:
            return False
        if self._is_wide:
            os.chmod(path, self._folder_mode)  # whatever the umask
        return True

    def put(self, name: str, pieces: list[bytes], *, durable: bool = False) -> None:
        """Writes a file atomically: a reader sees the old file, none, or the complete new one."""
        partial = name + TMP
        file: int | None = self._create_partial(partial)
        try:
            assert file is not None
            system.write_all(file, pieces)
            if durable:
                os.fsync(file)
            if not system.CAN_RENAME_OPEN:
                os.close(file)
                file = None
            # Renamed before it is closed: with busy threads, a system call can take 20 ms.
            os.replace(self.path / partial, self.path / name)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(self.path / partial)
            raise
        finally:
            if file is not None:
                os.close(file)

    def _create_partial(self, name: str) -> int:
        try:
            return self.create(name)
        except FileNotFoundError:  # the folder does not exist yet, or was removed
            self.make()
        except FileExistsError:  # left by a process that was killed, or planted
            os.unlink(self.path / name)
        return self.create(name)

    def create(self, name: str) -> int:
        """Creates a file; the caller closes the descriptor."""
        self._refuse_link()  # again: the folder may have been replaced by a link
        file = system.create(self.path / name, self._file_mode)
        self._widen(file)
        return file

    def _widen(self, file: int) -> None:
        """Gives a file the mode of the setting, regardless of the umask."""
        if self._is_wide and hasattr(os, "fchmod"):
            with contextlib.suppress(PermissionError):  # another user's
                os.fchmod(file, self._file_mode)

    def read(self, name: str, limit: int = sys.maxsize) -> bytes:
        """The content of a regular file, up to this size."""
        return system.read_regular(self.path / name, limit)

    def entries(self, suffix: str = "") -> Iterator[Entry]:
        """The regular files with names in cirron's format (plus `suffix`), in no order."""
        with self._opened() as folder, os.scandir(self.path if folder is None else folder) as found:
            for entry in found:
                name = entry.name
                if not name.endswith(suffix) or not self.is_name(name.removesuffix(suffix)):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield Entry(name, status.st_size, status.st_mtime_ns)

    def is_name(self, name: str) -> bool:
        """Whether this name has the format of cirron's files."""
        return self._names.fullmatch(name) is not None

    def remove(self, name: str) -> bool:
        """Removes a file from `entries`, or of this process. False: it did not exist."""
        try:
            with self._opened() as folder:
                os.unlink(self.path / name if folder is None else name, dir_fd=folder)
        except FileNotFoundError:
            return False
        return True

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int | None]:
        """A descriptor of the folder: safe even if it is replaced by a link meanwhile."""
        folder = system.open_folder(self.path)
        try:
            yield folder
        finally:
            if folder is not None:
                os.close(folder)
