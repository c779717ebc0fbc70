"""Reads folders and stores, and lists the sessions and runs in them.

Records in a spool are first moved into its store, so a second refresh costs only what was added.
The store is next to the spool, or in a temporary folder if that one is read-only. Records that are
only in black boxes (open spans, the last marks of a killed process) go into a second, temporary
store, which is replaced at each refresh.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cirron import errors, wire
from cirron.record import clock
from cirron.runs import blackboxes, folders, objects
from cirron.runs import engine as engines
from cirron.runs.opened import Run, Runs, Session
from cirron.runs.placement import LAST_NS, LONGEST_NS, moment
from cirron.runs.store import MANIFESTS, DamagedError, Segment, Store, StoredSession

if TYPE_CHECKING:
    from collections.abc import Sequence

STORE = "store"
RECEIVED = "server"  # in a `.cirron`: what `cirron serve` keeps there


@dataclass
class Look:
    """The result of one refresh. It never changes, so threads can share it."""

    sessions: dict[int, Session]
    held: list[tuple[Store, list[Segment]]]
    problems: list[str]
    runs: dict[str, Run] = field(default_factory=dict)

    @cached_property
    def sessions_by_run(self) -> dict[str, list[Session]]:
        found: dict[str, list[Session]] = {}
        for one in sorted(
            self.sessions.values(),
            key=lambda one: (one.attempt, one.rank is None, one.rank or 0, one.first_ns),
        ):
            found.setdefault(one.run_id, []).append(one)
        return found

    def files_of(self, run_id: str) -> engines.Files:
        found = engines.Files({table: [] for table in engines.FILES}, {})
        for store, segments in self.held:
            for segment in segments:
                if segment.run_id != run_id:
                    continue
                paths = {one: store.files(one, segments=[segment]) for one in found.tables}
                for table, its in paths.items():
                    found.tables[table] += its
                if "steps" not in segment.rows:
                    found.tables["new_spans"] += paths["spans"]
                    found.tables["new_marks"] += paths["marks"]
                if paths["spans"]:
                    found.spans_by_level.setdefault(segment.finest_level, []).extend(paths["spans"])
        return found


class Place:
    """Folders of records, stores, or both. Thread-safe."""

    def __init__(
        self,
        where: Sequence[str | os.PathLike[str]],
        spark: Any = None,
        *,
        may_be_empty: bool = False,
    ) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="cirron-"))
        self._finalizer = weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        self.where = list(where)
        self._spark = spark
        self._root = engines.duckdb()  # runs no queries; only creates cursors
        self._db = self._root.cursor()  # for ingest
        self._db.execute(f"SET temp_directory = '{self._scratch}'")
        found = dict.fromkeys(one for given in where for one in find_all(given))
        self._given = [Store.open(one, self._scratch) for one in found if is_store(one)]
        self._folders = [Path(one) for one in found if not is_store(one)]
        self._stores: dict[Path, Store] = {}  # by folder
        self._boxes: list[blackboxes.Box] = []
        self._listed: object = None
        self._refreshing = threading.Lock()
        self._look: Look
        self.refresh()
        if not self._look.sessions and not may_be_empty:
            raise no_records(self.problems)

    @property
    def problems(self) -> list[str]:
        """The files that could not be read, and why."""
        return self._look.problems

    @property
    def folder_stores(self) -> list[Store]:
        """The stores of the folders, without those that were given as stores."""
        return list(self._stores.values())

    @property
    def stores(self) -> list[Store]:
        return [*self._given, *self.folder_stores]

    def refresh(self) -> bool:
        """Reads new records. Returns True if there are any, or if a process ended.

        Takes milliseconds if nothing is new. Existing `Run` objects do not change: get new ones
        from `runs`.
        """
        with self._refreshing:
            listed = self._list()
            is_new = listed != self._listed or not all(one.is_newest() for one in self.stores)
            if is_new:
                problems, held = self._read()
                self._listed = listed
            else:
                problems, held = self._look.problems, self._look.held
            sessions = self._judge(held)
            if not is_new and sessions == self._look.sessions:
                return False
            self._look = Look(sessions, held, problems)
            return True

    def _list(self) -> object:
        """A value that changes when a folder changes. Batches never change; black boxes do."""
        found: list[object] = []
        for folder in self._folders:
            for name in (".", *folders.FOLDERS):
                is_box = name == "blackbox"
                try:
                    with os.scandir(folder / name) as entries:
                        found.append(
                            {
                                (one.name, is_box and one.stat(follow_symlinks=False).st_mtime_ns)
                                for one in entries
                                if one.name != STORE  # created by the first refresh
                            }
                        )
                except OSError:  # not there yet, or a file was deleted in the meantime
                    found.append(None)
        return found

    def _read(self) -> tuple[list[str], list[tuple[Store, list[Segment]]]]:
        """Brings each folder's store up to date; records only in black boxes are kept apart."""
        from duckdb import Error as DatabaseError

        from cirron.runs.ingest import Ingest
        from cirron.runs.scan import SpoolSource

        self._boxes = []
        self._problems: list[str] = []
        sources = []
        for folder in self._folders:
            # Black boxes first: a span that closes in between is then in both places.
            boxes, problems = blackboxes.read(folder / "blackbox")
            self._boxes += boxes
            is_copied = not any(os.path.lexists(folder / name) for name in folders.FOLDERS)
            source = SpoolSource(folder if is_copied else folder / "spool", boxes, problems)
            store = self._stores.get(folder) or self._store_of(folder)
            try:
                store.read_newest()
                Ingest(store, self._db).run([source])
                if store.tidy(self._db):
                    store.clean()
                store.check(self._db)
            except (DamagedError, DatabaseError, OSError) as error:
                if isinstance(error, OSError):  # a full disk
                    told = f"{error.strerror or error}; a temporary store is used instead"
                else:
                    told = str(error).partition("\n")[0] + "; delete it, and it is created again"
                source.problems.append(f"{folder / STORE}: {told}")
                store = self._new_store()
                Ingest(store, self._db).run([source])
            self._stores[folder] = store
            self._problems += source.problems
            sources.append(source)
        for store in self._given:
            store.read_newest()
        stores = self.stores
        if self._boxes:
            beside = self._new_store()
            Ingest(beside, self._db).complete(sources, stores)
            stores.append(beside)
        return self._problems, self._once(stores)

    def _once(self, stores: list[Store]) -> list[tuple[Store, list[Segment]]]:
        """The segments of the stores; of a run whose batches are in several stores, one copy.

        A server may have received what is also in a folder.
        """
        held = [(one, list(one.manifest.segments)) for one in stores]
        by_session: dict[int, int] = {}
        shared: set[str] = set()
        for store in self.stores:
            for one in store.manifest.sessions:
                by_session[one.key] = by_session.get(one.key, 0) + 1
                if by_session[one.key] > 1:
                    shared.add(one.run_id)
        for run_id in shared:
            seen: list[tuple[Store, set[str]]] = []
            for store in self.stores:
                its = [one for one in store.manifest.segments if one.run_id == run_id]
                if its:
                    seen.append((store, store.seen(self._db, its)))
            every = set().union(*(ids for _, ids in seen))
            if len(every) == sum(len(ids) for _, ids in seen):
                continue
            best = next((store for store, ids in reversed(seen) if ids == every), None)
            if best is None:
                best = self._new_store()
                for store, _ in reversed(seen):
                    store.compact(self._db, best, run_id)
                held.append((best, list(best.manifest.segments)))
            gone = {id(store) for store, _ in seen if store is not best}
            held = [
                (store, [one for one in its if one.run_id != run_id or id(store) not in gone])
                for store, its in held
            ]
        return held

    def _new_store(self) -> Store:
        """A temporary store, which exists as long as it is in use."""
        folder = self._scratch / clock.random_id()
        store = Store.open(folder, self._scratch)
        weakref.finalize(store, shutil.rmtree, folder, ignore_errors=True).atexit = False
        return store

    def _store_of(self, folder: Path) -> Store:
        where = folder / STORE
        if not os.path.islink(where):  # links are never followed
            try:
                os.makedirs(where, mode=0o700, exist_ok=True)
                if os.access(where, os.W_OK | os.X_OK):
                    return Store.open(where, self._scratch)
            except DamagedError as error:
                self._problems.append(f"{where}: {error}; delete it, and it is created again")
            except OSError:  # a read-only folder
                pass
        return self._new_store()

    def compact(self, target: str | os.PathLike[str] | None) -> dict[str, int]:
        """Merges small segments in each store, or writes all of them to another store."""
        into = None if target is None else Store.open(target, self._scratch)
        merged = removed = 0
        for store in self.stores:
            merged += store.compact(self._db, into)
        for store in self.stores if into is None else [into]:
            removed += store.clean()
        return {"merged": merged, "removed": removed}

    # -- sessions ---------------------------------------------------------------------------

    def _judge(self, held: list[tuple[Store, list[Segment]]]) -> dict[int, Session]:
        """All sessions by start, with the state that the black box and the last records show."""
        from cirron.runs.scan import session_key

        known: dict[int, StoredSession] = {}
        for store, _ in held:
            for one in store.manifest.sessions:
                known.setdefault(one.key, one)
        boxes: dict[int, list[blackboxes.Box]] = {}
        for box in self._boxes:
            key = session_key(box.session.id, box.session.run_id)
            boxes.setdefault(key, []).append(box)
        now_ns = clock.wall()
        sessions = {}
        for key, one in known.items():
            info = one.session
            own = next(
                (box for box in boxes.get(key, ()) if info and box.session.pid == info.pid), None
            )
            if own is None:
                state, is_silent = blackboxes.judge_records(one.ended, now_ns - one.last_ns), False
            else:
                state, is_silent = blackboxes.judge(own, now_ns)
            content = {} if own is None else own.content
            ended = content.get("ended") or {}
            first_ns = moment(info.clock.wall_ns if info else one.first_ns)
            sessions[key] = Session(
                key=key,
                info=info,
                run_id=one.run_id,
                rank=one.rank,
                pid=one.pid,
                state=state,
                first_ns=first_ns,
                last_ns=max(
                    moment(ended.get("at_ns", 0)),
                    moment(content.get("heartbeat_ns", 0)),
                    one.last_ns,
                    first_ns,
                ),
                is_judged_by_silence=is_silent,
                box=own,
                forked=[box for box in boxes.get(key, ()) if box is not own],
            )
        return dict(sorted(sessions.items(), key=lambda pair: pair[1].first_ns))

    # -- runs -------------------------------------------------------------------------------

    @property
    def runs(self) -> Runs:
        started: dict[str, int] = {}
        for one in self._look.sessions.values():
            started[one.run_id] = max(started.get(one.run_id, 0), one.first_ns)
        return Runs(self, sorted(started, key=lambda run_id: started[run_id]))

    def run(self, run_id: str) -> Run:
        look = self._look
        return look.runs.get(run_id) or look.runs.setdefault(run_id, Run(self, run_id, look))

    def engine_of(self, run: Run, look: Look) -> engines.Engine:
        files = look.files_of(run.id)
        sessions = self._write_sessions(run)
        files.tables["sessions"] = [str(sessions)]
        engine: engines.Engine
        if self._spark is not None:
            engine = engines.Spark(self._spark, files, self._scratch)
        else:
            engine = engines.DuckDB(self._root, files)
        engine.owner = (self, look)  # deletes temporary files when these are collected
        weakref.finalize(engine, sessions.unlink, missing_ok=True).atexit = False
        return engine

    def _write_sessions(self, run: Run) -> Path:
        lines = self._scratch / f"{clock.random_id()}.json"
        path = lines.with_suffix(".parquet")
        rows = []
        for one in run.sessions:
            info = one.info
            row = {
                "session": one.key,
                "session_id": one.id,
                "run_id": one.run_id,
                "attempt": one.attempt,
                "rank": None if one.rank is None else max(one.rank, -LAST_NS),
                "pid": one.pid,
                "state": one.state,
                "first_ns": one.first_ns,
                "last_ns": one.last_ns,
                "program": wire.encode(one.program).decode(),
            }
            if info is not None:
                row |= {name: getattr(info, name) for name in ("local_rank", "world_size", "host")}
                row["uncertainty_ns"] = min(moment(info.clock.uncertainty_ns), LONGEST_NS)
            rows.append(wire.encode(row))
        lines.write_bytes(b"\n".join(rows))
        kinds = ", ".join(f"'{name}': '{kind}'" for name, kind in engines.SESSIONS.items())
        self._root.cursor().execute(
            f"COPY (SELECT * FROM read_json($lines, format = 'newline_delimited',"
            f" columns = {{{kinds}}})) TO '{path}' (FORMAT parquet)",
            {"lines": str(lines)},
        )
        lines.unlink()
        return path


