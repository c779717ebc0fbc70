"""The transformers Trainer as people use it: an epoch span an epoch, a step an optimizer step."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.numpy import load_file
from tests import spools
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import cirron as ci
from cirron import guard
from cirron.hooks.transformers import CirronCallback

if TYPE_CHECKING:
    from pathlib import Path

    from tests.real.conftest import Traced

# The Trainer's own, and its libraries': about devices that are not there, and names to come.
pytestmark = pytest.mark.filterwarnings("ignore")

WORK = "forward:train backward optimizer_step"
EVALUATION = "evaluation(batch[0](data_load data_load forward:eval) batch[1](forward:eval))"


class Model(nn.Module):
    """What a Trainer asks of a model: takes a batch's columns, returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        logits = self.linear(x).squeeze(-1)
        return {"loss": ((logits - labels) ** 2).mean(), "logits": logits}


def rows(count: int) -> list[dict[str, Any]]:
    torch.manual_seed(1)
    return [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(count)]


def new_trainer(
    kind: Any = Trainer,
    *,
    arguments: Any = TrainingArguments,
    given: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A Trainer of 8 rows in batches of 2, that is 4 steps an epoch, for 2 epochs."""
    chosen: dict[str, Any] = {
        "output_dir": "out",
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "num_train_epochs": 2,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "use_cpu": True,
    }
    return kind(
        **{"model": Model(), "train_dataset": rows(8), "eval_dataset": rows(4), **(given or {})},
        args=arguments(**{**chosen, **options}),
    )


def step(index: int, loads: int, work: str = WORK) -> str:
    return f"step[{index}]({'data_load ' * loads}{work})"


def epoch(index: int, *steps: str) -> str:
    return f"epoch[{index}]({' '.join(steps)})"


# Accelerate fetches a batch ahead, to know which one is the last.
STEPS = (step(0, 2), step(1, 1), step(2, 1), step(3, 0))
TWO_EPOCHS = f"{epoch(0, *STEPS)} {epoch(1, *STEPS)}"


def found(name: str) -> list[dict[str, Any]]:
    """The spans of that name, in the order of time."""
    return ci.trace(format="dict", name=name)["roots"]  # type: ignore[no-any-return]


def marks(span: dict[str, Any], kind: str = "point") -> dict[str, Any]:
    return {mark["name"]: mark["value"] for mark in span["marks"] if mark["kind"] == kind}


# -- the tree --------------------------------------------------------------------------------


def test_epochs_and_steps(traced: Traced) -> None:
    """Each epoch is one span, each optimizer step one inside it, with torch's spans beneath."""
    new_trainer().train()

    assert TWO_EPOCHS == traced()
    assert [1, 2, 3, 4, 5, 6, 7, 8] == [one["attrs"]["global_step"] for one in found("step")]


def test_only_torch_is_asked_for() -> None:
    """Then torch's hooks see the run, and the session says so."""
    ci.profile(output="none", frameworks=["torch"])
    new_trainer().train()
    ci.flush()

    (root,) = ci.trace(format="dict")["roots"]
    assert ("torch", ["epoch", "epoch"]) == (
        root["attrs"]["framework"],
        [one["name"] for one in root["children"]],
    )


def test_a_model_of_transformers(traced: Traced) -> None:
    """A model of the library itself is trained the same."""
    config = BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
    )
    texts = [{"input_ids": torch.tensor([1, 2, 3]), "labels": index % 2} for index in range(8)]
    new_trainer(
        given={"model": BertForSequenceClassification(config), "train_dataset": texts}
    ).train()

    assert TWO_EPOCHS == traced()


def test_gradient_accumulation(traced: Traced) -> None:
    """All batches of an optimizer step are in one step; the last one may have fewer."""
    new_trainer(gradient_accumulation_steps=3, num_train_epochs=1).train()

    three = "forward:train backward forward:train backward forward:train backward optimizer_step"
    assert epoch(0, step(0, 4, three), step(1, 0)) == traced()


def test_max_steps(traced: Traced) -> None:
    """A run that ends in the middle of an epoch has as many steps as were made."""
    new_trainer(max_steps=6).train()

    assert f"{epoch(0, *STEPS)} {epoch(1, step(0, 2), step(1, 1))}" == traced()


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(rows(8))


