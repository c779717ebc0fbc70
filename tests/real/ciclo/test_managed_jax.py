"""Managed states on many devices and in many processes: the same result, really spread."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from tests.real.conftest import Scripts

for package in ("jax", "optax", "flax", "equinox", "haiku", "orbax.checkpoint"):
    pytest.importorskip(package)

CASES = Path(__file__).with_name("managed_cases.py")
RANKS = Path(__file__).with_name("managed_ranks.py")
DOCS = Path(__file__).parents[3] / "docs"
# Sums of float32 in another order: 20 steps of values around 1.
ROUNDING = 2e-6

pytestmark = pytest.mark.timeout(300)


def cases(folder: Path, name: str, devices: int) -> list[dict[str, Any]]:
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(CASES), str(folder), name, str(devices)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == ended.returncode, ended.stderr[-4000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("managed")


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[dict[str, Any]]:
    return cases(folder, "plain", 8)


def of(found: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    chosen = [one for one in found if one["case"] == case]
    assert chosen
    return chosen


def test_strategies_agree(plain: list[dict[str, Any]]) -> None:
    """After 20 steps of SGD with dropout, all strategies have the parameters that `eager` has."""
    found = of(plain, "agree")

    assert {"jit", "jit_donate", "data_parallel", "data_parallel_donate", "fsdp"} == {
        one["strategy"] for one in found
    }
    assert [] == [one for one in found if one["difference"] > ROUNDING]
    assert [] == [one for one in found if one["moved"] < 0.01]  # else a scaled gradient would pass


def test_frameworks_agree(folder: Path) -> None:
    """With dropout and batch norm too, in each framework, with the statistics."""
    found = cases(folder, "frameworks", 8)

    assert {"flax", "nnx", "equinox", "haiku"} == {one["kind"] for one in found}
    assert {"eager", "jit", "data_parallel", "fsdp"} == {
        one["strategy"] for one in found if one["kind"] == "nnx"
    }
    assert [] == [one for one in found if one["difference"] > ROUNDING]
    assert [] == [one for one in found if one["moved"] < 0.01]


def test_what_is_where(plain: list[dict[str, Any]]) -> None:
    """Batches are split over all eight devices; parameters are whole on each, or split too."""
    data_parallel, fsdp, _ = of(plain, "places")

    assert (8, 8, [4, 64]) == (
        data_parallel["devices"],
        data_parallel["batch_devices"],
        data_parallel["batch_part"],
    )
    assert [64, 64] == data_parallel["part"]
    assert (8, 8, [4, 64]) == (fsdp["devices"], fsdp["batch_devices"], fsdp["batch_part"])
    assert [8, 64] == fsdp["part"]


def test_the_collectives_are_as_documented(folder: Path) -> None:
    """The table of the page on scale is what is compiled, for 1, 8 and 64 devices."""
    page = (DOCS / "ciclo-scale.md").read_text("utf-8")
    row = r"^\| (\d+) \| `(\w+)` \| ([\d,]+) KiB \| (.*) \|$"
    told = {
        (int(devices), strategy): (int(kib.replace(",", "")), re.findall(r"([\w-]+): \d+", kinds))
        for devices, strategy, kib, kinds in re.findall(row, page, re.MULTILINE)
    }
    found = {
        (one["devices"], one["strategy"]): (one["kib_a_device"], list(one["collectives"]))
        for devices in (1, 8, 64)
        for one in cases(folder, "scale", devices)
    }

    assert told == found
    assert 6 == len(found)


def test_what_strategies_communicate(plain: list[dict[str, Any]]) -> None:
    """Nothing on one device; sums of gradients; and where parameters are split, these too."""
    data_parallel, fsdp, jit = (one["collectives"] for one in of(plain, "places"))

    assert ({}, {"all-reduce": 1}) == (jit, data_parallel)
    assert fsdp["all-gather"] >= 1


def test_a_state_that_is_born_in_parts(plain: list[dict[str, Any]]) -> None:
    """Parameters from a function, and the moments of Adam, are made where they belong."""
    (born,) = of(plain, "born")

    assert 0.0 == born["difference"]
    assert 3 == born["parts"].count([8, 64])  # a matrix and its two moments


def test_a_mesh_of_ones_own(plain: list[dict[str, Any]]) -> None:
    """Rules split each array as they say; the result is the same."""
    (own,) = of(plain, "own")

    assert {"bias": [64], "hidden": [64, 32], "out": [32, 10]} == own["parts"]
    assert [8, 64] == own["batch_part"]
    assert own["difference"] < ROUNDING


def test_a_batch_that_does_not_divide(plain: list[dict[str, Any]]) -> None:
    """It is refused with what to write, or filled up with the arithmetic of the real rows."""
    (refused,) = of(plain, "refused")

    assert "train_step: a batch of 10 rows cannot be split over the 8 devices" in refused["text"]
    assert "Give batches of 16 rows" in refused["text"]
    assert """ciclo.get_strategy('data_parallel', uneven="pad")""" in refused["text"]
    assert [] == [one for one in of(plain, "padded") if one["difference"] > ROUNDING]
    assert [] == [one for one in of(plain, "padded") if one["moved"] < 0.01]
    (outputs,) = of(plain, "outputs")
    assert (10, True) == (outputs["rows"], outputs["difference"] < ROUNDING)


def test_rows_that_would_count(plain: list[dict[str, Any]]) -> None:
    """A step that averages all rows, or batch norm over them, is an error where some are not."""
    (careless,) = of(plain, "careless")
    (statistics,) = of(plain, "statistics")

    assert "its losses would be wrong; use managed.mean(loss)" in careless["text"]
    assert "batch statistics would count them; leave them out" in statistics["text"]


def test_donation_across_devices(plain: list[dict[str, Any]]) -> None:
    """The caller's arrays and states stay; what is between two steps is used up."""
    for one in of(plain, "donation"):
        assert [] == [name for name in ("given", "state", "returned", "last") if one[name]]
        assert one["between"]


