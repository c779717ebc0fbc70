"""PyTorch loops as people write them: optimizers of all kinds, loaders in all positions."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.spools import read_one
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import cirron as ci
from cirron.hooks.torch import callers
from cirron.record import hot

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.real.conftest import Traced

STEP = "data_load forward:train backward optimizer_step"


def loader_of(batches: int = 2, **options: Any) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(batches * 2, 4), torch.randn(batches * 2, 1))
    return DataLoader(data, batch_size=2, **options)


class Loop:
    """A small model, and the lines that train it."""

    def __init__(self) -> None:
        self.model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def loss(self, batch: Any) -> Any:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        self.optimizer.step()


PHASES = "forward:train backward optimizer_step"  # of a step without a loader


def steps(count: int, body: str = STEP) -> str:
    return " ".join(f"step[{index}]({body})" for index in range(count))


# -- optimizers ------------------------------------------------------------------------------


def test_a_gan(traced: Traced) -> None:
    """Two models with an optimizer each, both stepped for each batch, make one step of it."""
    generator, critic = nn.Linear(2, 4), nn.Linear(4, 1)
    make = torch.optim.Adam(generator.parameters())
    judge = torch.optim.Adam(critic.parameters())
    for real, _ in loader_of():
        judge.zero_grad()
        made = generator(torch.randn(2, 2))
        (critic(made.detach()).mean() - critic(real).mean()).backward()
        judge.step()
        make.zero_grad()
        (-critic(made).mean()).backward()
        make.step()

    forwards = "forward:train forward:train forward:train"
    body = f"data_load {forwards} backward optimizer_step forward:train backward optimizer_step"
    assert f"epoch[0]({steps(2, body)})" == traced()


def test_several_optimizers(traced: Traced) -> None:
    """Optimizers for parts of one model are stepped within one step."""
    loop = Loop()
    parts = [torch.optim.SGD([part], lr=0.1) for part in loop.model.parameters()]
    for batch in loader_of():
        loop.loss(batch).backward()
        for optimizer in parts:
            optimizer.step()

    body = "data_load forward:train backward" + " optimizer_step" * 4
    assert f"epoch[0]({steps(2, body)})" == traced()


def test_a_closure(traced: Traced) -> None:
    """What a closure does is inside the optimizer's step that calls it."""
    loop = Loop()
    optimizer: Any = torch.optim.LBFGS(loop.model.parameters(), max_iter=2)
    for batch in loader_of():

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = loop.loss(batch)
            loss.backward()
            return loss

        optimizer.step(closure)

    pairs = "forward:train backward forward:train backward"
    assert f"epoch[0]({steps(2, f'data_load optimizer_step({pairs})')})" == traced()


class Twice(torch.optim.Optimizer):
    """An optimizer that wraps another and steps it twice."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__([weight for group in inner.param_groups for weight in group["params"]], {})

    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        self.inner.step()


def test_an_optimizer_in_an_optimizer(traced: Traced) -> None:
    """The step of a wrapped optimizer is inside the wrapper's, and counts once."""
    loop = Loop()
    loop.optimizer = Twice(loop.optimizer)
    for batch in loader_of():
        loop.step(batch)

    inner = "optimizer_step(optimizer_step optimizer_step)"
    assert f"epoch[0]({steps(2, f'data_load forward:train backward {inner}')})" == traced()


def test_an_optimizer_that_extends_another(traced: Traced) -> None:
    """A subclass that calls its parent's step is one optimizer, and steps once."""

    class Announced(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    loop = Loop()
    loop.optimizer = Announced(loop.model.parameters(), lr=0.1)
    for batch in loader_of():
        loop.step(batch)

    assert f"epoch[0]({steps(2)})" == traced()


def test_a_scheduler(traced: Traced) -> None:
    """A scheduler, which wraps its optimizer's step, changes nothing."""
    loop = Loop()
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1)
    for batch in loader_of():
        loop.step(batch)
        scheduler.step()

    assert f"epoch[0]({steps(2)})" == traced()


def test_an_optimizer_inside_the_backward(traced: Traced) -> None:
    """Optimizers that step as gradients arrive are inside the backward, and end the step."""
    loop = Loop()
    weights: Any = loop.model.parameters()
    for weight in weights:
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.register_post_accumulate_grad_hook(lambda _, step=optimizer.step: step())
    for batch in loader_of():
        loop.loss(batch).backward()

    inner = "backward(optimizer_step optimizer_step optimizer_step optimizer_step)"
    assert f"epoch[0]({steps(2, f'data_load forward:train {inner}')})" == traced()


def test_mixed_precision(traced: Traced) -> None:
    """Autocast and a scaler leave the steps as they are."""
    loop = Loop()
    scaler = torch.amp.GradScaler("cpu")
    for batch in loader_of():
        loop.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loop.loss(batch)
        scaler.scale(loss).backward()
        scaler.step(loop.optimizer)
        scaler.update()

    assert f"epoch[0]({steps(2)})" == traced()


