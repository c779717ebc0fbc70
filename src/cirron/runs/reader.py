"""Reads runs from disk: the spool's batches and the black boxes beside them. Never writes.

It may read while the writer still writes and merges, so it lists the folder until nothing changes.
A record counts once, by its id, however many files hold it. A file that cannot be read is named in
`problems`; it never keeps the others from being read.
"""

from __future__ import annotations

import os
import platform
import stat
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypedDict

import msgspec

from cirron import errors, system, wire
from cirron.record import clock
from cirron.runs import tree as trees
from cirron.runs import untrusted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

State = Literal["running", "clean", "exception", "signal", "killed", "unknown"]

FOLDERS = ("spool", "blackbox")
BATCH_FILES = "[0-9]" * 20 + "-*.json"

# What is larger was not written by us: batches have 2 MB, merged ones 4 MB, black boxes less.
MAX_BATCH_BYTES = 256 * 2**20
MAX_BOX_BYTES = 16 * 2**20
# Of one folder: the newest batches, up to twice the spool's default cap.
MAX_FILES = 100_000
MAX_FOLDER_BYTES = 2 * 2**30
TOO_MUCH = (
    f"holds more than the {MAX_FILES:,} files or {MAX_FOLDER_BYTES:,} bytes that are read at once;"
    " some were left out. Move files to another folder and show that one"
)
# Lists and objects inside each other. Everything that formats or encodes a record recurses.
MAX_NESTING = 64
CUT = "has a number of more than 64 bits, which was cut to 64"

# Each listing that finds a change costs one more; a merging writer settles after two or three.
MAX_LISTINGS = 20

# A process on another host runs while its heartbeat is younger than the longer of these.
QUIET_INTERVALS = 10
QUIET_S = 30.0

# What decoding the content of a file can raise.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError)


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
    "closed": list[dict[str, Any]],
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
    _opened: list[wire.Span] = field(default_factory=list)

    @property
    def run_id(self) -> str | None:
        """The run that this session belongs to."""
        return None if self.session is None else self.session.run_id

    @property
    def program(self) -> wire.Program:
        """What ran, as far as is known."""
        found = None if self.session is None else self.session.program
        return found if isinstance(found, wire.Program) else wire.Program()

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
        return self._opened

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
    inside = given / ".cirron"
    for folder in (given, inside):
        if any(_is_folder(folder / name) for name in FOLDERS):
            return folder
    if _is_folder(given):
        if given.name in FOLDERS:
            return given.parent
        if given.resolve().name in FOLDERS:  # "." inside of it
            return given.resolve().parent
        if any(given.glob(BATCH_FILES)):  # copied elsewhere
            return given
        if any(os.path.lexists(inside / name) for name in FOLDERS):
            return inside  # these are not folders; `read` says what they are
        reason = "it holds no .cirron, spool or blackbox folder"
        if os.path.lexists(inside) and not _is_folder(inside):
            reason = "its .cirron is not a folder"
    else:
        reason = "it is not a folder" if os.path.lexists(given) else "there is no such folder"
    raise errors.UnknownRunError(
        f"no run found in {str(given)!r}: {reason}."
        " Run your program with ci.profile() first, or name the folder that it ran in:"
        " cirron show FOLDER, cirron report --dir FOLDER"
    )


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except PermissionError:  # no telling what is there, so it must not count as nothing
        raise
    except (OSError, ValueError):  # nothing, a loop of links, or a path with a NUL
        return False


# A session by its id and its run's: a file that repeats the id of another run's session must not
# draw that session into its own run. None: nobody says who wrote it.
Owner: TypeAlias = tuple[str, str] | None


def _owner(session: wire.Session | None) -> Owner:
    return None if session is None else (session.id, session.run_id)


