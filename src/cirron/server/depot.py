"""The data of a server: a store, and the objects next to it.

    inbox/<batch id>.json       a received batch that is not in the store yet
    refused/<batch id>.json     an acknowledged batch that the store cannot hold
    blobs/<sha256>              raw values, named by their content
    names/<sha256>              maps a client's blob key, hashed, to a blob
    keys/, links/, secret       see `keys.py` and `login.py`

An object is only created if its name is free, so any number of processes can share a depot without
other coordination. Names that clients choose are never paths here.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import weakref
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from cirron.record import clock
from cirron.runs import objects

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

INBOX = "inbox/"
BATCH = re.compile(rf"{INBOX}[0-9a-f]{{32}}\.json")
REFUSED = "refused/"
TMP = "tmp"
STALE_S = 3600.0  # after this, an incomplete file belongs to a killed process


class Depot:
    """The objects of a server, and a folder on the same disk for incomplete files."""

    def __init__(self, where: str | os.PathLike[str]) -> None:
        self.where = os.fspath(where)
        self.objects = objects.at(where)
        # None: object storage
        self.folder = self.objects.root if isinstance(self.objects, objects.LocalObjects) else None

    @property
    def scratch(self) -> Path:
        """Where files are written first. Created on each use: a user may delete `.cirron`."""
        if self.folder is None:
            return self._temporary_folder
        for path in (self.folder.parent, self.folder, self.folder / TMP):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.folder / TMP

    @cached_property
    def _temporary_folder(self) -> Path:
        made = Path(tempfile.mkdtemp(prefix="cirron-"))
        weakref.finalize(self, shutil.rmtree, made, ignore_errors=True)
        return made

    @contextlib.contextmanager
    def temporary(self) -> Iterator[Path]:
        """A path for an incomplete file, which is deleted at the end: the disk may be full."""
        path = self.scratch / f"{clock.random_id()}.tmp"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def check_writable(self) -> None:
        """Raises OSError if the depot cannot be written."""
        with self.temporary() as path:
            path.touch()

    def add(self, name: str, pieces: Sequence[bytes]) -> bool:
        """Creates a small object durably. Returns False if the name is taken."""
        with self.temporary() as path:
            with open(path, "xb") as file:
                file.writelines(pieces)
            return self.objects.add(name, path)

    def read(self, name: str) -> bytes | None:
        """The content of a small object, or None."""
        try:
            return self.objects.read(name)
        except FileNotFoundError:
            return None

    def waiting(self) -> dict[str, int]:
        """The batches in the inbox, with the size of each."""
        sizes = self.objects.sizes(INBOX)
        return {name: size for name, size in sizes.items() if BATCH.fullmatch(name)}

    def free_bytes(self) -> int | None:
        """Free space on the disk; None for object storage."""
        return None if self.folder is None else shutil.disk_usage(self.scratch).free

    def clean(self) -> None:
        """Deletes incomplete files of killed processes."""
        scratch = self.scratch
        for name in os.listdir(scratch):
            path = scratch / name
            try:
                if clock.wall() / 1e9 - path.lstat().st_mtime < STALE_S:
                    continue
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
            except FileNotFoundError:  # its writer has finished
                pass
