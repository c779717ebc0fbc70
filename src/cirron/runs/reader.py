"""Reads runs from disk: the spool's batches and the black boxes beside them. Never writes.

It may read while the writer still writes and merges, so it lists the folder until nothing changes,
and leaves out a batch that another one says it replaces. What cannot be read is named, not raised.
"""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec

from cirron import errors, wire
from cirron.record import clock
from cirron.runs import tree as trees

State = Literal["running", "clean", "exception", "signal", "killed", "unknown"]

BATCH_FILES = "[0-9]" * 20 + "-*.json"

# Each listing that finds a change costs one more; a merging writer settles after two or three.
MAX_LISTINGS = 20

# A process on another host runs while its heartbeat is younger than the longer of these.
QUIET_INTERVALS = 10
QUIET_S = 30.0

# What decoding the content of a file can raise.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Ended(TypedDict, total=False):
    """How a process said that it ended."""

    how: str
    detail: str | None
    at_ns: int


class Step(TypedDict, total=False):
    """The step that a process was in last, or has last been in."""

    name: str
    index: int | None
    start_ns: int
    end_ns: int | None
    id: str


class Stack(TypedDict, total=False):
    """Where a thread was, innermost call last."""

    thread_id: int
    name: str
    frames: list[str]


# What a black box may hold, and as what. Any key may be missing; what is of another type is left
# out and named, so that whoever uses a black box need not look twice.
BLACK_BOX: dict[str, Any] = {
    "pid": int,
    "process_start": str | None,
    "heartbeat_ns": int,
    "interval_s": float,
    "ended": Ended | None,
    "open": list[dict[str, Any]],
    "last_step": Step | None,
    "silent_since_ns": int | None,
    "stacks": list[Stack] | None,
    "memory_rss_bytes": int | None,
    "counters": dict[str, Any],
}


@dataclass
class SessionRun:
    """One session of a run: a process that called `ci.profile()`, with the ones it forked."""

    session: wire.Session | None  # None: batches of other writers, which do not say who wrote them
    spans: list[wire.Span]
    marks: list[wire.Mark]
    snapshots: list[wire.Snapshot]
    blackbox: dict[str, Any] | None  # the session's own process
    forked: list[dict[str, Any]]  # the black boxes of processes that it forked
    state: State
    is_judged_by_silence: bool  # nobody saw the process: its heartbeat alone speaks for it
    # Up to when open spans count: now, the last heartbeat of a dead process, or, when there is no
    # black box, None for the latest moment that any record knows.
    now_ns: int | None
    problems: list[str] = field(default_factory=list)

    @property
    def run_id(self) -> str | None:
        """The run that this session belongs to."""
        return None if self.session is None else self.session.run_id

    @property
    def started_ns(self) -> int:
        """When the session began, as far as is known."""
        if self.session is not None:
            return self.session.clock.wall_ns
        return min((span.start_ns for span in self.spans), default=0)

    @property
    def last_ns(self) -> int:
        """The last moment that anything is known of."""
        box = self.blackbox or {}
        ended: Ended = box.get("ended") or Ended()
        heartbeat_ns: int = box.get("heartbeat_ns", 0)
        return max(
            ended.get("at_ns", 0),
            heartbeat_ns,
            max((span.end_ns or span.start_ns for span in self.spans), default=0),
            max((mark.ts_ns for mark in self.marks), default=0),
            self.started_ns,
        )

    def open_spans(self) -> list[wire.Span]:
        """The spans that the black boxes hold, the session's own process first."""
        spans = []
        for box in self._boxes():
            for entry in box.get("open", []):
                try:
                    spans.append(msgspec.convert(_OPEN_SPAN | entry, wire.Span))
                except msgspec.ValidationError as error:
                    problem = f"black box: an open span is not readable ({error})"
                    if problem not in self.problems:
                        self.problems.append(problem)
        return spans

    def tree(self) -> trees.Tree:
        """The session's spans, those of forked processes and those still open included."""
        marks = self.marks + self._unwritten_marks()
        return trees.build(self.spans, marks, self.open_spans(), self.now_ns)

    def _boxes(self) -> list[dict[str, Any]]:
        return self.forked if self.blackbox is None else [self.blackbox, *self.forked]

    def _unwritten_marks(self) -> list[wire.Mark]:
        """The latest values in the black box that no batch has: those that a kill cut off."""
        latest = {
            (str(entry.get("id")), str(name)): (value, box.get("heartbeat_ns", 0))
            for box in self._boxes()
            for entry in box.get("open", [])
            for name, value in _latest(entry).items()
            if value is not None
        }
        written: dict[tuple[str, str], wire.Mark] = {}
        for mark in self.marks if latest else ():
            key = (mark.span_id, mark.name)
            if key in latest and (key not in written or written[key].ts_ns <= mark.ts_ns):
                written[key] = mark
        return [
            wire.Mark(f"{key[0]}:{key[1]}", *key, "", value, {}, heartbeat_ns, "point")
            for key, (value, heartbeat_ns) in latest.items()
            if key not in written or written[key].value != value
        ]


