"""The one background worker: drains the ring, seals batches, hands them to the sinks.

It wakes at every flush interval, and looks in more often so that a burst is taken up before the
ring is full. Work is cut into slices with a pause in between, because this thread holds the same
interpreter lock as training. Waking it and waiting for it use bare locks, which are safe in a
signal handler, where the interrupted code may hold any other lock.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from cirron import guard, wire
from cirron.record import clock
from cirron.ship.collect import SLICE
from cirron.ship.sinks.base import Blob, Outcome, Sealed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cirron.record.value import Deferred
    from cirron.ship.collect import Collector
    from cirron.ship.sinks.base import Sink

# How often the ring is looked at between flushes. At a million records a second, about the most
# that Python can produce, a tenth of the ring fills in this time. Each look takes the interpreter
# lock from training.
LOOK_S = 0.1

# Long enough for a waiting thread to wake and take the interpreter lock (about 50 us); `sleep(0)`
# is not: this thread would have it back before the other one is awake.
PAUSE_S = 0.0001

# A batch is sealed early at this size, which keeps files, requests and lines handy.
MAX_BATCH_BYTES = 2 * 2**20

# What the resolver may take at the end, when nobody waits for values any more.
STOP_S = 0.5

# What a sink may take at the end; a network that hangs should not hold up the exit for longer.
CLOSE_NS = 2_000_000_000


class Flusher:
    """Owns the thread. `header` makes the head of a batch; `each_tick` is the black box's turn."""

    def __init__(
        self,
        collector: Collector,
        sinks: Sequence[Sink],
        *,
        interval_s: float,
        header: Callable[[], wire.Header],
        each_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.latency_ns: int | None = None  # of the last flush, from waking to stored
        self.cpu_ns = 0  # spent by this thread so far
        self.records = 0  # handed to the sinks so far
        self.held = 0  # batches that a sink could not store yet, at the last flush
        self._collector = collector
        self._sinks = sinks
        self._interval_s = interval_s
        self._header = header
        self._each_tick = each_tick
        self._before_closing: Callable[[], None] = lambda: None
        self._wake = _thread.allocate_lock()
        self._wake.acquire()
        self._waiters: deque[_thread.LockType] = deque()
        self._stopping = False
        self._has_ended = False
        self._deadline_ns = 0
        self._stopped = _thread.allocate_lock()
        self._stopped.acquire()
        self._thread = threading.Thread(target=self._run, name="cirron-flush", daemon=True)
        self._resolver = Resolver()
        collector.on_deferred = self._resolver.ask

    # -- called from other threads ----------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def flush(self, timeout_s: float) -> bool:
        """Waits until all that was recorded before the call is stored. False: not in time."""
        if threading.get_ident() == self._thread.ident:
            return False  # a signal or a hook inside the worker itself
        done = _thread.allocate_lock()
        done.acquire()
        self._waiters.append(done)
        self._nudge()
        if self._stopping:  # it may have released its last waiter
            return self._wait_for_end(timeout_s)
        return done.acquire(timeout=timeout_s)

    def stop(
        self,
        deadline_ns: int,
        before_closing: Callable[[], None] = lambda: None,
        last_tick: Callable[[], None] = lambda: None,
    ) -> bool:
        """One last flush, then the sinks close and the thread ends. False: not by the deadline.

        On the worker's thread, `before_closing` is called while spans are still open, `last_tick`
        when all else is done.
        """
        self._deadline_ns = deadline_ns
        self._before_closing = before_closing
        self._each_tick = last_tick
        self._stopping = True
        self._nudge()
        return self._wait_for_end(max(0.0, (deadline_ns - clock.now()) / 1e9))

    def _wait_for_end(self, timeout_s: float) -> bool:
        """Waits in short turns and trusts the flag, not the lock: a signal may come just when this
        thread has the lock, and its handler waits here too.
        """
        deadline_ns = clock.now() + int(timeout_s * 1e9)
        while not self._has_ended:
            left_s = (deadline_ns - clock.now()) / 1e9
            if left_s <= 0:
                return False
            if self._stopped.acquire(timeout=min(left_s, LOOK_S)):
                self._stopped.release()  # for whoever else waits
        return True

    def _nudge(self) -> None:
        try:
            self._wake.release()
        except RuntimeError:  # it is awake already
            pass

    # -- the worker's own thread ------------------------------------------------------------

    def _run(self) -> None:
        try:
            with guard.quiet("black box"):
                self._each_tick()  # a process that dies within the first interval has one too
            next_tick_ns = clock.now() + int(self._interval_s * 1e9)
            while not self._stopping:
                until_tick_s = (next_tick_ns - clock.now()) / 1e9
                self._wake.acquire(timeout=max(0.0, min(until_tick_s, LOOK_S)))
                waiters = self._take_waiters()
                if waiters or clock.now() >= next_tick_ns:
                    next_tick_ns = clock.now() + int(self._interval_s * 1e9)
                    with guard.quiet("flush"):
                        self._flush(wait_for_values=bool(waiters))
                else:
                    with guard.quiet("drain"):
                        self._drain()
                for done in waiters:
                    done.release()
            with guard.quiet("last flush"):
                self._flush(wait_for_values=True, last=True)
        finally:
            self._resolver.stop()
            self._has_ended = True
            self._stopped.release()
            for done in self._take_waiters():
                done.release()

    def _take_waiters(self) -> list[_thread.LockType]:
        waiters = []
        while self._waiters:
            waiters.append(self._waiters.popleft())
        return waiters

    def _flush(self, *, wait_for_values: bool, last: bool = False) -> None:
        began = clock.now()
        self._drain()
        if wait_for_values and self._resolver.settle(self._collector.waiting_values()):
            self._collector.let_go()
        if last:
            with guard.quiet("black box"):
                self._before_closing()
            self._collector.finish()
        self._seal()
        for sink in self._sinks:
            with guard.quiet("sink"):
                if last:
                    sink.close(min(self._deadline_ns, clock.now() + CLOSE_NS))
                else:
                    sink.tick()
        self.latency_ns = clock.now() - began
        self.cpu_ns = time.thread_time_ns()
        with guard.quiet("black box"):
            self._each_tick()

    def _drain(self) -> None:
        """Takes what is there now, slice by slice; a batch that grows large is sealed early."""
        collector = self._collector
        left = collector.step()
        slices = left // SLICE + 1  # what is there now: others may record faster than we drain
        while left and slices:
            if not self._stopping:  # else there is little time, and busy threads take 20 ms a pause
                time.sleep(PAUSE_S)
            left = collector.step()
            slices -= 1
            if collector.pending_bytes > MAX_BATCH_BYTES:
                self._seal()

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
        outcomes = []
        for sink in self._sinks:
            with guard.quiet("sink"):
                outcomes.append(sink.emit(batch))
        self.records += batch.records
        self.held = outcomes.count(Outcome.HELD)


class Resolver:
    """Waits for the values that devices still compute, on a thread that starts when there are any.

    Not the flusher's thread: a device that hangs would stop the black box just when it is needed.
    """

    def __init__(self) -> None:
        self._asked: deque[Deferred | None] = deque()  # None: there will be no more
        self._wake = threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def ask(self, value: Deferred) -> None:
        """Gets the value soon, in the order in which values are asked for."""
        self._put(value)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="cirron-values", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Has the thread end once it has tried all that it was asked for.

        It is waited for, unless a device keeps it: at the end of the process it must not be inside
        of a driver.
        """
        self._put(None)
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _put(self, value: Deferred | None) -> None:
        self._asked.append(value)
        self._wake.release()

    def settle(self, values: list[Deferred], timeout_s: float = 2.0) -> bool:
        """Waits, not for ever, until the values are there; False: there were none to wait for."""
        deadline = clock.now() + int(timeout_s * 1e9)
        for value in values:
            while not value.is_ready and clock.now() < deadline:
                time.sleep(0.001)
        return bool(values)

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            value = self._asked.popleft()
            if value is None:
                return
            value.resolve()
