"""Takes records out of the ring, matches marks with spans, and encodes what is complete.

Runs on the background thread, or on the caller's for `ci.trace()`; a lock lets in one at a time,
for one slice of records. A slice is small enough that the interpreter lock is never held for long.
A record that cannot be encoded loses itself only, and is counted.
"""

from __future__ import annotations

import array
import os
import struct
from collections import deque
from itertools import repeat, starmap
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from cirron import wire
from cirron.record import attrs as attributes
from cirron.record import clock, hot
from cirron.record.value import Deferred, Polled, Several
from cirron.ship.texts import Texts
from cirron.ship.threads import new_lock, sleep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cirron.ship.sinks.memory import Memory

    Columns: TypeAlias = Any  # of spans, in the order of `hot.Closed`, or None

# About 1.5 ms of work (bench/gil.py measures it).
SLICE = 800

# A span that gets marks for hours lists only the newest of their ids; every mark names its span.
MAX_MARK_IDS = 1_000

# Names of marks whose latest value is kept for an open span, for the black box and for printing.
MAX_LATEST = 100

# Marks whose value a device still has. Past this the oldest are given up, and counted.
MAX_WAITING = 50_000
# How often those are looked through while records come in.
WAITING_LOOK_NS = 50_000_000

# Parents whose ids are kept as text.
MAX_PARENTS = 10_000

# A slice ends early once its attributes may have this size, which bounds what is written at once.
MAX_SLICE_BYTES = 2**20
# And a slice of many records takes fewer where the last ones were long.
MAX_BULK_BYTES = 4 * 2**20

# Attributes that have a field of their own in the record.
GAUGES = ("cpu_ns", "gpu_ns", "memory_peak_bytes")

# Attributes that a device still measures when the span ends.
DEVICE_TIMES = frozenset(("gpu_ns", "device_ns"))

STEP_NAMES = frozenset(("step", "batch"))

# A span that waits for its GPU time is written without it after this long, or when so many wait
# behind it: a device that hangs must not keep what led up to it off the disk.
HOLD_NS = 30_000_000_000
MAX_HELD = 100_000

# How long `ci.trace()` waits for devices, and `ci.health()` for the lock.
SETTLE_S = 2.0
LOCK_S = 0.5

