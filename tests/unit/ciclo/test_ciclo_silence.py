"""Nothing goes wrong in silence: each of these was a loop that ran, and did something else."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import ciclo

STEP = {ciclo.on_train_step: lambda state: state + 1}


class Model:
    """A state that counts its steps."""

    def __init__(self) -> None:
        self.trained: list[Any] = []

    def train_step(self, batch: Any) -> Any:
        self.trained.append(batch)
        return {"losses": {"loss": 1.0}, "metrics": {"loss": 2.0}}

    def test_step(self, batch: Any) -> Any:
        return {"metrics": {"x": float(batch)}}


class Notes(ciclo.Logger):
    """A logger of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def open(self) -> None:
        self.calls.append("open")

    def write(self, step: int, date: float, scalars: dict[str, float]) -> None:
        self.calls.append((step, scalars))

    def close(self) -> None:
        self.calls.append("close")


def forgets(state: Any, batch: Any) -> Any:
    logs = ciclo.logs()
    logs.add_metric("x", batch)


def passes_on(state: Any, batch: Any, loop_state: Any) -> None:
    logs = ciclo.logs()
    logs.add_metric("x", batch)
    loop_state.logs.updates = logs


class TestCallbacks:
    @pytest.mark.parametrize("callback", [forgets, functools.partial(forgets)])
    def test_logs_that_nobody_gets(self, callback: Any) -> None:
        """A callback that fills logs but does not return them is an error before anything runs."""
        with pytest.raises(
            ciclo.CallbackError, match=r"forgets fills logs but does not return them"
        ):
            ciclo.loop(0, iter(lambda: pytest.fail("ran"), 1), {ciclo.every(1): callback})

    def test_logs_that_are_passed_on(self) -> None:
        """What is done with the logs is the callback's business."""
        result = ciclo.loop(0, [5], {ciclo.every(1): passes_on})

        assert [5] == result.history.collect("x")

    @pytest.mark.parametrize(
        "callback",
        [lambda elapsed, logs: None, lambda batch, x: None, lambda x, state: None],
    )
    def test_names_that_contradict_their_places(self, callback: Any) -> None:
        """It is an error when the loop starts, with the signature to write."""
        with pytest.raises(
            ciclo.CallbackError, match=r"def <lambda>\(state, batch, elapsed, loop_state\)"
        ):
            ciclo.loop(0, iter(lambda: pytest.fail("ran"), 1), {ciclo.every(1): callback})

    def test_a_result_is_not_a_state(self) -> None:
        """A loop inside a loop is an inner_loop."""
        run = lambda state: ciclo.loop(state, [1], {})  # noqa: E731
        with pytest.raises(ciclo.CallbackError, match=r"ciclo.inner_loop\(\"test\", <lambda>\)"):
            ciclo.loop(0, [1], {ciclo.every(1): run})


class TestData:
    def test_a_dataset_that_ends_before_the_stop(self, caplog: pytest.LogCaptureFixture) -> None:
        """It is said, with what to give instead; a stop by time is no promise."""
        ciclo.loop(0, range(3), {}, stop=10)
        assert "the dataset ended after 3 steps, before stop=" in caplog.text
        caplog.clear()
        for options in ({"stop": 3}, {"stop": ciclo.at(time=1e9)}, {}):
            ciclo.loop(0, range(3), {}, **options)

        assert [] == caplog.messages

    def test_an_iterator_that_was_read(self, caplog: pytest.LogCaptureFixture) -> None:
        """A loop that runs no step says why."""
        batches = iter([1, 2])
        assert 2 == ciclo.loop(0, batches, {}).elapsed.steps
        assert "" == caplog.text
        assert 0 == ciclo.loop(0, batches, {}).elapsed.steps
        assert "an iterator can be read only once" in caplog.text

    def test_a_generator_for_two_epochs(self) -> None:
        """It is an error before the first step, not after the first epoch."""
        model = Model()
        with pytest.raises(ciclo.CicloError, match=r"fit\(state, lambda: batches\(\), ...\)"):
            ciclo.fit(model, iter([1, 2]), epochs=2)

        assert [] == model.trained

    def test_validation_steps(self) -> None:
        """An evaluation may be on a part of the data."""
        result = ciclo.fit(Model(), [1], [1, 3, 100], epochs=1, validation_steps=2)

        assert [2.0] == result.history.collect("x_valid")


