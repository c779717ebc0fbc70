"""Test kit for cirron and its users: a fake clock, sequential ids, a memory sink, and `capture()`.

>>> from cirron import testing
>>> with testing.capture() as captured:
...     with ci.scope("outer"):
...         ci.mark("loss", 0.5)
>>> print(captured.text())
outer - 2.0us {loss=0.5}
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from typing import TYPE_CHECKING, Any

from cirron import guard
from cirron.record import clock, hot
from cirron.runs import tree
from cirron.ship.collect import Collector
from cirron.ship.sinks.base import Outcome, Sink
from cirron.ship.sinks.memory import Memory
from cirron.view import text
from cirron.wire import decode_marks, decode_spans

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cirron import wire
    from cirron.ship.sinks.base import Sealed

__all__ = ["Captured", "FakeClock", "MemorySink", "capture"]

PREFIX = "0" * 16


class FakeClock:
    """A monotonic clock that advances by `tick_ns` each time it is read, and with `advance`."""

    def __init__(self, start_ns: int = 0, tick_ns: int = 1_000) -> None:
        self.now_ns = start_ns
        self.tick_ns = tick_ns

    def __call__(self) -> int:
        self.now_ns += self.tick_ns
        return self.now_ns

    def advance(self, seconds: float) -> None:
        """Advances the clock."""
        self.now_ns += round(seconds * 1e9)


class MemorySink(Sink):
    """A sink that keeps its batches, for `ci.profile(sinks=[...])`."""

    def __init__(self) -> None:
        self.sealed: list[Sealed] = []
        self.ticks = 0
        self.is_closed = False

    @property
    def batches(self) -> list[wire.Batch]:
        """The batches as a reader would see them."""
        return [batch.decode() for batch in self.sealed]

    def emit(self, batch: Sealed) -> Outcome:
        self.sealed.append(batch)
        return Outcome.DONE

    def tick(self) -> None:
        self.ticks += 1

    def close(self, deadline_ns: int) -> None:
        self.is_closed = True

    def health(self) -> dict[str, object]:
        return {"memory_batches": len(self.sealed)}


class Captured:
    """What was recorded inside `capture()`, readable during and after it."""

    def __init__(self, collector: Collector, memory: Memory, clock: FakeClock) -> None:
        self.clock = clock
        self._collector = collector
        self._memory = memory

    @property
    def spans(self) -> list[wire.Span]:
        """The closed spans, in the order in which they closed."""
        return [span for chunk in self._chunks() for span in decode_spans(chunk[0])]

    @property
    def marks(self) -> list[wire.Mark]:
        """The marks, in the order in which they were made."""
        return [mark for chunk in self._chunks() for mark in decode_marks(chunk[1])]

    def tree(self) -> tree.Tree:
        """The spans as a tree, the open ones included."""
        opened = [self._collector.open_record(span) for span in self._collector.open_spans()]
        return tree.build(self.spans + opened, self.marks, now_ns=self.clock.now_ns)

    def dict(self) -> dict[str, Any]:
        """The tree as `ci.trace(format="dict")` has it."""
        return tree.to_dict(self.tree())

    def text(self) -> str:
        """The tree as `ci.trace()` prints it."""
        return text.render(self.tree())

    def _chunks(self) -> list[tuple[bytes, bytes]]:
        self._collector.drain()
        self._collector.settle()
        return self._memory.chunks()


@contextlib.contextmanager
def capture(clock_: FakeClock | None = None) -> Iterator[Captured]:
    """Sends what is recorded inside the block to a `Captured`, with a fake clock and ids from 1.

    Errors inside cirron are raised here instead of being counted.
    """
    fake = FakeClock() if clock_ is None else clock_
    state = hot.State(deque(), now=fake, sequence=itertools.count(1))
    memory = Memory()
    ids = clock.use_ids(clock.Ids(PREFIX))
    before = hot.attach(state)
    context = hot.leave_context()
    was_strict, guard.strict = guard.strict, True
    try:
        yield Captured(Collector(state, memory, clock.Anchor(0, 0, 0)), memory, fake)
    finally:
        guard.strict = was_strict
        hot.enter_context(context)
        hot.attach(before)
        clock.use_ids(ids)
