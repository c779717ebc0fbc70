"""The manifest of a checkpoint; all files are opened through it.

A checkpoint is untrusted input. Only files that the manifest lists are opened; each must be a
regular file inside the checkpoint with the listed size, and links are not followed. Anything wrong
is a `CheckpointError`.
"""

from __future__ import annotations

import json
import os
from math import isnan
from pathlib import Path, PurePosixPath
from stat import S_ISDIR, S_ISREG
from typing import Any, BinaryIO

from ciclo.errors import CheckpointError

FORMAT = 1
META = "meta.json"
MAX_META_BYTES = 64 << 20  # about 500,000 files
MAX_BYTES = 256 << 20  # maximum size of parsed files: about two million leaves
HOW_TO_TRUST = (
    "if you trust the folder, use restore(like, trusted=True), or"
    " resume=ciclo.checkpoint(folder, trusted=True)"
)


class Manifest:
    """The metadata of a checkpoint; checks that all listed files exist."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.check_folder(place)
        with self._opened(META) as file:
            about = self.parsed(META, self._read(META, file, MAX_META_BYTES))
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise self.damaged(
                f"{META} does not have format {FORMAT}, the only one this version reads"
            )
        self.files: dict[str, int] = about.get("files", {})
        self.monitor: str | None = about.get("monitor")
        self.value: float | None = about.get("value")
        self.is_resumable: bool = about.get("is_resumable") is True
        if self.value is not None and (type(self.value) is not float or isnan(self.value)):
            raise self.damaged(f"the value in {META} is not a number")
        if type(self.files) is not dict or not self.files or not all(map(_is_inside, self.files)):
            raise self.damaged(f"{META} does not list files inside the checkpoint")
        for folder in {parent for name in self.files for parent in PurePosixPath(name).parents}:
            self.check_folder(place / folder)
        for name, size in self.files.items():
            found = self._stat(place / name)
            if type(size) is not int or not S_ISREG(found.st_mode) or found.st_size != size:
                raise self.damaged(f"{name} is not a regular file of the size in {META}")

    def damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"the checkpoint {self.place} is damaged: {reason}")

    def open(self, name: str) -> BinaryIO:
        """Opens a listed file."""
        if name not in self.files:
            raise self.damaged(f"{META} does not list {name}")
        file = self._opened(name)
        if os.fstat(file.fileno()).st_size != self.files[name]:
            file.close()
            raise self.damaged(f"{name} changed while it was read")
        return file

    def read(self, name: str) -> bytes:
        """The content of a listed file that is parsed, not an array file."""
        with self.open(name) as file:
            return self._read(name, file, MAX_BYTES)

    def json(self, name: str) -> Any:
        """The content of a listed JSON file."""
        return self.parsed(name, self.read(name))

    def folder(self, name: str) -> Path:
        """A folder for a library that opens files itself; all files in it must be listed."""
        todo = [name]
        while todo:
            at = todo.pop()
            self.check_folder(self.place / at)
            with os.scandir(self.place / at) as entries:
                for entry in entries:
                    inner = f"{at}/{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(inner)
                    elif inner not in self.files:
                        raise self.damaged(f"{META} does not list {inner!r}; remove that file")
        return self.place / name

    def check_folder(self, path: Path) -> None:
        if not S_ISDIR(self._stat(path).st_mode):
            raise self.damaged(f"{path.name} is not a folder")

    def check_memory(self, size: int, what: str) -> None:
        """Refuses data larger than the memory of this machine, before allocating it."""
        try:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, OSError, ValueError):  # not available on this system
            return
        if size > memory:
            raise CheckpointError(
                f"{self.place} cannot be read here: {what} needs {size:,} bytes of memory, but this"
                f" machine has {memory:,}"
            )

    def _stat(self, path: Path) -> os.stat_result:
        try:
            return path.lstat()
        except OSError as error:
            raise self.damaged(f"{path.name} is not there ({error.strerror})") from error

    def _opened(self, name: str) -> BinaryIO:
        # Do not follow a link or wait for a pipe. Windows has neither flag.
        wanted = ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")
        try:
            number = os.open(
                self.place / name, os.O_RDONLY | sum(getattr(os, one, 0) for one in wanted)
            )
        except OSError as error:
            raise self.damaged(f"{name} cannot be opened ({error.strerror})") from error
        if not S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise self.damaged(f"{name} is not a regular file")
        return os.fdopen(number, "rb")

    def _read(self, name: str, file: BinaryIO, most: int) -> bytes:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise self.damaged(f"{name} has {size:,} bytes; the limit is {most:,}")
        return file.read()

    def parsed(self, name: str, text: bytes) -> Any:
        """Parses JSON without duplicate keys."""
        if b"\0" in text:  # decoded as UTF-32, a sparse file would take four times its size
            raise self.damaged(f"{name} is not JSON")
        try:
            return json.loads(text, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise self.damaged(f"{name} is not JSON ({error})") from error


def _is_inside(name: str) -> bool:
    """Whether a name is a relative path inside the folder, on any system."""
    path = PurePosixPath(name)
    is_plain = path.as_posix() == name and name.isprintable() and not set(name) & {"\\", ":"}
    return is_plain and bool(path.name) and not path.is_absolute() and ".." not in path.parts


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is duplicated")
    return found
