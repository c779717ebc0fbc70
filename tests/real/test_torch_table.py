"""PyTorch, row by row of the hook table, and the rules for steps and epochs under it."""

from __future__ import annotations

import contextvars
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import cirron as ci

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.real.conftest import Traced

STEP = "data_load forward:train backward optimizer_step"
EVALUATION = "evaluation(batch[0](data_load forward:eval) batch[1](data_load forward:eval))"


class Loop:
    """A small model, and the lines that train it."""

    def __init__(self, batches: int = 2, **options: Any) -> None:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(batches * 2, 4), torch.randn(batches * 2, 1))
        self.loader = DataLoader(data, batch_size=2, **options)
        self.model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def loss(self, batch: Any) -> Any:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        self.optimizer.step()

    def epoch(self) -> None:
        for batch in self.loader:
            self.step(batch)

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            for batch in self.loader:
                self.loss(batch)
        self.model.train()


def steps(count: int) -> str:
    return " ".join(f"step[{index}]({STEP})" for index in range(count))


# -- the table -------------------------------------------------------------------------------


def test_forward_says_its_mode(traced: Traced) -> None:
    """A call of a module is a `forward` that says whether the module trains or evaluates."""
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2))
    model.eval()(torch.ones(1, 2))

    assert "forward:train forward:eval" == traced()


def test_backward(traced: Traced) -> None:
    """`Tensor.backward` and `torch.autograd.backward` are each a `backward`."""
    weight: Any = torch.ones(2, requires_grad=True)
    weight.sum().backward()
    torch.autograd.backward([weight.sum()])

    assert "backward backward" == traced()


def test_optimizer_step(traced: Traced) -> None:
    """A step of any optimizer is an `optimizer_step`."""
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.ones(2)
    torch.optim.Adam([weight]).step()

    assert "optimizer_step" == traced()


def test_data_load_per_batch(traced: Traced) -> None:
    """Each batch of a DataLoader has a `data_load`, and the end of the loader has none."""
    for _ in DataLoader(TensorDataset(torch.ones(3, 1))):
        pass

    assert 3 == traced().count("data_load")


def test_a_step_wraps_the_four(traced: Traced) -> None:
    """A step holds the fetch, the forward, the backward and the optimizer's step."""
    Loop().epoch()

    assert f"epoch[0]({steps(2)})" == traced()


def test_accumulated_gradients_are_one_step(traced: Traced) -> None:
    """All forward and backward pairs between two optimizer steps are in one step."""
    loop = Loop(batches=4)
    for index, batch in enumerate(loop.loader):
        loop.loss(batch).backward()
        if index % 2:
            loop.optimizer.step()

    pair = "data_load forward:train backward"
    step = f"{pair} {pair} optimizer_step"
    assert f"epoch[0](step[0]({step}) step[1]({step}))" == traced()


def test_a_step_after_the_last_batch_is_no_epoch(traced: Traced) -> None:
    """Gradients that are left over when the loader ends are applied outside; epochs go on."""
    loop = Loop(batches=1)
    for _ in range(2):
        for batch in loop.loader:
            loop.loss(batch).backward()
        loop.optimizer.step()

    epoch = "epoch[{}](step[0](data_load forward:train backward)) optimizer_step"
    assert f"{epoch.format(0)} {epoch.format(1)}" == traced()


def test_each_iterator_is_an_epoch(traced: Traced) -> None:
    """Epochs are siblings, numbered from 0, and their steps start from 0 again."""
    loop = Loop()
    for _ in range(3):
        loop.epoch()

    assert " ".join(f"epoch[{index}]({steps(2)})" for index in range(3)) == traced()


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.ones(4), torch.ones(1)


