"""What may be spent on measuring: a share of the time of the steps that are measured.

What costs more than that is done for some steps only: for the first ones, and from then on for as
many as the share pays for, and at least one in a hundred.
"""

from __future__ import annotations

FIRST = 10
LEAST = 100  # of so many steps one is measured, whatever it costs


class Budget:
    """Which steps are measured. One a process: threads that step at the same time share it."""

    def __init__(self, share: float = 0.01) -> None:
        self.share = share
        self.steps = 0
        self.measured = 0
        self.spent_ns = 0
        self.elapsed_ns = 0  # from the first step to the last
        self._cost_ns = 0  # of the last step that was measured
        self._paid_ns = 0.0  # saved up, less than two such steps
        self._since = 0  # steps that were not measured
        self._began_ns = 0
        self._is_measuring = False

    def begin_step(self, now_ns: int) -> bool:
        """Whether the step that begins is to be measured."""
        if self._began_ns:
            self._paid_ns += (now_ns - self._began_ns) * self.share
            self.elapsed_ns += now_ns - self._began_ns
        self._paid_ns = min(self._paid_ns, 2.0 * self._cost_ns)
        self._began_ns = now_ns
        self.steps += 1
        is_paid = self._paid_ns >= self._cost_ns
        self._is_measuring = is_paid or self.steps <= FIRST or self._since >= LEAST - 1
        if self._is_measuring:
            self._paid_ns = max(0.0, self._paid_ns - self._cost_ns)
            self._cost_ns = self._since = 0
            self.measured += 1
        else:
            self._since += 1
        return self._is_measuring

    def spend(self, cost_ns: int) -> None:
        """Notes what measuring has cost just now."""
        self.spent_ns += cost_ns
        if self._is_measuring:
            self._cost_ns += cost_ns

    def health(self) -> dict[str, object]:
        """For `ci.health()`."""
        share = self.spent_ns / self.elapsed_ns if self.elapsed_ns else None
        return {
            "steps_measured": self.measured,
            "steps_thinned": self.steps - self.measured,
            "measuring_share": None if share is None else round(share, 5),
        }


budget = Budget()


def renew(share: float) -> None:
    """Begins anew, for a session."""
    budget.__init__(share)  # type: ignore[misc]
