"""Time and names. The only module that reads a clock or a random number.

Durations come from one monotonic clock. Wall time is read once, as an anchor, and every wall-clock
figure is derived from it, so a clock that is set back never makes a child leave its parent.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

now = time.perf_counter_ns
wall = time.time_ns

# Half of every id: new in each process, forked children included. The other half is a counter.
_prefix = os.urandom(8).hex()
# In a forked child: up to which counter ids are the parent's, and its prefix; newest fork first.
_inherited: list[tuple[int, str]] = []


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
    """Reads both clocks several times and keeps the reading with the least time in between."""
    best: Anchor | None = None
    for _ in range(tries):
        before = now()
        wall_ns = wall()
        after = now()
        if best is None or after - before < best.uncertainty_ns:
            best = Anchor(wall_ns, (before + after) // 2, after - before)
    assert best is not None
    return best


def hex_id(sequence: int) -> str:
    """The id, 32 hex digits, of the record with this sequence number in this process."""
    if _inherited and sequence <= _inherited[0][0]:
        return f"{_inherited_prefix(sequence)}{sequence:016x}"
    return f"{_prefix}{sequence:016x}"


def prefix() -> str:
    """The half of every new id that is this process's own."""
    return _prefix


def _inherited_prefix(sequence: int) -> str:
    prefix = _prefix
    for last, older in _inherited:
        if sequence <= last:
            prefix = older
    return prefix


def random_id() -> str:
    """A random id of 32 hex digits."""
    return os.urandom(16).hex()


def fork_ids(last: int) -> None:
    """After a fork, in the child: ids up to `last` stay the parent's, later ones are our own."""
    global _prefix
    _inherited.insert(0, (last, _prefix))
    _prefix = os.urandom(8).hex()


def swap_prefix(prefix: str) -> str:
    """Sets a known prefix, for tests; returns the old one."""
    global _prefix
    old, _prefix = _prefix, prefix
    return old
