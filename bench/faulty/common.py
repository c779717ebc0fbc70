"""What the scripts share: the tool that watches them, and a clock of their own.

`FAULTS_TOOL` is cirron, traceml or gpuprof. `--fixed` runs a script with its fault mended, with the
workers that the verdict advised (`FAULTS_WORKERS`, `FAULTS_AHEAD`). A fault is as long as so many
steps of the model take here, so that it is one on any machine; `FAULTS_PACE` has the mended run use
the same measure. The last line that a script prints is JSON: seconds a step, without the first.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any

TOOL = os.environ.get("FAULTS_TOOL", "cirron")
IS_FIXED = "--fixed" in sys.argv
WARM_UP = 10
BATCH, WIDTH = 64, 512
WORKERS = int(os.environ.get("FAULTS_WORKERS", "0"))
AHEAD = int(os.environ.get("FAULTS_AHEAD", "2"))

if TOOL == "cirron" and not os.path.basename(sys.argv[0]).startswith("healthy"):
    import cirron as ci

    ci.profile()


class Loop:
    """Wraps the steps as the tool wants them, and takes their time."""

    def __init__(self, model: Any = None, samples: int = 1) -> None:
        self.ends: list[float] = []
        self.samples = samples  # of a step, so that batches of two sizes can be compared
        self._open = contextlib.ExitStack()
        self._step: Any = None
        if TOOL == "traceml":
            import traceml_ai

            traceml_ai.init(mode="auto")
            self._step = lambda: traceml_ai.trace_step(model)
        elif TOOL == "gpuprof":
            import gpuprof

            self._open.enter_context(gpuprof.profile("faulty"))

    @contextlib.contextmanager
    def step(self) -> Any:
        with self._step() if self._step else contextlib.nullcontext():
            yield
        self.ends.append(time.perf_counter())

    def end(self) -> None:
        """Prints what a sample took."""
        self._open.close()
        first = min(WARM_UP, len(self.ends) // 4)
        steps = len(self.ends) - 1 - first
        took = self.ends[-1] - self.ends[first] if steps > 0 else 0.0
        print(json.dumps({"seconds": took / max(steps, 1) / self.samples, "pace": pace.found}))


def workers() -> dict[str, Any]:
    """The loader's settings: none at first, and as advised once it is mended."""
    if not IS_FIXED:
        return {}
    return {"num_workers": WORKERS, "prefetch_factor": AHEAD, "persistent_workers": True}


def pace(model: Any, width: int = WIDTH) -> float:
    """What forward and backward of the model take, in seconds."""
    import torch

    if "FAULTS_PACE" in os.environ:
        pace.found = float(os.environ["FAULTS_PACE"])
        return pace.found
    inputs, times = torch.randn(BATCH, width), []
    for _ in range(30):
        began = time.thread_time()  # other work on the machine is not in it
        torch.autograd.grad(model(inputs).sum(), list(model.parameters()))
        times.append(time.thread_time() - began)
    pace.found = sorted(times)[10]
    return pace.found


pace.found = 0.0


def burn(seconds: float) -> None:
    """Keeps one core busy for this much processor time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def mlp(width: int = WIDTH, depth: int = 3, out: int = 10) -> Any:
    """A model whose step takes some 10 ms on one core."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers: list[Any] = []
    for _ in range(depth):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, out))


def samples(count: int, width: int = WIDTH) -> Any:
    """A data set that costs next to nothing: whole batches, sliced out of one tensor."""
    import torch

    class Sliced(torch.utils.data.Dataset):  # type: ignore[type-arg]
        inputs = torch.randn(count, width)
        labels = torch.randint(0, 10, (count,))

        def __len__(self) -> int:
            return count

        def __getitem__(self, at: int) -> Any:
            return self.inputs[at], self.labels[at]

        def __getitems__(self, at: list[int]) -> Any:
            return list(zip(self.inputs[at], self.labels[at], strict=True))

    return Sliced()


class Waits:
    """A data set whose batches wait for a disk or a network."""

    def __init__(self, batches: int, seconds: float) -> None:
        self.samples, self.seconds = samples(batches * BATCH), seconds

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, at: list[int]) -> Any:
        time.sleep(self.seconds)
        return self.samples.__getitems__(at)


def train(loader: Any, model: Any, loop: Loop, after: Any = None, epochs: int = 1) -> None:
    """The plain loop. `after(step, outputs, labels)` is called at the end of each step."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    number = 0
    for _ in range(epochs):
        for inputs, labels in loader:
            with loop.step():
                optimizer.zero_grad()
                outputs = model(inputs)
                loss = torch.nn.functional.cross_entropy(outputs, labels)
                loss.backward()
                optimizer.step()
                if after is not None:
                    after(number, outputs, labels)
            number += 1
    loop.end()
