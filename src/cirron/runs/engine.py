"""Runs the queries on DuckDB in this process, or on the user's Spark session.

A query is a file in `queries/`, in SQL that both engines accept. It reads the tables `spans`,
`marks`, `snapshots` and `sessions`, and the views `span_marks` (the marks of a span as JSON),
`training_steps`, and `waited_steps` (steps with the time since the previous step). Timelines also
read `cells` and `span_levels`: every span, with the finest pyramid level of its segment.
Parameters (`:name`) are bound, never pasted into the SQL.

Both engines return the same rows: aggregates that pick a row (`max_by`) break ties and skip nulls,
and ORDER BY says where nulls go. Sums use Spark's `try_sum`, a macro in DuckDB: 64 bits, and null
on overflow, which happens when all ranks of a very large run are added up. A sum that is only
compared becomes the largest number instead.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import weakref
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from cirron import errors
from cirron.record import clock
from cirron.runs.derived import LEVELS, STEP_PARTS, TRAINING_STEPS, WAITED_STEPS
from cirron.runs.relation import Rows
from cirron.runs.store import DERIVED, NO_LEVEL, TABLES, nothing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# In addition to the tables of the store: one row per session, mostly from its newest batch.
SESSIONS = {
    "session": "BIGINT",
    "session_id": "VARCHAR",
    "run_id": "VARCHAR",
    "attempt": "BIGINT",
    "rank": "BIGINT",
    "local_rank": "BIGINT",
    "world_size": "BIGINT",
    "host": "VARCHAR",
    "pid": "BIGINT",
    "state": "VARCHAR",
    "first_ns": "BIGINT",
    "last_ns": "BIGINT",
    "uncertainty_ns": "BIGINT",
    "program": "VARCHAR",
}
SCHEMAS = {name: columns for name, columns in TABLES.items() if name != "batches"}
SCHEMAS["sessions"] = SESSIONS
# The tables in files, and their columns. `new_spans` and `new_marks`: of segments without `steps`.
FILES = SCHEMAS | DERIVED | {"new_spans": TABLES["spans"], "new_marks": TABLES["marks"]}
# The views that are the same SQL in both engines.
VIEWS = {"step_parts": STEP_PARTS, "training_steps": TRAINING_STEPS, "waited_steps": WAITED_STEPS}
CHUNK_ROWS = 10_000

_ZONE = " WITH TIME ZONE"
# Quoted text, a comment, a cast, or a parameter, which is the group.
_PARAMETER = re.compile(r"""'[^']*'|"[^"]*"|--.*|/\*(?s:.*?)\*/|::|:([a-zA-Z]\w*)""")

# JSON has no NaN and no infinity.
_PLAIN_MARKS = """
SELECT session, span_key, ts_ns, name,
    CASE WHEN abs(value) < CAST('Infinity' AS DOUBLE) THEN value END AS value,
    CASE WHEN isnan(value) THEN 'nan' WHEN value = CAST('Infinity' AS DOUBLE) THEN 'inf'
        WHEN value = CAST('-Infinity' AS DOUBLE) THEN '-inf' ELSE text END AS text
FROM marks
"""


class QueryError(errors.CirronError):
    """A query failed; the message is the engine's."""


@dataclass
class Files:
    """The Parquet files of a run."""

    tables: dict[str, list[str]]  # of each table in `FILES`
    spans_by_level: dict[int, list[str]]  # all spans, by the finest level of their segments


@functools.cache
def query(name: str) -> str:
    return resources.files("cirron.runs").joinpath(f"queries/{name}.sql").read_text("utf-8")


def queries() -> list[str]:
    folder = resources.files("cirron.runs").joinpath("queries")
    return sorted(
        one.name.removesuffix(".sql") for one in folder.iterdir() if one.name.endswith(".sql")
    )


def parameters(name: str) -> tuple[list[str], list[str]]:
    """The required and the optional parameters of a query."""
    if name == "timeline":
        return ["from_ns", "to_ns", "width"], ["first_rank", "last_rank", "max_depth"]
    return list(dict.fromkeys(filter(None, _PARAMETER.findall(query(name))))), []


def timeline(
    *,
    from_ns: int,
    to_ns: int,
    width: int,
    first_rank: int = -1,
    last_rank: int = 2**31,
    max_depth: int = 2**31 - 1,
) -> dict[str, Any]:
    """The parameters of a timeline: at most `width` buckets, each a power of two in nanoseconds."""
    exponent = 0
    while -(-to_ns >> exponent) - (from_ns >> exponent) > max(width, 1):
        exponent += 1
    return {
        "from_ns": from_ns >> exponent << exponent,
        "to_ns": -(-to_ns >> exponent << exponent),
        "bucket_ns": 2**exponent,
        "level": min(exponent, LEVELS[-1]),
        "first_rank": first_rank,
        "last_rank": last_rank,
        "max_depth": max_depth,
    }


