"""The store: a run's records as Parquet, for queries. Files are immutable and listed in a manifest.

    manifest/00000000000000000007.json      the newest one lists all segments and sessions
    run-<run>/<segment>-spans.parquet       and marks, snapshots, batches

The `batches` table of a segment lists the batches in it; a batch in that list is not read again. A
manifest is committed by creating it. A writer that finds the number taken reads the new manifest
and starts again. So neither a crash nor several writers lose or duplicate a record: readers ignore
files that no manifest lists, and these are deleted later.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from cirron import errors, wire
from cirron.record import clock
from cirron.runs import objects, untrusted
from cirron.runs.derived import derive

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

SCHEMA = 1
MANIFESTS = "manifest/"
# Replaced and uncommitted files are kept this long for readers and writers that still use them.
GRACE_S = 3600.0
KEPT_MANIFESTS = 10
# Segments are merged until they reach this size.
SMALL_BYTES = 64 * 2**20
# This many segments of about the same size are merged into one.
MANY = 16

# The tables of a segment. A `key` identifies a record in joins, within a session. Times are
# nanoseconds since 1970. The columns after `attrs` say where a record is in its tree.
TABLES: dict[str, dict[str, str]] = {
    "spans": {
        "session": "BIGINT",
        "rank": "BIGINT",
        "pid": "BIGINT",
        "thread_id": "BIGINT",
        "id": "VARCHAR",
        "key": "BIGINT",
        "parent_id": "VARCHAR",
        "parent_key": "BIGINT",
        "name": "VARCHAR",
        "index": "BIGINT",
        "start_ns": "BIGINT",
        "end_ns": "BIGINT",
        "cpu_ns": "BIGINT",
        "gpu_ns": "BIGINT",
        "memory_peak_bytes": "BIGINT",
        "mode": "VARCHAR",
        "error": "VARCHAR",
        "attrs": "VARCHAR",
        "parent_name": "VARCHAR",
        "path": "VARCHAR",
        "depth": "INTEGER",
        "epoch": "BIGINT",
        "epoch_key": "BIGINT",
        "step": "BIGINT",
        "step_key": "BIGINT",
        "in_evaluation": "BOOLEAN",
        "in_aside": "BOOLEAN",  # an evaluation, a checkpoint, a snapshot or a compilation
        "is_training_step": "BOOLEAN",
        "in_thread": "BOOLEAN",  # of its parent
        "in_step": "BOOLEAN",  # its parent is a training step, in the same thread
    },
    "marks": {
        "session": "BIGINT",
        "rank": "BIGINT",
        "id": "VARCHAR",
        "key": "BIGINT",
        "span_id": "VARCHAR",
        "span_key": "BIGINT",
        "name": "VARCHAR",
        "value": "DOUBLE",
        "text": "VARCHAR",
        "value_type": "VARCHAR",
        "kind": "VARCHAR",
        "ts_ns": "BIGINT",
        "attrs": "VARCHAR",
        "span_name": "VARCHAR",
        "epoch": "BIGINT",
        "step": "BIGINT",
        "step_key": "BIGINT",
    },
    "snapshots": {
        "session": "BIGINT",
        "rank": "BIGINT",
        "id": "VARCHAR",
        "key": "BIGINT",
        "span_id": "VARCHAR",
        "span_key": "BIGINT",
        "tensor": "VARCHAR",
        "shape": "VARCHAR",
        "dtype": "VARCHAR",
        "mode": "VARCHAR",
        "mean": "DOUBLE",
        "std": "DOUBLE",
        "min": "DOUBLE",
        "max": "DOUBLE",
        "norm": "DOUBLE",
        "bins": "DOUBLE[]",
        "counts": "BIGINT[]",
        "blob_uri": "VARCHAR",
        "ts_ns": "BIGINT",
        "attrs": "VARCHAR",
        "epoch": "BIGINT",
    },
    "batches": {
        "batch_id": "VARCHAR",
        "file": "VARCHAR",  # its name; null for a file that is read again to report its problem
        "created_ns": "BIGINT",
    },
}
# The column by which the rows of a table are ordered in time.
TIMES = {"spans": "end_ns", "marks": "ts_ns", "snapshots": "ts_ns", "batches": "created_ns"}
# The tables that `derived.py` computes for a segment.
DERIVED: dict[str, dict[str, str]] = {
    "steps": {
        "session": "BIGINT",
        "key": "BIGINT",
        "pid": "BIGINT",
        "thread_id": "BIGINT",
        "epoch": "BIGINT",
        "epoch_key": "BIGINT",
        "step": "BIGINT",
        "start_ns": "BIGINT",
        "end_ns": "BIGINT",
        "gpu_ns": "BIGINT",
        "memory_peak_bytes": "BIGINT",
        "error": "VARCHAR",
        "data_load_ns": "BIGINT",
        "forward_ns": "BIGINT",
        "backward_ns": "BIGINT",
        "optimizer_step_ns": "BIGINT",
        "evaluation_ns": "BIGINT",
        "other_ns": "BIGINT",
        "aside_ns": "BIGINT",  # of that: checkpoints, compilations, logging
        "children_ns": "BIGINT",
        "children_gpu_ns": "BIGINT",
        "children_memory_bytes": "BIGINT",
        "loss": "DOUBLE",
        "loss_ns": "BIGINT",
        "loss_id": "VARCHAR",  # where the step is in another segment
    },
    "cells": {
        "level": "INTEGER",
        "session": "BIGINT",
        "pid": "BIGINT",
        "thread_id": "BIGINT",
        "depth": "INTEGER",
        "key": "BIGINT",  # of the longest span, as are start, end, id, name and index
        "id": "VARCHAR",
        "name": "VARCHAR",
        "index": "BIGINT",
        "start_ns": "BIGINT",
        "end_ns": "BIGINT",
        "spans": "BIGINT",
        "busy_ns": "BIGINT",
        "last_end_ns": "BIGINT",
        "errors": "BIGINT",
        "error": "VARCHAR",
    },
}
NO_LEVEL = 99


class Segment(msgspec.Struct, kw_only=True):
    """Files of one run that were written together, one per table with rows."""

    id: str
    run_id: str
    rows: dict[str, int]
    bytes: int = 0
    first_ns: int = 0  # of the ends of its spans
    last_ns: int = 0
    is_of_orphans: bool = False  # spans whose parents were missing, and their descendants
    finest_level: int = NO_LEVEL  # of its cells

    def file(self, table: str) -> str:
        return f"{run_folder(self.run_id)}/{self.id}-{table}.parquet"


class StoredSession(msgspec.Struct, kw_only=True):
    """A session with records in a store."""

    key: int
    session: wire.Session | None = None  # None if another program wrote the records
    run_id: str = ""
    pid: int = 0
    rank: int | None = None
    first_ns: int = 0
    last_ns: int = 0
    ended: str = ""  # how, according to its root span; empty while that is open


class Manifest(msgspec.Struct, kw_only=True):
    """The content of a store."""

    schema: int = SCHEMA
    number: int = 0
    created_ns: int = 0
    segments: list[Segment] = []
    sessions: list[StoredSession] = []


class DamagedError(errors.CirronError):
    """The files of a store cannot be read."""


@dataclass
class Store:
    """A store and its newest manifest."""

    objects: objects.Objects
    scratch: Path  # for files in progress
    manifest: Manifest

    @staticmethod
    def open(where: str | os.PathLike[str], scratch: Path | None = None) -> Store:
        found = objects.at(where)
        if scratch is None:
            scratch = Path(tempfile.mkdtemp(prefix="cirron-store-"))
        return Store(found, scratch, newest(found))

    def is_newest(self) -> bool:
        """Whether no other process has committed since the manifest was read."""
        names = self.objects.list(MANIFESTS)
        return not names or names[-1] == f"{MANIFESTS}{self.manifest.number:020d}.json"

    def read_newest(self) -> None:
        if not self.is_newest():
            self.manifest = newest(self.objects)

    def files(
        self, table: str, run_id: str | None = None, segments: Iterable[Segment] | None = None
    ) -> list[str]:
        """Local paths of a table's files."""
        found = []
        for segment in self.manifest.segments if segments is None else segments:
            if segment.rows.get(table) and run_id in (None, segment.run_id):
                name = segment.file(table)
                try:
                    found.append(self.objects.local(name))
                except (OSError, untrusted.UnreadableError) as error:
                    raise DamagedError(f"{name} of the store cannot be read ({error})") from None
        return found

    def select(
        self, table: str, segments: Iterable[Segment] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """SQL for the rows of a table, which may be none, and its parameters."""
        if files := self.files(table, segments=segments):
            return f"SELECT * FROM read_parquet($files_{table})", {f"files_{table}": files}
        return nothing(TABLES[table]), {}

    def check(self, connection: Any) -> None:
        """Raises if a file is missing, incomplete, or has the wrong columns."""
        for table, columns in (TABLES | DERIVED).items():
            files = self.files(table)
            if files:
                names = ", ".join(f'"{name}"' for name in columns)
                sql = f"SELECT {names} FROM read_parquet($files) LIMIT 0"
                connection.execute(sql, {"files": files})

    def new_file(self) -> Path:
        """A new path to write to."""
        return self.scratch / f"{clock.random_id()}.tmp"

    def commit(
        self, added: list[Segment], removed: Iterable[str], sessions: Iterable[StoredSession]
    ) -> bool:
        """Adds and removes segments in one step.

        Returns False if another process committed first: then nothing has changed, and `manifest`
        is the newest.
        """
        gone = set(removed)
        known = {one.key: one for one in self.manifest.sessions}
        for one in sessions:
            before = known.get(one.key)
            known[one.key] = one if before is None else _latest(before, one)
        return self._put(
            [one for one in self.manifest.segments if one.id not in gone] + added,
            list(known.values()),
        )

    def forget(self, run_ids: Iterable[str]) -> None:
        """Deletes runs and their files immediately, even if they are being read."""
        gone = set(run_ids)
        segments: list[Segment] = []
        while gone & {
            *(one.run_id for one in self.manifest.segments),
            *(one.run_id for one in self.manifest.sessions),
        }:
            segments = [one for one in self.manifest.segments if one.run_id in gone]
            self._put(
                [one for one in self.manifest.segments if one.run_id not in gone],
                [one for one in self.manifest.sessions if one.run_id not in gone],
            )
        for segment in segments:
            self.remove(segment)

    def _put(self, segments: list[Segment], sessions: list[StoredSession]) -> bool:
        manifest = Manifest(
            number=self.manifest.number + 1,
            created_ns=clock.wall(),
            segments=segments,
            sessions=sessions,
        )
        path = self.new_file()
        path.write_bytes(wire.encode(manifest))
        if self.objects.add(f"{MANIFESTS}{manifest.number:020d}.json", path):
            self.manifest = manifest
            return True
        self.manifest = newest(self.objects)
        return False

    def compact(
        self, connection: Any, target: Store | None = None, run_id: str | None = None
    ) -> int:
        """Merges the small segments of each run, or of one. Returns how many were merged.

        `target`: another store. It gets all records that it does not have.
        """
        store = self if target is None else target
        seen = set() if target is None else store.seen(connection)
        alike: dict[tuple[str, bool], list[Segment]] = {}
        for segment in self.manifest.segments:
            is_small = segment.bytes < SMALL_BYTES and not segment.is_of_orphans
            if (target is not None or is_small) and run_id in (None, segment.run_id):
                alike.setdefault((segment.run_id, segment.is_of_orphans), []).append(segment)
        merged = 0
        for _, segments in sorted(alike.items()):  # orphans last
            if target is None and len(segments) < 2:
                continue
            if target is not None:
                # Orphans, and records that were placed again, are in segments without batches.
                segments = [
                    one
                    for one in segments
                    if not one.rows.get("batches")
                    or not seen.issuperset(self.seen(connection, [one]))
                ]
            for group in _groups(segments):
                if not self._replace(connection, group, store):
                    return merged
                merged += len(group)
        return merged

    def tidy(self, connection: Any) -> bool:
        """Merges one group of many segments of similar size. Returns True if there may be more."""
        similar: dict[tuple[str, int], list[Segment]] = {}
        for segment in self.manifest.segments:
            if segment.bytes < SMALL_BYTES and not segment.is_of_orphans:
                # A record of a growing run is rewritten about three times, not at each merge.
                size = segment.bytes.bit_length() // 4
                similar.setdefault((segment.run_id, size), []).append(segment)
        for group in similar.values():
            if len(group) >= MANY:
                return self._replace(connection, group, self)
        return False

    def _replace(self, connection: Any, group: list[Segment], store: Store) -> bool:
        """Replaces segments of a run by one, or copies them to another store.

        Returns False if another process committed in the meantime.
        """
        run_id = group[0].run_id
        gone = [one.id for one in group] if store is self else []
        added = self._merge(connection, store, run_id, group)
        if not added.rows:  # the other store has all of it
            return True
        sessions = [one for one in self.manifest.sessions if one.run_id == run_id]
        is_done = store.commit([added], gone, sessions)
        if not is_done:
            store.remove(added)
        return is_done

    def seen(
        self,
        connection: Any,
        segments: list[Segment] | None = None,
        among: list[str] | None = None,
    ) -> set[str]:
        """The ids of the batches in the store, or those of them that are `among` these."""
        sql, given = self.select("batches", segments)
        sql = f"SELECT batch_id FROM ({sql})"
        if among is not None:
            sql += " WHERE batch_id IN (SELECT unnest($among))"
            given = {**given, "among": among}
        rows = connection.execute(sql, given).fetchall()
        return {batch_id for (batch_id,) in rows}

    def _merge(self, connection: Any, store: Store, run_id: str, group: list[Segment]) -> Segment:
        merged = Segment(
            id=clock.random_id(),
            run_id=run_id,
            rows={},
            first_ns=min((one.first_ns for one in group if one.first_ns), default=0),
            last_ns=max(one.last_ns for one in group),
            is_of_orphans=group[0].is_of_orphans,
        )
        for table in TABLES:
            files = self.files(table, segments=group)
            if files:
                sql, given = "SELECT * FROM read_parquet($files) n", {"files": files}
                old = [] if store is self or table == "batches" else store.files(table, run_id)
                if old:  # part of a segment may be here already, from before it was merged
                    sql += (
                        " ANTI JOIN read_parquet($old) o ON o.session = n.session AND o.key = n.key"
                    )
                    given["old"] = old
                store.write(connection, merged, table, f"{sql} ORDER BY {TIMES[table]}", given)
        derive(store, connection, merged)
        return merged

    def write(
        self, connection: Any, segment: Segment, table: str, sql: str, given: dict[str, Any]
    ) -> None:
        """Writes a table of a segment, unless it has no rows."""
        path = self.new_file()
        columns = ", ".join(f'"{name}"' for name in (TABLES | DERIVED)[table])
        # A query reads one level of a pyramid, or a part of it.
        groups = ", ROW_GROUP_SIZE 8192" if table == "cells" else ""
        rows = connection.execute(
            f"COPY (SELECT {columns} FROM ({sql})) TO '{path}'"
            # If most values differ, a dictionary takes a third of the time and saves nothing.
            f" (FORMAT parquet, COMPRESSION snappy, DICTIONARY_SIZE_LIMIT 1000{groups})",
            given,
        ).fetchone()[0]
        if not rows:
            path.unlink()
            return
        segment.rows[table] = rows
        segment.bytes += path.stat().st_size
        if not self.objects.add(segment.file(table), path):
            raise DamagedError(f"{segment.file(table)} already exists")

    def remove(self, segment: Segment) -> None:
        """Deletes the files of a segment that is in no manifest."""
        for table in segment.rows:
            self.objects.remove(segment.file(table))

    def clean(self, grace_s: float = GRACE_S) -> int:
        """Deletes files that are in no recent manifest, and old manifests. Returns their number."""
        manifests = self.objects.list(MANIFESTS)
        old = [name for name in manifests[:-KEPT_MANIFESTS] if self.objects.age_s(name) > grace_s]
        kept = {
            segment.file(table)
            for name in manifests
            if name not in old
            for segment in _read(self.objects, name).segments
            for table in (*TABLES, *DERIVED)
        }
        runs = {name.split("/")[0] for name in self.objects.list("run-")}
        unused = [
            name
            for run in runs
            for name in self.objects.list(f"{run}/")
            if objects.NAME.fullmatch(name)
            and name not in kept
            and self.objects.age_s(name) > grace_s
        ]
        for name in (*unused, *old):
            self.objects.remove(name)
        return len(unused) + len(old)


def _groups(segments: list[Segment]) -> list[list[Segment]]:
    """Segments in the order of writing, grouped into large ones."""
    groups: list[list[Segment]] = []
    size = SMALL_BYTES
    for segment in segments:
        if size >= SMALL_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(segment)
        size += segment.bytes
    return groups


def newest(found: objects.Objects) -> Manifest:
    """The newest manifest, or an empty one."""
    names = [name for name in found.list(MANIFESTS) if objects.NAME.fullmatch(name)]
    return _read(found, names[-1]) if names else Manifest()


def _read(found: objects.Objects, name: str) -> Manifest:
    try:
        manifest = msgspec.json.decode(found.read(name), type=Manifest)
    except (OSError, untrusted.UnreadableError, msgspec.MsgspecError, RecursionError) as error:
        raise DamagedError(f"{name} of the store cannot be read ({error})") from None
    if manifest.schema != SCHEMA:
        raise DamagedError(
            f"the store has schema {manifest.schema}, but this version of cirron reads {SCHEMA}."
            " Update: pip install -U cirron"
        )
    for segment in manifest.segments:
        if not objects.NAME.fullmatch(segment.file("spans")):
            raise DamagedError(f"{name} of the store names a file with an invalid name")
    return manifest


def _latest(before: StoredSession, after: StoredSession) -> StoredSession:
    """The later of two states of a session, which knows more, over the time of both."""
    return msgspec.structs.replace(
        after,
        session=after.session or before.session,
        first_ns=min(before.first_ns, after.first_ns) or after.first_ns,
        last_ns=max(before.last_ns, after.last_ns),
        ended=after.ended or before.ended,
    )


def run_folder(run_id: str) -> str:
    """The folder of a run: the part of its id that fits into a file name, and a hash."""
    short = quote(run_id, safe="")[:80]
    if re.fullmatch(r"[\w-]{1,80}", run_id, re.ASCII):
        return f"run-{short}"
    return f"run-{short}-{hashlib.sha256(run_id.encode('utf-8', 'replace')).hexdigest()[:16]}"


def nothing(columns: Mapping[str, str]) -> str:
    """SQL for a table without rows."""
    listed = ", ".join(f'CAST(NULL AS {kind}) AS "{name}"' for name, kind in columns.items())
    return f"SELECT {listed} WHERE false"
