"""Spans as tracks of slices, for formats that draw them: Perfetto's and Chrome's.

On a track a slice is inside its parent, or after all that came before. Spans of one thread need not
be: those of several asyncio tasks overlap. A span that fits on none of its thread's tracks opens
another.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from cirron import export

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cirron.runs.opened import Run, Session

OPEN = 2**63  # the end of a span that has none


class TraceProcess(NamedTuple):
    """A process of the run. Its number stands for its pid, which another host may have, too."""

    number: int
    name: str


class Track(NamedTuple):
    """A row of slices of a thread."""

    process: TraceProcess
    number: int
    name: str
    main: int | None  # the thread's first track, on all but that one


class Begin(NamedTuple):
    """A slice begins. `end_ns` is None for a span that is open."""

    track: Track
    name: str
    start_ns: int
    end_ns: int | None
    details: dict[str, Any]


class End(NamedTuple):
    """The newest slice of a track ends."""

    track: Track
    end_ns: int


class Sample(NamedTuple):
    """A mark. What is no finite number is text."""

    process: TraceProcess
    name: str
    ts_ns: int
    value: float | None
    text: str | None


@dataclass
class _Stack:
    track: Track
    ends: list[int] = field(default_factory=list)  # of the slices that are open, outermost first
    keys: list[int] = field(default_factory=list)


DETAILS = ("index", "cpu_ns", "gpu_ns", "memory_peak_bytes")
_SPANS = """
SELECT pid, thread_id, key, parent_key, name, start_ns, end_ns, attrs,
    "index", cpu_ns, gpu_ns, memory_peak_bytes, depth
FROM spans WHERE session = :session
"""
_ORDER = "start_ns, depth, end_ns DESC NULLS FIRST, key"
_MARKS = """
SELECT name, ts_ns, value, text FROM marks
WHERE session = :session AND ts_ns IS NOT NULL AND (value IS NOT NULL OR text IS NOT NULL)
ORDER BY ts_ns, key
"""


def events(run: Run) -> Iterator[Begin | End | Sample]:
    """All slices and values of a run, session by session; on each track in the order of time."""
    numbers = itertools.count(1)
    for session in run.sessions:
        processes: dict[int, TraceProcess] = {}
        own = processes[session.pid] = TraceProcess(
            next(numbers), process_name(session, session.pid)
        )
        yield from _slices(run, session, processes, numbers)
        for _, rows in run.sql(_MARKS, session=session.key).batches():
            for name, ts_ns, value, text in rows:
                if value is not None:
                    value, text = (value, None) if math.isfinite(value) else (None, str(value))
                yield Sample(own, name, max(0, ts_ns), value, text)


def process_name(session: Session, pid: int) -> str:
    """`rank 3 (node1)`, and what else it takes to tell processes apart."""
    host = "" if session.info is None else session.info.host
    who = f"pid {pid}" if session.rank is None else f"rank {session.rank}"
    if session.rank is not None and pid != session.pid:
        who += f", pid {pid}"
    if session.attempt:
        who += f", attempt {session.attempt}"
    return f"{who} ({host})" if host else who


def _slices(
    run: Run, session: Session, processes: dict[int, TraceProcess], numbers: Iterator[int]
) -> Iterator[Begin | End]:
    threads: dict[tuple[int, int], list[_Stack]] = {}
    for _, rows in export.spans_in_order(run, _SPANS, _ORDER, session=session.key):
        for pid, thread_id, key, parent_key, name, start_ns, end_ns, attrs, *more, _depth in rows:
            pid = session.pid if pid is None else pid
            start_ns = max(0, start_ns)
            end = OPEN if end_ns is None else max(start_ns, end_ns)
            stacks = threads.setdefault((pid, thread_id), [])
            stack = None
            for one in stacks:
                yield from _close(one, start_ns, parent_key)
                is_inside = one.ends and one.keys[-1] == parent_key and one.ends[-1] >= end
                if stack is None and (is_inside or not one.ends):
                    stack = one
            if stack is None:
                if pid not in processes:
                    processes[pid] = TraceProcess(next(numbers), process_name(session, pid))
                main = stacks[0].track.number if stacks else None
                what = f"thread {thread_id}" + (f" +{len(stacks)}" if stacks else "")
                stack = _Stack(Track(processes[pid], next(numbers), what, main))
                stacks.append(stack)
            stack.ends.append(end)
            stack.keys.append(key)
            details = {
                name: value for name, value in zip(DETAILS, more, strict=True) if value is not None
            }
            if attrs is not None:
                details |= export.attributes(attrs)
            yield Begin(stack.track, name, start_ns, None if end == OPEN else end, details)
    for stacks in threads.values():
        for one in stacks:
            yield from _close(one, OPEN - 1, None)


def _close(stack: _Stack, now_ns: int, parent_key: int | None) -> Iterator[End]:
    """Ends what is over; a parent that ends at this moment is not, for a child without length."""
    while stack.ends and stack.ends[-1] <= now_ns:
        if stack.ends[-1] == now_ns and stack.keys[-1] == parent_key:
            return
        stack.keys.pop()
        yield End(stack.track, stack.ends.pop())
