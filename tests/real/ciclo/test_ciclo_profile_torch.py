"""What the profiler sees of a loop over real torch: its snapshots, and one wait a batch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests import spools
from torch.utils.data import DataLoader, TensorDataset

import ciclo
import cirron as ci

if TYPE_CHECKING:
    from cirron import wire


def loader_of(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(6, 2)), batch_size=2, **options)


class Trainer:
    """Adds one to its only weight in each step."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.model.weight)

    def train_step(self, batch: Any) -> None:
        with torch.no_grad():
            self.model.weight += 1

    def test_step(self, batch: Any) -> None:
        """Evaluates nothing."""


def recorded() -> spools.Recorded:
    ci.flush()
    return spools.read_one(Path(".cirron"))


def path_of(span: wire.Span, run: spools.Recorded) -> str:
    by_id = {one.id: one for one in run.spans}
    names = [span.name]
    while span.parent_id in by_id:
        span = by_id[span.parent_id]
        names.append(span.name)
    return "/".join(reversed(names))


@pytest.mark.parametrize("options", [{"epochs": 3}, {"steps": 8}], ids=["whole", "cut"])
def test_a_snapshot_at_the_end_of_each_epoch(options: dict[str, Any]) -> None:
    """A watched model is seen as each epoch left it, the last one too, however it ends."""
    trainer = Trainer()
    ci.profile()
    ci.watch(trainer.model)
    ciclo.fit(trainer, loader_of(), loader_of(), **options)
    run = recorded()
    epochs = {span.id: span.index for span in run.spans if span.name == "epoch"}

    ends = [3, 6, 9] if "epochs" in options else [3, 6, 8]
    assert dict(enumerate(ends)) == {
        epochs[record.span_id]: record.stats.mean for record in run.snapshots
    }


def test_no_snapshot_without_epochs() -> None:
    """A loop that knows no epochs takes none."""
    trainer = Trainer()
    ci.profile()
    ci.watch(trainer.model)
    ciclo.loop(trainer, loader_of(), {ciclo.every(1): trainer.train_step})

    assert [] == recorded().snapshots


@pytest.mark.parametrize("workers", [0, 2])
def test_a_wait_is_recorded_once(workers: int) -> None:
    """The loop says that it waits; the hook of the DataLoader does not say it again."""
    loader = loader_of(num_workers=workers, persistent_workers=workers > 0)
    ci.profile()
    ciclo.fit(Trainer(), loader, loader, epochs=2)
    run = recorded()

    assert 12 == sum(span.name == "data_load" for span in run.spans)
    assert {"epoch/step/data_load", "epoch/step/evaluation/step/data_load"} == {
        path_of(span, run) for span in run.spans if span.name == "data_load"
    }
    assert "batch" not in {span.name for span in run.spans}


def test_an_evaluation_has_no_other_inside() -> None:
    """The evaluation is the loop's: a forward in eval mode in it begins none."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = {"loss": lambda outputs: outputs.sum()}
    state = ciclo.create_torch_state(model, optimizer, losses=losses)
    ci.profile()
    ciclo.fit(state, loader_of(), loader_of(), epochs=2)
    run = recorded()

    assert ["epoch/step/evaluation"] * 2 == [
        path_of(span, run) for span in run.spans if span.name == "evaluation"
    ]


def test_a_step_is_not_a_loop_of_its_own() -> None:
    """What is trained inside of a loop's steps makes no epoch there, with a loader and without."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(batch: Any) -> None:
        optimizer.zero_grad()
        model(batch[0]).sum().backward()
        optimizer.step()

    ci.profile()
    for data in (loader_of(), [(torch.ones(2, 2),)] * 5):
        ciclo.loop(None, data, {ciclo.every(1): train_step})
        for _, batch in ciclo.elapse(data):
            train_step(batch)
    names = {span.name for span in recorded().spans}

    assert "epoch" not in names
    assert {"step", "forward", "backward", "optimizer_step"} <= names


def test_an_epoch_that_is_cut_is_evaluated_inside() -> None:
    """The data ends in the middle of an epoch: its evaluation and values are that epoch's."""

    def logs(loop_state: Any) -> Any:
        return {"metrics": {"seen": 1.0}}

    ci.profile()
    tasks = {ciclo.on_train_step: logs, ciclo.on_test_step: logs}
    ciclo.train_loop(None, range(5), tasks, epoch_duration=2, test_dataset=[1])
    run = recorded()

    tests = [path_of(span, run) for span in run.spans if span.name == "evaluation"]
    assert ["epoch/evaluation", *["epoch/step/evaluation"] * 2] == sorted(tests, key=len)
