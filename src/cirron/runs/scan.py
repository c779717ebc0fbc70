"""Finds the new batches for a store, checks them, and cuts their records out of the files.

DuckDB silently accepts a number for a string, truncates a float to an integer and turns a number of
401 digits into null, so each file is checked first. A file with the layout of cirron's writer is
cut at its arrays, which are decoded as types no wider than DuckDB's columns. Any other file is
decoded as a whole, then repaired or left out, and reported.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import os
import queue
import threading
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args, get_origin

import msgspec

from cirron import wire
from cirron.runs import batches, folders, untrusted
from cirron.runs.store import Store, StoredSession

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cirron.runs.blackboxes import Box

# Of the files of a round. A larger round takes more memory (600 MB at this size). A smaller one
# takes more time, because each statement and each file has a fixed cost in DuckDB.
ROUND_BYTES = 256 * 2**20
MAX_RECORD_BYTES = 16 * 2**20
MAX_LISTINGS = 20  # a merging writer settles after two or three
FOREIGN = "foreign"  # the run of batches without a session
RECORDS: dict[str, Any] = {"spans": wire.Span, "marks": wire.Mark, "snapshots": wire.Snapshot}
# Maximum nesting of attributes on the fast path.
_LEVELS = 4


@dataclass
class SpoolSource:
    """A folder of batches, and the open spans in its black boxes."""

    spool: Path
    boxes: list[Box]
    problems: list[str] = field(default_factory=list)
    whose: str = ""  # identifies the writer of batches without a session; default: the folder

    def tell(self, path: str | Path, problem: str) -> None:
        """Records a problem of a file. A file may be read more than once."""
        said = f"{untrusted.shown(path)}: {problem}"
        if said not in self.problems:
            self.problems.append(said)


@dataclass
class BatchFile:
    """A new batch file."""

    path: str
    name: str
    size: int
    source: SpoolSource
    is_mended: bool = False  # it is read each time, so that its problem is reported each time


class BatchRow(NamedTuple):
    """A batch that was read: a row of its run's `batches`."""

    run_id: str
    batch_id: str
    file: str | None
    created_ns: int


class Round:
    """The records of some files, as JSON arrays: one file per session and table."""

    def __init__(self, store: Store, files: list[BatchFile]) -> None:
        self.files = files
        self.batches: list[BatchRow] = []
        self.sessions: list[StoredSession] = []
        self.arrays: dict[str, dict[int, Path]] = {table: {} for table in RECORDS}
        self._store = store

    def add(self, table: str, session: int, array: bytes | memoryview) -> None:
        paths = self.arrays[table]
        opening = b"," if session in paths else b"["
        path = paths.setdefault(session, self._store.new_file())
        with open(path, "ab") as file:  # not kept open: there may be a thousand ranks
            file.write(opening)
            file.write(memoryview(array)[1:-1])

    def close(self) -> None:
        for path in self._paths():
            with open(path, "ab") as file:
                file.write(b"]")

    def remove(self) -> None:
        for path in self._paths():
            path.unlink(missing_ok=True)

    def _paths(self) -> Iterator[Path]:
        return (path for paths in self.arrays.values() for path in paths.values())


class Scan:
    """One scan of the files of sources."""

    def __init__(self, store: Store, seen: set[str], names: set[str]) -> None:
        self._store = store
        self._seen = seen  # batches
        self._names = names  # of files
        self.is_missed = False  # a file disappeared before it was read, for example by merging

    def fresh(self, sources: list[SpoolSource]) -> list[BatchFile]:
        """The files that are not in the store, newest first."""
        found = []
        for source in sources:
            try:
                names = self._list(source.spool)
            except FileNotFoundError:
                continue
            except untrusted.UnreadableError as error:
                source.tell(source.spool, str(error))
                continue
            if len(names) > folders.MAX_FILES:
                source.tell(source.spool, folders.TOO_MUCH)
            for name in names:
                if name not in self._names:
                    path = os.path.join(source.spool, name)
                    try:
                        size = os.lstat(path).st_size
                    except OSError:  # merged in the meantime; the next scan finds the merged file
                        self.is_missed = True
                        continue
                    found.append(BatchFile(path, name, size, source))
        found.sort(key=lambda one: one.name, reverse=True)
        return found

    def _list(self, spool: Path) -> list[str]:
        """The names of the files in a spool.

        A merged file is created before its parts are deleted, but a single listing may miss both.
        So this lists until no file has disappeared between two listings.
        """
        before: set[str] | None = None
        for _ in range(MAX_LISTINGS):
            names = untrusted.list_files(spool, ".json", folders.MAX_FILES + 1)
            if len(names) > folders.MAX_FILES or (before is not None and before.issubset(names)):
                return names
            before = set(names)
        self.is_missed = True
        return names

    def rounds(self, files: list[BatchFile]) -> Iterator[Round]:
        """Reads ahead by one round, while DuckDB works on the previous one."""
        ready: queue.Queue[Round | BaseException | None] = queue.Queue(1)
        stop = threading.Event()

        def produce() -> None:
            try:
                at = 0
                while at < len(files) and not stop.is_set():
                    end, size = at, 0
                    most = ROUND_BYTES if at else ROUND_BYTES // 8  # DuckDB waits for the first
                    while end < len(files) and (end == at or size < most):
                        size += files[end].size
                        end += 1
                    ready.put(self.read(files[at:end]))
                    at = end
                ready.put(None)
            except BaseException as error:  # noqa: BLE001  raised again where it is waited for
                ready.put(error)

        thread = threading.Thread(target=produce, name="cirron-ingest", daemon=True)
        thread.start()
        try:
            while (one := ready.get()) is not None:
                if isinstance(one, BaseException):
                    raise one
                yield one
        finally:
            stop.set()
            while thread.is_alive() or not ready.empty():
                try:
                    unused = ready.get(timeout=0.05)
                except queue.Empty:
                    continue
                if isinstance(unused, Round):
                    unused.remove()

    def read(self, files: list[BatchFile], *, again: bool = False) -> Round:
        """The new records of files.

        `again`: DuckDB rejected what was cut out of them, so they are decoded and encoded again.
        """
        out = Round(self._store, files)
        for file in files:
            batch, arrays = self._read_file(file, again=again)
            if batch is None:
                continue
            run_id = FOREIGN if batch.session is None else batch.session.run_id
            is_new = again or not (
                batch.batch_id in self._seen
                or (batch.merged and self._seen.issuperset(batch.merged))
            )
            if is_new or not file.is_mended:
                name = None if file.is_mended else file.name
                out.batches.append(BatchRow(run_id, batch.batch_id, name, batch.created_ns))
            if not is_new:
                continue
            self._seen.add(batch.batch_id)
            session = stored_session(batch.session, file.source)
            out.sessions.append(session)
            for table, array in arrays.items():
                out.add(table, session.key, array)
        out.close()
        return out

    def _read_file(self, file: BatchFile, *, again: bool) -> tuple[wire.Batch | None, Arrays]:
        try:
            payload = untrusted.read_file(file.path, batches.MAX_BYTES)
        except FileNotFoundError:
            self.is_missed = True
            return None, {}
        except untrusted.UnreadableError as error:
            file.source.tell(file.name, str(error))
            return None, {}
        batch, arrays, problem = check(payload, encode_again=again)
        if problem is not None:
            file.is_mended = True
            file.source.tell(file.name, problem)
        return batch, arrays


