"""What runs: versions, devices, and configurations of any kind."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from cirron import wire
from cirron.session import program

if TYPE_CHECKING:
    from pathlib import Path


def described(**given: Any) -> wire.Program:
    found = program.Description(given.get("tags", {}), given.get("config", {}), {}, runs_git=False)
    found.find_out()
    return found.known


def test_versions_of_what_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only imported packages have a version, and one that does not say it as text has none."""
    for name in program.PACKAGES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, version in (("jax", "1.2"), ("flax", 7), ("optax", None)):
        module: Any = ModuleType(name)
        module.__version__ = version
        monkeypatch.setitem(sys.modules, name, module)

    assert {"jax": "1.2"} == program.versions()


def test_a_package_that_is_imported_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is imported after ci.profile() is known from the next look on."""
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    found = program.Description({}, {}, {}, runs_git=False)
    found.find_out()
    module: Any = ModuleType("timm")
    module.__version__ = "1.0"
    monkeypatch.setitem(sys.modules, "timm", module)
    before = found.known.versions
    found.look_again()

    assert (None, "1.0") == (before.get("timm"), found.known.versions["timm"])


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """The files of a driver with two devices of one kind."""
    for number in (1, 2):
        write_gpu(tmp_path, number, "NVIDIA H200")
    return tmp_path


def write_gpu(driver: Path, number: int, model: str) -> None:
    folder = driver / f"0000:0{number}:00.0"
    folder.mkdir()
    (folder / "information").write_text(
        f"Model: \t\t {model}\nIRQ:   \t\t 41\nGPU UUID: \t GPU-{number}26e\nDMA Mask: \t 0x1\n"
    )


@pytest.mark.parametrize(
    ("chosen", "count"),
    [(None, 2), ("1", 1), ("0,1,2", 2), ("", 0), ("-1", 0), ("GPU-2", 1), ("GPU-9", 0)],
)
def test_names_of_gpus(driver: Path, chosen: str | None, count: int) -> None:
    """The names of the devices that the process may use come from the driver's files."""
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}

    assert ["NVIDIA H200"] * count == program.gpus(environ, str(driver))


def test_gpus_that_differ(driver: Path) -> None:
    """Where devices differ, one that is chosen by its number has no name, not a wrong one."""
    write_gpu(driver, 3, "NVIDIA T4")

    assert [] == program.gpus({"CUDA_VISIBLE_DEVICES": "0"}, str(driver))
    assert ["NVIDIA T4"] == program.gpus({"CUDA_VISIBLE_DEVICES": "GPU-3"}, str(driver))
    assert 3 == len(program.gpus({}, str(driver)))


def test_without_a_driver_there_are_no_gpus(tmp_path: Path) -> None:
    """Without a driver there are no devices."""
    assert [] == program.gpus({}, str(tmp_path / "none"))


def test_a_configuration_of_any_kind() -> None:
    """Whatever a configuration holds, it is recorded as JSON, within the limits of attributes."""

    class Odd:
        def __str__(self) -> str:
            raise SystemExit

    config = {
        "nan": float("nan"),
        "huge": 2**70,
        "odd": Odd(),
        "class": Odd,
        3: (1, 2),
        "long": "x" * 100_000,
        "many": list(range(5_000)),
    }
    known = described(config=config, tags={"a": "b"})
    found = json.loads(wire.encode(known))["config"]

    assert ("nan", hex(2**70), "<Odd>", [1, 2]) == (
        found["nan"],
        found["huge"],
        found["odd"],
        found["3"],
    )
    assert {"a": "b"} == known.tags
    assert 65_536 > len(json.dumps(found))


def test_a_configuration_that_changes_afterwards() -> None:
    """It is recorded as it was when ci.profile() was called."""
    config = {"layers": [1]}
    found = program.Description({}, config, {}, runs_git=False)
    config["layers"].append(2)
    found.find_out()

    assert {"layers": [1]} == found.known.config


def test_a_program_without_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter inside another program may have no command line."""
    monkeypatch.delattr(sys, "argv")

    assert (None, []) == (described().script, described().arguments)
