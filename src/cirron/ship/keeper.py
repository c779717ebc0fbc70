"""Maintains the folder: merges small files, and enforces the limits.

It has its own thread, because listing a large folder or a slow disk takes time. Small batch files
are merged as they age. The merged file names the batches that it replaces and is written before
they are removed, so a reader finds every record and recognises copies. Above the size limit, the
oldest batches are removed; above their own limit, the black boxes of dead processes. This happens
only in folders that cirron created (`files.Folder.is_ours`). Elsewhere, only files of this process
are removed.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cirron import files, guard, system, wire
from cirron.record import clock
from cirron.ship.sinks.base import Sealed
from cirron.ship.threads import Worker, sleep

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron.files import Entry, Folder

# 64 one-second files become one of a minute, 64 of those one of an hour: about 150 files a day.
MERGE_FILES = 64
# Larger files are not merged: at the default limit, there are at most a thousand of them.
SMALL_BYTES = 2**20
MERGE_BYTES = 4 * 2**20
# Other processes write here too, so the folder is measured again after this many flushes, and after
# this process has written 1/MEASURE_PART of the limit.
MEASURE_EVERY = 30
MEASURE_PART = 16
STALE_TMP_NS = 3600 * 10**9
# Black boxes that are kept. One of another host, whose process cannot be checked, counts as dead
# after this long without an update.
MAX_BOXES = 1_000
SILENT_NS = 600 * 10**9
BOXES_EVERY = 600
PAUSE_S = 0.001  # pause after this many black boxes, because reading them takes the GIL:
PAUSE_EVERY = 100
MAX_BOX_BYTES = 16 * 2**20  # a larger one is not read
LAST_NS = 500_000_000  # how long the end of a session waits for the thread


class Part(NamedTuple):
    """A file that this process wrote and may merge, and the positions of its sections."""

    name: str
    batch_id: str
    created_ns: int
    size: int
    layout: wire.Layout


class BoxHead(msgspec.Struct):
    """The part of a black box that tells whether its process is gone."""

    session: wire.Session
    pid: int
    process_start: str | None = None
    interval_s: float = 1.0
    ended: dict[str, object] | None = None


_box_heads = msgspec.json.Decoder(BoxHead)


class Keeper:
    """Maintains one spool and its black boxes. Files that are still pending are not merged."""

    def __init__(
        self,
        spool: Folder,
        boxes: Folder,
        *,
        max_bytes: int,
        host: str,
        header: Callable[[], wire.Header],
        is_own: Callable[[str], bool] = lambda name: False,
        is_pending: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self.evicted_files = 0
        self.evicted_bytes = 0
        self.problem: str | None = None
        self._spool = spool
        self._boxes = boxes
        self._max_bytes = max_bytes
        self._host = host
        self._header = header
        self._is_own = is_own
        self._is_pending = is_pending
        self._new: deque[Part] = deque()
        self._levels: list[list[Part]] = [[], [], []]
        # Each has one writer, the keeper's thread and the spool's, so that no count is lost. A file
        # that both have counted is counted once at the next measurement.
        self._measured_bytes = 0
        self._unmeasured_bytes = 0  # written since
        self._has_measured = False
        self._ticks = 0
        self._boxes_tick = 0  # when black boxes are next checked
        self._worker = Worker(self._run, "cirron-keeper")

    @property
    def bytes(self) -> int:
        """The size of the spool: as last measured, plus what was written since."""
        return self._measured_bytes + self._unmeasured_bytes

    # -- the spool's thread -----------------------------------------------------------------

    def start(self) -> None:
        self._worker.start()

    def add(self, batch: Sealed) -> None:
        self._unmeasured_bytes += batch.size
        if batch.size < SMALL_BYTES:
            self._new.append(part_of(batch))
        if self.bytes > self._max_bytes:
            self._worker.wake()

    def tick(self) -> None:
        """Wakes the thread at a flush."""
        self._ticks += 1
        self._worker.wake()

    def close(self, deadline_ns: int) -> None:
        """Maintains the folder once more, and ends the thread."""
        self._worker.stop()
        self._worker.wait_for_end(min(deadline_ns, clock.now() + LAST_NS))

    # -- the keeper's thread ----------------------------------------------------------------

    def _run(self) -> None:
        while not self._worker.is_stopping:
            self.keep()
            self._worker.rest(3600.0)
        self.keep(is_last=True)

    def keep(self, *, is_last: bool = False) -> None:
        actions = [self._merge, self._keep_cap]
        if is_last or self._ticks >= self._boxes_tick:
            self._boxes_tick = self._ticks + BOXES_EVERY
            actions.append(self._keep_boxes)
        problems = [self._attempt(action) for action in actions]
        self.problem = next((problem for problem in problems if problem is not None), None)

    def _attempt(self, action: Callable[[], None]) -> str | None:
        """Runs an action; returns why it failed, if it did."""
        with guard.contained("maintaining the folder"):
            try:
                action()
            except FileNotFoundError:  # the folder does not exist yet, or was removed
                pass
            except OSError as error:
                return error.strerror or str(error)
        return None

    # -- merging ----------------------------------------------------------------------------

    def _merge(self) -> None:
        while self._new:
            self._levels[0].append(self._new.popleft())
        for level, parts in enumerate(self._levels):
            group = self._ripe(parts)
            if group:
                del parts[: len(group)]
                self._merge_group(group, level)

    def _ripe(self, parts: list[Part]) -> list[Part]:
        """The oldest parts, if there are enough files or bytes for a merge."""
        total = 0
        for count, part in enumerate(parts, start=1):
            if self._is_pending(part.name):
                return []  # it has to be sent under its own id first
            total += part.size
            if count == MERGE_FILES or (total >= MERGE_BYTES and count > 1):
                return parts[:count]
        return []

    def _merge_group(self, group: list[Part], level: int) -> None:
        found: list[Part] = []
        sections: list[wire.Sections] = []
        for part in group:
            try:
                payload = self._spool.read(part.name)
            except OSError:  # evicted, or the folder was removed
                continue
            if len(payload) == part.size:
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
        self._spool.put(batch.file_name, batch.pieces, durable=True)
        self._measured_bytes += batch.size
        for part in found:
            self._spool.remove(part.name)
            self._measured_bytes -= part.size
        if level + 1 < len(self._levels) and batch.size < SMALL_BYTES:
            self._levels[level + 1].append(part_of(batch))

    # -- the cap ----------------------------------------------------------------------------

    def _keep_cap(self) -> None:
        is_due = self._ticks % MEASURE_EVERY == 0 or not self._has_measured
        if self._unmeasured_bytes * MEASURE_PART <= self._max_bytes and not is_due:
            return
        self._spool.find()  # again: it may have been replaced by a link
        if self._spool.is_ours:
            remove_stale(self._spool)
        self._has_measured = True
        self._unmeasured_bytes = 0  # before the files are listed: none is left out
        entries = sorted(self._spool.entries())
        self._measured_bytes = sum(entry.size for entry in entries)
        for entry in entries[:-1]:  # the newest is kept, however large
            if self._measured_bytes <= self._max_bytes:
                break
            if (self._spool.is_ours or self._is_own(entry.name)) and self._spool.remove(entry.name):
                self._measured_bytes -= entry.size
                self.evicted_bytes += entry.size
                self.evicted_files += 1
                if self.evicted_files == 1:
                    said = "%s is larger than spool_max_bytes=%d: its oldest files are deleted"
                    guard.warn(said, self._spool.path, self._max_bytes)
        if self._unmeasured_bytes and self.bytes > self._max_bytes:
            self._worker.wake()  # for what was written meanwhile, and compared with the old size

    # -- black boxes ------------------------------------------------------------------------

    def _keep_boxes(self) -> None:
        """Removes the oldest black boxes of processes that are gone, down to `MAX_BOXES`."""
        self._boxes.find()
        if not self._boxes.is_ours:
            return
        remove_stale(self._boxes)
        entries = sorted(self._boxes.entries(), key=lambda entry: entry.modified_ns)
        for number, entry in enumerate(entries[:-MAX_BOXES]):
            if number % PAUSE_EVERY == 0:
                sleep(PAUSE_S)
            if self._is_gone(entry):
                self._boxes.remove(entry.name)

    def _is_gone(self, entry: Entry) -> bool:
        age_ns = clock.wall() - entry.modified_ns
        try:
            box = _box_heads.decode(self._boxes.read(entry.name, MAX_BOX_BYTES))
        except (OSError, ValueError, RecursionError):  # not a black box, or not readable
            return age_ns > SILENT_NS
        if box.ended is not None:
            return True
        if box.session.host == self._host:
            return system.is_alive(box.pid, box.process_start) is False
        return age_ns > max(SILENT_NS, 10 * box.interval_s * 1e9)


def remove_stale(folder: Folder) -> None:
    """Removes temporary files of processes that died while writing."""
    for tmp in folder.entries(files.TMP):
        if clock.wall() - tmp.modified_ns > STALE_TMP_NS:
            folder.remove(tmp.name)


def part_of(batch: Sealed) -> Part:
    created_ns = batch.header.created_ns
    return Part(batch.file_name, batch.batch_id, created_ns, batch.size, batch.layout)
