"""Takes records out of the ring, matches marks with spans, and encodes them.

Runs on the background thread, or on the caller's thread for `ci.trace()`. A lock admits one thread
at a time, for one slice of records. Slices are small, so the GIL is never held for long. A record
that cannot be encoded is dropped and counted, without affecting others.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from itertools import compress, repeat, starmap
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from cirron import system, wire
from cirron.record import attrs as attributes
from cirron.record import clock, hot
from cirron.record.value import Deferred
from cirron.ship.encode import (
    MAX_MARK_IDS,
    Encoder,
    keys_of,
    span_columns,
    transpose,
    weigh,
    weigh_all,
)
from cirron.ship.threads import new_lock, sleep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from cirron.ship.encode import Columns
    from cirron.ship.sinks.memory import Memory

# About 1.5 ms of work (bench/gil.py measures it).
SLICE = 800

# Mark names per open span whose latest value is kept, for the black box and the live lines.
MAX_LATEST = 100

# Spans whose marks are remembered. Above this, closed spans are forgotten.
MAX_MARKED = 100_000

# Marks that wait for a value from a device. Above this, the oldest are dropped and counted.
MAX_WAITING = 50_000
# How often they are checked while records arrive.
WAITING_LOOK_NS = 50_000_000

# A slice ends early when its attributes reach about this size.
MAX_SLICE_BYTES = 2**20
# A long slice takes fewer records if the last ones were large.
MAX_BULK_BYTES = 8 * 2**20

# How often a step records the memory of the process.
WEIGH_NS = 250_000_000

# Attributes that may become known only after the span ends.
DEVICE_TIMES = frozenset(("gpu_ns", "device_ns"))
ATTRS = itemgetter(4)  # of a closed span

# A span that waits for its GPU time is written without it after this long, or when this many spans
# wait behind it: if a device hangs, the records of what led up to it must reach the disk.
HOLD_NS = 30_000_000_000
MAX_HELD = 100_000
# With more records than this in the ring, the black box does not search it for closed spans.
MAX_LOOK = 10_000

# How long `ci.trace()` waits for devices, and `ci.health()` for the lock.
SETTLE_S = 2.0
LOCK_S = 0.5

_IS_SPAN, _IS_MARK = (bytes(length == fields for length in range(256)) for fields in (8, 7))
_NO_ATTRS: dict[str, Any] = {}
_NO_MARKS: list[str] = []


class Line(NamedTuple):
    """A closed span as a printing sink shows it."""

    name: str
    number: int | None  # the span's index; `index` is a method of tuples
    wall_ns: int
    latest: dict[str, Any]  # the last value of each mark


class Chunk(NamedTuple):
    """Encoded records, and lines if a sink prints them."""

    spans: bytes
    marks: bytes
    snapshots: bytes
    lines: list[Line]
    files: list[tuple[Path, str]]  # that belong to the snapshots
    records: int


class Collector:
    """Reads one ring, and counts what was lost."""

    def __init__(
        self,
        state: hot.State,
        memory: Memory,
        anchor: clock.Anchor,
        *,
        given_before: int = 0,
        rank: Callable[[], int | None] = lambda: None,
        keep_chunks: bool = False,
        keep_lines: bool = False,
    ) -> None:
        self.lock = new_lock()
        self.anchor = anchor
        self.encoder = Encoder(anchor, rank)
        self.pending_bytes = 0  # encoded and not yet taken
        self.last_step: hot.Closed | None = None
        self.last_activity: dict[int, int] = {}  # thread -> when it last closed a span
        self.seen = 0  # records that were taken out of the ring
        self.steps = 0  # of those, steps
        self.lost_values = 0  # marks whose value could not be read
        self._weighed_ns = anchor.monotonic_ns  # when the memory of the process was last read
        self._oldest_ns = 0  # time of the oldest record that is encoded and not yet taken
        self._as_text_before = attributes.as_text
        self.on_deferred: Callable[[list[Deferred]], None] | None = None
        # For open spans with marks, by the span's sequence number:
        self.mark_ids: defaultdict[int, list[str]] = defaultdict(list)
        self.latest: dict[int, dict[str, Any]] = {}
        self.marked_at: dict[int, int] = {}
        self._opened = state.opened
        self._ring = state.ring
        self._root = state.root
        self._now = state.now
        self._memory = memory
        self._keep_chunks = keep_chunks
        self._keep_lines = keep_lines
        self._chunks: list[Chunk] = []
        self._waiting: deque[hot.Mark] = deque()  # marks that wait for their value
        self._looked_ns = 0  # when they were last checked
        self._held: list[hot.Closed] = []  # spans, from the first whose GPU time is not there
        self._snapshots: list[wire.Snapshot] = []
        self._snapshot_marks: list[wire.Mark] = []
        self._files: list[tuple[Path, str]] = []
        self._given_before = given_before  # sequence numbers used before this ring
        self._was_full = False
        self._record_bytes = 1  # of the last chunk's records, each
        self._rest: list[hot.Record] = []  # taken out of the ring, for the next slice
        self._open_before: set[int] = set()  # numbers of spans

    # -- taking records in ------------------------------------------------------------------

    def step(self, limit: int = SLICE) -> int:
        """Takes one slice of records; returns how many are left in the ring."""
        with self.lock:
            return self._step(limit)

    def drain(self) -> None:
        """Takes everything that was recorded before the call."""
        target = self.seen + self.pending
        while self.seen < target and self.step():
            pass

    @property
    def pending(self) -> int:
        """Records that have not been processed yet."""
        return len(self._ring) + len(self._rest)

    def unstored(self, handed_on: int) -> int:
        """Records that were neither passed on nor lost."""
        return self.seen + self.pending - handed_on - self.lost_values - self.encoder.failed

    def lag_ns(self) -> int:
        """The age of the oldest record that has not been passed on yet."""
        try:
            in_ring = self._ring[0][6]  # a span's end, a mark's time
        except IndexError:
            in_ring = 0
        oldest = self._oldest_ns or in_ring
        return max(0, self._now() - oldest) if oldest else 0

    def _step(self, limit: int) -> int:
        # In bulk, by C functions: Python does not switch threads inside them, so this thread gets
        # enough done per turn even if many other threads are busy.
        ring = self._ring
        limit = min(limit, max(SLICE, MAX_BULK_BYTES // self._record_bytes))
        count = 0 if self._rest else min(len(ring), limit)
        records = self._rest or list(starmap(ring.popleft, repeat((), count)))
        if ring.maxlen is not None and len(ring) + count >= ring.maxlen:
            self._was_full = True  # or may have been
        if records and not self._oldest_ns:
            self._oldest_ns = records[0][6]
        late = self._take_ready() if self._waiting else []
        if not (records or late or self._held or self._snapshots):
            return 0  # the usual case
        self._rest = []
        closed, columns, marks, mark_columns = by_kind(records)
        if weigh_all(columns[4]) + weigh_all(mark_columns[5]) > MAX_SLICE_BYTES:
            records = self._cut(records)
            closed, columns, marks, mark_columns = by_kind(records)
        self.seen += len(records)
        if closed:
            self.last_activity.update(zip(columns[7], columns[6], strict=True))
            if not hot.STEPS.isdisjoint(columns[2]):
                self.steps += sum(map(columns[2].count, hot.STEPS))
                self.last_step = next(r for r in reversed(closed) if r[2] in hot.STEPS)
                if self._keep_chunks and self._now() - self._weighed_ns > WEIGH_NS:
                    self._weigh(closed)
                    columns = transpose(closed)
        if any(issubclass(kind, Deferred) for kind in set(map(type, mark_columns[3]))):
            marks = self._take_known(marks)
            mark_columns = transpose(marks)
        is_timed = not DEVICE_TIMES.isdisjoint(keys_of(columns[4]))
        unknown = [gpu_time for _, gpu_time in gpu_times(closed)] if is_timed else []
        self._ask_for(unknown)
        if unknown or self._held:
            closed = self._let_through(closed)
            columns = transpose(closed)
        if closed or marks or late or self._snapshots:
            self._encode(closed, columns, marks, mark_columns, late)
        return self.pending

    def _weigh(self, closed: list[hot.Closed]) -> None:
        """Adds the memory of the process to the newest step, unless a device reports its own."""
        self._weighed_ns = self._now()
        size = system.resident_bytes() if hot.device_clock is None else None
        if size is not None:
            at = max(number for number, record in enumerate(closed) if record[2] in hot.STEPS)
            record = closed[at]
            attrs = {"memory_peak_bytes": size, **(record[4] or {})}
            closed[at] = (*record[:4], attrs, *record[5:])

    def _take_known(self, marks: list[hot.Mark]) -> list[hot.Mark]:
        """The marks whose value is known; the others wait."""
        known, unknown = [], []
        for mark in marks:
            value = mark[3]
            if not isinstance(value, Deferred):
                known.append(mark)
            elif not value.is_ready:
                unknown.append(mark)
            elif value.is_lost:
                self.lost_values += 1
            else:
                known.append((*mark[:3], value.value, *mark[4:]))
        if unknown:
            self._wait_for(unknown)
        return known

    def _cut(self, records: list[hot.Record]) -> list[hot.Record]:
        """The first records, up to `MAX_SLICE_BYTES` of attributes; the rest is kept for later."""
        weight = 0
        for number, record in enumerate(records, start=1):
            attrs = record[4] if len(record) == 8 else record[5]
            if attrs is not None:
                weight += weigh(attrs)
                if weight > MAX_SLICE_BYTES:
                    self._rest = records[number:]
                    return records[:number]
        return records

    def _ask_for(self, values: list[Deferred]) -> None:
        asked = [one for one in values if not one.is_awaited]
        if asked and self.on_deferred is not None:
            self.on_deferred(asked)

    def _wait_for(self, marks: list[hot.Mark]) -> None:
        numbers, spans, _, values, *_ = transpose(marks)
        self._list(spans, self.encoder.ids_of(numbers))  # the spans may close first
        self._waiting.extend(marks)
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()[3].give_up()
            self.lost_values += 1
        self._ask_for(list(values))

    def _let_through(self, closed: list[hot.Closed]) -> list[hot.Closed]:
        """The spans that are ready to be written, in the order in which they closed."""
        self._held += closed
        held = self._held
        too_old = self._now() - HOLD_NS
        ready = 0
        for ready, gpu_time in gpu_times(held):
            if held[ready][6] > too_old and len(held) - ready <= MAX_HELD:
                break
            gpu_time.give_up()
        else:
            ready = len(held)
        self._held = held[ready:]
        return held[:ready]

    def _take_ready(self) -> list[hot.Mark]:
        now = clock.now()
        if now - self._looked_ns < WAITING_LOOK_NS and self._ring:
            return []
        self._looked_ns = now
        ready: list[hot.Mark] = []
        waiting: deque[hot.Mark] = deque()
        for mark in self._waiting:  # `is_ready` is read once: another thread sets it
            (ready if mark[3].is_ready else waiting).append(mark)
        self._waiting = waiting
        known = [(*mark[:3], mark[3].value, *mark[4:]) for mark in ready if not mark[3].is_lost]
        self.lost_values += len(ready) - len(known)
        return known

    def waiting_values(self) -> list[Deferred]:
        """The values that marks and spans are waiting for."""
        with self.lock:
            return [mark[3] for mark in self._waiting] + self._held_times()

    def settle(self, timeout_s: float = SETTLE_S) -> None:
        """Waits for values from devices, within a time limit, and collects them."""
        deadline = clock.now() + int(timeout_s * 1e9)
        for value in self.waiting_values():
            # If the resolver thread reads the values, do not poll a source that may block.
            is_asked = type(value) is Deferred and self.on_deferred is not None
            while not (value.is_ready if is_asked else value.poll()) and clock.now() < deadline:
                sleep(0.001)
        self.step()

    def let_go(self) -> None:
        """Collects what is ready, and stops waiting for GPU times."""
        with self.lock:
            for gpu_time in self._held_times():
                gpu_time.give_up()
        self.step()

    def _held_times(self) -> list[Deferred]:
        return [gpu_time for _, gpu_time in gpu_times(self._held)]

    def held_records(self, newest: int = MAX_HELD) -> list[wire.Span]:
        """The wire form of spans that have ended but are not recorded yet, or of the newest ones.

        They wait for their GPU time or for their parent (`hot.suspend`), or they closed after the
        worker had taken their children.
        """
        suspended = [hot.record_of(span) for span in self._unrecorded() if span.end]
        ring = self._ring.copy() if len(self._ring) < MAX_LOOK else ()
        closed = [one for one in ring if len(one) == 8 and one[0] in self._open_before]
        with self.lock:
            return self._peek([*self._held, *closed, *suspended][-newest:])

    def kept_losses(self) -> list[wire.Mark]:
        """The losses of steps that have ended, as long as the program may mark its own instead."""
        at = self.anchor.at
        return [
            wire.Mark(f"{span.id}:{ns}", span.id, "loss", "float", loss, {}, at(ns), "point")
            for span, noted in hot.losses.copy().items()
            for loss, ns in noted or ()
            if span.end and isinstance(loss, float) and math.isfinite(loss)
        ]

    def note_open(self) -> None:
        """Remembers what is open before records are taken: parents may close in the meantime."""
        self._open_before = {span.sequence for span in self._opened.copy()}

    def _peek(self, closed: list[hot.Closed]) -> list[wire.Span]:
        """The wire form of spans that are not due yet; does not call `str` on objects."""
        closed, columns = span_columns(closed)
        mark_ids = [list(self.mark_ids.get(number, _NO_MARKS)) for number in columns[0]]
        self.encoder.asks = False
        try:
            return self.encoder.spans(columns, mark_ids)
        finally:
            self.encoder.asks = True

    def add_snapshots(
        self,
        snapshots: list[wire.Snapshot],
        marks: list[wire.Mark],
        files: list[tuple[Path, str]],
    ) -> None:
        """Takes records that do not go through the ring; the next step encodes them.

        `files` are their raw values, each with its key on the server.
        """
        with self.lock:
            self._snapshots += snapshots
            self._snapshot_marks += marks
            self._files += files

    def close_open(self) -> None:
        """Ends the spans that are still open, outermost last, and marks them as truncated."""
        for span in reversed(self._unrecorded()):
            if not span.end:  # else it is suspended, or a signal interrupted its closing
                hot.mark_losses(span)
                if span is not self._root:
                    span.set(truncated=True)
                span.end = span.parent.end or self._now()  # a hook may have ended what is around it
            self._opened.discard(span)
            self._ring.append(hot.record_of(span))

    def give_up(self) -> None:
        """Collects what is ready, and gives up on everything else."""
        self.let_go()
        with self.lock:
            for mark in self._waiting:
                mark[3].give_up()
            self.lost_values += len(self._waiting)
            self._waiting = deque()
            self.encoder.texts.stop()

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
        return [span for span in self._unrecorded() if not span.end]

    def _unrecorded(self) -> list[hot.Span]:
        # copy() is one step for the interpreter; sorting the set itself could meet a change
        spans = self._opened.copy()
        parents = {span.parent for span in spans}
        # Between two steps, the next one may never come.
        spans = {one for one in spans if one.before is None or one.is_used or one in parents}
        spans |= {phase for span in spans if (phase := hot.phase_of(span)) is not None}
        return sorted(spans, key=lambda span: span.sequence)

    def dropped(self) -> int:
        """Records that a full ring dropped: sequence numbers used, minus records seen.

        Correct even if the background thread is stuck: the ring is full then.
        """
        if not self._was_full and len(self._ring) != self._ring.maxlen:
            return 0
        is_locked = self.lock.acquire(timeout=LOCK_S)  # else the count may be off by one slice
        try:
            accounted = self.seen + self.pending + len(self._opened)
            return max(0, hot.expected() - self._given_before - accounted)
        finally:
            if is_locked:
                self.lock.release()

    @property
    def coerced(self) -> int:
        """Attributes that were stored as text."""
        return self.encoder.texts_made + attributes.as_text - self._as_text_before

    # -- encoding ---------------------------------------------------------------------------

    def _encode(
        self,
        closed: list[hot.Closed],
        columns: Columns,
        marks: list[hot.Mark],
        mark_columns: Columns,
        late: list[hot.Mark],
    ) -> None:
        encoder = self.encoder
        snapshots, self._snapshots = self._snapshots, []
        files, self._files = self._files, []
        # Marks first: a span lists its marks, all of which were made before it ended.
        mark_records, self._snapshot_marks = self._snapshot_marks, []
        if marks:
            ids = encoder.ids_of(mark_columns[0])
            self._list(mark_columns[1], ids)
            mark_records += encoder.marks(mark_columns, ids)
            self._remember_latest(columns[0], marks)
        if late:  # they were listed when they started to wait
            late_columns = transpose(late)
            mark_records += encoder.marks(late_columns, encoder.ids_of(late_columns[0]))
            self._remember_latest(columns[0], [mark for mark in late if mark[1] in self.mark_ids])
        lines = [self._line(record) for record in closed] if self._keep_lines else []
        mark_ids: Iterable[list[str]] = repeat(_NO_MARKS)
        if self.mark_ids:
            mark_ids = list(map(self.mark_ids.pop, columns[0], mark_ids))
        spans, span_count = encoder.encoded_spans(columns, mark_ids)
        if self.latest:
            for number in columns[0]:
                self.latest.pop(number, None)
                self.marked_at.pop(number, None)
        chunk = Chunk(
            spans,
            encoder.encoded(mark_records),
            encoder.encoded(snapshots),
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

    def _remember_latest(self, closed: Sequence[int], marks: list[hot.Mark]) -> None:
        """Keeps the latest values of marks for the black box and the printing sinks."""
        # Most spans open and close within one slice: only printing sinks need their values.
        gone = set() if self._keep_lines else set(closed)
        for _, span, name, value, _, _, time_ns in marks:
            if span and span not in gone:
                latest = self.latest.setdefault(span, {})
                if name in latest or len(latest) < MAX_LATEST:
                    latest[name] = value
                self.marked_at[span] = time_ns

    def _list(self, spans: Sequence[int], ids: list[str]) -> None:
        """Remembers the ids of marks until their spans close."""
        lists = self.mark_ids
        deque(map(list.append, map(lists.__getitem__, spans), ids), maxlen=0)
        if max(map(len, map(lists.__getitem__, spans))) > 2 * MAX_MARK_IDS:
            for listed in lists.values():
                del listed[: -MAX_MARK_IDS - 1]  # one more shows that the list was cut
        lists.pop(0, None)  # marks outside any span
        if len(lists) > MAX_MARKED:  # a task may mark a span that has ended
            is_open = {span.sequence for span in self._unrecorded()}
            for of_spans in (lists, self.latest, self.marked_at):
                for number in of_spans.keys() - is_open:
                    del of_spans[number]

    def _line(self, record: hot.Closed) -> Line:
        number, _, name, index, _, start, end, _ = record
        return Line(name, index, end - start, self.latest.get(number, _NO_ATTRS))

    def open_record(self, span: hot.Span) -> wire.Span:
        """The wire form of a span that is still open."""
        with self.lock:
            (record,) = self._peek([hot.record_of(span)])
        record.end_ns = None
        return record


def by_kind(records: list[Any]) -> tuple[list[hot.Closed], Columns, list[hot.Mark], Columns]:
    """The spans, of eight fields, and the marks, of seven, each with their columns."""
    lengths = bytes(map(len, records))
    marks = list(compress(records, lengths.translate(_IS_MARK)))
    if marks:
        records = list(compress(records, lengths.translate(_IS_SPAN)))
    return *span_columns(records), marks, transpose(marks)


def gpu_times(closed: list[hot.Closed]) -> Iterator[tuple[int, Deferred]]:
    """The device times that are still unknown, each with the place of its span."""
    for place, attrs in enumerate(map(ATTRS, closed)):
        if attrs is None or attrs.__class__ is hot.Settled:  # without calls: nearly all of them
            continue
        for name in DEVICE_TIMES & attrs.keys():
            found = attrs[name]
            if isinstance(found, Deferred) and not (
                found.poll() if found.is_awaited else found.is_ready
            ):
                yield place, found