_OPEN_SPAN: dict[str, Any] = {
    "id": "",
    "name": "?",
    "parent_id": None,
    "index": None,
    "end_ns": None,
    "cpu_ns": None,
    "gpu_ns": None,
    "memory_peak_bytes": None,
    "thread_id": 0,
    "pid": 0,
    "rank": None,
    "attrs": {},
    "mark_ids": [],
}


def find(path: str | os.PathLike[str]) -> Path:
    """The folder with the records, given it, its `spool`, or the project folder it lies in.

    >>> find(".")
    PosixPath('.cirron')
    """
    given = Path(path)
    for folder in (given, given / ".cirron"):
        if (folder / "spool").is_dir() or (folder / "blackbox").is_dir():
            return folder
    if given.is_dir():
        if given.name in ("spool", "blackbox"):
            return given.parent
        if given.resolve().name in ("spool", "blackbox"):  # "." inside of it
            return given.resolve().parent
        if any(given.glob(BATCH_FILES)):  # copied elsewhere
            return given
        reason = "it holds no .cirron, spool or blackbox folder"
    else:
        reason = "it is not a folder" if given.exists() else "there is no such folder"
    raise errors.SettingError(
        f"no run found in {str(given)!r}: {reason}."
        " Run your program with ci.profile() first, or name the folder that it ran in:"
        " cirron show FOLDER"
    )


def read(folder: Path, *, now_ns: int | None = None, host: str | None = None) -> list[SessionRun]:
    """All sessions in a folder that `find` gave, by start.

    `now_ns` and `host` are those of the reader: they decide which processes still run. What is
    wrong with a file that does not say whose it is comes as a session of its own.
    """
    found: defaultdict[str | None, _Found] = defaultdict(_Found)
    # Black boxes first: a span that closes in between is then in both places, not in neither.
    _read_boxes(folder / "blackbox", found)
    is_copied = not any((folder / name).is_dir() for name in ("spool", "blackbox"))
    _read_batches(folder if is_copied else folder / "spool", found)
    now_ns = clock.wall() if now_ns is None else now_ns
    host = platform.node() if host is None else host
    runs = [_session_run(one, now_ns, host) for one in found.values()]
    return sorted(runs, key=lambda run: run.started_ns)


class _Found:
    """What the files of one session hold."""

    def __init__(self) -> None:
        self.batches: list[wire.Batch] = []
        self.boxes: list[tuple[wire.Session, dict[str, Any]]] = []
        self.problems: list[str] = []


def _session_run(found: _Found, now_ns: int, host: str) -> SessionRun:
    batches, boxes = found.batches, found.boxes
    sessions = [batch.session for batch in batches if batch.session] + [who for who, _ in boxes]
    # A forked process has the session of its parent with its own pid, and begins later.
    session = min(sessions, key=lambda who: (who.clock.wall_ns, who.pid), default=None)
    own = next((box for who, box in boxes if session and who.pid == session.pid), None)
    state, is_silent = judge(own, session, now_ns, host)
    return SessionRun(
        session=session,
        spans=_unique([batch.spans for batch in batches]),
        marks=_unique([batch.marks for batch in batches]),
        snapshots=_unique([batch.snapshots for batch in batches]),
        blackbox=own,
        forked=[box for _, box in boxes if box is not own],
        state=state,
        is_judged_by_silence=is_silent,
        now_ns=(own or {}).get("heartbeat_ns"),
        problems=found.problems,
    )


def judge(
    box: dict[str, Any] | None, session: wire.Session | None, now_ns: int, host: str
) -> tuple[State, bool]:
    """How a process is or ended, and whether only the silence of its heartbeat says so."""
    if box is None or session is None:
        return "unknown", False
    if ended := box.get("ended"):
        how = ended.get("how")
        return how if how in ("clean", "exception", "signal") else "unknown", False
    if session.host == host and os.name == "posix":
        is_alive = _is_alive(session.pid, box.get("process_start"))
        return ("running" if is_alive else "killed"), False
    quiet_s = max(QUIET_S, QUIET_INTERVALS * box.get("interval_s", 0.0))
    silence_ns = now_ns - box.get("heartbeat_ns", 0)
    return ("running" if silence_ns <= quiet_s * 1e9 else "killed"), True


