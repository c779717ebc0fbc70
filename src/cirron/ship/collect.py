"""Takes records out of the ring, matches marks with spans, and encodes what is complete.

Runs on the background thread, or on the caller's for `ci.trace()`; a lock lets in one at a time,
for one slice of records. A slice is small enough that the interpreter lock is never held for long.
"""

from __future__ import annotations

import os
import reprlib
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from cirron import wire
from cirron.record import clock, hot
from cirron.record.value import Deferred, Several, clip

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cirron.ship.sinks.memory import Memory

# About 1.5 ms of work (bench/gil.py measures it).
SLICE = 800

# A span that gets marks for hours lists only the newest of their ids; every mark names its span.
MAX_MARK_IDS = 1_000

# An attribute that holds more than this many items is stored as text.
MAX_ITEMS = 1_000
MAX_TEXT = 16_384  # bytes of a string
MAX_NESTING = 6

# Attributes that have a field of their own in the record.
GAUGES = ("cpu_ns", "gpu_ns", "memory_peak_bytes")

# Attributes that a device still measures when the span ends.
DEVICE_TIMES = frozenset(("gpu_ns", "device_ns"))

STEP_NAMES = frozenset(("step", "batch"))

# Their text is made of the first items only: all of a large one would take long.
CONTAINERS = (list, tuple, dict, set, frozenset)

# A span that waits for its GPU time is written without it after this long, or when so many wait
# behind it: a device that hangs must not keep what led up to it off the disk.
HOLD_NS = 30_000_000_000
MAX_HELD = 100_000

# How long `ci.trace()` waits for devices.
SETTLE_S = 2.0

_NO_ATTRS: dict[str, Any] = {}
_NO_MARKS: list[str] = []
_PLAIN = frozenset((str, int, bool, type(None)))
_INT64 = range(-(2**63), 2**64)


class Line(NamedTuple):
    """A closed span for people: what a sink prints."""

    name: str
    number: int | None  # the span's index; a tuple has a method of that name
    wall_ns: int
    latest: dict[str, Any]  # the last value of each mark


class Chunk(NamedTuple):
    """Encoded records; and lines, where somebody prints them."""

    spans: bytes
    marks: bytes
    snapshots: bytes
    lines: list[Line]
    files: list[tuple[Path, str]]  # that belong to the snapshots
    records: int