def test_from_eight_devices_to_four(plain: list[dict[str, Any]], folder: Path) -> None:
    """A run goes on with fewer devices, and under another strategy, as if nothing had been."""
    for one in cases(folder, "resumed", 4):
        assert ({"fsdp": 4, "jit": 1}[one["strategy"]], list(range(20))) == (
            one["devices"],
            one["steps"],
        )
        assert one["difference"] < ROUNDING


# -- several processes ---------------------------------------------------------------------------


def start(folder: Path, name: str, how: str, count: int, **environ: str) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = f"127.0.0.1:{free.getsockname()[1]}"
    given = {"MEET": meet, "HOW": how, "SAVE": str(folder / f"{name}.npz"), **environ}
    processes = []
    for rank in range(count):
        out, err = folder / f"{name}-{rank}.txt", folder / f"{name}-{rank}.err"
        with out.open("w") as stdout, err.open("w") as stderr:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(RANKS), str(rank), str(count)],
                    cwd=folder,
                    env={**os.environ, **given},
                    stdout=stdout,
                    stderr=stderr,
                )
            )
    return processes


def ended(folder: Path, name: str, processes: list[Any]) -> list[str]:
    """What each process said last."""
    try:
        codes = [process.wait(100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [0] * len(codes) == codes, (folder / f"{name}-0.err").read_text()[-3000:]
    said = [(folder / f"{name}-{rank}.txt").read_text() for rank in range(len(codes))]
    return [lines.splitlines()[-1] for lines in said]


def test_two_processes_killed_and_resumed(tmp_path: Path, scripts: Scripts) -> None:
    """Two processes that are killed go on to the same bits; one process goes on to the same."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    killed = start(cut, "killed", "fsdp", 2, RESUME="run", SLOW="1")
    scripts.wait_until(
        lambda: (
            all("step 6" in (cut / f"killed-{rank}.txt").read_text() for rank in range(2))
            or any(process.poll() is not None for process in killed)
        ),
        "the sixth step",
        100,
    )
    for process in killed:
        process.send_signal(signal.SIGKILL)
        assert -signal.SIGKILL == process.wait(30), (cut / "killed-0.err").read_text()[-3000:]
    for name in ("two", "one"):
        (tmp_path / name).mkdir()
        subprocess.run(["cp", "-r", str(cut / "run"), str(tmp_path / name)], check=True)

    reference = ended(whole, "whole", start(whole, "whole", "fsdp", 2))
    two = ended(tmp_path / "two", "two", start(tmp_path / "two", "two", "fsdp", 2, RESUME="run"))
    one = ended(tmp_path / "one", "one", start(tmp_path / "one", "one", "fsdp", 1, RESUME="run"))

    expected = np.load(whole / "whole.npz")
    # Each process has half of the matrix, and the outputs of all rows.
    assert all(line.startswith("finished (1, (16, 32)) (8, 32)") for line in reference)
    assert reference == two
    assert np.array_equal(expected["w"], np.load(tmp_path / "two" / "two.npz")["w"])
    assert one[0].startswith("finished (2, (16, 32)) (8, 32)")
    for array in ("w", "y"):
        found = np.load(tmp_path / "one" / "one.npz")[array]
        np.testing.assert_allclose(expected[array], found, atol=1e-5)


def test_uneven_batches_in_two_processes(tmp_path: Path) -> None:
    """Rows that two processes of two devices add are not counted, and not in the outputs."""
    said = ended(tmp_path, "run", start(tmp_path, "run", "", 2, UNEVEN="1"))
    found = [dict(np.load(tmp_path / f"run.npz{rank}.npz")) for rank in range(2)]
    w, b, losses = np.full((32, 32), 0.1), np.zeros(32), []
    for step in range(4):
        x, y = (np.concatenate([one[f"{name}{step}"] for one in found]) for name in "xy")
        off = x @ w + b - y
        losses.append((off**2).mean())
        w = w - 0.1 * 2 * x.T @ off / off.size
        b = b - 0.1 * 2 * off.sum(0) / off.size

    assert ["finished (6, 32)"] * 2 == said
    for one in found:
        np.testing.assert_allclose(losses, one["loss"], rtol=1e-5)
        np.testing.assert_allclose(w, one["w"], atol=1e-5)
        x = np.concatenate([one["x0"] for one in found])
        np.testing.assert_allclose(x @ w, one["y"], atol=1e-4)