def test_an_endless_loader_has_epochs(monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    """A loader without a length has an epoch every `steps_per_epoch` optimizer steps."""
    monkeypatch.setenv("CIRRON_STEPS_PER_EPOCH", "2")
    traced = request.getfixturevalue("traced")
    loop = Loop()
    for index, batch in enumerate(DataLoader(Endless(), batch_size=2)):
        if index == 5:
            break
        loop.step(batch)

    last = f"epoch[2](step[0]({STEP}) skipped(data_load))"
    assert f"epoch[0]({steps(2)}) epoch[1]({steps(2)}) {last}" == traced()


def test_the_steps_of_all_optimizers_count(monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    """With two optimizers, as in a GAN, half as many steps make an epoch of an endless loader."""
    monkeypatch.setenv("CIRRON_STEPS_PER_EPOCH", "4")
    traced = request.getfixturevalue("traced")
    loop = Loop()
    other = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    for index, batch in enumerate(DataLoader(Endless(), batch_size=2)):
        if index == 4:
            break
        loop.step(batch)
        other.step()

    step = f"{STEP} optimizer_step"
    epoch = f"step[0]({step}) step[1]({step})"
    assert f"epoch[0]({epoch}) epoch[1]({epoch}) epoch[2](skipped(data_load))" == traced()


def test_a_loop_without_a_loader_has_epochs(monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    """So has a loop that makes its own batches, with a step from one optimizer step to the next."""
    monkeypatch.setenv("CIRRON_STEPS_PER_EPOCH", "2")
    traced = request.getfixturevalue("traced")
    loop = Loop()
    for _ in range(6):
        loop.step((torch.ones(2, 4), torch.ones(2, 1)))

    step = "forward:train backward optimizer_step"
    epoch = f"step[0]({step}) step[1]({step})"
    assert f"epoch[0]({epoch}) epoch[1]({epoch}) epoch[2]({epoch})" == traced()
    (root,) = ci.trace(format="dict")["roots"]
    assert ["steps"] * 3 == [epoch["attrs"]["inferred"] for epoch in root["children"]]


def test_a_loader_ends_the_epoch_of_a_loop_without_one(traced: Traced) -> None:
    """Training without a loader, then with one: epochs are siblings all the same."""
    loop = Loop()
    for _ in range(2):
        loop.step((torch.ones(2, 4), torch.ones(2, 1)))
    loop.epoch()

    step = "forward:train backward optimizer_step"
    assert f"epoch[0](step[0]({step}) step[1]({step})) epoch[1]({steps(2)})" == traced()


def test_one_optimizer_step_is_no_loop(traced: Traced) -> None:
    """What is done once stays where it is."""
    loop = Loop()
    loop.step((torch.ones(2, 4), torch.ones(2, 1)))

    assert "forward:train backward optimizer_step" == traced()


# -- who else says what an epoch is ----------------------------------------------------------


def test_ci_epochs_and_a_loader(traced: Traced) -> None:
    """`ci.epochs` makes the epochs; the steps are directly under them."""
    loop = Loop()
    for _ in ci.epochs(range(2)):
        loop.epoch()

    assert f"epoch[0]({steps(2)}) epoch[1]({steps(2)})" == traced()


def test_ci_epochs_and_ci_batches(traced: Traced) -> None:
    """`ci.batches` makes the batches; there is no step beside them."""
    loop = Loop()
    for _ in ci.epochs(range(1)):
        for batch in ci.batches(loop.loader):
            loop.step(batch)

    body = "(forward:train backward optimizer_step)"
    assert f"epoch[0](data_load batch[0]{body} data_load batch[1]{body})" == traced()


def test_ci_batches_alone(traced: Traced) -> None:
    """Over a loader, `ci.batches` leaves the epoch to the hooks."""
    loop = Loop()
    for _ in range(2):
        for batch in ci.batches(loop.loader):
            loop.step(batch)

    body = "(forward:train backward optimizer_step)"
    epoch = f"data_load batch[0]{body} data_load batch[1]{body}"
    assert f"epoch[0]({epoch}) epoch[1]({epoch})" == traced()


def test_a_scope_named_epoch(traced: Traced) -> None:
    """An epoch scope that was opened by hand is the epoch."""
    loop = Loop()
    for index in range(2):
        with ci.scope("epoch", index):
            loop.epoch()

    assert f"epoch[0]({steps(2)}) epoch[1]({steps(2)})" == traced()


def test_a_scope_named_step(traced: Traced) -> None:
    """A step scope that was opened by hand is the step."""
    loop = Loop()
    iterator = iter(loop.loader)
    for index in range(2):
        with ci.scope("step", index):
            loop.step(next(iterator))

    assert steps(2) == traced()


# -- evaluation ------------------------------------------------------------------------------


def test_evaluation_after_an_epoch(traced: Traced) -> None:
    """A pass that trains nothing is an evaluation, beside the epoch."""
    loop = Loop()
    for _ in range(2):
        loop.epoch()
        loop.evaluate()

    assert f"epoch[0]({steps(2)}) {EVALUATION} epoch[1]({steps(2)}) {EVALUATION}" == traced()


def test_evaluation_inside_an_epoch(traced: Traced) -> None:
    """An evaluation in the middle of an epoch is inside it, and the epoch goes on after it."""
    loop = Loop()
    for batch in loop.loader:
        loop.evaluate()
        loop.step(batch)

    step = f"data_load {EVALUATION} forward:train backward optimizer_step"
    assert f"epoch[0](step[0]({step}) step[1]({step}))" == traced()


def test_evaluation_inside_ci_epochs(traced: Traced) -> None:
    """With `ci.epochs`, an evaluation is under the epoch it belongs to."""
    loop = Loop()
    for _ in ci.epochs(range(1)):
        loop.epoch()
        loop.evaluate()

    assert f"epoch[0]({steps(2)} {EVALUATION})" == traced()


def test_evaluation_without_no_grad(traced: Traced) -> None:
    """The mode of the model is enough to tell an evaluation inside a step."""
    loop = Loop(batches=1)
    for batch in loop.loader:
        loop.step(batch)
        loop.model.eval()
        for other in loop.loader:
            loop.loss(other)

    evaluation = "evaluation(batch[0](data_load forward:eval))"
    assert f"epoch[0](step[0]({STEP} {evaluation}))" == traced()


def test_a_backward_in_eval_mode_is_no_training(traced: Traced) -> None:
    """Gradients of an evaluated model, of an attack, say, make no epoch of it."""
    loop = Loop(batches=1)
    loop.model.eval()
    for batch in loop.loader:
        loop.loss(batch).backward()

    assert "evaluation(batch[0](data_load forward:eval backward))" == traced()


def test_training_a_model_in_eval_mode(traced: Traced) -> None:
    """An optimizer step is training in whatever mode, frozen statistics, say."""
    loop = Loop(batches=1)
    loop.model.eval()
    loop.epoch()

    assert f"epoch[0](step[0]({STEP.replace('train', 'eval')}))" == traced()


# -- losses and measurements -----------------------------------------------------------------


def losses_of_steps() -> list[list[float]]:
    (root,) = ci.trace(format="dict")["roots"]
    steps = [step for epoch in root["children"] for step in epoch["children"]]
    return [[mark["value"] for mark in step["marks"] if mark["name"] == "loss"] for step in steps]


def test_the_loss_of_each_step(traced: Traced) -> None:
    """The scalar that `backward` is called on is a mark of its step, each time it is called."""
    loop, found = Loop(), []
    for batch in loop.loader:
        for _ in range(2):
            loss = loop.loss(batch)
            found.append(loss.item())
            loss.backward()
        loop.optimizer.step()

    assert [found[:2], found[2:]] == losses_of_steps()


def test_a_loss_that_the_program_marks_counts(traced: Traced) -> None:
    """Before or after the backward, in the step or in a scope of it: there is no second one."""
    loop = Loop()
    for number, batch in enumerate(loop.loader):
        if number:
            ci.mark("loss", 1.0)
        loop.step(batch)
        if not number:
            with ci.scope("log"):
                ci.mark("loss", 1.0)

    assert [[], [1.0]] == losses_of_steps()  # the first is in the scope


def test_no_loss_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    monkeypatch.setenv("CIRRON_LOSS_MARKS", "0")
    request.getfixturevalue("traced")
    Loop().epoch()

    assert [[], []] == losses_of_steps()


def test_no_loss_where_the_argument_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ci.profile(loss_marks=False)` turns off what CIRRON_LOSS_MARKS turns on."""
    monkeypatch.setenv("CIRRON_LOSS_MARKS", "1")
    ci.profile(loss_marks=False, output="none")
    try:
        Loop().epoch()

        assert [[], []] == losses_of_steps()
    finally:
        ci.shutdown()


def test_epochs_and_evaluations_are_measured(traced: Traced) -> None:
    """Processor time and memory, also without a GPU; and how the data is loaded."""
    loop = Loop()
    loop.epoch()
    loop.evaluate()
    ci.flush()
    frame = ci.trace(format="dict")["roots"][0]["children"]

    assert ["epoch", "evaluation"] == [span["name"] for span in frame]
    assert all(span["cpu_ns"] > 0 and span["memory_peak_bytes"] > 0 for span in frame)
    assert 0 == frame[0]["attrs"]["loader_workers"]
    assert "Sequential" == frame[0]["attrs"]["model_class"]


def test_a_loader_that_only_its_iterator_remembers(traced: Traced) -> None:
    """`for batch in DataLoader(...)`: its settings are recorded once, and when they change."""
    loop = Loop()
    for size in (8, 8, 4):
        for batch in DataLoader(loop.loader.dataset, batch_size=size):
            loop.step(batch)
    ci.flush()
    epochs = ci.trace(format="dict")["roots"][0]["children"]

    assert [8, None, 4] == [span["attrs"].get("loader_batch_size") for span in epochs]


def test_settings_where_the_epochs_are_told(traced: Traced) -> None:
    """They are on the epochs that somebody else has opened, and stay those of the training."""
    loop = Loop()
    for _ in ci.epochs(range(2)):
        for batch in ci.batches(loop.loader):
            loop.step(batch)
        loop.evaluate()
    ci.flush()
    first, second = ci.trace(format="dict")["roots"][0]["children"]

    assert 0 == first["attrs"]["loader_workers"]
    assert "Sequential" == first["attrs"]["model_class"]
    assert "loader_workers" not in second["attrs"]


def test_settings_where_an_evaluation_comes_first(traced: Traced) -> None:
    """The first epoch has the settings of loader and model, whatever was evaluated with them."""
    loop = Loop()
    loop.evaluate()
    loop.epoch()
    ci.flush()
    evaluation, epoch = ci.trace(format="dict")["roots"][0]["children"]

    assert ["evaluation", "epoch"] == [evaluation["name"], epoch["name"]]
    for name in ("loader_workers", "model_class"):
        assert evaluation["attrs"][name] == epoch["attrs"][name]


def test_settings_where_items_are_fetched_by_hand(traced: Traced) -> None:
    """A loop that calls `next()` has the settings of its model, too."""
    loop = Loop()
    batches = iter(loop.loader)
    for _ in range(2):
        loop.step(next(batches))
    ci.flush()
    (epoch,) = ci.trace(format="dict", name="epoch")["roots"]

    assert "Sequential" == epoch["attrs"]["model_class"]


def test_settings_where_a_part_of_the_model_runs_first(traced: Traced) -> None:
    """An evaluation that calls the encoder first, as `generate` does, is one of the whole model."""
    loop = Loop()
    loop.epoch()
    encoder = next(loop.model.children())
    loop.model.eval()
    with torch.no_grad():
        for inputs, _ in loop.loader:
            encoder(inputs)
            loop.model(inputs)
    ci.flush()
    _, evaluation = ci.trace(format="dict")["roots"][0]["children"]

    assert "Sequential" == evaluation["attrs"]["model_class"]


def test_a_model_in_a_task_that_outlives_its_forward(traced: Traced) -> None:
    """A context that was copied inside a forward says nothing of what runs in it later."""
    kept: list[contextvars.Context] = []

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 1)

        def forward(self, x: Any) -> Any:
            kept.append(contextvars.copy_context())
            return self.inner(x)

    model = Keeping()
    model(torch.ones(1, 4))
    kept[0].run(nn.Linear(4, 1), torch.ones(1, 4))
    ci.flush()

    assert 2 == len(ci.trace(format="dict", name="forward")["roots"])


# -- what is a forward -----------------------------------------------------------------------


def test_submodules_are_no_forward(traced: Traced) -> None:
    """Only the outermost call is a forward, however deep the model is."""
    model: nn.Module = nn.Linear(2, 2)
    for _ in range(10):
        model = nn.Sequential(model, nn.Linear(2, 2))
    model(torch.ones(1, 2))

    assert "forward:train" == traced()


class Accuracy(nn.Module):
    def forward(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (found == wanted).float().mean()


@pytest.mark.parametrize(
    "module",
    [nn.MSELoss(), nn.CrossEntropyLoss(weight=torch.ones(3)), nn.BCELoss(), Accuracy()],
    ids=lambda module: type(module).__name__,
)
def test_losses_and_metrics_are_no_forward(traced: Traced, module: nn.Module) -> None:
    """A module that has no parameters, or is a loss, is not a second forward."""
    module(torch.ones(1, 3), torch.ones(1, 3))

    assert "" == traced()


def test_two_models_are_two_forwards(traced: Traced) -> None:
    """Models that are called one after the other have a forward each."""
    encoder, head = nn.Linear(2, 2), nn.Linear(2, 1)
    head(encoder(torch.ones(1, 2)))

    assert "forward:train forward:train" == traced()


# -- on and off ------------------------------------------------------------------------------


def attributes() -> list[Any]:
    from torch.optim import optimizer

    classes = (nn.Module, DataLoader, torch.utils.data.dataloader._BaseDataLoaderIter)
    return [
        *(dict(vars(kind)) for kind in classes),
        torch.autograd.backward,
        torch.amp.GradScaler.step,
        dict(optimizer._global_optimizer_pre_hooks),
        dict(optimizer._global_optimizer_post_hooks),
    ]


def test_shutdown_leaves_no_trace() -> None:
    """After shutdown every attribute is the original again, and nothing is recorded."""
    before = attributes()
    ci.profile(output="none")

    assert before != attributes()
    assert "torch" in ci.health()["frameworks_installed"]

    ci.shutdown()

    assert before == attributes()
    Loop().epoch()
    assert 1 == ci.trace(format="dict")["span_count"]


def test_what_somebody_else_has_wrapped_is_left() -> None:
    """A wrapper that came after ours stays, works, and no longer records through ours."""
    before = nn.Module.__call__
    ci.profile(output="none")
    ours = nn.Module.__call__
    called = []

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(self)
        return ours(self, *args, **kwargs)

    nn.Module.__call__ = theirs  # type: ignore[method-assign]
    try:
        ci.shutdown()
        nn.Linear(2, 1)(torch.ones(1, 2))

        assert theirs is nn.Module.__call__
        assert [nn.Linear] == [type(module) for module in called]
        assert 1 == ci.trace(format="dict")["span_count"]

        ci.profile(output="none")
        nn.Linear(2, 1)(torch.ones(1, 2))

        assert 2 == ci.trace(format="dict")["span_count"]
        ci.shutdown()
    finally:
        nn.Module.__call__ = before  # type: ignore[method-assign]


def test_no_frameworks_installs_nothing() -> None:
    """`frameworks=[]` hooks nothing."""
    before = attributes()
    ci.profile(output="none", frameworks=[])
    Loop().epoch()

    assert before == attributes()
    assert [] == ci.health()["frameworks_installed"]
    assert 1 == ci.trace(format="dict")["span_count"]


def train(*, profiled: bool) -> tuple[list[torch.Tensor], Any, Any]:
    random.seed(1)
    loop = Loop(batches=8, shuffle=True)
    loop.optimizer = torch.optim.AdamW(loop.model.parameters())
    if profiled:
        ci.profile(output="none", snapshots="full")
    for _ in ci.epochs(range(2)):
        loop.epoch()
        loop.evaluate()
    loop.epoch()
    ci.shutdown()
    return list(loop.model.parameters()), torch.get_rng_state(), random.getstate()


def test_results_are_bit_identical() -> None:
    """Weights and random states are the same with and without profiling, dropout included."""
    plain, plain_rng, plain_random = train(profiled=False)
    found, found_rng, found_random = train(profiled=True)

    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))
    assert torch.equal(plain_rng, found_rng)
    assert plain_random == found_random
