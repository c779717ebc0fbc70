"""Is `cirron diff` right? False alarms between equal runs, and how often a slow-down of 5 %
in one phase is found: `python bench/diffs.py`.

Made-up runs of 300 steps: five names of spans whose times depend on the step before (two time
constants), have heavy tails, and differ from run to run as a whole and by name. Then real runs of
three torch programs, each in a process of its own: 198 pairs of equal ones, and one with a loader
that takes 5 % longer. Prints the figures and writes `bench/results/diffs.json`.
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
import time
from pathlib import Path

from cirron.verdict import diff, ratios

RESULTS = Path(__file__).parent / "results" / "diffs.json"
STEPS = 300
PHASES = {"data_load": 2.0, "forward": 3.0, "backward": 5.0, "optimizer_step": 1.0}  # ms
SLOWER = 1.05

# Real programs: one whose loader and forward wait, so that a busy machine adds noise, and not
# another result; and two that compute.
HEAD = """
import sys, time
import torch
from torch import nn
import cirron as ci
torch.set_num_threads(1)
torch.manual_seed(0)
ci.profile(report=False)
"""
LOOP = """
for batch in torch.utils.data.DataLoader(data, batch_size=size):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
"""
PROGRAMS = {
    "waits": """
class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 300
    def __getitem__(self, at):
        time.sleep(0.004 * float(sys.argv[1]))
        return torch.ones(8)
class Model(nn.Linear):
    def forward(self, x):
        time.sleep(0.004)
        return super().forward(x)
data, size, model = Items(), 1, Model(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
    "dense": """
data, size = torch.randn(300 * 64, 256), 64
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
optimizer = torch.optim.Adam(model.parameters())
""",
    "convolves": """
data, size = torch.randn(300 * 16, 3, 32, 32), 16
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
}


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
    found = ratios.judge([ratios.compare(name, sides[0][name], sides[1][name]) for name in old[0]])
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
    """Every pair of equal runs, with one run before and with all others; then a slower loader."""
    alarms: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as name:
        folders = {program: Path(name) / program for program in PROGRAMS}
        for _ in range(runs):
            for program, folder in folders.items():  # in turn: a busy machine is no bias
                train(folder, PROGRAMS[program], "1")
        for program, folder in folders.items():
            every = opened(folder)
            pairs = [compared(every, {old}, new) for old, new in itertools.combinations(every, 2)]
            alone = [compared(every, set(every) - {one}, one) for one in every]
            waits = sorted(diff.waited(every[one]) for one in every)
            alarms[program] = {
                "pairs": false_alarms(pairs),
                "others_before": false_alarms(alone),
                "waited_for_a_processor": [round(waits[at], 3) for at in (0, len(waits) // 2, -1)],
            }
        equal = set(every := opened(folders["waits"]))
        for _ in range(runs // 3):
            train(folders["waits"], PROGRAMS["waits"], str(SLOWER))
        every = opened(folders["waits"])
        slowed = [
            compared(every, {old}, new)["data_load"]
            for old, new in itertools.product(equal, set(every) - equal)
        ]
    return {
        "runs": runs,
        "load": os.getloadavg()[0],
        "with_a_false_alarm": alarms,
        "slowed": len(slowed),
        "found": slowed.count("slower"),
        "unclear": slowed.count("unknown"),
    }


def train(folder: Path, program: str, factor: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(HEAD + program + LOOP)
    subprocess.run([sys.executable, "train.py", factor], cwd=folder, check=True)


def false_alarms(said: list[dict[str, str]]) -> str:
    return f"{sum(bool({'slower', 'faster'} & set(one.values())) for one in said)} of {len(said)}"


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
    parser.add_argument("--real", type=int, default=12, help="runs of each real program")
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
