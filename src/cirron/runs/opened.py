"""`cirron.open(where)`: opens a run for queries from Python."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from cirron import errors, wire
from cirron.runs import engine as engines
from cirron.runs import folders
from cirron.runs import tree as trees
from cirron.runs.relation import Relation, Spans

if TYPE_CHECKING:
    from cirron.runs.blackboxes import Box, State
    from cirron.runs.place import Look, Place
    from cirron.server.notebook import Shown
    from cirron.verdict.findings import Report

# A tree is for people to read: of a larger run, it has only the rows with the most time.
MAX_TREE_SPANS = 200_000
MAX_NAMES = 10_000  # that are compared with a misspelt one


@dataclass
class Session:
    """A process of a run, with its identity and its state."""

    key: int
    info: wire.Session | None  # None if another program wrote the records
    run_id: str
    rank: int | None
    pid: int
    state: State
    first_ns: int
    last_ns: int
    is_judged_by_silence: bool = False
    box: Box | None = None
    forked: list[Box] = field(default_factory=list)

    @property
    def id(self) -> str:
        return "" if self.info is None else self.info.id

    @property
    def attempt(self) -> int:
        return 0 if self.info is None else self.info.attempt

    @property
    def program(self) -> wire.Program:
        """What ran, as far as known."""
        found = None if self.info is None else self.info.program
        return found if isinstance(found, wire.Program) else wire.Program()

    def __repr__(self) -> str:
        rank = "" if self.rank is None else f"rank {self.rank}, "
        return f"<session {self.id[:8] or 'of another writer'}: {rank}pid {self.pid}, {self.state}>"


class Run:
    """One run with all ranks and attempts, as it was when it was opened. Thread-safe."""

    def __init__(self, place: Place, run_id: str, look: Look) -> None:
        self._place = place
        self._look = look
        self.id = run_id
        self.sessions: list[Session] = look.sessions_by_run.get(run_id, [])
        self.problems = look.problems

    @cached_property
    def _engine(self) -> engines.Engine:
        return self._place.engine_of(self, self._look)

    # -- properties, cached: with a thousand ranks, each takes a while ------------------------

    @property
    def runs(self) -> Runs:
        """All runs in the same place."""
        return self._place.runs

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks that are known."""
        return sorted({one.rank for one in self.sessions if one.rank is not None})

    @cached_property
    def attempts(self) -> list[int]:
        """The attempts, in order."""
        return sorted({one.attempt for one in self.sessions})

    @cached_property
    def main(self) -> Session:
        """The main session of the run: rank 0 of the last attempt, else the first session."""
        return min(self.sessions, key=lambda one: (-one.attempt, one.rank or 0, one.first_ns))

    @cached_property
    def state(self) -> State:
        """The state of the run: that of the worst process of the last attempt."""
        last = [one.state for one in self.sessions if one.attempt == self.attempts[-1]]
        order: tuple[State, ...] = ("running", "killed", "signal", "exception", "unknown", "clean")
        return min(last, key=order.index)

    @cached_property
    def started_ns(self) -> int:
        return min(one.first_ns for one in self.sessions)

    @cached_property
    def ended_ns(self) -> int:
        """The time of the last sign of life."""
        return max(one.last_ns for one in self.sessions)

    @cached_property
    def program(self) -> wire.Program:
        """What ran."""
        return self.main.program

    # -- tables -----------------------------------------------------------------------------

    def query(self, name: str, /, **given: Any) -> Relation:
        """The result of a query in `queries/`."""
        if name not in engines.queries():
            raise errors.not_among("query", str(name), engines.queries())
        needed, optional = engines.parameters(name)
        absent = [one for one in needed if one not in given]
        unknown = [one for one in given if one not in (*needed, *optional)]
        if absent or unknown:
            what = "also needs" if absent else "does not take"
            raise errors.SettingError(
                f"run.query({name!r}) {what} {', '.join(f'{one}=' for one in absent or unknown)}:"
                f" write run.query({', '.join([repr(name), *(f'{one}=...' for one in needed)])})"
            )
        if name == "timeline":
            given = engines.timeline(**given)
        kind = Spans if name == "spans" else Relation
        return kind(self._engine, engines.query(name).rstrip(), **given)

    def sql(self, text: str, /, **given: Any) -> Relation:
        """The result of your own SQL, which can read and write files with your permissions."""
        _check_text("sql", text, "it must be a query in SQL")
        return Relation(self._engine, text.strip().rstrip(";"), **given)

    @property
    def spans(self) -> Relation:
        """One row per span, with its path, its attributes, and its marks as JSON."""
        return self.query("spans")

    @property
    def marks(self) -> Relation:
        """One row per mark: its name, value, position in the training, and time."""
        return self.query("marks")

    @property
    def snapshots(self) -> Relation:
        """One row per tensor and epoch."""
        return self.query("snapshots")

    @property
    def steps(self) -> Relation:
        """One row per step and rank."""
        return self.query("steps")

    @property
    def phases(self) -> Relation:
        """One row per span name."""
        return self.query("phases")

    def series(self, name: str) -> Relation:
        """The values of a mark over time."""
        _check_text("name", name, "it must be the name of a mark")
        self._check_known("mark", name, "SELECT name FROM marks")
        return self.query("series", name=name)

    def tensor(self, name: str) -> Relation:
        """The statistics of one tensor and its gradient over the epochs."""
        _check_text("name", name, "it must be the name of a tensor")
        name = name.removesuffix(".grad")
        self._check_known(
            "tensor", name, "SELECT regexp_replace(tensor, '[.]grad$', '') AS name FROM snapshots"
        )
        sql = f"SELECT * FROM ({engines.query('tensors')}) t WHERE tensor = :tensor"
        return Relation(self._engine, sql, tensor=name)

    def _check_known(self, what: str, name: str, names: str) -> None:
        """Raises an error that lists the known names if a misspelled one would give no rows."""
        if not self.sql(f"SELECT 1 FROM ({names}) n WHERE name = :name LIMIT 1", name=name).rows():
            known = self.sql(f"SELECT DISTINCT name FROM ({names}) n ORDER BY 1 LIMIT {MAX_NAMES}")
            raise errors.not_among(what, name, [row["name"] for row in known])

    def export(self, form: str, path: str | os.PathLike[str], **options: Any) -> None:
        """Export the run to the format of another tool: see `docs/exports.md`.

        >>> run.export("perfetto", "run.pftrace")
        """
        from cirron.export import export

        export(self, form, path, **options)

    # -- views ------------------------------------------------------------------------------

    def tree(self, rank: int | None = None) -> trees.Tree:
        """The tree of spans of one rank, by default of the main session."""
        session = self.main
        if rank is not None:
            of_rank = [one for one in self.sessions if one.rank == rank]
            if not of_rank and not self.ranks:
                raise errors.out_of_range("rank", rank, "the processes of this run have no ranks")
            if not of_rank:
                raise errors.one_of("rank", rank, self.ranks)
            session = max(of_rank, key=lambda one: one.attempt)
        return self.tree_of(session)

    def tree_of(self, session: Session) -> trees.Tree:
        """The tree of spans of one session; for a large session, only the outer spans."""
        given = {"session": session.key}
        counts = self.sql(
            "SELECT depth, count(*) FROM spans WHERE session = :session GROUP BY depth"
            " ORDER BY depth",
            **given,
        ).fetch()
        total, depth = 0, 0
        for level, count in counts.rows:
            total += count
            if total > MAX_TREE_SPANS and level > 0:
                break
            depth = level
        spans = self.sql(
            'SELECT id, name, parent_id, "index", start_ns, end_ns, cpu_ns, gpu_ns,'
            " memory_peak_bytes, thread_id, pid, rank, attrs FROM spans"
            " WHERE session = :session AND depth <= :depth ORDER BY start_ns",
            depth=depth,
            **given,
        ).fetch()
        marks = self.sql(
            "SELECT id, span_id, name, value_type, value, text, attrs, ts_ns, kind FROM marks"
            " WHERE session = :session ORDER BY ts_ns",
            **given,
        ).fetch()
        tree = trees.build(
            (wire.Span(*(*row[:-1], _json(row[-1]), [])) for row in spans.rows),
            (_mark(row) for row in marks.rows),
            now_ns=session.last_ns,
        )
        tree.is_partial = len(spans.rows) < sum(count for _, count in counts.rows)
        return tree

    def report(self) -> Report:
        """The verdict: why the run is slow and what a fix would save, or how it ended."""
        from cirron.verdict import report

        return report(self)

    @property
    def where(self) -> list[str | os.PathLike[str]]:
        """The folders and stores that were searched."""
        return self._place.where

    def show(self, height: int = 720) -> Shown:
        """Show the page of this run in a notebook cell, for a browser on this machine.

        >>> run.show()
        """
        from cirron.server.notebook import Shown

        return Shown(self, height)

    def __repr__(self) -> str:
        from cirron.view import tables

        return tables.run_line(self)

    def _repr_html_(self) -> str:
        from cirron.view import tables

        return tables.runs_html([self])