def duckdb() -> Any:
    """DuckDB, configured to read only local files and to download nothing."""
    import duckdb

    connection = duckdb.connect(":memory:")
    # GLOBAL, so that it also applies to cursors.
    connection.execute(
        "SET GLOBAL autoinstall_known_extensions = false;"
        "SET GLOBAL autoload_known_extensions = false;"
        "SET GLOBAL preserve_insertion_order = false;"
        "SET GLOBAL python_enable_replacements = false;"  # no Python variables as tables
        "SET GLOBAL parquet_metadata_cache = true;"  # the files of a store never change
        # The same functions as in Spark.
        "CREATE MACRO try_sum(x) AS TRY_CAST(sum(x) AS BIGINT);"
        "CREATE MACRO try_add(a, b) AS TRY(a + b)"
    )
    # Unlike the connection, a cursor draws no progress bar, and changing that setting in a notebook
    # needs ipywidgets.
    return connection.cursor()


class DuckDB:
    """The tables as views over Parquet files, in a separate schema.

    Each query has its own cursor, so any number of threads can run queries.
    """

    owner: object = None  # of the files; must outlive every query
    span_marks = (  # the SQL of that view, over `marks`
        # An aggregate with ORDER BY takes three times as long. Nulls in a struct sort last.
        "SELECT session, span_key, CAST(to_json([{'ts_ns': one.ts_ns, 'name': one.name,"
        " 'value': one.value, 'text': one.text} for one in list_sort(list({"
        " 'at': ts_ns IS NOT NULL, 'ts_ns': ts_ns, 'name': name,"
        " 'is_number': value IS NOT NULL, 'value': value,"
        " 'is_text': text IS NOT NULL, 'text': text}))]) AS VARCHAR) AS marks"
        f" FROM ({_PLAIN_MARKS}) m GROUP BY session, span_key"
    )

    def __init__(self, connection: Any, files: Files) -> None:
        import duckdb

        self._error = duckdb.Error
        self._connection = connection.cursor()
        self._schema = f"run_{clock.random_id()}"
        self._connection.execute(f"CREATE SCHEMA {self._schema}")
        # After the last reference is gone.
        drop = functools.partial(connection.cursor().execute, f"DROP SCHEMA {self._schema} CASCADE")
        weakref.finalize(self, drop).atexit = False
        cursor = self._cursor()
        views = {name: _read_parquet(FILES[name], paths) for name, paths in files.tables.items()}
        views["span_levels"] = " UNION ALL ".join(
            f"SELECT {level} AS finest_level, * FROM ({_read_parquet(TABLES['spans'], paths)})"
            for level, paths in (files.spans_by_level or {NO_LEVEL: []}).items()
        )
        views |= VIEWS | {"span_marks": self.span_marks}
        for name, sql in views.items():
            try:
                cursor.execute(f"CREATE VIEW {name} AS {sql}")
            except duckdb.Error as error:
                raise QueryError(f"the store cannot be read: {error}") from None

    def _cursor(self) -> Any:
        cursor = self._connection.cursor()
        cursor.execute(f"SET schema = '{self._schema}'")
        return cursor

    @contextlib.contextmanager
    def _own_errors(self, sql: str, given: Mapping[str, Any]) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            said = str(error)
            absent = [one for one in _PARAMETER.findall(sql) if one and one not in given]
            if said.startswith("Catalog Error: Table"):  # its suggestion would be an internal table
                known = ", ".join((*SCHEMAS, "training_steps"))
                said = f"{said.partition(chr(10))[0]} The tables are {known}."
            elif said.startswith("Parser Error") and absent:
                said += f"\n\n:{absent[0]} has no value: write run.sql(..., {absent[0]}=...)"
            raise QueryError(said) from None

    def _execute(self, sql: str, given: Mapping[str, Any]) -> Any:
        """A cursor with the result. A relation would plan the query twice."""
        result = self._cursor().execute(_bound(sql, given), dict(given) or None)
        if result is None:
            raise QueryError("the query is empty")
        return result

    def _fetch(self, sql: str, given: Mapping[str, Any]) -> Any:
        """A cursor with rows for Python. DuckDB needs pytz for times with a time zone."""
        result = self._execute(sql, given)
        kinds = [str(one[1]) for one in result.description]
        if not any(_ZONE in kind for kind in kinds):
            return result
        columns = ", ".join(
            f"CAST(#{at} AS {kind.replace(_ZONE, '')}) AS {_quoted(name)}"
            for at, (name, kind) in enumerate(zip(_names(result), kinds, strict=True), 1)
        )
        return self._execute(f"SELECT {columns} FROM ({sql}\n) q", given)

    def rows(self, sql: str, given: Mapping[str, Any]) -> Rows:
        with self._own_errors(sql, given):
            result = self._fetch(sql, given)
            return Rows(_names(result), result.fetchall())

    def batches(self, sql: str, given: Mapping[str, Any]) -> Iterator[Rows]:
        with self._own_errors(sql, given):
            result = self._fetch(sql, given)
            while rows := result.fetchmany(CHUNK_ROWS):
                yield Rows(_names(result), rows)

    def write_parquet(self, sql: str, given: Mapping[str, Any], path: str) -> None:
        with self._own_errors(sql, given):
            self._execute(f"COPY ({sql}) TO {_literal(path)} (FORMAT parquet)", given)

    def frame(self, sql: str, given: Mapping[str, Any]) -> Any:
        errors.need("pandas", ".df()")  # DuckDB's own error does not say what to install
        with self._own_errors(sql, given):
            return self._execute(sql, given).df()

    def arrow(self, sql: str, given: Mapping[str, Any]) -> Any:
        errors.need("pyarrow", ".arrow()")
        with self._own_errors(sql, given):
            # From a cursor, DuckDB would copy the rows once more.
            relation = self._cursor().sql(_bound(sql, given), params=dict(given) or None)
            if relation is None:
                raise QueryError("the query is empty")
            return relation.to_arrow_table()


