"""Taking records out of the ring: order, what is lost, what is kept, and in slices."""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

import cirron as ci
from cirron import testing, wire
from cirron.record import clock, hot
from cirron.record.value import Deferred
from cirron.ship import collect, encode
from cirron.ship.collect import SLICE, Collector
from cirron.ship.encode import as_float, typed
from cirron.ship.sinks.memory import Memory

if TYPE_CHECKING:
    import pytest


class Ring:
    """A ring and its collector, with records made by hand."""

    def __init__(self, size: int = 1_000_000, **options: Any) -> None:
        self.numbers = itertools.count(1)
        self.state = hot.State(deque(maxlen=size), sequence=self.numbers)
        self.memory = Memory()
        self.collector = Collector(self.state, self.memory, clock.Anchor(1_000, 0, 0), **options)

    def span(self, name: str = "step", parent: int = 0, attrs: Any = None) -> int:
        number = next(self.numbers)
        self.state.append((number, parent, name, None, attrs, 1, 2, 3))
        return number

    def mark(self, span: int = 0, value: Any = 0.5) -> None:
        self.state.append((next(self.numbers), span, "loss", value, "point", None, 4))

    @property
    def spans(self) -> list[wire.Span]:
        return [s for chunk in self.memory.chunks() for s in wire.decode_spans(chunk[0])]

    @property
    def marks(self) -> list[wire.Mark]:
        return [m for chunk in self.memory.chunks() for m in wire.decode_marks(chunk[1])]


def test_a_step_takes_a_slice() -> None:
    """A step takes a bounded number of records, so that the interpreter lock is free again soon."""
    ring = Ring()
    for _ in range(SLICE + 5):
        ring.span()

    assert 5 == ring.collector.step()
    assert SLICE == len(ring.spans)
    assert 0 == ring.collector.step()
    assert SLICE + 5 == len(ring.spans)


def test_drain_takes_what_was_there() -> None:
    """A drain takes all that was recorded before it, however many slices that is."""
    ring = Ring()
    for i in range(3 * SLICE):
        ring.span(str(i))
    ring.collector.drain()

    assert [str(i) for i in range(3 * SLICE)] == [span.name for span in ring.spans]


def test_wall_time_is_the_anchor_plus_monotonic_time() -> None:
    """Times on the wire are wall time, derived from the anchor."""
    ring = Ring()
    ring.span()
    ring.mark()
    ring.collector.drain()

    assert (1_001, 1_002) == (ring.spans[0].start_ns, ring.spans[0].end_ns)
    assert 1_004 == ring.marks[0].ts_ns


def test_ids_are_unique_and_32_hex() -> None:
    """Every record has an id of 32 hex digits that no other has."""
    ring = Ring()
    for _ in range(100):
        ring.mark(ring.span())
    ring.collector.drain()
    ids = [span.id for span in ring.spans] + [mark.id for mark in ring.marks]

    assert 200 == len(set(ids))
    assert {32} == {len(id) for id in ids}
    assert all(int(id, 16) for id in ids)


def test_what_a_full_ring_drops_is_counted() -> None:
    """The oldest records go when the ring is full, and exactly those are counted."""
    ring = Ring(size=100)
    for i in range(250):
        ring.span(str(i))
    assert 150 == dropped(ring)  # also while nobody takes any out
    ring.collector.drain()

    assert [str(i) for i in range(150, 250)] == [span.name for span in ring.spans]
    assert 150 == dropped(ring)


def dropped(ring: Ring) -> int:
    """`Collector.dropped` asks the hot path for how many numbers it gave out."""
    before = hot.attach(ring.state)
    try:
        return ring.collector.dropped()
    finally:
        hot.attach(before)


def test_drops_are_counted_while_the_worker_is_stuck() -> None:
    """The count of dropped records needs no lock that a stuck worker may hold."""
    ring = Ring(size=100)
    with ring.collector.lock:
        for _ in range(250):
            ring.span()

        assert 150 == dropped(ring)


def test_nothing_is_dropped_below_the_bound() -> None:
    """A ring that was never full lost nothing."""
    ring = Ring(size=100)
    for _ in range(99):
        ring.span()
    ring.collector.drain()

    assert 0 == dropped(ring)


