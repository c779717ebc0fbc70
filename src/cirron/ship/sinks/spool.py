"""The spool: one JSON file a batch, on disk. The truth that everything else is made from.

A file is written beside its final name and renamed, so a `*.json` is always whole. Small files are
merged as they age: the merged file is put in place first, naming the batches that it replaces, and
only then are those removed, so a reader finds every record, and can tell the copies. Past the cap
the oldest files go. What cannot be written now is held, within a bound, and tried again.

Runs on the background thread.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from cirron import guard, wire
from cirron.record import clock
from cirron.ship.sinks.base import Outcome, Sealed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cirron.ship.outbox import DiskOutbox

# 64 files of one second become one of a minute, 64 of those one of an hour: a day leaves some 150.
MERGE_FILES = 64
# Larger files are left alone: at the default cap that makes at most a thousand.
SMALL_BYTES = 2**20
MERGE_BYTES = 4 * 2**20
# Held while the disk refuses: a full disk or a lost mount should not become a full memory.
MAX_HELD_BYTES = 64 * 2**20
# Other processes write here too, so the folder is measured again every so many flushes.
MEASURE_EVERY = 30
STALE_TMP_S = 3600
# IOV_MAX, the most pieces that one call takes, is 1024 on Linux and on macOS.
MAX_PIECES = 1024


class Part(NamedTuple):
    """A file that this process wrote and may merge, and where its sections lie in it."""

    name: str
    batch_id: str
    created_ns: int
    size: int
    layout: wire.Layout


class Spool:
    """The folder `<root>/spool`."""

    def __init__(
        self,
        root: Path,
        *,
        max_bytes: int,
        header: Callable[[], wire.Header],
        outbox: DiskOutbox | None = None,
    ) -> None:
        self.folder = root / "spool"
        self.max_bytes = max_bytes
        self.bytes = 0
        self.dropped_files = 0
        self.dropped_bytes = 0
        self._header = header
        self._outbox = outbox
        self._held: deque[Sealed] = deque()
        self._held_bytes = 0
        self._levels: list[list[Part]] = [[], [], []]
        self._ticks = 0
        self._problem: str | None = None
        with guard.quiet("spool"):
            self._attempt(self._prepare)

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._measure()

    # -- the sink ---------------------------------------------------------------------------

    def emit(self, batch: Sealed) -> Outcome:
        self._held.append(batch)
        self._held_bytes += batch.size
        self._write_held()
        dropped = False
        while self._held_bytes > MAX_HELD_BYTES:
            self._count_drop(self._let_go().size)
            dropped = True
        if not self._held:
            return Outcome.DONE
        return Outcome.DROPPED if dropped else Outcome.HELD

    def tick(self) -> None:
        self._write_held()
        self._attempt(self._merge)
        self._ticks += 1
        if self._ticks % MEASURE_EVERY == 0:
            self._attempt(self._measure)
        self._attempt(self._enforce_cap)

    def close(self, deadline_ns: int) -> None:
        self._write_held()
        if self._held:
            records = sum(batch.records for batch in self._held)
            guard.warn("%d records are lost: %s stayed unwritable", records, self.folder)
        while self._held:
            self._count_drop(self._let_go().size)

    def after_fork(self) -> None:
        pass

    def health(self) -> dict[str, object]:
        return {
            "spool_dir": str(self.folder),
            "spool_bytes": self.bytes,
            "spool_drop_count": self.dropped_files,
            "spool_dropped_bytes": self.dropped_bytes,
            "spool_held_bytes": self._held_bytes,
            "spool_problem": self._problem,
        }

    # -- writing ----------------------------------------------------------------------------

    def _write_held(self) -> None:
        while self._held:
            batch = self._held[0]
            if not self._attempt(self._write_first):
                return
            self._problem = None
            self._let_go()
            self._remember(batch, level=0)
            if self.bytes > self.max_bytes:
                self._attempt(self._enforce_cap)

    def _let_go(self) -> Sealed:
        batch = self._held.popleft()
        self._held_bytes -= batch.size
        return batch

    def _write_first(self) -> None:
        batch = self._held[0]
        if self._outbox is not None:
            # First, so that a later run knows of the batch; this one sends it without, too.
            with contextlib.suppress(OSError):
                self._outbox.open()
        try:
            self._put(batch)
        except FileNotFoundError:  # somebody removed the folder
            self.folder.mkdir(parents=True, exist_ok=True)
            self._put(batch)

    def _put(self, batch: Sealed, *, durable: bool = False) -> None:
        final = self.folder / batch.file_name
        partial = self.folder / (batch.file_name + ".tmp")
        try:
            with open(partial, "wb", buffering=0) as file:
                write_all(file.fileno(), batch.pieces)
                if durable:
                    os.fsync(file.fileno())
            os.replace(partial, final)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        self.bytes += batch.size

    def _remember(self, batch: Sealed, level: int) -> None:
        if level < len(self._levels) and batch.size < SMALL_BYTES:
            created_ns = batch.header.created_ns
            self._levels[level].append(
                Part(batch.file_name, batch.batch_id, created_ns, batch.size, batch.layout)
            )

    # -- merging ----------------------------------------------------------------------------

    def _merge(self) -> None:
        for level, parts in enumerate(self._levels):
            group = self._ripe(parts)
            if group:
                del parts[: len(group)]
                self._merge_group(group, level)

    def _ripe(self, parts: list[Part]) -> list[Part]:
        """The oldest parts that are worth a merge now: enough of them, or enough bytes."""
        total = 0
        for count, part in enumerate(parts, start=1):
            if self._outbox is not None and self._outbox.is_pending(part.name):
                return []  # it is sent as it is, under the id that it has
            total += part.size
            if count == MERGE_FILES or (total >= MERGE_BYTES and count > 1):
                return parts[:count]
        return []

    def _merge_group(self, group: list[Part], level: int) -> None:
        found: list[Part] = []
        sections: list[wire.Sections] = []
        for part in group:
            try:
                payload = (self.folder / part.name).read_bytes()
            except FileNotFoundError:  # evicted, or the folder was removed
                continue
            found.append(part)
            sections.append(wire.split_batch(payload, part.layout))
        if len(found) < 2:
            return
        header = self._header()
        header.created_ns = found[0].created_ns
        header.merged = [part.batch_id for part in found]
        batch = Sealed(
            header,
            wire.Sections(
                [run for section in sections for run in section.spans],
                [run for section in sections for run in section.marks],
                [run for section in sections for run in section.snapshots],
            ),
            records=0,
        )
        self._put(batch, durable=True)
        for part in found:
            self._remove(part.name, part.size)
        self._remember(batch, level + 1)

    # -- the cap ----------------------------------------------------------------------------

    def _measure(self) -> None:
        total = 0
        with os.scandir(self.folder) as entries:
            for entry in entries:
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue
                if entry.name.endswith(".json"):
                    total += status.st_size
                elif (clock.wall() / 1e9) - status.st_mtime > STALE_TMP_S:
                    os.unlink(entry.path)  # a process died while writing it
        self.bytes = total

    def _enforce_cap(self) -> None:
        if self.bytes <= self.max_bytes:
            return
        self._measure()
        names = sorted(name for name in os.listdir(self.folder) if name.endswith(".json"))
        for name in names[:-1]:  # the newest stays, however large
            if self.bytes <= self.max_bytes:
                return
            try:
                size = (self.folder / name).stat().st_size
            except FileNotFoundError:
                continue
            self._remove(name, size)
            self._count_drop(size)

    def _remove(self, name: str, size: int) -> None:
        (self.folder / name).unlink(missing_ok=True)
        self.bytes -= size

    def _count_drop(self, size: int) -> None:
        self.dropped_files += 1
        self.dropped_bytes += size
        if self.dropped_files == 1 and self._problem is None:
            limit = self.max_bytes
            guard.warn(
                "%s is larger than spool_max_bytes=%d: its oldest files go", self.folder, limit
            )

    # -- what can go wrong with a disk ------------------------------------------------------

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Runs a disk action. A failure is said once, and kept for `health()`."""
        try:
            action()
        except OSError as error:
            if self._problem is None:
                guard.warn(
                    "cannot write to %s (%s); training goes on, records are held in memory (up to"
                    " %d MB) and tried again. Another folder: ci.profile(path=...)",
                    self.folder,
                    error.strerror or error,
                    MAX_HELD_BYTES // 2**20,
                )
            self._problem = error.strerror or str(error)
            return False
        return True


def write_all(file: int, pieces: list[bytes]) -> None:
    """Writes the pieces with as few calls as can be.

    Each call gives up the interpreter lock, and a busy program takes 5 ms to give it back.
    """
    left = [memoryview(piece) for piece in pieces]
    while left:
        written = os.writev(file, left[:MAX_PIECES])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]
