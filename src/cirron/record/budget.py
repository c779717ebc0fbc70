"""What may be spent on measuring: a share of the time of the steps that are measured.

What costs more than that is done for some steps only: for the first ones, and from then on for as
many as the share pays for, and at least one in a hundred.
"""

from __future__ import annotations

import math

FIRST = 10
LEAST = 100  # of so many steps one is measured, whatever it costs


class Budget:
    """Which steps are measured. One a process: threads that step at the same time share it."""

    def __init__(self, share: float = 0.01) -> None:
        self.share = share
        self.steps = 0
        self.measured = 0
        self.spent_ns = 0
        self._first_ns = 0
        self._last_ns = 0  # when the last step began
        self._due_ns = 0.0  # by when the time has paid for the last step that was measured
        self._due_step = 0
        self._is_measuring = False

    def begin_step(self, now_ns: int) -> bool:
        """Whether the step that begins is to be measured."""
        self.steps += 1
        self._last_ns = now_ns
        if now_ns < self._due_ns and self.steps < self._due_step:
            self._is_measuring = False
            return False
        self._first_ns = self._first_ns or now_ns
        self._due_ns = now_ns
        self._due_step = self.steps + (1 if self.steps < FIRST else LEAST)
        self._is_measuring = True
        self.measured += 1
        return True

    def spend(self, cost_ns: int) -> None:
        """Notes what measuring has cost just now."""
        self.spent_ns += cost_ns
        if self._is_measuring:
            self._due_ns += cost_ns / self.share if self.share else math.inf

    def health(self) -> dict[str, object]:
        """For `ci.health()`."""
        elapsed_ns = self._last_ns - self._first_ns
        share = self.spent_ns / elapsed_ns if elapsed_ns else None
        return {
            "steps_measured": self.measured,
            "steps_thinned": self.steps - self.measured,
            "measuring_share": None if share is None else round(share, 5),
        }


budget = Budget()


def renew(share: float) -> None:
    """Begins anew, for a session."""
    budget.__init__(share)  # type: ignore[misc]
