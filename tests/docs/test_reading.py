"""The page on reading says what each table and each query has, column by column."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cirron as ci
from cirron.runs import engine

if TYPE_CHECKING:
    from tests.conftest import Made

PAGE = (Path(__file__).parents[2] / "docs" / "reading.md").read_text("utf-8")
TABLES = list(engine.SCHEMAS)
GIVEN: dict[str, dict[str, Any]] = {
    "series": {"name": "loss"},
    "curves": {"width": 10},
    "timeline": {"width": 10, "from_ns": 0, "to_ns": 10},
    "newest_steps": {"session": 0, "most": 10},
    "rank_steps": {"attempt": 0, "first_ns": 0, "every": 1},
    "account": {"session": 0, "first_ns": 0, "last_ns": 2**62},
    "settings": {"session": 0},
    "newest_values": {"session": 0, "most": 10},
    "health": {"session": 0},
    "compiles": {"session": 0, "first_ns": 0},
    "newest_spans": {"session": 0, "most": 10},
    "values": {"session": 0},
    "norms": {"session": 0},
    "ended_epochs": {"session": 0, "first_ns": 0, "last_ns": 2**62},
}


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

    assert ci.open(".").query(query, **GIVEN.get(query, {})).fetch().columns == documented(query)
