"""The documentation holds: its examples run, and nothing public is missing from it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest
from click.testing import CliRunner

import cirron as ci
from cirron import settings, testing
from cirron.cli import COMMANDS, main
from cirron.runs.opened import Run
from cirron.runs.relation import Relation

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def test_the_first_script_has_a_verdict(tmp_path: Path) -> None:
    """The first script of the README can be pasted, and its two commands find its fault."""
    readme = TEXT[ROOT / "README.md"]
    found = re.search(
        r"^```python\n(.*?)^```\n\n```console\n(.*?)^```", readme, re.DOTALL | re.MULTILINE
    )
    assert found is not None
    script, commands = found.groups()
    (tmp_path / "train.py").write_text(script, "utf-8")
    for command in commands.splitlines():
        ended = subprocess.run(
            [sys.executable, "-m", *shlex.split(command.removeprefix("$ "))],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert 0 == ended.returncode, ended.stderr

    assert "VERDICT  input-bound" in ended.stdout


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


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_are_documented(name: str) -> None:
    """Each command has a section with an example, and help of its own."""
    command = main.get_command(click.Context(main), name)
    page = TEXT[ROOT / "docs" / "cli.md"]

    assert f"## cirron {name}\n\n```console\n$ cirron {name}" in page
    assert command is not None
    assert command.help


def commands(group: click.Group) -> Iterator[tuple[str, click.Command]]:
    """The commands of a group, and of the groups in it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            yield from ((name, inner) for _, inner in commands(command))


def test_options_are_documented() -> None:
    """Each option is in its command's section, or in the part about all commands."""
    common, *sections = TEXT[ROOT / "docs" / "cli.md"].split("\n## cirron ")
    texts = {one.partition("\n")[0]: common + one for one in sections}
    texts["serve"] += TEXT[ROOT / "docs" / "server.md"]

    assert [] == [
        f"{name} {option}"
        for name, command in commands(main)
        for one in command.params
        for option in one.opts
        if option.startswith("--") and not re.search(rf"{option}\b(?!-)", texts[name])
    ]


def test_attributes_are_documented() -> None:
    """Each attribute of a run and of a result, and each name of the test kit."""
    runs = [*vars(Run), "id", "sessions", "problems"]
    names = {"reading.md": [*runs, *vars(Relation)], "testing.md": testing.__all__}

    assert [] == [
        name
        for page in names
        for name in names[page]
        if name[0] != "_" and not re.search(rf"`(?:\w+\.)?{name}\b", TEXT[ROOT / "docs" / page])
    ]


EXAMPLES = re.findall(r"^\$ (cirron .*?)(?:  +#.*)?$", TEXT[ROOT / "docs" / "cli.md"], re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_of_commands_run(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command in the page can be typed as it stands."""
    monkeypatch.chdir(tmp_path)
    _, *arguments = shlex.split(example)
    if arguments[0] in ("run", "serve"):  # which have tests of their own
        assert main.get_command(click.Context(main), arguments[0]) is not None
        return
    if "--network" in arguments:
        pytest.skip("needs more than a folder")
    ci.profile()
    with ci.scope("epoch", index=0):
        ci.mark("loss", 0.5)
    run_id = ci.health()["run_id"]
    ci.shutdown()
    result = CliRunner().invoke(main, [run_id if one == "RUN" else one for one in arguments])

    allowed = {"send": (1,), "diff": (0, 5)}.get(arguments[0], (0, 3))
    assert result.exit_code in allowed, result.output
    assert "Usage" not in result.output or "--help" in arguments


def test_commands_on_every_page_can_be_typed() -> None:
    """The arguments and options of each command line in the documentation are valid."""
    found = 0
    for text in TEXT.values():
        for line in re.findall(r"^\$ cirron (.*?)(?:  +#.*)?$", text, re.MULTILINE):
            name, *arguments = shlex.split(line)
            command = main.get_command(click.Context(main), name)
            if command is not None and "--help" not in arguments:
                command.make_context(name, arguments)
                found += 1

    assert found > 40


def test_health_keys_are_documented() -> None:
    """Each counter that a plain session reports is explained."""
    ci.profile()
    page = TEXT[ROOT / "docs" / "profiling.md"]
    obvious = {"session_id", "run_id", "rank", "flusher_alive", "spool_dir", "clock_drift_ns"}

    assert [] == [key for key in ci.health() if key not in obvious and f"`{key}`" not in page]
