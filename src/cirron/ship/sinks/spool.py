"""The spool: one JSON file a batch, on disk. The truth that everything else is made from.

A file is written beside its final name and renamed, so a `*.json` is always whole. It has a thread
of its own: a disk that hangs, or a busy program that takes the interpreter lock at each call of the
system, does not stop the collecting. Batches that wait are held within a bound; past it the oldest
go, and are counted. Nothing here reads or lists the folder: that is the keeper's work.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from cirron import guard
from cirron.record import clock
from cirron.ship.sinks.base import Outcome, Sink
from cirron.ship.threads import Worker, new_lock, sleep

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron.files import Folder
    from cirron.ship.keeper import Keeper
    from cirron.ship.sinks.base import Sealed

# Held while the disk refuses or hangs, which should not become a full memory.
MAX_HELD_BYTES = 64 * 2**20


class Spool(Sink):
    """Writes batches to a folder. `prepare` is called before the first, and may raise OSError."""

    is_patient = True

    def __init__(
        self, folder: Folder, keeper: Keeper, prepare: Callable[[], None] = lambda: None
    ) -> None:
        self.folder = folder
        self.written_records = 0
        self.held_records = 0
        self.lost_records = 0
        self.problem: str | None = None  # why the disk refuses, while it does
        self._lost_batches = 0
        self._lost_bytes = 0
        self._keeper = keeper
        self._prepare = prepare
        self._is_prepared = False
        self._held: deque[Sealed] = deque()
        self._held_bytes = 0
        self._lock = new_lock()
        self._rounds = 0  # times that the thread has tried to write all there was
        self._worker = Worker(self._run, "cirron-spool")
        self._has_started = False

    # -- the flusher's thread ---------------------------------------------------------------

    def emit(self, batch: Sealed) -> Outcome:
        with self._lock:
            self._held.append(batch)
            self._held_bytes += batch.size
            self.held_records += batch.records
            while self._held_bytes > MAX_HELD_BYTES and len(self._held) > 1:
                self._give_up()
        self.tick()
        return Outcome.HELD

    def tick(self) -> None:
        if not self._has_started:
            self._has_started = self._worker.start()
        self._worker.wake()

    def settle(self, deadline_ns: int) -> None:
        """Waits until all is written, or until the disk has refused it."""
        wanted = self._rounds + 2  # the present round may be over before it sees the last batch
        while self._held and self._worker.is_alive and clock.now() < deadline_ns:
            if self.problem is not None and self._rounds >= wanted:
                return
            self._worker.wake()  # for each round
            sleep(0.001)

    def close(self, deadline_ns: int) -> None:
        """What a disk refuses is lost then; what one that hangs has not taken stays held."""
        self._worker.stop()
        if self._has_started and self._worker.wait_for_end(deadline_ns) and self._held:
            path, left = self.folder.path, self.held_records
            guard.warn("%d records are lost: %s stayed unwritable", left, path)
            with self._lock:
                while self._held:
                    self._give_up()
        self._keeper.close(deadline_ns)

    def health(self) -> dict[str, object]:
        keeper = self._keeper
        return {
            "spool_dir": str(self.folder.path),
            "spool_bytes": keeper.bytes,
            "spool_drop_count": keeper.evicted_files + self._lost_batches,
            "spool_dropped_bytes": keeper.evicted_bytes + self._lost_bytes,
            "spool_held_bytes": self._held_bytes,
            "spool_problem": self.problem or keeper.problem,
        }

    # -- its own thread ---------------------------------------------------------------------

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._worker.is_stopping
            with guard.contained("spool"):
                self.write_held()
                self._keeper.tick()
            self._rounds += 1
            if not is_last:
                self._worker.rest(3600.0)

    def write_held(self) -> None:
        """Writes what is held; where the disk refuses, it is tried again at the next wake."""
        try:
            if not self._is_prepared:
                self.folder.make()
                self._prepare()
                self._is_prepared = True
            while (batch := self._first()) is not None:
                self.folder.put(batch.file_name, batch.pieces)
                self._keeper.add(batch)
                with self._lock:
                    if self._held and self._held[0] is batch:
                        self._release()
                    else:  # it was given up meanwhile, too early
                        self._count_lost(batch, -1)
                    self.written_records += batch.records
            self.problem = None
        except OSError as error:
            if self.problem is None:
                guard.warn(
                    "cannot write to %s (%s); training goes on, records are held in memory (up to"
                    " %d MB) and tried again. Another folder: ci.profile(path=...)",
                    self.folder.path,
                    error.strerror or error,
                    MAX_HELD_BYTES // 2**20,
                )
            self.problem = error.strerror or str(error)

    def _first(self) -> Sealed | None:
        with self._lock:
            return self._held[0] if self._held else None

    def _release(self) -> Sealed:
        batch = self._held.popleft()
        self._held_bytes -= batch.size
        self.held_records -= batch.records
        return batch

    def _give_up(self) -> None:
        self._count_lost(self._release(), 1)

    def _count_lost(self, batch: Sealed, times: int) -> None:
        self.lost_records += times * batch.records
        self._lost_batches += times
        self._lost_bytes += times * batch.size
