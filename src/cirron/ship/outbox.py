"""What still has to be sent, oldest first, and what happens to it when a process dies.

`DiskOutbox` keeps one small marker a batch next to the spool, which holds the batch itself; nothing
is stored twice. `MemoryOutbox` is for runs that write no spool. Neither knows of a network.

The flusher's thread puts batches in (`mark`, `put`, `is_pending`), the sender's takes them out
(`adopt`, `head`, `done`, `reject`, `drop`); one lock lies between them and is never held for I/O on
a payload.
"""

from __future__ import annotations

import abc
import contextlib
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cirron import guard, wire
from cirron.record import clock
from cirron.ship.sinks.base import Blob, Outcome

try:
    import fcntl

    HAS_LOCKS = True
except ImportError:  # Windows
    HAS_LOCKS = False

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cirron.ship.sinks.base import Sealed

# Payloads kept in memory: at 2 MB a batch, the most that the flusher seals, half a minute of it; at
# the 1 KB a second of an ordinary loop, 18 hours.
MAX_MEMORY_BYTES = 64 * 2**20
# Batches that wait on disk, at about 400 bytes of memory each: 28 hours at one a second.
MAX_ITEMS = 100_000
# Names of batches that are done with, against a second `put`. A disk that refuses for longer than
# these last (3 hours at one a second) costs second copies, which the server drops.
MAX_FINISHED = 10_000
# Where there are no locks, an outbox that nothing has touched for a day counts as dead. A wrong
# guess costs a second copy, which the server drops by its batch id.
UNTOUCHED_NS = 24 * 3600 * 10**9

LOCK = "lock"
REJECTED = ".rejected"


class Marker(msgspec.Struct):
    """The content of a marker file. What it stands for is in its name."""

    blobs: list[tuple[str, str]] = []


class Item:
    """A batch to send. `sent` counts what the server has: the batch is 1, each blob one more."""

    __slots__ = ("blobs", "folder", "name", "payload", "sent", "size", "spool")

    def __init__(
        self,
        name: str,
        blobs: Sequence[Blob],
        size: int,
        *,
        payload: bytes | None = None,
        spool: Path | None = None,
        folder: Folder | None = None,
    ) -> None:
        self.name = name
        self.blobs = blobs
        self.size = size
        self.payload = payload  # where there is no file
        self.spool = spool
        self.folder = folder  # where its marker lies
        self.sent = 0

    @property
    def batch_id(self) -> str:
        """The id that a server drops a second copy by."""
        return self.name.removesuffix(".json").partition("-")[2]

    def read(self) -> bytes | None:
        """The batch as JSON; None when its file is gone, or not ours to read."""
        if self.payload is not None or self.spool is None:
            return self.payload
        try:
            return (self.spool / self.name).read_bytes()
        except (FileNotFoundError, PermissionError):
            return None


class Outbox(abc.ABC):
    """A queue that nothing overtakes: the head stays the head until it is done or given up."""

    def __init__(self) -> None:
        self.dropped = 0  # batches that were lost before they could be sent
        self.rejected = 0  # batches that the server refused
        self._items: OrderedDict[str, Item] = OrderedDict()  # a dict is slow to lose its first
        self._out: Item | None = None  # the head, once it was asked for: it may be under way
        self._lock = threading.Lock()

    @abc.abstractmethod
    def put(self, batch: Sealed) -> Outcome:
        """Takes a batch, once: a second time changes nothing."""

    def adopt(self) -> int:
        """Takes over what dead processes left; how many batches that was."""
        return 0

    def head(self) -> Item | None:
        """The oldest batch."""
        with self._lock:
            self._out = next(iter(self._items.values()), None)
            return self._out

    def done(self, item: Item) -> None:
        """It was sent."""
        self._remove(item)

    def reject(self, item: Item) -> None:
        """The server refused it for good: it is not tried again."""
        if self._remove(item):
            self.rejected += 1

    def drop(self, item: Item) -> None:
        """Its payload is gone."""
        if self._remove(item):
            self.dropped += 1

    @abc.abstractmethod
    def close(self) -> None:
        """Lets go of everything outside; what is left stays for a later process, if it can."""

    def after_fork(self) -> None:
        """In a forked child: what waits here is the parent's to send."""
        self._lock = threading.Lock()
        self._items = OrderedDict()
        self._out = None

    def __len__(self) -> int:
        return len(self._items)

    @property
    def pending_bytes(self) -> int:
        """The size of what waits, before compression."""
        with self._lock:
            return sum(item.size for item in self._items.values())

    def _oldest(self) -> Item | None:
        """What to give up first: the oldest batch that is not just being sent."""
        return next((item for item in self._items.values() if item is not self._out), None)

    def _remove(self, item: Item) -> bool:
        with self._lock:
            return self._items.pop(item.name, None) is not None