class Runs(Mapping[str, Run]):
    """The runs in a place, by id or the start of an id; the newest is last."""

    def __init__(self, place: Place, run_ids: Sequence[str]) -> None:
        self._place = place
        self._ids = list(run_ids)

    def __getitem__(self, wanted: str) -> Run:
        _check_text("run", wanted, "it must be the id of a run, or the start of one")
        matching = [one for one in self._ids if one.startswith(wanted)]
        if wanted in matching:
            matching = [wanted]
        if len(matching) != 1:
            known = ", ".join((matching or self._ids)[-8:]) or "none"
            count = "several runs have" if matching else "no run here has"
            raise errors.UnknownRunError(
                f"{count} an id that starts with {wanted!r}; choose one of: {known}"
            )
        return self._place.run(matching[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def latest(self) -> Run:
        """The run that started last."""
        return self._place.run(self._ids[-1])

    def __repr__(self) -> str:
        from cirron.view import tables

        return tables.runs_text([self[one] for one in self._ids])

    def _repr_html_(self) -> str:
        from cirron.view import tables

        return tables.runs_html([self[one] for one in self._ids])


def open(  # noqa: A001  the public name is cirron.open
    where: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    *,
    run: str | None = None,
    engine: Any = None,
) -> Run:
    """Open the newest run in a folder, several folders or a store, or the run with this id.

    By default, in the folder that a program started here writes to. The run of this process
    includes everything that was recorded before the call.

    >>> run = ci.open()
    >>> run.steps.df()
    >>> run.runs  # all of them

    `engine`: a Spark session that answers the queries in place of DuckDB.
    """
    from cirron.runs.place import Place

    if engine is not None and not hasattr(engine, "newSession"):
        raise errors.out_of_range("engine", engine, "it must be a Spark session")
    if recorder := sys.modules.get("cirron.session"):  # not imported: a reader need not record
        recorder.flush()
    place = Place(_places(folders.default_folder() if where is None else where), engine)
    return place.runs.latest if run is None else place.runs[run]


def compact(
    where: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = ".",
    store: str | os.PathLike[str] | None = None,
) -> dict[str, int]:
    """Bring the stores of folders up to date and merge their small files, or write to one `store`.

    Returns the number of merged segments and of deleted files that were no longer in use.
    """
    from cirron.runs.place import Place

    return Place(_places(where)).compact(store)


def _places(where: Any) -> list[str | os.PathLike[str]]:
    is_one = isinstance(where, (str, os.PathLike)) or not isinstance(where, Iterable)
    given = [where] if is_one else list(where)
    if not given or not all(isinstance(one, (str, os.PathLike)) for one in given):
        raise errors.out_of_range("where", where, "it must be a folder, a store, or a list of them")
    return [os.path.expanduser(one) for one in given]  # as for ci.profile(path=...)


def _check_text(what: str, given: object, rule: str) -> None:
    if not isinstance(given, str):
        raise errors.out_of_range(what, given, rule)


def _json(text: str | None) -> dict[str, Any]:
    return {} if text is None else msgspec.json.decode(text, type=dict[str, Any])


def _mark(row: tuple[Any, ...]) -> wire.Mark:
    id_, span_id, name, kind_of, value, text, attrs, ts_ns, kind = row
    nonfinite = None
    if text is not None:
        value = text
    elif value is not None and not math.isfinite(value):
        value, nonfinite = None, str(value)
    elif value is not None:
        value = {"int": int, "bool": bool}.get(kind_of, float)(value)
    attrs, ts_ns, kind = _json(attrs), ts_ns or 0, kind or "point"
    return wire.Mark(id_, span_id, name, kind_of or "", value, attrs, ts_ns, kind, nonfinite)
