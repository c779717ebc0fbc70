"""Strategies of `create_torch_state`, in real processes under torchrun: they train to the same.

Two processes with a half of each batch end with the parameters of one process with all of it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ciclo
import cirron as ci

PROGRAM = str(Path(__file__).with_name("torch_ranks.py"))
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
EXAMPLE = str(Path(__file__).parents[3] / "examples" / "digits_torchrun.py")
PROCESSES = {"eager": 1, "ddp": 2, "fsdp": 2}
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
    compared = ["train", "unequal", "accumulate"]
    alone = [f"{case}:eager" for case in (*compared, "resume")] + ["train:compile"] * CAN_COMPILE
    together = [f"{case}:{strategy}" for case in compared for strategy in ("ddp", "fsdp")]
    together += ["by_hand:ddp", "epochs:ddp"]
    runs = [start(",".join(alone), folder, 1), start(",".join(together), folder, 2)]
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
    """Parameters, their average and all that is logged are the same on each."""
    check_same(found(trained, "train", "eager", 1), found(trained, "train", strategy, 2, rank))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_processes_with_more_samples_weigh_more(trained: Path, strategy: str, rank: int) -> None:
    """Where one process has 3 rows and the other 2, they train as one process with all 5."""
    check_same(found(trained, "unequal", "eager", 1), found(trained, "unequal", strategy, 2, rank))


def test_equal_parts_are_weighed_by_nothing(trained: Path) -> None:
    """With as many samples in each process, parameters are to the bit those of torch's own loop."""
    both = found(trained, "by_hand", "ddp", 2)

    assert both["by_hand"].keys() == both["weights"].keys()
    for name, value in both["by_hand"].items():
        assert torch.equal(value, both["weights"][name]), name


def test_fsdp_shards(trained: Path) -> None:
    """Each process has its part of the rows of all parameters and of the optimizer's momenta."""
    first, second = (found(trained, "train", "fsdp", 2, rank)["held"] for rank in (0, 1))

    assert len(first) == 2 * 10  # parameters, and a momentum for each
    for name, (own, count) in first.items():
        assert (count + 1) // 2 == own, name
        assert (count // 2, count) == second[name], name
    for own, count in found(trained, "train", "ddp", 2)["held"].values():
        assert count == own


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


@pytest.mark.parametrize("strategy", PROCESSES)
def test_killed_and_gone_on_with(trained: Path, tmp_path: Path, strategy: str) -> None:
    """What was killed in a window of batches goes on in any strategy, as two processes or one."""
    killed = start(f"resume:{strategy}", tmp_path, PROCESSES[strategy], KILL="11")
    assert 0 != ended(killed)[0]
    runs = []
    for other, processes in PROCESSES.items():
        shutil.copytree(tmp_path / "run", tmp_path / other / "run")
        runs.append(start(f"resume:{other}", tmp_path / other, processes))
    for status, said in [ended(run) for run in runs]:
        assert 0 == status, said[-3000:]
    expected = found(trained, "resume", "eager", 1)

    for other, processes in PROCESSES.items():
        for rank in range(processes):
            given = found(tmp_path / other, "resume", other, processes, rank)
            check_same(expected, given)
            assert list(range(10, 20)) == given["steps"]  # saved after step 9
            shares = {own / count for own, count in given["held"].values() if not count % 2}
            assert {0.5 if other == "fsdp" else 1} == shares


def test_the_example_is_killed_and_goes_on(scripts: Any) -> None:
    """torchrun and its processes, killed at once, do the steps after the last epoch, not more."""
    save = ciclo.checkpoint(scripts.folder / "checkpoints")
    starter = f"import os, sys; os.execv(sys.executable, {[sys.executable, *LAUNCHER, EXAMPLE]!r})"
    first = scripts.start(starter)
    scripts.wait_until(lambda: save.latest_step, "a checkpoint", timeout_s=100)
    # Their black boxes tell: nothing may be in the spool yet.
    ranks = [one.pid for run in ci.open(scripts.home).runs.values() for one in run.sessions]
    os.killpg(first.pid, signal.SIGKILL)  # first, else it ends its processes gently
    for pid in ranks:  # which torchrun starts in sessions of their own
        os.kill(pid, signal.SIGKILL)
    assert -signal.SIGKILL == first.end().status
    scripts.wait_until(lambda: not any(map(is_running, ranks)), "the end of both processes")
    done = save.latest_step
    assert done is not None
    ended = scripts.run(starter, timeout_s=100)
    steps = {
        run.session.rank: [span.name for span in run.spans].count("train_step")
        for run in scripts.sessions()
        if run.session.pid not in ranks
    }

    assert 2 == len(ranks)
    assert done in range(44, 660, 44)
    assert {0: 660 - done, 1: 660 - done} == steps
    assert 0.95 < float(ended.out.removeprefix("accuracy "))
    assert 660 == save.latest_step


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


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

    assert "'Count' (Count) counts in each process separately; use one of torchmetrics" in (
        done.stderr
    )
