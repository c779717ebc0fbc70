"""What still has to be sent, oldest first, and what happens to it when a process dies.

The spool holds the batches. All that `DiskOutbox` adds is one small file per process with the name
of the last batch that is done: batches are sent in the order of their names, so those with later
names still have to be sent. `MemoryOutbox` is for runs without a spool. Neither opens a socket.

The spool's thread calls `open` and `put`, the keeper's `is_pending`, the sender's the rest.
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

# Payloads kept in memory: at 2 MB a batch, the most that the flusher seals, half a minute of it; at
# the 1 KB a second of an ordinary loop, 18 hours.
MAX_MEMORY_BYTES = 64 * 2**20
# Batches that wait on disk, at about 250 bytes of memory each: 28 hours at one a second.
MAX_ITEMS = 100_000
# A spool file that is larger is no batch of ours.
MAX_FILE_BYTES = 64 * 2**20
# Dead processes that are taken over at a time: each costs a descriptor, of which there may be 1024.
MAX_ADOPTED = 64
# Where there are no locks, a process whose file was not touched for a day counts as dead. A wrong
# guess costs a second copy, which the server drops by its batch id.
UNTOUCHED_NS = 24 * 3600 * 10**9

# Sorts before the name of every batch.
NOTHING_DONE = f"{0:020d}-{0:032x}.json"

# The only files that are ever sent besides batches: raw values, by the end of their address.
BLOB = re.compile(
    r"file:.*/(snapshots/[0-9a-f]{32}/(?:weights|gradients)(?:-[0-9]{1,4})?\.safetensors)", re.S
)


class Item(msgspec.Struct, eq=False):
    """A batch to send."""

    name: str
    size: int
    sender: Sender | None = None
    records: int = 0  # of this process
    pieces: list[bytes] | None = None  # where there is no file
    is_taken: bool = False  # by the server; not that it has taken the blobs
    blobs: list[str] | None = None  # that the server lacks; None: it has never had the batch

    @property
    def batch_id(self) -> str:
        """The id that a server drops a second copy by."""
        return self.name[21:53]


class MemoryOutbox:
    """A queue that nothing overtakes: the head stays the head until it is done or given up.

    Payloads are in memory. Past `max_bytes` the oldest go, but not the one that is being sent.
    """

    def __init__(self, max_bytes: int = MAX_MEMORY_BYTES) -> None:
        self.max_bytes = max_bytes
        self.dropped = 0  # batches that were given up because too many waited
        self.rejected = 0  # batches that the server refused
        self.unreadable = 0  # batches whose file was gone, or not to be read
        self.pending_bytes = 0  # before compression
        self._held_bytes = 0  # of that, in memory
        self._queue: deque[Item] = deque()  # what dead processes left goes first
        self._out: Item | None = None  # the head, once it was asked for: it may be under way
        self._last = ""  # the name of the newest
        self._lock = new_lock()

    def put(self, batch: Sealed) -> Outcome:
        """Takes a batch, once: a second time changes nothing. They come in order."""
        with self._lock:
            if batch.file_name <= self._last:
                return Outcome.HELD
            while self._held_bytes + batch.size > self.max_bytes >= batch.size:
                if not self._drop_oldest():
                    break
            return self._append(batch)

    def adopt(self) -> int:
        """Takes over what dead processes left; how many batches that was."""
        return 0

    def head(self) -> Item | None:
        """The oldest batch."""
        with self._lock:
            self._out = self._queue[0] if self._queue else None
            return self._out

    def read(self, item: Item) -> bytes | None:
        """The batch as JSON; None when it need not be sent after all. OSError: it is unreadable."""
        return b"".join(item.pieces or ())

    def open_blob(self, key: str) -> int:
        """A descriptor of a file with raw values, for the caller to close; or OSError."""
        raise FileNotFoundError(errno.ENOENT, "no such file", key)

    def done(self, item: Item) -> None:
        """It was sent."""
        self._finish(item)

    def reject(self, item: Item) -> None:
        """The server refused it for good: it is not tried again."""
        self.rejected += self._finish(item)

    def drop(self, item: Item) -> None:
        """It cannot be read: it is skipped, so that those behind it can go."""
        self.unreadable += self._finish(item)

    def close(self) -> None:
        """What is left is lost, counted and said: there is no later process for it."""
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
        """In a forked child: what waits here is the parent's to send."""
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
            item.pieces = batch.pieces  # not joined: the spool holds these too, if there is one
        self._queue.append(item)
        self.pending_bytes += batch.size
        return Outcome.HELD

    def _finish(self, item: Item) -> bool:
        """Whether it was still waiting."""
        with self._lock:
            if not self._queue or self._queue[0] is not item:
                return False
            self._out = None
            if item.sender is not None:
                item.sender.advance(item.name)
            self._remove(0)
            return True

    def _drop_oldest(self) -> bool:
        """Gives up the oldest batch that is not just being sent; False: there is none."""
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
    """Spool files: those of the batches whose ids begin with `prefix`, and of dead processes.

    Past `max_items` the oldest are given up: they stay in the spool, and are not sent. What the
    disk refuses is sent from memory; past `max_held_bytes` of that, the newest is given up.
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
        """Makes sure that a later process finds what this one leaves. OSError: it will not.

        Called before each batch is stored: somebody may have removed the folder.
        """
        with self._lock:
            self._sender.open()

    def put(self, batch: Sealed) -> Outcome:
        """Takes a batch that the spool has had its turn with."""
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
        """Takes over from dead processes, so many at a time; how many batches that was.

        A process's lock goes to one other. Its file says all along what is left, and goes when
        nothing is, so the next process can take over from this one.
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
            if not self._folder.is_ours:  # the files may be a user's, and ours are removed
                return taken
            for entry in self._folder.entries(files.TMP):  # a process died while making its file
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
        with open(system.open_regular(self._spool / item.name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_FILE_BYTES:
                raise OSError(errno.EFBIG, "larger than a batch can be")
            payload = file.read(size)
        header = payload[: payload.find(b',"spans":[')]
        if f'"batch_id":"{item.batch_id}"'.encode() not in header:
            raise OSError(errno.EINVAL, "not the batch that its name says")
        # A merged file is made of batches that are done. It can look new after a power failure.
        return None if b'"merged":[' in header else payload

    def open_blob(self, key: str) -> int:
        path = self._root / key
        if os.path.realpath(path) != os.path.join(os.path.realpath(self._root), *key.split("/")):
            raise OSError(errno.ELOOP, "reached through a link")
        file = system.open_regular(path)
        if os.fstat(file).st_nlink > 1:
            os.close(file)
            raise OSError(errno.EMLINK, "has another name too")
        return file

    def close(self) -> None:
        """What is left stays for a later process."""
        with self._lock:
            left = sum(item.sender is self._sender for item in self._queue)
            # Once: the sender's thread and who waits for it both close.
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
        self._sender.close(remove=False)  # our descriptor; the parent's keeps the lock
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
    """How far one process's batches are done, in a file that is locked while the process lives."""

    def __init__(self, folder: files.Folder, prefix: str) -> None:
        self.prefix = prefix
        self.watermark = NOTHING_DONE  # the name of the last batch that is done
        self.file: int | None = None
        self._is_locked: bool | None = None
        self._folder = folder
        self._path = folder.path / prefix

    def open(self) -> None:
        """Puts the file in place, locked before it can be seen; anew if somebody removed it."""
        if self.file is not None and os.fstat(self.file).st_nlink:
            if self._is_locked is None:
                os.utime(self._path)  # says that this process lives
            return
        self.close(remove=False)
        # Without locks it may as well be seen; Windows cannot rename a file that is open.
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
        """Takes over from a dead process. False: it lives, or another process was faster."""
        with contextlib.suppress(OSError):  # it is gone, or another user's
            self.file = system.open_regular(self._path, os.O_RDWR)
            self._is_locked = system.lock(self.file)
            status = os.fstat(self.file)
            is_old = clock.wall() - status.st_mtime_ns > UNTOUCHED_NS
            is_dead = is_old if self._is_locked is None else self._is_locked
            # Another process may have finished and removed it since it was opened here.
            if is_dead and os.path.samestat(status, os.lstat(self._path)):
                found = os.read(self.file, len(NOTHING_DONE)).decode("ascii", "replace")
                if self.is_waiting(found):  # else it is damaged, and all of them go once more
                    self.watermark = found
                return True
        self.close(remove=False)
        return False

    def is_waiting(self, name: str) -> bool:
        """Whether this is a batch of that process, and not done."""
        is_its_own = files.BATCH.fullmatch(name) is not None and name[21:37] == self.prefix
        return is_its_own and name > self.watermark

    def advance(self, name: str) -> None:
        """Notes that this batch is done, and so are those before it."""
        self.watermark = name
        with contextlib.suppress(OSError):  # at worst it is sent again, and dropped by the server
            self._write()

    def close(self, *, remove: bool) -> None:
        """Lets go of the file, and removes it when all is done."""
        file, self.file = self.file, None
        if file is not None:
            os.close(file)
            if remove:
                with contextlib.suppress(OSError):
                    self._folder.remove(self.prefix)

    def _write(self) -> None:
        """In place: a full disk allows that."""
        if self.file is not None:
            os.lseek(self.file, 0, os.SEEK_SET)
            os.write(self.file, f"{self.watermark}\n".encode())


def close_all(senders: dict[str, Sender], *, remove: bool) -> None:
    """Lets go of dead processes; `remove` when nothing of theirs is left."""
    while senders:
        senders.popitem()[1].close(remove=remove)


def size_of(path: Path) -> int:
    """The size of a file; 0 when it is gone."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def blob_keys(payload: bytes) -> tuple[list[str], int]:
    """The keys of the files that belong to a batch, and how many it names that are not ours."""
    if b'"blob_uri":"file' not in payload:
        return [], 0
    try:
        snapshots = wire.decode_batch(payload).snapshots
    except (msgspec.MsgspecError, ValueError, RecursionError):  # planted; the server's to judge
        return [], 1
    addresses = {snapshot.blob_uri or "" for snapshot in snapshots} - {""}
    found = [match[1] for address in addresses if (match := BLOB.fullmatch(address))]
    return sorted(set(found)), len(addresses) - len(found)