def test_chunks_are_kept_for_sinks_alone() -> None:
    """Without sinks nothing piles up for them."""
    kept, unkept = Ring(keep_chunks=True), Ring()
    for ring in (kept, unkept):
        ring.span()
        ring.collector.drain()

    assert (1, []) == (len(kept.collector.take_chunks()), unkept.collector.take_chunks())
    assert ([], 0) == (kept.collector.take_chunks(), kept.collector.pending_bytes)


def test_lines_have_the_latest_values() -> None:
    """A line for people has the last value of each mark of its span."""
    ring = Ring(keep_chunks=True, keep_lines=True)
    number = next(ring.numbers)
    for value in (1.0, 2.0):
        ring.mark(number, value)
    ring.state.append((number, 0, "epoch", 3, None, 1, 142_001, 3))
    ring.collector.drain()
    (chunk,) = ring.collector.take_chunks()

    assert [("epoch", 3, 142_000, {"loss": 2.0})] == chunk.lines


def test_no_lines_when_nobody_prints() -> None:
    """Lines are made only for those who print them."""
    ring = Ring(keep_chunks=True)
    ring.span()
    ring.collector.drain()

    assert [] == ring.collector.take_chunks()[0].lines


def test_state_of_closed_spans_is_let_go() -> None:
    """What is remembered of an open span goes with its end."""
    ring = Ring(keep_lines=True)
    for _ in range(100):
        number = next(ring.numbers)
        ring.mark(number)
        ring.collector.step()
        ring.state.append((number, 0, "step", None, None, 1, 2, 3))
        ring.collector.step()

    collector = ring.collector
    assert ({}, {}, {}) == (collector.mark_ids, collector.latest, collector.marked_at)


def test_a_value_that_becomes_ready_meanwhile(monkeypatch: Any) -> None:
    """A value that gets ready while the collector looks at it is taken now or next time."""

    class Flaky(Deferred):
        """Is ready from the third time that it is asked."""

        __slots__ = ("asked",)

        @property
        def is_ready(self) -> bool:
            self.asked = getattr(self, "asked", 0) + 1
            return self.asked > 2

        @is_ready.setter
        def is_ready(self, value: bool) -> None:
            pass

    monkeypatch.setattr("cirron.ship.collect.Deferred", Flaky)
    ring = Ring()
    value = Flaky(None)
    value.value = 0.5
    ring.mark(value=value)
    for _ in range(4):
        ring.collector.step()

    assert [0.5] == [mark.value for mark in ring.marks]


class Stuck:
    """A device's value that never comes."""

    def item(self) -> float:
        raise AssertionError("nobody asked for it here")


def test_values_that_never_come_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past a limit the marks that have waited longest are given up, and counted."""
    monkeypatch.setattr(collect, "MAX_WAITING", 3)
    ring = Ring()
    values = [Deferred(Stuck()) for _ in range(5)]
    for value in values:
        ring.mark(value=value)
    ring.collector.drain()

    assert values[2:] == ring.collector.waiting_values()
    assert [True, True, False, False, False] == [value.is_lost for value in values]
    assert 2 == ring.collector.lost_values


def test_the_ids_of_very_many_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A span that got very many marks lists the newest, and says so; every mark names its span."""
    monkeypatch.setattr(collect, "MAX_MARK_IDS", 3)
    monkeypatch.setattr(encode, "MAX_MARK_IDS", 3)
    ring = Ring()
    number = next(ring.numbers)
    for _ in range(20):
        ring.mark(number)
    ring.state.append((number, 0, "step", None, {"k": 1}, 1, 2, 3))
    ring.collector.drain()
    (span,) = ring.spans

    assert [mark.id for mark in ring.marks[-3:]] == span.mark_ids
    assert {"k": 1, "mark_ids": "the newest 3 only"} == span.attrs
    assert {span.id} == {mark.span_id for mark in ring.marks}