# The arrays of a batch that are not empty, by table.
Arrays = dict[str, bytes | memoryview]


def check(
    payload: bytes, *, encode_again: bool = False
) -> tuple[wire.Batch | None, Arrays, str | None]:
    """The readable part of a batch, its records, and its problems.

    `encode_again`: decode and encode the records, even if the file has cirron's layout.
    """
    cut = None if encode_again else wire.cut_batch(payload)
    if cut is not None:
        head, sections = cut
        batch, problem = batches.decode(head)
        if batch is not None and problem is None:
            arrays = _narrow(batch, dict(zip(RECORDS, sections, strict=True)))
            if arrays is not None:
                return batch, arrays, None
    batch, problem = batches.decode(payload)
    if batch is None:
        return None, {}, problem
    arrays = _narrow(batch, _encode(batch))
    if arrays is None:
        batch = msgspec.convert(wire.mend(wire.builtins(batch)), wire.Batch)
        arrays = _encode(batch)
        records = (one for table in arrays for one in getattr(batch, table))
        if any(map(_is_large, arrays.values())) and any(
            _is_large(wire.encode(one)) for one in records
        ):
            return None, {}, f"has a record of more than {MAX_RECORD_BYTES:,} bytes; was left out"
    return batch, arrays, problem


def _encode(batch: wire.Batch) -> Arrays:
    return {table: wire.encode(one) for table in RECORDS if (one := getattr(batch, table))}


def _is_large(text: bytes | memoryview) -> bool:
    return len(text) > MAX_RECORD_BYTES


def _narrow(batch: wire.Batch, arrays: Arrays) -> Arrays | None:
    """The arrays that are not empty; None if any value does not fit into DuckDB's columns."""
    said = wire.builtins([batch.created_ns, batch.session])
    if wire.mend(said) != said or any(map(_is_large, arrays.values())):
        return None
    try:
        return {table: one for table, one in arrays.items() if _decoders[table].decode(one)}
    except batches.UNREADABLE:
        return None


_INTEGER = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


def _strict(kind: Any, levels: int = _LEVELS) -> Any:
    """A type with integers of at most 64 bits, and attributes nested at most `levels` deep."""
    if kind is Any:
        plain = str | _INTEGER | float | bool | None
        if not levels:
            return plain
        inner = _strict(Any, levels - 1)
        return plain | _tuple(inner) | types.GenericAlias(dict, (str, inner))
    if kind is int:
        return _INTEGER
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return msgspec.defstruct(
            kind.__name__,
            [
                (one.name, _strict(one.type), *(() if one.required else (one.default,)))
                for one in msgspec.structs.fields(kind)
            ],
            gc=False,
        )
    inside = tuple(_strict(one) for one in get_args(kind))
    origin = get_origin(kind)
    if origin is types.UnionType:
        return functools.reduce(operator.or_, inside)
    if origin is list:  # an empty tuple takes no memory, which is a third of the time
        return _tuple(inside[0])
    return kind if origin is None else origin[inside]


def _tuple(kind: Any) -> Any:
    return types.GenericAlias(tuple, (kind, ...))


_decoders: dict[str, msgspec.json.Decoder[tuple[Any, ...]]] = {
    table: msgspec.json.Decoder(_tuple(_strict(record))) for table, record in RECORDS.items()
}


def session_key(session_id: str, run_id: str) -> int:
    """The number of a session. It depends on the run, too: any file may repeat a session's id."""
    digest = hashlib.sha256(f"{run_id}\n{session_id}".encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def stored_session(session: wire.Session | None, source: SpoolSource) -> StoredSession:
    """The session that wrote a file; for other writers, only the folder is known."""
    if session is None:
        return StoredSession(
            key=session_key(source.whose or str(source.spool), FOREIGN), run_id=FOREIGN
        )
    return StoredSession(
        key=session_key(session.id, session.run_id),
        session=session,
        run_id=session.run_id,
        pid=session.pid,
        rank=session.rank,
    )
