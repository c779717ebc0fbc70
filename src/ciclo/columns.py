"""A column of a history: all values of one name.

A float takes 16 bytes per step: the value and its row number. New values wait in a short queue and
are packed together, which is faster than one by one. Device values are sent to the host at that
point, and received when the queue is full again: by then they have arrived, so nothing waits.
"""

from __future__ import annotations

import struct
from array import array
from typing import TYPE_CHECKING, Any

from ciclo.device_values import PLAIN, Queue, fetch, keeper_of

if TYPE_CHECKING:
    from collections.abc import Sequence

CODES: dict[type, str] = {float: "d", int: "q"}


class Column:
    """The values of one name, and their rows."""

    __slots__ = ("_can_wait", "_queue", "_witness", "new", "new_rows", "plain", "rows", "values")

    def __init__(self) -> None:
        self.rows = array("q")
        self.values: array[Any] | list[Any] = array("d")
        self._queue = Queue()  # the latest values by row, not packed yet
        self.new_rows, self.new = self._queue.tags, self._queue.values
        self._can_wait = False  # whether device values still exist some steps later
        self._witness: Any = None  # the previous device value, until that is known
        self.plain = PLAIN  # types stored unchanged; JAX arrays too, if they can wait

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
        """A device value that is fetched immediately, because the next step may donate its memory.

        Whether it does is known when the second value arrives: the first was deleted or not.
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
        """Sets the value of the latest row, replacing a value that is already there."""
        newest = self.newest()
        if newest is not None and newest[0] == row:
            if not self.new:
                self.settled()
            for where in (self.new_rows, self.new) if self.new else (self.rows, self.values):
                where.pop()
        self.put(row, value)

    def newest(self) -> tuple[int, Any] | None:
        """The row and the latest value, which may still be on its device."""
        if self.new:
            return self.new_rows[-1], self.new[-1]
        if self._queue.last is not None:
            return self._queue.last
        return (self.rows[-1], self.values[-1]) if self.rows else None

    def turn(self) -> None:
        """Sends the queued device values to the host, and stores those that have arrived."""
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
            except struct.error:  # an int of more than 64 bits
                pass
            self.values = self.values.tolist()  # values of several types are kept unchanged
        self.values.extend(values)

    def settled(self) -> array[Any] | list[Any]:
        """All values; device values are fetched."""
        self.turn()
        self.turn()
        return self.values

    def copy(self) -> Column:
        copied = Column()
        copied.values = self.settled()[:]
        copied.rows = self.rows[:]
        return copied


def _packed(code: str, values: Sequence[Any]) -> array[Any]:
    """An array; `array(code, values)` is five times slower."""
    return array(code, struct.pack(f"{len(values)}{code}", *values))