def _is_alive(pid: int, process_start: object) -> bool:
    """Whether this very process runs, not another one that got its id, and not its remains."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # After the program's name, which may hold anything, field 3 is the state, 22 the start.
            fields = file.read().rpartition(b")")[2].split()
        return fields[0] not in (b"Z", b"X") and process_start in (None, fields[19].decode())
    except (OSError, IndexError):
        if Path("/proc/self/stat").exists():
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it exists and belongs to somebody else
        return True
    return True


def _read_batches(spool: Path, found: defaultdict[str | None, _Found]) -> None:
    """Every batch once, by time, also while a writer adds, merges and removes files."""
    read: dict[str, wire.Batch | None] = {}
    before: set[str] | None = None
    for _ in range(MAX_LISTINGS):
        names = _list(spool)
        # Two listings in a row between which nothing went: a single one may miss a file that is
        # merged meanwhile, both under its old name and under its new one.
        is_settled = before is not None and before.issubset(names)
        before = set(names)
        for name in names:
            if name in read:
                continue
            try:
                read[name] = _decode(name, (spool / name).read_bytes(), found)
            except FileNotFoundError:  # merged, sent or given up since; the next listing tells
                is_settled = False
            except OSError as error:
                read[name] = None
                found[None].problems.append(f"{name}: cannot be read ({error.strerror})")
        if is_settled:
            break
    else:
        found[None].problems.append(f"{spool}: files come and go all the time; some may be missing")
    batches = [batch for _, batch in sorted(read.items()) if batch is not None]
    replaced = {batch_id for batch in batches for batch_id in batch.merged}
    for batch in batches:
        if batch.batch_id not in replaced:
            found[batch.session.id if batch.session else None].batches.append(batch)


def _list(spool: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(spool) if name.endswith(".json"))
    except FileNotFoundError:
        return []


def _decode(name: str, payload: bytes, found: defaultdict[str | None, _Found]) -> wire.Batch | None:
    batch = None
    head: wire.Batch | wire.Header | None
    problem = None
    try:
        batch = head = wire.decode_batch(payload)
    except UNREADABLE as error:
        head = _salvage_header(payload)
        problem = f"{name}: is no whole batch and was left out ({error})"
    if head is not None and head.schema_version > wire.SCHEMA_VERSION:
        problem = (
            f"{name}: is of schema version {head.schema_version}, newer than the"
            f" {wire.SCHEMA_VERSION} that this cirron reads;"
            f" {'it was left out' if batch is None else 'what could be read is shown'}."
            " Update: pip install -U cirron"
        )
    if problem is not None:
        owner = head.session.id if head is not None and head.session is not None else None
        found[owner].problems.append(problem)
    return batch


def _salvage_header(payload: bytes) -> wire.Header | None:
    """Who wrote a batch whose records cannot be read: our header comes first in the file."""
    try:
        return msgspec.json.decode(payload.partition(b',"spans":[')[0] + b"}", type=wire.Header)
    except UNREADABLE:
        return None


def _read_boxes(folder: Path, found: defaultdict[str | None, _Found]) -> None:
    for path in sorted(folder.glob("*.json")):
        owner = path.stem.partition("-")[0]
        try:
            box = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
            session = msgspec.convert(box.get("session"), wire.Session)
        except FileNotFoundError:
            continue
        except OSError as error:
            found[owner].problems.append(f"{path.name}: cannot be read ({error.strerror})")
            continue
        except UNREADABLE as error:
            found[owner].problems.append(f"{path.name}: is no black box of ours ({error})")
            continue
        for key in BLACK_BOX.keys() & box.keys():
            try:
                box[key] = msgspec.convert(box[key], BLACK_BOX[key])
            except msgspec.ValidationError as error:
                del box[key]
                found[session.id].problems.append(f"{path.name}: {key} is left out ({error})")
        # A forked process may still name its parent's in the session.
        session = msgspec.structs.replace(session, pid=box.get("pid", session.pid))
        found[session.id].boxes.append((session, box))


def _unique(chunks: list[list[Any]]) -> list[Any]:
    """The records of all chunks, the first copy of each."""
    records: dict[str, Any] = {}
    for chunk in chunks:
        for record in chunk:
            records.setdefault(record.id, record)
    return list(records.values())


def _latest(entry: dict[str, Any]) -> dict[str, trees.Value]:
    """The last value of each mark of an open span; null for one that JSON cannot hold."""
    try:
        return msgspec.convert(entry.get("latest", {}), dict[str, float | int | str | bool | None])
    except msgspec.ValidationError:
        return {}
