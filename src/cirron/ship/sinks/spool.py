"""The spool: one JSON file per batch, on disk. The source of truth for everything else.

A file is written under a temporary name and renamed, so a `*.json` file is always complete. The
spool has its own thread, so that a hanging disk, or busy threads that take the GIL at each system
call, do not stop the collector. Batches wait for the disk in memory, up to a limit; above it, the
oldest are dropped and counted. Only the keeper reads or lists the folder.
"""

from __future__ import annotations

import contextlib
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

# Limit of the batches in memory while the disk fails or hangs.
MAX_HELD_BYTES = 64 * 2**20
# How long closing the sender may take: a hanging network must not delay the exit for longer.
SEND_NS = 2_000_000_000


class Spool(Sink):
    """Writes batches to a folder, then passes each to the sender, if there is one.

    The sender gets a batch after the write has succeeded or failed. `announce` is called before
    each write, so that a later process knows of the batch even if this one dies at once.
    """

    is_patient = True

    def __init__(
        self,
        folder: Folder,
        keeper: Keeper,
        sender: Sink | None = None,
        announce: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self.written_records = 0
        self.held_records = 0
        self.lost_records = 0
        self.problem: str | None = None  # why the last write failed
        self._lost_batches = 0
        self._lost_bytes = 0
        self._keeper = keeper
        self._sender = sender
        self._announce = announce
        self._handed_on = ""  # the newest name that the sender got
        self._is_made = False
        self._held: deque[Sealed] = deque()
        self._held_bytes = 0
        self._emitted = 0  # batches
        self._finished = 0  # batches that were written or lost
        self._lock = new_lock()
        self._rounds = 0  # how often the thread has tried to write everything
        self._worker = Worker(self._run, "cirron-spool")

    # -- the flusher's thread ---------------------------------------------------------------

    def start(self) -> None:
        self._worker.start()
        self._keeper.start()
        if self._sender is not None:
            self._sender.start()

    def emit(self, batch: Sealed) -> Outcome:
        with self._lock:
            self._emitted += 1
            self._held.append(batch)
            self._held_bytes += batch.size
            self.held_records += batch.records
            is_first_loss = not self._lost_batches
            while self._held_bytes > MAX_HELD_BYTES and len(self._held) > 1:
                self._give_up()
            is_first_loss = is_first_loss and self._lost_batches > 0
        if is_first_loss and self.problem is None:  # else there was a warning already
            guard.warn(
                "%s is written more slowly than records arrive: above %d MB in memory, the oldest"
                " are dropped. ci.health() counts them (records_lost)",
                self.folder.path,
                MAX_HELD_BYTES // 2**20,
            )
        self._worker.wake()
        return Outcome.HELD

    def tick(self) -> None:
        self._worker.wake()
        if self._sender is not None:
            self._sender.tick()

    def settle(self, deadline_ns: int) -> bool:
        """Waits until all batches are written. False: the disk fails or hangs."""
        wanted, rounds = self._emitted, self._rounds + 2  # the current round may miss the last one
        while self._finished < wanted and self._worker.is_alive and clock.now() < deadline_ns:
            if self.problem is not None and self._rounds >= rounds:
                break
            self._worker.wake()
            sleep(0.001)
        return self._finished >= wanted

    def close(self, deadline_ns: int) -> None:
        """Writes what is left. If the disk fails, it is lost; if the disk hangs, it stays held."""
        self._worker.stop()
        # A hanging disk may still write it.
        if self._worker.wait_for_end(deadline_ns) and self._held:
            left = self.held_records
            with self._lock:
                while self._held:
                    self._give_up()
            what = "1 record is" if left == 1 else f"{left} records are"
            guard.warn("%s lost: %s is still not writable", what, self.folder.path)
        self._keeper.close(deadline_ns)
        if self._sender is not None:
            self._sender.close(min(deadline_ns, clock.now() + SEND_NS))

    def after_fork(self) -> None:
        if self._sender is not None:
            self._sender.after_fork()

    @property
    def held_since_ns(self) -> int | None:
        """When the oldest batch that is not on disk was sealed."""
        try:
            return self._held[0].header.created_ns
        except IndexError:
            return None

    def health(self) -> dict[str, object]:
        keeper = self._keeper
        return {
            "spool_dir": str(self.folder.path),
            "spool_bytes": keeper.bytes,
            "spool_drop_count": keeper.evicted_files + self._lost_batches,
            "spool_dropped_bytes": keeper.evicted_bytes + self._lost_bytes,
            "spool_held_bytes": self._held_bytes,
            "spool_problem": self.problem or keeper.problem,
            **(self._sender.health() if self._sender is not None else {}),
        }

    # -- its own thread ---------------------------------------------------------------------

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._worker.is_stopping
            with guard.contained("spool"):
                self._write_held()
                if is_last and self._held:  # a network file system may fail once
                    self._write_held()
                self._keeper.tick()
            self._rounds += 1
            if not is_last:
                self._worker.rest(3600.0)

    def _write_held(self) -> None:
        """Writes all batches; after an error, the rest is tried again at the next wake-up."""
        try:
            if not self._is_made:
                self.folder.make()
                self._is_made = True
            while (batch := self._first()) is not None:
                with contextlib.suppress(OSError):  # at worst, no later process will send it
                    self._announce()
                self.folder.put(batch.file_name, batch.pieces)
                self._keeper.add(batch)
                self._hand_on(batch)
                with self._lock:
                    if self._held and self._held[0] is batch:
                        self._release()
                    else:  # it was counted as lost in the meantime
                        self._count_lost(batch, -1)
                    self.written_records += batch.records
            self.problem = None
        except OSError as error:
            if self.problem is None:
                guard.warn(
                    "cannot write to %s (%s); training goes on, records are kept in memory (up to"
                    " %d MB) and written later. Another folder: ci.profile(path=...) or"
                    " CIRRON_OUTPUT_DIR",
                    self.folder.path,
                    error.strerror or error,
                    MAX_HELD_BYTES // 2**20,
                )
            self.problem = error.strerror or str(error)
            with self._lock:
                held = list(self._held)
            for batch in held:
                self._hand_on(batch)

    def _hand_on(self, batch: Sealed) -> None:
        """Passes a batch to the sender, once; batches come in order."""
        if self._sender is not None and batch.file_name > self._handed_on:
            self._handed_on = batch.file_name
            self._sender.emit(batch)

    def _first(self) -> Sealed | None:
        with self._lock:
            return self._held[0] if self._held else None

    def _release(self) -> Sealed:
        batch = self._held.popleft()
        self._finished += 1
        self._held_bytes -= batch.size
        self.held_records -= batch.records
        return batch

    def _give_up(self) -> None:
        self._count_lost(self._release(), 1)

    def _count_lost(self, batch: Sealed, times: int) -> None:
        self.lost_records += times * batch.records
        self._lost_batches += times
        self._lost_bytes += times * batch.size
