"""`create_torch_state` in one process: a step, what it logs, and what goes into a checkpoint."""

from __future__ import annotations

import copy
import sys
from collections import UserDict
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import ciclo
import cirron as ci

if TYPE_CHECKING:
    from pathlib import Path

    from ciclo.torch.state import TorchState

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
LOADER: DataLoader[Any] = DataLoader(TensorDataset(X, Y), batch_size=8)
BATCH = (X[:8], Y[:8])


def make(**options: Any) -> TorchState:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    options.setdefault("losses", nn.CrossEntropyLoss())
    options.setdefault("optimizer", torch.optim.SGD(module.parameters(), lr=0.1))
    return ciclo.create_torch_state(module, options.pop("optimizer"), **options)


def weights(state: TorchState) -> dict[str, Any]:
    return copy.deepcopy(state.module.state_dict())


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def accuracy(outputs: Any, targets: Any) -> Any:
    return (outputs.argmax(-1) == targets).float().mean()


class Count:
    """Counts samples, as a metric with update, compute and reset."""

    def __init__(self) -> None:
        self.samples = 0

    def update(self, outputs: Any, targets: Any) -> None:
        self.samples += len(targets)

    def compute(self) -> float:
        return float(self.samples)

    def reset(self) -> None:
        self.samples = 0


# -- in loops --------------------------------------------------------------------------------------


def test_a_step_is_the_step_written_by_hand() -> None:
    """After three epochs the weights are those of a loop without ciclo, to the bit."""
    by_hand = make()
    optimizer: Any = by_hand.optimizer
    for _ in range(3):
        for x, y in LOADER:
            optimizer.zero_grad()
            functional.cross_entropy(by_hand.module(x), y).backward()
            optimizer.step()
    trained = ciclo.fit(make(), LOADER, epochs=3).state

    assert same(weights(by_hand), weights(trained))


def test_ready_made_loops() -> None:
    """train_loop and fit train and evaluate, test_loop evaluates, predict_loop keeps outputs."""
    state = make(metrics=accuracy)
    fitted = ciclo.fit(state, LOADER, LOADER, epochs=2)
    trained = ciclo.train_loop(state, list(LOADER), epoch_duration=3, test_dataset=LOADER)
    tested = ciclo.test_loop(state, LOADER)
    predicted = ciclo.predict_loop(state, LOADER)

    assert fitted.state is state
    assert (6, 2) == tuple(len(fitted.history.collect(one)) for one in ("loss", "loss_valid"))
    assert ["losses.loss", "metrics.accuracy"] == tested.history.names()
    assert trained.history.last("loss_test") == pytest.approx(tested.history.last("loss"))
    assert [(8, 2)] * 3 == [tuple(one.shape) for one in predicted.history.collect("outputs")]


def test_loops_written_by_hand() -> None:
    """A step returns logs and state, as in every framework."""
    state = make()
    history = ciclo.history()
    for elapsed, batch in ciclo.elapse(LOADER):
        logs = ciclo.logs()
        logs.updates, state = state.train_step(batch)
        history.commit(elapsed, logs)
    looped = ciclo.loop(
        make(), LOADER, {ciclo.every(1): lambda state, batch: state.train_step(batch)}
    )

    assert history.collect("loss") == looped.history.collect("loss")


def test_the_profiler_sees_the_phases() -> None:
    """Under a profiler a step holds its forward and backward pass and the optimizer's step."""
    ci.profile(output="none", frameworks=["torch"])
    ciclo.fit(make(), LOADER, epochs=1)
    (root,) = ci.trace(format="dict")["roots"]
    step = root["children"][0]["children"][0]

    assert ["forward", "backward", "optimizer_step"] == [
        one["name"]
        for child in step["children"]
        if child["name"] == "train_step"
        for one in child["children"]
    ]


# -- losses and metrics ----------------------------------------------------------------------------


def test_several_losses_are_summed() -> None:
    """Each is logged under its name, and their sum as the loss, which is what is minimised."""
    logs, _ = make(
        losses={"fit": functional.cross_entropy, "size": lambda outputs: outputs.square().mean()}
    ).test_step(BATCH)

    assert ["losses.fit", "losses.size", "metrics.loss"] == logs.names()
    assert torch.equal(logs.loss, logs.fit + logs.size)


