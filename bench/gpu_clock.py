"""The processor time that the GPU path adds to a step, without a GPU: `python bench/gpu_clock.py`.

The loop of `gpu_step.py` on the CPU, with a device whose calls cost next to nothing and losses that
say that they are on it. Plain epochs, profiled ones without the clock, and profiled ones with it
take turns. Of the last, steps whose device time is measured are counted separately.
"""

import os
import tempfile
import threading
import time
from itertools import pairwise

os.chdir(tempfile.mkdtemp())  # profiling writes where it starts
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import cirron as ci  # noqa: E402
from cirron.hooks.torch import gpu  # noqa: E402
from cirron.record import hot  # noqa: E402
from cirron.record.budget import budget  # noqa: E402

ROUNDS, STEPS, WARM = int(os.environ.get("ROUNDS", "20")), 400, 20
torch.set_num_threads(1)
layers = [nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
items = torch.randn(STEPS, 8, 32), torch.randint(0, 4, (STEPS, 8))
loader = DataLoader(list(zip(*items, strict=True)), batch_size=None)


class Event:
    def record(self, stream):
        pass

    def query(self):
        return True

    def elapsed_time(self, end):
        return 1.0


class Device(gpu.Cuda):
    """A device that is always done."""

    def __init__(self):
        self.free = {}
        key = (0, 0, 1)
        self.current_stream = {-1: key, 0: key}.__getitem__
        self.is_capturing = threading.Event().is_set
        self.has_context = {0}.__contains__
        self.device_count = lambda: 1
        self.new_event = Event

    def new_stream(self, key):
        return key

    def peak_bytes(self, device):
        return 1000

    def read(self, scalars):
        return torch.stack(scalars).tolist()


class Loss:
    """A loss on that device: the hooks take it for a tensor."""

    __class__ = torch.Tensor
    __slots__ = ("detach", "loss")
    ndim = 0
    is_cpu, is_cuda = False, True

    def __init__(self, loss):
        self.loss, self.detach = loss, loss.detach

    def get_device(self):
        return 0

    def backward(self):
        torch.autograd.backward(self)


of_tensors = torch.autograd.backward
torch.autograd.backward = lambda loss: of_tensors(loss.loss)  # the hooks wrap this


def epoch(kept, thinned):
    """The times of steps; those that are measured come into another list."""
    times, measured = [time.thread_time_ns()], [0]
    began = time.process_time_ns() - times[0]
    for x, y in loader:
        optimizer.zero_grad(set_to_none=True)
        Loss(functional.cross_entropy(model(x), y)).backward()
        optimizer.step()
        times.append(time.thread_time_ns())
        measured.append(budget.measured)
    time.sleep(0.3)  # the background thread finishes
    others = time.process_time_ns() - time.thread_time_ns() - began
    for (a, b), (c, d) in list(zip(pairwise(times), pairwise(measured), strict=True))[WARM:]:
        (thinned if c == d else kept).append(b - a)
    return others / STEPS


def profiled(clock, kept, thinned):
    ci.profile(frameworks=["torch"])
    Loss.is_cpu, Loss.is_cuda = clock is None, clock is not None
    hot.use_device_clock(clock)
    epoch([], [])
    others = epoch(kept, thinned)
    share = budget.health()["measuring_share"]
    hot.use_device_clock(None)
    ci.shutdown()
    return others, share


device = Device()
Loss.item = lambda self: self.loss.item()
plain, cpu, gpu_thinned, gpu_measured = [], [], [], []
others = [], []
for _ in range(3):
    epoch([], [])
for _ in range(ROUNDS):
    epoch(plain, plain)
    others[0].append(profiled(None, cpu, cpu)[0])
    found, share = profiled(gpu.GpuClock(device), gpu_measured, gpu_thinned)
    others[1].append(found)
for quantile in (0.05, 0.25, 0.5):
    base, one, two, three = (
        sorted(each)[int(quantile * len(each))] / 1000
        for each in (plain, cpu, gpu_thinned, gpu_measured)
    )
    print(
        f"{quantile}: {base:.1f} us plain; more: {one - base:.1f} without the clock, "
        f"{two - base:.1f} with it, {three - base:.1f} in measured steps"
    )
low = [sorted(each)[len(each) // 4] / 1000 for each in others]
print(f"background threads, us per step: {low[0]:.1f} without the clock, {low[1]:.1f} with it")
print(f"measured steps {len(gpu_measured)}, thinned {len(gpu_thinned)}, measuring_share {share}")
