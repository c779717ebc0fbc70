"""`inner_loop`, `throughput`, `ema`, `noop`, and other libraries' callbacks."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

import ciclo
from ciclo import elapsed as time_module


def logged(batches: list[Any], log: Any) -> Any:
    return lambda state: ciclo.loop(state, batches, {ciclo.every(1): log})


class TestInnerLoop:
    @pytest.mark.parametrize(
        ("aggregation", "expected"),
        [
            ("mean", 6.0),
            ("sum", 12.0),
            ("min", 2.0),
            ("max", 10.0),
            ("first", 2.0),
            ("last", 10.0),
            (lambda values: len(values), 2),
            ({"x": "sum"}, 12.0),
            ({"metrics": "sum"}, 12.0),
            ({"metrics": "sum", "x": "min"}, 2.0),
            ({"losses": "sum"}, 10.0),
            (None, 10.0),
        ],
    )
    def test_aggregations(self, aggregation: Any, expected: Any) -> None:
        """What the inner loop logged is one value of the outer one, named after both."""
        inner = ciclo.inner_loop(
            "test",
            logged([2.0, 10.0], lambda batch: {"metrics": {"x": batch}}),
            aggregation=aggregation,
        )
        _, history, _ = ciclo.loop(0, [1], {ciclo.every(1): inner})

        assert [expected] == history.collect("metrics.x_test")

    def test_weighted_by_samples(self) -> None:
        """A mean may count each batch by its samples."""
        batches = [np.full(1, 2.0), np.full(5, 10.0)]
        inner = ciclo.inner_loop(
            "test",
            logged(batches, lambda batch: {"metrics": {"x": float(batch[0])}}),
            weighted=True,
        )
        _, history, _ = ciclo.loop(0, [1], {ciclo.every(1): inner})

        assert [(2.0 + 50.0) / 6] == history.collect("x_test")

    def test_stateful_metrics_are_the_last(self) -> None:
        """They stand for all steps already."""
        inner = ciclo.inner_loop(
            "v", logged([1, 5], lambda batch: {"stateful_metrics": {"x": batch}})
        )
        _, history, _ = ciclo.loop(0, [1], {ciclo.every(1): inner})

        assert [5] == history.collect("stateful_metrics.x_v")

    def test_the_state(self) -> None:
        """Stays the outer one's, unless asked for."""
        plus = logged([1, 2], lambda state: state + 1)

        assert 0 == ciclo.loop(0, [1], {ciclo.every(1): ciclo.inner_loop("t", plus)}).state
        own = ciclo.inner_loop("t", plus, output_state=True)
        assert 2 == ciclo.loop(0, [1], {ciclo.every(1): own}).state

    def test_a_bad_aggregation(self) -> None:
        """Is refused when made."""
        with pytest.raises(ValueError, match="aggregation='avg' is not valid; use 'last'"):
            ciclo.inner_loop("t", lambda state: ciclo.loop(0, [], {}), aggregation="avg")


