"""The verdict on scripts of `bench/faulty` whose fault shows however busy the machine is.

`bench/faults.py` runs all of them, and measures.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cirron as ci

FAULTY = Path(__file__).parents[2] / "bench" / "faulty"


@pytest.mark.parametrize(
    ("script", "kind", "said"),
    [
        ("dies.py", "died", "backward"),
        ("diverges.py", "numerics", "loss is nan"),
        ("jax_generator.py", "input-bound", "data_load is"),
        ("three_steps.py", "not-enough-data", "3 steps"),
        pytest.param(
            "recompiles.py", "compile-storm", "compiles after warm-up", marks=pytest.mark.heavy
        ),
        ("parameter_loop.py", "host-bound", "in no phase"),
    ],
)
def test_a_fault_is_named(tmp_path: Path, script: str, kind: str, said: str) -> None:
    """And the parts of the time add up: a compile inside of a forward counts once."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "CIRRON_REPORT": "0"}
    subprocess.run(
        [sys.executable, str(FAULTY / script)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        check=False,
    )

    report = ci.open(tmp_path).report()

    assert kind == report.verdict.kind
    assert said in " ".join([report.verdict.summary, *report.verdict.evidence])
    if report.account:
        window = report.account[0][1] / report.account[0][2]
        assert pytest.approx(sum(ns for _, ns, _ in report.account)) == window


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [("slow", "slow-rank", "rank 1 holds"), ("rotating", "slow-rank", "by turns")],
)
def test_a_late_rank_is_named_though_all_wait(
    tmp_path: Path, how: str, kind: str, said: str
) -> None:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--nnodes=1"]
    launch += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CIRRON_REPORT": "0"}
    subprocess.run(
        [sys.executable, *launch, str(FAULTY / "ranks.py"), how],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        check=True,
    )

    report = ci.open(tmp_path).report()

    assert kind in [one.kind for one in report.findings]
    assert said in " ".join(one.summary for one in report.findings)
