"""scikit-learn: `ci.wrap`, which records each call of an estimator's methods as a span.

A wrapped estimator is the same object with another class: a subclass with the same name, whose
methods open a span and call the original. Cloning, `isinstance`, metadata routing and tags work as
before, and clones are wrapped too. It is pickled as an object of the original class, so loading it
does not need cirron.

The parts of a composite, such as the steps of a Pipeline, are wrapped with it, and again before
each call because parameters may change. A call that an estimator makes on itself has no span.
Nothing here imports scikit-learn: an estimator is any object with `fit` and `get_params`.
Runs on the user's threads.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from _thread import get_ident
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, TypeVar

from cirron import guard
from cirron.hooks import boosters
from cirron.hooks.engine import around, scalar_of
from cirron.record import hot, value

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

METHODS = (
    "fit",
    "partial_fit",
    "fit_transform",
    "fit_predict",
    "fit_resample",
    "transform",
    "inverse_transform",
    "predict",
    "predict_proba",
    "predict_log_proba",
    "decision_function",
    "score",
    "score_samples",
)

# A parameter that identifies a composite -> the attributes with its parts, which are estimators, or
# lists of estimators or of tuples (name, estimator, ...).
PARTS = {
    "steps": ("steps",),
    "transformer_list": ("transformer_list",),
    "transformers": ("transformers", "remainder", "transformers_"),
    "estimators": ("estimators", "estimators_", "final_estimator", "final_estimator_"),
}
PARTS_OF_SEARCH = ("estimator", "best_estimator_")

# Wrapped classes are cached, because creating one takes a millisecond.
MAX_CLASSES = 1_000


def wrap(estimator: T) -> T:
    """Records each call of a scikit-learn estimator's methods as a span; returns the same object.

    The steps of a Pipeline, the candidates and folds of a search, and the rounds of XGBoost and
    LightGBM have their own spans. The functions `train` and `cv` of those two can be wrapped too.
    Anything else is returned unchanged.

    >>> model = ci.wrap(RandomForestClassifier(n_estimators=100))
    >>> model.fit(X, y)
    """
    if isinstance(estimator, FunctionType):
        traced: T = boosters.traced_function(estimator)
        return traced
    if isinstance(estimator, type):
        name = estimator.__name__
        guard.warn("ci.wrap(%s) records nothing: wrap an object, ci.wrap(%s(...))", name, name)
    trace(estimator, None)
    return estimator


def trace(estimator: Any, step: str | None) -> None:
    """Gives an estimator its traced class, unless it has one. Ignores other objects."""
    kind: Any = type(estimator)
    if issubclass(kind, Traced):
        if step is None or step == kind._cirron_attrs.get("step"):
            return
        kind = kind._cirron_plain
    elif not (callable(getattr(kind, "fit", None)) and callable(getattr(kind, "get_params", None))):
        return
    with guard.quiet(f"ci.wrap({kind.__name__})"):  # the class may refuse to be subclassed
        traced = traced_class(kind, step)
        set_class(estimator, traced)
        trace_parts(estimator, traced._cirron_parts)


def trace_parts(composite: Any, attributes: tuple[str, ...]) -> None:
    """Wraps the parts of a composite, which it is about to call."""
    for attribute in attributes:
        part = getattr(composite, attribute, None)
        for item in part if isinstance(part, (list, tuple)) else (part,):
            if isinstance(item, tuple) and len(item) > 1:
                trace(item[1], item[0] if isinstance(item[0], str) else None)
            else:
                trace(item, None)


def set_class(estimator: Any, kind: type) -> None:
    object.__setattr__(estimator, "__class__", kind)  # its own `__setattr__` may forbid this


class Traced:
    """The base that marks a traced class."""

    __slots__ = ()
    _cirron_plain: type
    _cirron_attrs: dict[str, str]  # of its spans
    _cirron_parts: tuple[str, ...]


@functools.lru_cache(MAX_CLASSES)
def traced_class(kind: Any, step: str | None) -> type[Traced]:
    """The subclass whose methods record spans; `step` is its name in a composite."""
    body: dict[str, Any] = {
        "__slots__": (),  # both classes need the same memory layout
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_cirron_plain": kind,
        "_cirron_attrs": {"estimator": kind.__name__} | ({} if step is None else {"step": step}),
        "_cirron_parts": _parts_of(kind),
    }
    bases = (kind, *boosters.inner_classes(kind), Traced)
    made: Any = type(kind)(kind.__name__, bases, body)
    # Undo the effects of the estimator's `__init_subclass__`, which has run for the original class.
    # scikit-learn's would add a `set_output` to estimators that do not have one.
    for name in set(vars(made)) - set(body):
        if not name.startswith(("__", "_abc_")):
            delattr(made, name)
    for name in METHODS:
        original = inspect.getattr_static(kind, name, None)
        if isinstance(original, FunctionType):
            method = boosters.traced_fit(kind, original) if name == "fit" else original
            setattr(made, name, _traced_method(name, method, made))
        elif _is_conditional(original):
            setattr(made, name, Conditional(name, original, made))
    if hasattr(kind, "_run_search"):
        made._run_search = _traced_search(kind._run_search)
    made.__reduce_ex__ = functools.partialmethod(_reduce, made)
    made.__copy__ = functools.partialmethod(_copy, made, copy.copy)
    made.__deepcopy__ = functools.partialmethod(_copy, made, copy.deepcopy)
    traced: type[Traced] = made
    return traced


def _parts_of(kind: type) -> tuple[str, ...]:
    if hasattr(kind, "_run_search"):
        return PARTS_OF_SEARCH
    try:
        parameters = inspect.signature(kind).parameters
    except (TypeError, ValueError):  # implemented in C
        return ()
    return tuple(name for key in PARTS if key in parameters for name in PARTS[key])


def _is_conditional(original: Any) -> bool:
    """Whether it is a descriptor that may have no method, like scikit-learn's `available_if`."""
    if isinstance(original, (property, staticmethod, classmethod)):
        return False
    is_function = callable(original) or hasattr(original, "__wrapped__")
    return is_function and hasattr(original, "__get__")


