"""What a step of a 5-module MLP takes more on a GPU, by quantile: `python bench/gpu_step.py`.

Each profiled epoch stands between two plain ones in one process, and its quantiles of single steps
are compared with theirs: on a shared host, speed drifts by more than we cost. Of all rounds, the
median difference and the middle half. Of processor time and of wall time.
"""

import os
import statistics
import tempfile
import time
from itertools import pairwise

os.chdir(tempfile.mkdtemp())  # profiling writes where it starts
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import cirron as ci  # noqa: E402

ROUNDS, STEPS, WARM = int(os.environ.get("ROUNDS", "30")), 300, 20
QUANTILES = (0.01, 0.05, 0.25, 0.5)
layers = [nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)]
model = nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
items = torch.randn(STEPS, 8, 32, device="cuda"), torch.randint(0, 4, (STEPS, 8), device="cuda")
loader = DataLoader(list(zip(*items, strict=True)), batch_size=None)


def epoch():
    cpu, wall = [time.thread_time_ns()], [time.perf_counter_ns()]
    for x, y in loader:
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        cpu.append(time.thread_time_ns())
        wall.append(time.perf_counter_ns())
    torch.cuda.synchronize()
    return [[b - a for a, b in pairwise(one)][WARM:] for one in (cpu, wall)]


def quantiles():
    """Of the second of two epochs, in us: processor time, then wall time."""
    epoch()
    return [[sorted(one)[int(each * len(one))] / 1000 for each in QUANTILES] for one in epoch()]


def profiled():
    ci.profile(frameworks=["torch"])
    found = quantiles()
    shares.append(ci.health()["measuring_share"])
    ci.shutdown()
    return found


shares = []
for _ in range(3):
    epoch()
rounds = []
before = quantiles()
for _ in range(ROUNDS):
    found, after = profiled(), quantiles()
    rounds.append((before, found, after))
    before = after
for kind, name in enumerate(("cpu", "wall")):
    for place, quantile in enumerate(QUANTILES):
        of = [[one[kind][place] for one in each] for each in rounds]
        more = [found - (before + after) / 2 for before, found, after in of]
        low, middle, high = statistics.quantiles(more, n=4)
        plain = statistics.median(each[0] for each in of)
        print(f"{name} {quantile}: {plain:.0f} us plain, {middle:+.0f} ({low:+.0f} to {high:+.0f})")
print(f"measuring_share {statistics.median(shares)}")
