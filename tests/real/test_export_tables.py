"""Tables as Parquet, CSV and JSON, read back by other programs' readers."""

from __future__ import annotations

import csv
import json
import math
from typing import TYPE_CHECKING, Any

import pyarrow.parquet  # type: ignore[import-untyped]
import pytest

from cirron.export import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.real import export_cases
    from tests.real.export_cases import MARKUP, NAMES

    from cirron.runs.opened import Run
else:
    import export_cases
    from export_cases import MARKUP, NAMES

TABLES = ["marks", "sessions", "snapshots", "spans", "steps"]


@pytest.fixture(params=["plain", "hostile"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    made: Run = getattr(export_cases, request.param)(tmp_path)
    return made


def strict(path: Path) -> Any:
    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    return json.loads(path.read_text("utf-8"), parse_constant=refuse)


def same(wanted: Any, found: Any) -> bool:
    return bool(wanted == found or (wanted != wanted and found != found))


def test_parquet_has_the_rows(run: Run, tmp_path: Path) -> None:
    """Each table is a file with the columns and rows that the run answers with."""
    run.export("parquet", tmp_path / "out")

    assert TABLES == sorted(path.stem for path in (tmp_path / "out").iterdir())
    for name, relation in table.tables(run):
        found = pyarrow.parquet.read_table(tmp_path / "out" / f"{name}.parquet")
        assert relation.columns == found.column_names
        rows = [
            sorted(one, key=lambda row: repr(row)) for one in (relation.rows(), found.to_pylist())
        ]
        for wanted, row in zip(*rows, strict=True):
            assert all(same(wanted[column], row[column]) for column in wanted), (wanted, row)


def test_csv_has_the_rows(run: Run, tmp_path: Path) -> None:
    """Each table is a file that a reader of CSV takes apart again."""
    run.export("csv", tmp_path / "out")

    assert TABLES == sorted(path.stem for path in (tmp_path / "out").iterdir())
    for name, relation in table.tables(run):
        with (tmp_path / "out" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            found = list(csv.DictReader(file))
        assert [str(row.get("id")) for row in relation.rows()] == [
            str(row.get("id")) for row in found
        ]
        assert relation.columns == list(found[0])


def test_csv_cells_that_a_spreadsheet_would_run(tmp_path: Path) -> None:
    """Text that begins like a formula has a ' in front; numbers below zero stay numbers."""
    export_cases.hostile(tmp_path).export("csv", tmp_path / "out")
    with (tmp_path / "out" / "spans.csv").open(encoding="utf-8", newline="") as file:
        names = {row["name"] for row in csv.DictReader(file)}
    with (tmp_path / "out" / "marks.csv").open(encoding="utf-8", newline="") as file:
        values = {row["value"] for row in csv.DictReader(file)}

    for name in NAMES:
        is_formula = name[:1] in tuple("=+-@\t")
        assert (f"'{name}" if name and is_formula else name) in names
    assert {"-1e+308", "nan", "inf", "-inf"} <= values


def test_json_is_one_object(run: Run, tmp_path: Path) -> None:
    """It is strict JSON: a list a table, attributes as objects, NaN as null, named beside."""
    run.export("json", tmp_path / "out.json")
    found = strict(tmp_path / "out.json")

    assert sorted([*TABLES, "run"]) == sorted(found)
    assert run.id == found["run"]
    for name, relation in table.tables(run):
        rows = relation.rows()
        assert len(rows) == len(found[name])
        for wanted, row in zip(rows, found[name], strict=True):
            for column, value in wanted.items():
                if column in table.JSON_COLUMNS:
                    assert (None if value is None else json.loads(value)) == row[column]
                elif isinstance(value, float) and not math.isfinite(value):
                    assert row[column] is None
                    assert str(value) == row["value_nonfinite"]
                else:
                    assert value == row[column]


def test_marks_of_a_span_are_json(tmp_path: Path) -> None:
    """The marks that a span's row has are JSON, also where one is not a number."""
    run = export_cases.hostile(tmp_path)
    (marks,) = (row["marks"] for row in run.spans.rows() if row["name"] == "step")
    odd = [one for one in json.loads(marks, parse_constant=pytest.fail) if one["name"] == "odd"]

    assert ["-inf", "inf", "nan"] == sorted(one["text"] for one in odd if one["text"])
    assert MARKUP in {one["text"] for one in json.loads(marks)}


def test_chunks_are_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer in chunks has the rows of the answer, in its order."""
    from cirron.runs import engine

    run = export_cases.plain(tmp_path)
    monkeypatch.setattr(engine, "CHUNK_ROWS", 7)
    chunks = list(run.spans.batches())

    assert len(chunks) > 5
    assert run.spans.fetch().rows == [row for chunk in chunks for row in chunk.rows]
    assert {tuple(run.spans.columns)} == {tuple(chunk.columns) for chunk in chunks}


@pytest.mark.parametrize("form", ["csv", "json", "chrome", "perfetto"])
def test_spans_that_are_sorted_in_parts_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """A run that is too large to be sorted at once is written as if it were."""
    from cirron import export

    run = export_cases.hostile(tmp_path)
    run.export(form, tmp_path / "whole")
    monkeypatch.setattr(export, "SORTED_SPANS", 3)
    run.export(form, tmp_path / "parts")
    monkeypatch.undo()
    wanted, found = (
        [one.read_bytes() for one in (path.iterdir() if path.is_dir() else [path])]
        for path in (tmp_path / "whole", tmp_path / "parts")
    )

    assert sorted(wanted) == sorted(found)
