"""A column of a history: all values of one name.

A float a step costs 16 bytes: the value and the number of its row. New values wait in a short queue
and go into their column together, which is faster than one by one. Those that a device holds are
sent to the host then, and received when the queue is full again: by then they have come, and nobody
waits.
"""

from __future__ import annotations

import struct
from array import array
from typing import TYPE_CHECKING, Any

from ciclo.device_values import PLAIN, STACKED, Queue, fetch, keeper_of

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_WAITING = 2 * STACKED  # device values of a column, half of them on their way
CODES: dict[type, str] = {float: "d", int: "q"}


class Column:
    """The values of one name, and the rows that they are in."""

    __slots__ = ("_can_wait", "_queue", "_witness", "new", "new_rows", "plain", "rows", "values")

    def __init__(self) -> None:
        self.rows = array("q")
        self.values: array[Any] | list[Any] = array("d")
        self._queue = Queue()  # the newest values, by row, that are not here yet
        self.new_rows, self.new = self._queue.tags, self._queue.values
        self._can_wait = False  # whether device values are still there some steps later
        self._witness: Any = None  # the device value before, while that is not known
        self.plain = PLAIN  # types whose values are kept as they are; JAX's too, if they can wait

    def put(self, row: int, value: Any) -> None:
        """Sets the value of a new row."""
        kept, is_on_device = keeper_of(type(value))(value)
        if is_on_device and not self._can_wait:
            kept = self._fetched(kept)
        self.new_rows.append(row)
        self.new.append(kept)
        if is_on_device and not self._can_wait:
            self.turn()

    def _fetched(self, value: Any) -> Any:
        """One of the first device values, or any if their memory is given away by the next step.

        That is seen from the first, once the second is here. What waits after that would be lost.
        """
        if self._witness is not None and not (
            hasattr(self._witness, "is_deleted") and self._witness.is_deleted()
        ):
            self._can_wait, self._witness = True, None
            if hasattr(value, "is_deleted"):
                self.plain = PLAIN | {type(value)}
            return value
        self._witness = value
        return fetch([value])[0]

    def replace(self, row: int, value: Any) -> None:
        """Sets the value of the newest row, where there may be one: the last word counts."""
        newest = self.newest()
        if newest is not None and newest[0] == row:
            if not self.new:
                self.settled()
            for where in (self.new_rows, self.new) if self.new else (self.rows, self.values):
                where.pop()
        self.put(row, value)

    def newest(self) -> tuple[int, Any] | None:
        """The row of the newest value, and that as it was kept: on its device or not."""
        if self.new:
            return self.new_rows[-1], self.new[-1]
        if self._queue.last is not None:
            return self._queue.last
        return (self.rows[-1], self.values[-1]) if self.rows else None

    def turn(self) -> None:
        """Sends what is new on its way, and takes what has come."""
        rows, values = self._queue.exchange()
        if not rows:
            return
        self.rows.extend(_packed("q", rows))
        kinds = set(map(type, values))
        code = CODES.get(kinds.pop()) if len(kinds) == 1 else None
        if not self.values:
            self.values = [] if code is None else array(code)
        if isinstance(self.values, array):
            try:
                if code == self.values.typecode:
                    self.values.extend(_packed(code, values))
                    return
            except struct.error:  # of an int that is larger than 64 bits
                pass
            self.values = self.values.tolist()  # values of several kinds stay as they are
        self.values.extend(values)

    def settled(self) -> array[Any] | list[Any]:
        """All values, those on a device fetched."""
        self.turn()
        self.turn()
        return self.values

    def copy(self) -> Column:
        copied = Column()
        copied.values = self.settled()[:]
        copied.rows = self.rows[:]
        return copied


def _packed(code: str, values: Sequence[Any]) -> array[Any]:
    """An array; `array(code, values)` takes five times as long."""
    return array(code, struct.pack(f"{len(values)}{code}", *values))
