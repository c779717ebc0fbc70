"""Finds the new batches for a store, checks them, and cuts their records out of the files.

DuckDB takes a number for a string, cuts a float to an integer and turns one of 401 digits into
null, without a word, so each file is checked first. One that is laid out as our writer does it is
cut at its arrays, and these are decoded as types that are no wider than DuckDB's columns. Any other
is decoded as a whole, mended or left out, and named.
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
from cirron.runs.store import Known, Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cirron.runs.blackboxes import Box

# A round of files: more takes more memory (600 MB at this size), less takes more time, since each
# statement and each file costs DuckDB a little.
ROUND_BYTES = 256 * 2**20
MAX_RECORD_BYTES = 16 * 2**20
MAX_LISTINGS = 20  # a merging writer settles after two or three
FOREIGN = "foreign"  # the run of batches without a session
RECORDS: dict[str, Any] = {"spans": wire.Span, "marks": wire.Mark, "snapshots": wire.Snapshot}
# Maximum nesting of attributes on the fast path.
_LEVELS = 4


@dataclass
class Source:
    """A folder of batches, and the open spans in its black boxes."""

    spool: Path
    boxes: list[Box]
    problems: list[str] = field(default_factory=list)
    whose: str = ""  # stands for the folder where that changes: the writer of unsigned batches

    def tell(self, path: str | Path, problem: str) -> None:
        """Records a problem of a file. A file may be read more than once."""
        said = f"{untrusted.shown(path)}: {problem}"
        if said not in self.problems:
            self.problems.append(said)


@dataclass
class File:
    """A new batch file."""

    path: str
    name: str
    size: int
    source: Source
    is_mended: bool = False  # it is read each time, so that its problem is reported each time


class Batch(NamedTuple):
    """A batch that was read: a row of its run's `batches`."""

    run_id: str
    batch_id: str
    file: str | None
    created_ns: int


class Round:
    """The records of some files, as JSON arrays: one file per session and table."""

    def __init__(self, store: Store, files: list[File]) -> None:
        self.files = files
        self.batches: list[Batch] = []
        self.sessions: list[Known] = []
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

    def fresh(self, sources: list[Source]) -> list[File]:
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
                    found.append(File(path, name, size, source))
        found.sort(key=lambda one: one.name, reverse=True)
        return found

    def _list(self, spool: Path) -> list[str]:
        """The names of the files in a spool.

        A merged file is there before its parts go, but one listing may pass by its place too early
        and come to theirs too late. So this lists until nothing went between two listings.
        """
        before: set[str] | None = None
        for _ in range(MAX_LISTINGS):
            names = untrusted.list_files(spool, ".json", folders.MAX_FILES + 1)
            if len(names) > folders.MAX_FILES or (before is not None and before.issubset(names)):
                return names
            before = set(names)
        self.is_missed = True
        return names

    def rounds(self, files: list[File]) -> Iterator[Round]:
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

    def read(self, files: list[File], *, again: bool = False) -> Round:
        """The new records of files. `again`: they were read before, but DuckDB did not take them;
        all of each is written anew.
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
                out.batches.append(Batch(run_id, batch.batch_id, name, batch.created_ns))
            if not is_new:
                continue
            self._seen.add(batch.batch_id)
            session = known(batch.session, file.source)
            out.sessions.append(session)
            for table, array in arrays.items():
                out.add(table, session.key, array)
        out.close()
        return out

    def _read_file(self, file: File, *, again: bool) -> tuple[wire.Batch | None, Arrays]:
        try:
            payload = untrusted.read_file(file.path, batches.MAX_BYTES)
        except FileNotFoundError:
            self.is_missed = True
            return None, {}
        except untrusted.UnreadableError as error:
            file.source.tell(file.name, str(error))
            return None, {}
        batch, arrays, problem = check(payload, anew=again)
        if problem is not None:
            file.is_mended = True
            file.source.tell(file.name, problem)
        return batch, arrays


# The arrays of a batch that are not empty, by table.
Arrays = dict[str, bytes | memoryview]


def check(payload: bytes, *, anew: bool = False) -> tuple[wire.Batch | None, Arrays, str | None]:
    """The readable part of a batch, its records, and its problems.

    `anew`: the records are encoded once more, whatever the file is like.
    """
    cut = None if anew else wire.cut_batch(payload)
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
    """The arrays that are not empty, if they and their batch are as narrow as DuckDB's columns."""
    said = wire.builtins([batch.created_ns, batch.session])
    if wire.mend(said) != said or any(map(_is_large, arrays.values())):
        return None
    try:
        return {table: one for table, one in arrays.items() if _decoders[table].decode(one)}
    except batches.UNREADABLE:
        return None


_INTEGER = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


def _strict(kind: Any, levels: int = _LEVELS) -> Any:
    """A type with integers of at most 64 bits, and values of any kind nested only so deep."""
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
                (one.name, _strict(one.type))
                if one.required
                else (one.name, _strict(one.type), one.default)
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
    """The number of a session: of an id and a run, since any file may repeat an id."""
    digest = hashlib.sha256(f"{run_id}\n{session_id}".encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def known(session: wire.Session | None, source: Source) -> Known:
    """The session that wrote a file; for other writers, only the folder is known."""
    if session is None:
        return Known(key=session_key(source.whose or str(source.spool), FOREIGN), run_id=FOREIGN)
    return Known(
        key=session_key(session.id, session.run_id),
        session=session,
        run_id=session.run_id,
        pid=session.pid,
        rank=session.rank,
    )
