"""Is `cirron diff` right? False alarms between equal runs, and how often a slow-down of 5 %
in one phase is found: `python bench/diffs.py`.

Made-up runs of 300 steps: five names of spans whose times depend on the step before (two time
constants), have heavy tails, and differ from run to run as a whole and by name. Then a few real
runs of a real program (torch, in a process of its own), half of them with a loader that takes 5 %
longer. Prints the figures and writes `bench/results/diffs.json`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from cirron.verdict import diff

RESULTS = Path(__file__).parent / "results" / "diffs.json"
STEPS = 300
PHASES = {"data_load": 2.0, "forward": 3.0, "backward": 5.0, "optimizer_step": 1.0}  # ms
SLOWER = 1.05

# The real program: its phases wait, so that a busy machine adds noise and not another result.
PROGRAM = """
import sys, time
import torch
import cirron as ci

class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 300
    def __getitem__(self, at):
        time.sleep(0.004 * float(sys.argv[1]))
        return torch.ones(8)

torch.set_num_threads(1)
ci.profile(report=False)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(Items(), batch_size=1):
    loss = model(batch).sum()
    time.sleep(0.004)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def made_up(noise: random.Random, factors: dict[str, float]) -> dict[str, list[int]]:
    """The times of one run's spans by name."""
    whole = noise.gauss(0, 0.005)
    own = {name: noise.gauss(0, 0.003) for name in PHASES}
    slow = quick = 0.0
    found: dict[str, list[int]] = {name: [] for name in (*PHASES, "step")}
    for _ in range(STEPS):
        slow = 0.98 * slow + noise.gauss(0, 0.001)  # over about 50 steps, 0.5 %
        quick = 0.6 * quick + noise.gauss(0, 0.016)  # over a few, 2 %
        total = 0.5e6
        for name, ms in PHASES.items():
            log = whole + own[name] + slow + quick + noise.gauss(0, 0.04)
            if noise.random() < 0.02:
                log += 0.3 * noise.paretovariate(1.5)
            ns = ms * 1e6 * factors.get(name, 1.0) * math.exp(min(log, 4.0))
            found[name].append(round(ns))
            total += ns
        found["step"].append(round(total))
    return found


def outcomes(old: list[dict[str, list[int]]], new: list[dict[str, list[int]]]) -> dict[str, str]:
    """What is said of each name."""
    sides = [{name: [[run[name]] for run in side] for name in old[0]} for side in (old, new)]
    found = diff.judge([diff.compare(name, sides[0][name], sides[1][name]) for name in old[0]])
    return {one.name: one.outcome for one in found}


def on_made_up(pairs: int, changed: int, baselines: int) -> dict[str, object]:
    """False alarms and discoveries, with so many runs before."""
    alarms = names = found = others = 0
    for seed in range(pairs):
        noise = random.Random(seed)
        old = [made_up(noise, {}) for _ in range(baselines)]
        said = outcomes(old, [made_up(noise, {})])
        wrong = sum(one in ("slower", "faster") for one in said.values())
        alarms += wrong > 0
        names += wrong
    for seed in range(changed):
        noise = random.Random(10_000 + seed)
        phase = list(PHASES)[seed % len(PHASES)]
        old = [made_up(noise, {}) for _ in range(baselines)]
        said = outcomes(old, [made_up(noise, {phase: SLOWER})])
        found += said.pop(phase) == "slower"
        said.pop("step")  # it is slower, too
        others += any(one in ("slower", "faster") for one in said.values())
    return {
        "runs_before": baselines,
        "pairs": pairs,
        "pairs_with_a_false_alarm": alarms,
        "false_alarms_by_name": names,
        "slowed_pairs": changed,
        "found": found,
        "slowed_pairs_with_a_false_alarm": others,
    }


def on_real(runs: int) -> dict[str, object]:
    """Every pair of real runs: of the same program, and of one and the slower one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(textwrap.dedent(PROGRAM))
        kinds: dict[str, list[str]] = {"1": [], str(SLOWER): []}
        for _ in range(runs):
            for factor in kinds:  # in turn, so that a machine that gets busy is no bias
                subprocess.run([sys.executable, "train.py", factor], cwd=folder, check=True)
                kinds[factor].append(list(opened(folder))[-1])
        every = opened(folder)
        same = [pair for ids in kinds.values() for pair in itertools.combinations(ids, 2)]
        slowed = list(itertools.product(*kinds.values()))
        # Each run beside all others of its kind, which say how much such runs differ.
        alone = [(set(ids) - {one}, one) for ids in kinds.values() for one in ids]
        said = {
            "pairs": [compared(every, {old}, new) for old, new in same],
            "with_the_others_before": [compared(every, old, new) for old, new in alone],
            "slowed": [compared(every, {old}, new) for old, new in slowed],
        }
    return {
        "runs": 2 * runs,
        "load": os.getloadavg()[0],
        **{kind: len(each) for kind, each in said.items()},
        **{
            f"{kind}_with_a_false_alarm": sum(
                bool({"slower", "faster"} & set(one.values())) for one in said[kind]
            )
            for kind in ("pairs", "with_the_others_before")
        },
        "slowed_found": sum(one["data_load"] == "slower" for one in said["slowed"]),
        "slowed_unclear": sum(one["data_load"] == "unknown" for one in said["slowed"]),
    }


def opened(folder: Path):
    from cirron.runs.place import Place

    return Place([folder]).runs


def compared(runs, before: set[str], after: str) -> dict[str, str]:
    found = diff.diff([runs[one] for one in sorted(before)], [runs[after]])
    return {one.name: one.outcome for one in found.changes}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--changed", type=int, default=100)
    parser.add_argument("--real", type=int, default=4, help="runs of each kind")
    parser.add_argument("--save", type=Path, default=RESULTS)
    given = parser.parse_args()
    figures: dict[str, object] = {
        "one_run_before": on_made_up(given.pairs, given.changed, 1),
        "three_runs_before": on_made_up(given.pairs // 2, given.changed // 2, 3),
        "real": on_real(given.real),
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
    }
    print(json.dumps(figures, indent=2))
    given.save.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