def test_the_latest_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an open span with very many names of marks the first ones are remembered, and updated."""
    monkeypatch.setattr(collect, "MAX_LATEST", 2)
    ring = Ring()
    number = next(ring.numbers)
    for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("a", 4.0)):
        ring.state.append((next(ring.numbers), number, name, value, "point", None, 4))
    ring.collector.drain()

    assert {number: {"a": 4.0, "b": 2.0}} == ring.collector.latest
    assert 4 == len(ring.marks)


def test_a_slice_ends_early_at_large_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large attributes make slices of fewer records, in the same order, and lose none."""
    monkeypatch.setattr(collect, "MAX_SLICE_BYTES", 2_500)
    ring = Ring(keep_chunks=True)
    for i in range(10):
        ring.span(str(i), attrs={"text": "x" * 1_000})
        ring.mark()

    assert (15, 15) == (ring.collector.step(), ring.collector.pending)
    ring.collector.drain()
    assert [str(i) for i in range(10)] == [span.name for span in ring.spans]
    assert (10, 20, 0) == (len(ring.marks), ring.collector.seen, ring.collector.pending)
    assert max(chunk.records for chunk in ring.collector.take_chunks()) <= 6


def test_a_record_that_fails_loses_itself_only() -> None:
    """A record that cannot be encoded is counted, and its neighbours are all there."""

    class Rude:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    late = Deferred(None)
    late.value, late.is_ready = Rude(), True  # a hook's mistake
    ring = Ring()
    for i in range(9):
        # What has no wire form, what JSON refuses, and a good one.
        attrs = ({"a": Rude()}, {"a": late}, {"a": 1})[i % 3]
        number = next(ring.numbers)
        ring.state.append((next(ring.numbers), number, "m", float(i), "point", attrs, 4))
        ring.state.append((number, 0, str(i), None, attrs, 1, 2, 3))
    ring.collector.drain()

    assert [("2", {"a": 1}), ("5", {"a": 1}), ("8", {"a": 1})] == [
        (span.name, span.attrs) for span in ring.spans
    ]
    assert [2.0, 5.0, 8.0] == [mark.value for mark in ring.marks]
    assert 12 == ring.collector.encoder.failed


def test_how_far_it_is_behind() -> None:
    """The lag is the age of the oldest record that was not handed on; 0 when there is none."""
    fake = testing.FakeClock(tick_ns=0)
    state = hot.State(deque(), now=fake, sequence=itertools.count(1))
    collector = Collector(state, Memory(), clock.Anchor(0, 0, 0), keep_chunks=True)
    assert 0 == collector.lag_ns()

    for end in (1_000, 5_000):
        state.append((next(state.sequence), 0, "s", None, None, 1, end, 3))
    fake.now_ns = 10_000
    assert 9_000 == collector.lag_ns()  # in the ring
    collector.step(1)
    assert 9_000 == collector.lag_ns()  # encoded
    collector.take_chunks()
    assert 5_000 == collector.lag_ns()  # the second one
    collector.drain()
    collector.take_chunks()
    assert 0 == collector.lag_ns()


def test_the_end_closes_what_is_open() -> None:
    """At the end open spans are recorded, inner ones first, and say that they were cut short."""
    with testing.capture() as recorded:
        ci.scope("outer").__enter__()
        ci.scope("inner").__enter__()
        recorded._collector.close_open()
        hot.leave_context()

        assert [("inner", {"truncated": True}), ("outer", {"truncated": True})] == [
            (span.name, span.attrs) for span in recorded.spans
        ]
        assert [] == recorded._collector.open_spans()


def test_gauges_and_the_last_step() -> None:
    """The newest step or batch that closed is known, for the black box."""
    ring = Ring()
    ring.span("step")
    ring.span("batch")
    ring.span("epoch")
    ring.collector.drain()

    assert ring.collector.last_step is not None
    assert "batch" == ring.collector.last_step[2]


def test_snapshots_go_with_the_next_step() -> None:
    """Snapshots do not come through the ring and are encoded all the same."""
    ring = Ring(keep_chunks=True)
    stats = wire.Stats(None, None, None, None, None, wire.Histogram([], []))
    snapshot = wire.Snapshot("1", "2", "w", [1], "float32", "stats", stats, None, 1, {})
    ring.collector.add_snapshots([snapshot], [], [])
    ring.collector.step()
    (chunk,) = ring.collector.take_chunks()

    assert b'"tensor_name":"w"' in chunk.snapshots
    assert 1 == chunk.records


