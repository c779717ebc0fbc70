"""What a long span uses: CPU time, memory, and the time of its thread as Linux counts it."""

from __future__ import annotations

from _thread import get_ident
from typing import Any

from cirron import system
from cirron.record import clock, hot


class Scheduled:
    """How this thread has spent its time since a moment: running, waiting for a CPU, or asleep."""

    __slots__ = ("at", "children_ns", "spent", "thread")

    def __init__(self) -> None:
        self.thread = get_ident()
        self.at = clock.now()
        self.spent = system.scheduled_ns()
        self.children_ns = system.children_ns()

    def since(self) -> dict[str, int]:
        """`starved_ns`: waiting for a CPU; `asleep_ns`; `children_ns`: CPU time of child processes.

        Empty if the system does not count them.
        """
        after = Scheduled()
        if self.spent is None or after.spent is None or after.thread != self.thread:
            return {}
        ran, starved = (new - old for new, old in zip(after.spent, self.spent, strict=True))
        return {
            "starved_ns": starved,
            "asleep_ns": max(after.at - self.at - starved - ran, 0),
            "children_ns": max(after.children_ns - self.children_ns, 0),
        }


class Used:
    """What a span has used since a moment in it."""

    __slots__ = ("_cpu_ns", "_scheduled")

    def __init__(self) -> None:
        self._cpu_ns = clock.processor()
        self._scheduled = Scheduled()

    def note(self, span: hot.Span) -> None:
        """Adds the CPU time and, without a device clock, the peak memory."""
        used: dict[str, Any] = {"cpu_ns": clock.processor() - self._cpu_ns}
        used |= self._scheduled.since()
        peak = system.peak_bytes() if hot.device_clock is None else None
        if peak is not None:
            used["memory_peak_bytes"] = peak
        span.set(**used)