def test_a_loss_asks_by_name() -> None:
    """outputs, targets, batch and module are given to who names them, in any order."""

    def ask(batch: Any, preds: Any, truth: Any, weight: float = 2.0, *, module: Any) -> Any:
        assert batch[0].shape == (8, 4)
        assert isinstance(module, nn.Sequential)
        return weight * functional.cross_entropy(preds, truth)

    plain, _ = make().test_step(BATCH)
    asked, _ = make(losses=ask).test_step(BATCH)

    assert torch.equal(2 * plain.loss, asked.loss)


def test_stateful_metrics() -> None:
    """They go on until they are reset; an evaluation in between has its own."""
    state = make(metrics={"seen": Count()})
    seen = [state.train_step(BATCH)[0].seen for _ in range(2)]
    tested = state.test_step(BATCH)[0].seen
    after = state.train_step(BATCH)[0].seen
    reset = state.reset_step()

    assert ([8.0, 16.0], 8.0, 24.0) == (seen, tested, after)
    assert reset is state
    assert 8.0 == state.train_step(BATCH)[0].seen


def test_torchmetrics() -> None:
    """A metric of torchmetrics is the accuracy of all batches; a collection logs its parts."""
    torchmetrics = pytest.importorskip("torchmetrics")
    multiclass = torchmetrics.classification
    state = make(
        metrics={
            "running": multiclass.MulticlassAccuracy(2, average="micro"),
            "all": torchmetrics.MetricCollection({"f1": multiclass.MulticlassF1Score(2)}),
        }
    )
    history = ciclo.test_loop(state, LOADER).history
    state.module.eval()

    assert history.last("running") == pytest.approx(accuracy(state.module(X), Y).item())
    assert "stateful_metrics.f1" in history.names()


# -- options ---------------------------------------------------------------------------------------


def test_accumulation_counts_samples() -> None:
    """Batches of 8, 4 and 8, 4: two updates, each as of one batch of twelve."""
    module = nn.Linear(4, 2)
    whole = copy.deepcopy(module)
    sizes = [8, 4, 8, 4]
    batches = list(zip(X.split(sizes), Y.split(sizes), strict=True))
    parts = ciclo.create_torch_state(
        module,
        torch.optim.SGD(module.parameters(), 0.1),
        losses=functional.cross_entropy,
        accumulate=2,
    )
    ciclo.fit(parts, batches, epochs=1)
    once = ciclo.create_torch_state(
        whole, torch.optim.SGD(whole.parameters(), 0.1), losses=functional.cross_entropy
    )
    ciclo.fit(once, [(X[:12], Y[:12]), (X[12:], Y[12:])], epochs=1)

    assert torch.allclose(whole.weight, module.weight, atol=1e-7)


@pytest.mark.parametrize("loop", ["fit", "train_loop"])
def test_the_last_window_may_be_short(loop: str) -> None:
    """What waits at the end of an epoch is applied then, by its own samples."""
    module = nn.Linear(4, 2)
    whole = copy.deepcopy(module)
    state = ciclo.create_torch_state(
        module,
        torch.optim.SGD(module.parameters(), 0.1),
        losses=functional.cross_entropy,
        accumulate=5,
    )
    seen: list[Any] = []
    check = {ciclo.on_epoch_end: lambda: seen.append(module.weight.detach().clone())}
    if loop == "fit":
        ciclo.fit(state, LOADER, epochs=1, callbacks=[check])
    else:
        ciclo.train_loop(state, LOADER, callbacks=[check])
    once = ciclo.create_torch_state(
        whole, torch.optim.SGD(whole.parameters(), 0.1), losses=functional.cross_entropy
    )
    once.train_step((X, Y))

    assert torch.allclose(whole.weight, module.weight, atol=1e-7)
    assert torch.equal(module.weight, seen[0])


def test_bfloat16() -> None:
    """The forward pass is in bfloat16; parameters and losses are not."""
    kinds: list[torch.dtype] = []
    state = make(policy="bfloat16", metrics={"x": lambda outputs: kinds.append(outputs.dtype)})
    logs, _ = state.train_step(BATCH)

    assert [torch.bfloat16] == kinds
    assert torch.float32 == logs.loss.dtype == next(state.module.parameters()).dtype