def test_a_step_that_the_scaler_skips(traced: Traced) -> None:
    """When the scaler finds infinity the step ends all the same, and says so."""
    loop = Loop()
    scaler = torch.amp.GradScaler("cpu")
    for batch in loader_of():
        loop.optimizer.zero_grad()
        scaler.scale(loop.loss(batch) * float("inf")).backward()
        scaler.step(loop.optimizer)
        scaler.update()
    found = traced()

    assert f"epoch[0]({steps(2, 'data_load forward:train backward')})" == found
    (root,) = ci.trace(format="dict")["roots"]
    skipped = [step["attrs"] for step in root["children"][0]["children"]]
    assert [{"optimizer_skipped": True}] * 2 == skipped


def test_a_scaler_and_an_optimizer_of_another_library(traced: Traced) -> None:
    """The scaler's step of an optimizer that the hooks do not see ends a step like others."""
    loop = Loop()
    inner = loop.optimizer

    class Wrapped:
        param_groups, state, defaults = inner.param_groups, inner.state, inner.defaults

        def step(self) -> None:
            for weight in loop.model.parameters():
                weight.data -= 0.1 * weight.grad  # type: ignore[operator]

    scaler = torch.amp.GradScaler("cpu")
    for batch in loader_of():
        loop.optimizer.zero_grad()
        scaler.scale(loop.loss(batch)).backward()
        scaler.step(Wrapped())  # type: ignore[arg-type]
        scaler.update()
    found = traced()

    assert f"epoch[0]({steps(2, 'data_load forward:train backward')})" == found
    (root,) = ci.trace(format="dict")["roots"]
    assert [{}, {}] == [step["attrs"] for step in root["children"][0]["children"]]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpoints(traced: Traced, use_reentrant: bool) -> None:
    """What a checkpoint runs again is a part of the backward, not a second forward."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> Any:
            hidden = checkpoint(self.first, x.requires_grad_(), use_reentrant=use_reentrant)
            return checkpoint(self.second, hidden, use_reentrant=use_reentrant)

    loop = Loop()
    loop.model = Checkpointed()
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    for batch in loader_of():
        loop.step(batch)

    assert f"epoch[0]({steps(2)})" == traced()


def test_the_random_state_of_a_checkpoint(traced: Traced) -> None:
    """A checkpoint with dropout computes the gradients that it computes without us."""

    def gradient() -> Any:
        torch.manual_seed(0)
        part = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        checkpoint(part, torch.ones(2, 4), use_reentrant=False).sum().backward()
        return part[0].weight.grad

    found = gradient()
    ci.shutdown()

    assert torch.equal(gradient(), found)


# -- loaders ---------------------------------------------------------------------------------


def test_break(traced: Traced) -> None:
    """A loop that is left early ends its epoch there; what follows is not inside it."""
    loop = Loop()
    loader = loader_of(4)
    for _ in range(2):
        for index, batch in enumerate(loader):
            if index == 1:
                break
            loop.step(batch)
        with ci.scope("between"):
            pass

    body = f"step[0]({STEP}) skipped(data_load)"
    assert f"epoch[0]({body}) between epoch[1]({body}) between" == traced()


def test_break_out_of_a_generator(traced: Traced) -> None:
    """A generator around the loader that is left early ends the epoch, without an error."""
    loop = Loop()

    def batches() -> Iterator[Any]:
        for batch in loader_of(4):
            yield [part.clone() for part in batch]

    for index, batch in enumerate(batches()):
        loop.step(batch)
        if index == 1:
            break
    with ci.scope("after"):
        pass

    assert f"epoch[0]({steps(2)}) after" == traced()


def test_continue(traced: Traced) -> None:
    """A batch that is skipped is loaded within the step that goes on after it."""
    loop = Loop()
    for index, batch in enumerate(loader_of(3)):
        if index == 1:
            continue
        loop.step(batch)

    skipped = "data_load forward:train backward optimizer_step"
    assert f"epoch[0](step[0]({STEP}) step[1](data_load {skipped}))" == traced()


def test_return(traced: Traced) -> None:
    """A function that returns from within the loop ends the epoch."""
    loop = Loop()
    loader = loader_of(4)

    def train() -> None:
        for batch in loader:
            loop.step(batch)
            return

    train()
    with ci.scope("after"):
        pass

    assert f"epoch[0]({steps(1)}) after" == traced()


def test_an_iterator_that_is_held(traced: Traced) -> None:
    """Batches that are asked for with `next` make steps, and the end of the iterator an epoch."""
    loop = Loop()
    loader = loader_of()
    iterator = iter(loader)
    for _ in range(4):
        try:
            batch = next(iterator)
        except StopIteration:
            iterator = iter(loader)
            batch = next(iterator)
        loop.step(batch)
    del iterator

    assert f"epoch[0]({steps(2)}) epoch[1]({steps(2)})" == traced()


def test_an_iterator_that_is_held_through_ci_epochs(traced: Traced) -> None:
    """An iterator that outlives the epoch has its steps under each epoch, numbered from 0."""
    loop = Loop()
    iterator = iter(loader_of(4))
    for _ in ci.epochs(range(2)):
        for _ in range(2):
            loop.step(next(iterator))
    del iterator

    assert f"epoch[0]({steps(2)}) epoch[1]({steps(2)})" == traced()


def test_an_iterator_that_was_peeked_at(traced: Traced) -> None:
    """A first batch that was only looked at, its iterator held, does not swallow the training."""
    loop = Loop()
    loader = loader_of()
    peeked = iter(loader)
    next(peeked)
    for _ in range(2):
        for batch in loader:
            loop.step(batch)

    assert f"data_load epoch[0]({steps(2)}) epoch[1]({steps(2)})" == traced()


def test_a_peek_and_a_held_iterator(traced: Traced) -> None:
    """Of two iterators that are stepped by hand, the one that is asked on and on drives."""
    loop = Loop()
    loader = loader_of()
    peeked = iter(loader)
    next(peeked)
    iterator = iter(loader)
    for batch in iter(lambda: next(iterator, None), None):
        loop.step(batch)

    assert f"epoch[0](step[0](data_load {STEP}) step[1]({STEP}))" == traced()


def test_a_scope_around_each_fetch(traced: Traced) -> None:
    """A scope for the fetch alone holds its `data_load`; no epoch is made of each."""
    loop = Loop()
    iterator = iter(loader_of(4))
    for _ in range(3):
        with ci.scope("fetch"):
            batch = next(iterator)
        loop.step(batch)
    found = traced()

    assert 1 == found.count("epoch[")
    assert found.endswith(" fetch(data_load) forward:train backward optimizer_step")


def test_no_snapshot_after_each_fetch_in_a_scope(traced: Traced) -> None:
    """In an epoch of the program, the end of a scope around a fetch is not that of the epoch."""
    loop = Loop()
    ci.watch(loop.model)
    iterator = iter(loader_of(4))
    with ci.scope("epoch", index=0):
        for _ in range(3):
            with ci.scope("fetch"):
                batch = next(iterator)
            loop.step(batch)
    ci.flush()

    assert 0 == ci.health()["snapshot_count"]
    assert traced().startswith("epoch[0](")


def test_nested_loaders(traced: Traced) -> None:
    """A loader inside the loop of another fetches for the outer one's steps."""
    loop = Loop()
    inner = loader_of()
    for _ in loader_of():
        for batch in inner:
            loop.loss(batch).backward()
        loop.optimizer.step()

    body = "data_load data_load forward:train backward data_load forward:train backward"
    assert f"epoch[0]({steps(2, f'{body} optimizer_step')})" == traced()


