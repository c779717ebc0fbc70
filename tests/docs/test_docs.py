"""The documentation holds: its examples run, and nothing public is missing from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import cirron as ci
from cirron import settings
from cirron.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {page: page.read_text("utf-8") for page in PAGES}


class Loss:
    def item(self) -> float:
        return 0.5


class Scheduler:
    def get_last_lr(self) -> list[float]:
        return [1e-3]


def stand_ins() -> dict[str, Any]:
    """What the examples take for granted."""
    return {
        "ci": ci,
        "loader": [1, 2, 3],
        "batch": 1,
        "logits": [0.1],
        "loss": Loss(),
        "scheduler": Scheduler(),
        "val_acc": 0.9,
        "augment": lambda batch: batch,
        "beam_search": lambda logits: logits,
        "evaluate": lambda: 0.9,
        "train_step": lambda batch: Loss(),
        "train_one_epoch": lambda epoch: None,
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The Python blocks of a page run from top to bottom, as written."""
    names = stand_ins()
    for block in re.findall(r"^```python\n(.*?)^```", TEXT[page], re.DOTALL | re.MULTILINE):
        exec(compile(block, page.name, "exec"), names)

    assert ci.health()["errors"] == {}


def test_some_pages_have_examples() -> None:
    """The test above has something to run."""
    assert sum(text.count("```python") for text in TEXT.values()) >= 10


@pytest.mark.parametrize("name", sorted(set(ci.__all__) - {"__version__"}))
def test_public_names_are_documented(name: str) -> None:
    """Each public name is on some page."""
    assert any(name in text for text in TEXT.values())


@pytest.mark.parametrize("setting", settings.TABLE, ids=lambda setting: setting.name)
def test_settings_are_documented(setting: settings.Setting) -> None:
    """Each setting is in the table, with its variable, its default and its sentence."""
    row = f"| `{setting.name}` | `{setting.variable}` | `{setting.default!r}` | {setting.doc} |"

    assert row in TEXT[ROOT / "docs" / "profiling.md"]


@pytest.mark.parametrize("command", sorted(main.commands))
def test_commands_are_documented(command: str) -> None:
    """Each command is in the docs and has help of its own."""
    assert any(f"cirron {command}" in text for text in TEXT.values())
    assert main.commands[command].help


def test_health_keys_are_documented() -> None:
    """Each counter that a plain session reports is explained."""
    ci.profile()
    page = TEXT[ROOT / "docs" / "profiling.md"]
    obvious = {"session_id", "run_id", "rank", "flusher_alive", "spool_dir", "clock_drift_ns"}

    assert [] == [key for key in ci.health() if key not in obvious and f"`{key}`" not in page]