class Spark:
    """The tables as temporary views of a separate Spark session, next to the user's.

    Two runs have separate views, and the user's settings stay as they are. The workers read the
    store's files at the paths that they have here; files in `local` exist only on this machine, so
    their rows are sent.
    """

    owner: object = None  # as above
    span_marks = (
        "SELECT session, span_key, to_json(array_sort(collect_list(named_struct('ts_ns', ts_ns,"
        " 'name', name, 'value', value, 'text', text))), map('ignoreNullFields', 'false'))"
        f" AS marks FROM ({_PLAIN_MARKS}) m GROUP BY session, span_key"
    )

    def __init__(self, session: Any, files: Files, local: Path) -> None:
        self._session = session = session.newSession()
        for option in ("enabled", "doubleQuotedIdentifiers"):
            session.conf.set(f"spark.sql.ansi.{option}", "true")

        def frame_of(columns: Mapping[str, str], paths: Sequence[str]) -> Any:
            kinds = ", ".join(f"`{one}` {_SPARK.get(kind, kind)}" for one, kind in columns.items())
            here = [one for one in paths if Path(one).is_relative_to(local)]
            # Spark would take a path for a pattern.
            shared = [re.sub(r"([\\*?\[\]{}])", r"\\\1", one) for one in paths if one not in here]
            frame = session.createDataFrame(_read(here, columns), kinds)
            if shared:  # by name: a folder `run=...` must not become a column
                reader = session.read.schema(kinds).option("recursiveFileLookup", "true")
                frame = reader.parquet(*shared).union(frame) if here else reader.parquet(*shared)
            return frame

        frames = {name: frame_of(FILES[name], paths) for name, paths in files.tables.items()}
        levels = [
            frame_of(TABLES["spans"], paths).selectExpr(f"{level} AS finest_level", "*")
            for level, paths in (files.spans_by_level or {NO_LEVEL: []}).items()
        ]
        frames["span_levels"] = functools.reduce(lambda one, other: one.unionAll(other), levels)
        for name, frame in frames.items():
            frame.createOrReplaceTempView(name)
        for name, sql in (VIEWS | {"span_marks": self.span_marks}).items():
            session.sql(sql).createOrReplaceTempView(name)

    def rows(self, sql: str, given: Mapping[str, Any]) -> Rows:
        frame = self._session.sql(sql, args=dict(given) or None)
        return Rows(list(frame.columns), [tuple(row) for row in frame.collect()])

    def batches(self, sql: str, given: Mapping[str, Any]) -> Iterator[Rows]:
        frame = self._session.sql(sql, args=dict(given) or None)
        rows = map(tuple, frame.toLocalIterator())
        while chunk := list(itertools.islice(rows, CHUNK_ROWS)):
            yield Rows(list(frame.columns), chunk)

    def write_parquet(self, sql: str, given: Mapping[str, Any], path: str) -> None:
        self._session.sql(sql, args=dict(given) or None).write.parquet(path)

    def frame(self, sql: str, given: Mapping[str, Any]) -> Any:
        return self._session.sql(sql, args=dict(given) or None).toPandas()

    def arrow(self, sql: str, given: Mapping[str, Any]) -> Any:
        return self._session.sql(sql, args=dict(given) or None).toArrow()


Engine: TypeAlias = DuckDB | Spark

_SPARK = {"VARCHAR": "string", "DOUBLE[]": "array<double>", "BIGINT[]": "array<bigint>"}


def _read(files: Sequence[str], columns: Mapping[str, str]) -> Any:
    if not files:
        return []
    pyarrow = errors.need("pyarrow", "engine=")
    parquet = errors.need("pyarrow.parquet", "engine=", "pyarrow")
    tables = [parquet.ParquetFile(one).read(columns=list(columns)) for one in files]
    return pyarrow.concat_tables(tables)


def _names(result: Any) -> list[str]:
    return [one[0] for one in result.description]


def _read_parquet(columns: Mapping[str, str], files: Sequence[str]) -> str:
    names = ", ".join(f'"{name}"' for name in columns)
    if files:
        return f"SELECT {names} FROM read_parquet([{', '.join(map(_literal, files))}])"
    return nothing(columns)


def _bound(sql: str, given: Mapping[str, Any]) -> str:
    """The query with its parameters in DuckDB's syntax. Quoted text and comments stay the same."""
    return _PARAMETER.sub(lambda one: f"${one[1]}" if one[1] in given else one[0], sql)


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