def test_float16_leaves_out_infinite_steps() -> None:
    """A step whose scaled gradients are infinite is left out, its schedule too; the next counts."""
    scale = 1e38
    state = make(
        policy="float16",
        clip_norm=1.0,
        losses=lambda outputs, targets: functional.cross_entropy(outputs, targets) * scale,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )
    before = [one.clone() for one in state.module.parameters()]
    first, _ = state.train_step(BATCH)
    unchanged = all(map(torch.equal, before, state.module.parameters()))
    scale = 1.0
    second, _ = state.train_step(BATCH)

    assert unchanged
    assert "learning_rate" not in first.metrics
    assert 0.1 == second.learning_rate
    assert not any(map(torch.equal, before[-2:], list(state.module.parameters())[-2:]))


def test_clipping() -> None:
    """The norm is logged as it was, and is no longer than asked for in the step."""
    state = make(clip_norm=0.01)
    before = [one.detach().clone() for one in state.module.parameters()]
    logs, _ = state.train_step(BATCH)
    moved = [a - b for a, b in zip(before, state.module.parameters(), strict=True)]

    assert logs.grad_norm > 0.1
    assert torch.linalg.vector_norm(torch.cat([one.flatten() for one in moved])).item() == (
        pytest.approx(0.1 * 0.01, rel=1e-3)
    )


def test_moving_average() -> None:
    """Evaluations use the average; training does not, and the module has its own weights."""
    state = make(ema_decay=0.5)
    state.train_step(BATCH)
    first = weights(state)
    state.train_step(BATCH)
    second = weights(state)
    tested, _ = state.test_step(BATCH)
    outputs, _ = state.predict_step(BATCH)
    average = state.ema_params

    assert same(second, weights(state))
    assert torch.allclose((first["0.weight"] + 2 * second["0.weight"]) / 3, average["0.weight"])
    state.module.load_state_dict(average)
    assert torch.equal(tested.loss, make_like(state).test_step(BATCH)[0].loss)
    assert torch.equal(outputs.outputs["outputs"], state.module.eval()(X[:8]))


def test_a_loss_of_each_output_and_all_targets_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Outputs [n,1] and targets [n] become [n,n] in silence: a warning says what to write, once."""
    module = nn.Linear(3, 1)
    state = ciclo.create_torch_state(
        module,
        torch.optim.SGD(module.parameters(), 0.1),
        losses=lambda outputs, targets: ((outputs - targets) ** 2).mean(),
    )
    ciclo.fit(state, [(torch.ones(4, 3), torch.ones(4))] * 2, epochs=1)

    assert 1 == caplog.text.count("compares each output with all targets")
    assert "outputs are float32[4,1], targets float32[4]. Have the model return y[..., 0]" in (
        caplog.text
    )


def test_a_loss_that_takes_the_column_is_right(caplog: pytest.LogCaptureFixture) -> None:
    """One that makes rows of outputs [n,1] itself is left alone."""
    module = nn.Linear(3, 1)
    state = ciclo.create_torch_state(
        module,
        torch.optim.SGD(module.parameters(), 0.1),
        losses=lambda outputs, targets: functional.mse_loss(outputs[:, 0], targets),
    )
    ciclo.fit(state, [(torch.ones(4, 3), torch.ones(4))], epochs=1)

    assert "" == caplog.text


def make_like(state: TorchState) -> TorchState:
    return ciclo.create_torch_state(copy.deepcopy(state.module), losses=nn.CrossEntropyLoss())


def test_no_step_waits_for_a_device() -> None:
    """No step reads a value: on the meta device, where there are none to read, all of them run."""
    state = make(
        device="meta",
        losses={"a": nn.CrossEntropyLoss(), "b": functional.cross_entropy},
        metrics=accuracy,
        accumulate=2,
        clip_norm=1.0,
        ema_decay=0.9,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
    )
    logs = [state.train_step(BATCH)[0] for _ in range(4)]
    state.reset_step().flush_step()

    assert "meta" == logs[-1].grad_norm.device.type == logs[0].accuracy.device.type
    assert "meta" == state.test_step(BATCH)[0].loss.device.type
    assert "meta" == state.predict_step(BATCH)[0].outputs["outputs"].device.type


@pytest.mark.parametrize(("theirs", "expected"), [([2, 1], [5, 4]), ([2], [3, 3])])
def test_samples_of_an_evaluation(
    monkeypatch: pytest.MonkeyPatch, theirs: list[int], expected: list[int]
) -> None:
    """They are those of all processes, if these took the same steps, and else its own."""
    state = make()
    assert [3, 3] == state.__loop_samples__([3, 3])
    monkeypatch.setattr(state._placed, "processes", 2)

    def gather(into: list[Any], own: Any) -> None:
        into[:] = [own, theirs]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)

    assert expected == state.__loop_samples__([3, 3])


def test_learning_rate_schedule() -> None:
    """It steps with the optimizer, not with batches; the rate of each update is logged."""
    state = make(
        accumulate=2,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )
    history = ciclo.loop(
        state, [BATCH] * 6, {ciclo.every(1): lambda state, batch: state.train_step(batch)}
    ).history

    assert ([1, 3, 5], [0.1, 0.05, 0.025]) == history.collect("steps", "learning_rate")


class Pair(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    "batch",
    [
        BATCH,
        list(BATCH),
        Pair(*BATCH),
        {"image": X[:8], "label": Y[:8]},
        UserDict(image=X[:8], label=Y[:8]),
        (X[:8].numpy(), Y[:8].numpy()),
    ],
    ids=["tuple", "list", "namedtuple", "dict", "mapping", "numpy"],
)
def test_forms_of_a_batch(batch: Any) -> None:
    """The last item, or the label of a dict, is the targets; NumPy's arrays become tensors."""
    assert torch.equal(make().test_step(BATCH)[0].loss, make().test_step(batch)[0].loss)