class MemoryOutbox(Outbox):
    """Payloads in memory. Past the cap the oldest go, but not the one that is being sent."""

    def __init__(self, max_bytes: int = MAX_MEMORY_BYTES) -> None:
        super().__init__()
        self.max_bytes = max_bytes

    def put(self, batch: Sealed) -> Outcome:
        size = batch.size
        with self._lock:
            if batch.file_name in self._items:
                return Outcome.HELD
            waiting = sum(item.size for item in self._items.values())
            while waiting + size > self.max_bytes:
                self.dropped += 1
                oldest = self._oldest()
                if oldest is None or size > self.max_bytes:
                    return Outcome.DROPPED
                del self._items[oldest.name]
                waiting -= oldest.size
            self._items[batch.file_name] = Item(
                batch.file_name, batch.blobs, size, payload=batch.payload
            )
            return Outcome.HELD

    def close(self) -> None:
        """What is left is lost, counted and said: there is no later process for it."""
        with self._lock:
            lost = len(self._items)
            self._items.clear()
        self.dropped += lost
        if lost:
            guard.warn(
                "%d batches could not be sent before the session ended and are lost;"
                ' with output="spool" a later run would send them',
                lost,
            )


class DiskOutbox(Outbox):
    """Markers in `<root>/outbox/<session_id>-<pid>/`, payloads in `<root>/spool/`.

    A marker is there before its spool file and until the server has the batch, so a process that
    dies at any moment leaves a list of what a later one must send. Past `max_items` the oldest are
    given up: they stay in the spool, and are not sent.
    """

    def __init__(
        self,
        root: Path,
        session_id: str,
        *,
        max_held_bytes: int = MAX_MEMORY_BYTES,
        max_items: int = MAX_ITEMS,
    ) -> None:
        super().__init__()
        self.unmarked = 0  # failed tries to write a marker: only this process knows of the batch
        self.max_held_bytes = max_held_bytes
        self.max_items = max_items
        root = root.absolute()  # the program may change its working directory
        self._spool = root / "spool"
        self._home = root / "outbox"
        self._session_id = session_id
        self._own: Folder | None = None  # made with the first batch
        self._adopted: dict[Folder, int] = {}  # and how many of each still wait
        self._marked: dict[str, Item] = {}  # announced by `mark`, not yet there
        self._finished: OrderedDict[str, None] = OrderedDict()  # the last ones, oldest first

    def mark(self, batch: Sealed) -> None:
        """Notes, on disk, that this batch has to be sent. To be called before it is spooled."""
        with self._lock:
            if batch.file_name not in self._finished:
                self._mark(batch)

    def put(self, batch: Sealed) -> Outcome:
        """Takes a batch that is in the spool; one that the disk refused is kept in memory.

        The spool puts it in when it is written, the sender's sink when it is made: the second of
        them finds it waiting, or finished.
        """
        name = batch.file_name
        spooled = (self._spool / name).exists()
        with self._lock:
            if name in self._finished:
                return Outcome.DONE
            item = self._mark(batch)
            if name in self._items:
                if spooled:
                    item.payload = None
                return Outcome.HELD
            del self._marked[name]
            if not spooled:
                held = sum(len(other.payload or b"") for other in self._items.values())
                if held + item.size > self.max_held_bytes:
                    self._finish(item)
                    self.dropped += 1
                    return Outcome.DROPPED
                item.payload = batch.payload
            self._items[name] = item
            self._enforce_cap()
            return Outcome.HELD

    def is_pending(self, name: str) -> bool:
        """Whether this process still has to send that spool file, under that name."""
        return name in self._items or name in self._marked

    def adopt(self) -> int:
        """Takes over the outboxes whose owner is dead; how many batches that was.

        A folder's lock goes to one process, and the markers stay in it until they are done, so
        the next process can take over from this one.
        """
        found: OrderedDict[str, Item] = OrderedDict()
        for folder in self._dead():
            folder.sweep(self._spool)
            for name in folder.names():
                try:
                    size = (self._spool / name).stat().st_size
                except OSError:  # evicted, or never written
                    folder.remove(name)
                    self.dropped += 1
                else:
                    found[name] = Item(
                        name, folder.blobs(name), size, spool=self._spool, folder=folder
                    )
            waiting = sum(item.folder is folder for item in found.values())
            if waiting:
                self._adopted[folder] = waiting
            else:
                folder.release()
        with self._lock:
            self._items = OrderedDict(sorted((found | self._items).items()))
            self._enforce_cap()
        return len(found)

    def reject(self, item: Item) -> None:
        if item.folder is not None:
            item.folder.reject(item.name)
        super().reject(item)

    def close(self) -> None:
        with self._lock:
            for folder in self._folders():
                folder.release()
            self._own = None
            self._adopted = {}

    def after_fork(self) -> None:
        super().after_fork()
        for folder in self._folders():
            folder.forget()
        self._own = None
        self._adopted = {}
        self._marked = {}
        self._finished = OrderedDict()

    def _folders(self) -> list[Folder]:
        return [*([] if self._own is None else [self._own]), *self._adopted]

    def _dead(self) -> Iterator[Folder]:
        """The outboxes of dead processes, oldest session first, each locked."""
        mine = {folder.path for folder in self._folders()}
        try:
            paths = sorted(self._home.iterdir())
        except OSError:
            return
        for path in paths:
            if path not in mine and not path.name.startswith("."):
                folder = Folder.take(path)
                if folder is not None:
                    yield folder

    def _mark(self, batch: Sealed) -> Item:
        name = batch.file_name
        item = self._items.get(name) or self._marked.get(name)
        if item is None:
            item = Item(name, batch.blobs, batch.size, spool=self._spool)
            self._marked[name] = item
        if item.folder is None:  # also when an earlier try failed
            try:
                item.folder = self._write(name, batch.blobs)
            except OSError:  # a disk that refuses this refuses the spool too, which says so
                self.unmarked += 1
        return item

    def _write(self, name: str, blobs: Sequence[Blob]) -> Folder:
        if self._own is not None:
            with contextlib.suppress(FileNotFoundError):  # somebody removed the folder
                self._own.write(name, blobs)
                return self._own
        self._own = Folder.create(self._home, f"{self._session_id}-{os.getpid()}")
        self._own.write(name, blobs)
        return self._own

    def _enforce_cap(self) -> None:
        while len(self._items) > self.max_items and (oldest := self._oldest()) is not None:
            self._finish(oldest)
            self.dropped += 1

    def _finish(self, item: Item) -> bool:
        self._unmark(item)
        self._finished[item.name] = None
        if len(self._finished) > MAX_FINISHED:
            self._finished.popitem(last=False)
        return self._items.pop(item.name, None) is not None

    def _unmark(self, item: Item) -> None:
        folder = item.folder
        if folder is None:
            return
        folder.remove(item.name)
        if folder in self._adopted:
            self._adopted[folder] -= 1
            if not self._adopted[folder]:
                del self._adopted[folder]
                folder.release()

    def _remove(self, item: Item) -> bool:
        with self._lock:
            return self._finish(item)