class Conditional:
    """A method that exists only if the original does."""

    def __init__(self, name: str, original: Any, kind: type[Traced]) -> None:
        @functools.wraps(original)
        def call(estimator: Any, *args: Any, **kwargs: Any) -> Any:
            return original.__get__(estimator, type(estimator))(*args, **kwargs)

        self._original = original
        self._traced = _traced_method(name, call, kind)

    def __get__(self, estimator: Any, kind: type | None = None) -> Any:
        found = self._original.__get__(estimator, kind)
        return found if estimator is None else MethodType(self._traced, estimator)


class Call(hot.Span):
    """The span of a call of an estimator's method."""

    __slots__ = ("estimator", "folds")
    estimator: Any
    folds: Folds | None


def _traced_method(name: str, method: Callable[..., Any], kind: type[Traced]) -> Any:
    attrs, parts = kind._cirron_attrs, kind._cirron_parts

    @functools.wraps(method)
    def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
        if hot.off:
            return method(self, *args, **kwargs)
        above = hot.innermost()
        if isinstance(above, Call) and above.estimator is self:
            return method(self, *args, **kwargs)
        if parts or name == "fit":
            with guard.quiet("ci.wrap"):
                trace_parts(self, parts)
                if name == "fit":
                    _begin_fold(self, above)
        call = Call()
        call.name = name
        call.index = None
        call.attrs = attrs
        call.end = -1
        call.estimator = self
        call.folds = None
        with call:
            result = method(self, *args, **kwargs)
            if name == "score":
                _mark("score", result)
            elif parts is PARTS_OF_SEARCH and name == "fit":
                _mark("best_score", getattr(self, "best_score_", None))
                _mark("best_index", getattr(self, "best_index_", None))
        return result

    return traced


def _mark(name: str, given: Any) -> None:
    if (scalar := scalar_of(given)) is not None:  # a custom estimator may return anything
        hot.mark(name, scalar, "summary")


