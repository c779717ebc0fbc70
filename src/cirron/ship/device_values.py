"""Waits for the values that devices still compute, on a thread that starts when there are any.

Not the flusher's thread: a device that hangs would stop the recording just when it is needed.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from cirron.record import clock
from cirron.ship.threads import Worker, sleep

if TYPE_CHECKING:
    from cirron.record.value import Deferred

# What the resolver may take at the end, when nobody waits for values any more.
STOP_NS = 500_000_000

# More than the collector waits for (`MAX_WAITING`): what is pushed out here it has given up.
MAX_ASKED = 100_000


class Resolver:
    """Gets values in the order in which they are asked for."""

    def __init__(self) -> None:
        self._asked: deque[Deferred] = deque(maxlen=MAX_ASKED)
        self._worker: Worker | None = None

    def ask(self, value: Deferred) -> None:
        """Gets the value soon."""
        self._asked.append(value)
        if self._worker is None:
            self._worker = Worker(self._run, "cirron-values")
            self._worker.start()
        self._worker.wake()

    def settle(self, values: list[Deferred], timeout_s: float) -> bool:
        """Waits, not for ever, until the values are there; False: there were none to wait for."""
        deadline = clock.now() + int(timeout_s * 1e9)
        for value in values:
            while not value.is_ready and clock.now() < deadline:
                sleep(0.001)
        return bool(values)

    def stop(self, deadline_ns: int) -> None:
        """Has the thread end once it has tried all that it was asked for.

        It is waited for, unless a device keeps it: at the end of the process it must not be inside
        of a driver.
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
                if value.is_ready:  # it was given up meanwhile
                    continue
                together = [value]
                while self._asked and value.is_batched and self._asked[0].is_batched:
                    together.append(self._asked.popleft())
                *others, last = together
                last.resolve_all(others)
            if worker.is_stopping:
                return
            worker.rest(3600.0)
