"""What a step of a 5-module MLP takes more on a GPU: `python bench/gpu_step.py`.

On a shared host, speed drifts by more than we cost. So short plain and profiled epochs take turns
in one process, and their single steps are compared all together: quantiles, and the mean of the
fastest 90 %, with its standard error from pairs of neighbours. Of processor time and of wall time.
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

ROUNDS, STEPS, WARM = int(os.environ.get("ROUNDS", "150")), 120, 20
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


def mean(times):
    return statistics.fmean(sorted(times)[: int(0.9 * len(times))]) / 1000


plain, profiled, shares = [], [], []
for _ in range(5):
    epoch()
for _ in range(ROUNDS):
    plain.append(epoch())
    ci.profile(frameworks=["torch"])
    profiled.append(epoch())
    shares.append(ci.health()["measuring_share"])
    ci.shutdown()
for kind, name in enumerate(("cpu", "wall")):
    one, other = (
        sorted(step for each in epochs for step in each[kind]) for epochs in (plain, profiled)
    )
    for quantile in QUANTILES:
        a, b = (each[int(quantile * len(each))] / 1000 for each in (one, other))
        print(f"{name} {quantile}: {a:.0f} us plain, {b:.0f} profiled, {b - a:+.0f}")
    more = [mean(b[kind]) - mean(a[kind]) for a, b in zip(plain, profiled, strict=True)]
    error = statistics.stdev(more) / len(more) ** 0.5
    print(f"{name} mean: {mean(one):.0f} us plain, {mean(other) - mean(one):+.0f} +- {error:.0f}")
print(f"measuring_share {statistics.median(shares)}")