def test_many_threads_lose_nothing() -> None:
    """What eight threads record while another collects is all there, each thread's in order."""
    with testing.capture() as recorded:
        threads = [threading.Thread(target=record_500, args=(str(n),)) for n in range(8)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            recorded._collector.step(50)
        for thread in threads:
            thread.join()
        marks, spans = recorded.marks, recorded.spans

    assert (4_000, 4_000) == (len(spans), len(marks))
    for n in range(8):
        assert list(range(500)) == [mark.value for mark in marks if mark.name == str(n)]
    owners = {span.id: span.mark_ids for span in spans}
    assert all(mark.id in owners[mark.span_id] for mark in marks)


def record_500(name: str) -> None:
    for value in range(500):
        with ci.scope(name):
            ci.mark(name, value)


@settings(max_examples=100, deadline=None)
@given(st.integers(), st.integers(1, 50))
def test_any_cut_into_slices_gives_the_same(seed: int, limit: int) -> None:
    """However the ring is cut into slices, spans, marks and their links are the same."""
    generator = random.Random(seed)
    with testing.capture() as recorded:
        stack: list[Any] = []
        for _ in range(60):
            action = generator.random()
            if action < 0.4:
                stack.append(ci.scope("s").__enter__())
            elif action < 0.7 and stack:
                stack.pop().__exit__(None, None, None)
            else:
                ci.mark("m", 1)
            if generator.random() < 0.3:
                recorded._collector.step(limit)
        while stack:
            stack.pop().__exit__(None, None, None)
        spans, marks = recorded.spans, recorded.marks

    by_id = {span.id: span for span in spans}
    assert len(by_id) == len(spans)
    for mark in marks:
        assert mark.span_id == "root" or mark.id in by_id[mark.span_id].mark_ids
    assert sum(len(span.mark_ids) for span in spans) == sum(m.span_id != "root" for m in marks)
    for span in spans:
        if span.parent_id is not None:
            parent = by_id[span.parent_id]
            assert parent.start_ns < span.start_ns
            assert (span.end_ns or 0) < (parent.end_ns or 0)


class TestMemory:
    def test_the_oldest_go(self) -> None:
        """The store is bounded: the oldest chunks go, counted."""
        memory = Memory(max_bytes=10)
        for text in (b"aaaa", b"bbbb", b"cccc"):
            memory.add(text, b"")

        assert [(b"bbbb", b""), (b"cccc", b"")] == memory.chunks()
        assert (8, 4) == (memory.bytes, memory.evicted_bytes)

    def test_less_during_a_backlog(self) -> None:
        """While very many records wait in the ring, the store takes a quarter."""
        memory = Memory(max_bytes=16)
        memory.add(b"aaaa", b"bbbb", backlog=250_000)

        assert 0 == memory.bytes

    def test_clear(self) -> None:
        """Cleared, it is empty."""
        memory = Memory()
        memory.add(b"a", b"b")
        memory.clear()

        assert ([], 0) == (memory.chunks(), memory.bytes)


def test_types_of_values() -> None:
    """The wire names the type of a value, and integers of over 64 bits are floats."""
    assert ("int", 2**64 - 1, None) == typed(2**64 - 1)
    assert ("float", 2.0**64, None) == typed(2**64)
    assert ("float", None, "-inf") == typed(-(10**400))
    assert float("inf") == as_float(10**400)


def test_a_name_that_is_mended_changes_no_neighbour() -> None:
    """A lone surrogate, which JSON has not, leaves the large numbers beside it as they are."""
    ring = Ring()
    ring.mark(value=2**64 - 1)
    ring.mark(value="\ud800")
    ring.span(attrs={"seed": 2**64 - 1})
    ring.span("\ud800")
    ring.collector.drain()

    assert [2**64 - 1, "?"] == [mark.value for mark in ring.marks]
    assert [{"seed": 2**64 - 1}, {}] == [span.attrs for span in ring.spans]
