"""The page on reading says what each table and each query has, column by column."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.questions import given_to

import cirron as ci
from cirron.runs import engine

if TYPE_CHECKING:
    from tests.conftest import Made

PAGE = (Path(__file__).parents[2] / "docs" / "reading.md").read_text("utf-8")
TABLES = list(engine.SCHEMAS)


def documented(name: str) -> list[str]:
    """The columns in the table below the heading of that name."""
    _, _, section = PAGE.partition(f"\n#### `{name}`\n")
    section = re.split(r"^#", section, maxsplit=1, flags=re.MULTILINE)[0]
    cells = re.findall(r"^\| (`.*?) \| ", section, re.MULTILINE)
    return [column for cell in cells for column in re.findall(r"`(\w+)`", cell)]


@pytest.mark.parametrize("table", TABLES)
def test_tables_are_documented(table: str) -> None:
    """Each column of a table, in its order."""
    assert list(engine.SCHEMAS[table]) == documented(table)


@pytest.mark.parametrize("query", [one for one in engine.queries() if one not in TABLES])
def test_queries_are_documented(query: str, made: Made) -> None:
    """Each column of an answer, in its order."""
    made().write()
    run = ci.open(".")

    assert run.query(query, **given_to(run, query)).fetch().columns == documented(query)
