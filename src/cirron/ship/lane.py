"""A lane: a thread and a bounded queue for a sink that may block.

The reader of a pipe may stop reading, a logging handler may wait for a lock, a user's sink may do
anything. None of them may delay the spool, the black box, a fork or the exit. When the queue is
full, the oldest batches are dropped and counted. A user's sink gets calls of `emit`, and of `close`
at the end if it has that method, both on the lane's thread.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from cirron import guard
from cirron.record import clock
from cirron.record.attrs import describe_error
from cirron.record.value import MAX_TEXT_BYTES
from cirron.ship.sinks.base import Outcome, Sink
from cirron.ship.threads import Worker, new_lock, sleep

if TYPE_CHECKING:
    from cirron.ship.sinks.base import Emitter, Sealed

MAX_BYTES = 16 * 2**20

# Neither a flush nor the exit waits for a sink that has finished nothing for this long.
STALL_NS = 300_000_000


class Lane(Sink):
    def __init__(self, sink: Emitter, name: str, max_bytes: int = MAX_BYTES) -> None:
        self.name = name
        self.dropped = 0  # batches dropped from the queue, refused by the sink, or left at the end
        self.sent_records = 0
        self._sink = sink
        self._max_bytes = max_bytes
        self._queue: deque[Sealed] = deque()
        self._queued_bytes = 0
        self._is_busy = False
        self._finished = 0  # batches that were sent or dropped by the sink
        self._stalled_at = -1  # `_finished` when the sink was last found stalled
        self._deadline_ns = 0
        self._lock = new_lock()
        self._worker = Worker(self._run, f"cirron-{name}")

    # -- the flusher's thread ---------------------------------------------------------------

    def start(self) -> None:
        self._worker.start()

    def emit(self, batch: Sealed) -> Outcome:
        with self._lock:
            self._queue.append(batch)
            self._queued_bytes += batch.size
            while self._queued_bytes > self._max_bytes and len(self._queue) > 1:
                self._queued_bytes -= self._queue.popleft().size
                self._count_drop("does not keep up")
        self._worker.start()
        self._worker.wake()
        return Outcome.HELD

    def settle(self, deadline_ns: int) -> bool:
        finished, since_ns = self._finished, clock.now()
        while (self._queue or self._is_busy) and self._finished != self._stalled_at:
            now = clock.now()
            if self._finished != finished:
                finished, since_ns = self._finished, now
            elif now - since_ns > STALL_NS:
                self._stalled_at = finished  # not waited for again until it makes progress
            if now > deadline_ns:
                break
            sleep(0.001)
        return not self._queue and not self._is_busy

    def close(self, deadline_ns: int) -> None:
        self.settle(deadline_ns)
        self._deadline_ns = deadline_ns
        self._worker.stop()
        left = len(self._queue) + self._is_busy
        if left:
            self.dropped += left
            guard.warn("%d batches did not get through to %r before the end", left, self.name)
            if isinstance(self._sink, Sink):
                self._sink.close(deadline_ns)  # ends its wait
        else:
            self._worker.wait_for_end(min(deadline_ns, clock.now() + STALL_NS))

    def health(self) -> dict[str, object]:
        found = self._sink.health() if isinstance(self._sink, Sink) else {}
        if self.dropped:
            found[f"{self.name}_dropped"] = self.dropped
        if self._queue:
            found[f"{self.name}_pending"] = len(self._queue)
        return found

    # -- the lane's own thread --------------------------------------------------------------

    def _run(self) -> None:
        while not self._worker.is_stopping:
            with self._lock:
                self._is_busy = bool(self._queue)
                batch = self._queue.popleft() if self._queue else None
                self._queued_bytes -= 0 if batch is None else batch.size
            if batch is None:
                self._worker.rest(3600.0)
                continue
            try:
                outcome = self._sink.emit(batch)
                why = "did not take a batch"
            except BaseException as error:  # noqa: BLE001  protects this thread from a user's sink
                outcome = Outcome.DROPPED
                why = raised(error)
            if outcome is Outcome.DROPPED:
                self._count_drop(why)
            else:
                self.sent_records += batch.records
            self._finished += 1
        close = getattr(self._sink, "close", None)
        if close is not None and not self._queue:
            try:
                close(self._deadline_ns)
            except BaseException as error:  # noqa: BLE001  a user's sink must not look like our error
                guard.warn("the sink %r %s in close()", self.name, raised(error))

    def _count_drop(self, why: str) -> None:
        self.dropped += 1
        if self.dropped == 1:
            guard.warn("the sink %r %s; such batches are counted in ci.health()", self.name, why)


def raised(error: BaseException) -> str:
    """`raised ValueError: text`, for a warning."""
    return f"raised {describe_error(type(error), error, MAX_TEXT_BYTES)}"
