"""The tables of a run as files: Parquet, CSV, JSON. The same columns in each."""

from __future__ import annotations

import csv
import io
import math
import os
from typing import TYPE_CHECKING, Any

import msgspec

from cirron import export, wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cirron.runs.opened import Run
    from cirron.runs.relation import Relation, Rows

JSON_COLUMNS = ("attrs", "marks", "program", "shape")
# A spreadsheet runs a cell that starts with one of these, and names in a run are not trusted.
FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")


def _batches(run: Run, name: str, table: Relation) -> Iterator[Rows]:
    if name == "spans":
        return export.spans_in_order(run, table.sql, "start_ns, depth, id")
    return table.batches()


def tables(run: Run) -> Iterator[tuple[str, Relation]]:
    """All tables, by name."""
    yield "sessions", run.sql("SELECT * FROM sessions ORDER BY first_ns, session_id")
    yield "spans", run.spans
    yield "marks", run.marks
    yield "snapshots", run.snapshots
    yield "steps", run.steps


def write_parquet(run: Run, path: str) -> None:
    """Writes a folder with one file per table."""
    export.new_folder(path)
    for name, table in tables(run):
        with export.replacing(os.path.join(path, f"{name}.parquet")) as partial:
            # Unsorted: sorting all spans would take gigabytes, and queries can sort.
            run.sql(table.sql.rsplit("ORDER BY", 1)[0]).write_parquet(partial)


def write_csv(run: Run, path: str) -> None:
    """Writes a folder with one file per table. Text that a spreadsheet would run gets a `'`."""
    export.new_folder(path)
    for name, table in tables(run):
        with (
            export.new_file(os.path.join(path, f"{name}.csv")) as file,
            io.TextIOWrapper(file, "utf-8", newline="") as text,
        ):
            writer = csv.writer(text)
            writer.writerow(table.columns)
            for _, rows in _batches(run, name, table):
                writer.writerows(map(_cells, rows))


def _cells(row: tuple[Any, ...]) -> Iterator[Any]:
    for value in row:
        if isinstance(value, str) and value.startswith(FORMULAS):
            yield f"'{value}"
        else:
            yield wire.encode(value).decode() if isinstance(value, list) else value


def write_json(run: Run, path: str) -> None:
    """Writes one object with a list per table. NaN and infinities are null; a key names them."""
    with export.new_file(path) as file:
        file.write(b'{"run":' + wire.encode(run.id))
        for name, table in tables(run):
            file.write(b',\n"%s":[' % name.encode())
            before = b"\n"
            for columns, rows in _batches(run, name, table):
                file.write(before + b",\n".join(wire.encode(_record(columns, row)) for row in rows))
                before = b",\n"
            file.write(b"]")
        file.write(b"}\n")


def _record(columns: list[str], row: tuple[Any, ...]) -> dict[str, Any]:
    record = dict(zip(columns, row, strict=True))
    for name in JSON_COLUMNS:
        if record.get(name) is not None:
            record[name] = msgspec.Raw(record[name].encode())
    value = record.get("value")
    if isinstance(value, float) and not math.isfinite(value):
        record["value_nonfinite"] = str(value)  # as in the spool
    return record
