"""Moves new batches of a spool into the store, as one new segment per run.

`scan.py` checks the files and cuts them into arrays of records. DuckDB loads them, one round of
files at a time, newest first. `placement.py` computes the position of each record in the tree.
Records without a parent go into a separate segment, and are placed again when a parent is found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from duckdb import Error as DatabaseError
from duckdb import IOException

from cirron import wire
from cirron.record import clock
from cirron.runs import blackboxes, scan
from cirron.runs.derived import derive
from cirron.runs.placement import KNOWN, PLACED, Placement
from cirron.runs.scan import RECORDS, BatchFile, Round, Scan, SpoolSource
from cirron.runs.store import TABLES, TIMES, Segment, Store, StoredSession, nothing

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MAX_TRIES = 20

# The columns of the fields of a record. A field of another type is read as JSON.
_COLUMNS: dict[Any, str] = {
    str: "VARCHAR",
    str | None: "VARCHAR",
    int: "BIGINT",
    int | None: "BIGINT",
    wire.Stats: "STRUCT(mean DOUBLE, std DOUBLE, min DOUBLE, max DOUBLE, norm DOUBLE,"
    " histogram STRUCT(bins DOUBLE[], counts BIGINT[]))",
}
_FIELDS = {
    table: {
        field.name: _COLUMNS.get(field.type, "JSON")
        for field in msgspec.structs.fields(record)
        if field.name != "mark_ids"  # each mark names its span
    }
    for table, record in RECORDS.items()
}
# From the fields of a record to the columns of the store that need no other record.
_READ = {
    "spans": """SELECT session, COALESCE(rank, session_rank) AS rank, pid, thread_id, id,
        key_of(id) AS key, parent_id, key_of(parent_id) AS parent_key,
        short(name) AS name, ordinal(index) AS index, moment(start_ns) AS start_ns,
        moment(start_ns) + length_of_time(moment(end_ns) - moment(start_ns)) AS end_ns,
        length_of_time(cpu_ns) AS cpu_ns, length_of_time(gpu_ns) AS gpu_ns, memory_peak_bytes,
        CASE WHEN attrs <> '{}' THEN attrs->>'mode' END AS mode,
        CASE WHEN attrs <> '{}' THEN attrs->>'error' END AS error,
        NULLIF(CAST(attrs AS VARCHAR), '{}') AS attrs""",
    "marks": """SELECT session, session_rank AS rank, id, key_of(id) AS key, span_id,
        key_of(span_id) AS span_key, name,
        CASE value_nonfinite WHEN 'nan' THEN CAST('nan' AS DOUBLE)
            WHEN 'inf' THEN CAST('inf' AS DOUBLE) WHEN '-inf' THEN CAST('-inf' AS DOUBLE)
            ELSE CASE value_type WHEN 'string' THEN NULL
                WHEN 'bool' THEN CAST(value = 'true' AS DOUBLE)
                ELSE TRY_CAST(value AS DOUBLE) END END AS value,
        CASE WHEN value_type = 'string' OR starts_with(value, '"') THEN value->>'$' END AS text,
        value_type, kind, moment(ts_ns) AS ts_ns, NULLIF(CAST(attrs AS VARCHAR), '{}') AS attrs""",
    "snapshots": """SELECT session, session_rank AS rank, id, key_of(id) AS key, span_id,
        key_of(span_id) AS span_key, tensor_name AS tensor, CAST(shape AS VARCHAR) AS shape, dtype,
        mode, stats.mean AS mean, stats.std AS std, stats.min AS min, stats.max AS max,
        stats.norm AS norm, stats.histogram.bins AS bins, stats.histogram.counts AS counts,
        blob_uri, moment(ts_ns) AS ts_ns, NULLIF(CAST(attrs AS VARCHAR), '{}') AS attrs""",
}
# A value in a black box is also in a batch, unless the process was killed first.
_NEWEST_MARKS = """SELECT session, span_key, name, max_by(value, ts_ns) AS value,
    max_by(text, ts_ns) AS text FROM {files} m
    SEMI JOIN new_marks n ON n.session = m.session AND n.span_key = m.span_key
    GROUP BY session, span_key, name"""
_SAME_MARK = """n.span_key = s.span_key AND n.name = s.name
    AND n.value IS NOT DISTINCT FROM s.value AND n.text IS NOT DISTINCT FROM s.text"""

# Of two copies of a record, the one that has ended wins.
_BEST = {"spans": "end_ns DESC NULLS LAST", "marks": "ts_ns", "snapshots": "ts_ns"}


class Ingest:
    """One update of a store from its sources."""

    def __init__(self, store: Store, connection: Any) -> None:
        self._store = store
        self._db = connection
        self._placement = Placement(connection)
        self._sessions: dict[int, StoredSession] = {}
        self._added: list[Segment] = []
        self._replaced: list[str] = []

    def run(self, sources: list[SpoolSource]) -> None:
        """Brings the store up to date, even while a writer adds, merges and deletes files."""
        for _ in range(MAX_TRIES):
            look = self._look()
            files = look.fresh(sources)
            is_taken = not files or self._take(look, files, sources)
            if is_taken and not look.is_missed:
                return
        for source in sources:
            source.tell(
                source.spool, "files keep changing; read it again later for the newest records"
            )

    def _take(self, look: Scan, files: list[BatchFile], sources: list[SpoolSource]) -> bool:
        """Moves files into the store. Returns False if another process committed first."""
        self._sessions, self._added, self._replaced = {}, [], []
        self._open(self._boxes(sources))
        for one in look.rounds(files):
            self._load(look, one)
        if self._sessions:
            self._adopt(sources)
        elif not self._added:
            return True
        if self._store.commit(self._added, self._replaced, self._sessions.values()):
            return True
        for segment in self._added:
            self._store.remove(segment)
        return False

    def complete(self, sources: list[SpoolSource], stores: list[Store]) -> None:
        """Writes the records in black boxes that are in no batch of these stores."""
        one = self._boxes(sources)
        self._note(one.sessions)
        self._open(one)
        for table, same in (("spans", "n.key = s.key"), ("marks", _SAME_MARK)):
            files = [path for store in stores for path in store.files(table)]
            if files and self._count(table):
                newest = _NEWEST_MARKS if table == "marks" else "SELECT session, key FROM {files}"
                found = newest.format(files="read_parquet($files)")
                self._db.execute(
                    f"DELETE FROM new_{table} n USING ({found}) s"
                    f" WHERE n.session = s.session AND {same}",
                    {"files": files},
                )
        self._placement.place()
        # Usually few: a folder may have the black boxes of a thousand runs that ended normally.
        incomplete = self._db.execute(
            "SELECT session FROM new_spans UNION SELECT session FROM new_marks"
        ).fetchall()
        for run_id in {self._sessions[key].run_id for (key,) in incomplete}:
            self._write(Segment(id=clock.random_id(), run_id=run_id, rows={}))
        # The stores know more about a session than its black box.
        known = {one.key: one for store in stores for one in store.manifest.sessions}
        self._store.commit(
            self._added, (), [known.get(key, one) for key, one in self._sessions.items()]
        )

    # -- reading ----------------------------------------------------------------------------

    def _look(self) -> Scan:
        sql, given = self._store.select("batches")
        rows = self._db.execute(f"SELECT batch_id, file FROM ({sql})", given).fetchall()
        names = {file for _, file in rows if file is not None}
        return Scan(self._store, {batch_id for batch_id, _ in rows}, names)

    def _boxes(self, sources: list[SpoolSource]) -> Round:
        """The records in the black boxes, as a round."""
        one = Round(self._store, [])
        for source in sources:
            for box in source.boxes:
                session = scan.stored_session(box.session, source)
                one.sessions.append(session)
                spans = [*box.spans, *box.closed]
                for table, records in (("spans", spans), ("marks", blackboxes.latest_marks(box))):
                    if plain := wire.mend(wire.builtins(list(records))):
                        one.add(table, session.key, wire.encode(plain))
        one.close()
        return one

    def _open(self, boxes: Round) -> None:
        """Adds the open spans to the known ones: they are the parents of others."""
        self._placement.forget()
        if boxes.sessions:
            self._read(boxes)
            self._placement.place()
            self._placement.keep("WHERE NOT is_lost")

    def _note(self, sessions: list[StoredSession]) -> None:
        """Keeps the best description of each session.

        A forked process writes as its parent's session, but starts later. The newest description
        of a process comes first; it has rank, versions and commit.
        """
        for one in sessions:
            before = self._sessions.setdefault(one.key, one)
            if before.session is not None and one.session is not None:
                at = (one.session.clock.wall_ns, one.pid)
                if at < (before.session.clock.wall_ns, before.pid):
                    self._sessions[one.key] = one

    def _read(self, one: Round) -> None:
        """`new_spans`, `new_marks`, `new_snapshots`: the records of a round, each once."""
        try:
            for table, arrays in one.arrays.items():
                source, given = self._arrays(table, arrays)
                self._db.execute(
                    f"CREATE OR REPLACE TEMP TABLE new_{table} AS {_READ[table]} FROM ({source})",
                    given,
                )
                self._drop_copies(table)
        finally:
            one.remove()

    def _arrays(self, table: str, arrays: dict[int, Path]) -> tuple[str, dict[str, Any]]:
        """SQL for the records in files, each with the session of its file."""
        fields = _FIELDS[table] | {"session": "BIGINT", "session_rank": "BIGINT"}
        if not arrays:
            return nothing(fields), {}
        columns = ", ".join(f"\"{name}\": '{kind}'" for name, kind in _FIELDS[table].items())
        # DuckDB may choose a slow plan for a join with a table of files.
        sql = (
            "SELECT * EXCLUDE (filename), map($arrays, $sessions)[filename] AS session,"
            " CAST(map($arrays, $ranks)[filename] AS BIGINT) AS session_rank"
            " FROM read_json($arrays, format = 'array', filename = true,"
            f" maximum_object_size = {scan.MAX_RECORD_BYTES}, columns = {{{columns}}})"
        )
        ranks = {key: one.rank for key, one in self._sessions.items()}
        given = {
            "arrays": [str(path) for path in arrays.values()],
            "sessions": list(arrays),
            "ranks": [ranks.get(key) for key in arrays],
        }
        return sql, given

    def _drop_copies(self, table: str) -> None:
        """Keeps the better copy of records that are in a round twice."""
        rows, keys = self._db.execute(
            f"SELECT count(*), count(DISTINCT hash(session, key)) FROM new_{table}"
        ).fetchone()
        if rows != keys:
            self._db.execute(
                f"CREATE OR REPLACE TEMP TABLE new_{table} AS SELECT DISTINCT ON (session, key) *"
                f" FROM new_{table} ORDER BY session, key, {_BEST[table]}"
            )

    def _drop_stored(self, table: str) -> None:
        """Drops records that are in the store already."""
        at = TIMES[table]
        first, last = self._db.execute(f"SELECT min({at}), max({at}) FROM new_{table}").fetchone()
        if first is None:
            return
        segments = (*self._store.manifest.segments, *self._added)
        files = self._store.files(
            table,
            segments=[one for one in segments if one.first_ns <= last and one.last_ns >= first],
        )
        if files:
            self._db.execute(
                f"DELETE FROM new_{table} n USING (SELECT session, key FROM read_parquet($files)"
                f" WHERE {at} BETWEEN $first AND $last) s"
                " WHERE n.session = s.session AND n.key = s.key",
                {"files": files, "first": first, "last": last},
            )

    def _count(self, table: str) -> int:
        return int(self._db.execute(f"SELECT count(*) FROM new_{table}").fetchone()[0])

    # -- writing ----------------------------------------------------------------------------

    def _load(self, look: Scan, one: Round) -> None:
        """Writes a round."""
        self._note(one.sessions)
        try:
            self._read(one)
        except IOException:  # a full disk or too many open files: not the fault of a file
            raise
        except DatabaseError as error:  # a file passed the checks but is bad: find out which one
            for file in one.files if len(one.files) > 1 else ():
                self._load(look, look.read([file], again=True))
            if len(one.files) == 1:
                (file,) = one.files
                file.source.tell(file.name, f"was left out ({str(error).partition(chr(10))[0]})")
            return
        for table in RECORDS:
            self._drop_stored(table)
        self._placement.place_round()
        for key, first_ns, last_ns, pid, ended in self._db.execute(
            "SELECT session, min(start_ns), max(COALESCE(end_ns, start_ns)), min(pid),"
            " max(CASE WHEN parent_id IS NULL AND name = 'cirron.session' AND end_ns IS NOT NULL"
            " THEN COALESCE(attrs->>'ended', 'clean') END)"
            " FROM new_spans GROUP BY session"
        ).fetchall():
            known = self._sessions[key]
            known.pid = known.pid or pid or 0
            known.first_ns = min(known.first_ns or first_ns, first_ns)
            known.last_ns = max(known.last_ns, last_ns)
            known.ended = ended or known.ended
        self._write_round({batch.run_id for batch in one.batches}, one.batches)
        self._placement.keep_older()

    def _write_round(self, run_ids: set[str], batches: Iterable[scan.BatchRow] = ()) -> None:
        """Writes one segment per run with placed records, and one with the others."""
        left = sum(self._count(table) for table in RECORDS)
        for run_id in run_ids:
            segment = Segment(id=clock.random_id(), run_id=run_id, rows={})
            listed = [one[1:] for one in batches if one.run_id == run_id]
            if listed:
                kinds = TABLES["batches"]
                lists = (f"unnest(CAST(${one} AS {kinds[one]}[])) AS {one}" for one in kinds)
                given = dict(zip(kinds, map(list, zip(*listed, strict=True)), strict=True))
                sql = f"SELECT {', '.join(lists)}"
                self._store.write(self._db, segment, "batches", sql, given)
            is_of_many = len(run_ids) > 1
            left -= self._write(segment, "NOT is_lost", is_of_many=is_of_many)
        for run_id in run_ids if left else ():
            segment = Segment(id=clock.random_id(), run_id=run_id, rows={}, is_of_orphans=True)
            self._write(segment, "is_lost")

    def _write(self, segment: Segment, condition: str = "true", *, is_of_many: bool = True) -> int:
        """Writes the records of a run. Returns their number."""
        given = {}
        if is_of_many:
            sessions = (*self._store.manifest.sessions, *self._sessions.values())
            given["sessions"] = [one.key for one in sessions if one.run_id == segment.run_id]
            condition += " AND session IN (SELECT unnest($sessions))"
        count = 0
        for table, sql in PLACED.items():
            if not self._count(table):
                continue
            sql = f"SELECT * FROM ({sql}) WHERE {condition}"
            self._store.write(self._db, segment, table, sql, given)
            if rows := segment.rows.get(table):
                count += rows
                first, last = self._db.execute(
                    f"SELECT min({TIMES[table]}), max({TIMES[table]}) FROM read_parquet($path)",
                    {"path": self._store.objects.local(segment.file(table))},
                ).fetchone()
                if first is not None:
                    segment.first_ns = min(segment.first_ns or first, first)
                    segment.last_ns = max(segment.last_ns, last)
        if segment.rows:
            derive(self._store, self._db, segment)
            self._added.append(segment)
        return count

    def _adopt(self, sources: list[SpoolSource]) -> None:
        """Places records without a parent again, if any of their parents have been found.

        A parent may be in an older file, because it closed before its child.
        """
        segments = (*self._store.manifest.segments, *self._added)
        lost = [one for one in segments if one.is_of_orphans]
        if not lost:
            return
        found = {table: self._store.select(table, lost) for table in RECORDS}
        spans, files = found["spans"]
        self._db.execute(
            "CREATE OR REPLACE TEMP TABLE wanted AS SELECT session, parent_key AS key"
            f" FROM ({spans}) WHERE depth = 0 AND parent_key IS NOT NULL"
            f" UNION SELECT session, span_key FROM ({found['marks'][0]}) WHERE span_name IS NULL"
            f" UNION SELECT session, span_key FROM ({found['snapshots'][0]}) n"
            f" ANTI JOIN ({spans}) s ON s.session = n.session AND s.key = n.span_key",
            {key: paths for _, given in found.values() for key, paths in given.items()},
        )
        self._open(self._boxes(sources))
        rest = [one for one in segments if not one.is_of_orphans]
        sql, given = self._store.select("spans", rest)
        self._db.execute(
            f"INSERT INTO known SELECT {KNOWN} FROM (SELECT *, false AS is_lost FROM ({sql})) s"
            " SEMI JOIN wanted w ON w.session = s.session AND w.key = s.key"
            " ANTI JOIN known k ON k.session = s.session AND k.key = s.key",
            given,
        )
        there, given = "SELECT session, key FROM known", {}
        if len(lost) > 1:  # orphans of one round are not parents of each other
            there, given = f"{there} UNION ALL SELECT session, key FROM ({spans})", files
        is_found = self._db.execute(
            f"SELECT count(*) > 0 FROM wanted w SEMI JOIN ({there}) s"
            " ON s.session = w.session AND s.key = w.key",
            given,
        ).fetchone()[0]
        if not is_found:
            return
        for table, (sql, given) in found.items():
            columns = list(TABLES[table])
            placed = ", ".join(columns[columns.index("attrs") + 1 :])
            self._db.execute(
                f"CREATE OR REPLACE TEMP TABLE new_{table} AS"
                f" SELECT * EXCLUDE ({placed}) FROM ({sql})",
                given,
            )
        self._placement.place()
        self._replaced = [one.id for one in lost]
        for one in lost:
            if one in self._added:
                self._added.remove(one)
                self._store.remove(one)
        self._write_round({one.run_id for one in lost})