def test_a_dataset_without_a_length(traced: Traced) -> None:
    """A stream is passed over as often as it takes, an epoch each time."""
    new_trainer(given={"train_dataset": Stream()}, max_steps=6).train()

    assert f"{epoch(0, *STEPS)} {epoch(1, step(0, 2), step(1, 1))}" == traced()


def test_early_stopping(traced: Traced) -> None:
    """An epoch after which a callback stops the run is the last."""
    new_trainer(
        given={"callbacks": [EarlyStoppingCallback(1, 1e9)]},
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        num_train_epochs=5,
    ).train()

    body = (*STEPS, EVALUATION, "checkpoint")
    assert f"{epoch(0, *body)} {epoch(1, *body)}" == traced()


def test_an_epoch_that_is_cut_short(traced: Traced) -> None:
    """A callback that ends an epoch early leaves no step that never came."""

    class Cut(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_epoch_stop = state.global_step % 2 == 0
            return control

    new_trainer(given={"callbacks": [Cut()]}).train()

    short = (step(0, 2), step(1, 1))
    assert f"{epoch(0, *short)} {epoch(1, *short)}" == traced()


def test_several_runs(traced: Traced) -> None:
    """Each call of `train` is a run of its own, whichever Trainer it is of."""
    first, second = new_trainer(num_train_epochs=1), new_trainer(num_train_epochs=1)
    first.train()
    second.train()
    first.train()

    assert " ".join([epoch(0, *STEPS)] * 3) == traced()


def test_a_model_for_each_run(traced: Traced) -> None:
    """A search, which trains a new model of the same Trainer each time, has a run for each."""
    trainer = new_trainer(given={"model": None, "model_init": Model}, num_train_epochs=1)
    for rate in (0.1, 0.2):
        trainer.args.learning_rate = rate
        trainer.train()

    assert " ".join([epoch(0, *STEPS)] * 2) == traced()


def test_a_batch_that_is_too_large(traced: Traced) -> None:
    """An attempt that runs out of memory leaves an epoch of its own, with the error."""

    class Small(Model):
        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            if len(x) > 2:
                raise RuntimeError("CUDA out of memory.")
            return super().forward(x, labels)

    new_trainer(
        given={"model": Small()},
        auto_find_batch_size=True,
        per_device_train_batch_size=3,
        num_train_epochs=1,
    ).train()

    tried = "epoch[0]!(step[0]!(data_load data_load forward:train!))"
    assert f"{tried} {epoch(0, *STEPS)}" == traced()


def test_resuming(traced: Traced) -> None:
    """A run that goes on from a checkpoint goes on with its numbers, inside an epoch too."""
    new_trainer(max_steps=6, save_strategy="steps", save_steps=6).train()
    ci.shutdown()
    ci.profile(output="none")
    new_trainer().train(resume_from_checkpoint="out/checkpoint-6")

    assert epoch(1, step(2, 2), step(3, 0)) == traced()
    assert [7, 8] == [one["attrs"]["global_step"] for one in found("step")]


def test_resuming_with_all_data(tmp_path: Path) -> None:
    """With `ignore_data_skip` an epoch begins again, and its snapshot is taken in its last step."""
    new_trainer(max_steps=3, save_strategy="steps", save_steps=3).train()
    ci.profile(snapshots="full")
    trainer = new_trainer(num_train_epochs=1, max_steps=7, ignore_data_skip=True)
    trainer.train(resume_from_checkpoint="out/checkpoint-3")
    ci.flush()

    (one,) = found("epoch")
    assert [0, 1, 2, 3] == [child["index"] for child in one["children"]]
    ci.shutdown()
    (file,) = (tmp_path / ".cirron").glob("snapshots/*/weights.safetensors")
    saved, now = load_file(file)["linear.weight"], trainer.model.linear.weight.detach().numpy()
    assert saved.tobytes() == now.tobytes()


def test_resuming_a_dataset_without_a_length(traced: Traced, tmp_path: Path) -> None:
    """Batches that a resumed run goes past are skipped, and every span has its parent."""
    options: dict[str, Any] = {"given": {"train_dataset": Stream()}}
    new_trainer(**options, max_steps=5, save_strategy="steps", save_steps=5).train()
    ci.shutdown()
    ci.profile()
    new_trainer(**options, max_steps=8).train(resume_from_checkpoint="out/checkpoint-5")
    outline = traced()
    ci.shutdown()
    run = spools.read_one(tmp_path / ".cirron")

    skipped = f"epoch[0](skipped({' '.join(['data_load'] * 4)}))"
    assert f"{skipped} {epoch(1, *STEPS[:3])}" == outline
    assert {span.parent_id for span in run.spans} - {span.id for span in run.spans} == {None}


def test_batches_that_are_left_over(traced: Traced) -> None:
    """Batches of an accumulated gradient that came to no optimizer step are no step."""
    trainer = new_trainer(
        given={"train_dataset": Stream()}, max_steps=3, gradient_accumulation_steps=3
    )
    trainer.train()

    assert 3 == trainer.state.global_step
    assert [1, 2, 3] == [one["attrs"]["global_step"] for one in found("step")]
    assert "skipped(forward:train backward)" in traced()


def test_a_run_inside_another(traced: Traced) -> None:
    """A run that a callback makes is beside the outer one's steps, with steps of its own."""

    class Trains(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                new_trainer(given={"train_dataset": rows(4)}, num_train_epochs=1).train()

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            new_trainer(given={"train_dataset": rows(4)}, num_train_epochs=1).train()

    new_trainer(given={"callbacks": [Trains()]}, num_train_epochs=1).train()

    inner = f"fit({step(0, 2)} {step(1, 0)})"
    assert epoch(0, STEPS[0], inner, *STEPS[1:], inner) == traced()
    assert "Model" == found("fit")[0]["attrs"]["model"]


# -- beside training -------------------------------------------------------------------------


def test_evaluation_in_the_epoch(traced: Traced) -> None:
    """An evaluation is in its epoch beside the steps, and is no epoch."""
    new_trainer(eval_strategy="epoch").train()

    assert f"{epoch(0, *STEPS, EVALUATION)} {epoch(1, *STEPS, EVALUATION)}" == traced()


def test_evaluation_between_steps(traced: Traced) -> None:
    """An evaluation after a step is beside that step: its time is not the step's."""
    new_trainer(eval_strategy="steps", eval_steps=2, num_train_epochs=1).train()

    assert epoch(0, *STEPS[:2], EVALUATION, *STEPS[2:], EVALUATION) == traced()


def test_evaluation_alone(traced: Traced) -> None:
    """`evaluate` and `predict` without training are scopes of their own, with their metrics."""
    trainer = new_trainer()
    trainer.evaluate()
    trainer.predict(rows(4))

    assert f"{EVALUATION} {EVALUATION.replace('evaluation', 'prediction')}" == traced()
    (evaluation,), (prediction,) = found("evaluation"), found("prediction")
    assert ["eval", "test"] == [evaluation["attrs"]["prefix"], prediction["attrs"]["prefix"]]
    assert math.isfinite(marks(evaluation, "summary")["eval_loss"])
    assert math.isfinite(marks(prediction, "summary")["test_loss"])


def test_several_datasets_to_evaluate(traced: Traced) -> None:
    """Of a dict of datasets each has its own evaluation inside that of them all."""
    new_trainer(given={"eval_dataset": {"a": rows(4), "b": rows(4)}}).evaluate()

    assert f"evaluation({EVALUATION} {EVALUATION})" == traced()
    (outer,) = found("evaluation")
    assert ["eval_a", "eval_b"] == [one["attrs"]["prefix"] for one in outer["children"]]


def test_checkpoints(traced: Traced) -> None:
    """A checkpoint is beside the step after which it is saved; so is a model saved by hand."""
    trainer = new_trainer(save_strategy="steps", save_steps=2, num_train_epochs=1)
    trainer.train()
    trainer.save_model("model")

    body = (*STEPS[:2], "checkpoint", *STEPS[2:], "checkpoint")
    assert f"{epoch(0, *body)} checkpoint" == traced()
    assert [2, 4, 4] == [one["attrs"]["global_step"] for one in found("checkpoint")]


def test_what_is_measured(traced: Traced) -> None:
    """Epochs, and what is beside the steps, have processor time and memory, as in any loop."""
    trainer = new_trainer(eval_strategy="epoch", save_strategy="epoch")
    trainer.train()
    trainer.predict(rows(4))

    for name in ("epoch", "evaluation", "prediction", "checkpoint"):
        assert all(one["cpu_ns"] > 0 and one["memory_peak_bytes"] > 0 for one in found(name)), name
    assert {None} == {one["cpu_ns"] for one in found("step")}


# -- values ----------------------------------------------------------------------------------


def test_logged_values_are_marks(traced: Traced) -> None:
    """What the Trainer logs of a step is on that step; the last of an epoch sums it up."""
    trainer = new_trainer(logging_strategy="steps", logging_steps=2)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    points = [marks(one) for one in found("step") if "loss" in marks(one)]

    assert [entry["loss"] for entry in logged] == [point["loss"] for point in points]
    assert [logged[1]["loss"], logged[3]["loss"]] == [
        marks(one, "summary")["loss"] for one in found("epoch")
    ]
    assert {"step_loss", "loss", "grad_norm", "learning_rate"} == set(points[0])
    (root,) = ci.trace(format="dict")["roots"]
    assert trainer.state.log_history[-1]["train_loss"] == marks(root, "summary")["train_loss"]


def test_what_callbacks_record(traced: Traced) -> None:
    """What a callback records is in the epoch or the step that it is called for."""

    class Records(TrainerCallback):
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            ci.mark("epoch_begun", 1)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ci.mark("step_ended", 1)

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            ci.mark("epoch_ended", 1)

    new_trainer(given={"callbacks": [Records()]}).train()

    assert all({"epoch_begun", "epoch_ended"} == set(marks(one)) for one in found("epoch"))
    assert all("step_ended" in marks(one) for one in found("step"))


def test_values_at_the_end_of_an_epoch(traced: Traced) -> None:
    """What is logged and evaluated at an epoch's end is its summary, and no point beside it."""
    trainer = new_trainer(logging_strategy="epoch", eval_strategy="epoch")
    trainer.train()
    last = found("epoch")[-1]
    logged = {name: one for entry in trainer.state.log_history for name, one in entry.items()}

    assert {} == marks(last)
    assert logged["loss"] == marks(last, "summary")["loss"]
    assert logged["eval_loss"] == marks(last, "summary")["eval_loss"]
    assert "epoch" not in marks(last, "summary")


def test_every_step_has_its_loss(traced: Traced) -> None:
    """The loss of each step is marked, also where the Trainer logs nothing."""
    trainer = new_trainer(max_steps=4)
    trainer.train()
    losses = [marks(one)["step_loss"] for one in found("step")]

    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(sum(losses) / 4)


class Bad(Model):
    """Has no loss to speak of in its third batch."""

    calls = 0

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        self.calls += 1
        result = super().forward(x, labels)
        return {**result, "loss": result["loss"] * (math.nan if self.calls == 3 else 1.0)}


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_loss_that_is_not_a_number(traced: Traced, accumulated: int) -> None:
    """The Trainer leaves NaN out of its log; the step that it came from has it."""
    trainer = new_trainer(
        given={"model": Bad()},
        logging_strategy="steps",
        logging_steps=1,
        num_train_epochs=1,
        gradient_accumulation_steps=accumulated,
    )
    trainer.train()
    entries = [
        mark for one in found("step") for mark in one["marks"] if mark["name"] == "step_loss"
    ]
    bad = 2 // accumulated

    assert not math.isnan(trainer.state.log_history[bad]["loss"])
    assert [None, "nan"] == [one.get("value_nonfinite") for one in entries[bad - 1 : bad + 1]]


class Worse(Model):
    """Has none at all after so many batches."""

    calls = 0

    def __init__(self, good: int) -> None:
        super().__init__()
        self.good = good

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        self.calls += 1
        result = super().forward(x, labels)
        return {**result, "loss": result["loss"] * (1.0 if self.calls <= self.good else math.nan)}


def test_a_loss_that_is_lost(traced: Traced) -> None:
    """An epoch is not summed up by the last loss that was a number."""
    trainer = new_trainer(
        given={"model": Worse(1)}, logging_strategy="steps", logging_steps=1, num_train_epochs=1
    )
    trainer.train()

    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [0.0] * 3 == logged[1:]
    assert [logged[0]] == [marks(one)["loss"] for one in found("step") if "loss" in marks(one)]
    assert "loss" not in marks(found("epoch")[0], "summary")


@pytest.mark.parametrize("strategy", ["steps", "epoch", "no"])
def test_no_loss_that_is_a_number(traced: Traced, strategy: str) -> None:
    """The Trainer logs 0.0 for losses that are all NaN; an epoch does not say so, nor the run."""
    trainer = new_trainer(
        given={"model": Worse(0)}, logging_strategy=strategy, logging_steps=2, num_train_epochs=1
    )
    trainer.train()
    (root,) = ci.trace(format="dict")["roots"]
    (one,) = found("epoch")
    summed_up = [mark for mark in one["marks"] if mark["kind"] == "summary"]

    assert 0.0 == trainer.state.log_history[-1]["train_loss"]
    assert "train_runtime" in marks(root, "summary")
    assert "train_loss" not in marks(root, "summary")
    assert "loss" not in marks(one, "summary")
    (loss,) = (mark for mark in summed_up if mark["name"] == "step_loss")
    assert "nan" == loss["value_nonfinite"]


def snapshots(folder: Path) -> dict[str, list[str]]:
    """The names of the tensors in each epoch's snapshot, by the epoch's id."""
    run = spools.read_one(folder / ".cirron")
    taken: dict[str, list[str]] = {}
    for one in run.snapshots:
        taken.setdefault(one.span_id, []).append(one.tensor_name)
    return {span.id: sorted(taken.get(span.id, [])) for span in run.spans if span.name == "epoch"}


@pytest.mark.parametrize("has_length", [True, False])
def test_snapshots(tmp_path: Path, *, has_length: bool) -> None:
    """Each epoch has a snapshot of the weights and of the gradients of its last step."""
    ci.profile()
    if has_length:
        new_trainer(eval_strategy="epoch").train()
    else:
        new_trainer(given={"train_dataset": Stream()}, max_steps=8).train()
    ci.shutdown()

    both = ["linear.bias", "linear.bias.grad", "linear.weight", "linear.weight.grad"]
    assert [both, both] == list(snapshots(tmp_path).values())


def test_snapshots_of_the_trainers_model(tmp_path: Path) -> None:
    """The callbacks may be given another model, as in SetFit; the snapshot is of the Trainer's."""
    ci.profile()
    trainer = new_trainer(num_train_epochs=1)
    call_event = trainer.callback_handler.call_event

    def call(event: str, *args: Any, **kwargs: Any) -> Any:
        trainer.callback_handler.model = object()
        return call_event(event, *args, **kwargs)

    trainer.callback_handler.call_event = call
    trainer.train()
    ci.shutdown()

    assert 1 == len(snapshots(tmp_path))


def test_snapshots_where_the_end_is_not_foreseen(tmp_path: Path) -> None:
    """An epoch that ends sooner than it should has a snapshot of the weights."""

    class Cut(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_training_stop = True
            return control

    ci.profile()
    new_trainer(given={"callbacks": [Cut()]}).train()
    ci.shutdown()

    assert [["linear.bias", "linear.weight"]] == list(snapshots(tmp_path).values())


# -- errors ----------------------------------------------------------------------------------


class Failing(Model):
    """Fails in its third batch."""

    calls = 0

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        self.calls += 1
        if self.calls == 3:
            raise self.error("no more")
        return super().forward(x, labels)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_run_that_fails(traced: Traced, error: type[BaseException]) -> None:
    """What was open when a run failed says so, and the next run is not under it."""
    trainer = new_trainer(given={"model": Failing(error)}, num_train_epochs=1)
    with pytest.raises(error, match="no more"):
        trainer.train()
    trainer.train()

    broken = "step[2]!(data_load forward:train!)"
    failed = f"epoch[0]!({step(0, 2)} {step(1, 1)} {broken})"
    assert f"{failed} {epoch(0, *STEPS)}" == traced()


def test_an_evaluation_that_fails(traced: Traced) -> None:
    """An evaluation that fails inside a run ends it, each span with the error."""

    def metrics(_: Any) -> Any:
        raise ValueError("no metrics")

    trainer = new_trainer(given={"compute_metrics": metrics}, eval_strategy="epoch")
    with pytest.raises(ValueError, match="no metrics"):
        trainer.train()

    failed = EVALUATION.replace("evaluation", "evaluation!")
    assert epoch(0, *STEPS, failed).replace("epoch[0]", "epoch[0]!") == traced()
    assert all(one["cpu_ns"] > 0 for name in ("epoch", "evaluation") for one in found(name))


# -- whose Trainer ---------------------------------------------------------------------------


class Custom(Trainer):
    """As libraries on top of the Trainer do: methods that call their parent's, or do not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(TrainerCallback())

    def train(self, *args: Any, **kwargs: Any) -> Any:
        return super().train(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        loss: Any = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return super().evaluate(*args, **kwargs)


class CustomTwice(Custom):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize("kind", [Custom, CustomTwice])
def test_a_subclass(traced: Traced, kind: Any) -> None:
    """A Trainer that extends another makes the same spans and marks, each once."""
    trainer = new_trainer(kind, eval_strategy="epoch", num_train_epochs=1)
    trainer.train()

    assert epoch(0, *STEPS, EVALUATION) == traced()
    assert 1 == sum(isinstance(one, CirronCallback) for one in trainer.callback_handler.callbacks)
    assert [1] * 4 == [
        sum(mark["name"] == "step_loss" for mark in one["marks"]) for one in found("step")
    ]
    losses = [marks(one)["step_loss"] for one in found("step")]
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(sum(losses) / 4)


class Mixin:
    """Methods of a Trainer in a class that is none."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return super().evaluate(*args, **kwargs)  # type: ignore[misc]


class Replacing(Mixin):
    calls = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return Custom.training_step(self, *args, **kwargs)  # type: ignore[arg-type]


class Mixed(Mixin, Trainer):
    pass


class MixedTwice(Mixed):
    pass


class Replaced(Replacing, Trainer):
    pass


class MixedAgain(MixedTwice, Replacing, Trainer):
    """Here the second mixin comes before the first."""


@pytest.mark.parametrize("kinds", [[Replaced], [MixedTwice, Mixed], [MixedTwice, MixedAgain]])
def test_a_mixin(traced: Traced, kinds: Any) -> None:
    """A Trainer whose methods come from a class that is no Trainer makes the same spans and marks;
    that class is left alone.
    """
    before = dict(vars(Mixin)), dict(vars(Replacing))
    trainers = [new_trainer(kind, eval_strategy="epoch", num_train_epochs=1) for kind in kinds]
    for trainer in trainers:
        trainer.train()

    assert " ".join([epoch(0, *STEPS, EVALUATION)] * len(kinds)) == traced()
    assert [1] * 4 * len(kinds) == [
        sum(mark["name"] == "step_loss" for mark in one["marks"]) for one in found("step")
    ]
    assert all(4 == one.calls for one in trainers if isinstance(one, Replacing))
    assert before == (dict(vars(Mixin)), dict(vars(Replacing)))
    ci.shutdown()
    assert not {"training_step", "evaluate"} & {name for kind in kinds for name in vars(kind)}


def test_the_trainer_for_sequences(traced: Traced) -> None:
    """`Seq2SeqTrainer`, which has an `evaluate` of its own, evaluates once."""
    trainer = new_trainer(
        Seq2SeqTrainer,
        arguments=Seq2SeqTrainingArguments,
        eval_strategy="epoch",
        num_train_epochs=1,
    )
    trainer.train()
    trainer.evaluate()

    assert f"{epoch(0, *STEPS, EVALUATION)} {EVALUATION}" == traced()


@pytest.mark.parametrize("given", [CirronCallback, CirronCallback()])
def test_a_callback_that_is_given(traced: Traced, given: Any) -> None:
    """A Trainer that is given the callback has that one, and no second."""
    trainer = new_trainer(given={"callbacks": [given]})
    trainer.train()

    assert 1 == sum(isinstance(one, CirronCallback) for one in trainer.callback_handler.callbacks)
    assert TWO_EPOCHS == traced()


def test_a_trainer_from_before(traced: Traced) -> None:
    """A Trainer that is older than the profiler is seen all the same."""
    ci.shutdown()
    trainer = new_trainer()
    ci.profile(output="none")
    trainer.train()

    assert TWO_EPOCHS == traced()


def test_a_copy(traced: Traced) -> None:
    """A Trainer can be copied, and its callback pickled; a copy is seen too."""
    trainer = new_trainer()
    (own,) = (one for one in trainer.callback_handler.callbacks if isinstance(one, CirronCallback))
    pickle.loads(pickle.dumps(own))
    trainer.callback_handler.callbacks = copy.deepcopy(trainer.callback_handler.callbacks)
    trainer.train()

    assert TWO_EPOCHS == traced()


def test_originals_are_restored() -> None:
    """After a shutdown the Trainer is as it was, and one made before goes on without us."""
    names = [*vars(Custom), *vars(Trainer)]
    before = [(vars(Custom).get(name), vars(Trainer).get(name)) for name in names]
    ci.profile(output="none")
    trainer = new_trainer(Custom, num_train_epochs=1)
    changed = [
        name
        for name, (_, old) in zip(names, before, strict=True)
        if vars(Trainer).get(name) is not old
    ]
    shown = inspect.signature(Trainer.__init__)
    ci.shutdown()

    assert {"__init__", "train", "evaluate", "predict", "training_step"} <= set(changed)
    assert inspect.signature(Trainer.__init__) == shown

    assert before == [(vars(Custom).get(name), vars(Trainer).get(name)) for name in names]
    assert not any(isinstance(one, CirronCallback) for one in trainer.callback_handler.callbacks)
    assert 4 == trainer.train().global_step


def test_a_mistake_of_ours(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in the hook is counted, and the run goes on."""

    def fails(*_: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(guard, "strict", False)  # as it is for users
    monkeypatch.setattr(CirronCallback, "take_snapshot", fails)

    assert 8 == new_trainer().train().global_step
    assert 4 == guard.errors["transformers hooks: RuntimeError"]  # two epochs, asked twice each
    assert TWO_EPOCHS == traced()


def test_a_shutdown_inside_a_run() -> None:
    """A session may end in the middle of a run; the run goes on, each callback called as before."""
    calls = []

    class Ends(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            calls.append(state.global_step)
            ci.shutdown()

    ci.profile(output="none")
    trainer = new_trainer(given={"callbacks": [Ends()]})

    assert 8 == trainer.train().global_step
    assert list(range(1, 9)) == calls


def test_a_session_that_begins_inside_a_run() -> None:
    """A session that begins in the middle of a run sees the epochs that follow."""

    class Begins(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                ci.profile(output="none")

    new_trainer(given={"callbacks": [Begins()]}, num_train_epochs=3).train()

    seen = [(one["index"], one["children"]) for one in found("epoch") if one["index"]]
    assert [(1, 4), (2, 4)] == [
        (index, sum(child["name"] == "step" for child in children)) for index, children in seen
    ]


def test_the_program_comes_first(traced: Traced) -> None:
    """Inside `ci.epochs` the epochs are the program's, and the steps are in them."""
    trainer = new_trainer(num_train_epochs=1, logging_strategy="epoch")
    for _ in ci.epochs(range(2)):
        trainer.train()

    assert TWO_EPOCHS == traced()
    assert all("loss" in marks(one, "summary") for one in found("epoch"))


def test_a_step_of_the_program(traced: Traced) -> None:
    """Inside a scope named `step` there is neither an epoch nor another step, as with Keras."""
    with ci.scope("step", 7):
        new_trainer(num_train_epochs=1).train()

    assert "epoch" not in traced()
    assert [7] == [one["index"] for one in found("step")]


def test_two_threads(traced: Traced) -> None:
    """Trainers that run at the same time keep their trees apart."""
    trainers = [new_trainer(), new_trainer()]
    threads = [threading.Thread(target=one.train) for one in trainers]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    spans = [span for span in traced().split(" epoch") if span]

    assert 4 == len(spans)
    assert all(4 == span.count("step[") for span in spans)


def test_results_are_the_same() -> None:
    """A run that is watched ends with the same weights, bit for bit."""
    weights = []
    for is_watched in (False, True):
        if is_watched:
            ci.profile(output="none")
        trainer = new_trainer(eval_strategy="epoch", max_grad_norm=0.1)
        trainer.train()
        weights.append([one.detach().clone() for one in trainer.model.parameters()])

    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
