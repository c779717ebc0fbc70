"""Reads the black boxes next to a spool: the open spans of each process, and its state."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import msgspec

from cirron import system, wire
from cirron.runs import batches, folders, untrusted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

State = Literal["running", "clean", "exception", "signal", "killed", "unknown"]

MAX_BYTES = 16 * 2**20  # cirron never writes a larger one

# A process on another host runs while its heartbeat is younger than the longer of these.
QUIET_INTERVALS = 10
QUIET_S = 30.0


class Ended(TypedDict, total=False):
    """How a process ended, as it recorded itself."""

    how: str
    detail: str | None
    at_ns: int


class Step(TypedDict, total=False):
    """The last step of a process."""

    name: str
    index: int | None
    start_ns: int
    end_ns: int | None
    id: str


class Stack(TypedDict, total=False):
    """The stack of a thread, innermost call last."""

    thread_id: int
    name: str
    frames: list[str]


# The keys of a black box and their types. Any key may be missing. Values of another type are
# dropped and reported, so that users of a black box need no further checks.
BLACK_BOX: dict[str, Any] = {
    "pid": int,
    "process_start": str | None,
    "heartbeat_ns": int,
    "interval_s": float,
    "ended": Ended | None,
    "open": list[dict[str, Any]],
    "closed": list[dict[str, Any]],
    "last_step": Step | None,
    "silent_since_ns": int | None,
    "stacks": list[Stack] | None,
    "memory_rss_bytes": int | None,
    "counters": dict[str, Any],
}

# The values of fields that a span in a black box does not have. It always has a start.
_OPEN_SPAN: dict[str, Any] = dict.fromkeys(wire.Span.__struct_fields__)
_OPEN_SPAN |= {"id": "", "name": "?", "thread_id": 0, "pid": 0, "attrs": {}, "mark_ids": []}
del _OPEN_SPAN["start_ns"]
_TYPES = {bool: "bool", int: "int", float: "float", str: "string"}


class Box(NamedTuple):
    """A black box: its session, its content, and its spans."""

    session: wire.Session
    content: dict[str, Any]
    spans: list[wire.Span]  # open
    closed: list[wire.Span]  # which may not be in a batch


def read(folder: Path) -> tuple[list[Box], list[str]]:
    """The black boxes in a folder, and the problems."""
    found: list[Box] = []
    problems: list[str] = []
    try:
        names = untrusted.list_files(folder, ".json", folders.MAX_FILES + 1)
    except FileNotFoundError:
        return [], []
    except untrusted.UnreadableError as error:
        return [], [f"{untrusted.shown(folder)}: {error}"]
    left_bytes = folders.MAX_BOXES_BYTES
    for name in reversed(names):
        if left_bytes <= 0:
            break
        try:
            payload = untrusted.read_file(os.path.join(folder, name), MAX_BYTES)
            left_bytes -= len(payload)
            box, reasons = _decode(payload)
        except FileNotFoundError:
            continue
        except untrusted.UnreadableError as error:
            reasons = [str(error)]
        except batches.UNREADABLE as error:
            reasons = [f"is not a black box of ours ({error})"]
        else:
            found.append(box)
        problems += [f"{untrusted.shown(name)}: {reason}" for reason in reasons]
    if len(names) > folders.MAX_FILES or left_bytes <= 0:
        problems.insert(0, f"{untrusted.shown(folder)}: {folders.TOO_MUCH}")
    return found, problems


def _decode(payload: bytes) -> tuple[Box, list[str]]:
    """The valid part of a black box, and what was dropped or cut."""
    reasons = []
    content = msgspec.json.decode(payload, type=dict[str, Any])
    batches.refuse_nesting(content.values())
    if not batches.fits(content):
        content = wire.mend(content)
        reasons.append(batches.CUT)
    session = msgspec.convert(content.get("session"), wire.Session)
    for key in [key for key in BLACK_BOX if key in content]:
        try:
            content[key] = msgspec.convert(content[key], BLACK_BOX[key])
        except msgspec.ValidationError as error:
            del content[key]
            reasons.append(f"{key} is left out ({error})")
    spans, bad = _spans(content.get("open", []))
    closed, more = _spans(content.pop("closed", []))
    reasons += dict.fromkeys(bad + more)
    # The session of a forked process may still have its parent's pid.
    session = wire.changed(session, pid=content.get("pid", session.pid))
    return Box(session, content, spans, closed), reasons


def _spans(entries: list[dict[str, Any]]) -> tuple[list[wire.Span], list[str]]:
    """The spans in a black box, and why others cannot be read."""
    spans = []
    reasons = []
    for entry in entries:
        try:
            spans.append(msgspec.convert(_OPEN_SPAN | entry, wire.Span))
        except msgspec.ValidationError as error:
            reasons.append(f"a span is left out ({error})")
    return spans, reasons


def latest_marks(box: Box) -> Iterator[wire.Mark]:
    """The last value of each mark of the open spans in a black box."""
    for entry in box.content.get("open", []):
        for name, value in _latest(entry).items():
            if value is not None:
                kind = _TYPES.get(type(value), "float")
                id_ = str(entry.get("id"))
                at_ns = box.content.get("heartbeat_ns", 0)
                yield wire.Mark(f"{id_}:{name}", id_, name, kind, value, {}, at_ns, "point")


def _latest(entry: dict[str, Any]) -> dict[str, float | int | str | bool | None]:
    """The last value of each mark of an open span; null for one that JSON cannot hold."""
    try:
        return msgspec.convert(entry.get("latest", {}), dict[str, float | int | str | bool | None])
    except msgspec.ValidationError:
        return {}


def judge(box: Box, now_ns: int) -> tuple[State, bool]:
    """The state of a process, and whether it is based only on a missing heartbeat."""
    content, session = box.content, box.session
    if ended := content.get("ended"):
        return _ending(ended.get("how")), False
    if session.host == platform.node():
        is_alive = system.is_alive(session.pid, content.get("process_start"))
        if is_alive is not None:
            return ("running" if is_alive else "killed"), False
    quiet_s = max(QUIET_S, QUIET_INTERVALS * content.get("interval_s", 0.0))
    silence_ns = now_ns - content.get("heartbeat_ns", 0)
    return ("running" if silence_ns <= quiet_s * 1e9 else "killed"), True


def judge_records(ended: str, silence_ns: int) -> State:
    """The state of a process that sends over HTTP, and whose black box is elsewhere."""
    if ended:
        return _ending(ended)
    return "running" if silence_ns <= QUIET_S * 1e9 else "unknown"


def _ending(how: Any) -> State:
    return how if how in ("clean", "exception", "signal") else "unknown"