def of_batch(content: bytes) -> Run:
    """The run of one batch that is not in a folder."""
    folder = Path(tempfile.mkdtemp(prefix="cirron-"))
    (folder / "spool").mkdir()
    (folder / "spool" / f"{0:020d}-{0:032x}.json").write_bytes(content)
    place = Place([folder])
    weakref.finalize(place, shutil.rmtree, folder, ignore_errors=True)
    return place.runs.latest


def is_store(where: str | os.PathLike[str]) -> bool:
    """Whether this is a store: an address, or a folder with manifests."""
    text = os.fspath(where)
    return objects.is_url(text) or os.path.isdir(os.path.join(text, MANIFESTS))


def find_all(where: str | os.PathLike[str]) -> list[str]:
    """The store at a path; or the folders with records, and the stores of servers in them."""
    if is_store(where):
        return [os.fspath(where)]
    found: list[Path] = []
    missing: errors.UnknownRunError | None = None
    try:
        found = folders.find_all(where)
    except errors.UnknownRunError as error:
        missing = error
    around = found or [Path(where), Path(where) / ".cirron"]
    found += [one / RECEIVED for one in around if is_store(one / RECEIVED)]
    if missing is not None and not found:
        raise missing
    return [str(one) for one in found]


def no_records(problems: Sequence[str]) -> errors.SettingError:
    """The error for a place without records, or without readable records."""
    if problems:
        more = [f"and {len(problems) - 20:,} more"] if len(problems) > 20 else []
        shown = "\n".join([*problems[:20], *more])
        return errors.SettingError(f"none of the files can be read: {shown}")
    return errors.UnknownRunError(
        "the folder has no records yet. A run writes its first records after one flush interval"
        " (a second by default): try again then, or after the program has ended"
    )
