"""A lazy query result, as rows, chunks or data frames."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from cirron import errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas

    from cirron.runs.engine import Engine


MAX_SHOWN = 20  # rows of a `repr`


class Rows(NamedTuple):
    """A result: the column names, and the rows."""

    columns: list[str]
    rows: list[tuple[Any, ...]]


def _limit(rows: int) -> int:
    if type(rows) is not int or not 0 <= rows < 2**63:
        raise errors.out_of_range("rows", rows, "it must be a whole number, 0 or more")
    return rows


class Relation:
    """A query whose result is fetched when it is used."""

    def __init__(self, engine: Engine, sql: str, /, **given: Any) -> None:
        self._engine = engine
        self._given = given
        self.sql = sql

    def fetch(self) -> Rows:
        """The column names, and the rows as tuples."""
        return self._engine.rows(self.sql, self._given)

    def rows(self) -> list[dict[str, Any]]:
        """The rows as dicts."""
        columns, rows = self.fetch()
        return [dict(zip(columns, row, strict=True)) for row in rows]

    @property
    def columns(self) -> list[str]:
        """The column names."""
        return self._engine.rows(f"SELECT * FROM ({self.sql}\n) q LIMIT 0", self._given).columns

    def batches(self) -> Iterator[Rows]:
        """The result in chunks, for any size."""
        return self._engine.batches(self.sql, self._given)

    def write_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write the result to a Parquet file, or with Spark to a folder of them."""
        self._engine.write_parquet(self.sql, self._given, os.fspath(path))

    def df(self) -> pandas.DataFrame:
        """A pandas DataFrame."""
        return self._engine.frame(self.sql, self._given)  # type: ignore[no-any-return]

    def pl(self) -> Any:
        """A polars DataFrame."""
        return errors.need("polars", ".pl()").from_arrow(self.arrow())

    def arrow(self) -> Any:
        """A pyarrow Table."""
        return self._engine.arrow(self.sql, self._given)

    def head(self, rows: int) -> Relation:
        """The first rows."""
        limited = f"SELECT * FROM ({self.sql}\n) q LIMIT {_limit(rows)}"
        return Relation(self._engine, limited, **self._given)

    def __len__(self) -> int:
        counted = f"SELECT count(*) FROM ({self.sql}\n) q"
        return int(self._engine.rows(counted, self._given).rows[0][0])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows())

    def _first(self) -> tuple[list[str], list[tuple[Any, ...]], bool]:
        columns, rows = self.head(MAX_SHOWN + 1).fetch()
        return columns, rows[:MAX_SHOWN], len(rows) > MAX_SHOWN

    def __repr__(self) -> str:
        from cirron.view import tables

        return tables.as_text(*self._first())

    def _repr_html_(self) -> str:
        from cirron.view import tables

        return tables.as_html(*self._first())


class Spans(Relation):
    """The spans of a run, with their marks."""

    def head(self, rows: int) -> Relation:
        """The first rows. Only their marks are read: those of ten million spans take seconds."""
        return Relation(
            self._engine,
            "WITH spans AS (SELECT * FROM spans ORDER BY start_ns, depth, id, session"
            f" LIMIT {_limit(rows)}), marks AS (SELECT * FROM marks WHERE (session, span_key) IN"
            f" (SELECT session, key FROM spans)), span_marks AS ({self._engine.span_marks})"
            f" SELECT * FROM ({self.sql}) q",
        )
