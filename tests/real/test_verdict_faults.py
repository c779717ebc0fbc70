"""The verdict on scripts of `bench/faulty` whose fault shows however busy the machine is.

`bench/faults.py` runs all of them, and measures.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import cirron as ci
from cirron.verdict.why import last_collective

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


COMPETING = """
import os, subprocess, sys, time
from cirron import system
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
busy = [sys.executable, "-S", "-c", "while True: pass"]
children = [subprocess.Popen(busy) for _ in range(2)]
time.sleep(0.2)
before, began = system.children_ns(), time.monotonic_ns()
time.sleep(0.4)
print((system.children_ns() - before) / (time.monotonic_ns() - began))
for child in children:
    child.kill()
"""


@pytest.mark.skipif(
    not Path("/proc/thread-self/children").exists(), reason="only Linux lists a thread's children"
)
def test_workers_that_wait_for_a_cpu_count_as_computing() -> None:
    """Two busy processes share a core: each computes half of the time, and waits for the rest."""
    done = subprocess.run(
        [sys.executable, "-c", COMPETING], capture_output=True, text=True, check=True
    )

    assert float(done.stdout) > 1.5


def test_scopes_of_the_program_are_named() -> None:
    """Where steps are uneven, what is in the long ones; in the account, each that counts."""
    ci.profile(output="none")
    for number in range(150):
        with ci.scope("step", index=number):
            with ci.scope("\x1b[31mtrain"):
                time.sleep(0.001)
            if number % 5 == 4:
                with ci.scope("in no phase"):  # a name of ours
                    time.sleep(0.01)
                with ci.scope("save"):
                    time.sleep(0.02)

    report = ci.report()

    assert "uneven-steps" == report.verdict.kind
    assert "most of it in save" in " ".join(report.verdict.evidence)
    parts = {part: share for part, _, share in report.account}
    assert pytest.approx(1.0) == sum(parts.values())
    assert parts["save"] > parts["\x1b[31mtrain"] > 0.05
    assert parts["other scopes"] > 0.1
    assert "\x1b" not in repr(report)


def test_what_is_between_steps_is_told() -> None:
    """A loop whose steps are scopes of its own, and whose data is loaded between them."""
    ci.profile(output="none")
    for number in range(50):
        time.sleep(0.01)
        with ci.scope("step", index=number):
            time.sleep(0.002)

    assert "host-bound" == ci.report().verdict.kind


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [("slow", "slow-rank", "rank 1 slows"), ("rotating", "slow-rank", "in turn")],
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


def test_the_collective_of_gloo_is_the_last_one(tmp_path: Path) -> None:
    """A dump of a real process group: no entry is ever completed."""
    distributed, binding = torch.distributed, cast("Any", torch._C)._distributed_c10d
    store = binding.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for _ in range(3):
            distributed.all_reduce(torch.ones(1))
        dump = pickle.loads(binding._dump_fr_trace(True, False, False))
    finally:
        distributed.destroy_process_group()

    assert "gloo:all_reduce #3 (scheduled)" == last_collective(dump)
