"""The budget for measuring device time: a share of the time of the steps.

If measuring every step costs more, only some are measured: the first ones, then as many as the
share pays for, and at least one in a hundred.
"""

from __future__ import annotations

import math

FIRST = 10
LEAST = 100  # at least one in this many steps is measured


class Budget:
    """Decides which steps are measured. One per process: concurrent threads share it."""

    def __init__(self, share: float = 0.01) -> None:
        self.share = share
        self.steps = 0
        self.measured = 0
        self.spent_ns = 0
        self._first_ns = 0
        self._last_ns = 0  # when the last step began
        self._due_ns = 0.0  # when all that was spent is paid for
        self._due_step = 0

    def begin_step(self, now_ns: int) -> bool:
        """Whether the step that begins now is measured."""
        self.steps += 1
        self._last_ns = now_ns
        if now_ns < self._due_ns and self.steps < self._due_step:
            return False
        self._first_ns = self._first_ns or now_ns
        self._due_ns = max(self._due_ns, now_ns)
        self._due_step = self.steps + (1 if self.steps < FIRST else LEAST)
        self.measured += 1
        return True

    def spend(self, cost_ns: int) -> None:
        self.spent_ns += cost_ns
        self._due_ns += cost_ns / self.share if self.share else math.inf

    def health(self) -> dict[str, object]:
        """Counters for `ci.health()`."""
        elapsed_ns = self._last_ns - self._first_ns
        share = self.spent_ns / elapsed_ns if elapsed_ns else None
        return {
            "steps_measured": self.measured,
            "steps_thinned": self.steps - self.measured,
            "measuring_share": None if share is None else round(share, 5),
        }


budget = Budget()


def renew(share: float) -> None:
    budget.__init__(share)  # type: ignore[misc]
