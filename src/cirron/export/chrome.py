"""Trace events as JSON, which chrome://tracing, Perfetto and many other viewers open.

Times are microseconds since the start of the run: as a float, a time since 1970 has no nanoseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cirron import export, wire
from cirron.export import timeline

if TYPE_CHECKING:
    from cirron.runs.opened import Run

CHUNK_BYTES = 1 << 20


def write(run: Run, path: str) -> None:
    """Writes a `.json` file of trace events."""
    first = run.sql("SELECT min(start_ns) AS ns FROM spans UNION ALL SELECT min(ts_ns) FROM marks")
    began_ns = min(
        [run.started_ns, *(max(0, ns) for (ns,) in first.fetch().rows if ns is not None)]
    )
    about = {"run": run.id, "started_ns": began_ns}
    known: set[int] = set()
    with export.new_file(path) as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":' + wire.encode(about))
        file.write(b',"traceEvents":[\n')
        pieces: list[bytes] = []
        size = 0
        for event in timeline.events(run):
            if isinstance(event, timeline.End):
                continue  # `Begin` has the duration
            for one in _named(event, known):
                pieces.append(wire.encode(one))
            pieces.append(wire.encode(_event(event, began_ns)))
            size += len(pieces[-1])
            if size > CHUNK_BYTES:
                file.write(b",\n".join(pieces) + b",\n")
                pieces, size = [], 0
        # JSON allows no comma before the end, so the last event is an empty one.
        pieces.append(wire.encode({"ph": "M", "pid": 0, "name": "process_name", "args": {}}))
        file.write(b",\n".join(pieces) + b"]}\n")


def _named(event: timeline.Begin | timeline.Sample, known: set[int]) -> list[dict[str, Any]]:
    """Events that name the process and the thread of an event, the first time they occur."""
    found: list[dict[str, Any]] = []
    track = event.track if isinstance(event, timeline.Begin) else None
    process = event.track.process if isinstance(event, timeline.Begin) else event.process
    if process.number not in known:
        known.add(process.number)
        found.append(_name("process_name", process.number, 0, process.name))
    if track is not None and track.number not in known:
        known.add(track.number)
        found.append(_name("thread_name", process.number, track.number, track.name))
    return found


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _event(event: timeline.Begin | timeline.Sample, began_ns: int) -> dict[str, Any]:
    if isinstance(event, timeline.Begin):
        slice_: dict[str, Any] = {
            "ph": "B" if event.end_ns is None else "X",
            "name": event.name,
            "pid": event.track.process.number,
            "tid": event.track.number,
            "ts": _us(event.start_ns - began_ns),
        }
        if event.end_ns is not None:
            slice_["dur"] = _us(event.end_ns - event.start_ns)
        return slice_ | ({"args": event.details} if event.details else {})
    value = {"ts": _us(event.ts_ns - began_ns), "name": event.name, "pid": event.process.number}
    if event.value is None:
        return {"ph": "i", "s": "p", "tid": 0, **value, "args": {"value": event.text}}
    return {"ph": "C", **value, "args": {"value": event.value}}


def _us(ns: int) -> msgspec.Raw:
    """Microseconds to the nanosecond, without the rounding of a float."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return msgspec.Raw(f"{sign}{ns // 1000}.{ns % 1000:03d}".encode())