class TestThroughput:
    def test_rates(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Steps, samples and tokens a second over the window."""
        clock = iter(range(0, 1000, 2))  # each look at the clock is two seconds later
        monkeypatch.setattr(time_module, "monotonic", lambda: float(next(clock)))
        _, history, _ = ciclo.loop(
            0,
            range(6),
            {ciclo.every(1): ciclo.throughput(window=2)},
            batch_size_fn=lambda shapes: (10, 100),
        )

        assert [0.5] * 5 == history.collect("steps_per_second")
        assert [5.0] * 5 == history.collect("samples_per_second")
        assert [50.0] * 5 == history.collect("tokens_per_second")


class TestEma:
    def test_floats_in_containers(self) -> None:
        """Each float is averaged; what is no float is the newest."""
        average = ciclo.ema(0.5)
        ciclo.loop(
            {"w": [0.0, 4.0], "n": 0},
            [1.0, 2.0],
            [
                (ciclo.every(1), lambda s, b: (None, {"w": [b, 4.0], "n": s["n"] + 1})),
                (ciclo.every(1), average),
            ],
        )

        assert average.value == {"w": [pytest.approx(5 / 3), pytest.approx(4)], "n": 2}

    def test_memory_of_its_own(self) -> None:
        """Arrays that are changed in place are averaged over what they were."""
        weights = np.zeros(2)

        def step(state: Any) -> None:
            state += 1

        average = ciclo.ema(0.5)
        ciclo.loop(weights, range(2), [(ciclo.every(1), step), (ciclo.every(1), average)])

        assert pytest.approx([5 / 3, 5 / 3]) == list(average.value)

    def test_saved_and_restored(self) -> None:
        """Its state goes into a checkpoint."""
        first = ciclo.ema(0.5)
        ciclo.loop(2.0, [1], {ciclo.every(1): first})
        second = ciclo.ema(0.5)
        second.load_state_dict(first.state_dict())
        ciclo.loop(4.0, [1], {ciclo.every(1): second})

        assert pytest.approx(10 / 3) == second.value


def test_noop() -> None:
    """Does nothing wherever a callback may stand."""
    noop = ciclo.noop

    assert noop(1, 2) is None
    assert noop() is noop  # as it was written when it was a class
    assert {} == {**noop}
    assert 5 == ciclo.loop(5, [1, 2], {ciclo.every(1): noop, **noop}).state


class KerasCallback:
    """As keras.callbacks.Callback calls its methods."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.model: Any = None

    def set_params(self, params: dict[str, Any]) -> None:
        self.calls.append(("params", params["steps"]))

    def set_model(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *args: self.calls.append((name.removeprefix("on_"), *args))


KerasCallback.__module__ = "keras.src.callbacks.callback"
KerasCallback.__name__ = "Callback"


class PeriodicAction:
    """As clu's periodic actions are called."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, step: int, t: float | None = None) -> bool:
        self.steps.append(step)
        return False


PeriodicAction.__module__ = "clu.periodic_actions"


class TestAdapters:
    def test_keras_callbacks(self) -> None:
        """Are told of training, epochs and batches, with plain numbers."""
        callback = KerasCallback()
        ciclo.train_loop(
            0,
            [1.0, 2.0, 3.0],
            {ciclo.on_train_step: lambda batch: {"metrics": {"loss": np.float32(batch)}}},
            epoch_duration=2,
            stop=3,
            callbacks=[callback],
        )

        assert [
            ("params", 3),
            ("train_begin", {}),
            ("epoch_begin", 0, {}),
            ("train_batch_begin", 0, {}),
            ("train_batch_end", 0, {"loss": 1.0}),
            ("train_batch_begin", 1, {}),
            ("train_batch_end", 1, {"loss": 2.0}),
            ("epoch_end", 0, {"loss": 2.0}),
            ("epoch_begin", 1, {}),
            ("train_batch_begin", 2, {}),
            ("train_batch_end", 2, {"loss": 3.0}),
            ("epoch_end", 1, {"loss": 3.0}),
            ("train_end", {}),
        ] == callback.calls

    def test_a_keras_callback_may_stop_the_loop(self) -> None:
        """`model.stop_training` ends it."""

        class Stop(KerasCallback):
            def on_train_batch_end(self, step: int, logs: Any) -> None:
                self.model.stop_training = True

        for stop in (ciclo.keras_callback(Stop()), Stop()):
            assert 1 == ciclo.loop(0, range(9), {ciclo.every(1): stop}).elapsed.steps

    def test_a_loop_without_epochs_is_one_epoch_for_keras(self) -> None:
        """Which ends with the loop, with what was logged last."""
        callback = KerasCallback()
        log = lambda batch: {"metrics": {"loss": batch}}  # noqa: E731
        ciclo.loop(0, [1.0, 2.0], {ciclo.every(1): [log, callback]})

        assert [("epoch_end", 0, {"loss": 2.0}), ("train_end", {})] == callback.calls[-2:]

    def test_clu_actions(self) -> None:
        """Are called with each step, as a task and as a callback."""
        action, other = PeriodicAction(), PeriodicAction()
        ciclo.loop(0, range(3), {ciclo.every(1): action})
        ciclo.train_loop(0, range(2), {ciclo.on_train_step: lambda: None}, callbacks=[other])

        assert ([0, 1, 2], [0, 1]) == (action.steps, other.steps)


# -- loggers ---------------------------------------------------------------------------------------


def two_steps(logger: Any) -> None:
    ciclo.loop(
        0,
        [0.5, np.float32(0.25)],
        [
            (ciclo.every(1), logger),
            (ciclo.every(1), lambda batch: {"metrics": {"loss": batch, "text": "no number"}}),
        ],
        on_start=lambda: None,
    )


class FakeRun:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log(self, scalars: dict[str, float], step: int) -> None:
        self.calls.append((step, scalars))

    def finish(self) -> None:
        self.calls.append("finish")


def module(name: str, monkeypatch: pytest.MonkeyPatch, **content: Any) -> None:
    fake = types.ModuleType(name)
    fake.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, fake)


class TestLoggers:
    def test_console(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A line a step, with all of the step's numbers."""
        two_steps(ciclo.console_logger())

        assert "step 0: loss=0.5\nstep 1: loss=0.25\n" == capsys.readouterr().out

    def test_only_rank_0_writes(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On other ranks a logger is silent."""
        monkeypatch.setenv("RANK", "1")
        two_steps(ciclo.console_logger())

        assert "" == capsys.readouterr().out

    def test_wandb(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Logs to a run that it starts and ends; a run that it is given, it leaves open."""
        runs: list[tuple[dict[str, Any], FakeRun]] = []

        def init(**options: Any) -> FakeRun:
            runs.append((options, FakeRun()))
            return runs[-1][1]

        module("wandb", monkeypatch, init=init)
        two_steps(ciclo.wandb_logger(project="p"))
        given = FakeRun()
        two_steps(ciclo.wandb_logger(given))

        steps = [(0, {"loss": 0.5}), (1, {"loss": 0.25})]
        assert [({"project": "p"}, [*steps, "finish"])] == [(o, run.calls) for o, run in runs]
        assert steps == given.calls

    def test_mlflow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Starts a run only if none is active, and ends only its own."""
        calls: list[Any] = []
        module(
            "mlflow",
            monkeypatch,
            active_run=lambda: None,
            start_run=lambda **options: calls.append(("start", options)),
            log_metrics=lambda scalars, step: calls.append((step, scalars)),
            end_run=lambda: calls.append("end"),
        )
        two_steps(ciclo.mlflow_logger(run_name="r"))
        monkeypatch.setattr(sys.modules["mlflow"], "active_run", object)
        two_steps(ciclo.mlflow_logger())

        steps = [(0, {"loss": 0.5}), (1, {"loss": 0.25})]
        assert [("start", {"run_name": "r"}), *steps, "end", *steps] == calls

    def test_trackio(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Starts and ends a run of the project."""
        calls: list[Any] = []
        module(
            "trackio",
            monkeypatch,
            init=lambda **options: calls.append(options),
            log=lambda scalars, step: calls.append((step, scalars)),
            finish=lambda: calls.append("end"),
        )
        two_steps(ciclo.trackio_logger("p"))

        assert [{"project": "p"}, (0, {"loss": 0.5}), (1, {"loss": 0.25}), "end"] == calls

    @pytest.mark.parametrize(
        ("make", "package"),
        [
            (lambda: ciclo.tensorboard_logger("x"), "tensorboard"),
            (lambda: ciclo.wandb_logger(), "wandb"),
            (lambda: ciclo.mlflow_logger(), "mlflow"),
            (lambda: ciclo.trackio_logger("p"), "trackio"),
            (lambda: ciclo.tqdm_bar(), "tqdm"),
            (lambda: ciclo.rich_bar(), "rich"),
        ],
    )
    def test_without_the_package(
        self, make: Any, package: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The error says what to install."""
        for name in list(sys.modules):
            if name.partition(".")[0] == package:
                monkeypatch.delitem(sys.modules, name)

        class Absent:
            def find_spec(self, name: str, *args: Any) -> None:
                if name.partition(".")[0] == package:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])

        with pytest.raises(
            ciclo.MissingDependencyError,
            match=rf"ciclo.\w+\(\) needs {package}, .*: pip install {package}$",
        ):
            make()

    def test_a_package_that_is_broken_says_so_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Something missing inside an installed package is not taken for the package."""

        class Broken:
            def find_spec(self, name: str, *args: Any) -> None:
                if name == "wandb":
                    raise ModuleNotFoundError("No module named 'dep'", name="dep")

        monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
        monkeypatch.delitem(sys.modules, "wandb", raising=False)

        with pytest.raises(ModuleNotFoundError, match="No module named 'dep'"):
            ciclo.wandb_logger()


def test_an_inner_loop_that_is_none() -> None:
    """What is no loop, or cannot be summed up, is said to be so."""
    nothing = ciclo.inner_loop("test", lambda state: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ciclo.CallbackError, match=r"inner_loop\('test'\) returned NoneType"):
        ciclo.loop(0, [1], {ciclo.every(1): nothing})

    def words(state: int) -> Any:
        return ciclo.loop(state, [1, 2], {ciclo.every(1): lambda: {"metrics": {"x": "word"}}})

    inner = ciclo.inner_loop("test", words, aggregation="mean")
    with pytest.raises(TypeError) as raised:
        ciclo.loop(0, [1], {ciclo.every(1): inner})
    assert "ciclo: 'mean' of metrics.x in inner_loop('test')" in raised.value.__notes__[0]


def test_an_inner_loop_over_empty_batches() -> None:
    """A mean by samples of none is a plain mean."""

    def empty(state: int) -> Any:
        return ciclo.loop(state, [[], []], {ciclo.every(1): lambda: {"metrics": {"x": 2.0}}})

    inner = ciclo.inner_loop("test", empty, weighted=True)

    assert [2.0] == ciclo.loop(0, [1], {ciclo.every(1): inner}).history.collect("x_test")