# -- copies ------------------------------------------------------------------------------------
# `kind` is passed to each, because another thread may have reset the object's class just now.


def _call_plain(estimator: Any, kind: type[Traced], function: Any, *args: Any) -> Any:
    """Calls a function of the estimator, which has its original class meanwhile.

    A call in another thread has no span in that time.
    """
    set_class(estimator, kind._cirron_plain)
    try:
        return function(estimator, *args)
    finally:
        set_class(estimator, kind)


def _reduce(estimator: Any, kind: type[Traced], protocol: Any) -> Any:
    made = _call_plain(estimator, kind, kind._cirron_plain.__reduce_ex__, protocol)
    if isinstance(made, str):
        return made
    # A partial, because pickle requires the class passed to `__newobj__` to be the object's class.
    return functools.partial(made[0]), *made[1:]


def _copy(estimator: Any, kind: type[Traced], copier: Callable[..., Any], *memo: Any) -> Any:
    copied = _call_plain(estimator, kind, copier, *memo)
    if type(copied) is kind._cirron_plain:
        set_class(copied, kind)
    return copied


# -- searches ----------------------------------------------------------------------------------


class Folds:
    """The `candidate` and `fold` spans of a search that runs in one thread.

    Nothing is called between two folds, so each lasts from its `fit` to the next one. That includes
    scoring.
    """

    def __init__(self, kind: type, candidates: list[Any], first: int, fold_count: int) -> None:
        self.kind = kind
        self._coming: Any = itertools.product(enumerate(candidates, first), range(fold_count))
        self._open: list[hot.Span] = []  # the candidate and its fold

    def begin(self) -> None:
        following = next(self._coming, None)
        if following is None:  # for example, the search fits its best candidate again
            return
        (number, parameters), fold = following
        while len(self._open) > bool(fold):  # the first fold also ends the candidate before
            hot.close(self._open.pop())
        if not self._open:
            attrs = {name: _plain_value(given) for name, given in parameters.items()}
            self._open.append(hot.begin("candidate", number, attrs or None))
        self._open.append(hot.begin("fold", fold))

    def end(self, error: BaseException | None = None) -> None:
        self._coming = iter(())
        while self._open:
            span = self._open.pop()
            if error is None:
                hot.close(span)
            else:
                hot.fail(span, error)


def _begin_fold(estimator: Any, above: hot.Span) -> None:
    """Begins the next fold if a search calls its estimator."""
    search = above.parent.parent if above.name == "fold" else above
    folds = search.folds if isinstance(search, Call) else None
    if folds is not None and type(estimator) is folds.kind and search.thread == get_ident():
        folds.begin()


def _traced_search(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run_search(self: Any, evaluate_candidates: Any, **kwargs: Any) -> Any:
        call = hot.innermost()
        if hot.off or not isinstance(call, Call):
            return original(self, evaluate_candidates, **kwargs)
        done = 0

        def evaluate(candidate_params: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal done
            candidates = list(candidate_params)
            with guard.quiet("ci.wrap"):
                count = _fold_count(self, evaluate_candidates)
                call.folds = Folds(type(self.estimator), candidates, done, count)
            given = (candidates, *args)
            results = around(call.folds, evaluate_candidates, given, kwargs, Folds.end, Folds.end)
            with guard.quiet("ci.wrap"):
                _mark_scores(results, done)
            done += len(candidates)
            return results

        return original(self, evaluate, **kwargs)

    return run_search


def _fold_count(search: Any, evaluate_candidates: Any) -> int:
    # Older releases set the attribute at the end of a search: it may be that of the previous one.
    known = inspect.getclosurevars(evaluate_candidates).nonlocals
    return int(known.get("n_splits") or search.n_splits_)


def _mark_scores(results: Any, first: int) -> None:
    for name in results:
        if name.startswith("mean_test_"):
            for index, score in enumerate(results[name][first:], first):
                hot.mark(name, score, candidate=index)


def _plain_value(given: Any) -> Any:
    scalar = scalar_of(given)
    return value.clip(repr(given)) if scalar is None and given is not None else scalar