class TestMoments:
    def test_the_form_that_is_advised_works(self) -> None:
        """`{ciclo.on_epoch_end: obj}` calls the method of that name."""
        seen: list[Any] = []

        class Saver:
            def on_epoch_end(self, state: Any) -> None:
                seen.append(state)

        for callbacks in ([Saver()], [{ciclo.on_epoch_end: Saver()}]):
            ciclo.train_loop(0, [1, 2], STEP, callbacks=callbacks, epoch_duration=2)

        assert [2, 2] == seen

    def test_one_moment_may_be_a_string(self) -> None:
        """`moments = "on_epoch_end"` is that moment, not its letters."""
        seen: list[int] = []

        class Mine(ciclo.LoopCallback):
            moments = "on_epoch_end"

            def __loop_callback__(self, loop_state: Any) -> None:
                seen.append(loop_state.state)

        ciclo.train_loop(0, [1, 2], STEP, callbacks=[Mine()], epoch_duration=2)

        assert [2] == seen

    def test_a_task_beside_the_method_of_the_state(self) -> None:
        """Both run, the state's first; a task that is that method runs once."""
        model = Model()
        seen: list[int] = []
        tasks = {
            ciclo.on_train_step: [model.train_step, lambda state: seen.append(len(state.trained))]
        }
        ciclo.train_loop(model, "ab", tasks)

        assert (["a", "b"], [1, 2]) == (model.trained, seen)

    def test_an_end_that_a_callback_stops(self) -> None:
        """The last epoch is evaluated, also where a step of its last batch stops the loop."""

        def stop(loop_state: Any) -> None:
            loop_state.stop_iteration = loop_state.elapsed.steps == 1

        result = ciclo.train_loop(
            Model(), [1, 2, 3, 4], {ciclo.every(1): stop}, epoch_duration=2, test_dataset=[7]
        )

        assert ([1], [7.0]) == result.history.collect("steps", "x_test")


class TestLoggers:
    def test_a_name_in_two_collections(self) -> None:
        """Neither value is dropped."""
        notes = Notes()
        ciclo.train_loop(Model(), [1], callbacks=[notes])

        assert ["open", (0, {"loss": 1.0, "metrics.loss": 2.0}), "close"] == notes.calls

    def test_by_hand(self) -> None:
        """A logger is called with elapsed and logs, and finished."""
        notes = Notes()
        for elapsed, batch in ciclo.elapse([0.5, 0.25]):
            notes(elapsed, {"metrics": {"x": batch}})
        notes.finish()

        assert ["open", (0, {"x": 0.5}), (1, {"x": 0.25}), "close"] == notes.calls

    def test_a_nan_behind_the_same_name(self) -> None:
        """The guard sees both."""
        logs = {"losses": {"loss": float("nan")}, "metrics": {"loss": 1.0}}
        with pytest.raises(ciclo.NotFiniteError, match="loss is nan at step 0"):
            ciclo.loop(0, [1], {ciclo.every(1): [lambda: logs, ciclo.nan_guard()]})

    def test_a_run_without_log(self) -> None:
        """The error says what a run is."""
        with pytest.raises(ciclo.CallbackError, match=r"needs an object with log\(dict, step=\)"):
            ciclo.wandb_logger(object())


class Average:
    """A metric over many steps, with the methods that those of clu have."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def merge(self, other: Average) -> Average:
        return Average(*self.values, *other.values)

    def compute(self) -> float:
        return sum(self.values) / len(self.values)


def test_a_metric_object_is_logged_as_its_value(capsys: Any) -> None:
    """The history, loggers, bars and early stopping use what it computes."""
    notes, stopping = Notes(), ciclo.early_stopping("x", patience=10)
    log = lambda state, batch: ciclo.logs().add_stateful_metric("x", Average(1.0, batch))  # noqa: E731
    tasks = {ciclo.every(1): [log, notes, stopping, ciclo.keras_bar(2)]}
    result = ciclo.loop(0, [2, 3], tasks)

    assert [1.5, 2.0] == result.history.collect("x")
    assert {"x": 2.0} == notes.calls[-2][1]
    assert 1.5 == stopping.best
    assert "x: 2.0000" in capsys.readouterr().out


class TestCheckpoints:
    def test_one_of_before_the_means(self, tmp_path: Any) -> None:
        """A checkpoint without what an older version did not keep is read; that begins anew."""
        from ciclo.jax.metrics import Mean

        pytest.importorskip("jax")
        save = ciclo.checkpoint(tmp_path)
        save(ciclo.Elapsed(), {"a": 1.5})
        mean = Mean("loss").empty()

        assert {"a": 1.5, "avg_loss": mean} == save.restore({"a": 0.0, "avg_loss": mean})
