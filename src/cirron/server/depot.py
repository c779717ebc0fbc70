"""What a server keeps: a store, and beside it what has not been brought into it yet.

    inbox/<batch id>.json       a batch as it was sent: its object is the record that it was seen
    refused/<batch id>.json     one that was accepted, and that the store cannot hold
    blobs/<sha256>              raw values, by what is in them
    names/<sha256>              which blob a client calls how, by the hash of that name
    keys/, links/, secret       see `keys.py` and `login.py`

Every object is added under a name that was free, or not at all, so any number of processes share a
depot with no other word between them. What a client calls something is never a path here.
"""

from __future__ import annotations

import contextlib
import os
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
REFUSED = "refused/"
TMP = "tmp"
FOLDER = "server"  # in a `.cirron`
STALE_S = 3600.0  # what a killed process left half written


class Depot:
    """The objects of a server, and a folder on the same disk to write them in."""

    def __init__(self, where: str | os.PathLike[str]) -> None:
        self.where = os.fspath(where)
        self.objects = objects.at(where)
        # None: object storage
        self.folder = self.objects.root if isinstance(self.objects, objects.LocalObjects) else None

    @cached_property
    def scratch(self) -> Path:
        """Where files are written. Made when it is first wanted: who only reads writes nothing."""
        if self.folder is not None:
            os.makedirs(self.folder / TMP, mode=0o700, exist_ok=True)
            return self.folder / TMP
        made = Path(tempfile.mkdtemp(prefix="cirron-"))
        weakref.finalize(self, shutil.rmtree, made, ignore_errors=True)
        return made

    @contextlib.contextmanager
    def temporary(self) -> Iterator[Path]:
        """A path to write at; a full disk must not fill up with what did not fit."""
        path = self.scratch / f"{clock.random_id()}.tmp"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def add(self, name: str, pieces: Sequence[bytes]) -> bool:
        """Makes a small object, on the disk when this returns. False: there is one of that name."""
        with self.temporary() as path:
            with open(path, "xb") as file:
                file.writelines(pieces)
            return self.objects.add(name, path)

    def read(self, name: str) -> bytes | None:
        """A small object; None if there is none."""
        try:
            return self.objects.read(name)
        except FileNotFoundError:
            return None

    def free_bytes(self) -> int | None:
        """What the disk has left; None for object storage."""
        return None if self.folder is None else shutil.disk_usage(self.folder).free

    def clean(self) -> None:
        """Removes what processes that were killed had begun to write."""
        for name in os.listdir(self.scratch):
            path = self.scratch / name
            try:
                if clock.wall() / 1e9 - path.lstat().st_mtime < STALE_S:
                    continue
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
            except FileNotFoundError:  # its writer was done
                pass
