"""`ci.wrap` on stand-ins: what an estimator is, what stays as it was, what a span says."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

import cirron as ci
from cirron import guard, testing
from cirron.hooks import sklearn as wrapping

if TYPE_CHECKING:
    from collections.abc import Iterator


class Base:
    """An estimator as scikit-learn asks for one, without scikit-learn."""

    def __init__(self, rate: float = 0.1) -> None:
        self.rate = rate

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def fit(self, x: Any, y: Any = None) -> Any:
        self.fitted_ = x
        return self


class Mean(Base):
    """Says what it was fitted with."""

    def predict(self, x: Any) -> Any:
        if x is None:
            raise ValueError("nothing to predict")
        return self.fitted_

    def score(self, x: Any, y: Any) -> float:
        return float(self.predict(x) == y)


class Available:
    """As `available_if`: a method that some objects of a class have."""

    def __init__(self, function: Any) -> None:
        self.function = function
        functools.update_wrapper(self, function)  # type: ignore[arg-type]

    def __get__(self, estimator: Any, kind: Any = None) -> Any:
        if estimator is None:
            return self.function
        if not estimator.rate:
            raise AttributeError("this one has no transform")
        return self.function.__get__(estimator)


class Sometimes(Base):
    @Available
    def transform(self, x: Any) -> Any:
        """Doubles."""
        return x * 2


class Chain(Base):
    """A composite, as a Pipeline is."""

    def __init__(self, steps: Any) -> None:
        self.steps = steps

    def fit(self, x: Any, y: Any = None) -> Any:
        for _, step in self.steps:
            step.fit(x, y)
        return self


class Slotted:
    __slots__ = ("fitted_",)

    def get_params(self) -> dict[str, Any]:
        return {}

    def fit(self, x: Any) -> Any:
        self.fitted_ = x
        return self


class Frozen(Base):
    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ or name == "__class__":
            raise TypeError("frozen")
        super().__setattr__(name, value)


class Registers(Base):
    def __init_subclass__(cls) -> None:
        cls.settings = "of a subclass"

    settings = "own"


class Secret:
    """Holds itself, as an object does that keeps a bound method."""

    def __init__(self, rate: float = 0.1) -> None:
        self.myself = self

    get_params = Base.get_params
    fit = Base.fit


class Closed(Base):
    def __init_subclass__(cls) -> None:
        raise TypeError("no subclasses")


@pytest.fixture
def recorded() -> Iterator[testing.Captured]:
    with testing.capture() as captured:
        yield captured


class TestSpans:
    """What a wrapped estimator records."""

    def test_each_outside_call_is_a_span(self, recorded: testing.Captured) -> None:
        """Each call from outside is a span; what the estimator calls on itself is part of it."""
        model = ci.wrap(Mean())
        model.fit(3).predict(1)
        model.score(1, 3)

        assert [
            "fit - 1.0us (estimator=Mean)",
            "predict - 1.0us (estimator=Mean)",
            "score - 2.0us {score=1} (estimator=Mean)",
        ] == recorded.text().splitlines()
        assert "summary" == recorded.marks[0].kind

    def test_an_exception(self, recorded: testing.Captured) -> None:
        """A span that ended in an exception says so, and the exception passes."""
        with pytest.raises(ValueError, match="nothing to predict"):
            ci.wrap(Mean()).predict(None)

        assert "ValueError: nothing to predict" == recorded.spans[0].attrs["error"]

    def test_steps_of_a_composite_have_spans(self, recorded: testing.Captured) -> None:
        """The steps of a composite have spans of their own, also those that were put in later."""
        chain = ci.wrap(Chain([("a", Mean()), ("b", Chain([("c", Sometimes())]))]))
        chain.fit(1)
        chain.steps = [("new", Mean())]
        chain.fit(1)

        assert [
            ("Mean", "a"),
            ("Sometimes", "c"),
            ("Chain", "b"),
            ("Chain", None),
            ("Mean", "new"),
            ("Chain", None),
        ] == [(span.attrs["estimator"], span.attrs.get("step")) for span in recorded.spans]

    def test_a_score_that_is_none(self, recorded: testing.Captured) -> None:
        """A score that is no number is no mark, and no mistake."""

        class Odd(Mean):
            def score(self, x: Any, y: Any) -> Any:
                return [1, 2]

        assert [1, 2] == ci.wrap(Odd()).score(1, 2)
        assert [] == recorded.marks
        assert ["score"] == [span.name for span in recorded.spans]

    def test_a_wrapped_estimator_works_when_disabled(self) -> None:
        """While profiling is off, a wrapped estimator just works."""
        model = ci.wrap(Mean())
        ci.profile(enabled=False)

        assert 3 == model.fit(3).predict(1)
        assert {"roots": [], "span_count": 0} == ci.trace(format="dict")

    def test_a_wrapped_estimator_works_after_shutdown(self) -> None:
        """After a shutdown too."""
        ci.profile(output="none")
        model = ci.wrap(Mean()).fit(3)
        ci.shutdown()

        assert 3 == model.predict(1)


class TestTheSame:
    """What stays as it was."""

    @pytest.mark.parametrize(
        "thing",
        [None, 3, "text", [1], object(), Mean, len, lambda: 0, ModuleType("m"), threading.Lock()],
        ids=lambda thing: type(thing).__name__,
    )
    def test_what_is_no_estimator(self, thing: Any) -> None:
        """Anything else comes back unchanged."""
        kind = type(thing)

        assert thing is ci.wrap(thing)
        assert kind is type(thing)

    def test_a_class_warns(self, caplog: pytest.LogCaptureFixture) -> None:
        """A class in the place of an estimator would silently record nothing."""
        assert Mean is ci.wrap(Mean)
        assert ["cirron: ci.wrap(Mean) records nothing: wrap an object, ci.wrap(Mean(...))"] == (
            caplog.messages
        )

    def test_half_an_estimator(self) -> None:
        """What has only `fit`, as a Keras model, is none."""

        class Model:
            def fit(self) -> None: ...

        model = Model()

        assert Model is type(ci.wrap(model))

    def test_wrap_returns_the_same_object(self) -> None:
        """It is the same object, of a class that is called the same; wrapping twice is once."""
        model = Mean()
        wrapped = ci.wrap(model)
        kind = type(wrapped)

        assert model is wrapped
        assert kind is type(ci.wrap(wrapped))
        assert isinstance(wrapped, Mean)
        assert kind is type(ci.wrap(Mean()))
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(Mean, name) == getattr(kind, name)
        assert vars(Mean()) == vars(ci.wrap(Mean()))

    def test_methods_keep_signatures_and_docstrings(self) -> None:
        """The methods have the signatures and docstrings of the originals."""
        wrapped = ci.wrap(Sometimes())

        assert inspect.signature(Sometimes().fit) == inspect.signature(wrapped.fit)
        assert inspect.signature(Sometimes().transform) == inspect.signature(wrapped.transform)
        assert "Doubles." == wrapped.transform.__doc__
        assert inspect.isfunction(type(wrapped).fit)
        assert inspect.isfunction(type(wrapped).transform)

    def test_methods_that_are_not_there(self, recorded: testing.Captured) -> None:
        """A method that the original lacks, always or just now, is not there."""
        has, has_not = ci.wrap(Sometimes()), ci.wrap(Sometimes(rate=0))

        assert hasattr(has, "transform")
        assert not hasattr(has_not, "transform")
        assert not hasattr(has, "predict")
        assert 6 == has.transform(3)
        assert ["transform"] == [span.name for span in recorded.spans]

    def test_estimators_with_slots_can_be_wrapped(self) -> None:
        """An estimator without a dictionary is wrapped like any other."""
        assert 3 == ci.wrap(Slotted()).fit(3).fitted_

    def test_frozen_estimators_can_be_wrapped(self, recorded: testing.Captured) -> None:
        """So is one that forbids to set its attributes."""
        ci.wrap(Frozen()).fit(3)

        assert ["fit"] == [span.name for span in recorded.spans]

    def test_the_class_is_set_up_once(self) -> None:
        """What the estimator's class sets up for subclasses leaves nothing in the traced one."""
        assert "own" == ci.wrap(Registers()).settings

    def test_a_class_that_lets_nobody_subclass_it(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """An estimator that cannot be wrapped comes back as it was, and health tells."""
        monkeypatch.setattr(guard, "strict", False)
        model = Closed()

        assert Closed is type(ci.wrap(model))
        assert {"ci.wrap(Closed): TypeError": 1} == ci.health()["errors"]
        assert "your program is fine" in caplog.text
        guard.errors.clear()

    def test_classes_are_bounded(self) -> None:
        """The classes that are kept have a limit."""
        assert wrapping.MAX_CLASSES == wrapping.traced_class.cache_info().maxsize


class TestCopies:
    """Copies stay wrapped; what is saved is plain."""

    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_a_pickle_holds_the_plain_estimator(self, protocol: int) -> None:
        """A pickle holds the plain estimator, of every protocol."""
        saved = pickle.dumps(ci.wrap(Mean(0.5)).fit(3), protocol)
        loaded = pickle.loads(saved)

        assert Mean is type(loaded)
        assert (3, 0.5) == (loaded.predict(1), loaded.rate)
        assert b"cirron.hooks" not in saved

    @pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy])
    def test_copies_are_wrapped_separately(self, copier: Any) -> None:
        """A copy is wrapped, and apart from the original."""
        model = ci.wrap(Mean()).fit([3])
        copied = copier(model)
        copied.rate = 7

        assert type(model) is type(copied)
        assert 0.1 == model.rate
        assert (copier is copy.copy) is (copied.fitted_ is model.fitted_)

    def test_a_deep_copy_of_what_holds_itself(self) -> None:
        """A cycle is copied as a cycle."""
        copied = copy.deepcopy(ci.wrap(Secret()))

        assert copied is copied.myself
        assert type(ci.wrap(Secret())) is type(copied)

    def test_saving_in_several_threads(self) -> None:
        """Threads that save one estimator at once each get the plain one, and leave it wrapped."""
        model = ci.wrap(Mean()).fit(3)
        kind = type(model)
        start = threading.Barrier(4)
        kinds: set[type] = set()
        previous = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)

        def save() -> None:
            start.wait()
            for _ in range(300):
                kinds.add(type(pickle.loads(pickle.dumps(model))))
                copy.deepcopy(model)

        threads = [threading.Thread(target=save) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(previous)

        assert {Mean} == kinds
        assert kind is type(model)


class Environment:
    """What LightGBM tells its callbacks."""

    def __init__(self, iteration: int, results: Any) -> None:
        self.iteration = iteration
        self.evaluation_result_list = results


class LGBMModel(Base):
    """Calls its callbacks as LightGBM does: by their order, sorted, until one stops it."""

    def fit(self, x: Any, y: Any = None, *, callbacks: Any = None) -> Any:
        callbacks = sorted(callbacks or [], key=lambda callback: callback.order)
        for iteration in range(x):
            for callback in callbacks:
                if getattr(callback, "before_iteration", False):
                    callback(Environment(iteration, None))
            results = [("valid_0", "l2", 1.0 / (iteration + 1), False)]
            try:
                for callback in callbacks:
                    if not getattr(callback, "before_iteration", False):
                        callback(Environment(iteration, results))
            except StopIteration:
                self.best_iteration_ = iteration
                break
        return self


class TrainingCallback:
    pass


class XGBModel(Base):
    """Calls its callbacks as XGBoost does, until one returns true."""

    def __init__(self, callbacks: Any = None) -> None:
        self.callbacks = callbacks

    def fit(self, x: Any, y: Any = None) -> Any:
        log: dict[str, dict[str, list[float]]] = {"validation_0": {"rmse": []}}
        self.seen_ = [type(callback).__name__ for callback in self.callbacks or []]
        for callback in self.callbacks or []:
            assert isinstance(callback, TrainingCallback)
        for iteration in range(x):
            for callback in self.callbacks or []:
                callback.before_iteration(self, iteration, log)
            log["validation_0"]["rmse"].append(1.0 / (iteration + 1))
            if any(c.after_iteration(self, iteration, log) for c in self.callbacks or []):
                self.best_iteration, self.best_score = iteration, log["validation_0"]["rmse"][-1]
                break
        return self


class XGBRFRegressor(XGBModel):
    pass


def train(params: Any, data: Any, rounds: int = 2, *, callbacks: Any = None) -> Any:
    return XGBModel(callbacks).fit(rounds)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that look like XGBoost and LightGBM."""
    xgboost: Any = ModuleType("xgboost")
    xgboost.callback = ModuleType("xgboost.callback")
    xgboost.callback.TrainingCallback = TrainingCallback
    xgboost.XGBModel, xgboost.XGBRFRegressor = XGBModel, XGBRFRegressor
    xgboost.train = train
    lightgbm: Any = ModuleType("lightgbm")
    lightgbm.LGBMModel = LGBMModel
    monkeypatch.setitem(sys.modules, "xgboost", xgboost)
    monkeypatch.setitem(sys.modules, "lightgbm", lightgbm)
    monkeypatch.setattr(train, "__module__", "xgboost.training")
    wrapping.traced_class.cache_clear()


@pytest.mark.usefixtures("libraries")
class TestBoosters:
    """A boosting round is a step, and its metrics are marks."""

    def test_lightgbm_rounds_are_steps(self, recorded: testing.Captured) -> None:
        """Callbacks are added for the time of `fit`."""
        ci.wrap(LGBMModel()).fit(2)

        assert [
            "fit - 7.0us (estimator=LGBMModel)",
            "  step[0] - 2.0us {valid_0-l2=1}",
            "  step[1] - 2.0us {valid_0-l2=0.5}",
        ] == recorded.text().splitlines()

    def test_xgboost_rounds_are_steps(self, recorded: testing.Captured) -> None:
        """The same for XGBoost, whose estimators have their callbacks as a parameter."""
        model = ci.wrap(XGBModel()).fit(2)

        assert [
            "fit - 7.0us (estimator=XGBModel)",
            "  step[0] - 2.0us {validation_0-rmse=1}",
            "  step[1] - 2.0us {validation_0-rmse=0.5}",
        ] == recorded.text().splitlines()
        assert model.callbacks is None

    def test_user_callbacks_still_run(self, recorded: testing.Captured) -> None:
        """The user's callbacks are called, are what they were, and may stop the training."""
        calls = []

        def stop(env: Environment) -> None:
            calls.append(env.iteration)
            if env.iteration == 1:
                raise StopIteration

        class Stop(TrainingCallback):
            def before_iteration(self, model: Any, epoch: int, log: Any) -> bool:
                return False

            def after_iteration(self, model: Any, epoch: int, log: Any) -> bool:
                return epoch == 1

        stop.order = 30  # type: ignore[attr-defined]
        given = [stop]
        callbacks = [Stop()]
        ci.wrap(LGBMModel()).fit(9, callbacks=given)
        model = ci.wrap(XGBModel(callbacks)).fit(9)

        assert ([0, 1], [stop]) == (calls, given)
        assert (callbacks, 1) == (model.callbacks, len(callbacks))
        assert callbacks is model.callbacks
        assert ["step", "step", "fit"] * 2 == [span.name for span in recorded.spans]
        assert [("best_iteration", 1), ("best_iteration", 1), ("best_score", 0.5)] == [
            (mark.name, mark.value) for mark in recorded.marks if mark.kind == "summary"
        ]

    def test_a_training_that_fails(self, recorded: testing.Captured) -> None:
        """An exception closes the round, and the callbacks are the user's again."""

        class Fails(TrainingCallback):
            def before_iteration(self, model: Any, epoch: int, log: Any) -> bool:
                raise KeyboardInterrupt

        callbacks = [Fails()]
        model = ci.wrap(XGBModel(callbacks))
        with pytest.raises(KeyboardInterrupt):
            model.fit(2)

        assert ["KeyboardInterrupt"] * 2 == [span.attrs.get("error") for span in recorded.spans]
        assert callbacks is model.callbacks

    def test_xgboost_forests_get_no_callback(self, recorded: testing.Captured) -> None:
        """A forest of XGBoost refuses callbacks, and gets none."""
        assert [] == ci.wrap(XGBRFRegressor()).fit(1).seen_
        assert ["fit"] == [span.name for span in recorded.spans]

    def test_a_subclass_that_takes_no_callbacks(self, recorded: testing.Captured) -> None:
        """An estimator whose `fit` has no such argument is given none, and has its rounds."""

        class Own(LGBMModel):
            def fit(self, x: Any, y: Any = None) -> Any:  # type: ignore[override]
                return super().fit(x, y)

        ci.wrap(Own()).fit(2)

        assert ["step", "step", "fit"] == [span.name for span in recorded.spans]

    def test_the_train_function_can_be_wrapped(self, recorded: testing.Captured) -> None:
        """The function `train` is wrapped too; a function of one's own is not."""
        wrapped = ci.wrap(train)
        wrapped({}, None)

        assert wrapped is ci.wrap(wrapped)
        assert inspect.signature(train) == inspect.signature(wrapped)
        assert ["step", "step", "train"] == [span.name for span in recorded.spans]

    @pytest.mark.parametrize("loop", [ci.batches, lambda items: [ci.scope("step")]])
    def test_a_step_that_is_open(self, loop: Any, recorded: testing.Captured) -> None:
        """Where the user has said what a step is, none is added; the metrics are marked."""
        model = ci.wrap(XGBModel())
        for item in loop([1]):
            if isinstance(item, int):
                model.fit(2)
            else:
                with item:
                    model.fit(2)

        assert 1 == len([span for span in recorded.spans if span.name in ("step", "batch")])
        assert [1.0, 0.5] == [mark.value for mark in recorded.marks]

    def test_a_wrapped_booster_works_when_disabled(self) -> None:
        """While profiling is off, nothing is added."""
        ci.profile(enabled=False)

        assert [] == ci.wrap(XGBModel()).fit(2).seen_


def test_wrap_works_without_the_libraries(
    monkeypatch: pytest.MonkeyPatch, recorded: testing.Captured
) -> None:
    """Where none of the libraries can be imported, everything else is as ever."""
    for name in ("sklearn", "xgboost", "lightgbm"):
        monkeypatch.setitem(sys.modules, name, None)
    wrapping.traced_class.cache_clear()
    thing = object()

    assert thing is ci.wrap(thing)
    assert 3 == ci.wrap(Mean()).fit(3).predict(1)
    assert ["fit", "predict"] == [span.name for span in recorded.spans]
