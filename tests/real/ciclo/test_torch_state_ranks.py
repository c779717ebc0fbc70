"""Strategies of `create_torch_state`, in real processes under torchrun: they train to the same.

Two processes with a half of each batch end with the parameters of one process with all of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PROGRAM = str(Path(__file__).with_name("torch_ranks.py"))
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ROUNDING = 2e-6  # of float32, after twenty steps
CAN_COMPILE = shutil.which("g++") is not None


def start(cases: str, folder: Path, processes: int, **environ: str) -> subprocess.Popen[str]:
    launcher = LAUNCHER if processes == 2 else []
    return subprocess.Popen(
        [sys.executable, *launcher, PROGRAM, cases, str(folder)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, said = process.communicate(timeout=100)
    finally:
        process.kill()
    return process.returncode, said


def found(folder: Path, case: str, strategy: str, processes: int, rank: int = 0) -> Any:
    return torch.load(folder / f"{case}-{strategy}-{processes}-{rank}.pt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, each once: one process, and two."""
    folder = tmp_path_factory.mktemp("trained")
    alone = "train:eager,accumulate:eager" + ",train:compile" * CAN_COMPILE
    together = "train:ddp,train:fsdp,accumulate:ddp,accumulate:fsdp,epochs:ddp"
    runs = [start(alone, folder, 1), start(together, folder, 2)]
    for status, said in [ended(run) for run in runs]:
        assert 0 == status, said[-3000:]
    return folder


def check_same(expected: dict[str, Any], given: dict[str, Any]) -> None:
    for group in expected.keys() & {"weights", "average"}:
        assert expected[group].keys() == given[group].keys()
        for name, value in expected[group].items():
            assert torch.allclose(value, given[group][name], rtol=0, atol=ROUNDING), name
    assert len(expected["rows"]) == len(given["rows"])
    for row, other in zip(expected["rows"], given["rows"], strict=True):
        assert row == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_as_one(trained: Path, strategy: str, rank: int) -> None:
    """Parameters, batch statistics, their average and all that is logged are the same on each."""
    check_same(found(trained, "train", "eager", 1), found(trained, "train", strategy, 2, rank))


@pytest.mark.skipif(not CAN_COMPILE, reason="inductor needs a C++ compiler")
def test_compiled(trained: Path) -> None:
    """A compiled module trains to the same."""
    check_same(found(trained, "train", "eager", 1), found(trained, "train", "compile", 1))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_windows(trained: Path, strategy: str) -> None:
    """Batches of different sizes in windows, the last one short, weigh by the samples of all."""
    check_same(found(trained, "accumulate", "eager", 1), found(trained, "accumulate", strategy, 2))


def test_loaders_are_told_the_epoch(trained: Path) -> None:
    """A DistributedSampler gives each process its half of each epoch, in a new order each time."""
    first, second = (found(trained, "epochs", "ddp", 2, rank)["seen"] for rank in (0, 1))
    epochs = [
        [sample for batch in first[i : i + 2] + second[i : i + 2] for sample in batch]
        for i in (0, 2, 4)
    ]

    assert [list(range(16))] * 3 == [sorted(epoch) for epoch in epochs]
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_killed_and_gone_on_with(tmp_path: Path, strategy: str) -> None:
    """Two processes that were killed in a window of batches go on: as two, and as one."""
    whole = tmp_path / "whole"
    whole.mkdir()
    reference = start("resume:eager", whole, 1)
    status, _ = ended(start(f"resume:{strategy}", tmp_path, 2, KILL="11"))
    assert 0 != status
    alone = tmp_path / "alone"
    shutil.copytree(tmp_path / "run", alone / "run")
    for run in [
        reference,
        start(f"resume:{strategy}", tmp_path, 2),
        start("resume:eager", alone, 1),
    ]:
        status, said = ended(run)
        assert 0 == status, said[-3000:]
    expected = found(whole, "resume", "eager", 1)

    check_same(expected, found(tmp_path, "resume", strategy, 2, 0))
    check_same(expected, found(tmp_path, "resume", strategy, 2, 1))
    check_same(expected, found(alone, "resume", "eager", 1))


def test_a_metric_that_cannot_be_merged(tmp_path: Path) -> None:
    """In several processes, one that counts for itself is refused, with what to do."""
    (tmp_path / "script.py").write_text(
        "import ciclo, torch\n"
        "class Count:\n"
        "    def update(self, outputs): pass\n"
        "    def compute(self): return 0\n"
        "    def reset(self): pass\n"
        "ciclo.create_torch_state(torch.nn.Linear(1, 1), metrics=Count(), strategy='ddp')\n"
    )
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
    )

    assert "'Count' (Count) counts in each process for itself; use one of torchmetrics" in (
        done.stderr
    )
