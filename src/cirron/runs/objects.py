"""Where a store keeps its files: a local folder, or object storage through `obstore`.

Files never change: each is added under a free name, and deleted later. `add` fails if the name is
taken, which makes commits safe with any number of writers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cirron import errors, system
from cirron.record import clock
from cirron.runs import untrusted

if TYPE_CHECKING:
    from collections.abc import Iterator

# Valid file names; they cannot lead out of the store.
NAME = re.compile(r"(manifest/[0-9]{20}\.json|run-[\w.%-]{1,120}/[0-9a-f]{32}-[a-z]+\.parquet)")
MAX_MANIFEST_BYTES = 256 * 2**20
# Errors of `os.link` on file systems without hard links. Others mean that the disk fails.
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
MAGIC = b"PAR1"  # at the end of each Parquet file


class Objects(Protocol):
    """Files by name. Names are checked against `NAME` before they come here."""

    def list(self, prefix: str) -> list[str]:
        """The names with this prefix, in order."""

    def sizes(self, prefix: str) -> dict[str, int]:
        """The same, with the size of each file."""

    def read(self, name: str) -> bytes:
        """The content of a small file; raises FileNotFoundError if it does not exist."""

    def add(self, name: str, file: Path) -> bool:
        """Moves a finished local file to this name. Returns False if the name is taken."""

    def remove(self, name: str) -> None:
        """Deletes a file, if it exists."""

    def local(self, name: str) -> str:
        """The path of a local copy; raises FileNotFoundError if the file does not exist."""

    def age_s(self, name: str) -> float:
        """How long ago it was added."""


class LocalObjects:
    """Files below a local folder, which only their owner reads."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def list(self, prefix: str) -> list[str]:
        folder, _, start = prefix.rpartition("/")
        try:
            entries = os.listdir(self.root / folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = (f"{folder}/{one}" if folder else one for one in entries if one.startswith(start))
        return sorted(found)

    def sizes(self, prefix: str) -> dict[str, int]:
        found = {}
        for name in self.list(prefix):
            with contextlib.suppress(FileNotFoundError):  # deleted in the meantime
                about = os.lstat(self.root / name)
                if stat.S_ISREG(about.st_mode):  # links are never followed
                    found[name] = about.st_size
        return found

    def read(self, name: str) -> bytes:
        return untrusted.read_file(self.root / name, MAX_MANIFEST_BYTES)

    def add(self, name: str, file: Path) -> bool:
        target = self.root / name
        if not target.parent.is_dir():
            os.makedirs(target.parent, mode=0o700, exist_ok=True)
        os.chmod(file, 0o600)
        with open(file, "rb") as written:
            os.fsync(written.fileno())
        try:
            os.link(file, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            return self._copy(file, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file)
        _sync_folder(target.parent)
        return True

    def _copy(self, file: Path, target: Path) -> bool:
        """Not atomic if the process is killed: the name is taken before the file is complete."""
        try:
            descriptor = system.create(target, 0o600)
        except FileExistsError:
            return False
        try:
            with os.fdopen(descriptor, "wb") as made, open(file, "rb") as written:
                shutil.copyfileobj(written, made)
                made.flush()
                os.fsync(made.fileno())
        except OSError:  # others would take the incomplete file for a complete one
            os.unlink(target)
            raise
        return True

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.root / name)

    def local(self, name: str) -> str:
        path = self.root / name
        with os.fdopen(system.open_regular(path), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - len(MAGIC)))
            if file.read() != MAGIC:
                raise untrusted.UnreadableError("it is not a whole Parquet file")
        return str(path)

    def age_s(self, name: str) -> float:
        return (clock.wall() - os.stat(self.root / name).st_mtime_ns) / 1e9


class RemoteObjects:
    """Files in object storage: `s3://bucket/path`, `gs://`, `az://`, `file:///`, `memory:///`."""

    def __init__(self, url: str) -> None:
        self._api = errors.need("obstore", f"a store at {url}")
        from obstore import exceptions, store

        self._url = url
        self._failed: Any = exceptions.BaseError
        self._taken: Any = exceptions.AlreadyExistsError
        with self._as_message():
            self._store: Any = store.from_url(url)
        self._copies = Path(tempfile.mkdtemp(prefix="cirron-"))  # files never change
        weakref.finalize(self, shutil.rmtree, self._copies, ignore_errors=True)

    @contextlib.contextmanager
    def _as_message(self) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, self._taken):
            raise
        except (self._failed, ValueError, NotImplementedError) as error:  # the last: http://
            reason = str(error).partition("\n")[0]
            raise errors.SettingError(
                f"the store at {self._url!r} cannot be used: {reason}"
            ) from None

    def list(self, prefix: str) -> list[str]:
        return sorted(self.sizes(prefix))

    def sizes(self, prefix: str) -> dict[str, int]:
        folder = prefix.rpartition("/")[0]
        with self._as_message():
            found = self._api.list(self._store, prefix=folder or None).collect()
        sizes = {str(one["path"]): int(one["size"]) for one in found}
        return {name: size for name, size in sizes.items() if name.startswith(prefix)}

    def read(self, name: str) -> bytes:
        with self._as_message():
            return bytes(self._api.get(self._store, name).bytes())

    def add(self, name: str, file: Path) -> bool:
        try:
            with self._as_message():
                self._api.put(self._store, name, file, mode="create", use_multipart=False)
        except self._taken:
            return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file)
        return True

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._as_message():
            self._api.delete(self._store, name)

    def local(self, name: str) -> str:
        path = self._copies / name.replace("/", "_")
        if not path.exists():
            partial = self._copies / clock.random_id()  # another thread may download it too
            partial.write_bytes(self.read(name))
            os.replace(partial, path)
        return str(path)

    def age_s(self, name: str) -> float:
        with self._as_message():
            modified = self._api.head(self._store, name)["last_modified"]
        return clock.wall() / 1e9 - float(modified.timestamp())


def at(where: str | os.PathLike[str]) -> Objects:
    """The files at a path, or at the URL of an object store."""
    text = os.fspath(where)
    return RemoteObjects(text) if is_url(text) else LocalObjects(Path(text))


def is_url(text: str) -> bool:
    """Whether this is the URL of an object store, and not a path."""
    return re.match(r"[a-z0-9+]+://", text) is not None


def _sync_folder(path: Path) -> None:
    with contextlib.suppress(OSError):  # some systems cannot open a folder
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
