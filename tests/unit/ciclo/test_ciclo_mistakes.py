"""Mistakes that users make: each is an error or a warning that has the line to write."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen as nn

import ciclo
from ciclo import managed

if TYPE_CHECKING:
    from collections.abc import Callable

LOGS = {"metrics": {"x": 1.0}}
STEP = {ciclo.on_train_step: lambda state: state + 1}
LAYER = {"dense": {"w": 1.0}}
X, Y = np.zeros((4, 2)), np.zeros(4)
LINEAR = torch.nn.Linear(2, 1)
RATES = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(LINEAR.parameters(), 0.1), 1)
UNTYPED: Any = ciclo  # for calls that a type checker refuses


def run(callback: Any, state: Any = 0, data: Any = (1, 2), **options: Any) -> Any:
    return ciclo.loop(state, data, {ciclo.every(1): callback}, **options)


def set_stop(loop_state: Any) -> None:
    loop_state.stop = True


class Typed:
    """A callback with a method that no loop calls."""

    def on_epoch_end(self, state: Any) -> None: ...

    def on_batch_end(self, state: Any) -> None: ...


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "a_misspelt_amount_of_every": (
        lambda: UNTYPED.every(step=3),
        r"every\(\) has no option 'step'. Did you mean 'steps'\?",
    ),
    "a_model_as_the_state": (
        lambda: ciclo.fit(torch.nn.Linear(2, 1), [1], epochs=1),
        r"has no train_step: .* such as ciclo.create_torch_state\(Linear, ...\)",
    ),
    "a_model_as_a_callback": (
        lambda: run(torch.nn.Linear(2, 1)),
        r"For a model: state = ciclo.create_torch_state\(Linear, ...\)",
    ),
    "a_learning_rate_scheduler_as_a_callback": (
        lambda: ciclo.fit(0, [1], epochs=1, tasks=STEP, callbacks=[RATES]),
        r"give {ciclo.on_epoch_end: lambda: scheduler.step\(\)}, or .*scheduler=...\)",
    ),
    "a_class_of_schedulers_as_a_callback": (
        lambda: ciclo.fit(0, [1], epochs=1, tasks=STEP, callbacks=[type(RATES)]),
        r"give {ciclo.on_epoch_end: lambda: scheduler.step\(\)}",
    ),
    "a_scheduler_at_a_moment": (
        lambda: ciclo.train_loop(0, [1], {**STEP, ciclo.on_epoch_end: RATES}),
        r"Step the scheduler yourself: {ciclo.on_epoch_end: lambda: scheduler.step\(\)}",
    ),
    "a_schedule_as_a_callback": (
        lambda: run(ciclo.every(2)),
        "A schedule is a key of the tasks; combine two with & or |",
    ),
    "a_number_of_steps_to_commit": (
        lambda: UNTYPED.history().commit(3, LOGS),
        "first argument of history.commit is 3, not an Elapsed; give the elapsed of a callback",
    ),
    "a_number_of_steps_for_a_schedule": (
        lambda: UNTYPED.every(10)(3),
        "the argument of a schedule is 3, not an Elapsed",
    ),
    "a_list_of_names_to_guard": (
        lambda: UNTYPED.nan_guard(["loss"]),
        r"monitor=\['loss'\] is not valid; use a logged name",
    ),
    "the_value_before_its_name": (
        lambda: UNTYPED.logs().add_metric(0.5, "loss"),
        "log names must be strings: got 0.5 in 'metrics'",
    ),
    "metrics_in_a_dict": (
        lambda: UNTYPED.logs().add_metrics({"loss": 0.5}),
        r"metrics are given by name; write \*\*metrics",
    ),
    "a_shape_for_the_inputs_of_a_module": (
        lambda: UNTYPED.create_flax_state(nn.Dense(1), (1, 2)),
        r"inputs=\(1, 2\) has no array; give an example .*jnp.zeros",
    ),
    "every_epoch": (
        lambda: UNTYPED.every(epochs=1),
        "for each epoch of fit or train_loop, write {ciclo.on_epoch_end: ...}",
    ),
    "a_stop_in_epochs": (
        lambda: run(lambda: None, stop=UNTYPED.at(epochs=3)),
        r"at\(\) has no option 'epochs'; count steps, or write ciclo.fit\(.*epochs=3\)",
    ),
    "an_unknown_amount_of_after": (
        lambda: UNTYPED.after(seconds=3),
        r"after\(\) has no option 'seconds'; it has steps, samples, tokens, time, date",
    ),
    "pieces_without_starts": (
        lambda: UNTYPED.piecewise([ciclo.every(1), ciclo.every(10)]),
        "needs a start and a schedule, as in {0: ciclo.every",
    ),
    "a_misspelt_end_of_fit": (
        lambda: UNTYPED.fit(0, [1], epoch=3, train_step=lambda: None),
        r"fit\(\) has no option 'epoch'. Did you mean 'epochs'\?",
    ),
    "the_validation_of_fit": (
        lambda: UNTYPED.fit(0, [1], epochs=3, test_dataset=[1], train_step=lambda: None),
        "'test_dataset'; it is called validation here",
    ),
    "the_strategy_of_a_loop": (
        lambda: UNTYPED.fit(0, [1], epochs=3, strategy="jit"),
        "'strategy'; it is an option of the function that creates the state",
    ),
    "early_stopping_without_validation_data": (
        lambda: ciclo.fit(
            0,
            [1],
            epochs=1,
            train_step=lambda: LOGS,
            callbacks=[ciclo.early_stopping("x_valid", looks=3)],
        ),
        "the logs have metrics.x. Names that end in _valid or _test need validation or test data",
    ),
    "a_checkpoint_without_validation_data": (
        lambda: ciclo.fit(
            0,
            [1],
            epochs=1,
            train_step=lambda: LOGS,
            callbacks=[ciclo.checkpoint("run", monitor="x_valid")],
        ),
        "the logs have metrics.x. Names that end in _valid or _test need validation or test data",
    ),
    "logs_in_the_place_of_the_state": (
        lambda: run(lambda state: (LAYER, LOGS), LAYER),
        r"returned logs in place of the state:\n    return logs, state",
    ),
    "logs_as_the_state_behind_none": (
        lambda: run(lambda: (None, ciclo.logs(LOGS))),
        "returned logs in place of the state",
    ),
    "a_loss_as_the_state": (
        lambda: run(lambda: 0.5, SimpleNamespace()),
        r"0.5, which would become the state in place of SimpleNamespace. To log it:\n",
    ),
    "an_array_of_one_loss_as_the_state": (
        lambda: run(lambda: np.float32(0.5), {"w": 1.0}),
        r"float32\[\], which would become the state",
    ),
    "true_to_end_the_loop": (
        lambda: run(lambda: True, {"w": 1.0}),
        r"To end the loop:\n    loop_state.stop_iteration = True",
    ),
    "stop_to_end_the_loop": (lambda: run(set_stop), "write loop_state.stop_iteration = True"),
    "a_dict_as_a_dataset": (
        lambda: run(lambda: None, data={"x": X, "y": Y}),
        "the dataset is a dict, so a loop would read its keys; give a list of batches",
    ),
    "arrays_as_a_dataset": (
        lambda: ciclo.train_loop(0, (X, Y), STEP),
        r"a tuple of arrays with equal numbers of rows, .* as \[\(x, y\)\]",
    ),
    "a_dict_to_test_on": (
        lambda: ciclo.train_loop(
            0, [1], {**STEP, ciclo.on_test_step: lambda: LOGS}, test_dataset={"x": X}
        ),
        "a loop would read its keys",
    ),
    "a_list_as_a_history": (
        lambda: run(lambda: LOGS, history=[]),
        r"is not a history; give ciclo.history\(\)",
    ),
    "len_as_batch_size_fn": (
        lambda: run(lambda: None, batch_size_fn=len),
        r"write batch_size_fn=lambda shapes: shapes\[0\]\[0\]",
    ),
    "a_number_as_batch_size_fn": (
        lambda: run(lambda: None, batch_size_fn=32),
        r"write batch_size_fn=lambda shapes: shapes\[0\]\[0\]",
    ),
    "a_class_in_callbacks": (
        lambda: ciclo.train_loop(0, [1], STEP, callbacks=[Typed]),
        r"give an object: Typed\(\)",
    ),
    "the_largest_of_nothing": (
        lambda: ciclo.checkpoint("folder", mode="max"),
        'mode="max" needs a name: monitor="accuracy"',
    ),
    "a_value_called_like_a_count": (
        lambda: run(lambda: {"metrics": {"time": 1.0}}).history.collect("time"),
        "write 'elapsed.time' or 'metrics.time'",
    ),
    "a_number_to_keep_that_is_a_text": (
        lambda: ciclo.checkpoint("run", keep="all"),  # type: ignore[arg-type]
        "keep='all' is not valid; use 1 or more, or None",
    ),
    "a_loss_that_is_a_tuple": (
        lambda: managed.train_step(lambda state: ({"losses": {"l": (state.params, 1.0)}}, state))(
            managed.ManagedState.create(params=jnp.ones(()), tx=optax.sgd(0.1))
        ),
        r"the loss 'l' is \(float32\[\], 1.0\), not a number",
    ),
    "a_loss_in_the_place_of_an_array": (
        lambda: run(lambda: 0.5, np.ones(2)),
        r"0.5, which would become the state in place of float64\[2\]",
    ),
    "a_function_as_the_state": (
        lambda: run(lambda: run),
        "function, which would become the state in place of 0",
    ),
    "no_callback": (
        lambda: run(None),
        r"None is not a callback of every\(steps=1\); to do nothing: ciclo.noop",
    ),
    "losses_in_a_dict": (
        lambda: ciclo.logs().add_losses({"l": 1.0}),  # type: ignore[arg-type]
        r"write logs.add_losses\(\*\*losses\)",
    ),
    "a_pair_as_updates": (
        lambda: setattr(ciclo.logs(), "updates", (ciclo.logs(LOGS), 0)),
        "as logs; write a dict of dicts: ",
    ),
    "a_history_of_numbers": (
        lambda: ciclo.history([0.5]),  # type: ignore[list-item]
        "got 0.5 as logs; write a dict of dicts",
    ),
    "nothing_to_collect": (
        lambda: ciclo.history().collect(),
        r"use names: history.collect\('loss'\)",
    ),
    "a_schedule_that_takes_nothing": (
        lambda: ciclo.loop(0, [1], {(lambda: True): lambda: None}),
        "it must take one argument, as in lambda elapsed: elapsed.steps > 100",
    ),
    "a_misspelt_option_of_a_callback": (
        lambda: ciclo.checkpoint("run", monitr="loss"),  # type: ignore[call-arg]
        r"checkpoint\(\) has no option 'monitr'. Did you mean 'monitor'",
    ),
    "a_misspelt_option_of_an_evaluation": (
        lambda: ciclo.train_loop(0, [1], STEP, inner_loop_kwargs={"agregation": "mean"}),
        r"inner_loop\(\) has no option 'agregation'. Did you mean 'aggregation'",
    ),
    "callbacks_of_a_plain_loop": (
        lambda: run(lambda: None, callbacks=[]),
        r"it is an option of ciclo.train_loop. Tasks take callbacks: \{ciclo.every\(1\): bar\}",
    ),
    "a_monitor_that_is_no_name": (
        lambda: ciclo.early_stopping(0, patience=1),  # type: ignore[arg-type]
        'monitor=0 is not valid; use a logged name, as "loss_valid"',
    ),
    "half_a_step": (
        lambda: ciclo.Elapsed.create(1.5),  # type: ignore[arg-type]
        "steps=1.5 is not a whole number",
    ),
}
WARNINGS: dict[str, tuple[Callable[[], Any], str]] = {
    "the_smallest_accuracy": (
        lambda: ciclo.early_stopping("accuracy_valid", patience=2),
        "treats the smallest 'accuracy_valid' as the best; if larger is better, use mode=\"max\"",
    ),
    "a_test_step_without_data": (
        lambda: ciclo.train_loop(0, [1], {**STEP, ciclo.on_test_step: lambda: LOGS}),
        "a test step was given, but no data to test on: use test_dataset=",
    ),
    "an_empty_dataset_for_fit": (
        lambda: ciclo.fit(0, [], epochs=3, train_step=lambda state: state + 1),
        "the dataset is empty, so nothing ran",
    ),
    "a_method_that_is_no_moment": (
        lambda: ciclo.train_loop(0, [1], STEP, callbacks=[Typed()]),
        "Typed.on_batch_end is not a moment and is never called. Did you mean",
    ),
    "a_text_as_a_dataset": (
        lambda: run(lambda: None, data="train.csv"),
        "the dataset is the string 'train.csv', so each character is a batch",
    ),
    "a_dataset_of_torch_without_a_loader": (
        lambda: run(lambda: None, data=torch.utils.data.TensorDataset(torch.zeros(2, 3))),
        "give torch.utils.data.DataLoader(dataset, batch_size=32)",
    ),
    "a_patience_in_epochs": (
        lambda: ciclo.fit(
            0,
            range(5),
            epochs=9,
            train_step=lambda: LOGS,
            callbacks=[ciclo.early_stopping("x", patience=3)],
        ),
        "every 5 steps, so it stops at the first look without improvement; for evaluations, use"
        " looks=3",
    ),
    "a_train_step_that_forgets_its_new_state": (
        lambda: ciclo.train_loop(
            {"w": jnp.zeros(2)},
            [1.0],
            {ciclo.on_train_step: lambda state, batch: {"losses": {"l": state["w"].sum()}}},
        ),
        "no step returned a new state, so nothing was trained",
    ),
}


@pytest.mark.parametrize("mistake", ERRORS)
def test_a_mistake_is_an_error(mistake: str) -> None:
    """The error has the line to write."""
    make, message = ERRORS[mistake]
    with pytest.raises((ciclo.CicloError, TypeError, ValueError, AttributeError), match=message):
        make()


@pytest.mark.parametrize("mistake", WARNINGS)
def test_what_may_be_a_mistake_is_a_warning(mistake: str, caplog: Any) -> None:
    """The run goes on, and the log has the line to write."""
    make, message = WARNINGS[mistake]
    make()
    assert message in caplog.text


def test_states_that_look_like_mistakes() -> None:
    """A state of any kind may become another of its kind; a plain value any plain value."""
    assert run(lambda state: state + 0.5, 1).state == 2.0
    assert run(lambda state: state > 0, 1).state is True
    assert run(lambda batch: batch, None).state == 2
    assert run(lambda state: state.sum(), np.ones(3)).state == 3.0
    assert run(lambda state: (None, {"metrics": state["metrics"] + 1}), {"metrics": 0}).state == {
        "metrics": 2
    }
    assert run(lambda state: {"w": state["w"] + 1}, {"w": 0}).state == {"w": 2}


# Values of the wrong type, for any argument.
OTHERS: dict[str, Any] = {
    "text": "x",
    "number": 2.5,
    "list": [1, 2],
    "dict": {"a": 1},
    "array": np.ones(3),
    "tensor": torch.ones(2),
    "object": object(),
    "module": LINEAR,
    "scheduler": RATES,
    "class": torch.optim.lr_scheduler.StepLR,
    "schedule": ciclo.every(2),
}
E, L = ciclo.Elapsed(), ciclo.logs(LOGS)
# Public functions of one argument, and the values above that this argument may be.
ARGUMENTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "every": (ciclo.every, ""),
    "at_time": (lambda one: ciclo.at(time=one), "number"),
    "piecewise": (lambda one: ciclo.piecewise(ciclo.every(1), one), ""),
    "a_schedule_by_hand": (ciclo.every(samples=2), ""),
    "Elapsed": (ciclo.Elapsed, ""),
    "update": (E.update, ""),
    "minus": (lambda one: E - one, ""),
    "elapse_from": (lambda one: ciclo.elapse([1], one), ""),
    "logs": (ciclo.logs, ""),
    "a_log_name": (lambda one: ciclo.logs().add_metric(one, 1.0), "text"),
    "unnamed_metrics": (ciclo.logs().add_metrics, ""),
    "the_elapsed_of_a_commit": (lambda one: ciclo.history().commit(one, L), ""),
    "the_logs_of_a_commit": (lambda one: ciclo.history().commit(E, one), ""),
    "rows": (ciclo.history, ""),
    "a_row": (lambda one: ciclo.history([LOGS])[one], ""),
    "a_column": (lambda one: ciclo.history([LOGS]).last(one), "text"),
    "a_task": (run, ""),
    "the_elapsed_of_a_loop": (lambda one: run(lambda: None, elapsed=one), ""),
    "the_elapsed_of_fit": (
        lambda one: ciclo.fit(0, [1], epochs=1, tasks=STEP, elapsed=one),
        "",
    ),
    "a_state": (lambda one: ciclo.fit(one, [1], epochs=1), ""),
    "callbacks": (lambda one: ciclo.train_loop(0, [1], STEP, callbacks=[one]), ""),
    "inner_loop_kwargs": (lambda one: ciclo.train_loop(0, [1], STEP, inner_loop_kwargs=one), ""),
    "defer": (
        lambda one: run(lambda loop_state: loop_state.defer(one)),
        "module class schedule",
    ),
    "aggregation": (
        lambda one: ciclo.inner_loop("x", run, aggregation=one),
        "module class schedule",
    ),
    "a_folder": (ciclo.checkpoint, "text"),
    "a_prefix": (lambda one: ciclo.checkpoint("x", one), "text"),
    "a_checkpoint_by_hand": (lambda one: ciclo.checkpoint("x")(one, 0), ""),
    "baseline": (lambda one: ciclo.early_stopping("x", 1, baseline=one), "number"),
    "early_stopping_by_hand": (lambda one: ciclo.early_stopping("x", 1)(one, 0, L), ""),
    "nan_guard": (ciclo.nan_guard, "text"),
    "lag": (lambda one: ciclo.nan_guard(lag=one), ""),
    "width": (lambda one: ciclo.keras_bar(width=one), ""),
    "file": (lambda one: ciclo.keras_bar(file=one), ""),
    "a_bar_by_hand": (ciclo.keras_bar(), ""),
    "the_logs_of_a_bar": (lambda one: ciclo.keras_bar()(E, one), ""),
    "a_logger_by_hand": (ciclo.console_logger(), ""),
    "logdir": (ciclo.tensorboard_logger, "text"),
    "throughput": (ciclo.throughput, ""),
    "ema": (ciclo.ema, ""),
    "select": (lambda one: ciclo.ema(select=one), "module class schedule"),
    "keras_callback": (ciclo.keras_callback, ""),
    "clu_action": (ciclo.clu_action, "module class schedule"),
    "inject": (UNTYPED.inject, "module class schedule"),
    "create_torch_state": (ciclo.create_torch_state, "module"),
    "accumulate": (lambda one: ciclo.create_torch_state(LINEAR, accumulate=one), ""),
    "clip_norm": (lambda one: ciclo.create_torch_state(LINEAR, clip_norm=one), "number"),
    "strategy": (lambda one: ciclo.create_torch_state(LINEAR, strategy=one), ""),
    "unpack": (
        lambda one: ciclo.create_torch_state(LINEAR, unpack=one),
        "module class schedule",
    ),
    "create_nnx_state": (ciclo.create_nnx_state, "schedule"),
    "create_equinox_state": (ciclo.create_equinox_state, ""),
    "nnx_module": (ciclo.nnx_module, ""),
    "equinox_module": (ciclo.equinox_module, ""),
    "a_managed_step": (managed.step, "module class schedule"),
    "mesh": (lambda one: ciclo.Strategy(mesh=one), ""),
    "devices": (lambda one: ciclo.DataParallel(devices=one), ""),
    "policy": (managed.Policy, ""),
    "rngs": (lambda one: managed.ManagedState.create(params={"w": 1.0}, rngs=one), "dict array"),
}


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_value_of_another_type_is_refused(argument: str, tmp_path: Any, monkeypatch: Any) -> None:
    """At once, by an error of ciclo itself that says what to write, and not deep in some call."""
    monkeypatch.chdir(tmp_path)
    call, allowed = ARGUMENTS[argument]
    for name in OTHERS.keys() - allowed.split():
        with pytest.raises((TypeError, ValueError, KeyError, ciclo.CicloError)) as caught:
            call(OTHERS[name])

        place = caught.traceback[-1]
        assert Path(place.path).is_relative_to(Path(ciclo.__file__).parent), (name, place)
        assert str(place.statement).strip().startswith("raise "), (name, place)


class TestJax:
    def test_a_loss_of_each_row_against_all(self) -> None:
        """Outputs [n,1] and targets [n] would be broadcast to [n,n]."""
        linen = pytest.importorskip("flax.linen")
        optax = pytest.importorskip("optax")
        state = ciclo.create_flax_state(
            linen.Dense(1), X, optax.sgd(0.1), losses=lambda preds, target: (preds - target) ** 2
        )
        with pytest.raises(ciclo.CicloError, match=r"float32\[4,1\], targets .*\[4\]. Have the"):
            ciclo.train_loop(state, [(X, Y)])
        ciclo.train_loop(state, [(X, Y[:, None])])

    def test_gradients_that_are_applied_twice(self) -> None:
        """A managed train step does it already."""
        jax = pytest.importorskip("jax")
        optax = pytest.importorskip("optax")
        from ciclo import managed

        @managed.train_step
        def train_step(state: Any, batch: Any) -> Any:
            loss, grads = jax.value_and_grad(lambda params: params["w"] ** 2)(state.params)
            return {"losses": {"loss": loss}}, state.apply_gradients(grads=grads)

        state = managed.ManagedState.create(params={"w": 1.0}, tx=optax.sgd(0.1))
        with pytest.raises(ciclo.CallbackError, match="leave apply_gradients out, or decorate"):
            train_step(state, 0)

    def test_a_loss_that_returns_nothing(self) -> None:
        """The error names the loss."""
        linen = pytest.importorskip("flax.linen")
        state = ciclo.create_flax_state(
            linen.Dense(1), X, optax.sgd(0.1), key=3, losses={"mse": lambda preds, target: None}
        )
        with pytest.raises(ciclo.CallbackError, match="'mse' returned None"):
            state.train_step((X, Y))

    def test_no_example_inputs(self) -> None:
        """An optimizer in their place is not read as a tuple of inputs."""
        linen = pytest.importorskip("flax.linen")
        with pytest.raises(ciclo.CicloError, match="inputs is an optimizer; the second argument"):
            ciclo.create_flax_state(linen.Dense(1), optax.sgd(0.1))

    def test_a_batch_without_targets(self) -> None:
        """The error of the loss has a note that says what to give."""
        linen = pytest.importorskip("flax.linen")
        state = ciclo.create_flax_state(
            linen.Dense(1), X, optax.sgd(0.1), losses=lambda preds, target: (preds - target) ** 2
        )
        with pytest.raises(TypeError) as caught:
            state.train_step(X)

        assert any("the batch has no targets; give" in one for one in caught.value.__notes__)

    def test_a_module_of_another_library(self) -> None:
        """The error names the function that takes it."""
        pytest.importorskip("flax.linen")
        with pytest.raises(ciclo.CicloError, match=r"is not a module of flax.linen; .*nnx_state"):
            ciclo.create_flax_state(object(), X)


class TestMoments:
    def test_on_reset_step_and_on_test_batch_end(self) -> None:
        """Resetting comes before each test and each epoch, a batch's end after its step."""
        calls: list[str] = []
        tasks = {
            moment: lambda moment=moment: calls.append(moment)
            for moment in (
                ciclo.on_reset_step,
                ciclo.on_train_step,
                ciclo.on_test_begin,
                ciclo.on_test_step,
                ciclo.on_test_batch_end,
            )
        }
        ciclo.train_loop(0, [1], tasks, test_dataset=[1, 2])
        test = ["on_test_step", "on_test_batch_end"] * 2
        trained = ["on_reset_step", "on_train_step"]
        assert calls == [*trained, "on_reset_step", "on_test_begin", *test]
        calls.clear()
        ciclo.test_loop(0, [1, 2], tasks)

        assert calls == ["on_test_begin", "on_reset_step", *test]

    def test_clu_action(self) -> None:
        """It calls an action of clu with the step and the date of each iteration."""
        seen: list[Any] = []
        action = ciclo.clu_action(lambda step, t: seen.append((step, t > 0)))
        run([lambda: None, action], data=range(3))
        ciclo.train_loop(0, [1], STEP, callbacks=[action])

        assert seen == [(0, True), (1, True), (2, True), (0, True)]


@pytest.mark.parametrize("kind", [ciclo.CicloError, TypeError, ValueError])
def test_an_argument_error_is_caught_as_python_names_it(kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        ciclo.early_stopping(UNTYPED, 3)

    assert ciclo.ArgumentError is type(caught.value)