_NO_ATTRS: dict[str, Any] = {}
_NO_MARKS: list[str] = []
_PLAIN = frozenset((str, bool, type(None)))
_INT64 = range(-(2**63), 2**64)
MAX_INT = 2**63 - 1


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
        self.lock = new_lock()
        self.anchor = anchor
        self.pending_bytes = 0  # encoded and not yet taken
        self.last_step: hot.Closed | None = None
        self.last_activity: dict[int, int] = {}  # thread -> when it last closed a span
        self.seen = 0  # records that were taken out of the ring
        self.lost_values = 0  # marks whose value could not be had
        self.failed = 0  # records that could not be encoded
        self._oldest_ns = 0  # when the first record was made that is encoded and not yet taken
        self._texts_made = 0
        self._asks = True  # objects of the user's for their texts
        self._texts = Texts()
        self._as_text_before = attributes.as_text
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
        self._waiting: deque[hot.Mark] = deque()  # marks whose value a device still has
        self._looked_ns = 0  # when they were last looked through
        self._held: deque[hot.Closed] = deque()  # spans, from the first whose GPU time is not there
        self._snapshots: list[wire.Snapshot] = []
        self._snapshot_marks: list[wire.Mark] = []
        self._files: list[tuple[Path, str]] = []
        self.ids = clock.ids
        self._prefix = clock.ids.prefix
        self._given_before = given_before  # sequence numbers that are not this ring's
        self._was_full = False
        self._record_bytes = 1  # of the last chunk's records, each
        self._rest: list[hot.Record] = []  # taken out of the ring, for the next slice
        self._ids = ParentIds(self.ids)

    # -- taking records in ------------------------------------------------------------------

    def step(self, limit: int = SLICE) -> int:
        """Takes one slice of records; returns how many are left in the ring."""
        with self.lock:
            return self._step(limit)

    def drain(self) -> None:
        """Takes everything that was recorded before the call, whoever goes on recording."""
        target = self.seen + self.pending
        while self.seen < target and self.step():
            pass

    @property
    def pending(self) -> int:
        """Records that nothing was done with yet."""
        return len(self._ring) + len(self._rest)

    def unstored(self, handed_on: int) -> int:
        """Records that are neither handed on nor lost."""
        return self.seen + self.pending - handed_on - self.lost_values - self.failed

    def lag_ns(self) -> int:
        """The age of the oldest record that was not handed on yet."""
        try:
            in_ring = self._ring[0][6]  # a span's end, a mark's time
        except IndexError:
            in_ring = 0
        oldest = self._oldest_ns or in_ring
        return max(0, self._now() - oldest) if oldest else 0

    def _step(self, limit: int) -> int:
        # In bulk, by functions of C: Python does not take the interpreter lock away inside of
        # them, so that a program with many busy threads leaves this one turns that are long enough.
        ring = self._ring
        limit = min(limit, max(SLICE, MAX_BULK_BYTES // self._record_bytes))
        count = 0 if self._rest else min(len(ring), limit)
        records = self._rest or list(starmap(ring.popleft, repeat((), count)))
        if ring.maxlen is not None and len(ring) + count >= ring.maxlen:
            self._was_full = True  # or may have been, while we took records out
        if records and not self._oldest_ns:
            self._oldest_ns = records[0][6]
        late = self._take_ready() if self._waiting else []
        self._rest = []
        closed: list[Any] = records
        marks: list[hot.Mark] = []
        columns = transpose(records)
        if columns is None or have_attrs(columns):
            records = self._cut(records)
            closed = [record for record in records if len(record) == 8]
            marks = self._take_known([record for record in records if len(record) == 7])
            columns = transpose(closed)
        self.seen += len(records)
        if columns:
            self.last_activity.update(zip(columns[7], columns[6], strict=True))
            if not STEP_NAMES.isdisjoint(columns[2]):
                self.last_step = next(r for r in reversed(closed) if r[2] in STEP_NAMES)
        is_waiting = columns and have_attrs(columns) and self._ask_for_times(closed)
        if is_waiting or self._held:
            closed = self._let_through(closed)
            columns = transpose(closed)
        if closed or marks or late or self._snapshots:
            self._encode(closed, columns, marks, late)
        return self.pending

    def _take_known(self, marks: list[hot.Mark]) -> list[hot.Mark]:
        """The marks whose value is known; for that of the others somebody has to wait."""
        known = []
        for mark in marks:
            value = mark[3]
            # Most are floats, and are let through at once.
            if value.__class__ is not float and isinstance(value, Deferred) and not value.is_ready:
                self._wait_for(mark)
            else:
                known.append(mark)
        return known

    def _cut(self, records: list[hot.Record]) -> list[hot.Record]:
        """As many of them as have attributes of `MAX_SLICE_BYTES`; the rest is kept."""
        weight = 0
        for number, record in enumerate(records, start=1):
            attrs = record[4] if len(record) == 8 else record[5]
            if attrs is not None:
                weight += weigh(attrs)
                if weight > MAX_SLICE_BYTES:
                    self._rest = records[number:]
                    return records[:number]
        return records

    def _ask_for_times(self, closed: list[hot.Closed]) -> bool:
        """Whether some of the spans wait for the time that a device took; it is asked for."""
        times = []
        for record in closed:
            if record[4] is not None and not DEVICE_TIMES.isdisjoint(record[4]):
                gpu_time = gpu_time_of(record)
                if gpu_time is not None:
                    times.append(gpu_time)
        asked = [one for one in times if not one.is_awaited]
        if asked and self.on_deferred is not None:
            self.on_deferred(Several(asked))
        return bool(times)

    def _wait_for(self, mark: hot.Mark) -> None:
        self._list_mark(mark[1], f"{self._prefix}{mark[0]:016x}")  # its span may close first
        self._waiting.append(mark)
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()[3].give_up()
            self.lost_values += 1
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
        now = clock.now()
        if now - self._looked_ns < WAITING_LOOK_NS and self._ring:
            return []
        self._looked_ns = now
        ready: list[hot.Mark] = []
        waiting: deque[hot.Mark] = deque()
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
            # Where a thread asks for the values, this one does not ask a source that may block.
            may_block = type(value) is Deferred and not isinstance(value.source, Polled)
            is_asked = may_block and self.on_deferred is not None
            while not (value.is_ready if is_asked else value.poll()) and clock.now() < deadline:
                sleep(0.001)
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

    def held_records(self, newest: int = MAX_HELD) -> list[wire.Span]:
        """The wire form of the spans that still wait for their GPU time, or the newest of them."""
        with self.lock:
            self._asks = False
            held = list(self._held)[-newest:]
            records = self._spans(transpose(held)) if held else []
            self._asks = True
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

    def close_open(self) -> None:
        """Ends what is still open, outermost last, and says that it was cut short."""
        for span in reversed(self.open_spans()):
            if not span.end:  # else it was interrupted while it closed
                if span is not self._root:
                    span.set(truncated=True)
                span.end = self._now()
            self._opened.discard(span)
            self._ring.append(hot.record_of(span))

    def give_up(self) -> None:
        """Takes in what has come, and waits for nothing any more."""
        self.let_go()
        with self.lock:
            for mark in self._waiting:
                mark[3].give_up()
            self.lost_values += len(self._waiting)
            self._waiting = deque()
            self._texts.stop()

    # -- handing chunks out -----------------------------------------------------------------

    def take_chunks(self) -> list[Chunk]:
        """Everything encoded since the last call."""
        with self.lock:
            chunks, self._chunks = self._chunks, []
            self.pending_bytes = 0
            self._oldest_ns = 0
            return chunks

    def open_spans(self) -> list[hot.Span]:
        """The spans that are open now, oldest first."""
        # copy() is one step for the interpreter; sorting the set itself could meet a change
        return sorted(self._opened.copy(), key=lambda span: span.sequence)

    def dropped(self) -> int:
        """Records that a full ring pushed out: numbers given out, less those that were seen.

        Right while the background thread is stuck, too: the ring is full then.
        """
        if not self._was_full and len(self._ring) != self._ring.maxlen:
            return 0
        is_locked = self.lock.acquire(timeout=LOCK_S)  # else the count may be off by a slice
        try:
            accounted = self.seen + self.pending + len(self._opened)
            return max(0, hot.expected() - self._given_before - accounted)
        finally:
            if is_locked:
                self.lock.release()

    @property
    def coerced(self) -> int:
        """Attributes that were stored as text."""
        return self._texts_made + attributes.as_text - self._as_text_before

    # -- encoding ---------------------------------------------------------------------------

    def _encode(
        self,
        closed: list[hot.Closed],
        columns: Columns,
        marks: list[hot.Mark],
        late: list[hot.Mark],
    ) -> None:
        snapshots, self._snapshots = self._snapshots, []
        files, self._files = self._files, []
        # Marks first: a span lists those that came before its end, which are all of its own.
        mark_records: list[wire.Mark] = []
        for mark in marks:
            try:
                record = self._mark(mark)
            except Exception:  # noqa: BLE001  protects the other records from this one
                self.failed += 1
            else:
                if record is not None:
                    mark_records.append(record)
        if late:
            found = [self._mark(mark, late=True) for mark in late]
            mark_records += [record for record in found if record is not None]
            marks = marks + [mark for mark in late if mark[1] in self.mark_ids]  # still open
        mark_records += self._snapshot_marks
        self._snapshot_marks = []
        spans, span_count = self._encode_spans(columns) if columns else (b"", 0)
        if marks:
            self._remember_latest(closed, marks)
        lines = [self._line(record) for record in closed] if self._keep_lines else []
        if self.mark_ids or self.latest:
            for span in closed:
                self.mark_ids.pop(span[0], None)
                self.latest.pop(span[0], None)
                self.marked_at.pop(span[0], None)
        chunk = Chunk(
            spans,
            self._encoded(mark_records),
            self._encoded(snapshots),
            lines,
            files,
            span_count + len(mark_records) + len(snapshots),
        )
        self._memory.add(chunk.spans, chunk.marks, backlog=len(self._ring))
        if self._keep_chunks:
            size = len(chunk.spans) + len(chunk.marks) + len(chunk.snapshots)
            self._chunks.append(chunk)
            self.pending_bytes += size
            self._record_bytes = max(1, size // max(1, chunk.records))

    def _encoded(self, records: list[Any]) -> bytes:
        if not records:
            return b""
        try:
            return wire.encode_records(records)
        except Exception:  # noqa: BLE001  protects all the others from a record that JSON refuses
            good = []
            for record in records:
                try:
                    good.append(wire.encode_records([record]))
                except Exception:  # noqa: BLE001  as above
                    self.failed += 1
            return b",".join(good)

    def _remember_latest(self, closed: list[hot.Closed], marks: list[hot.Mark]) -> None:
        """Keeps what the black box and the printing sinks want to know of marks."""
        # A span that opened and closed within the slice, as most do, only those who print care for.
        gone = () if self._keep_lines else {record[0] for record in closed}
        for _, span, name, value, _, _, time_ns in marks:
            if span and span not in gone:
                known = value.value if isinstance(value, Deferred) else value
                latest = self.latest.setdefault(span, {})
                if name in latest or len(latest) < MAX_LATEST:
                    latest[name] = known
                self.marked_at[span] = time_ns

    def _spans(self, columns: Any) -> list[wire.Span]:
        """The wire form of spans."""
        spans = list(self._made(columns))
        if not self._are_plain(columns):
            filled = zip(spans, columns[0], columns[4], strict=True)
            spans = [span for span, *more in filled if self._fill(span, *more)]
        return spans

    def _are_plain(self, columns: Any) -> bool:
        """Whether none of the spans has attributes or marks."""
        return not have_attrs(columns) and self.mark_ids.keys().isdisjoint(columns[0])

    def _made(self, columns: Any) -> Iterator[wire.Span]:
        """The spans as they are without attributes and marks, made by functions of C alone."""
        numbers, parents, names, indices, _, starts, ends, threads = columns
        at = self._offset.__add__
        return map(
            wire.Span,
            map(self._prefix.__add__, hex_of(numbers)),
            names,
            map(self._ids.__getitem__, parents),
            readable(indices),
            map(at, starts),
            map(at, ends),
            *repeat(repeat(None), 3),  # see GAUGES
            threads,
            repeat(self._pid),
            repeat(self._rank),
            repeat(_NO_ATTRS),
            repeat(_NO_MARKS),
        )

    def _encode_spans(self, columns: Any) -> tuple[bytes, int]:
        """The spans encoded, and how many there are."""
        if self._are_plain(columns):
            try:
                # One chain of C, which no other thread can interrupt: see `_step`.
                (encoded,) = map(wire.encode_list, map(list, (self._made(columns),)))
            except (ValueError, OverflowError):  # a name that has to be mended
                pass
            else:
                return encoded[1:-1], len(columns[0])
        spans = self._spans(columns)
        return self._encoded(spans), len(spans)

    def _fill(self, span: wire.Span, number: int, attrs: dict[str, Any] | None) -> bool:
        """Adds attributes and marks. False: it cannot be recorded."""
        if attrs:
            try:
                plain = self._plain_attrs(attrs)
                for gauge in GAUGES:
                    if gauge in plain and (plain[gauge] is None or plain[gauge].__class__ is int):
                        setattr(span, gauge, plain.pop(gauge))
                span.attrs = plain
            except Exception:  # noqa: BLE001  protects the other records from this one
                self.failed += 1
                return False
        marked = self.mark_ids.get(number)
        if marked is not None:
            span.id, span.mark_ids = marked
            if len(span.mark_ids) > MAX_MARK_IDS:
                span.mark_ids = span.mark_ids[-MAX_MARK_IDS:]
                span.attrs = {**span.attrs, "mark_ids": f"the newest {MAX_MARK_IDS} only"}
        return True

    def open_record(self, span: hot.Span) -> wire.Span:
        """The wire form of a span that is still open."""
        closed = hot.record_of(span)
        with self.lock:
            self._asks = False  # for the text of an object: once, when the span closes
            (record,) = self._spans(transpose([closed]))
            self._asks = True
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

    def plain(self, value: Any) -> Any:
        """A settled value (`record/attrs.py`) as JSON can hold it."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            if value in _INT64:
                return value
            self._texts_made += self._asks
            return large(value)
        if kind is float:
            return value if value - value == 0 else str(value)
        if kind is list:
            return [self.plain(item) for item in value]
        if kind is dict:
            return {key: self.plain(item) for key, item in value.items()}
        if kind is attributes.Foreign:
            if not self._asks:
                return attributes.name_of(value.value)
            self._texts_made += 1
            return self._texts.of(value.value)
        return value.value  # Deferred


def weigh(value: Any) -> int:
    """About how many bytes settled attributes take."""
    kind = type(value)
    if kind is str:
        return len(value)
    if kind is dict:
        return sum(map(len, value)) + sum(map(weigh, value.values()))
    return sum(map(weigh, value)) if kind is list else 16


def large(value: int) -> str:
    """An integer that JSON readers could not hold, as text."""
    bits = value.bit_length()
    return str(value) if bits <= 256 else f"<int of {bits} bits>"


class ParentIds(dict[int, str | None]):
    """The ids of parents by their numbers, found once."""

    def __init__(self, ids: clock.Ids) -> None:
        self._of = ids.hex

    def __missing__(self, number: int) -> str | None:
        if len(self) > MAX_PARENTS:
            self.clear()
        found = self[number] = self._of(number) if number else None
        return found


def transpose(records: list[Any]) -> Columns:
    """The spans by their fields, each in a tuple; None when there are none, or marks among them."""
    if list(map(len, records)).count(8) < len(records):
        return None
    return tuple(zip(*records, strict=True)) or None


def have_attrs(columns: Any) -> bool:
    """Whether any of the spans has attributes."""
    attrs = columns[4]
    return bool(attrs.count(None) < len(attrs))


def readable(indices: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """The indices, each cut to what a reader of JSON can hold."""
    try:
        array.array("q", filter(None, indices))
    except OverflowError:
        return tuple(
            index if index is None else max(-MAX_INT, min(index, MAX_INT)) for index in indices
        )
    return indices


def hex_of(numbers: tuple[int, ...]) -> list[str]:
    """Each number as 16 hex digits."""
    return struct.pack(f">{len(numbers)}Q", *numbers).hex(",", 8).split(",")


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
