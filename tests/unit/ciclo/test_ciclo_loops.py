"""The ready-made loops: epochs, evaluation, moments, registering callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ciclo

if TYPE_CHECKING:
    from collections.abc import Iterator


class Model:
    """A state with steps of its own; notes what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.weight = 0

    def reset_step(self) -> None:
        self.calls.append("reset")

    def train_step(self, batch: Any) -> Any:
        self.weight += 1
        self.calls.append(f"train {batch}")
        return {"metrics": {"loss": 1 / self.weight}}

    def test_step(self, batch: Any) -> Any:
        self.calls.append(f"test {batch}")
        return {"metrics": {"loss": float(self.weight)}}

    def predict_step(self, batch: Any) -> Any:
        return {"outputs": {"y": batch * 2}}


class TestTrainLoop:
    def test_epoch_ends_come_after_the_last_batch_of_each(self) -> None:
        """With three steps an epoch and six in all, epochs end after the third and the sixth."""
        ends: list[tuple[int, int]] = []
        result = ciclo.train_loop(
            0,
            range(100),
            {
                ciclo.on_train_step: lambda state: state + 1,
                ciclo.on_epoch_end: lambda elapsed, state: ends.append((elapsed.steps, state)),
            },
            epoch_duration=3,
            stop=6,
        )

        assert [(2, 3), (5, 6)] == ends
        assert 6 == result.elapsed.steps

    @pytest.mark.parametrize("dataset", [range(100), range(7)])
    def test_the_last_epoch_ends_even_if_it_is_cut(self, dataset: Any) -> None:
        """By a stop or by the end of the data: the last weights are evaluated."""
        result = ciclo.train_loop(
            Model(), dataset, stop=7, epoch_duration=3, test_dataset=[1, 2], callbacks=[]
        )

        assert ([2, 5, 6], [3.0, 6.0, 7.0]) == result.history.collect("steps", "loss_test")

    def test_without_epochs_it_evaluates_once_at_the_end(self) -> None:
        """A test dataset without `epoch_duration` is not ignored."""
        result = ciclo.train_loop(Model(), range(5), test_dataset=[1])

        assert ([4], [5.0]) == result.history.collect("steps", "loss_test")

    def test_the_order_of_things(self) -> None:
        """Reset, train, tasks on schedules; then evaluation, then what an epoch ends with."""
        model = Model()
        note = model.calls.append
        ciclo.train_loop(
            model,
            "ab",
            {
                ciclo.on_epoch_end: lambda: note("epoch end"),
                ciclo.on_epoch_start: lambda: note("epoch start"),
                ciclo.on_train_start: lambda: note("start"),
                ciclo.on_train_end: lambda: note("end"),
                ciclo.every(1): lambda: note("scheduled"),
            },
            epoch_duration=2,
            test_dataset=["x"],
            callbacks=[{ciclo.on_epoch_end: lambda: note("callback")}],
        )

        assert [
            "start",
            "epoch start",
            "reset",
            "train a",
            "scheduled",
            "train b",
            "scheduled",
            "reset",
            "test x",
            "epoch end",
            "callback",
            "end",
        ] == model.calls

    def test_the_evaluation_comes_before_what_monitors_it(self) -> None:
        """An early stop sees the evaluation of the state that it looks at."""
        stop = ciclo.early_stopping("loss_test", patience=1, mode="max")
        result = ciclo.train_loop(
            Model(), range(9), epoch_duration=3, test_dataset=[0], callbacks=[stop]
        )

        assert (9.0, 9) == (stop.best, result.elapsed.steps)

    def test_test_means_are_weighted_by_samples(self) -> None:
        """The mean over a test set is that of its samples, however they were cut into batches."""
        result = ciclo.train_loop(
            0,
            [1],
            {
                ciclo.on_train_step: lambda: None,
                ciclo.on_test_step: lambda batch: {"metrics": {"x": float(batch.mean())}},
            },
            test_dataset=[np.array([1.0, 2.0, 3.0]), np.array([10.0])],
            aggregation="mean",
        )

        assert [4.0] == result.history.collect("x_test")

    def test_tasks_stay_as_they_were(self) -> None:
        """The caller's dict is not emptied."""
        tasks = {ciclo.on_train_step: [lambda: None]}
        ciclo.train_loop(0, [1], tasks)

        assert [ciclo.on_train_step] == list(tasks)
        assert 1 == len(tasks[ciclo.on_train_step])

    def test_nothing_to_do_is_an_error(self) -> None:
        """Neither a task nor a method: the error shows both."""
        with pytest.raises(
            ciclo.CallbackError,
            match=r"give the tasks {ciclo.on_train_step: train_step}, or a state with a method",
        ):
            ciclo.train_loop(0, [1])

    def test_an_unknown_moment_is_an_error(self) -> None:
        """The error lists those that there are."""
        with pytest.raises(
            ciclo.CallbackError, match="'on_trian_step' is not a moment; use one of on_"
        ):
            ciclo.train_loop(Model(), [1], {"on_trian_step": lambda: None})

        class Mine(ciclo.LoopCallback):
            moments = ("on_epochs_end",)

        with pytest.raises(ciclo.CallbackError, match="'on_epochs_end' is not a moment"):
            ciclo.train_loop(Model(), [1], callbacks=[Mine()])

    @pytest.mark.parametrize(
        "bad", [0, -1, 2.5, ciclo.at(steps=2, time=3), ciclo.at(tokens=2), ciclo.at(time=0)]
    )
    def test_bad_epoch_durations(self, bad: Any) -> None:
        """An epoch has at least a step."""
        with pytest.raises(ciclo.PeriodError, match="epoch_duration="):
            ciclo.train_loop(Model(), [1], epoch_duration=bad)

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"epochs": 1.5}, "epochs=1.5 is not a whole number"),
            ({"epochs": -1}, "epochs=-1 is negative"),
            ({"epochs": 1, "steps_per_epoch": 0}, "steps_per_epoch=0 is not valid"),
        ],
    )
    def test_bad_numbers_for_fit(self, options: dict[str, Any], text: str) -> None:
        """The error names the one that is wrong."""
        with pytest.raises(ciclo.PeriodError, match=text):
            ciclo.fit(Model(), [1], **options)

    def test_a_one_shot_test_dataset_is_an_error(self) -> None:
        """It would be empty at the second evaluation."""
        with pytest.raises(ciclo.CicloError, match="can be read only once"):
            ciclo.train_loop(Model(), [1], test_dataset=iter([1]))


