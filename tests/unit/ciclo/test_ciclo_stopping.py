"""`early_stopping` and `nan_guard`."""

from __future__ import annotations

import copy
from threading import Lock
from typing import Any

import numpy as np
import pytest

import ciclo

NAN = float("nan")


def watch(losses: list[float], stop: Any, state: Any = 0, **options: Any) -> Any:
    """A loop that logs these losses; its state counts the steps."""
    return ciclo.loop(
        state,
        losses,
        [
            (ciclo.every(1), lambda state, batch: ({"metrics": {"loss": batch}}, state + 1)),
            (ciclo.every(1), stop),
        ],
        **options,
    )


def log(value: Any) -> Any:
    return lambda: {"metrics": {"loss": value}}


class TestEarlyStopping:
    def test_stops_after_its_patience(self) -> None:
        """So many steps without a better value end the loop, with the best state if asked."""
        stop = ciclo.early_stopping("loss", patience=2, restore_best_weights=True)
        result = watch([3.0, 2.0, 2.5, 2.4, 1.0], stop)

        assert (4, 2, 2.0) == (result.elapsed.steps, result.state, stop.best)

    def test_min_delta(self) -> None:
        """What is better by less than `min_delta` is no better."""
        losses = [1.0 - 0.01 * n for n in range(50)]
        result = watch(losses, ciclo.early_stopping("loss", patience=5, min_delta=0.1))

        assert 6 == result.elapsed.steps

    def test_mode_max(self) -> None:
        """The largest value may be the best."""
        stop = ciclo.early_stopping("loss", patience=2, mode="max")
        watch([1.0, 3.0, 2.0, 2.0], stop)

        assert 3.0 == stop.best

    @pytest.mark.parametrize("losses", [[NAN, 2.0, 1.0, NAN], [2.0, NAN, 1.0], [2.0, 1.0, NAN]])
    def test_nan_is_never_best(self, losses: list[float]) -> None:
        """NaN does not count as a best, first or last."""
        stop = ciclo.early_stopping("loss", patience=9, restore_best_weights=True)
        result = watch(losses, stop)

        assert 1.0 == stop.best
        assert losses.index(1.0) + 1 == result.state

    def test_baseline(self) -> None:
        """What does not beat the baseline is no best, and waiting begins at once."""
        stop = ciclo.early_stopping("loss", patience=2, baseline=0.5)
        result = watch([0.9, 0.8, 0.7, 0.1], stop)

        assert (None, 3, 3) == (stop.best, result.elapsed.steps, result.state)

    def test_patience_by_a_period(self) -> None:
        """Patience may be steps, samples or time since the best."""
        losses = [1.0, 2.0, 2.0, 2.0, 2.0, 2.0]

        by_steps = ciclo.early_stopping("loss", patience=ciclo.at(steps=3))
        by_samples = ciclo.early_stopping("loss", patience=ciclo.at(samples=20))
        assert 4 == watch(losses, by_steps).elapsed.steps
        assert 3 == watch(losses, by_samples, batch_size_fn=lambda shapes: 10).elapsed.steps
        by_time = ciclo.early_stopping("loss", patience=ciclo.at(time=1e9))
        assert 6 == watch(losses, by_time).elapsed.steps

    @pytest.mark.parametrize("end", ["data", "stop", "error"])
    def test_the_best_comes_back_however_the_loop_ends(self, end: str) -> None:
        """Not only when it stops the loop itself."""
        stop = ciclo.early_stopping("loss", patience=9, restore_best_weights=True)
        states: list[Any] = []

        def fail(batch: float) -> None:
            if end == "error" and batch == 3.0:
                raise OSError

        tasks = [
            (ciclo.every(1), lambda state, batch: ({"metrics": {"loss": batch}}, state + 1)),
            (ciclo.every(1), stop),
            (ciclo.every(1), fail),
        ]
        try:
            ciclo.loop(
                0,
                [2.0, 1.0, 3.0, 4.0],
                tasks,
                3 if end == "stop" else None,
                on_end=lambda state: states.append(state),
            )
        except OSError:
            pass

        assert [2] == states

    def test_a_state_that_is_changed_in_place(self) -> None:
        """The best state is a copy: what is done to the state afterwards does not reach it."""

        def step(state: dict[str, Any], batch: float) -> Any:
            state["w"][0] += 1
            return {"metrics": {"loss": batch}}

        stop = ciclo.early_stopping("loss", patience=5, restore_best_weights=True)
        result = ciclo.loop(
            {"w": np.zeros(1)}, [1.0, 2.0, 3.0], [(ciclo.every(1), step), (ciclo.every(1), stop)]
        )

        assert [1.0] == list(result.state["w"])

    def test_without_restoring(self) -> None:
        """Unless it is asked to, it leaves the last state."""
        stop = ciclo.early_stopping("loss", patience=1)

        assert 2 == watch([1.0, 2.0, 3.0], stop).state

    def test_used_again_it_starts_afresh(self) -> None:
        """The best of one loop is not that of the next."""
        stop = ciclo.early_stopping("loss", patience=2)

        assert 3 == watch([0.1, 1.0, 1.0, 1.0], stop).elapsed.steps
        assert 3 == watch([5.0, 6.0, 6.0, 6.0], stop).elapsed.steps

    def test_saved_and_restored(self) -> None:
        """Its state goes into a checkpoint, the best state included."""
        first = ciclo.early_stopping("loss", looks=3, restore_best_weights=True)
        run: ciclo.LoopState[int] = ciclo.LoopState(7)
        first.on_loop_start(run)
        for step, loss in enumerate([2.0, 3.0]):
            run.elapsed, run.logs = ciclo.Elapsed(step), ciclo.Logs({"metrics": {"loss": loss}})
            run.state = 100 + step
            first.__loop_callback__(run)
        second = ciclo.early_stopping("loss", looks=3, restore_best_weights=True)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        result = watch([3.0, 3.0, 3.0], second, state=50)

        assert (2, 2.0, 100) == (result.elapsed.steps, second.best, result.state)

    def test_a_name_that_is_never_logged(self) -> None:
        """It is an error after the first look, that says what there is and what to write."""
        with pytest.raises(
            ciclo.MonitorError, match=r"'los', which was not logged; the logs have metrics.loss"
        ) as caught:
            ciclo.train_loop(
                0,
                [1.0],
                {ciclo.on_train_step: lambda batch: {"metrics": {"loss": batch}}},
                callbacks=[ciclo.early_stopping("los", patience=1)],
                epoch_duration=1,
            )
        assert caught.value.__notes__ == ["ciclo: in callback early_stopping, step 0, batch 1.0"]
        with pytest.raises(
            ValueError, match=r"\{ciclo.every\(500\): \[evaluate, early_stopping\]\}"
        ):
            watch([1.0, 1.0], ciclo.early_stopping("los", patience=1))

    def test_a_value_that_is_logged_in_some_steps(self) -> None:
        """It may look at each step at what is logged in some of them."""
        losses = iter([2.0, 1.0, 3.0, 3.0, 3.0])
        stop = ciclo.early_stopping("loss", looks=2)
        tasks = [
            (ciclo.every(10), lambda: {"metrics": {"loss": next(losses)}}),
            (ciclo.every(1), stop),
        ]
        result = ciclo.loop(0, range(100), tasks)

        assert (31, 1.0) == (result.elapsed.steps, stop.best)

    def test_by_hand(self) -> None:
        """Called with elapsed, state and logs it says whether to stop, and gives the state."""
        stop = ciclo.early_stopping("loss", patience=2, restore_best_weights=True)
        for elapsed, loss in ciclo.elapse([1.0, 2.0, 3.0, 4.0]):
            is_over, state = stop(elapsed, f"after {loss}", {"metrics": {"loss": loss}})
            if is_over:
                break

        assert (3.0, "after 1.0") == (loss, state)
        with pytest.raises(ValueError, match="monitors 'loss', which was not logged"):
            stop(elapsed, 0, {"metrics": {"x": 1.0}})

    def test_looking_before_it_is_logged(self) -> None:
        """Standing before the step it would see nothing, so that is an error."""
        tasks = {ciclo.every(1): [ciclo.early_stopping("loss", 1), log(1.0)]}

        with pytest.raises(ciclo.CicloError, match="runs before 'loss' is logged"):
            ciclo.loop(0, range(9), tasks)

    def test_a_state_that_cannot_be_copied(self) -> None:
        """The error says how to do without a copy."""
        stop = ciclo.early_stopping("loss", 1, restore_best_weights=True)
        with pytest.raises(TypeError) as raised:
            ciclo.loop(Lock(), [1], {ciclo.every(1): [log(1.0), stop]})
        assert "with restore_best_weights=False it needs no copy" in raised.value.__notes__[0]

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"patience": 1, "mode": "avg"}, 'mode=.avg. is not valid; use "min" or "max"'),
            ({"patience": 0}, "patience=0 is not valid"),
            ({"patience": 1.5}, "patience=1.5 is not a whole number"),
            ({"patience": "3"}, "patience='3' is not a whole number"),
            ({"looks": 0}, "looks=0 is not valid"),
            ({}, r"early_stopping needs patience=100 .* or looks=3"),
            ({"patience": 1, "looks": 1}, "and not both"),
            ({"patience": 1, "min_delta": -1.0}, "min_delta=-1.0 is not valid"),
        ],
    )
    def test_bad_options(self, options: dict[str, Any], text: str) -> None:
        """Are refused when made."""
        with pytest.raises(ValueError, match=text):
            ciclo.early_stopping("loss", **options)


