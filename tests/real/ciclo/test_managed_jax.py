"""Managed states on many devices and in many processes: the same result, really spread."""

from __future__ import annotations

import json
import os
import re
import shutil
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
KINDS = ("flax", "nnx", "equinox", "haiku")
SPREAD = ("data_parallel", "fsdp")
# Sums of float32 in another order: 20 steps of values around 1.
ROUNDING = 2e-6

pytestmark = pytest.mark.timeout(300)


def cases(folder: Path, name: str, devices: int, code: int = 0) -> list[dict[str, Any]]:
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(CASES), str(folder), name, str(devices)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert code == ended.returncode, ended.stderr[-4000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("managed")


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[dict[str, Any]]:
    """What eight devices find; the last is a run in the middle of which they are killed."""
    return cases(folder, "plain", 8, -signal.SIGKILL)


@pytest.fixture(scope="module")
def frameworks(folder: Path) -> list[dict[str, Any]]:
    return cases(folder, "frameworks", 8)


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


def test_frameworks_agree(frameworks: list[dict[str, Any]]) -> None:
    """With dropout and batch norm too, in each framework, with the statistics."""
    found = of(frameworks, "frameworks")

    assert {(kind, name) for kind in KINDS for name in ("eager", "jit", *SPREAD)} == {
        (one["kind"], one["strategy"]) for one in found
    }
    assert [] == [one for one in found if one["difference"] > ROUNDING]
    assert [] == [one for one in found if one["moved"] < 0.01]


def test_frameworks_in_every_loop(frameworks: list[dict[str, Any]]) -> None:
    """Each ready-made loop logs on eight devices what it logs on one, and trains the same."""
    found = of(frameworks, "loops")

    assert {(kind, name) for kind in KINDS for name in ("jit", *SPREAD)} == {
        (one["kind"], one["strategy"]) for one in found
    }
    assert [] == [one for one in found if one["difference"] > ROUNDING]


def test_what_is_where(plain: list[dict[str, Any]]) -> None:
    """In a step each array is on all eight devices: batches split, the state whole or split too."""
    found = {one["strategy"]: one for one in of(plain, "places")}

    for name in SPREAD:
        inside = found[name]["inside"]
        # Parameters, moments of Adam, batch statistics, keys, counts, and the batch.
        assert set(found[name]["arrays"]) == set(inside)
        assert [] == [path for path, (devices, *_) in inside.items() if devices != 8]
        assert [] == [path for path, devices in found[name]["after"].items() if devices != 8]
        split = {path: tuple(part) for path, (_, part, whole) in inside.items() if part != whole}
        batch = {"[1][0]": (4, 64), "[1][1]": (4,)}
        kernel = "['Dense_0']['kernel']"
        owners = ("params", "opt_state[0].mu", "opt_state[0].nu") if name == "fsdp" else ()
        assert {**batch, **{f"[0].{owner}{kernel}": (8, 64) for owner in owners}} == split
    assert any("batch_stats" in path for path in found["fsdp"]["arrays"])


def test_the_collectives_are_as_documented(folder: Path) -> None:
    """The table of the page on scale is what is compiled, to the number, for 1, 8 and 64."""
    page = (DOCS / "ciclo-scale.md").read_text("utf-8")
    row = r"^\| (\d+) \| (`.*`) \| ([\d,]+) KiB \| (.*) \|$"
    told = {
        (int(devices), strategy): (
            int(kib.replace(",", "")),
            {kind: int(count) for kind, count in re.findall(r"([\w-]+): (\d+)", kinds)},
        )
        for devices, strategies, kib, kinds in re.findall(row, page, re.MULTILINE)
        for strategy in re.findall(r"`(\w+)`", strategies)
    }
    found = {
        (one["devices"], one["strategy"]): (one["kib_a_device"], one["collectives"])
        for devices in (1, 8, 64)
        for one in cases(folder, "scale", devices)
    }

    assert told == found
    assert 7 + 4 + 4 == len(found)
    assert {} == found[1, "hybrid"][1] != found[8, "hybrid"][1]  # else nothing was counted


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

    assert "losses/loss counts the padding; use managed.mean(values)" in careless["text"]
    assert "counts the padding; use managed.mean(values)" in statistics["text"]


def test_donation_across_devices(plain: list[dict[str, Any]]) -> None:
    """The caller's arrays, batches and states stay; what is between two steps is used up."""
    found = of(plain, "donation")

    assert ["jit_donate", "data_parallel_donate", "fsdp"] == [one["strategy"] for one in found]
    for one in found:
        assert [] == one["deleted"]
        assert [] == [part for part, arrays in one["kept"].items() if not arrays]
        assert one["between"]


def test_killed_and_resumed_on_other_devices(plain: list[dict[str, Any]], folder: Path) -> None:
    """A run goes on with 4 devices after 8, or 8 after 4, as if nothing had been."""
    fewer = cases(folder, "fewer", 4, -signal.SIGKILL)
    more = cases(folder, "more", 8)

    assert [
        ("fsdp-8", "fsdp", 4),
        ("fsdp-8", "jit", 1),
        ("data_parallel-8", "fsdp", 4),
        ("fsdp-4", "fsdp", 8),
    ] == [(one["saved"], one["strategy"], one["devices"]) for one in (*fewer, *more)]
    for one in (*fewer, *more):
        assert (10, list(range(20))) == (one["begun"], one["steps"])
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


def kill_at(scripts: Scripts, folder: Path, name: str, count: int, step: int) -> list[str]:
    """What processes said that go on from `run` and are killed when all have done a step."""
    said = [folder / f"{name}-{rank}.txt" for rank in range(count)]
    processes = start(folder, name, "fsdp", count, RESUME="run", WAIT_AT=str(step))
    try:
        scripts.wait_until(
            lambda: (
                all(f"step {step} " in one.read_text() for one in said)
                or any(process.poll() is not None for process in processes)
            ),
            f"step {step}",
            100,
        )
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
    codes = [process.wait(30) for process in processes]
    assert [-signal.SIGKILL] * count == codes, (folder / f"{name}-0.err").read_text()[-3000:]
    return said[0].read_text().splitlines()


def test_processes_killed_and_resumed(tmp_path: Path, scripts: Scripts) -> None:
    """Two processes go on to the same bits; one goes on from two, and two from one, to the same."""
    cut = tmp_path / "cut"
    cut.mkdir()
    kill_at(scripts, cut, "two", 2, step=6)
    shutil.copytree(cut, tmp_path / "same")
    # Two have saved 4 steps; one goes on from there, saves 12, and two end what it has begun.
    one = kill_at(scripts, cut, "one", 1, step=13)

    whole = ended(tmp_path, "whole", start(tmp_path, "whole", "fsdp", 2))
    again = ended(cut, "again", start(cut, "again", "fsdp", 2, RESUME="run"))
    same = ended(tmp_path / "same", "end", start(tmp_path / "same", "end", "fsdp", 2, RESUME="run"))

    # Each of two processes has half of the matrix, and the outputs of all rows; one has it all.
    assert ["step 4 2 (16, 32)", "step 13 2 (16, 32)"] == [one[0], one[-1]]
    assert "step 11 " not in (said := (cut / "again-0.txt").read_text())
    assert "step 12 1 (16, 32)" in said
    assert all(line.startswith("finished (1, (16, 32)) (8, 32)") for line in (*whole, *again))
    assert whole == same
    expected, exact, near = (
        np.load(path)
        for path in (tmp_path / "whole.npz", tmp_path / "same/end.npz", cut / "again.npz")
    )
    for array in ("w", "y"):
        assert np.array_equal(expected[array], exact[array])
        np.testing.assert_allclose(expected[array], near[array], atol=1e-5)


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
