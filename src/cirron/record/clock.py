"""Time and ids. The only module that reads a clock or a random number.

Durations come from one monotonic clock. Wall time is read once, as an anchor, and all wall-clock
times are derived from it, so a child never leaves its parent even if the clock is set back.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

now = time.perf_counter_ns
wall = time.time_ns
processor = time.process_time_ns  # of the whole process


class Anchor:
    """The wall clock and the monotonic clock, read together."""

    __slots__ = ("monotonic_ns", "uncertainty_ns", "wall_ns")

    def __init__(self, wall_ns: int, monotonic_ns: int, uncertainty_ns: int) -> None:
        self.wall_ns = wall_ns
        self.monotonic_ns = monotonic_ns
        self.uncertainty_ns = uncertainty_ns

    def at(self, monotonic_ns: int) -> int:
        """Wall time, in ns since 1970, of a moment on the monotonic clock."""
        return self.wall_ns + (monotonic_ns - self.monotonic_ns)


def read_anchor(
    now: Callable[[], int] = now, wall: Callable[[], int] = wall, tries: int = 5
) -> Anchor:
    """Reads both clocks several times and keeps the reading with the smallest gap."""
    best: Anchor | None = None
    for _ in range(tries):
        before = now()
        wall_ns = wall()
        after = now()
        if best is None or after - before < best.uncertainty_ns:
            best = Anchor(wall_ns, (before + after) // 2, after - before)
    assert best is not None
    return best


def random_id() -> str:
    """A random id of 32 hex digits."""
    return os.urandom(16).hex()


class Ids:
    """The ids of one process: a random prefix and a counter. A forked child has its own prefix.

    `inherited` lists, newest first, the last number of each ancestor and that ancestor's prefix.
    """

    __slots__ = ("inherited", "prefix")

    def __init__(self, prefix: str | None = None) -> None:
        self.prefix = os.urandom(8).hex() if prefix is None else prefix
        self.inherited: list[tuple[int, str]] = []

    def hex(self, sequence: int) -> str:
        """The id of the record with this number, as 32 hex digits."""
        prefix = self.prefix
        for last, older in self.inherited:
            if sequence > last:
                break
            prefix = older
        return f"{prefix}{sequence:016x}"

    def forked(self, last: int) -> Ids:
        """The ids of a child that was forked after number `last` was used."""
        child = Ids()
        child.inherited = [(last, self.prefix), *self.inherited]
        return child


ids = Ids()


def use_ids(new: Ids) -> Ids:
    """Replaces the ids of the process; returns the previous ones."""
    global ids
    old, ids = ids, new
    return old
