"""`cirron export` and `run.export`: what they take, what they say, and what they leave behind."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import cirron as ci
from cirron import errors, export
from cirron.cli import main


@pytest.fixture
def run_id() -> str:
    """A run in this folder."""
    profiler = ci.profile()
    with ci.scope("outer"):
        ci.mark("loss", 0.5)
    ci.shutdown()
    assert profiler is not None
    return ci.open().id


def cirron(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["export", *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize("form", export.FORMS)
def test_every_format_is_written(run_id: str, form: str) -> None:
    """Each format in the table is one that the command writes."""
    assert (0, "wrote out\n") == cirron("--format", form, "-o", "out")
    written = Path("out")
    files = [written] if written.is_file() else [one for one in written.rglob("*") if one.is_file()]

    assert files
    assert all(one.stat().st_size for one in files)
    assert [] == [one for one in Path().rglob("*.tmp") if ".cirron" not in one.parts]


def test_a_run_by_the_start_of_its_id(run_id: str) -> None:
    """RUN is the start of an id, and DIR is where to look."""
    place = ("--dir", str(Path.cwd()), "--format", "json", "-o", "out.json")

    assert 0 == cirron(run_id[:6], *place)[0]
    assert run_id == json.loads(Path("out.json").read_text())["run"]
    status, said = cirron("nothing", *place)
    assert 3 == status
    assert "no run here has an id that starts with 'nothing'" in said


def test_what_is_missing_is_said(run_id: str) -> None:
    """An unknown format, a folder in place of a file, and a file in place of a folder."""
    Path("folder").mkdir()
    Path("file").touch()

    assert "'perfetto', 'chrome'" in cirron("--format", "gif", "-o", "out")[1]
    assert "'folder' is a folder" in cirron("--format", "json", "-o", "folder")[1]
    assert "'file' is a file" in cirron("--format", "csv", "-o", "file")[1]
    os.mkfifo("pipe")
    assert "'pipe' is a device or a pipe" in cirron("--format", "json", "-o", "pipe")[1]
    assert Path("pipe").is_fifo()
    assert (
        "'none/out' cannot be written: there is no folder"
        in cirron("--format", "json", "-o", "none/out")[1]
    )
    assert (
        "could not be reached: Failed to establish a new connection"
        in cirron("--format", "otlp", "-o", "http://127.0.0.1:9/v1/traces")[1]
    )
    with pytest.raises(errors.SettingError, match="use one of 'perfetto', 'chrome'"):
        ci.open().export("gif", "out")


@pytest.mark.parametrize(
    ("form", "package"),
    [
        ("perfetto", "perfetto"),
        ("otlp", "opentelemetry-proto"),
        ("tensorboard", "tensorboardX"),
    ],
)
def test_a_missing_package_is_named(
    run_id: str, form: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the line to type, and no file is left."""
    module = {"otlp": "opentelemetry.proto.collector.trace.v1"}.get(form, package)
    for name in [*sys.modules]:
        if name == module or name.startswith(f"{module}."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    status, said = cirron("--format", form, "-o", "out")

    assert 1 == status
    assert f"needs {package}, which is not installed: pip install {package}" in said
    assert not Path("out").exists()


def test_the_home_folder(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path may start with `~`, as in `ci.profile(path=...)`."""
    monkeypatch.setenv("HOME", str(Path.cwd()))
    ci.open("~").export("json", "~/run.json")

    assert run_id == json.loads(Path("run.json").read_text())["run"]


def test_after_an_error_there_is_the_old_file(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is replaced once the new one is whole."""
    from cirron.export import table

    Path("out.json").write_text("old")

    def fail(columns: list[str], row: tuple[object, ...]) -> dict[str, object]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(table, "_record", fail)
    status, said = cirron("--format", "json", "-o", "out.json")

    assert (1, "old") == (status, Path("out.json").read_text())
    assert "No space left" in said
    assert ["out.json"] == [one.name for one in Path().iterdir() if one.name != ".cirron"]


def test_attributes_that_are_too_deep_are_text() -> None:
    """What cannot be taken apart is kept as it is written."""
    deep = '{"a":' * 600 + "1" + "}" * 600

    assert {"attrs": deep} == export.attributes(deep)
    assert {"a": 1} == export.attributes('{"a":1}')
    assert {"a": 2**63 - 1} == export.attributes(f'{{"a":{2**80}}}')
    assert {} == export.attributes(None)