def read(folder: Path, *, now_ns: int | None = None, host: str | None = None) -> list[SessionRun]:
    """All sessions in a folder that `find` gave, by start.

    `now_ns` and `host` are those of the reader: they decide which processes still run. Problems
    with files that do not say whose they are come as a session of its own, which has no `session`.
    """
    found: defaultdict[Owner, _Found] = defaultdict(_Found)
    is_copied = not any(os.path.lexists(folder / name) for name in FOLDERS)
    # Black boxes first: a span that closes in between is then in both places, not in neither.
    problems = _read_boxes(folder / "blackbox", found)
    _read_batches(folder if is_copied else folder / "spool", found)
    by_id = {owner[0]: one for owner, one in found.items() if owner is not None}
    for session_id, problem in problems:
        one = by_id.get(session_id)
        (found[None] if one is None else one).problems.append(problem)
    now_ns = clock.wall() if now_ns is None else now_ns
    host = platform.node() if host is None else host
    runs = [_session_run(one, now_ns, host) for one in found.values()]
    return sorted(runs, key=lambda run: run.started_ns)


class Box(NamedTuple):
    """A black box: whose it is, what it holds, and the spans in it."""

    session: wire.Session
    content: dict[str, Any]
    spans: list[wire.Span]  # open
    closed: list[wire.Span]  # of which a batch may not have come to be


class _Found:
    """What the files of one session hold."""

    def __init__(self) -> None:
        self.batches: list[wire.Batch] = []
        self.boxes: list[Box] = []
        self.problems: list[str] = []


def _session_run(found: _Found, now_ns: int, host: str) -> SessionRun:
    batches, boxes = found.batches, found.boxes
    sessions = [batch.session for batch in batches if batch.session]
    sessions += [box.session for box in boxes]
    # A forked process has the session of its parent with its own pid, and begins later.
    # Of its own the last one knows the most: rank, versions and commit become known later.
    session = min(sessions[::-1], key=lambda who: (who.clock.wall_ns, who.pid), default=None)
    own = next((box for box in boxes if session and box.session.pid == session.pid), None)
    forked = [box for box in boxes if box is not own]
    content = None if own is None else own.content
    state, is_silent = judge(content, session, now_ns, host)
    return SessionRun(
        session=session,
        spans=_unique([*(batch.spans for batch in batches), *(box.closed for box in boxes)]),
        marks=_unique([batch.marks for batch in batches]),
        snapshots=_unique([batch.snapshots for batch in batches]),
        blackbox=content,
        forked=[box.content for box in forked],
        state=state,
        is_judged_by_silence=is_silent,
        now_ns=(content or {}).get("heartbeat_ns"),
        problems=found.problems,
        _opened=[span for box in ([own] if own else []) + forked for span in box.spans],
    )


def judge(
    box: dict[str, Any] | None, session: wire.Session | None, now_ns: int, host: str
) -> tuple[State, bool]:
    """How a process is or ended, and whether only the silence of its heartbeat says so."""
    if box is None or session is None:
        return "unknown", False
    if ended := box.get("ended"):
        return _ending(ended.get("how")), False
    if session.host == host:
        is_alive = system.is_alive(session.pid, box.get("process_start"))
        if is_alive is not None:
            return ("running" if is_alive else "killed"), False
    quiet_s = max(QUIET_S, QUIET_INTERVALS * box.get("interval_s", 0.0))
    silence_ns = now_ns - box.get("heartbeat_ns", 0)
    return ("running" if silence_ns <= quiet_s * 1e9 else "killed"), True


def judge_records(ended: str, silence_ns: int) -> State:
    """The same of a process whose black box is elsewhere: it sends over HTTP."""
    if ended:
        return _ending(ended)
    return "running" if silence_ns <= QUIET_S * 1e9 else "unknown"


def _ending(how: Any) -> State:
    return how if how in ("clean", "exception", "signal") else "unknown"