def test_several_inputs() -> None:
    """Those of a tuple go by position, those of a dict by name; `unpack` says another way."""

    class Two(nn.Module):
        def forward(self, a: Any, b: Any) -> Any:
            return a - b

    def loss(outputs: Any, targets: Any) -> Any:
        return (outputs - targets).sum()

    a, b, y = torch.tensor([5.0]), torch.tensor([2.0]), torch.tensor([1.0])
    state = ciclo.create_torch_state(Two(), losses=loss)
    other = ciclo.create_torch_state(
        Two(), losses=loss, unpack=lambda batch: ((batch["first"], batch["second"]), batch["t"])
    )

    assert 2.0 == state.test_step((a, b, y))[0].loss
    assert 2.0 == state.test_step({"b": b, "y": y, "a": a})[0].loss
    assert 2.0 == other.test_step({"first": a, "second": b, "t": y})[0].loss


def test_predictions_need_no_targets() -> None:
    """A tensor, or what a TensorDataset of one gives, is the input."""
    state = make()
    (alone,) = state.predict_step(X[:8])[0]["outputs"].values()
    (listed,) = state.predict_step([X[:8]])[0]["outputs"].values()

    assert torch.equal(alone, listed)


def test_modes_come_back() -> None:
    """A step leaves each part of a module in the mode it was in; frozen parts stay so."""
    state = make()
    norm: Any = state.module[1]  # type: ignore[index]
    norm.eval()
    mean = norm.running_mean.clone()
    state.train_step(BATCH)
    state.test_step(BATCH)
    modes = [one.training for one in state.module.modules()]
    frozen = torch.equal(mean, norm.running_mean)
    state.module.eval()
    state.train_step(BATCH)

    assert [True, True, False, True, True] == modes
    assert frozen
    assert not any(one.training for one in state.module.modules())
    assert not torch.equal(mean, norm.running_mean)


def test_an_optimizer_may_be_a_function() -> None:
    """A function of the parameters makes it, for modules whose parameters a strategy replaces."""
    state = make(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    state.train_step(BATCH)
    expected = make()
    expected.train_step(BATCH)

    assert same(weights(expected), weights(state))


# -- checkpoints -----------------------------------------------------------------------------------


def full() -> TorchState:
    """A state with everything that can be in a checkpoint."""
    torchmetrics = pytest.importorskip("torchmetrics")
    return make(
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        losses={"a": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0])), "b": functional.cross_entropy},
        metrics={
            "seen": Count(),
            "running": torchmetrics.classification.MulticlassAccuracy(2),
            "auroc": torchmetrics.classification.MulticlassAUROC(2),
        },
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        accumulate=3,
        policy="float16",
        ema_decay=0.9,
        clip_norm=1.0,
    )


