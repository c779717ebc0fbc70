"""PyTorch when things go wrong: exceptions in every phase, models that object, odd endings."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import cirron as ci
from cirron import guard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.real.conftest import Traced

STEP = "data_load forward:train backward optimizer_step"
PHASES = ("dataset", "collate", "forward", "backward", "optimizer")


class OopsError(Exception):
    pass


class Fragile:
    """A loop that raises in one phase, the second time round, and can be asked to go on."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.rounds = 0
        self.model = nn.Linear(1, 1)
        fragile = self

        class Data(Dataset[Any]):
            def __len__(self) -> int:
                return 3

            def __getitem__(self, index: int) -> Any:
                fragile.rounds += 1
                fragile.enter("dataset")
                return torch.ones(1)

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(1, 1)
                self.inner.register_forward_hook(lambda *_: fragile.enter("forward"))

            def forward(self, x: torch.Tensor) -> Any:
                return self.inner(x)

        class Careful(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                fragile.enter("optimizer")
                return super().step(closure)

        self.loader = DataLoader(Data(), collate_fn=self.collate)
        self.model = Model()  # type: ignore[assignment]
        self.optimizer = Careful(self.model.parameters(), lr=0.1)

    def collate(self, items: list[torch.Tensor]) -> torch.Tensor:
        self.enter("collate")
        return torch.stack(items)

    def enter(self, phase: str) -> None:
        if phase == self.phase and self.rounds == 2:
            raise OopsError(phase)

    def train(self, batch: torch.Tensor) -> None:
        loss = self.model(batch).sum()
        loss.register_hook(lambda _: self.enter("backward"))
        loss.backward()
        self.optimizer.step()

    def epoch(self) -> None:
        for batch in self.loader:
            self.train(batch)


FAILED = {
    "dataset": "data_load!",
    "collate": "data_load!",
    "forward": "data_load forward:train!",
    "backward": "data_load forward:train backward!",
    "optimizer": "data_load forward:train backward optimizer_step!",
}


@pytest.mark.parametrize("phase", PHASES)
def test_an_exception_that_ends_the_loop(traced: Traced, phase: str) -> None:
    """What it was raised in says so, and what it cut short; what follows is outside."""
    fragile = Fragile(phase)

    with pytest.raises(OopsError):
        fragile.epoch()
    with ci.scope("after"):
        pass
    fragile.phase = ""
    fragile.epoch()

    first = f"epoch[0]!(step[0]({STEP}) step[1]!({FAILED[phase]}))"
    steps = " ".join(f"step[{index}]({STEP})" for index in range(3))
    assert f"{first} after epoch[1]({steps})" == traced()
    assert 1 == ci.health()["scope_depth"]


@pytest.mark.parametrize("phase", PHASES)
def test_an_exception_that_the_loop_survives(traced: Traced, phase: str) -> None:
    """A loop that catches it goes on in the same step, until an optimizer steps."""
    fragile = Fragile(phase)
    iterator = iter(fragile.loader)
    for _ in range(3):
        try:
            fragile.train(next(iterator))
        except OopsError:
            fragile.phase = ""
    del iterator

    rest = f"step[1]({FAILED[phase]} {STEP})"
    assert f"epoch[0](step[0]({STEP}) {rest})" == traced()


def test_what_the_span_says(traced: Traced) -> None:
    """The error's type and text are on the span."""
    fragile = Fragile("forward")
    with pytest.raises(OopsError):
        fragile.epoch()
    frame = [
        node
        for epoch in ci.trace(format="dict")["roots"][0]["children"]
        for step in epoch["children"]
        for node in step["children"]
        if "error" in node["attrs"]
    ]

    assert [{"mode": "train", "error": "OopsError: forward"}] == [node["attrs"] for node in frame]


def test_an_exception_in_a_closure(traced: Traced) -> None:
    """A closure that raises ends the forward and the optimizer's step that it was in."""
    fragile = Fragile("forward")
    fragile.rounds = 2
    optimizer: Any = torch.optim.LBFGS(fragile.model.parameters())

    with pytest.raises(OopsError):
        optimizer.step(lambda: fragile.model(torch.ones(1)))
    fragile.phase = ""
    fragile.model(torch.ones(1))

    assert "optimizer_step!(forward:train!) forward:train" == traced()


def test_an_interrupt(traced: Traced) -> None:
    """Ctrl-C in a forward passes through, and closes what was open: an epoch."""

    class Interrupted(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            raise KeyboardInterrupt

    fragile = Fragile("")
    fragile.model = Interrupted(1, 1)
    with pytest.raises(KeyboardInterrupt):
        fragile.epoch()

    assert "epoch[0]!(step[0]!(data_load forward:train!))" == traced()


def test_an_iterator_that_dies_on_another_thread(traced: Traced) -> None:
    """A pass ends wherever its iterator is dropped, and its thread goes on outside of it."""
    fragile = Fragile("")
    held = [iter(fragile.loader)]
    fragile.train(next(held[0]))
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    with ci.scope("after"):
        pass

    assert f"epoch[0](step[0]({STEP})) after" == traced()


# -- models that object ----------------------------------------------------------------------


class Secretive(nn.Linear):
    """Does not say whether it trains."""

    def __getattribute__(self, name: str) -> Any:
        if name == "training":
            raise OopsError(name)
        return super().__getattribute__(name)


class Unlisted(nn.Linear):
    """Does not show its parameters."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        raise OopsError("parameters")


class Unhashable(nn.Linear):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        raise OopsError("eq")


@pytest.mark.parametrize("kind", [Secretive, Unlisted, Unhashable])
def test_a_model_that_objects(
    kind: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, a count in health, and the result is what it is without us."""

    def outputs() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = kind(2, 1)
        weights = [model.weight, model.bias]
        optimizer = torch.optim.SGD(weights, lr=0.1)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return weights

    wanted = outputs()
    monkeypatch.setattr(guard, "strict", False)
    ci.profile(output="none")
    with caplog.at_level(logging.WARNING, "cirron"):
        found = outputs()

    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    errors = ci.health()["errors"]
    assert ["torch forward"] == [name.partition(":")[0] for name in errors]
    assert 1 == len(caplog.records)


def test_a_loader_of_a_strange_length(traced: Traced) -> None:
    """A loader whose length cannot be had is one without a length."""

    class Unsized(Dataset[Any]):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.ones(1)

        def __len__(self) -> int:
            raise OopsError("len")

    loader = DataLoader(Unsized(), sampler=[0, 1], batch_size=None)

    assert 2 == len(list(loader))
    assert 2 == traced().count("data_load")


# -- odd endings -----------------------------------------------------------------------------


class Counting(IterableDataset[Any]):
    """Marks how many items it had, once it has given the last one."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(2):
            yield torch.ones(1)
        ci.mark("items", 2)
        with ci.scope("closing"):
            pass


@pytest.mark.parametrize("trains", [True, False])
def test_a_data_set_that_records_at_its_end(traced: Traced, trains: bool) -> None:
    """What it records is in the fetch that finds no item; other such fetches leave no record."""
    model = nn.Linear(1, 1).train(trains)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in DataLoader(Counting()):
        loss = model(x).sum()
        if trains:
            loss.backward()
            optimizer.step()

    name, step = ("epoch[0]", "step") if trains else ("evaluation", "batch")
    work = STEP if trains else "data_load forward:eval"
    wanted = f"{name}({step}[0]({work}) {step}[1]({work})) data_load(closing)"
    assert wanted == traced()
    last = ci.trace(format="dict", name="data_load")["roots"][-1]
    assert {"items": 2} == {mark["name"]: mark["value"] for mark in last["marks"]}


def test_shutdown_in_the_middle_of_a_step() -> None:
    """What is open ends with the session; a session that begins in the loop goes on from there."""
    fragile = Fragile("")
    ci.profile(output="none")
    trees = []
    for index, batch in enumerate(fragile.loader):
        if index == 1:
            ci.shutdown()
            trees.append(ci.trace(format="dict"))
            ci.profile(output="none")
        fragile.train(batch)
    trees.append(ci.trace(format="dict"))

    assert 1 + 1 + 1 + 4 + 1 + 1 == trees[0]["span_count"]  # root, epoch, step[0], step[1], load
    assert not any(node["open"] for node in nodes(trees[0]["roots"]))
    names = [node["name"] for node in nodes(trees[1]["roots"]) if node["name"] != "cirron.session"]
    assert ["epoch"] == [name for name in names if name == "epoch"]
    assert ["step"] == [name for name in names if name == "step"]
    assert 2 == names.count("forward")


def nodes(roots: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [found for node in roots for found in (node, *nodes(node["children"]))]


def test_shutdown_inside_a_forward() -> None:
    """A model that ends the session in its forward gets its result, and nothing stays open."""

    class Ending(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            ci.shutdown()
            return super().forward(input)

    model = Ending(1, 1)
    ci.profile(output="none")
    model(torch.ones(1)).sum().backward()
    tree = ci.trace(format="dict")

    assert ["cirron.session", "forward"] == [node["name"] for node in nodes(tree["roots"])]
    assert not any(node["open"] for node in nodes(tree["roots"]))


def test_shutdown_while_another_thread_trains() -> None:
    """The other thread's spans end with the session, and it trains on, unseen."""
    fragile = Fragile("")
    stepped, ended = threading.Event(), threading.Event()

    def train() -> None:
        for batch in fragile.loader:
            fragile.train(batch)
            stepped.set()
            ended.wait(30)

    ci.profile(output="none")
    thread = threading.Thread(target=train)
    thread.start()
    stepped.wait(30)
    ci.shutdown()
    ended.set()
    thread.join()
    tree = ci.trace(format="dict")

    assert 1 + 1 + 1 + 4 == tree["span_count"]
    assert not any(node["open"] for node in nodes(tree["roots"]))


def test_nothing_is_kept_alive(traced: Traced) -> None:
    """A model, an optimizer and a loader that the program drops are gone."""
    fragile = Fragile("")
    fragile.epoch()
    held = [weakref.ref(one) for one in (fragile.model, fragile.optimizer, fragile.loader)]
    del fragile
    gc.collect()

    assert [None] * 3 == [one() for one in held]


def test_a_backward_that_raises_while_our_hook_fails(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program gets its own exception, also where we have no span to note it on."""
    monkeypatch.setattr(guard, "strict", False)
    weight: Any = torch.ones(2, requires_grad=True)
    loss = weight.sum()
    loss.register_hook(lambda _: (_ for _ in ()).throw(OopsError("backward")))
    monkeypatch.setattr("cirron.record.hot.begin", lambda *_: 1 / 0)

    with pytest.raises(OopsError):
        loss.backward()