def test_zipped_loaders(traced: Traced) -> None:
    """Two loaders in one loop load for one step."""
    loop = Loop()
    for batch, _ in zip(loader_of(), loader_of(), strict=True):
        loop.step(batch)

    assert f"epoch[0]({steps(2, f'data_load {STEP}')})" == traced()


def test_two_iterators_side_by_side(traced: Traced) -> None:
    """Labelled and unlabelled batches, each from its own iterator, make one step together."""
    loop = Loop()
    labelled, unlabelled = iter(loader_of(3)), iter(loader_of(3))
    for _ in range(3):
        next(unlabelled)
        loop.step(next(labelled))
    del labelled, unlabelled

    assert f"epoch[0]({steps(3, f'data_load {STEP}')})" == traced()


def test_a_validation_batch_inside_training(traced: Traced) -> None:
    """`next(val_iter)` in a step is an evaluation that ends when training goes on."""
    loop = Loop()
    validation = iter(loader_of(4))
    for batch in loader_of():
        loss = loop.loss(batch)
        with torch.no_grad():
            loop.loss(next(validation))
        loss.backward()
        loop.optimizer.step()

    inner = "evaluation(batch[0](data_load forward:train))"
    body = f"data_load forward:train {inner} backward optimizer_step"
    assert f"epoch[0]({steps(2, body)})" == traced()


def ahead(loader: DataLoader[Any]) -> Iterator[Any]:
    """Fetches one batch ahead of the one that is used, as several libraries do."""
    iterator = iter(loader)
    batch = next(iterator)
    for _ in range(len(loader)):
        following = next(iterator, None)
        yield batch
        batch = following


def test_marks_in_a_validation_in_train_mode(traced: Traced) -> None:
    """A validation without `eval()` that marks values is known by its second batch."""
    loop = Loop()
    with torch.no_grad():
        for batch in loader_of(3):
            ci.mark("val_loss", loop.loss(batch))

    batches = " ".join(f"batch[{index}](data_load forward:train)" for index in range(3))
    assert f"evaluation({batches})" == traced()
    (evaluation,) = ci.trace(name="evaluation", format="dict")["roots"]
    assert [0, 1, 1] == [len(one["marks"]) for one in evaluation["children"]]


def test_the_end_of_workers_is_outside_of_the_last_step(tmp_path: Path) -> None:
    """A `break` that stops the workers of a loader ends the step first."""
    ci.profile(path=str(tmp_path))

    def train() -> None:
        loop = Loop()
        for index, batch in enumerate(loader_of(4, num_workers=1)):
            loop.step(batch)
            if index == 1:
                break

    train()
    ci.shutdown()
    spans = read_one(tmp_path).spans
    (teardown,) = [span for span in spans if span.name == "data_teardown"]
    (last,) = [span for span in spans if span.name == "step" and span.index == 1]

    assert last.end_ns == teardown.start_ns


