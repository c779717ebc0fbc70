"""Loops of real torch: modules as state, losses in logs, one tree with the profiler's hooks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import ciclo
import cirron as ci

X = torch.linspace(-1, 1, 32).reshape(16, 2)
Y = X.sum(1, keepdim=True)
LOADER: DataLoader[Any] = DataLoader(TensorDataset(X, Y), batch_size=4)


class Trainer:
    """A module and its optimizer, which can be saved and loaded."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"losses": {"loss": loss}}

    def test_step(self, batch: Any) -> Any:
        with torch.no_grad():
            x, y = batch
            return {"losses": {"loss": torch.nn.functional.mse_loss(self.model(x), y)}}

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])


def test_fit() -> None:
    """A DataLoader is read once an epoch; losses are plain numbers afterwards."""
    result = ciclo.fit(Trainer(), LOADER, LOADER, epochs=5)
    loss, valid = result.history.collect("loss"), result.history.collect("loss_valid")

    assert (20, 80) == (result.elapsed.steps, result.elapsed.samples)
    assert (20, 5) == (len(loss), len(valid))
    assert all(isinstance(value, float) for value in loss + valid)
    assert valid[-1] < valid[0]


def test_a_loop_is_a_loop() -> None:
    """The weights are those of the same steps written by hand, to the bit."""
    by_hand = Trainer()
    for _ in range(3):
        for batch in LOADER:
            by_hand.train_step(batch)
    trained = ciclo.fit(Trainer(), LOADER, epochs=3).state

    assert torch.equal(by_hand.model.weight, trained.model.weight)


def test_graphs_are_not_kept_alive() -> None:
    """A logged loss does not keep what it was computed from."""
    made: list[weakref.ref[Any]] = []

    def step(state: Any, batch: Any) -> Any:
        hidden = torch.ones(3, requires_grad=True) * 2
        made.append(weakref.ref(hidden))
        return {"metrics": {"loss": hidden.sum()}}

    result = ciclo.loop(0, range(50), {ciclo.every(1): step})
    gc.collect()

    assert [6.0] * 50 == result.history.collect("loss")
    assert 0 == sum(ref() is not None for ref in made)


def test_the_best_weights_come_back_in_place() -> None:
    """The module is the same object, with the weights and the optimizer of its best step."""
    trainer = Trainer()
    losses = iter([2.0, 1.0, 5.0, 5.0])
    weights = []

    def step(state: Trainer, batch: Any) -> Any:
        state.train_step(batch)
        weights.append(state.model.weight.detach().clone())
        return {"metrics": {"watched": next(losses)}}

    result = ciclo.loop(
        trainer,
        LOADER,
        [
            (ciclo.every(1), step),
            (ciclo.every(1), ciclo.early_stopping("watched", 9, restore_best_weights=True)),
        ],
    )

    assert result.state is trainer
    assert torch.equal(weights[1], trainer.model.weight)
    assert not torch.equal(weights[1], weights[3])


def test_a_dict_of_modules() -> None:
    """A state may be a dict of a module, an optimizer and a number."""
    trainer = Trainer()
    state = {"model": trainer.model, "optimizer": trainer.optimizer, "n": 0}
    losses = iter([1.0, 2.0])

    def step(state: Any, batch: Any) -> Any:
        trainer.train_step(batch)
        return {"metrics": {"x": next(losses)}}, {**state, "n": state["n"] + 1}

    tasks = [
        (ciclo.every(1), step),
        (ciclo.every(1), ciclo.early_stopping("x", 5, restore_best_weights=True)),
    ]
    result = ciclo.loop(state, list(LOADER)[:2], tasks)

    assert result.state["model"] is trainer.model
    assert 1 == result.state["n"]


def test_ema_of_a_module() -> None:
    """The average is a state dict that the module can load."""
    trainer = Trainer()
    average = ciclo.ema(0.5, select=lambda trainer: trainer.model)
    first = trainer.model.weight.detach().clone()
    ciclo.loop(trainer, [1, 2], {ciclo.every(1): [average, lambda state: None]})
    trainer.model.load_state_dict(average.value)

    assert torch.allclose(first, trainer.model.weight)


def test_one_tree_with_the_profiler() -> None:
    """Under a profiler the loop's epochs and steps hold what the hooks see inside of them."""
    ci.profile(output="none", frameworks=["torch"])
    ciclo.fit(Trainer(), LOADER, epochs=2)
    (root,) = ci.trace(format="dict")["roots"]
    epochs = root["children"]

    assert [("epoch", 0), ("epoch", 1)] == [(node["name"], node["index"]) for node in epochs]
    steps = epochs[1]["children"]
    assert [("step", n) for n in (4, 5, 6, 7)] == [(node["name"], node["index"]) for node in steps]
    names = [node["name"] for node in steps[0]["children"]]
    assert ["data_load", "train_step"] == names
    inside = [node["name"] for node in steps[0]["children"][1]["children"]]
    assert ["forward", "backward", "optimizer_step"] == inside