class Folder:
    """One process's markers, and the lock that tells whether that process lives."""

    def __init__(self, path: Path, lock: int | None) -> None:
        self.path = path
        self._lock = lock  # a descriptor; None where there are no locks

    @classmethod
    def create(cls, home: Path, name: str) -> Folder:
        """A new folder. It appears with its lock held, so nobody can take it for a dead one."""
        home.mkdir(parents=True, exist_ok=True)
        hidden = home / f".{name}-{clock.random_id()}"
        hidden.mkdir()
        (hidden / LOCK).touch()
        lock = acquire(hidden / LOCK)
        path = home / name
        try:
            hidden.rename(path)
        except OSError:  # the name is taken: this session had one here, and it was adopted
            path = home / f"{name}-{clock.random_id()}"
            hidden.rename(path)
        return cls(path, lock)

    @classmethod
    def take(cls, path: Path) -> Folder | None:
        """A dead process's folder, now ours; None when its owner lives or it is gone."""
        try:
            lock = acquire(path / LOCK)
            if lock is None:
                entries = [path, *path.iterdir()]
                touched_ns = max(entry.stat().st_mtime_ns for entry in entries)
                return cls(path, None) if clock.wall() - touched_ns > UNTOUCHED_NS else None
            try:
                # Between our opening the lock and having it, another process may have emptied and
                # removed the folder: then the lock is on a file that has no name any more.
                if os.path.samestat(os.fstat(lock), (path / LOCK).stat()):
                    return cls(path, lock)
            except OSError:
                pass
            os.close(lock)
        except FileNotFoundError:
            with contextlib.suppress(OSError):  # it died between the two steps of `release`
                path.rmdir()
        except OSError:  # it is alive, or belongs to another user
            pass
        return None

    def names(self) -> list[str]:
        """The batches that wait, oldest first."""
        return sorted(name for name in os.listdir(self.path) if name.endswith(".json"))

    def blobs(self, name: str) -> list[Blob]:
        """The blobs that a marker lists; none when it cannot be read: the batch still can be."""
        try:
            marker = msgspec.json.decode((self.path / name).read_bytes(), type=Marker)
        except (OSError, msgspec.MsgspecError):
            return []
        return [Blob(Path(path), key) for path, key in marker.blobs]

    def write(self, name: str, blobs: Sequence[Blob]) -> None:
        """Puts a marker in place, whole or not at all."""
        partial = self.path / f"{name}.tmp"
        partial.write_bytes(
            wire.encode(Marker([(str(blob.path.absolute()), blob.key) for blob in blobs]))
        )
        partial.replace(self.path / name)

    def remove(self, name: str) -> None:
        """Takes a marker away."""
        with contextlib.suppress(OSError):  # at worst it is sent again, and dropped by the server
            (self.path / name).unlink()

    def reject(self, name: str) -> None:
        """Renames a marker, so that it is never tried again."""
        with contextlib.suppress(OSError):
            (self.path / name).replace(self.path / (name + REJECTED))

    def sweep(self, spool: Path) -> None:
        """Removes half-written markers, and rejected ones whose spool file is gone."""
        for name in os.listdir(self.path):
            is_rejected = name.endswith(REJECTED)
            if name.endswith(".tmp") or (
                is_rejected and not (spool / name.removesuffix(REJECTED)).exists()
            ):
                self.remove(name)

    def release(self) -> None:
        """Lets go of the folder, and removes it when nothing is in it."""
        with contextlib.suppress(OSError):
            if os.listdir(self.path) == [LOCK]:
                (self.path / LOCK).unlink()
                self.path.rmdir()
        self.forget()

    def forget(self) -> None:
        """Closes our descriptor. In a forked child that leaves the parent's lock as it is."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def acquire(path: Path) -> int | None:
    """A descriptor that holds the lock until it is closed, if only by a kill -9.

    None where there are no locks: on Windows, or on Lustre mounted without `-o flock`.
    BlockingIOError when somebody else has it.
    """
    if not HAS_LOCKS:
        return None
    lock = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise
    except OSError:
        os.close(lock)
        return None
    return lock
