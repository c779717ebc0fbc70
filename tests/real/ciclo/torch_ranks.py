"""What one of several processes does in `test_torch_state_ranks.py`: `torch_ranks.py CASE FOLDER`.

Alone it is the reference: one process with the whole batch, of which two have a half each.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ciclo

CASE, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK, COUNT = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, BATCH = 20, 8


class Blocks(nn.Module):
    """Layers in a list, each a unit of `fully_shard`, layer norm and no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU()) for _ in range(2)
        )
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def data(count: int = STEPS * BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=made), torch.randint(3, (count,), generator=made)


def batches(sizes: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of these sizes; of each, this process has every so many-th sample."""
    x, y = data(sum(sizes))
    pairs = zip(x.split(sizes), y.split(sizes), strict=True)
    return [(a[RANK::COUNT], b[RANK::COUNT]) for a, b in pairs]


def state(strategy: str, **options: Any) -> Any:
    torch.manual_seed(RANK)  # the weights of the first process count
    module = Blocks()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return ciclo.create_torch_state(
        module,
        optimizer,
        losses={"fit": nn.CrossEntropyLoss(), "size": lambda outputs: outputs.square().mean()},
        metrics=metrics(),
        strategy=strategy,
        **options,
    )


def metrics() -> dict[str, Any]:
    import torchmetrics

    multiclass = torchmetrics.classification
    return {
        "running": multiclass.MulticlassAccuracy(3, average="micro"),
        "all": torchmetrics.MetricCollection({"f1": multiclass.MulticlassF1Score(3)}),
        "own": Seen(),
        "now": lambda outputs, targets: (outputs.argmax(-1) == targets).float().mean(),
    }


class Seen:
    """The sum of all targets so far, as a metric that is not torchmetrics'."""

    def __init__(self) -> None:
        self.total = 0

    def update(self, outputs: Any, targets: torch.Tensor) -> None:
        self.total += int(targets.sum())

    def compute(self) -> float:
        return float(self.total)

    def reset(self) -> None:
        self.total = 0

    def merge_state(self, others: list[Seen]) -> None:
        self.total += sum(other.total for other in others)


def weights(state: Any) -> dict[str, torch.Tensor]:
    return {
        name: getattr(one, "full_tensor", lambda one=one: one)().detach().clone()
        for name, one in state.module.state_dict().items()
    }


def held(state: Any) -> dict[str, tuple[int, int]]:
    """How many rows of each parameter, and of what the optimizer keeps for it, are here."""
    momenta = {
        f"{name} momentum": state.optimizer.state[one]["momentum_buffer"]
        for name, one in state.module.named_parameters()
    }
    return {
        name: (len(one.to_local() if isinstance(one, DTensor) else one), len(one))
        for name, one in {**dict(state.module.named_parameters()), **momenta}.items()
    }


def train(strategy: str, sizes: list[int] | None = None) -> dict[str, Any]:
    """Twenty steps, and what each logged."""
    made = state(strategy, clip_norm=1.0, ema_decay=0.9)
    train, test = batches(sizes or [BATCH] * STEPS), batches([BATCH, 5])
    result = ciclo.train_loop(made, train, test_dataset=test)
    average = {k: getattr(v, "full_tensor", lambda v=v: v)() for k, v in made.ema_params.items()}
    return {
        "weights": weights(made),
        "average": average,
        "rows": rows(result),
        "held": held(made),
    }


def unequal(strategy: str) -> dict[str, Any]:
    """The same, where the first of two processes has one sample more in most of the steps."""
    return train(strategy, [5, 8, 3, 7] * (STEPS // 4))


def by_hand(strategy: str) -> dict[str, Any]:
    """Three samples for each process: `DistributedDataParallel` as one writes it, and the state."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    given = batches([6] * STEPS)
    made = ciclo.create_torch_state(
        copy.deepcopy(module),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        losses=nn.CrossEntropyLoss(),
        strategy=strategy,
    )
    ciclo.train_loop(made, given)
    parallel = nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for x, y in given:
        optimizer.zero_grad()
        nn.functional.cross_entropy(parallel(x), y).backward()
        optimizer.step()
    return {"weights": weights(made), "by_hand": dict(module.state_dict())}


def accumulate(strategy: str) -> dict[str, Any]:
    """Windows of three batches of different sizes; the last window has two."""
    made = state(strategy, accumulate=3)
    result = ciclo.fit(made, batches([8, 5, 8, 3, 6, 8, 4, 7]), epochs=1)
    return {"weights": weights(made), "rows": rows(result)}


def rows(result: Any) -> list[dict[str, float]]:
    return [
        {
            name: value
            for values in row.values()
            for name, value in values.items()
            if name not in ("time", "date", "samples")
        }
        for row in result.history
    ]


def resume(strategy: str) -> dict[str, Any]:
    """Goes on from the newest checkpoint, and is killed after a step if `KILL` says so."""
    made = state(strategy, accumulate=4, ema_decay=0.9)
    save = ciclo.checkpoint(FOLDER / "run", keep=None, asynchronous=False)
    steps: list[int] = []

    def step(state: Any, batch: Any, elapsed: ciclo.Elapsed) -> Any:
        if elapsed.steps == int(os.environ.get("KILL", STEPS)):
            os.kill(os.getpid(), signal.SIGKILL)
        steps.append(elapsed.steps)
        return state.train_step(batch)

    tasks = {ciclo.every(1): step, ciclo.every(3): save}
    result = ciclo.loop(made, batches([7] * STEPS), tasks, resume=FOLDER / "run")
    return {"weights": weights(made), "rows": rows(result), "held": held(made), "steps": steps}


def epochs(strategy: str) -> dict[str, Any]:
    """The samples of each epoch, by a loader with a DistributedSampler."""
    made = state(strategy)
    seen: list[list[int]] = []
    set_ = TensorDataset(*data(16), torch.arange(16))
    loader: Any = DataLoader(set_, batch_size=4, sampler=DistributedSampler(set_, seed=3))

    def step(state: Any, batch: Any) -> Any:
        seen.append(batch[2].tolist())
        return state.train_step(batch[:2])

    ciclo.fit(made, loader, epochs=3, train_step=step)
    return {"seen": seen}


CASES = {
    "train": train,
    "unequal": unequal,
    "by_hand": by_hand,
    "accumulate": accumulate,
    "resume": resume,
    "epochs": epochs,
}


def main() -> None:
    torch.set_num_threads(1)
    for case in CASE.split(","):
        name, strategy = case.split(":")
        torch.save(CASES[name](strategy), FOLDER / f"{name}-{strategy}-{COUNT}-{RANK}.pt")


if __name__ == "__main__":
    main()
