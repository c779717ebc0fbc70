"""XGBoost and LightGBM: one `step` per boosting round, with its metrics as marks.

A round is one update of the model, like a training step. Both libraries report rounds to callbacks,
so one is added to the user's own during a call. Neither library is imported here.

Runs on the user's threads.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from typing import TYPE_CHECKING, Any

from cirron import guard
from cirron.hooks.engine import STEPS, Training, around
from cirron.record import hot
from cirron.record.wrap import in_scope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Metrics = Iterable[tuple[str, Any]]


def traced_fit(kind: type, fit: Callable[..., Any]) -> Callable[..., Any]:
    """The estimator's `fit` with one step per round, if it is from one of these libraries."""
    if "dask" in kind.__module__:  # trains on other machines, and would send them the callback
        return fit
    xgboost = sys.modules.get("xgboost")
    if _is_a(kind, xgboost, "XGBRFClassifier", "XGBRFRegressor"):
        return fit  # a forest is one round, and refuses callbacks
    if _is_a(kind, xgboost, "XGBModel"):
        return _with_attribute(fit)
    if _is_a(kind, sys.modules.get("lightgbm"), "LGBMModel"):
        return _with_argument(fit, _of_lightgbm)
    return fit


def inner_classes(kind: Any) -> tuple[type, ...]:
    """A class between LightGBM's and a user's subclass whose `fit` has no `callbacks` parameter.

    The subclass's `super().fit(...)` calls it. The subclass itself gets its arguments unchanged.
    """
    lightgbm = sys.modules.get("lightgbm")
    for base in (one for one in kind.__mro__ if _is_a(one, lightgbm, "LGBMModel")):
        fit = traced_fit(base, base.fit)
        if fit is not base.fit:
            body = {"__slots__": (), "__module__": base.__module__, "fit": fit}
            return () if base is kind else (type(base)(base.__name__, (base,), body),)
    return ()


def traced_function(function: Any) -> Any:
    """`train` and `cv` of these libraries inside a span; any other function unchanged."""
    library = (function.__module__ or "").partition(".")[0]
    name, module = function.__name__, sys.modules.get(library)
    is_theirs = library in CALLBACKS and name in ("train", "cv")
    if not is_theirs or getattr(module, name) is not function:
        return function
    trained = _with_argument(function, CALLBACKS[library])
    return in_scope(trained, lambda: hot.scope(name, library=library))


def _is_a(kind: type, module: Any, *names: str) -> bool:
    return any(issubclass(kind, getattr(module, name, ())) for name in names)


def _with_argument(
    function: Callable[..., Any], callbacks_of: Callable[[Rounds], list[Any]]
) -> Callable[..., Any]:
    """Adds the callback to the function's `callbacks` argument."""
    parameters = list(inspect.signature(function).parameters)
    if "callbacks" not in parameters:  # a subclass with its own `fit`
        return function
    position = parameters.index("callbacks")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if hot.off or len(args) > position:
            return function(*args, **kwargs)
        rounds = Rounds()
        kwargs["callbacks"] = [*callbacks_of(rounds), *(kwargs.get("callbacks") or ())]
        return rounds.call(function, args, kwargs)

    return call


def _with_attribute(fit: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the callback to the estimator's `callbacks` parameter during a call of its method."""

    @functools.wraps(fit)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if hot.off or not hasattr(self, "callbacks"):
            return fit(self, *args, **kwargs)
        given, rounds = self.callbacks, Rounds()
        self.callbacks = [*_of_xgboost(rounds), *(given or ())]
        try:
            return rounds.call(fit, (self, *args), kwargs)
        finally:
            self.callbacks = given

    return call


class Rounds(Training):
    """The boosting rounds of one training."""

    def __init__(self) -> None:
        super().__init__()
        self.makes_steps = STEPS.isdisjoint(hot.open_names())  # else the program has opened one

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Calls the function that trains, and marks what early stopping has found."""
        model = around(self, function, args, kwargs, Rounds.end, Rounds.end)
        with guard.quiet("boosting rounds"):
            for name in ("best_iteration", "best_score"):
                best = getattr(model, name, getattr(model, f"{name}_", None))
                # LightGBM counts from 1 (0: no early stopping), and its scores are a dict.
                if isinstance(best, (int, float)) and not (best == 0 and _is_lightgbm(model)):
                    hot.mark(name, best, "summary")
        return model

    def begin_round(self, index: int) -> None:
        """Begins a round, and ends the previous one if it is still open."""
        with guard.quiet("boosting rounds"):
            self.end_step()
            self.makes_steps &= not hot.off
            self.begin_step(index)

    def end_round(self, metrics: Metrics) -> None:
        with guard.quiet("boosting rounds"):
            for name, value in metrics:
                hot.mark(name, value)
            self.end_step()

    def end(self, error: BaseException | None = None) -> None:
        with guard.quiet("boosting rounds"):
            super().end(error)


def _is_lightgbm(model: Any) -> bool:
    return any(kind.__module__.startswith("lightgbm.") for kind in type(model).__mro__)


# -- callbacks ---------------------------------------------------------------------------------


def _of_xgboost(rounds: Rounds) -> list[Any]:
    """Goes first in the list: XGBoost calls no further callback after one that stops training."""
    base: Any = sys.modules["xgboost"].callback.TrainingCallback

    class Callback(base):  # type: ignore[misc]
        def before_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
            rounds.begin_round(epoch)
            return False

        def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
            rounds.end_round(
                # `cv` has a tuple: mean and standard deviation
                (f"{dataset}-{metric}", found[-1][0] if isinstance(found[-1], tuple) else found[-1])
                for dataset, metrics in evals_log.items()
                for metric, found in metrics.items()
            )
            return False

    return [Callback()]


def _of_lightgbm(rounds: Rounds) -> list[Any]:
    def begin(env: Any) -> None:
        rounds.begin_round(env.iteration)

    def end(env: Any) -> None:
        rounds.end_round(
            (f"{item[0]}-{item[1]}", item[2]) for item in env.evaluation_result_list or ()
        )

    begin.before_iteration, begin.order = True, -math.inf  # type: ignore[attr-defined]
    end.order = 29  # type: ignore[attr-defined]  # before early stopping, which is 30 and raises
    return [begin, end]


CALLBACKS = {"xgboost": _of_xgboost, "lightgbm": _of_lightgbm}
