"""What still has to be sent, oldest first, and who sends it when a process dies.

The spool holds the batches. `DiskOutbox` adds one small file per process with the name of the last
batch that is done: batches are sent in the order of their names, so those with later names still
have to be sent. `MemoryOutbox` is for runs without a spool. Neither opens a socket.

The spool's thread calls `open` and `put`, the keeper calls `is_pending`, the sender the rest.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from cirron import files, guard, system, wire
from cirron.record import clock
from cirron.ship.sinks.base import Outcome
from cirron.ship.threads import new_lock

if TYPE_CHECKING:
    from pathlib import Path

    from cirron.ship.sinks.base import Sealed

# Limit of payloads in memory: half a minute at the most that the flusher seals (2 MB batches), 18
# hours at the 1 KB a second of an ordinary loop.
MAX_MEMORY_BYTES = 64 * 2**20
# Limit of batches on disk that wait, at about 250 bytes of memory each: 28 hours at one a second.
MAX_ITEMS = 100_000
# Cirron writes no larger spool files.
MAX_FILE_BYTES = 64 * 2**20
# Dead processes that are taken over at a time: each takes a file descriptor.
MAX_ADOPTED = 64
# On systems without file locks, a process counts as dead if its file was not touched for a day. A
# wrong guess sends a batch twice, and the server drops the copy.
UNTOUCHED_NS = 24 * 3600 * 10**9

# Sorts before the name of every batch.
NOTHING_DONE = f"{0:020d}-{0:032x}.json"

# The only files that are sent besides batches: raw values of snapshots.
BLOB = re.compile(
    r"file:.*/(snapshots/[0-9a-f]{32}/(?:weights|gradients)(?:-[0-9]{1,4})?\.safetensors)", re.S
)


class Item(msgspec.Struct, eq=False):
    """A batch to send."""

    name: str
    size: int
    sender: Sender | None = None
    records: int = 0  # of this process
    pieces: list[bytes] | None = None  # if there is no file
    is_taken: bool = False  # the server has the batch, but maybe not its blobs
    blobs: list[str] | None = None  # blobs to send; None: the batch was never accepted

    @property
    def batch_id(self) -> str:
        """The id by which a server recognises a second copy."""
        return self.name[21:53]


class MemoryOutbox:
    """A queue of batches in memory, sent strictly in order.

    Above `max_bytes`, the oldest are dropped, except the one that is being sent.
    """

    def __init__(self, max_bytes: int = MAX_MEMORY_BYTES) -> None:
        self.max_bytes = max_bytes
        self.dropped = 0  # batches dropped because the queue was full
        self.rejected = 0  # batches that the server refused
        self.unreadable = 0  # batches whose file was missing or unreadable
        self.pending_bytes = 0  # before compression
        self._held_bytes = 0  # of that, in memory
        self._queue: deque[Item] = deque()  # batches of dead processes come first
        self._out: Item | None = None  # the head, which may be being sent
        self._last = ""  # the name of the newest
        self._lock = new_lock()

    def put(self, batch: Sealed) -> Outcome:
        """Adds a batch. Batches come in order; adding one again has no effect."""
        with self._lock:
            if batch.file_name <= self._last:
                return Outcome.HELD
            while self._held_bytes + batch.size > self.max_bytes >= batch.size:
                if not self._drop_oldest():
                    break
            return self._append(batch)

    def adopt(self) -> int:
        """Takes over the batches of dead processes; returns how many."""
        return 0

    def head(self) -> Item | None:
        with self._lock:
            self._out = self._queue[0] if self._queue else None
            return self._out

    def read(self, item: Item) -> bytes | None:
        """The batch as JSON; None if it need not be sent. Raises OSError if it is unreadable."""
        return b"".join(item.pieces or ())

    def open_blob(self, key: str) -> int:
        """Opens a file with raw values; the caller closes the descriptor. Raises OSError."""
        raise FileNotFoundError(errno.ENOENT, "no such file", key)

    def done(self, item: Item) -> None:
        self._finish(item)

    def reject(self, item: Item) -> None:
        """Removes a batch that the server refused for good."""
        self.rejected += self._finish(item)

    def drop(self, item: Item) -> None:
        """Removes a batch that cannot be read, so that later ones can be sent."""
        self.unreadable += self._finish(item)

    def close(self) -> None:
        """Drops what is left, with a count and a warning: no later process could send it."""
        with self._lock:
            lost = len(self)
            self._clear()
        self.dropped += lost
        if lost:
            guard.warn(
                "%d batches could not be sent before the session ended and are lost;"
                ' with output="spool" a later run would send them',
                lost,
            )

    def after_fork(self) -> None:
        """In a forked child: the parent sends these batches."""
        self._lock = new_lock()
        self._clear()

    def __len__(self) -> int:
        return len(self._queue)

    def _clear(self) -> None:
        self._queue.clear()
        self._out = None
        self.pending_bytes = self._held_bytes = 0

    def _append(self, batch: Sealed, sender: Sender | None = None, *, held: bool = True) -> Outcome:
        self._last = batch.file_name
        item = Item(batch.file_name, batch.size, sender, batch.records)
        if held:
            if self._held_bytes + batch.size > self.max_bytes:
                self.dropped += 1
                return Outcome.DROPPED
            self._held_bytes += batch.size
            item.pieces = batch.pieces  # not joined: the spool shares them
        self._queue.append(item)
        self.pending_bytes += batch.size
        return Outcome.HELD

    def _finish(self, item: Item) -> bool:
        """Removes the head. False: it is no longer the head."""
        with self._lock:
            if not self._queue or self._queue[0] is not item:
                return False
            self._out = None
            if item.sender is not None:
                item.sender.advance(item.name)
            self._remove(0)
            return True

    def _drop_oldest(self) -> bool:
        """Drops the oldest batch that is not being sent. False: there is none."""
        place = 1 if self._queue and self._queue[0] is self._out else 0
        if len(self._queue) <= place:
            return False
        self._remove(place)
        self.dropped += 1
        return True

    def _remove(self, place: int) -> None:
        item = self._queue[place]
        del self._queue[place]
        self.pending_bytes -= item.size
        if item.pieces is not None:
            self._held_bytes -= item.size


class DiskOutbox(MemoryOutbox):
    """A queue of spool files: this process's (ids begin with `prefix`), and dead processes'.

    Above `max_items`, the oldest stay in the spool and are not sent. Batches that could not be
    written are sent from memory; above `max_held_bytes`, the newest of them is dropped.
    """

    def __init__(
        self,
        root: Path,
        prefix: str,
        *,
        access: str = "private",
        max_items: int = MAX_ITEMS,
        max_held_bytes: int = MAX_MEMORY_BYTES,
    ) -> None:
        super().__init__(max_held_bytes)
        self.max_items = max_items
        self._root = root
        self._spool = root / "spool"
        self._folder = files.Folder(root / "outbox", files.SENDER, access)
        self._sender = Sender(self._folder, prefix)
        self._dead: dict[str, Sender] = {}  # whose batches are in the queue
        self._has_more_dead = False
        self._is_closed = False

    def open(self) -> None:
        """Makes sure that a later process will find unsent batches. Raises OSError if it will not.

        Called before each write, because the folder may have been removed.
        """
        with self._lock:
            self._sender.open()

    def put(self, batch: Sealed) -> Outcome:
        """Adds a batch after the spool has written it, or tried to."""
        name = batch.file_name
        is_stored = os.path.lexists(self._spool / name)
        with self._lock:
            if name <= self._last:
                return Outcome.HELD if self.is_pending(name) else Outcome.DONE
            outcome = self._append(batch, self._sender, held=not is_stored)
            self._enforce_cap()
            return outcome

    def is_pending(self, name: str) -> bool:
        """Whether this process still has to send its spool file of that name."""
        return name > self._sender.watermark

    def head(self) -> Item | None:
        while self._has_more_dead and not self._dead:
            self.adopt()
        return super().head()

    def adopt(self) -> int:
        """Takes over from dead processes, `MAX_ADOPTED` at a time; returns the number of batches.

        Only one process gets the lock of a dead one. The file always says what is left and is
        removed when nothing is, so another process can take over from this one.
        """
        taken = self._take_over()
        self._has_more_dead = len(taken) == MAX_ADOPTED
        try:
            names = os.listdir(self._spool)
        except FileNotFoundError:
            names = []
        except OSError:  # a later process may be able to list it
            self._has_more_dead = False
            close_all(taken, remove=False)
            return 0
        found = [
            Item(name, size_of(self._spool / name), sender)
            for name in names
            if (sender := taken.get(name[21:37])) is not None and sender.is_waiting(name)
        ]
        with self._lock:
            self._dead |= taken
            self._queue.extendleft(sorted(found, key=lambda item: item.name, reverse=True))
            self.pending_bytes += sum(item.size for item in found)
            self._enforce_cap()
            self._release()
        return len(found)

    def _take_over(self) -> dict[str, Sender]:
        taken: dict[str, Sender] = {}
        with contextlib.suppress(OSError):
            self._folder.find()
            if not self._folder.is_ours:  # the files in it may be the user's
                return taken
            for entry in self._folder.entries(files.TMP):  # a process died while creating its file
                if clock.wall() - entry.modified_ns > UNTOUCHED_NS:
                    self._folder.remove(entry.name)
            for entry in self._folder.entries():
                if len(taken) == MAX_ADOPTED:
                    break
                sender = Sender(self._folder, entry.name)
                if entry.name not in (self._sender.prefix, *self._dead) and sender.take():
                    taken[entry.name] = sender
        return taken

    def read(self, item: Item) -> bytes | None:
        if item.pieces is not None:
            return super().read(item)
        payload = system.read_regular(self._spool / item.name, MAX_FILE_BYTES)
        header = payload[: payload.find(b',"spans":[')]
        if f'"batch_id":"{item.batch_id}"'.encode() not in header:
            raise OSError(errno.EINVAL, "its batch id does not match its name")
        # A merged file consists of batches that were sent. After a power failure it can look new.
        return None if b'"merged":[' in header else payload

    def open_blob(self, key: str) -> int:
        path = self._root / key
        if os.path.realpath(path) != os.path.join(os.path.realpath(self._root), *key.split("/")):
            raise OSError(errno.ELOOP, "its path contains a link")
        file = system.open_regular(path)
        if os.fstat(file).st_nlink > 1:
            os.close(file)
            raise OSError(errno.EMLINK, "is a hard link")
        return file

    def close(self) -> None:
        """Leaves unsent batches to a later process."""
        with self._lock:
            left = sum(item.sender is self._sender for item in self._queue)
            # Warn once: both the sender's thread and its caller close the outbox.
            is_first, self._is_closed = not self._is_closed, True
            if left and self._sender.file is None and is_first:
                guard.warn(
                    "%d batches were not sent before the session ended, and no later run will send"
                    " them: %s could not be written",
                    left,
                    self._folder.path,
                )
            self._sender.close(remove=not left)
            close_all(self._dead, remove=False)

    def after_fork(self) -> None:
        super().after_fork()
        self._sender.close(remove=False)  # the parent's own descriptor keeps the lock
        close_all(self._dead, remove=False)

    def _enforce_cap(self) -> None:
        while len(self) > self.max_items and self._drop_oldest():
            pass

    def _remove(self, place: int) -> None:
        super()._remove(place)
        self._release()

    def _release(self) -> None:
        if not self._queue or self._queue[0].sender is self._sender:
            close_all(self._dead, remove=True)


class Sender:
    """The progress of one sending process, in a file that it keeps locked while it lives."""

    def __init__(self, folder: files.Folder, prefix: str) -> None:
        self.prefix = prefix
        self.watermark = NOTHING_DONE  # the name of the last batch that is done
        self.file: int | None = None
        self._is_locked: bool | None = None
        self._folder = folder
        self._path = folder.path / prefix

    def open(self) -> None:
        """Creates the file, locked before others can see it; again if it was removed."""
        if self.file is not None and os.fstat(self.file).st_nlink:
            if self._is_locked is None:
                os.utime(self._path)  # shows that this process is alive
            return
        self.close(remove=False)
        # Without locks there is no need for that, and Windows cannot rename an open file.
        name = self.prefix + files.TMP if system.HAS_FCNTL else self.prefix
        self._folder.make()
        self._folder.remove(name)
        self.file = self._folder.create(name)
        try:
            self._is_locked = system.lock(self.file)
            self._write()
            if name != self.prefix:
                os.replace(self._folder.path / name, self._path)
        except OSError:
            self.close(remove=False)
            with contextlib.suppress(OSError):
                self._folder.remove(name)
            raise

    def take(self) -> bool:
        """Takes over from a dead process. False: it is alive, or another process was faster."""
        with contextlib.suppress(OSError):  # it was removed, or belongs to another user
            self.file = system.open_regular(self._path, os.O_RDWR)
            self._is_locked = system.lock(self.file)
            status = os.fstat(self.file)
            is_old = clock.wall() - status.st_mtime_ns > UNTOUCHED_NS
            is_dead = is_old if self._is_locked is None else self._is_locked
            # Another process may have removed it after it was opened here.
            if is_dead and os.path.samestat(status, os.lstat(self._path)):
                found = os.read(self.file, len(NOTHING_DONE)).decode("ascii", "replace")
                if self.is_waiting(found):  # else it is damaged, and everything is sent again
                    self.watermark = found
                return True
        self.close(remove=False)
        return False

    def is_waiting(self, name: str) -> bool:
        """Whether this is an unsent batch of that process."""
        is_its_own = files.BATCH.fullmatch(name) is not None and name[21:37] == self.prefix
        return is_its_own and name > self.watermark

    def advance(self, name: str) -> None:
        """Records that this batch and all before it are done."""
        self.watermark = name
        with contextlib.suppress(OSError):  # at worst it is sent again, and the server drops it
            self._write()

    def close(self, *, remove: bool) -> None:
        """Closes the file, and removes it if everything is done."""
        file, self.file = self.file, None
        if file is not None:
            os.close(file)
            if remove:
                with contextlib.suppress(OSError):
                    self._folder.remove(self.prefix)

    def _write(self) -> None:
        """Overwrites the file in place, which works on a full disk."""
        if self.file is not None:
            os.lseek(self.file, 0, os.SEEK_SET)
            os.write(self.file, f"{self.watermark}\n".encode())


def close_all(senders: dict[str, Sender], *, remove: bool) -> None:
    """Closes the files of dead processes; removes them if nothing is left to send."""
    while senders:
        senders.popitem()[1].close(remove=remove)


def size_of(path: Path) -> int:
    """The size of a file, 0 if it does not exist."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def blob_keys(payload: bytes) -> tuple[list[str], int]:
    """The keys of the blobs of a batch, and the number of blob addresses that are not cirron's."""
    if b'"blob_uri":"file' not in payload:
        return [], 0
    try:
        snapshots = wire.decode_batch(payload).snapshots
    except (msgspec.MsgspecError, ValueError, RecursionError):  # planted
        return [], 1
    addresses = {snapshot.blob_uri or "" for snapshot in snapshots} - {""}
    found = [match[1] for address in addresses if (match := BLOB.fullmatch(address))]
    return sorted(set(found)), len(addresses) - len(found)
