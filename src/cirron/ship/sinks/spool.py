"""The spool: one JSON file a batch, on disk. The truth that everything else is made from.

A file is written beside its final name and renamed, so a `*.json` is always whole. It has a thread
of its own: a disk that hangs, or a busy program that takes the interpreter lock at each call of the
system, does not stop the collecting. Batches that wait are held within a bound; past it the oldest
go, and are counted. Nothing here reads or lists the folder: that is the keeper's work.
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

# Held while the disk refuses or hangs, which should not become a full memory.
MAX_HELD_BYTES = 64 * 2**20
# What the sender may take at the end: a network that hangs should not hold up the exit for longer.
SEND_NS = 2_000_000_000


class Spool(Sink):
    """Writes batches to a folder, then hands each to the sender, if there is one.

    The sender gets a batch once it is on disk, or once the disk has refused it. `announce` is
    called before a batch is written: a process that dies at any moment leaves word of it.
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
        self.problem: str | None = None  # why the disk refuses, while it does
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
        self._finished = 0  # of them, written or lost
        self._lock = new_lock()
        self._rounds = 0  # times that the thread has tried to write all there was
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
        if is_first_loss and self.problem is None:  # else that was said
            guard.warn(
                "%s is written more slowly than records arrive: the oldest are dropped once %d MB"
                " wait. ci.health() counts them (records_lost)",
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
        """False: the disk has refused it, or hangs."""
        wanted, rounds = self._emitted, self._rounds + 2  # the present round may miss the last
        while self._finished < wanted and self._worker.is_alive and clock.now() < deadline_ns:
            if self.problem is not None and self._rounds >= rounds:
                break
            self._worker.wake()
            sleep(0.001)
        return self._finished >= wanted

    def close(self, deadline_ns: int) -> None:
        """What a disk refuses is lost then; what one that hangs has not taken stays held."""
        self._worker.stop()
        # A disk that hangs may write what it has after all: that stays held.
        if self._worker.wait_for_end(deadline_ns) and self._held:
            left = self.held_records
            with self._lock:
                while self._held:
                    self._give_up()
            guard.warn("%d records are lost: %s stayed unwritable", left, self.folder.path)
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
                self._keeper.tick()
            self._rounds += 1
            if not is_last:
                self._worker.rest(3600.0)

    def _write_held(self) -> None:
        """Writes what is held; where the disk refuses, it is tried again at the next wake."""
        try:
            if not self._is_made:
                self.folder.make()
                self._is_made = True
            while (batch := self._first()) is not None:
                with contextlib.suppress(OSError):  # at worst it is sent by this process alone
                    self._announce()
                self.folder.put(batch.file_name, batch.pieces)
                self._keeper.add(batch)
                self._hand_on(batch)
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
            with self._lock:
                held = list(self._held)
            for batch in held:
                self._hand_on(batch)

    def _hand_on(self, batch: Sealed) -> None:
        """Gives a batch to the sender, once: they come in order."""
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
