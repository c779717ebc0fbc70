"""The one background worker of a session: drains the ring, seals batches, hands them to the sinks.

It flushes once per flush interval and polls the ring in between, so that a burst does not fill the
ring. It works in slices with pauses, because it competes with training for the GIL. When it falls
behind, it takes longer slices and no pauses. A batch is sealed when the interval is over, not when
the ring is empty.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from cirron import guard, wire
from cirron.record import clock
from cirron.ship.collect import SLICE
from cirron.ship.device_values import Resolver
from cirron.ship.sinks.base import Blob, Sealed
from cirron.ship.threads import Worker, new_lock, sleep, turns

if TYPE_CHECKING:
    import _thread
    from collections.abc import Callable, Sequence

    from cirron.ship.collect import Collector
    from cirron.ship.sinks.base import Sink

# How often the ring is polled between flushes. At a million records a second, about the most that
# Python can produce, a tenth of the ring fills in this time. Each poll takes the GIL from training.
LOOK_S = 0.1

# Long enough for a waiting thread to wake up and take the GIL (about 50 us). `sleep(0)` is not:
# this thread would take it back before the other one is awake.
PAUSE_S = 0.0001

# With more records than this in the ring, the worker is behind and does not pause.
BEHIND = 10 * SLICE
# If the worker waited for the GIL longer than two threads may hold it, it is crowded out. Slices
# then grow with the backlog, because busy threads cannot interrupt the few C calls that process a
# slice. They are limited, because the garbage collector visits all live records of a slice. With a
# large backlog, the worker also shortens the turns of all threads.
CROWDED_TURNS = 2
CROWDED_NS = 1_000_000_000  # how long it counts as crowded afterwards
BEHIND_IF_CROWDED = 2 * SLICE
MAX_SLICE = 5 * SLICE
HURRY_NS = 800_000_000
# A worker that is behind seals batches this many times larger: writing a file takes four system
# calls, each of which gives the GIL to every busy thread.
BEHIND_BATCH = 2

# A batch is sealed early at this size, to keep files, requests and lines small.
MAX_BATCH_BYTES = 2 * 2**20

# How long a flush waits for values from a device; the last flush, at most half of the time left.
VALUES_S = 2.0

# How long closing a sink may take: a hanging network must not delay the exit for longer.
CLOSE_NS = 2_000_000_000


class Flusher:
    """Owns the thread. `header` creates the header of a batch."""

    def __init__(
        self,
        collector: Collector,
        sinks: Sequence[Sink],
        *,
        interval_s: float,
        header: Callable[[], wire.Header],
        each_tick: Callable[[], None] = lambda: None,
        max_batch_bytes: int = MAX_BATCH_BYTES,
    ) -> None:
        self.latency_ns: int | None = None  # duration of the last flush
        self.cpu_ns = 0  # spent by this thread so far
        self.records = 0  # handed to the sinks so far
        self._collector = collector
        self._sinks = sinks
        self._interval_s = interval_s
        self._header = header
        self._each_tick = each_tick
        self._max_batch_bytes = max_batch_bytes
        self._before_closing: Callable[[], None] = lambda: None
        self._tick_ns = 0  # when the next flush is due
        self._crowded_ns = -CROWDED_NS  # when it was last crowded out
        self._is_crowded = False  # by other threads
        self._waiters: deque[_thread.LockType] = deque()
        self._deadline_ns = 0
        self._worker = Worker(self._run, "cirron-flush")
        self._resolver = Resolver()
        collector.on_deferred = self._resolver.ask

    # -- called from other threads ----------------------------------------------------------

    def start(self) -> None:
        self._worker.start()

    @property
    def is_alive(self) -> bool:
        return self._worker.is_alive

    @property
    def problem(self) -> str | None:
        """Why the thread could not be started."""
        return self._worker.problem

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything recorded before the call has reached the sinks. False: timeout."""
        if threading.get_ident() == self._worker.ident:
            return False  # called by a signal handler or a hook in the worker itself
        done = new_lock()
        done.acquire()
        self._waiters.append(done)
        self._worker.start()  # if it could not be started before
        self._worker.wake()
        if self._worker.is_stopping:  # it may already have released its last waiter
            return self._worker.wait_for_end(clock.now() + int(timeout_s * 1e9))
        return self._worker.is_alive and done.acquire(timeout=max(0.0, timeout_s))

    def stop(self, deadline_ns: int, before_closing: Callable[[], None] = lambda: None) -> bool:
        """Flushes, closes the sinks and ends the thread. False: not by the deadline.

        The worker calls `before_closing` while spans are still open.
        """
        self._deadline_ns = deadline_ns
        self._before_closing = before_closing
        self._worker.stop()
        return self._worker.start() and self._worker.wait_for_end(deadline_ns)

    # -- the worker's own thread ------------------------------------------------------------

    def _run(self) -> None:
        try:
            with guard.contained("starting the sinks"):
                for sink in self._sinks:
                    sink.start()  # if it could not be started before
                    sink.tick()
            self._set_tick()
            while not self._worker.is_stopping:
                if not self._is_behind(self._collector.pending):
                    self._rest()
                waiters = self._take_waiters()
                with guard.contained("flush"):
                    self._drain()
                    if waiters or clock.now() >= self._tick_ns:
                        self._flush(wait_for_values=bool(waiters))
                for done in waiters:
                    done.release()
            with guard.contained("last flush"):
                self._drain()
                self._flush(wait_for_values=True, last=True)
        finally:
            turns.restore()
            now = clock.now()
            self._resolver.stop(now + (self._deadline_ns - now) // 2)
            for done in self._take_waiters():
                done.release()

    def _rest(self) -> None:
        began = clock.now()
        look_s = LOOK_S / 2 if self._is_crowded else LOOK_S
        rest_s = max(0.0, min((self._tick_ns - began) / 1e9, look_s))
        self._worker.rest(rest_s)
        self._note_wait(clock.now() - began - int(rest_s * 1e9))
        if not self._is_crowded:
            turns.restore()
        elif self._collector.pending > BEHIND_IF_CROWDED:
            turns.shorten()

    def _note_wait(self, waited_ns: int) -> None:
        """Updates whether the worker is crowded out, given how long it just waited for the GIL."""
        now = clock.now()
        if waited_ns / 1e9 > CROWDED_TURNS * sys.getswitchinterval():
            self._crowded_ns = now
        self._is_crowded = now - self._crowded_ns < CROWDED_NS

    def _take_waiters(self) -> list[_thread.LockType]:
        waiters = []
        while self._waiters:
            waiters.append(self._waiters.popleft())
        return waiters

    def _set_tick(self) -> None:
        self._tick_ns = clock.now() + int(self._interval_s * 1e9)

    def _flush(self, *, wait_for_values: bool, last: bool = False) -> None:
        began = clock.now()
        self._set_tick()
        if wait_for_values:
            values = self._collector.waiting_values()
            left_s = (self._deadline_ns - clock.now()) / 2e9 if last else VALUES_S
            if self._resolver.settle(values, min(left_s, VALUES_S)):
                self._collector.let_go()
        if last:
            with guard.contained("black box"):
                self._before_closing()
            self._collector.close_open()
            self._drain()
            self._collector.give_up()
        self._seal()
        for sink in self._sinks:
            with guard.contained("sink"):
                if last:
                    soon_ns = min(self._deadline_ns, clock.now() + CLOSE_NS)
                    sink.close(self._deadline_ns if sink.is_patient else soon_ns)
                else:
                    sink.tick()
        self.latency_ns = clock.now() - began
        self.cpu_ns = time.thread_time_ns()
        with guard.contained("tick"):
            self._each_tick()

    def _drain(self) -> None:
        """Collects what is in the ring now, in slices; seals a batch early if it grows large."""
        collector = self._collector
        collector.note_open()
        left = collector.pending
        target = collector.seen + left  # no more than that: threads may record faster
        limit = self._max_batch_bytes
        while True:
            is_behind = self._is_behind(left)
            is_long = is_behind and self._is_crowded
            began, began_cpu = clock.now(), time.thread_time_ns()
            left = collector.step(min(left, MAX_SLICE) if is_long else SLICE)
            self._note_wait(clock.now() - began - time.thread_time_ns() + began_cpu)
            is_done = not left or collector.seen >= target
            is_due = not is_done and clock.now() >= self._tick_ns  # else a flush follows
            is_full = collector.pending_bytes > limit * (BEHIND_BATCH if is_behind else 1)
            if is_due or is_full:
                self._seal()
            if is_due:
                self._set_tick()
            if is_done:
                return
            if not is_behind and not self._worker.is_stopping:
                sleep(PAUSE_S)

    def _is_behind(self, waiting: int) -> bool:
        limit = BEHIND_IF_CROWDED if self._is_crowded else BEHIND
        return waiting > limit and self._tick_ns - clock.now() < HURRY_NS

    def _seal(self) -> None:
        chunks = self._collector.take_chunks()
        if not chunks:
            return
        batch = Sealed(
            self._header(),
            wire.Sections(
                [chunk.spans for chunk in chunks],
                [chunk.marks for chunk in chunks],
                [chunk.snapshots for chunk in chunks],
            ),
            records=sum(chunk.records for chunk in chunks),
            lines=[line for chunk in chunks for line in chunk.lines],
            blobs=[Blob(*file) for chunk in chunks for file in chunk.files],
        )
        self.records += batch.records
        for sink in self._sinks:
            with guard.contained("sink"):
                sink.emit(batch)