class TestRegistering:
    def test_every_callback_of_ours_registers(self) -> None:
        """Each one in `callbacks=[...]` is called."""
        bar, stop, guard, rate, average = (
            ciclo.keras_bar(),
            ciclo.early_stopping("loss", 100),
            ciclo.nan_guard(),
            ciclo.throughput(),
            ciclo.ema(0.5, select=lambda model: float(model.weight)),
        )
        inner = ciclo.inner_loop("again", lambda state: ciclo.test_loop(state, [1]))
        result = ciclo.train_loop(
            Model(),
            range(3),
            callbacks=[
                bar,
                stop,
                guard,
                rate,
                average,
                inner,
                ciclo.console_logger(),
                ciclo.noop(),
            ],
        )

        assert 1 / 3 == stop.best
        assert pytest.approx(17 / 7) == average.value
        assert {"metrics.steps_per_second", "metrics.loss_again"} <= set(result.history.names())

    def test_one_that_cannot_is_an_error(self) -> None:
        """A plain function does not say when it is due; the error shows how to."""

        def mine() -> None:
            pass

        with pytest.raises(
            ciclo.CallbackError,
            match=r"mine in callbacks=\[...\] has no moment: .*on_epoch_end: mine",
        ):
            ciclo.train_loop(Model(), [1], callbacks=[mine])

    @pytest.mark.parametrize("loop", [ciclo.train_loop, ciclo.test_loop, ciclo.predict_loop])
    def test_a_moment_that_never_comes_is_an_error(self, loop: Any) -> None:
        """A callback that nobody would call is named."""
        moment = ciclo.on_predict_step if loop is not ciclo.predict_loop else ciclo.on_test_step
        with pytest.raises(
            ciclo.CallbackError, match=rf"noop .* would never be called: this loop has no {moment}"
        ):
            loop(Model(), [1], callbacks=[{moment: ciclo.noop}])

    def test_all_moments_of_a_pass(self) -> None:
        """A pass has a start and an end for callbacks too."""
        seen: list[str] = []
        moments = ("on_train_start", "on_epoch_start", "on_train_step", "on_epoch_end")
        added = {m: lambda m=m: seen.append(m) for m in (*moments, "on_train_end")}
        ciclo.test_loop(Model(), [1], callbacks=[added])

        assert [*moments, "on_train_end"] == seen

    def test_callbacks_one_by_one(self) -> None:
        """Whatever gives callbacks will do."""
        bars = (ciclo.noop() for _ in range(2))

        assert 1 == ciclo.train_loop(Model(), [1], callbacks=bars).elapsed.steps