def _read_batches(spool: Path, found: defaultdict[Owner, _Found]) -> None:
    """Every batch once, by time, also while a writer adds, merges and removes files."""
    read: dict[str, wire.Batch | None] = {}
    left_bytes = MAX_FOLDER_BYTES
    before: set[str] | None = None
    trouble: str | None = "files come and go all the time; some may be missing"
    for _ in range(MAX_LISTINGS):
        try:
            names = _list(spool)
        except untrusted.UnreadableError as error:
            trouble = str(error)
            break
        # Two listings in a row between which nothing went: a single one may miss a file that is
        # merged meanwhile, both under its old name and under its new one.
        is_settled = before is not None and before.issubset(names)
        before = set(names)
        for name in names:
            if name in read:
                continue
            if left_bytes <= 0:
                break
            try:
                payload = untrusted.read_file(os.path.join(spool, name), MAX_BATCH_BYTES)
            except FileNotFoundError:  # merged, sent or given up since; the next listing tells
                is_settled = False
            except untrusted.UnreadableError as error:
                read[name] = None
                found[None].problems.append(f"{untrusted.shown(name)}: {error}")
            else:
                left_bytes -= len(payload)
                read[name] = _decode(name, payload, found)
        if is_settled:
            is_partial = len(names) > MAX_FILES or left_bytes <= 0
            trouble = TOO_MUCH if is_partial else None
            break
    if trouble is not None:
        found[None].problems.insert(0, f"{untrusted.shown(spool)}: {trouble}")
    for _, batch in sorted(read.items()):
        if batch is not None:
            found[_owner(batch.session)].batches.append(batch)


def _list(folder: Path) -> list[str]:
    """The names of the batches or black boxes in a folder, newest batches first."""
    try:
        return untrusted.list_files(folder, ".json", MAX_FILES + 1)
    except FileNotFoundError:
        return []


def _decode(name: str, payload: bytes, found: defaultdict[Owner, _Found]) -> wire.Batch | None:
    batch, problem, owner = decode(payload)
    if problem is not None:
        found[owner].problems.append(f"{untrusted.shown(name)}: {problem}")
    return batch


def decode(payload: bytes) -> tuple[wire.Batch | None, str | None, Owner]:
    """A batch as far as it can be read, what is wrong with it, and whose it is."""
    batch = None
    head: wire.Batch | wire.Header | None
    problem = None
    try:
        batch = wire.decode_batch(payload)
        refuse_nesting(batch)
        if not fits(batch):
            batch = msgspec.convert(wire.mend(wire.builtins(batch)), wire.Batch)
            problem = CUT
        head = batch
    except UNREADABLE as error:
        batch, head = None, _salvage_header(payload)
        problem = (
            f"is not a whole batch and was left out ({str(error) or 'it needs too much memory'})"
        )
    if head is not None and head.schema_version > wire.SCHEMA_VERSION:
        problem = (
            f"is of schema version {head.schema_version}, newer than the"
            f" {wire.SCHEMA_VERSION} that this cirron reads;"
            f" {'it was left out' if batch is None else 'what could be read is shown'}."
            " Update: pip install -U cirron"
        )
    return batch, problem, None if head is None else _owner(head.session)


def _salvage_header(payload: bytes) -> wire.Header | None:
    """Who wrote a batch whose records cannot be read: our header comes first in the file."""
    try:
        head = payload.partition(b',"spans":[')[0] + b"}"
        header = msgspec.json.decode(head, type=wire.Header)
    except UNREADABLE:
        return None
    return header if fits(header) else None


def _attributes(batch: wire.Batch) -> Iterator[Any]:
    """All values of attributes and of the configuration: what a batch may hold of any type."""
    if batch.session is not None and isinstance(batch.session.program, wire.Program):
        yield from batch.session.program.config.values()
    for records in (batch.spans, batch.marks, batch.snapshots):
        for record in records:
            if record.attrs:
                yield from record.attrs.values()


def fits(content: Any) -> bool:
    """Whether all integers have at most 64 bits. Takes a third of the time of decoding."""
    try:
        _packer.encode(content)  # MessagePack has no others, while JSON has integers of any size
    except OverflowError:
        return False
    return True


def refuse_nesting(batch: wire.Batch) -> None:
    """Raises for attributes that are too deep for who formats or encodes them."""
    _refuse_nesting(_attributes(batch))


