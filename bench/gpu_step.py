"""What a step of a 5-module MLP takes more on a GPU, by quantile: `python bench/gpu_step.py`.

Plain and profiled epochs take turns in one process; quantiles of single steps are compared, since
on a shared host a mean says more of the neighbours than of us. Of processor time and of wall time.
"""

import os
import tempfile
import time
from itertools import pairwise

os.chdir(tempfile.mkdtemp())  # profiling writes where it starts
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import cirron as ci  # noqa: E402

ROUNDS, STEPS, WARM = 12, 300, 20
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


plain, profiled = ([], []), ([], [])
for _ in range(3):
    epoch()
for _ in range(ROUNDS):
    for kept, found in zip(plain, epoch(), strict=True):
        kept += found
    ci.profile(frameworks=["torch"])
    epoch()
    for kept, found in zip(profiled, epoch(), strict=True):
        kept += found
    share = ci.health().get("measuring_share")
    ci.shutdown()
for name, one, other in zip(("cpu", "wall"), plain, profiled, strict=True):
    for quantile in (0.01, 0.05, 0.25, 0.5):
        a, b = (sorted(each)[int(quantile * len(each))] / 1000 for each in (one, other))
        print(f"{name} {quantile}: {a:.0f} us plain, {b:.0f} profiled, {b - a:+.0f}")
print(f"measuring_share {share}")