class TestFit:
    def test_epochs(self) -> None:
        """The dataset is read once an epoch, and each epoch ends with an evaluation."""
        result = ciclo.fit(Model(), [1, 2, 3], [1], epochs=2)

        assert ([2, 5], [3.0, 6.0]) == result.history.collect("steps", "loss_valid")

    def test_steps(self) -> None:
        """With `steps` the last epoch may be cut; it is evaluated all the same."""
        result = ciclo.fit(Model(), [1, 2, 3], [1], steps=5)

        assert ([2, 4], 5) == (
            result.history.collect("steps", "loss_valid")[0],
            result.elapsed.steps,
        )

    @pytest.mark.parametrize("sized", [True, False])
    def test_with_and_without_a_length(self, sized: bool) -> None:
        """A dataset that does not know its length has its epochs too, and none is read twice."""
        reads: list[int] = []

        def batches() -> Iterator[int]:
            for batch in range(4):
                reads.append(batch)
                yield batch

        train: Any = [0, 1, 2, 3] if sized else batches
        ends: list[int] = []
        ciclo.fit(
            Model(),
            train,
            epochs=3,
            tasks={ciclo.on_epoch_end: lambda elapsed: ends.append(elapsed.steps)},
        )

        assert [3, 7, 11] == ends
        assert sized or 12 == len(reads)

    def test_given_steps(self) -> None:
        """Steps may be functions instead of methods of the state."""
        result = ciclo.fit(
            0,
            [1, 2],
            [5],
            epochs=2,
            train_step=lambda state, batch: state + batch,
            test_step=lambda state, batch: {"metrics": {"x": float(state + batch)}},
        )

        assert (6, [8.0, 11.0]) == (result.state, result.history.collect("x_valid"))

    def test_it_must_know_where_to_end(self) -> None:
        """Neither epochs nor steps is an error that says so."""
        with pytest.raises(ciclo.PeriodError, match="needs an end: epochs=10 or steps=1000"):
            ciclo.fit(Model(), [1])

    def test_a_dataset_that_can_be_read_once(self) -> None:
        """A generator is enough for one epoch; for two it is an error that says what to give."""
        assert 3 == ciclo.fit(Model(), iter([1, 2, 3]), epochs=1).elapsed.steps
        with pytest.raises(ciclo.CicloError, match="train can be read only once"):
            ciclo.fit(Model(), iter([1, 2, 3]), epochs=2)

    def test_a_stream_in_epochs(self) -> None:
        """With `steps_per_epoch` an endless stream goes on from epoch to epoch."""
        result = ciclo.fit(Model(), iter(range(100)), [1], epochs=2, steps_per_epoch=3)

        assert [f"train {n}" for n in range(6)] == [
            call for call in result.state.calls if call.startswith("train")
        ]
        assert [2, 5] == result.history.collect("steps", "loss_valid")[0]

    def test_a_stream_that_ends_in_an_epoch(self, caplog: pytest.LogCaptureFixture) -> None:
        """The epoch is evaluated, and the trained state is returned, with a warning."""
        epochs: list[Any] = []
        state, history, elapsed = ciclo.fit(
            0,
            iter(range(5)),
            [1],
            epochs=3,
            steps_per_epoch=3,
            train_step=lambda state: state + 1,
            test_step=lambda state: {"metrics": {"trained": state}},
            callbacks=[{ciclo.on_epoch_end: lambda loop_state: epochs.append(loop_state.epoch)}],
        )

        assert (state, elapsed.steps, epochs) == (5, 5, [0, 1])
        assert history.collect("trained_valid") == [3.0, 5.0]
        assert "the dataset ended after 5 steps, before stop=period(steps=9)" in caplog.text

    def test_a_length_that_is_wrong(self) -> None:
        """A dataset that is shorter than it says is an error with the right number."""

        class Liar:
            def __len__(self) -> int:
                return 5

            def __iter__(self) -> Iterator[int]:
                return iter([1, 2])

        with pytest.raises(
            ciclo.CicloError, match=r"5 batches, but had 2; use .*steps_per_epoch=2"
        ):
            ciclo.fit(Model(), Liar(), epochs=2)

    def test_the_bar_knows_the_end(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Two epochs of three batches are six steps."""
        ciclo.fit(Model(), [1, 2, 3], epochs=2, callbacks=[ciclo.keras_bar()])

        assert "6/6" in capsys.readouterr().out

    def test_the_epoch_is_known(self) -> None:
        """Callbacks can ask for its number."""
        seen: list[int | None] = []
        ciclo.fit(
            Model(),
            [1, 2],
            epochs=2,
            tasks={ciclo.every(1): lambda loop_state: seen.append(loop_state.epoch)},
        )

        assert [0, 0, 1, 1] == seen


class TestPasses:
    def test_test_loop(self) -> None:
        """Resets once, then tests each batch."""
        result = ciclo.test_loop(Model(), [1, 2])

        assert ["reset", "test 1", "test 2"] == result.state.calls

    def test_predict_loop(self) -> None:
        """Outputs are collected in the history."""
        result = ciclo.predict_loop(Model(), [1, 2, 3], stop=2)

        assert [2, 4] == result.history.collect("outputs.y")

    def test_options_of_loop(self) -> None:
        """What `loop` takes, they take."""
        seen = []
        ciclo.test_loop(
            Model(), [1], on_end=lambda loop_state: seen.append(loop_state.metadata), metadata=5
        )

        assert [5] == seen