class TestNanGuard:
    @pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf"), np.float32("nan")])
    def test_raises(self, bad: float) -> None:
        """The error says what is wrong and when."""
        with pytest.raises(ciclo.NotFiniteError, match=r"loss is (nan|-?inf) at step 1"):
            watch([1.0, bad, 2.0], ciclo.nan_guard())

    def test_stops(self) -> None:
        """Or the loop just stops."""
        assert 2 == watch([1.0, NAN, 2.0], ciclo.nan_guard(action="stop")).elapsed.steps

    def test_stands_anywhere(self) -> None:
        """It looks when the step is over, at an evaluation after the last step too."""
        with pytest.raises(ciclo.NotFiniteError, match="at step 0"):
            ciclo.loop(0, [1, 2], {ciclo.every(1): [ciclo.nan_guard(), log(NAN)]})
        with pytest.raises(ciclo.NotFiniteError, match="loss_valid is nan at step 2"):
            ciclo.fit(
                0,
                range(5),
                [1],
                steps=3,
                train_step=log(1.0),
                test_step=log(NAN),
                callbacks=[ciclo.nan_guard()],
            )

    def test_only_what_it_watches(self, caplog: pytest.LogCaptureFixture) -> None:
        """Other values may be what they are; a name that was never logged is a mistake."""
        assert 2 == watch([1.0, NAN], ciclo.nan_guard("other")).elapsed.steps
        assert (
            "nan_guard monitors 'other', which was never logged; the loop logged metrics.loss"
            in caplog.text
        )