@pytest.mark.filterwarnings("ignore:No .* samples in targets:UserWarning")
def test_resume_to_the_bit(tmp_path: Path) -> None:
    """A run that ends in the middle of a window goes on as if it had not ended."""
    batches = [(X[i : i + 6], Y[i : i + 6]) for i in range(0, 24, 3)]

    def run(folder: str, stop: int) -> Any:
        tasks = {ciclo.every(1): lambda state, batch: state.train_step(batch)}
        return ciclo.loop(full(), batches, tasks, stop, resume=tmp_path / folder)

    whole = run("whole", 8)
    run("cut", 4)
    again = run("cut", 8)

    assert same(weights(whole.state), weights(again.state))
    assert same(whole.state.ema_params, again.state.ema_params)
    for name in ("loss", "a", "seen", "running", "auroc"):
        assert whole.history.collect(name) == again.history.collect(name)


def test_restore_into_another_state(tmp_path: Path) -> None:
    """`checkpoint.restore` fills a state that is made alike."""
    trained = make()
    save = ciclo.checkpoint(tmp_path / "run")
    ciclo.fit(trained, LOADER, epochs=1, callbacks=[save])
    fresh = make()
    restored = save.restore(fresh)

    assert restored is fresh
    assert same(weights(trained), weights(fresh))


def test_the_best_weights_come_back() -> None:
    """early_stopping puts back the parameters of its best step."""
    state = make()
    values = iter([2.0, 1.0, 5.0, 6.0])
    seen: list[dict[str, Any]] = []

    def step(state: TorchState, batch: Any) -> Any:
        state.train_step(batch)
        seen.append(weights(state))
        return {"metrics": {"watched": next(values)}}

    stop = ciclo.early_stopping("watched", patience=9, restore_best_weights=True)
    ciclo.loop(state, [BATCH] * 4, [(ciclo.every(1), step), (ciclo.every(1), stop)])

    assert same(seen[1], weights(state))