def test_a_teacher_in_train_mode(traced: Traced) -> None:
    """What runs without gradients is not what is trained, even after that and in train mode."""
    teacher, student = nn.Linear(4, 1), nn.Linear(4, 1)
    for x, _ in loader_of():
        out = student(x)
        with torch.no_grad():
            target = teacher(x)
        student.zero_grad()
        nn.functional.mse_loss(out, target).backward()
        with torch.no_grad():
            for weight in student.parameters():
                weight.add_(weight.grad, alpha=-0.1)  # type: ignore[arg-type]

    body = "data_load forward:train forward:train backward"
    assert f"epoch[0]({steps(2, body)})" == traced()


def test_a_loader_that_is_read_ahead(traced: Traced) -> None:
    """Fetching ahead moves fetches between steps, and adds no step and no epoch."""
    loop = Loop()
    loader = loader_of(3)
    for _ in range(2):
        for batch in ahead(loader):
            loop.step(batch)

    last = "step[2](forward:train backward optimizer_step)"
    epoch = f"step[0](data_load {STEP}) step[1]({STEP}) {last}"
    assert f"epoch[0]({epoch}) epoch[1]({epoch})" == traced()


def prefetched(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yields the last batch when the loader has ended."""
    held: list[Any] = []
    for batch in loader:
        yield from held
        held = [batch]
    yield from held


def test_an_evaluation_that_reads_ahead_ends_with_its_epoch(tmp_path: Path) -> None:
    """Its last batch is open until the next loader is used, but the epoch ends before that."""
    loop = Loop()
    ci.profile(path=str(tmp_path))
    for _ in ci.epochs(range(2)):
        for batch in loader_of():
            loop.step(batch)
        loop.model.eval()
        with torch.no_grad():
            for batch in prefetched(loader_of()):
                loop.loss(batch)
        loop.model.train()
    ci.shutdown()
    spans = read_one(tmp_path).spans
    ends = {span.id: span.end_ns or 0 for span in spans}

    assert 2 == sum(span.name == "evaluation" for span in spans)
    assert all(ends[span.id] <= ends[span.parent_id] for span in spans if span.parent_id)


def test_an_empty_loader(traced: Traced) -> None:
    """A loader that has nothing, or nothing any more, leaves no span."""
    iterator = iter(loader_of(0, sampler=[]))

    assert (None, None) == (next(iterator, None), next(iterator, None))
    assert "" == traced()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.ones(4), torch.ones(1))] * 4)


def test_a_stream_that_ends(traced: Traced) -> None:
    """A streaming loader that comes to its end has an epoch a pass."""
    loop = Loop()
    loader = DataLoader(Stream(), batch_size=2)
    for _ in range(2):
        for batch in loader:
            loop.step(batch)

    assert f"epoch[0]({steps(2)}) epoch[1]({steps(2)})" == traced()


def cycle(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def test_a_loader_that_is_cycled(traced: Traced) -> None:
    """A generator that goes round and round has an epoch a round."""
    loop = Loop()
    batches = cycle(loader_of())
    for _ in range(4):
        loop.step(next(batches))
    del batches

    assert f"epoch[0]({steps(2)}) epoch[1]({steps(2)})" == traced()


def train_on_tensors(loop: Loop, count: int, *, marks: bool = False) -> list[float]:
    """A loop without a loader, and its losses."""
    losses = []
    for _ in range(count):
        loop.optimizer.zero_grad()
        loss = loop.loss((torch.randn(2, 4), torch.randn(2, 1)))
        loss.backward()
        loop.optimizer.step()
        losses.append(loss.item())
        if marks:
            ci.mark("loss", losses[-1])
    return losses


def marks_by_span(name: str) -> list[tuple[str, int | None, Any]]:
    """The marks of this name, each with the span that has it."""
    found, waiting = [], list(ci.trace(format="dict")["roots"])
    while waiting:
        span = waiting.pop(0)
        found += [
            (span["name"], span["index"], mark["value"])
            for mark in span["marks"]
            if mark["name"] == name
        ]
        waiting += span["children"]
    return found


def test_marks_at_the_end_of_an_iteration_without_a_loader(traced: Traced) -> None:
    """A value that is marked after the optimizer's step is of that step, and replaces its loss."""
    losses = train_on_tensors(Loop(), 4, marks=True)

    found = marks_by_span("loss")
    assert ("cirron.session", None) == found[0][:2]  # no loop was known
    assert [("step", index) for index in (1, 2, 3)] == [one[:2] for one in found[1:]]
    assert losses == [one[2] for one in found]


class LibraryTensor(torch.Tensor):
    """As MONAI and fastai make: results keep the class."""


def test_a_loss_of_a_library_class(traced: Traced) -> None:
    """The loss may be of a tensor class that only adds methods, and stays of that class."""
    loop, values = Loop(), []
    for x, y in loader_of(2):
        loss: Any = loop.loss((x.as_subclass(LibraryTensor), y))
        assert "LibraryTensor" == type(loss).__name__
        loss.backward()
        loop.optimizer.step()
        values.append(loss.item())

    assert [("step", n, value) for n, value in enumerate(values)] == marks_by_span("loss")


def test_the_last_loss_without_a_loader(traced: Traced) -> None:
    """The loss of the last step is there, and looking at it adds no step."""
    losses = train_on_tensors(Loop(), 3)

    for _ in range(2):
        assert [("step", n, loss) for n, loss in enumerate(losses)] == marks_by_span("loss")
    assert f"epoch[0]?({steps(3, PHASES)})" == traced()
    ci.shutdown()
    assert [("step", n, loss) for n, loss in enumerate(losses)] == marks_by_span("loss")
    assert "rest" not in ci.trace(format="json")


def test_ci_epochs_without_a_loader(traced: Traced) -> None:
    """Steps go from one optimizer's step to the next; a summary after the last is the epoch's."""
    loop, losses = Loop(), []
    for _ in ci.epochs(range(2)):
        losses += train_on_tensors(loop, 3, marks=True)
        ci.mark("accuracy", 0.5, kind="summary")

    assert f"epoch[0]({steps(3, PHASES)}) epoch[1]({steps(3, PHASES)})" == traced()
    expected = [("step", n % 3, loss) for n, loss in enumerate(losses)]
    assert expected == marks_by_span("loss")
    assert [("epoch", 0, 0.5), ("epoch", 1, 0.5)] == marks_by_span("accuracy")


def test_ci_epochs_with_one_step_each(traced: Traced) -> None:
    """Full-batch training: each epoch has one step."""
    loop = Loop()
    for _ in ci.epochs(range(2)):
        train_on_tensors(loop, 1)

    assert f"epoch[0]({steps(1, PHASES)}) epoch[1]({steps(1, PHASES)})" == traced()


def test_a_loader_after_a_loop_without_one_in_an_epoch(traced: Traced) -> None:
    """Both loops have their steps in the epoch of the program."""
    loop = Loop()
    for _ in ci.epochs(range(1)):
        train_on_tensors(loop, 2)
        for batch in loader_of():
            loop.step(batch)

    assert f"epoch[0]({steps(2, PHASES)} {steps(2)})" == traced()


def test_a_scope_around_each_step_in_ci_epochs(traced: Traced) -> None:
    """A scope of the program around each iteration stays; it is not known to be a step."""
    loop = Loop()
    for _ in ci.epochs(range(1)):
        for _ in range(3):
            with ci.scope("mine"):
                train_on_tensors(loop, 1)

    assert f"epoch[0]({' '.join([f'mine({PHASES})'] * 3)})" == traced()


def test_a_scope_around_the_steps_in_ci_epochs(traced: Traced) -> None:
    """A scope around the loop has its steps."""
    loop = Loop()
    for _ in ci.epochs(range(1)):
        with ci.scope("mine"):
            train_on_tensors(loop, 3)

    assert f"epoch[0](mine({steps(3, PHASES)}))" == traced()


def test_targets_after_an_evaluation_without_a_loader(traced: Traced) -> None:
    """A forward in train mode without gradients, for the targets of a step, ends an evaluation."""
    loop = Loop()
    train_on_tensors(loop, 2)
    loop.model.eval()
    with torch.no_grad():
        loop.model(torch.randn(2, 4))
    loop.model.train()
    with torch.no_grad():
        target = loop.model(torch.randn(2, 4))
    loop.optimizer.zero_grad()
    loop.loss((torch.randn(2, 4), target)).backward()
    loop.optimizer.step()

    third = f"step[2](evaluation(forward:eval) forward:train {PHASES})"
    assert f"epoch[0]?({steps(2, PHASES)} {third})" == traced()


def test_items_that_are_kept_and_cycled(traced: Traced) -> None:
    """`itertools.cycle` goes on without the loader: as a loop without one."""
    loop = Loop()
    for _, batch in zip(range(2 + 4), itertools.cycle(loader_of()), strict=False):
        loop.step(batch)

    phases = "forward:train backward optimizer_step"
    assert f"epoch[0]({steps(2)}) epoch[1]?({steps(4, phases)})" == traced()


def test_a_loader_inside_a_dataset(traced: Traced) -> None:
    """A loader that a dataset uses is a part of the outer `data_load`."""

    class Outer(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for x, y in loader_of():
                yield from zip(x, y, strict=True)

    loop = Loop()
    for batch in DataLoader(Outer(), batch_size=2):
        loop.step(batch)

    assert f"epoch[0]({steps(2)})" == traced()


# -- threads, copies -------------------------------------------------------------------------


def test_two_threads_train_two_models(traced: Traced) -> None:
    """Each thread has its own epochs and steps, however the two interleave."""
    barrier = threading.Barrier(2)

    def train() -> None:
        loop = Loop()
        for _ in range(2):
            for batch in loader_of(3):
                barrier.wait()
                loop.step(batch)

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    found = traced()
    for index in range(2):
        assert 2 == found.count(f"epoch[{index}]({steps(3)})")
    assert 4 == found.count("epoch[")


def test_copies_of_a_hooked_model(traced: Traced) -> None:
    """A model that was hooked is pickled, copied, saved and loaded as ever."""
    loop = Loop()
    for batch in loader_of(1):
        loop.step(batch)
    file = io.BytesIO()
    torch.save(loop.model, file)
    file.seek(0)
    states = io.BytesIO()
    torch.save({"model": loop.model.state_dict(), "opt": loop.optimizer.state_dict()}, states)
    states.seek(0)
    fresh = Loop()
    fresh.model.load_state_dict(torch.load(states)["model"])
    copies = [
        copy.deepcopy(loop.model),
        pickle.loads(pickle.dumps(loop.model)),
        torch.load(file, weights_only=False),
        fresh.model,
    ]
    x = torch.ones(1, 4)
    wanted = loop.model(x)

    assert all(torch.equal(wanted, model(x)) for model in copies)
    assert copy.deepcopy(loop.optimizer).state_dict() == loop.optimizer.state_dict()
    assert b"cirron" not in file.getvalue() + states.getvalue() + pickle.dumps(loop.model)


# -- loops that are left, and that go past batches ---------------------------------------------


def test_batches_that_are_passed_over(traced: Traced) -> None:
    """In an epoch made by hand, batches before the first that trains have only their fetches."""
    loop = Loop()
    for _ in ci.epochs(range(1)):
        for index, batch in enumerate(loader_of(4)):
            if index >= 2:
                loop.step(batch)

    assert f"epoch[0](data_load data_load step[2]({STEP}) step[3]({STEP}))" == traced()


class Broken(TensorDataset):
    """Fails at its third row while `is_broken`."""

    is_broken = True

    def __getitem__(self, index: int) -> Any:
        if self.is_broken and index == 2:
            raise OSError("the disk is gone")
        return super().__getitem__(index)  # type: ignore[no-untyped-call]


def test_a_fetch_that_fails_ends_the_pass(traced: Traced) -> None:
    """Also while somebody holds the exception, as a notebook does: the next loop is an epoch."""
    loop = Loop()
    data = Broken(torch.randn(4, 4), torch.randn(4, 1))
    held = None
    try:
        for batch in DataLoader(data):
            loop.step(batch)
    except OSError as error:
        held = error
    data.is_broken = False
    for batch in DataLoader(data):
        loop.step(batch)

    assert held is not None
    assert f"epoch[0]!({steps(2)} step[2]!(data_load!)) epoch[1]({steps(4)})" == traced()


def test_an_iterator_that_is_held_after_a_break(traced: Traced) -> None:
    """The loop that follows is an epoch of its own; going on with the old one is, too, its own."""
    loop = Loop()
    iterator = iter(loader_of(4))
    for batch in iterator:
        loop.step(batch)
        break
    for batch in loader_of(2):
        loop.step(batch)
    for batch in iterator:
        loop.step(batch)

    assert f"epoch[0]({steps(1)}) epoch[1]({steps(2)}) epoch[2]({steps(3)})" == traced()


def test_read_ahead_from_a_sampler_that_repeats(traced: Traced) -> None:
    """As timm does: one iterator for all epochs, and each batch is fetched before the last is used.
    Each round is an epoch, and its last step has no fetch.
    """
    loop, loader = Loop(), loader_of(3)
    sampler = loader.batch_sampler

    class Repeated:
        def __init__(self, sampler: Any) -> None:
            self.sampler = sampler

        def __iter__(self) -> Iterator[Any]:
            while True:
                yield from iter(self.sampler)

    object.__setattr__(loader, "batch_sampler", Repeated(sampler))
    iterator = iter(loader)

    def ahead(iterator: Iterator[Any]) -> Iterator[Any]:
        last = None
        for _ in range(3):
            batch = next(iterator)
            if last is not None:
                yield last
            last = batch
        yield last

    for _ in range(2):
        for batch in ahead(iterator):
            loop.step(batch)
    del iterator

    body = f"step[0](data_load {STEP}) step[1]({STEP}) step[2]({PHASES})"
    assert f"epoch[0]({body}) epoch[1]({body})" == traced()


def test_a_loop_after_an_iterator_that_is_held(traced: Traced) -> None:
    """A warm-up with `next` is an epoch that ends where the loop over another loader begins."""
    loop = Loop()
    warm_up = iter(loader_of(4))
    for _ in range(2):
        loop.step(next(warm_up))
    for batch in loader_of(2):
        loop.step(batch)

    assert f"epoch[0]({steps(2)}) epoch[1]({steps(2)})" == traced()


def test_another_model_is_evaluated_in_an_epoch(traced: Traced) -> None:
    """It is an evaluation, wherever `no_grad` stands."""
    loop = Loop()
    average = copy.deepcopy(loop.model).eval()
    for batch in loader_of(2):
        loop.step(batch)
        for x, _ in loader_of(2):
            with torch.no_grad():
                average(x)

    evaluated = "evaluation(batch[0](data_load forward:eval) batch[1](data_load forward:eval))"
    body = f"{STEP} {evaluated}"
    assert f"epoch[0]({steps(2, body)})" == traced()


@pytest.mark.parametrize("is_first", [False, True])
def test_one_more_batch_for_a_teacher(traced: Traced, is_first: bool) -> None:
    """What is fetched by hand is for the step, though it is a model in eval mode that uses it."""
    loop = Loop()
    teacher = nn.Linear(4, 1).eval()
    unlabelled = loader_of(1)
    for x, _ in loader_of(2):
        more, _ = next(iter(unlabelled))
        loop.optimizer.zero_grad()
        made = None if is_first else loop.model(x)
        with torch.no_grad():
            wanted = teacher(more)
        nn.functional.mse_loss(loop.model(x) if made is None else made, wanted).backward()
        loop.optimizer.step()

    forwards = ["forward:train", "forward:eval"]
    body = " ".join(["data_load data_load", *(forwards[::-1] if is_first else forwards)])
    assert f"epoch[0]({steps(2, f'{body} backward optimizer_step')})" == traced()


class Sized(Stream):
    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (Sized, f"epoch[0]({steps(4)})"),
        (Stream, f"epoch[0]({steps(2)}) epoch[1]({steps(2)})"),
    ],
)
def test_streams_that_end(
    data: Any, expected: str, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    """One with a length is an epoch; of one without, every N steps are, and nothing after them."""
    monkeypatch.setenv("CIRRON_STEPS_PER_EPOCH", "2")
    traced = request.getfixturevalue("traced")
    loop = Loop()
    ci.watch(loop.model)
    for batch in DataLoader(data()):
        loop.step(batch)
    ci.flush()

    assert expected == traced()
    assert expected.count("epoch") == ci.health()["snapshot_count"]
    epochs = ci.trace(format="dict")["roots"][0]["children"]
    inferred = {one["attrs"].get("inferred") for one in epochs}
    assert inferred == ({None} if data is Sized else {"steps"})


def test_an_iterator_that_outlives_its_epochs(traced: Traced) -> None:
    """Epochs made by hand, of so many items of one iterator, have their steps, one or many."""
    loop = Loop()
    iterator = iter(loader_of(4))
    for count in ci.epochs((1, 1, 2)):
        for _ in range(count):
            loop.step(next(iterator))
    del iterator  # until then, nothing says that the last step is over

    assert f"epoch[0]({steps(1)}) epoch[1]({steps(1)}) epoch[2]({steps(2)})" == traced()


# -- what is a forward -------------------------------------------------------------------------


class Wrapper(nn.Module):
    """Holds a model that it does not register."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.held = [model]

    def forward(self, x: torch.Tensor) -> Any:
        return self.held[0](x)


class Late(nn.Module):
    """Has no parameters until it is called."""

    def forward(self, x: torch.Tensor) -> Any:
        if not hasattr(self, "inner"):
            self.inner = nn.Linear(4, 1)
        return self.inner(x)


def test_models_without_parameters_of_their_own(traced: Traced) -> None:
    """A wrapper is seen through; a model that makes its parameters later is one from then on."""
    wrapper, late = Wrapper(nn.Linear(4, 1)), Late()
    for x, _ in loader_of(2):
        wrapper(x)
        late(x)

    body = "data_load forward:train forward:train"
    assert f"evaluation(batch[0]({body}) batch[1]({body}))" == traced()


class WeightedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.judge = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return (self.weight * self.judge(x)).mean()


def test_what_is_no_forward(traced: Traced) -> None:
    """A loss with parameters, and the parametrization of a weight that is looked at."""
    loss, layer = WeightedLoss(), nn.utils.parametrizations.weight_norm(nn.Linear(4, 1))
    for x, _ in loader_of(1):
        loss(layer(x))
        layer.weight.sum()

    assert "evaluation(batch[0](data_load forward:train))" == traced()


def test_ci_batches_over_something_around_a_loader(traced: Traced) -> None:
    """A progress bar or a generator between them changes nothing: a batch is one span."""
    loop = Loop()
    for batch in ci.batches(one for one in loader_of(2)):
        loop.step(batch)

    body = "(forward:train backward optimizer_step)"
    assert f"epoch[0](data_load batch[0]{body} data_load batch[1]{body})" == traced()


# -- scopes of the program's own in the body of a loop -----------------------------------------


@pytest.mark.parametrize("has_epoch", [True, False])
def test_steps_that_the_program_opens_after_the_fetch(traced: Traced, has_epoch: bool) -> None:
    """A scope named `step` in the body of a loop is the step: no second one is put around it."""
    loop = Loop()
    with ci.scope("epoch", index=0) if has_epoch else contextlib.nullcontext():
        for index, batch in enumerate(loader_of(2)):
            with ci.scope("step", index=index):
                loop.step(batch)

    body = "(forward:train backward optimizer_step)"
    assert f"epoch[0](data_load step[0]{body} data_load step[1]{body})" == traced()


def test_a_scope_of_another_name_in_the_body_of_a_loop(traced: Traced) -> None:
    """It is inside the step."""
    loop = Loop()
    for batch in loader_of(2):
        with ci.scope("work"):
            loop.step(batch)

    body = "data_load work(forward:train backward optimizer_step)"
    assert f"epoch[0]({steps(2, body)})" == traced()


@pytest.mark.parametrize("has_batches", [True, False])
def test_an_evaluation_scope_in_a_training(traced: Traced, has_batches: bool) -> None:
    """The scope is the evaluation, whether its batches are the program's or not."""
    loop = Loop()
    for batch in loader_of(1):
        loop.step(batch)
        with ci.scope("evaluation"), torch.no_grad():
            for inputs, _ in ci.batches(loader_of(2)) if has_batches else loader_of(2):
                loop.model(inputs)

    if has_batches:
        inner = "data_load batch[0](forward:train) data_load batch[1](forward:train)"
    else:
        inner = "batch[0](data_load forward:train) batch[1](data_load forward:train)"
    assert f"epoch[0](step[0]({STEP} evaluation({inner})))" == traced()


def test_an_evaluation_inside_a_step_that_the_program_opened(traced: Traced) -> None:
    """A validation inside the program's own step is an evaluation of its own, also the last one."""
    loop, validation = Loop(), loader_of(2)
    for x in ci.batches([torch.randn(2, 4), torch.randn(2, 4)]):
        loop.step((x, torch.zeros(2, 1)))
        loop.model.eval()
        with torch.no_grad():
            for batch in validation:
                loop.loss(batch)
        loop.model.train()
        with ci.scope("after"):
            pass

    batches = " ".join(f"batch[{index}](data_load forward:eval)" for index in range(2))
    body = f"(forward:train backward optimizer_step evaluation({batches}) after)"
    assert f"batch[0]{body} batch[1]{body}" == traced()


def test_training_over_a_loader_inside_a_step_that_the_program_opened(traced: Traced) -> None:
    """The step stays the only one, though the model was still in eval mode at the first fetch."""
    loop = Loop()
    with ci.scope("step", index=0):
        loop.model.eval()
        with torch.no_grad():
            loop.model(torch.randn(2, 4))
        for batch in loader_of(2):
            loop.model.train()
            loop.step(batch)

    body = "data_load forward:train backward optimizer_step"
    assert f"step[0](forward:eval {body} {body})" == traced()


def test_batches_that_the_program_opens_in_an_evaluation(traced: Traced) -> None:
    """An evaluation inside a step has the program's own batches, not one more around each."""
    loop = Loop()
    for batch in loader_of(1):
        loop.step(batch)
        loop.model.eval()
        for inputs, _ in loader_of(2):
            with ci.scope("batch"), torch.no_grad():
                loop.model(inputs)

    inner = "evaluation(data_load batch(forward:eval) data_load batch(forward:eval))"
    assert f"epoch[0](step[0]({STEP} {inner}))" == traced()


def test_a_scope_for_each_iteration_without_a_loader(traced: Traced) -> None:
    """It is not known what the iterations are, so none of them holds an epoch."""
    loop = Loop()
    batch = torch.randn(2, 4), torch.randn(2, 1)
    for _ in range(4):
        with ci.scope("iteration"):
            loop.step(batch)

    assert " ".join(["iteration(forward:train backward optimizer_step)"] * 4) == traced()


@pytest.mark.parametrize("has_loader", [False, True])
def test_epochs_that_the_program_opens_after_steps_without_a_loader(
    traced: Traced, has_loader: bool
) -> None:
    """They are next to the inferred epoch, which has ended with its last step."""
    loop = Loop()
    batch = torch.randn(2, 4), torch.randn(2, 1)
    for _ in range(3):
        loop.step(batch)
    for _ in ci.epochs(range(2)):
        for one in loader_of() if has_loader else [batch, batch]:
            loop.step(one)
    inferred = ci.trace(format="dict", name="epoch")["roots"][0]

    body = STEP if has_loader else PHASES
    epochs = [f"epoch[{index}]({steps(2, body)})" for index in range(2)]
    assert f"epoch[0]({steps(3, PHASES)}) {' '.join(epochs)}" == traced()
    taken_us = sum(one["wall_us"] for one in inferred["children"])
    assert taken_us == pytest.approx(inferred["wall_us"], abs=5)


def test_forwards_that_fail_while_the_pass_is_undecided(traced: Traced) -> None:
    """A hook that raises to stop a forward, caught by the program: each is in its batch."""
    loop = Loop()
    loop.model.register_forward_hook(lambda *_: 1 / 0)
    for inputs, _ in loader_of(2):
        with contextlib.suppress(ZeroDivisionError), torch.no_grad():
            loop.model(inputs)

    body = "(data_load forward:train!)"
    assert f"evaluation(batch[0]{body} batch[1]{body})" == traced()


def test_an_epoch_by_next_that_is_never_asked_for_more(traced: Traced) -> None:
    """It has ended with the last item of its loader: the evaluation after it is next to it."""
    loop, loader, held_out = Loop(), loader_of(2), loader_of(2)
    for _ in range(2):
        loop.model.train()
        iterator = iter(loader)
        for _ in range(len(loader)):
            loop.step(next(iterator))
        loop.model.eval()
        with torch.no_grad():
            evaluated = iter(held_out)
            for _ in range(len(held_out)):
                loop.model(next(evaluated)[0])
        del evaluated

    evaluation = "evaluation(batch[0](data_load forward:eval) batch[1](data_load forward:eval))"
    epochs = [f"epoch[{index}]({steps(2)}) {evaluation}" for index in range(2)]
    assert " ".join(epochs) == traced()


def test_looking_for_a_generator_takes_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a program with many objects, it is not done again until it has been paid for."""
    times = iter(range(0, 100_000, 3))  # seconds
    monkeypatch.setattr(hot, "now", lambda: next(times) * 1_000_000_000)
    looks: list[Any] = []

    def get_referrers(one: Any) -> list[Any]:
        looks.append(one)
        return []

    monkeypatch.setattr(gc, "get_referrers", get_referrers)
    generators = callers.Generators()
    code = (lambda: None).__code__
    answers = [generators.has_ended(code, object(), is_asking=False) for _ in range(1000)]

    assert answers[0]
    assert len(looks) == sum(answers)
    assert 9 <= len(looks) <= 11  # each takes 3 s of 3,000
