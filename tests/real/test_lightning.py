"""Lightning as people use it, under both of its names: the same tree as from any loop."""

from __future__ import annotations

import contextlib
import importlib
import math
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests import spools
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import cirron as ci
from cirron import guard

if TYPE_CHECKING:
    from pathlib import Path

    from tests.real.conftest import Traced

# Lightning's own, and its libraries': about workers, devices that are not there, names to come.
pytestmark = pytest.mark.filterwarnings("ignore")

STEP = "data_load forward:train backward optimizer_step"
EVALUATION = "evaluation(batch[0](data_load forward:eval) batch[1](data_load forward:eval))"


@pytest.fixture(params=["lightning", "pytorch_lightning"])
def lightning(request: pytest.FixtureRequest) -> Any:
    """The package under each name."""
    return importlib.import_module(request.param)


def rows(count: int) -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(count, 4)), batch_size=2)


def new_module(lightning: Any, **methods: Any) -> Any:
    """A small model with the lines that train it, some of them the test's own."""

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = torch.nn.Linear(4, 1)

        def loss(self, batch: Any) -> Any:
            return (self.linear(batch[0]) ** 2).mean()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch))

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.linear(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for name, method in methods.items():
        setattr(Module, name, method)
    return Module()


def new_trainer(lightning: Any, kind: Any = None, **options: Any) -> Any:
    chosen: dict[str, Any] = {
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "accelerator": "cpu",
        "log_every_n_steps": 1,
        "default_root_dir": "out",
    }
    return (kind or lightning.Trainer)(**{**chosen, **options})


def step(index: int, work: str = STEP) -> str:
    return f"step[{index}]({work})"


def epoch(index: int, *steps: str) -> str:
    return f"epoch[{index}]({' '.join(steps)})"


STEPS = tuple(step(index) for index in range(4))
TWO_EPOCHS = f"data_setup {epoch(0, *STEPS)} {epoch(1, *STEPS)}"


def found(name: str) -> list[dict[str, Any]]:
    """The spans of that name, in the order of time."""
    return ci.trace(format="dict", name=name)["roots"]  # type: ignore[no-any-return]


def marks(span: dict[str, Any], kind: str = "point") -> dict[str, Any]:
    return {mark["name"]: mark["value"] for mark in span["marks"] if mark["kind"] == kind}


# -- the tree --------------------------------------------------------------------------------


def test_epochs_and_steps(lightning: Any, traced: Traced) -> None:
    """Each epoch is one span, each optimizer step one inside it, with torch's spans beneath."""
    new_trainer(lightning).fit(new_module(lightning), rows(8))

    assert TWO_EPOCHS == traced()
    assert [1, 2, 3, 4, 5, 6, 7, 8] == [one["attrs"]["global_step"] for one in found("step")]


@pytest.mark.parametrize("has_scope", [False, True])
def test_a_fit_after_steps_without_a_loader(
    lightning: Any, traced: Traced, has_scope: bool
) -> None:
    """The loop before it has ended, so the fit has its own epochs, next to that loop's."""
    module = new_module(lightning)
    optimizer = module.configure_optimizers()
    for _ in range(3):
        optimizer.zero_grad()
        module.loss([torch.ones(2, 4)]).backward()
        optimizer.step()
    with ci.scope("finetune") if has_scope else contextlib.nullcontext():
        new_trainer(lightning).fit(module, rows(8))

    forwards = "forward:train backward optimizer_step"
    loop = epoch(0, *(step(index, forwards) for index in range(3)))
    fit = f"finetune({TWO_EPOCHS})" if has_scope else TWO_EPOCHS
    assert f"{loop} {fit}" == traced()


def test_gradient_accumulation(lightning: Any, traced: Traced) -> None:
    """All batches of an optimizer step are in one step; the last one may have fewer."""
    trainer = new_trainer(lightning, accumulate_grad_batches=3, max_epochs=1)
    trainer.fit(new_module(lightning), rows(8))

    three = "data_load forward:train backward " * 2 + STEP
    assert f"data_setup {epoch(0, step(0, three), step(1))}" == traced()


def test_manual_optimization(lightning: Any, traced: Traced) -> None:
    """A module that steps its optimizer itself has a step for each batch in which it does."""

    def training_step(module: Any, batch: Any, batch_idx: int) -> None:
        optimizer = module.optimizers()
        loss = module.loss(batch)
        module.manual_backward(loss)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()

    module = new_module(lightning, training_step=training_step)
    module.automatic_optimization = False
    new_trainer(lightning, max_epochs=1).fit(module, rows(8))

    two = f"data_load forward:train backward {STEP}"
    assert f"data_setup {epoch(0, step(0, two), step(1, two))}" == traced()


def test_manual_optimization_that_is_chosen_late(lightning: Any, traced: Traced) -> None:
    """A module may still decide in its hooks at the start that it steps its optimizer itself."""

    def choose(module: Any) -> None:
        module.automatic_optimization = False
        module.own = module.configure_optimizers()

    def training_step(module: Any, batch: Any, batch_idx: int) -> None:
        module.loss(batch).backward()
        module.own.step()

    module = new_module(lightning, on_train_epoch_start=choose, training_step=training_step)
    new_trainer(lightning).fit(module, rows(8))

    assert TWO_EPOCHS == traced()


def test_optimizers_of_other_fits_end_no_manual_step(lightning: Any, traced: Traced) -> None:
    """With manual optimization, only the optimizers of the fit itself end its steps: not those of
    a fit inside it, and not those of one in another thread.
    """

    def fit_another() -> None:
        new_trainer(lightning, max_epochs=1).fit(new_module(lightning), rows(2))

    def training_step(module: Any, batch: Any, batch_idx: int) -> None:
        module.manual_backward(module.loss(batch))
        if batch_idx == 0:
            fit_another()
            thread = threading.Thread(target=fit_another)
            thread.start()
            thread.join()
        if batch_idx % 2:
            module.optimizers().step()

    module = new_module(lightning, training_step=training_step)
    module.automatic_optimization = False
    new_trainer(lightning, max_epochs=1).fit(module, rows(8))

    one = f"fit(data_setup {step(0)})"
    two = "data_load forward:train backward"
    steps = step(0, f"{two} {one} {STEP}"), step(1, f"{two} {STEP}")
    assert f"data_setup {epoch(0, *steps)} data_setup {epoch(0, step(0))}" == traced()


def test_what_an_optimizer_step_that_raises_has_recorded(lightning: Any, traced: Traced) -> None:
    """It is in the span of that optimizer step, which has the error, too."""

    def record(module: Any, optimizer: Any) -> None:
        ci.mark("norm", 0.5)
        with ci.scope("clip"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        new_trainer(lightning).fit(new_module(lightning, on_before_optimizer_step=record), rows(8))

    assert "data_load forward:train backward optimizer_step!(clip!)" in traced()
    (span,) = found("optimizer_step")
    assert {"norm": 0.5} == marks(span)
    assert "error" in span["attrs"]


@pytest.mark.parametrize("hook", ["training_step", "on_before_optimizer_step"])
def test_data_that_ends_inside_a_step(lightning: Any, traced: Traced, hook: str) -> None:
    """Lightning takes that `StopIteration` for the end of the epoch; the next one is as any."""

    def stop(module: Any, *_: Any) -> Any:
        if module.current_epoch == 0 and module.trainer.global_step == 2:
            next(iter(()))
        return module.loss(_[0]) if hook == "training_step" else None

    new_trainer(lightning).fit(new_module(lightning, **{hook: stop}), rows(8))

    is_late = hook == "on_before_optimizer_step"
    skipped = "data_load forward:train backward optimizer_step" if is_late else "data_load"
    first = epoch(0, *STEPS[:2], f"skipped({skipped})")
    assert f"data_setup {first} {epoch(1, *STEPS)}" == traced()


def test_a_step_that_is_done_is_a_step(lightning: Any, traced: Traced) -> None:
    """Also if a hook stops the epoch after its optimizer has stepped."""

    def stop(module: Any, *_: Any) -> None:
        if module.trainer.global_step == 3:
            raise StopIteration

    module = new_module(lightning, on_train_batch_end=stop)
    new_trainer(lightning, max_epochs=1).fit(module, rows(8))

    assert f"data_setup {epoch(0, *STEPS[:3])}" == traced()
    assert [1, 2, 3] == [one["attrs"]["global_step"] for one in found("step")]


def test_optimizer_that_lightning_does_not_count(lightning: Any, traced: Traced) -> None:
    """A module that calls a plain torch optimizer has a step for each batch in which it does."""
    module = new_module(lightning)
    module.automatic_optimization = False
    module.configure_optimizers = lambda: None
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def training_step(batch: Any, batch_idx: int) -> None:
        module.loss(batch).backward()
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()

    module.training_step = training_step
    new_trainer(lightning, max_epochs=1).fit(module, rows(8))

    two = f"data_load forward:train backward {STEP}"
    assert f"data_setup {epoch(0, step(0, two), step(1, two))}" == traced()
    assert [0, 0] == [one["attrs"]["global_step"] for one in found("step")]


def test_own_optimizer_while_gradients_are_accumulated(lightning: Any, traced: Traced) -> None:
    """An optimizer that the module steps for itself does not end Lightning's step."""
    extra = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(extra.parameters(), lr=0.1)

    def training_step(module: Any, batch: Any, batch_idx: int) -> Any:
        extra(batch[0]).mean().backward()
        optimizer.step()
        return module.loss(batch)

    module = new_module(lightning, training_step=training_step)
    new_trainer(lightning, max_epochs=1, accumulate_grad_batches=2).fit(module, rows(12))

    first = "data_load forward:train backward optimizer_step forward:train backward"
    both = step(0, f"{first} {first} optimizer_step")
    steps = (both.replace("step[0]", f"step[{index}]") for index in range(3))
    assert f"data_setup {epoch(0, *steps)}" == traced()


def test_several_optimizers_in_a_batch(lightning: Any, traced: Traced) -> None:
    """A step's `global_step` is what Lightning's is after it, which counts each optimizer."""
    counts = []

    def training_step(module: Any, batch: Any, batch_idx: int) -> None:
        for optimizer in module.optimizers()[: 1 + batch_idx % 2]:
            optimizer.zero_grad()
            module.manual_backward(module.loss(batch))
            optimizer.step()
        counts.append(module.trainer.global_step)

    def configure_optimizers(module: Any) -> Any:
        return [torch.optim.SGD(module.parameters(), lr=rate) for rate in (0.1, 0.2)]

    methods = {"training_step": training_step, "configure_optimizers": configure_optimizers}
    module = new_module(lightning, **methods)
    module.automatic_optimization = False
    new_trainer(lightning, max_epochs=1).fit(module, rows(8))

    two = f"{STEP} {STEP.removeprefix('data_load ')}"
    assert f"data_setup {epoch(0, step(0), step(1, two), step(2), step(3, two))}" == traced()
    assert [1, 3, 4, 6] == counts == [one["attrs"]["global_step"] for one in found("step")]


def test_an_optimizer_that_asks_again(lightning: Any, traced: Traced) -> None:
    """An optimizer that calls its closure several times has all but the first call in its step."""

    def configure_optimizers(module: Any) -> Any:
        return torch.optim.LBFGS(module.parameters(), max_iter=2)

    module = new_module(lightning, configure_optimizers=configure_optimizers)
    new_trainer(lightning, max_epochs=1, max_steps=1).fit(module, rows(8))

    pair = "forward:train backward"
    assert f"data_setup {epoch(0, step(0, f'data_load {pair} optimizer_step({pair})'))}" == traced()


def test_max_steps(lightning: Any, traced: Traced) -> None:
    """A run that ends in the middle of an epoch has as many steps as were made."""
    new_trainer(lightning, max_epochs=-1, max_steps=6).fit(new_module(lightning), rows(8))

    assert f"data_setup {epoch(0, *STEPS)} {epoch(1, step(0), step(1))}" == traced()


def test_limited_batches(lightning: Any, traced: Traced) -> None:
    """Loaders that are not read to their end leave nothing open."""
    trainer = new_trainer(lightning, limit_train_batches=2, limit_val_batches=2)
    trainer.fit(new_module(lightning), rows(8), rows(8))

    body = (step(0), step(1), EVALUATION)
    assert f"data_setup {epoch(0, *body)} {epoch(1, *body)}" == traced()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        torch.manual_seed(1)
        return iter([(torch.randn(4),) for _ in range(8)])


def test_a_dataset_without_a_length(lightning: Any, traced: Traced) -> None:
    """Of a stream a batch is fetched ahead, the first one before the first epoch."""
    trainer = new_trainer(lightning)
    trainer.fit(new_module(lightning), DataLoader(Stream(), batch_size=2))

    work = "forward:train backward optimizer_step"
    rest = (step(1), step(2), step(3, work))
    later = epoch(1, step(0, f"data_load {STEP}"), *rest)
    assert f"data_setup {epoch(0, step(0), *rest)} {later}" == traced()


def test_resuming(lightning: Any, traced: Traced) -> None:
    """A run that goes on from a checkpoint goes on with its numbers."""
    trainer = new_trainer(lightning, max_epochs=1)
    trainer.fit(new_module(lightning), rows(8))
    trainer.save_checkpoint("saved.ckpt")
    ci.shutdown()
    ci.profile(output="none")
    new_trainer(lightning).fit(new_module(lightning), rows(8), ckpt_path="saved.ckpt")

    assert f"data_setup {epoch(1, *STEPS)}" == traced()
    assert [5, 6, 7, 8] == [one["attrs"]["global_step"] for one in found("step")]


def test_resuming_inside_an_epoch(lightning: Any, traced: Traced) -> None:
    """So does one whose checkpoint was saved inside an epoch, of which it tells nothing itself."""

    class Saves(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 6:
                trainer.save_checkpoint("saved.ckpt")

    new_trainer(lightning, callbacks=[Saves()]).fit(new_module(lightning), rows(8))
    ci.shutdown()
    ci.profile(output="none")
    new_trainer(lightning).fit(new_module(lightning), rows(8), ckpt_path="saved.ckpt")

    assert f"data_setup {epoch(1, step(2), step(3))}" == traced()
    assert [7, 8] == [one["attrs"]["global_step"] for one in found("step")]


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_rest_of_an_epoch_is_skipped(lightning: Any, traced: Traced, accumulated: int) -> None:
    """What was fetched and done for an optimizer step that never came is no step."""

    def on_train_batch_start(module: Any, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None

    module = new_module(lightning, on_train_batch_start=on_train_batch_start)
    trainer = new_trainer(lightning, max_epochs=1, accumulate_grad_batches=accumulated)
    trainer.fit(module, rows(8))

    batch = "data_load forward:train backward"
    body = {
        1: (*STEPS[:3], "skipped(data_load)"),
        2: (step(0, f"{batch} {STEP}"), f"skipped({batch} data_load)"),
    }[accumulated]
    assert f"data_setup {epoch(0, *body)}" == traced()


def test_a_run_inside_another(lightning: Any, traced: Traced) -> None:
    """A fit that a callback makes is beside the outer one's steps, with steps of its own."""

    class Fits(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            if trainer.global_step == 1:
                new_trainer(lightning, max_epochs=1).fit(new_module(lightning), rows(4))

        def on_train_epoch_end(self, *_: Any) -> None:
            new_trainer(lightning, max_epochs=1).fit(new_module(lightning), rows(4))

    trainer = new_trainer(lightning, callbacks=[Fits()], max_epochs=1)
    trainer.fit(new_module(lightning), rows(8))

    inner = f"fit(data_setup {step(0)} {step(1)})"
    assert f"data_setup {epoch(0, step(0), inner, *STEPS[1:], inner)}" == traced()
    assert "Module" == found("fit")[0]["attrs"]["model"]


def part(lightning: Any, name: str) -> Any:
    """A module of Lightning's."""
    return importlib.import_module(
        f"{lightning.Trainer.__module__.rpartition('.trainer.')[0]}.{name}"
    )


RATES = {"min_lr": 0.1, "max_lr": 0.3, "num_training": 5, "update_attr": False}


def test_the_rate_finder(lightning: Any, traced: Traced) -> None:
    """The tuner's search for a learning rate finds what it would without us; the fit is as ever."""

    def search() -> Any:
        trainer, module = new_trainer(lightning), new_module(lightning)
        found = part(lightning, "tuner").Tuner(trainer).lr_find(module, rows(8), **RATES)
        trainer.fit(module, rows(8))
        return found.results

    results, outline = search(), traced()
    ci.shutdown()

    assert 5 == len(results["lr"]) == len(results["loss"])
    assert search() == results
    searched = f"checkpoint data_setup {epoch(0, *STEPS)} {epoch(1, step(0))} data_setup"
    assert f"{searched} {TWO_EPOCHS}" == outline


def test_the_rate_finder_as_a_callback(lightning: Any, traced: Traced) -> None:
    """The callback that searches before a fit does; inside of one, its search is a part of that."""

    class Searches(part(lightning, "callbacks").LearningRateFinder):  # type: ignore[misc]
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            self.lr_find(trainer, module)

    finder = Searches(num_training_steps=2, update_attr=False)
    trainer = new_trainer(lightning, callbacks=[finder], max_epochs=1)
    trainer.fit(new_module(lightning), rows(8))

    assert 2 == len(finder.optimal_lr.results["loss"])
    two = f"{step(0)} {step(1)}"
    inside = epoch(0, "checkpoint", f"fit({two})", "data_setup", *STEPS)
    assert f"checkpoint data_setup epoch[0]({two}) data_setup {inside}" == traced()


def test_the_batch_size_finder(lightning: Any, traced: Traced) -> None:
    """The tuner's search for a batch size finds what it would without us; the fit is as ever."""

    def train_dataloader(module: Any) -> Any:
        return DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=module.batch_size)

    def search() -> Any:
        module = new_module(lightning, train_dataloader=train_dataloader, validation_step=None)
        module.batch_size = 1
        trainer = new_trainer(lightning, max_epochs=1)
        size = part(lightning, "tuner").Tuner(trainer).scale_batch_size(module, max_trials=2)
        trainer.fit(module)
        return size

    size, steps = search(), found("epoch")[-1]["children"]
    ci.shutdown()

    assert search() == size
    assert 8 // size == len(steps)


# -- beside training -------------------------------------------------------------------------


def test_validation(lightning: Any, traced: Traced) -> None:
    """A validation is in its epoch beside the steps; the sanity check is no epoch."""
    trainer = new_trainer(lightning, num_sanity_val_steps=2)
    trainer.fit(new_module(lightning), rows(8), rows(4))

    body = (*STEPS, EVALUATION)
    assert f"{EVALUATION} data_setup {epoch(0, *body)} {epoch(1, *body)}" == traced()
    stages = [one["attrs"]["stage"] for one in found("evaluation")]
    assert ["sanity_check", "validate", "validate"] == stages


def test_validation_between_steps(lightning: Any, traced: Traced) -> None:
    """A validation after a step is beside that step: its time is not the step's."""
    trainer = new_trainer(lightning, val_check_interval=2, max_epochs=1)
    trainer.fit(new_module(lightning), rows(8), rows(4))

    assert f"data_setup {epoch(0, *STEPS[:2], EVALUATION, *STEPS[2:], EVALUATION)}" == traced()


def test_without_training(lightning: Any, traced: Traced) -> None:
    """`validate`, `test` and `predict` are scopes of their own, with what they come to."""
    trainer, module = new_trainer(lightning), new_module(lightning)
    trainer.validate(module, rows(4), verbose=False)
    trainer.test(module, rows(4), verbose=False)
    trainer.predict(module, rows(4))

    prediction = EVALUATION.replace("evaluation", "prediction")
    assert f"{EVALUATION} {EVALUATION} {prediction}" == traced()
    validation, test = found("evaluation")
    assert ["validate", "test"] == [validation["attrs"]["stage"], test["attrs"]["stage"]]
    assert math.isfinite(marks(validation, "summary")["val_loss"])
    assert math.isfinite(marks(test, "summary")["test_loss"])


def test_several_loaders_to_validate(lightning: Any, traced: Traced) -> None:
    """The batches of several loaders are in one validation."""

    def validation_step(module: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        module.loss(batch)

    module = new_module(lightning, validation_step=validation_step)
    new_trainer(lightning).validate(module, [rows(4), rows(4)], verbose=False)

    batches = EVALUATION[len("evaluation(") : -1]
    assert f"evaluation({batches} {batches})" == traced()


def test_checkpoints(lightning: Any, traced: Traced) -> None:
    """A checkpoint is a scope in its epoch, beside the steps."""
    trainer = new_trainer(lightning, enable_checkpointing=True)
    trainer.fit(new_module(lightning), rows(8))

    body = (*STEPS, "checkpoint")
    assert f"data_setup {epoch(0, *body)} {epoch(1, *body)}" == traced()
    assert [4, 8] == [one["attrs"]["global_step"] for one in found("checkpoint")]


def test_a_checkpoint_at_the_end_of_a_batch(lightning: Any, traced: Traced) -> None:
    """It is beside the step, and what the step logs after it is still on the step."""
    saves = part(lightning, "callbacks").ModelCheckpoint(every_n_train_steps=2)
    trainer = new_trainer(lightning, enable_checkpointing=True, callbacks=[saves], max_epochs=1)
    trainer.fit(new_module(lightning), rows(8))

    body = (*STEPS[:2], "checkpoint", *STEPS[2:], "checkpoint")
    assert f"data_setup {epoch(0, *body)}" == traced()
    assert all("train_loss_step" in marks(one) for one in found("step"))
    assert {} == marks(found("epoch")[0])
    steps, (first, _) = found("step"), found("checkpoint")
    assert steps[1]["end_ns"] <= first["start_ns"]


def test_settings_are_those_of_the_whole_module(lightning: Any, traced: Traced) -> None:
    """Its steps call its parts; autocast is on only while one runs."""
    trainer = new_trainer(lightning, precision="bf16-mixed", max_epochs=1)
    trainer.fit(new_module(lightning), rows(8), rows(4))

    attrs = [found(name)[0]["attrs"] for name in ("epoch", "evaluation")]
    assert ["Module", "Module"] == [one["model_class"] for one in attrs]
    assert "bfloat16" == attrs[0]["autocast"]


def test_what_is_measured(lightning: Any, traced: Traced) -> None:
    """Epochs, and what is beside the steps, have processor time and memory, as in any loop."""
    trainer = new_trainer(lightning, enable_checkpointing=True, max_epochs=1)
    trainer.fit(new_module(lightning), rows(8), rows(4))

    for name in ("epoch", "evaluation", "checkpoint"):
        assert all(one["cpu_ns"] > 0 and one["memory_peak_bytes"] > 0 for one in found(name)), name
    assert {None} == {one["cpu_ns"] for one in found("step")}


# -- values ----------------------------------------------------------------------------------


def test_logged_values_are_marks(lightning: Any, traced: Traced) -> None:
    """What a step logs is on that step; what an epoch comes to is its summary."""
    trainer = new_trainer(lightning, log_every_n_steps=2)
    trainer.fit(new_module(lightning), rows(8), rows(4))
    last = marks(found("epoch")[-1], "summary")

    has_loss = ["train_loss_step" in marks(one) for one in found("step")]
    assert [False, True] * 4 == has_loss
    assert trainer.callback_metrics["train_loss_epoch"].item() == last["train_loss_epoch"]
    assert trainer.callback_metrics["val_loss"].item() == last["val_loss"]
    assert marks(found("evaluation")[-1], "summary") == {"val_loss": last["val_loss"]}
    assert {} == marks(found("epoch")[-1])


def snapshots(folder: Path) -> list[list[str]]:
    """The names of the tensors in each epoch's snapshot."""
    run = spools.read_one(folder / ".cirron")
    taken: dict[str, list[str]] = {}
    for one in run.snapshots:
        taken.setdefault(one.span_id, []).append(one.tensor_name)
    return [sorted(taken.get(span.id, [])) for span in run.spans if span.name == "epoch"]


def test_snapshots(lightning: Any, tmp_path: Path) -> None:
    """Each epoch has a snapshot of the weights and of the gradients of its last step."""
    ci.profile()
    new_trainer(lightning).fit(new_module(lightning), rows(8), rows(4))
    ci.shutdown()

    both = ["linear.bias", "linear.bias.grad", "linear.weight", "linear.weight.grad"]
    assert [both, both] == snapshots(tmp_path)


# -- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_run_that_fails(lightning: Any, traced: Traced, error: type[BaseException]) -> None:
    """What was open when a run failed says so, and the next run is not under it."""

    def training_step(module: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise error("no more")
        return module.loss(batch)

    module = new_module(lightning, training_step=training_step)
    # Lightning turns an interrupt into the end of the program.
    with pytest.raises((error, SystemExit)):
        new_trainer(lightning).fit(module, rows(8))
    new_trainer(lightning).fit(new_module(lightning), rows(8))

    failed = "step[2]!(data_load)"
    assert f"data_setup epoch[0]!({step(0)} {step(1)} {failed}) {TWO_EPOCHS}" == traced()


def test_a_validation_that_fails(lightning: Any, traced: Traced) -> None:
    """So does a validation, also if the Trainer that failed lives on; the next one is whole."""

    def validation_step(module: Any, batch: Any, batch_idx: int) -> None:
        raise ValueError("no more")

    trainer = new_trainer(lightning)
    with pytest.raises(ValueError, match="no more"):
        trainer.fit(new_module(lightning, validation_step=validation_step), rows(8), rows(4))
    new_trainer(lightning, max_epochs=1).fit(new_module(lightning), rows(8), rows(4))

    failed = f"epoch[0]!({' '.join(STEPS)} evaluation!(batch[0](data_load)))"
    assert f"data_setup {failed} data_setup {epoch(0, *STEPS, EVALUATION)}" == traced()


# -- whose Trainer ---------------------------------------------------------------------------


def test_a_subclass(lightning: Any, traced: Traced) -> None:
    """A Trainer that extends another is seen the same."""

    class Custom(lightning.Trainer):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    new_trainer(lightning, Custom).fit(new_module(lightning), rows(8))

    assert TWO_EPOCHS == traced()


def test_callbacks_are_left_alone(lightning: Any, traced: Traced) -> None:
    """A Trainer has the callbacks that it would have without us, in their order, also in a run."""
    seen = []

    class Looks(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.append(list(trainer.callbacks))

    looks = Looks()
    trainer = new_trainer(lightning, callbacks=[looks])
    trainer.fit(new_module(lightning), rows(8))

    assert [[looks]] * 8 == seen
    assert [looks] == trainer.callbacks


def test_what_callbacks_record(lightning: Any, traced: Traced) -> None:
    """What a callback records is in the epoch or the step that it is told of, whichever it is."""

    class Records(lightning.Callback):  # type: ignore[misc]
        def on_train_epoch_start(self, *_: Any) -> None:
            ci.mark("epoch_started", 1)

        def on_train_batch_end(self, *_: Any) -> None:
            ci.mark("batch_ended", 1)

        def on_train_epoch_end(self, *_: Any) -> None:
            ci.mark("epoch_ended", 1)

    trainer = new_trainer(lightning, callbacks=[Records()], max_epochs=1)
    trainer.fit(new_module(lightning), rows(8))

    assert all("batch_ended" in marks(one) for one in found("step"))
    assert "epoch_ended" in marks(found("epoch")[0])
    assert "epoch_started" in marks(found("epoch")[0])


def test_end_of_an_evaluation_is_not_in_its_last_batch(lightning: Any, traced: Traced) -> None:
    """What a module records when a validation or a prediction ends is on that span."""

    def at_end(module: Any) -> None:
        ci.mark("at_end", 1)

    events = dict.fromkeys(("on_validation_epoch_end", "on_predict_epoch_end"), at_end)
    module, trainer = new_module(lightning, **events), new_trainer(lightning)
    trainer.validate(module, rows(4), verbose=False)
    trainer.predict(module, rows(4))

    traced()
    for name in ("evaluation", "prediction"):
        assert ["at_end"] == [mark["name"] for mark in found(name)[0]["marks"]][:1]


def test_a_trainer_from_before(lightning: Any, traced: Traced) -> None:
    """A Trainer that is older than the profiler is seen all the same."""
    ci.shutdown()
    trainer = new_trainer(lightning)
    ci.profile(output="none")
    trainer.fit(new_module(lightning), rows(8))

    assert TWO_EPOCHS == traced()


def test_originals_are_restored(lightning: Any) -> None:
    """After a shutdown Lightning is as it was, and a Trainer made before goes on without us."""
    loops = part(lightning, "loops")
    kinds = [lightning.Trainer, loops._FitLoop, loops._EvaluationLoop, loops._TrainingEpochLoop]
    before = [dict(vars(kind)) for kind in kinds]
    ci.profile(output="none")
    trainer = new_trainer(lightning)
    changed = [kind for kind, old in zip(kinds, before, strict=True) if dict(vars(kind)) != old]
    ci.shutdown()

    assert kinds == changed
    assert before == [dict(vars(kind)) for kind in kinds]
    assert [] == trainer.callbacks
    trainer.fit(new_module(lightning), rows(8))
    assert 8 == trainer.global_step


def test_a_release_with_other_parts(
    lightning: Any, traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a part of Lightning is missing its spans are, and the run goes on."""
    ci.shutdown()
    with monkeypatch.context() as patched:  # it needs it itself
        patched.delattr(part(lightning, "loops"), "_EvaluationLoop")
        patched.setattr(guard, "strict", False)  # as it is for users
        ci.profile(output="none")
    new_trainer(lightning).fit(new_module(lightning), rows(8), rows(4))

    assert 1 == guard.errors["lightning hooks: AttributeError"]
    assert (2, 8) == (len(found("epoch")), len(found("step")))


def test_a_shutdown_inside_a_run(lightning: Any) -> None:
    """A session may end in the middle of a run; the run goes on, each callback called as before."""
    calls = []

    class Ends(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            calls.append(trainer.global_step)
            ci.shutdown()

    ci.profile(output="none")
    new_trainer(lightning, callbacks=[Ends()]).fit(new_module(lightning), rows(8))

    assert list(range(1, 9)) == calls


def test_the_program_comes_first(lightning: Any, traced: Traced) -> None:
    """Inside `ci.epochs` the epochs are the program's, and the steps are in them."""
    module = new_module(lightning)
    for _ in ci.epochs(range(2)):
        new_trainer(lightning, max_epochs=1).fit(module, rows(8))

    assert " ".join(epoch(index, "data_setup", *STEPS) for index in range(2)) == traced()


def test_results_are_the_same(lightning: Any) -> None:
    """A run that is watched ends with the same weights, bit for bit."""
    weights = []
    for is_watched in (False, True):
        if is_watched:
            ci.profile(output="none")
        module = new_module(lightning)
        new_trainer(lightning, gradient_clip_val=0.1).fit(module, rows(8), rows(4))
        weights.append([one.detach().clone() for one in module.parameters()])

    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