# -- wrong use -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        (
            {"strategy": "dp"},
            ValueError,
            'strategy=\'dp\' is not valid; use one of "eager", "compile", "ddp", "fsdp"',
        ),
        ({"strategy": "ddp"}, ciclo.CicloError, "torchrun --nproc-per-node=2 "),
        ({"strategy": "fsdp"}, ciclo.CicloError, 'With one process use strategy="eager"'),
        ({"policy": "half"}, ValueError, 'use "float32", "bfloat16", "float16" or None'),
        ({"accumulate": 0}, ValueError, "accumulate=0 is not valid; use 1 or more, or None"),
        ({"clip_norm": 0}, ValueError, "clip_norm=0 is not valid; use a number above 0, or None"),
        ({"ema_decay": 2}, ValueError, "ema_decay=2 is not valid; use a decay such as 0.999"),
        ({"optimizer": 3}, TypeError, "lambda parameters: torch.optim.SGD(parameters, lr=0.1)"),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())},
            ValueError,
            "the optimizer has none of the module's parameters; create it from this module",
        ),
        ({"losses": 3}, TypeError, "losses['loss'] is 3; use a function or a callable object"),
        (
            {"metrics": Count},
            TypeError,
            "use a function of outputs and targets, or an instance",
        ),
        (
            {"metrics": lambda outputs: 0},
            ValueError,
            'a lambda has no name; use metrics={"name": lambda ...}',
        ),
        (
            {"losses": {"loss": functional.l1_loss, "b": functional.l1_loss}},
            ValueError,
            '"loss" is the name of their sum',
        ),
        (
            {"losses": lambda a, b, c: a},
            ciclo.CallbackError,
            "'c' is one too many. Losses and metrics are called by name, as\n    lambda outputs",
        ),
        (
            {"scheduler": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o)},
            TypeError,
            "step it yourself: {ciclo.on_epoch_end:",
        ),
        ({"scheduler": 3}, TypeError, "use one of torch.optim.lr_scheduler, or a function"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    """What is wrong is said when the state is made, with what is allowed and what to write."""
    with pytest.raises(kind) as caught:
        make(**options)

    assert text in str(caught.value)


def test_a_loss_that_is_a_float() -> None:
    """It has no mean(): the error asks for a tensor."""
    state = make(losses=lambda outputs, targets: 1.0)
    with pytest.raises(ciclo.CallbackError, match=r"is 1.0; it must be a scalar tensor; compute"):
        state.train_step((torch.ones(4, 4), torch.zeros(4, dtype=torch.long)))


def test_a_batch_without_targets() -> None:
    """The error of torch has a note that says what to give; one with targets has none."""
    state = make()
    with pytest.raises(TypeError) as caught:
        state.train_step(torch.ones(4, 4))

    assert any("the batch has no targets; give" in one for one in caught.value.__notes__)


def test_not_a_module() -> None:
    """Something else is refused, with the names for other frameworks."""
    with pytest.raises(TypeError, match=r"needs a torch.nn.Module. For JAX use create_flax_state"):
        ciclo.create_torch_state("module")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu() -> None:
    """CUDA that is not there is an error, and not the CPU in silence."""
    with pytest.raises(ciclo.CicloError, match='sees no GPU; use device="cpu"'):
        make(device="cuda")


@pytest.mark.parametrize(
    ("losses", "text"),
    [
        (
            lambda outputs, targets: functional.cross_entropy(outputs, targets, reduction="none"),
            "the loss 'loss' is float32[8]; it must be a scalar: return loss.mean()",
        ),
        (lambda outputs: 0.5, "the loss 'loss' is 0.5; it must be a scalar"),
        (
            lambda outputs: outputs.detach().mean(),
            "the loss does not depend on the module's parameters; compute it from the outputs",
        ),
    ],
)
def test_wrong_losses(losses: Any, text: str) -> None:
    """A loss that cannot be minimised says what it is and what to return."""
    with pytest.raises(ciclo.CallbackError) as caught:
        make(losses=losses).train_step(BATCH)

    assert text in str(caught.value)


def test_nothing_to_train_with() -> None:
    """Without a loss or an optimizer a step says how to make the state."""
    module = nn.Linear(4, 2)
    with pytest.raises(ciclo.CicloError, match="has no optimizer; create it with ciclo"):
        ciclo.create_torch_state(module, losses=functional.cross_entropy).train_step(BATCH)
    state = ciclo.create_torch_state(module, torch.optim.SGD(module.parameters()))
    with pytest.raises(ciclo.CicloError, match=r"no loss to train on; .* losses=torch.nn"):
        state.train_step(BATCH)
    with pytest.raises(ciclo.CicloError, match="no losses or metrics"):
        state.test_step(BATCH)
    with pytest.raises(ciclo.CicloError, match="has no average; use create_torch_state"):
        _ = state.ema_params


def test_another_state() -> None:
    """A state dict of another state is refused."""
    with pytest.raises(ciclo.CheckpointError, match="not a state of <TorchState of Sequential"):
        make().load_state_dict(make(ema_decay=0.9).state_dict())


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch is not installed, the error says what to install."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ciclo.MissingDependencyError, match=r"needs torch.*: pip install torch"):
        ciclo.create_torch_state(None)


def test_a_loss_with_the_names_of_other_libraries() -> None:
    """What a library calls outputs and targets is known, in any order; a contradiction is not."""
    swapped = make(losses=lambda y_true, y_pred: functional.cross_entropy(y_pred, y_true))

    assert torch.equal(make().test_step(BATCH)[0].loss, swapped.test_step(BATCH)[0].loss)
    with_default = make(losses=lambda logits, labels=None: functional.cross_entropy(logits, labels))
    assert torch.equal(make().test_step(BATCH)[0].loss, with_default.test_step(BATCH)[0].loss)
    with pytest.raises(ciclo.CallbackError, match="'preds' is not in its position, so it is not"):
        make(losses=lambda x, preds: preds)


def test_batch_norm_on_the_cpu_is_told_of(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """torch has none there that counts the samples of all processes: each counts its own."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        state = make(strategy="ddp")
        make(strategy="ddp", sync_batch_norm=False)
    finally:
        torch.distributed.destroy_process_group()

    (said,) = caplog.messages
    assert "batch norm uses the samples of each process separately" in said
    assert isinstance(state.module[1], nn.BatchNorm1d)  # type: ignore[index]
