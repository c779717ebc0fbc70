"""The history of a loop: a column for each name, and a row for each step that logged."""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from operator import sub
from typing import TYPE_CHECKING, Any, overload

from ciclo.columns import Column
from ciclo.device_values import STACKED
from ciclo.elapsed import FIELDS, Elapsed, check_elapsed
from ciclo.errors import CallbackError, need, shown
from ciclo.logs import COLLECTIONS, DICTS, Logs, check_logs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import SupportsIndex, TypeAlias

    from ciclo.logs import LogsLike

    Path: TypeAlias = tuple[str, str]  # collection, name

INDEX = {
    "steps": "q",
    "samples": "q",
    "tokens": "q",
    "time": "d",
    "date": "d",
    "batch_samples": "q",
}
ROW = struct.Struct("".join(INDEX.values()))  # packing a row is four times faster than six appends
pack_row = ROW.pack


class History:
    """Logged values by name and step; its rows are `Logs`.

    >>> steps, loss = history.collect("steps", "loss")
    >>> history[0].metrics.loss, history[0].elapsed.steps
    """

    def __init__(self, rows: Iterable[LogsLike] = ()) -> None:
        self._packed = bytearray()  # rows, packed by `ROW`
        self._new: list[Elapsed] = []  # the latest rows, which are packed together later
        self._count = 0
        self._newest: int | None = None  # the step of the last row
        self._columns: dict[str, dict[str, Column]] = {}  # by collection and name
        self.extend(rows)

    def append(self, row: LogsLike) -> None:
        """Adds a row, such as one of another history; its counts are in its `elapsed`."""
        check_logs(row)
        given = row.get("elapsed", {})
        counts = {name: given[name] for name in FIELDS if name in given}
        number = 0 if self._newest is None else self._newest + 1
        self.commit(Elapsed(**{"steps": number, **counts}), row)

    def extend(self, rows: Iterable[LogsLike]) -> None:
        """Adds several rows."""
        if not hasattr(rows, "__iter__"):
            raise CallbackError(f"a history is made of a list of logs; got {shown(rows)}")
        for row in rows:
            self.append(row)

    def commit(self, elapsed: Elapsed, logs: LogsLike) -> None:
        """Adds the logs of a step; a second commit for the same step extends its row."""
        check_elapsed(elapsed, "the first argument of history.commit")
        check_logs(logs)
        self.record(elapsed, logs)

    def record(self, elapsed: Elapsed, logs: LogsLike) -> None:
        """`commit` without checks, for loops."""
        steps = elapsed.steps
        if steps == self._newest:
            self._amend(logs)
            return
        row = -1
        columns = self._columns
        for collection in logs:  # `items()` takes a tenth longer
            named = logs[collection]
            if type(named) in DICTS and collection in columns:
                found = columns[collection]
            else:
                found, named = self._checked(collection, named)
            for name in named:
                if row < 0:  # here, because collections may be empty
                    self._new.append(elapsed)
                    row = self._count
                    self._count = row + 1
                    self._newest = steps
                try:
                    column = found[name]
                except KeyError:
                    column = self._add_column(collection, name)
                value = named[name]
                if type(value) in column.plain:
                    column.new_rows.append(row)
                    column.new.append(value)
                else:
                    column.put(row, value)
        if not row % STACKED:
            self._rows()
            for column in self._all().values():
                column.turn()

    def mend(self) -> None:
        """Drops the incomplete row of a `commit` that Ctrl-C interrupted."""
        rows = self._rows()
        self._count = len(rows) // ROW.size
        self._newest = ROW.unpack_from(rows, -ROW.size)[0] if self._count else None
        for column in self._all().values():
            del column.new_rows[len(column.new) :]

    def _rows(self) -> bytearray:
        """The counts of all rows, packed by `ROW`."""
        packed = [
            pack_row(one.steps, one.samples, one.tokens, one.time, one.date, one.batch_samples)
            for one in self._new
        ]
        self._packed += b"".join(packed)
        self._new.clear()
        return self._packed

    def _amend(self, logs: LogsLike) -> None:
        for collection, named in logs.items():
            found, values = self._checked(collection, named)
            for name, value in values.items():
                column = found.get(name) or self._add_column(collection, name)
                column.replace(self._count - 1, value)

    def _checked(
        self, collection: str, named: Mapping[str, Any]
    ) -> tuple[dict[str, Column], Mapping[str, Any]]:
        """The columns of a collection and its logs; an error if these are not a dict."""
        if not hasattr(named, "items"):
            raise CallbackError(
                "logs are a dict of dicts; write"
                f' history.commit(elapsed, {{"metrics": {{{collection!r}: ...}}}})'
            )
        if collection == "elapsed":
            if not named.keys() <= {*INDEX, "date_start"}:
                raise CallbackError(
                    f"the collection 'elapsed' is reserved for counts; got {list(named)}: use"
                    " another name"
                )
            return {}, {}  # from a row of another history; the counts are passed separately
        return self._columns.setdefault(collection, {}), named

    def _add_column(self, collection: str, name: str) -> Column:
        if not isinstance(name, str):
            raise CallbackError(f"log names must be strings: got {name!r} in {collection!r}")
        column = self._columns[collection][name] = Column()
        return column

    def _all(self) -> dict[Path, Column]:
        return {
            (collection, name): column
            for collection, named in self._columns.items()
            for name, column in named.items()
        }

    def kept(self, collection: str, name: str) -> Any:
        """The latest value of a name, which may still be on its device."""
        newest = self._columns[collection][name].newest()
        return None if newest is None else newest[1]

    def newest(self, since: int = 0) -> dict[str, dict[str, Any]]:
        """The latest value of each name since a row; values may still be on their device."""
        found: dict[str, dict[str, Any]] = {}
        for (collection, name), column in self._all().items():
            newest = column.newest()
            if newest is not None and newest[0] >= since:
                found.setdefault(collection, {})[name] = newest[1]
        return found

    def collect(self, *names: str) -> Any:
        """A list of values for each name, from the steps that have all of them.

        A name is `"loss"`, `"metrics.loss"` if two collections have one, or `"steps"`,
        `"samples"`, `"tokens"`, `"time"`, `"date"`, `"date_start"`. One name returns a list,
        several return a tuple of lists.
        """
        if not names:
            raise TypeError("collect() is not valid; use names: history.collect('loss')")
        if not self._columns:  # nothing is logged yet, so any name may be right
            return [] if len(names) == 1 else tuple([] for _ in names)
        found = [self._resolve(name) for name in names]
        columns = [what for what in found if isinstance(what, Column)]
        rows: Sequence[int] = range(len(self))
        if columns:
            shared = set(columns[0].rows).intersection(*(c.rows for c in columns[1:]))
            rows = [row for row in columns[0].rows if row in shared]
        lists = [_picked(what, rows) for what in found]
        return lists[0] if len(lists) == 1 else tuple(lists)

    def names(self) -> list[str]:
        """All columns as `collection.name`."""
        return [".".join(path) for path in self._all()]

    def last(self, name: str) -> Any:
        """The latest value of a name."""
        column = self._resolve(name)
        return (column.values if isinstance(column, Column) else column)[-1]

    def __len__(self) -> int:
        return self._count

    def __bool__(self) -> bool:
        return True  # even if empty: `history or default` must not drop it

    def __iter__(self) -> Iterator[Logs]:
        """The rows."""
        for row in range(len(self)):
            yield self[row]

    @overload
    def __getitem__(self, row: SupportsIndex) -> Logs: ...
    @overload
    def __getitem__(self, row: slice) -> list[Logs]: ...
    def __getitem__(self, row: SupportsIndex | slice) -> Logs | list[Logs]:
        """The logs of a step, with its counts in the collection `elapsed`."""
        if isinstance(row, slice):
            return [self[one] for one in range(len(self))[row]]
        try:
            number = range(len(self))[row]
        except IndexError:
            raise IndexError(f"history[{row!r}] is outside its {len(self)} rows") from None
        except TypeError:
            raise TypeError(
                f"history[{shown(row)}] is not a row; for columns: history.collect('loss')"
            ) from None
        found = Logs()
        for (collection, name), column in self._all().items():
            values = column.settled()
            place = bisect_left(column.rows, number)
            if place < len(values) and column.rows[place] == number:
                found.add(collection, name, values[place])
        counts = dict(zip(INDEX, ROW.unpack_from(self._rows(), number * ROW.size), strict=True))
        for name in FIELDS:
            found.add("elapsed", name, counts[name])
        return found.add("elapsed", "date_start", counts["date"] - counts["time"])

    def __repr__(self) -> str:
        return f"<History of {len(self)} steps: {', '.join(self.names()) or 'nothing logged'}>"

    def copy(self) -> History:
        """An independent copy."""
        copied = History()
        copied._packed, copied._count, copied._newest = self._rows()[:], self._count, self._newest
        copied._columns = {
            collection: {name: column.copy() for name, column in named.items()}
            for collection, named in self._columns.items()
        }
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.state_dict(),)

    # -- to other forms ------------------------------------------------------------------------

    def to_dict(self) -> dict[str, list[Any]]:
        """All columns, with None in rows without a value."""
        table: dict[str, list[Any]] = {name: list(self._counts(name)) for name in FIELDS}
        short: dict[str, int] = {}
        for _, name in self._all():
            short[name] = short.get(name, 0) + 1
        for path, column in self._all().items():
            cells: list[Any] = [None] * len(self)
            values = column.settled()
            for row, value in zip(column.rows, values, strict=True):
                cells[row] = value
            is_plain = short[path[1]] == 1 and path[1] not in table
            table[path[1] if is_plain else ".".join(path)] = cells
        return table

    def to_pandas(self) -> Any:
        """A pandas DataFrame with a row per step."""
        return need("pandas", "history.to_pandas()").DataFrame(self.to_dict())

    def to_polars(self) -> Any:
        """A polars DataFrame with a row per step."""
        polars = need("polars", "history.to_polars()")
        return polars.DataFrame(self._listed(), strict=False)

    def to_arrow(self) -> Any:
        """An Arrow table with a row per step."""
        arrow = need("pyarrow", "history.to_arrow()")
        columns = {}
        for name, cells in self._listed().items():
            try:
                columns[name] = arrow.array(cells)
            except (arrow.ArrowException, OverflowError):  # values of mixed or unknown types
                texts = [None if cell is None else str(cell) for cell in cells]
                columns[name] = arrow.array(texts)
        return arrow.table(columns)

    def _listed(self) -> dict[str, list[Any]]:
        """All columns, with arrays as lists."""
        return {
            name: [cell.tolist() if hasattr(cell, "tolist") else cell for cell in cells]
            for name, cells in self.to_dict().items()
        }

    def plot(self, *names: str, x: str = "steps") -> Any:
        """Plots the given names, or all scalars, over steps; returns a matplotlib figure."""
        need("matplotlib", "history.plot()")
        pyplot = need("matplotlib.pyplot", "history.plot()", "matplotlib")
        if not names:
            names = tuple(".".join(p) for p, c in self._all().items() if _is_scalar(c.settled()))
        figure, axes = pyplot.subplots(max(len(names), 1), 1, sharex=True, squeeze=False)
        for axis, name in zip(axes[:, 0], names, strict=False):
            axis.plot(*self.collect(x, name))
            axis.set_ylabel(name.rpartition(".")[2])
        axes[-1, 0].set_xlabel(x)
        return figure

    # -- to a checkpoint and back --------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain values for `load_state_dict`."""
        return {
            "index": {name: self._counts(name) for name in INDEX},
            "columns": [
                [*path, copied.rows, copied.values]
                for path, column in self._all().items()
                for copied in [column.copy()]
            ],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        index = {name: array(code, saved["index"][name]) for name, code in INDEX.items()}
        self._new, self._packed = [], bytearray().join(map(pack_row, *index.values()))
        self._count = len(index["steps"])
        self._newest = index["steps"][-1] if self._count else None
        self._columns = {}
        for collection, name, rows, held in saved["columns"]:
            column = self._columns.setdefault(collection, {})[name] = Column()
            column.rows = array("q", rows)
            column.values = held[:]

    def _counts(self, name: str) -> array[Any]:
        """One count, such as "steps", of all rows."""
        code, place = INDEX[name], list(INDEX).index(name)
        every = memoryview(self._rows()).cast(code)  # type: ignore[call-overload]  # "q" or "d"
        return array(code, every[place :: len(INDEX)].tobytes())

    def _resolve(self, name: str) -> Column | Sequence[Any]:
        if not isinstance(name, str):
            raise TypeError(f"{shown(name)} is not a name; use history.collect('loss')")
        collection, _, rest = name.partition(".")
        count = rest if collection == "elapsed" else name
        named = [f"{one}.{name}" for one, columns in self._columns.items() if name in columns]
        if name in INDEX and named:
            raise ValueError(
                f"{name!r} is a count of the loop and also a logged name; write 'elapsed.{name}' or"
                f" {' or '.join(map(repr, named))}"
            )
        if count in INDEX:
            return self._counts(count)
        if count == "date_start":
            return list(map(sub, self._counts("date"), self._counts("time")))
        columns = self._all()
        owners = [path for path in columns if path[1] == name]
        if owners:
            order = {collection: place for place, collection in enumerate(COLLECTIONS)}
            found = columns[min(owners, key=lambda path: order.get(path[0], len(order)))]
        elif (collection, rest) in columns:
            found = columns[collection, rest]
        else:
            there = ", ".join([*FIELDS, *self.names()])
            raise KeyError(f"the history has no {name!r}; it has {there}")
        found.settled()
        return found


def history(rows: Iterable[LogsLike] = ()) -> History:
    """An empty history, or one of the given rows."""
    return History(rows)


def _restored(saved: dict[str, Any]) -> History:
    found = History()
    found.load_state_dict(saved)
    return found


def _picked(what: Column | Sequence[Any], rows: Sequence[int]) -> list[Any]:
    if not isinstance(what, Column):
        return [what[row] for row in rows]
    if len(what.rows) == len(rows):
        return list(what.values)
    wanted = set(rows)
    return [value for row, value in zip(what.rows, what.values, strict=True) if row in wanted]


def _is_scalar(held: array[Any] | list[Any]) -> bool:
    return isinstance(held, array) or all(isinstance(value, (int, float)) for value in held)
