"""Waits for values from devices, on a separate thread that is started on first use.

The flusher's thread must not wait: a hanging device would stop the recording just when it matters.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from cirron.record import clock
from cirron.ship.threads import Worker, sleep

if TYPE_CHECKING:
    from cirron.record.value import Deferred

# How long the end of the session waits for the resolver.
STOP_NS = 500_000_000

# Above the collector's own limit (`MAX_WAITING`), so it has given up on what is dropped here.
MAX_ASKED = 100_000


class Resolver:
    """Reads values in the order in which they were requested."""

    def __init__(self) -> None:
        self._asked: deque[Deferred] = deque(maxlen=MAX_ASKED)
        self._worker: Worker | None = None

    def ask(self, values: list[Deferred]) -> None:
        self._asked.extend(values)
        if self._worker is None:
            self._worker = Worker(self._run, "cirron-values")
            self._worker.start()
        self._worker.wake()

    def settle(self, values: list[Deferred], timeout_s: float) -> bool:
        """Waits for the values, within a time limit. False: there were none to wait for."""
        deadline = clock.now() + int(timeout_s * 1e9)
        for value in values:
            while not value.is_ready and clock.now() < deadline:
                sleep(0.001)
        return bool(values)

    def stop(self, deadline_ns: int) -> None:
        """Ends the thread after it has tried everything that was requested.

        Waits for it, unless a device blocks it: it should not be inside a driver when the process
        exits.
        """
        if self._worker is not None:
            self._worker.stop()
            self._worker.wait_for_end(min(deadline_ns, clock.now() + STOP_NS))

    def _run(self) -> None:
        worker = self._worker
        assert worker is not None
        while True:
            while self._asked:
                value = self._asked.popleft()
                if value.is_ready:  # the collector has given up on it
                    continue
                together = [value]
                while self._asked and value.is_batched and self._asked[0].is_batched:
                    together.append(self._asked.popleft())
                *others, last = together
                last.resolve(others)
            if worker.is_stopping:
                return
            worker.rest(3600.0)