class Collector:
    """One ring's reader: what is open, what is complete, and what was lost."""

    def __init__(
        self,
        state: hot.State,
        memory: Memory,
        anchor: clock.Anchor,
        *,
        given_before: int = 0,
        rank: int | None = None,
        keep_chunks: bool = False,
        keep_lines: bool = False,
    ) -> None:
        self.lock = threading.Lock()
        self.anchor = anchor
        self.pending_bytes = 0  # encoded and not yet taken
        self.last_step: hot.Closed | None = None
        self.last_activity: dict[int, int] = {}  # thread -> when it last closed a span
        self.seen = 0  # records that were taken out of the ring
        self.coerced = 0  # attributes that were stored as text
        self.lost_values = 0  # marks whose value could not be had
        self.on_deferred: Callable[[Deferred], None] | None = None
        # Of spans that have marks, until they close, by the span's sequence:
        self.mark_ids: dict[int, tuple[str, list[str]]] = {}  # its own id, and those of its marks
        self.latest: dict[int, dict[str, Any]] = {}
        self.marked_at: dict[int, int] = {}
        self._opened = state.opened
        self._ring = state.ring
        self._root = state.root
        self._now = state.now
        self._memory = memory
        self._offset = anchor.wall_ns - anchor.monotonic_ns
        self._rank = rank
        self._pid = os.getpid()
        self._keep_chunks = keep_chunks
        self._keep_lines = keep_lines
        self._chunks: list[Chunk] = []
        self._waiting: list[hot.Mark] = []  # marks whose value a device still has
        self._held: deque[hot.Closed] = deque()  # spans, from the first whose GPU time is not there
        self._snapshots: list[wire.Snapshot] = []
        self._snapshot_marks: list[wire.Mark] = []
        self._files: list[tuple[Path, str]] = []
        self.ids = clock.ids
        self._prefix = clock.ids.prefix
        self._last = 0
        self._last_id: str | None = None
        self._given_before = given_before  # sequence numbers that are not this ring's
        self._was_full = False

    # -- taking records in ------------------------------------------------------------------

    def step(self, limit: int = SLICE) -> int:
        """Takes one slice of records; returns how many are left in the ring."""
        with self.lock:
            return self._step(limit)

    def drain(self) -> None:
        """Takes everything that was recorded before the call, whoever goes on recording."""
        target = self.seen + len(self._ring)
        while self.seen < target and self.step():
            pass

    def _step(self, limit: int) -> int:
        ring = self._ring
        waiting = len(ring)
        count = min(waiting, limit)
        pop = ring.popleft
        closed: list[hot.Closed] = []
        marks: list[hot.Mark] = []
        late = self._take_ready() if self._waiting else []
        gpu_times: list[Deferred] = []
        for _ in range(count):
            record = pop()
            if len(record) == 7:
                value = record[3]
                # Most are floats, and are let through at once.
                if (
                    value.__class__ is not float
                    and isinstance(value, Deferred)
                    and not value.is_ready
                ):
                    self._wait_for(record)
                else:
                    marks.append(record)
            else:
                closed.append(record)
                if record[4] is not None and not DEVICE_TIMES.isdisjoint(record[4]):
                    gpu_time = gpu_time_of(record)
                    if gpu_time is not None:
                        gpu_times.append(gpu_time)
        self.seen += count
        if ring.maxlen is not None and len(ring) + count >= ring.maxlen:
            self._was_full = True  # or may have been, while we took records out
        if closed:
            self._note_activity(closed)
        asked = [one for one in gpu_times if not one.is_awaited]
        if asked and self.on_deferred is not None:
            self.on_deferred(Several(asked))
        if gpu_times or self._held:
            closed = self._let_through(closed)
        if closed or marks or late or self._snapshots:
            self._encode(closed, marks, late)
        return waiting - count

    def _wait_for(self, mark: hot.Mark) -> None:
        self._list_mark(mark[1], f"{self._prefix}{mark[0]:016x}")  # its span may close first
        self._waiting.append(mark)
        if self.on_deferred is not None and not mark[3].is_awaited:
            self.on_deferred(mark[3])

    def _let_through(self, closed: list[hot.Closed]) -> list[hot.Closed]:
        """The spans that need wait no longer, in the order in which they closed."""
        held = self._held
        held.extend(closed)
        too_old = self._now() - HOLD_NS
        ready = []
        while held:
            gpu_time = gpu_time_of(held[0])
            if gpu_time is not None:
                if held[0][6] > too_old and len(held) <= MAX_HELD:
                    break
                gpu_time.give_up()
            ready.append(held.popleft())
        return ready

    def _take_ready(self) -> list[hot.Mark]:
        ready: list[hot.Mark] = []
        waiting: list[hot.Mark] = []
        for mark in self._waiting:  # each is asked once: another thread makes them ready
            (ready if mark[3].is_ready else waiting).append(mark)
        self._waiting = waiting
        return ready

    def waiting_values(self) -> list[Deferred]:
        """The values that marks and spans still wait for."""
        with self.lock:
            return [mark[3] for mark in self._waiting] + self._held_times()

    def settle(self, timeout_s: float = SETTLE_S) -> None:
        """Waits, not for ever, for what devices still compute, and takes it in."""
        deadline = clock.now() + int(timeout_s * 1e9)
        for value in self.waiting_values():
            while not value.poll() and clock.now() < deadline:
                time.sleep(0.001)
        self.step()

    def let_go(self) -> None:
        """Takes in what has come, and the spans whose GPU time has not come without it."""
        with self.lock:
            for gpu_time in self._held_times():
                gpu_time.give_up()
        self.step()

    def _held_times(self) -> list[Deferred]:
        found = [gpu_time_of(record) for record in self._held]
        return [gpu_time for gpu_time in found if gpu_time is not None]

    def held_records(self) -> list[wire.Span]:
        """The wire form of the spans that still wait for their GPU time."""
        with self.lock:
            coerced = self.coerced  # is counted when they are written
            records = [self._span(record) for record in self._held]
            self.coerced = coerced
        return records

    def add_snapshots(
        self,
        snapshots: list[wire.Snapshot],
        marks: list[wire.Mark] | None = None,
        files: list[tuple[Path, str]] | None = None,
    ) -> None:
        """Takes records that do not come through the ring; the next step encodes them.

        The files belong to them; each comes with the key that a server knows it by.
        """
        with self.lock:
            self._snapshots += snapshots
            self._snapshot_marks += marks or []
            self._files += files or []

    def finish(self) -> None:
        """Ends what is still open, outermost last, and says that it was cut short."""
        for span in reversed(self.open_spans()):
            if not span.end:  # else it was interrupted while it closed
                if span is not self._root:
                    span.set(truncated=True)
                span.end = self._now()
            self._opened.discard(span)
            self._ring.append(hot.record_of(span))
        self.step()  # also when the ring is empty: values may have come
        self.drain()
        self.let_go()
        with self.lock:
            for mark in self._waiting:
                mark[3].give_up()
            self.lost_values += len(self._waiting)
            self._waiting = []

    # -- handing chunks out -----------------------------------------------------------------

    def take_chunks(self) -> list[Chunk]:
        """Everything encoded since the last call."""
        with self.lock:
            chunks, self._chunks = self._chunks, []
            self.pending_bytes = 0
            return chunks

    def open_spans(self) -> list[hot.Span]:
        """The spans that are open now, oldest first."""
        # copy() is one step for the interpreter; sorting the set itself could meet a change
        return sorted(self._opened.copy(), key=lambda span: span.sequence)

    def dropped(self) -> int:
        """Records that a full ring pushed out: numbers given out, less those that were seen."""
        if not self._was_full:
            return 0
        with self.lock:
            accounted = self.seen + len(self._ring) + len(self._opened)
            return max(0, hot.expected() - self._given_before - accounted)

    # -- encoding ---------------------------------------------------------------------------

    def _encode(
        self, closed: list[hot.Closed], marks: list[hot.Mark], late: list[hot.Mark]
    ) -> None:
        snapshots, self._snapshots = self._snapshots, []
        files, self._files = self._files, []
        # Marks first: a span lists those that came before its end, which are all of its own.
        mark_records = [record for record in map(self._mark, marks) if record is not None]
        if late:
            found = [self._mark(mark, late=True) for mark in late]
            mark_records += [record for record in found if record is not None]
            marks = marks + [mark for mark in late if mark[1] in self.mark_ids]  # still open
        mark_records += self._snapshot_marks
        self._snapshot_marks = []
        span_records = [self._span(record) for record in closed]
        self._remember_latest(closed, marks)
        lines = [self._line(record) for record in closed] if self._keep_lines else []
        for record in closed:
            self.mark_ids.pop(record[0], None)
            if self.latest:
                self.latest.pop(record[0], None)
                self.marked_at.pop(record[0], None)
        chunk = Chunk(
            wire.encode_records(span_records),
            wire.encode_records(mark_records),
            wire.encode_records(snapshots),
            lines,
            files,
            len(span_records) + len(mark_records) + len(snapshots),
        )
        self._memory.add(chunk.spans, chunk.marks, backlog=len(self._ring))
        if self._keep_chunks:
            self._chunks.append(chunk)
            self.pending_bytes += len(chunk.spans) + len(chunk.marks) + len(chunk.snapshots)

    def _note_activity(self, closed: list[hot.Closed]) -> None:
        """Keeps what the black box wants to know, of spans that are held back too."""
        for record in closed:
            self.last_activity[record[7]] = record[6]
        self.last_step = next((r for r in reversed(closed) if r[2] in STEP_NAMES), self.last_step)

    def _remember_latest(self, closed: list[hot.Closed], marks: list[hot.Mark]) -> None:
        """Keeps what the black box and the printing sinks want to know of marks."""
        # A span that opened and closed within the slice, as most do, only those who print care for.
        gone = () if self._keep_lines else {record[0] for record in closed}
        for _, span, name, value, _, _, time_ns in marks:
            if span and span not in gone:
                known = value.value if isinstance(value, Deferred) else value
                self.latest.setdefault(span, {})[name] = known
                self.marked_at[span] = time_ns

    def _span(self, record: hot.Closed) -> wire.Span:
        number, parent, name, index, attrs, start, end, thread = record
        marked = self.mark_ids.get(number)
        span_id, marks = marked or (f"{self._prefix}{number:016x}", _NO_MARKS)
        plain = self._plain_attrs(attrs) if attrs else _NO_ATTRS
        if len(marks) > MAX_MARK_IDS:
            marks = marks[-MAX_MARK_IDS:]
            plain = {**plain, "mark_ids": f"the newest {MAX_MARK_IDS} only"}
        span = wire.Span(
            span_id,
            name,
            self._last_id if parent == self._last else self._parent_id(parent),
            index,
            start + self._offset,
            end + self._offset,
            None,
            None,
            None,
            thread,
            self._pid,
            self._rank,
            plain,
            marks,
        )
        if plain:
            for gauge in GAUGES:
                if gauge in plain and (plain[gauge] is None or plain[gauge].__class__ is int):
                    setattr(span, gauge, plain.pop(gauge))
        return span

    def _parent_id(self, number: int) -> str | None:
        """The id of a parent, kept for its next child."""
        self._last = number
        self._last_id = self.ids.hex(number) if number else None
        return self._last_id

    def open_record(self, span: hot.Span) -> wire.Span:
        """The wire form of a span that is still open."""
        with self.lock:
            coerced = self.coerced  # is counted when it closes
            record = self._span(hot.record_of(span))
            self.coerced = coerced
        record.end_ns = None
        return record

    def _mark(self, mark: hot.Mark, late: bool = False) -> wire.Mark | None:
        """The wire form of a mark, or None, counted, when its value could not be had."""
        sequence, span, name, value, kind, attrs, time_ns = mark
        if value.__class__ is not float and isinstance(value, Deferred):
            if value.is_lost:
                self.lost_values += 1
                return None
            value = value.value
        mark_id = f"{self._prefix}{sequence:016x}"
        if not span:
            span_id = "root"
        elif late:  # listed when it began to wait
            span_id = self.ids.hex(span)
        else:
            span_id = self._list_mark(span, mark_id)
        if value.__class__ is float and value - value == 0:
            value_type, nonfinite = "float", None
        else:
            value_type, value, nonfinite = typed(value)
        return wire.Mark(
            mark_id,
            span_id,
            name,
            value_type,
            value,
            self._plain_attrs(attrs) if attrs else _NO_ATTRS,
            time_ns + self._offset,
            kind,
            nonfinite,
        )

    def _list_mark(self, span: int, mark_id: str) -> str:
        """Notes a mark's id for when its span closes; returns the span's id."""
        marked = self.mark_ids.get(span)
        if marked is None:
            span_id = self.ids.hex(span)
            if span:
                self.mark_ids[span] = (span_id, [mark_id])
            return span_id
        span_id, ids = marked
        ids.append(mark_id)
        if len(ids) > 2 * MAX_MARK_IDS:
            del ids[:-MAX_MARK_IDS]
        return span_id

    def _line(self, record: hot.Closed) -> Line:
        number, _, name, index, _, start, end, _ = record
        return Line(name, index, end - start, self.latest.get(number, _NO_ATTRS))

    def _plain_attrs(self, attrs: dict[str, Any]) -> dict[str, Any]:
        return {key: self.plain(value) for key, value in attrs.items()}

    def plain(self, value: Any, nesting: int = 0) -> Any:
        """The value as JSON can hold it; what JSON cannot hold becomes text, and is counted."""
        kind = value.__class__
        if kind is str:
            if len(value) <= MAX_TEXT:
                return value
            self.coerced += 1
            return clip(value, MAX_TEXT)
        if kind in _PLAIN and (kind is not int or value in _INT64):
            return value
        if kind is float:
            return value if value - value == 0 else str(value)
        if isinstance(value, Deferred):
            return value.value
        try:
            if nesting < MAX_NESTING:
                if isinstance(value, (list, tuple)) and len(value) <= MAX_ITEMS:
                    return [self.plain(item, nesting + 1) for item in value]
                if isinstance(value, dict) and len(value) <= MAX_ITEMS:
                    return {str(k): self.plain(v, nesting + 1) for k, v in value.items()}
                if isinstance(value, (bool, int, float, str)):  # subclasses: enums, np.float64
                    base = next(b for b in (bool, int, float, str) if isinstance(value, b))
                    if base is not kind:
                        plain = str.__str__(value) if isinstance(value, str) else base(value)
                        return self.plain(plain, MAX_NESTING)
                if type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1:
                    return self.plain(value.item(), MAX_NESTING)
            text = reprlib.repr(value) if isinstance(value, CONTAINERS) else str(value)
        except Exception:  # noqa: BLE001  protects the batch, from an object whose own methods fail
            text = f"<{type(value).__name__}>"
        self.coerced += 1
        return clip(text)


def gpu_time_of(record: hot.Closed) -> Deferred | None:
    """The time that a device took for a span, while it is not known."""
    attrs = record[4] or _NO_ATTRS
    for name in DEVICE_TIMES:
        found = attrs.get(name)
        if isinstance(found, Deferred) and not (
            found.poll() if found.is_awaited else found.is_ready
        ):
            return found
    return None


def typed(value: Any) -> tuple[str, Any, str | None]:
    """A mark's value as the wire has it: its type, the value, and which non-finite it was."""
    kind = value.__class__
    if kind is float:
        return ("float", value, None) if value - value == 0 else ("float", None, str(value))
    if kind is bool:
        return "bool", value, None
    if kind is int:
        return ("int", value, None) if value in _INT64 else typed(as_float(value))
    return "string", value, None


def as_float(value: int) -> float:
    """The nearest float of an integer that JSON readers could not hold."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
