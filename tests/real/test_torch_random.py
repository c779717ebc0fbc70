"""Training programs put together at random: nothing changes, and everything is counted right.

A program is a list of loops: over loaders, without one, evaluations, loops that fail. It counts
what it does. It runs plain and profiled, and the tree must have the same counts.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import cirron as ci

if TYPE_CHECKING:
    from collections.abc import Iterator

    Item = tuple[torch.Tensor, torch.Tensor]

# What may be the parent of each span. A single step without a loader is not a loop.
PARENTS = {
    "epoch": {"cirron.session"},
    "step": {"epoch"},
    "batch": {"evaluation"},
    "evaluation": {"cirron.session", "epoch", "step", "rest"},
    "optimizer_step": {"step", "epoch", "rest", "cirron.session"},
    "backward": {"step", "epoch", "rest", "cirron.session"},
}
LOOPS = ("for", "for", "for", "next", "zip", "generator", "list", "no loader")
STEPS = ("plain", "plain", "plain", "two forwards", "two optimizers", "teacher", "checkpoint")


class StopTrainingError(Exception):
    pass


class Stream(IterableDataset["Item"]):
    def __init__(self, items: int) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Item]:
        for number in range(self.items):
            yield torch.full((4,), float(number)), torch.tensor(number % 3)


class Program:
    """The same seed makes the same program."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.random = random.Random(seed)
        self.models = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in "ab"]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in self.models]
        self.counts: Counter[str] = Counter()
        self.has_loader = True  # while it trains
        self.open: set[str] = set()  # spans whose number docs/pytorch.md leaves open

    def run(self) -> torch.Tensor:
        loops = (self.alone, self.alone, self.alone, self.evaluate, self.fail, self.epochs)
        for _ in range(self.random.randint(1, 3)):
            self.random.choice(loops)()
        return torch.cat([one.flatten() for model in self.models for one in model.parameters()])

    def loader(self) -> Iterator[Item]:
        """A loader that counts what is fetched."""
        batches = self.random.choice((1, 2, 3, 5))
        labels = torch.randint(0, 3, (batches * 4,))
        data = TensorDataset(torch.randn(batches * 4, 4), labels)
        is_stream = self.random.random() < 0.3
        return iter(DataLoader(Stream(batches * 4) if is_stream else data, batch_size=4))

    def each(self) -> Iterator[Item]:
        """The batches of an epoch, taken in one of many ways."""
        loop = self.random.choice(LOOPS)
        self.has_loader = loop not in ("list", "no loader")
        if loop == "no loader":
            yield from [(torch.randn(4, 4), torch.randint(0, 3, (4,))) for _ in range(3)]
            return
        loader = self.loader()
        if loop == "list":
            yield from [self.fetched(item) for item in loader]
        elif loop == "zip":
            others = self.loader()
            for item, _ in zip(map(self.fetched, loader), map(self.fetched, others), strict=False):
                yield item
        elif loop == "next":
            with contextlib.suppress(StopIteration):
                while True:
                    item = next(loader)
                    yield self.fetched(item)
        else:
            yield from map(self.fetched, loader)

    def fetched(self, item: Item) -> Item:
        self.counts["data_load"] += 1
        return item

    def epoch(self) -> None:
        accumulated, last = self.random.choice((1, 1, 1, 2)), self.random.choice((9, 9, 9, 1, 2))
        period, before = self.random.choice((9, 9, 2)), self.counts["step"]
        for number, item in enumerate(self.each()):
            if number == last:
                break
            self.step(item, number, accumulated)
            if number % period == period - 1:
                self.evaluate()
        # One step without a loader is no loop, and two optimizers may take turns.
        if accumulated > 1 or not (self.has_loader or self.counts["step"] > before + 1):
            self.open.add("step")

    def alone(self) -> None:
        self.epoch()
        self.counts["epoch"] += 1
        if not self.has_loader:  # several in a row are one epoch
            self.open.add("epoch")

    def epochs(self) -> None:
        for _ in ci.epochs(range(2)):
            self.epoch()
            self.counts["epoch"] += 1

    def fail(self) -> None:
        self.has_loader = True
        self.counts["epoch"] += 1
        with contextlib.suppress(StopTrainingError):
            for number, item in enumerate(map(self.fetched, self.loader())):
                self.step(item, number, 1)
                if number == 1:
                    raise StopTrainingError

    def forward(self, number: int, inputs: torch.Tensor) -> Any:
        self.counts["forward"] += 1
        return self.models[number](inputs)

    def step(self, item: Item, number: int, accumulated: int) -> None:
        self.counts["step"] += 1
        kind = self.random.choice(STEPS)
        inputs, labels = item[0].view(-1, 4), item[1].view(-1)
        if kind == "teacher":
            with torch.no_grad():
                self.forward(1, inputs)
        if kind == "two optimizers" and not self.has_loader:
            self.open.add("step")
        for model in (0, 1) if kind == "two optimizers" else (0,):
            outputs = self.forward(model, inputs)
            if kind == "two forwards":
                outputs = outputs + self.forward(model, inputs * 2)
            nn.functional.cross_entropy(outputs, labels).backward()
            self.counts["backward"] += 1
            if number % accumulated == accumulated - 1:
                self.optimizers[model].step()
                self.optimizers[model].zero_grad()
                self.counts["optimizer_step"] += 1
        if kind == "checkpoint":
            torch.save(self.models[0].state_dict(), "model.pt")
            self.counts["checkpoint"] += 1

    @torch.no_grad()
    def evaluate(self) -> None:
        self.models[0].train(self.random.random() < 0.3)
        most = self.random.choice((9, 1, 2))
        for inputs, _ in itertools.islice(self.loader(), most):
            self.counts["data_load"] += 1
            self.forward(0, inputs.view(-1, 4))
        self.models[0].train()


def nodes(node: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """All spans below a span, each with its parent."""
    for child in node["children"]:
        yield child, node
        yield from nodes(child)


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_programs(first: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are the same bit for bit; spans are as many as the program counts, and in place."""
    monkeypatch.chdir(tmp_path)
    for seed in range(first, first + 50):
        weights = Program(seed).run()
        ci.profile(output="none", frameworks=["torch"])
        profiled = Program(seed)
        same = profiled.run()
        errors = ci.health()["errors"]
        ci.shutdown()
        roots = ci.trace(format="dict")["roots"]
        (root,) = (one for one in roots if one["name"] == "cirron.session")
        found = list(nodes(root))

        assert torch.equal(weights, same), seed
        assert {} == errors, seed
        counted = Counter(node["name"] for node, _ in found)
        names = set(profiled.counts) - profiled.open
        assert {name: profiled.counts[name] for name in names} == {
            name: counted[name] for name in names
        }, seed
        for node, parent in found:
            allowed = PARENTS.get(node["name"])
            assert allowed is None or parent["name"] in allowed, (seed, node["name"])
