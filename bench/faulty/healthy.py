"""Healthy trainings, one a seed, each in a folder of its own: `python healthy.py FIRST LAST`.

Model, sizes, workers, optimizer, epochs, what is beside the steps: all vary. None waits for its
data, evaluates or saves often, or does anything else in its steps.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from common import mlp
from torch import nn
from torch.utils.data import DataLoader

import cirron as ci


class Sequence(nn.Module):
    """A model of sequences: recurrent, or with attention."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        if kind == "gru":
            self.body: nn.Module = nn.GRU(width, width, batch_first=True)
        else:
            self.body = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.body(inputs)
        return self.head((found[0] if isinstance(found, tuple) else found).mean(1))


def model_of(chance: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    """A model, and the shape of a sample. A step takes 4 to 20 ms."""
    kind = chance.choice(("mlp", "conv", "gru", "attention"))
    if kind == "mlp":
        width = chance.choice((512, 640))
        return mlp(width, chance.randint(3, 4)), (width,)
    if kind == "conv":
        channels = chance.choice((8, 16))
        layers = [nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(16 * 64, 10)), (3, 16, 16)
    width = chance.choice((96, 128))
    return Sequence(width, kind), (chance.choice((12, 16)), width)


def optimizer_of(chance: random.Random, model: nn.Module) -> torch.optim.Optimizer:
    kind: Any = chance.choice((torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW))
    return kind(model.parameters(), lr=1e-3)


def train(seed: int) -> None:
    """One training of some 120 steps, as its seed says."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    model, shape = model_of(chance)
    size = chance.choice((64, 96))
    epochs = chance.choice((1, 2, 3))
    steps = chance.randint(100, 150) // epochs
    optimizer = optimizer_of(chance, model)
    clips, evaluates, averages = (chance.random() < 0.4 for _ in range(3))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 50) if chance.random() < 0.5 else None
    workers = chance.choice((0, 0, 1, 2))
    pool = torch.randn(size * steps, *shape)
    labels = torch.randint(0, 10, (size * steps,))
    batches = [(pool[at : at + size], labels[at : at + size]) for at in range(0, len(pool), size)]
    loader: Any = DataLoader(
        Batches(batches), None, num_workers=workers, persistent_workers=workers > 0
    )
    if workers == 0 and chance.random() < 0.3:
        loader = batches  # a loop without a loader
    for _ in range(epochs):
        total = 0.0
        for inputs, wanted in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), wanted)
            loss.backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            total += loss.item() if averages else 0.0
        if evaluates:
            model.eval()
            with torch.no_grad():
                for inputs, _ in batches[:2]:
                    model(inputs)
            model.train()


class Batches(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, at: int) -> Any:
        return self.batches[at]


def main() -> None:
    first, last = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    here = Path.cwd()
    for seed in range(first, last):
        # Read by another process: loader workers that are forked from one that has used DuckDB
        # may crash.
        folder = here / str(seed)
        folder.mkdir()
        os.chdir(folder)
        ci.profile()
        train(seed)
        ci.shutdown()


if __name__ == "__main__":
    main()