def _refuse_nesting(values: Iterable[Any]) -> None:
    if _is_deep(values, MAX_NESTING):
        raise msgspec.ValidationError(
            f"it has lists or objects more than {MAX_NESTING} deep inside each other"
        )


def _is_deep(values: Iterable[Any], levels: int) -> bool:
    """Whether any of these values has lists or dicts inside each other deeper than this."""
    for value in values:
        if value.__class__ is dict or value.__class__ is list:
            inner = value.values() if value.__class__ is dict else value
            if not levels or _is_deep(inner, levels - 1):
                return True
    return False


def _read_boxes(folder: Path, found: defaultdict[Owner, _Found]) -> list[tuple[str, str]]:
    """Adds the black boxes, and returns what cannot be read: the session's id, and the problem."""
    problems: list[tuple[str, str]] = []
    left_bytes = MAX_FOLDER_BYTES
    try:
        names = _list(folder)
    except untrusted.UnreadableError as error:
        return [("", f"{untrusted.shown(folder)}: {error}")]
    for name in reversed(names):
        if left_bytes <= 0:
            break
        session_id = name.partition("-")[0]
        try:
            payload = untrusted.read_file(os.path.join(folder, name), MAX_BOX_BYTES)
            left_bytes -= len(payload)
            box = msgspec.json.decode(payload, type=dict[str, Any])
            _refuse_nesting(box.values())
            is_cut = not fits(box)
            if is_cut:
                box = wire.mend(box)
            session = msgspec.convert(box.get("session"), wire.Session)
        except FileNotFoundError:
            continue
        except untrusted.UnreadableError as error:
            problems.append((session_id, f"{untrusted.shown(name)}: {error}"))
            continue
        except UNREADABLE as error:
            problem = f"{untrusted.shown(name)}: is not a black box of ours ({error})"
            problems.append((session_id, problem))
            continue
        one = found[_owner(session)]
        if is_cut:
            one.problems.append(f"{untrusted.shown(name)}: {CUT}")
        for key in [key for key in BLACK_BOX if key in box]:
            try:
                box[key] = msgspec.convert(box[key], BLACK_BOX[key])
            except msgspec.ValidationError as error:
                del box[key]
                one.problems.append(f"{untrusted.shown(name)}: {key} is left out ({error})")
        spans, reasons = _spans(box.get("open", []))
        closed, more = _spans(box.pop("closed", []))
        for reason in dict.fromkeys(reasons + more):
            one.problems.append(f"{untrusted.shown(name)}: {reason}")
        # A forked process may still name its parent's in the session.
        session = wire.changed(session, pid=box.get("pid", session.pid))
        one.boxes.append(Box(session, box, spans, closed))
    if len(names) > MAX_FILES or left_bytes <= 0:
        problems.insert(0, ("", f"{untrusted.shown(folder)}: {TOO_MUCH}"))
    return problems


def read_boxes(folder: Path) -> tuple[list[Box], list[str]]:
    """The black boxes in a folder, and what cannot be read."""
    found: defaultdict[Owner, _Found] = defaultdict(_Found)
    problems = [problem for _, problem in _read_boxes(folder, found)]
    problems += [problem for one in found.values() for problem in one.problems]
    return [box for one in found.values() for box in one.boxes], problems


def latest_marks(box: Box) -> Iterator[wire.Mark]:
    """The last value of each mark of a black box's open spans."""
    for entry in box.content.get("open", []):
        for name, value in _latest(entry).items():
            if value is not None:
                kind = _TYPES.get(type(value), "float")
                id_ = str(entry.get("id"))
                at_ns = box.content.get("heartbeat_ns", 0)
                yield wire.Mark(f"{id_}:{name}", id_, name, kind, value, {}, at_ns, "point")


_TYPES = {bool: "bool", int: "int", float: "float", str: "string"}


def this_host() -> str:
    """The name that processes of this machine give as their host."""
    return platform.node()


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


_packer = msgspec.msgpack.Encoder()


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
