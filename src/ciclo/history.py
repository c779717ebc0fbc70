"""What a loop has logged: columns, one for each value, and a row for each step that logged.

A float a step costs 16 bytes: the value and the number of its row. Values that a device holds wait
in a short queue; when it is full they are sent to the host together, and received when it is full
again: by then they have come, and nobody waits.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from ciclo import values
from ciclo.elapsed import FIELDS, Elapsed
from ciclo.errors import CallbackError, need
from ciclo.logs import COLLECTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TypeAlias

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
MAX_WAITING = 2 * values.STACKED  # device values of a column, half of them on their way
BIGGEST = 2**63


class Column:
    """The values of one name, and the rows that they are in."""

    __slots__ = ("_is_first", "_queue", "_witness", "rows", "values")

    def __init__(self) -> None:
        self.rows = array("q")
        self.values: array[Any] | list[Any] = array("d")
        self._queue: values.Queue | None = None  # the newest values, that are not here yet
        self._is_first = True
        self._witness: Any = None  # the first device value: is its memory given away by the next?

    def put(self, row: int, value: Any) -> None:
        """Sets the value of the newest row."""
        if type(value) is not float:
            value, is_on_device = values.keep(value)
        else:
            is_on_device = False
        if self.rows and self.rows[-1] == row:  # a later word on the same step
            self.settled()
            self.rows.pop()
            self.values.pop()
        self.rows.append(row)
        if not is_on_device:
            if self._queue is not None:
                self.settled()
            self._append(value)
        elif self._is_first or self._is_given_away():
            self._is_first = False
            self._witness = value
            self.settled()
            self._append(values.fetch([value])[0])
        else:
            self._witness = None
            if self._queue is None:
                self._queue = values.Queue()
            self._queue.put(None, value)
            if len(self._queue) >= values.STACKED:
                self._extend(self._queue.turn())

    def settled(self) -> array[Any] | list[Any]:
        """All values, those on a device fetched."""
        if self._queue is not None:
            self._extend(self._queue.settle())
            self._queue = None
        return self.values

    def copy(self) -> Column:
        copied = Column()
        copied.rows = self.rows[:]
        copied.values = self.settled()[:]
        return copied

    def _is_given_away(self) -> bool:
        """Whether this column logs parts of a donated state: then each is fetched at once."""
        return hasattr(self._witness, "is_deleted") and self._witness.is_deleted()

    def _extend(self, came: list[tuple[None, Any]]) -> None:
        for _, value in came:
            self._append(value)
        if any(value is None for _, value in came):
            _warn_of_loss()

    def _append(self, value: Any) -> None:
        kind = type(value)
        column = self.values
        code = "d" if kind is float else "q" if kind is int and -BIGGEST <= value < BIGGEST else ""
        if isinstance(column, list) or code == column.typecode:
            column.append(value)
        elif code and not column:
            self.values = array(code, [value])
        else:  # values of several kinds stay as they are
            self.values = [*column, value]


class History:
    """What was logged, by name and step.

    >>> steps, loss = history.collect("steps", "loss")
    """

    def __init__(self) -> None:
        self._index: dict[str, array[Any]] = {name: array(code) for name, code in INDEX.items()}
        self._columns: dict[Path, Column] = {}

    def commit(self, elapsed: Elapsed, logs: LogsLike) -> None:
        """Keeps the logs of a step; a second commit for the same step goes into the same row."""
        for named in logs.values():
            if not hasattr(named, "items") or len(named):
                break
        else:
            return  # collections, and nothing in them
        index = self._index
        steps = index["steps"]
        row = len(steps)
        if row and steps[-1] == elapsed.steps:
            row -= 1
        else:
            steps.append(elapsed.steps)
            index["samples"].append(elapsed.samples)
            index["tokens"].append(elapsed.tokens)
            index["time"].append(elapsed.time)
            index["date"].append(elapsed.date)
            index["batch_samples"].append(elapsed.batch_samples)
        columns = self._columns
        for collection, named in logs.items():
            if not hasattr(named, "items"):
                raise CallbackError(
                    "logs are a dict of dicts; write"
                    f' history.commit(elapsed, {{"metrics": {{{collection!r}: ...}}}})'
                )
            for name, value in named.items():
                column = columns.get((collection, name))
                if column is None:
                    if not isinstance(name, str):
                        raise CallbackError(f"{name!r} in {collection!r} is logged; names are str")
                    column = columns[collection, name] = Column()
                column.put(row, value)

    def collect(self, *names: str) -> Any:
        """The values of these names, as a list each, of the steps that have all of them.

        A name is `"loss"`, `"metrics.loss"` where two collections have one, or `"steps"`,
        `"samples"`, `"tokens"`, `"time"`, `"date"`. One name gives its list, several a tuple.
        """
        found = [self._resolve(name) for name in names]
        columns = [what for what in found if isinstance(what, Column)]
        rows: Iterable[int] = range(len(self))
        if columns:
            shared = set(columns[0].rows).intersection(*(c.rows for c in columns[1:]))
            rows = [row for row in columns[0].rows if row in shared]
        lists = [_picked(what, rows) for what in found]
        return lists[0] if len(lists) == 1 else tuple(lists)

    def names(self) -> list[str]:
        """All columns as `collection.name`."""
        return [".".join(path) for path in self._columns]

    def last(self, name: str) -> Any:
        """The newest value of a name."""
        column = self._resolve(name)
        return (column.settled() if isinstance(column, Column) else column)[-1]

    def __len__(self) -> int:
        return len(self._index["steps"])

    def __bool__(self) -> bool:
        return True  # an empty one too: `history or default` would throw it away

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rows, as dicts."""
        for row in range(len(self)):
            yield self[row]

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not hasattr(row, "__index__"):
            raise TypeError(f"history[{row!r}] is no row; for columns: history.collect('loss')")
        row = range(len(self))[row]
        found = {name: self._index[name][row] for name in FIELDS}
        for (_, name), column in self._columns.items():
            place = _place(column.rows, row)
            if place is not None:
                found.setdefault(name, column.settled()[place])
        return found

    def __repr__(self) -> str:
        return f"<History of {len(self)} steps: {', '.join(self.names()) or 'nothing logged'}>"

    def copy(self) -> History:
        """One that grows on its own."""
        copied = History()
        copied._index = {name: column[:] for name, column in self._index.items()}
        copied._columns = {path: column.copy() for path, column in self._columns.items()}
        return copied

    # -- to other forms ------------------------------------------------------------------------

    def to_dict(self) -> dict[str, list[Any]]:
        """All columns with a value for each row; None where a step has none."""
        table: dict[str, list[Any]] = {name: list(self._index[name]) for name in FIELDS}
        short: dict[str, int] = {}
        for _, name in self._columns:
            short[name] = short.get(name, 0) + 1
        for path, column in self._columns.items():
            cells: list[Any] = [None] * len(self)
            for row, value in zip(column.rows, column.settled(), strict=True):
                cells[row] = value
            is_plain = short[path[1]] == 1 and path[1] not in table
            table[path[1] if is_plain else ".".join(path)] = cells
        return table

    def to_pandas(self) -> Any:
        """A pandas DataFrame, a row a step."""
        return need("pandas", "history.to_pandas()").DataFrame(self.to_dict())

    def to_polars(self) -> Any:
        """A polars DataFrame, a row a step."""
        polars = need("polars", "history.to_polars()")
        return polars.DataFrame(self._listed(), strict=False)

    def to_arrow(self) -> Any:
        """An Arrow table, a row a step."""
        arrow = need("pyarrow", "history.to_arrow()")
        columns = {}
        for name, cells in self._listed().items():
            try:
                columns[name] = arrow.array(cells)
            except (arrow.ArrowException, OverflowError):  # values of several kinds, or of none
                texts = [None if cell is None else str(cell) for cell in cells]
                columns[name] = arrow.array(texts)
        return arrow.table(columns)

    def _listed(self) -> dict[str, list[Any]]:
        """All columns, arrays in them as lists."""
        return {
            name: [cell.tolist() if hasattr(cell, "tolist") else cell for cell in cells]
            for name, cells in self.to_dict().items()
        }

    def plot(self, *names: str, x: str = "steps") -> Any:
        """Draws the named values, or all scalars, over steps; returns matplotlib's figure."""
        need("matplotlib", "history.plot()")
        pyplot = need("matplotlib.pyplot", "history.plot()", "matplotlib")
        if not names:
            names = tuple(".".join(p) for p, c in self._columns.items() if _is_scalar(c.settled()))
        figure, axes = pyplot.subplots(max(len(names), 1), 1, sharex=True, squeeze=False)
        for axis, name in zip(axes[:, 0], names, strict=False):
            axis.plot(*self.collect(x, name))
            axis.set_ylabel(name.rpartition(".")[2])
        axes[-1, 0].set_xlabel(x)
        return figure

    # -- to a checkpoint and back --------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain values, from which `load_state_dict` makes the same again."""
        return {
            "index": {name: column[:] for name, column in self._index.items()},
            "columns": [
                [*path, column.rows[:], column.settled()[:]]
                for path, column in self._columns.items()
            ],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Becomes what `state_dict` was taken of."""
        self._index = {name: array(code, saved["index"][name]) for name, code in INDEX.items()}
        self._columns = {}
        for collection, name, rows, held in saved["columns"]:
            column = self._columns[collection, name] = Column()
            column.rows = array("q", rows)
            column.values = held[:]

    def _resolve(self, name: str) -> Column | array[Any]:
        if name in self._index:
            return self._index[name]
        owners = [path for path in self._columns if path[1] == name]
        if owners:
            order = {collection: place for place, collection in enumerate(COLLECTIONS)}
            return self._columns[min(owners, key=lambda path: order.get(path[0], len(order)))]
        collection, _, rest = name.partition(".")
        if (collection, rest) in self._columns:
            return self._columns[collection, rest]
        there = ", ".join([*FIELDS, *self.names()])
        raise KeyError(f"the history has no {name!r}; it has {there}")


def history() -> History:
    """An empty history."""
    return History()


def _warn_of_loss() -> None:
    import logging

    logging.getLogger("ciclo").warning(
        "ciclo: a logged array was donated before it was fetched and is None in the history;"
        " log a copy of it, as in jnp.copy(value)"
    )


def _picked(what: Column | array[Any], rows: Iterable[int]) -> list[Any]:
    if isinstance(what, Column):
        held = what.settled()
        if len(what.rows) == len(rows):  # type: ignore[arg-type]  # a list or a range
            return list(held)
        wanted = set(rows)
        return [value for row, value in zip(what.rows, held, strict=True) if row in wanted]
    return [what[row] for row in rows]


def _place(rows: array[int], row: int) -> int | None:
    from bisect import bisect_left

    place = bisect_left(rows, row)
    return place if place < len(rows) and rows[place] == row else None


def _is_scalar(held: array[Any] | list[Any]) -> bool:
    return isinstance(held, array) or all(isinstance(value, (int, float)) for value in held)
