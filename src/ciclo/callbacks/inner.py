"""`inner_loop`: a loop as a callback of another loop, which logs an aggregate of it."""

from __future__ import annotations

from collections.abc import Mapping
from math import fsum
from typing import TYPE_CHECKING, Any

from ciclo.callbacks.base import LoopCallback
from ciclo.errors import CallbackError, CicloError, check, shown
from ciclo.logs import COLLECTIONS, Logs

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from ciclo.history import History
    from ciclo.loop import LoopState, Result

    Aggregation: TypeAlias = str | Callable[[list[Any]], Any]

__all__ = ["inner_loop"]

# Functions of values and weights.
AGGREGATIONS: dict[str, Callable[[list[Any], list[float]], Any]] = {
    "last": lambda values, weights: values[-1],
    "first": lambda values, weights: values[0],
    "mean": lambda values, weights: _mean(values, weights),
    "sum": lambda values, weights: sum(values[1:], start=values[0]),
    "min": lambda values, weights: min(values),
    "max": lambda values, weights: max(values),
}


class inner_loop(LoopCallback):  # noqa: N801  a name like the functions beside it
    """Runs a loop and logs its values: `loss` becomes `loss_test` in a loop named "test".

    name: the suffix of logged names; optional
    run: a function of the state that runs a loop and returns what `ciclo.loop` returns
    output_state: whether the outer loop continues with the state of the inner one
    aggregation: "last" (the default), "mean", "sum", "min", "max", "first", a function of a list of
        values, or a dict of these by collection or name, with "last" for the rest
    weighted: whether a mean is weighted by samples; then "mean" is the default

    By hand: `logs, state = inner(state)`.

    >>> ciclo.inner_loop("test", lambda state: ciclo.loop(state, test_data, tasks))
    """

    moments = ("on_epoch_end",)
    span_name: str | None = None  # in a recording, in the place of `name`

    def __init__(
        self,
        name: str | Callable[[Any], Result[Any]],
        run: Callable[[Any], Result[Any]] | None = None,
        output_state: bool = False,
        aggregation: Aggregation | Mapping[str, Aggregation] | None = None,
        *,
        weighted: bool = False,
    ) -> None:
        if run is None and not isinstance(name, str):
            run, name = name, ""
        if not callable(run) or not isinstance(name, str):
            raise CallbackError(
                f"inner_loop({shown(name)}, {shown(run)}) needs a function that runs a loop; write"
                ' ciclo.inner_loop("test", lambda state: ciclo.loop(state, data, tasks))'
            )
        if aggregation is None:
            aggregation = "mean" if weighted else "last"
        chosen = aggregation.values() if isinstance(aggregation, Mapping) else [aggregation]
        allowed = f"{', '.join(map(repr, AGGREGATIONS))} or a function"
        for one in chosen:
            check("aggregation", one, lambda one: callable(one) or one in AGGREGATIONS, allowed)
        self.name = name
        self.run = run
        self.aggregation: Any = aggregation
        self.weighted = weighted
        self.output_state = output_state

    def __loop_callback__(self, loop_state: LoopState[Any]) -> tuple[Logs, Any] | None:
        result = self._result(loop_state.state)
        if getattr(result, "is_interrupted", False):
            return None  # an incomplete evaluation is not logged
        return self._summed_up(result[1], result[0]), result[0] if self.output_state else None

    def __call__(self, state: Any) -> tuple[Logs, Any]:
        """Runs the loop, from a hand-written loop."""
        result = self._result(state)
        return self._summed_up(result[1], result[0]), result[0] if self.output_state else state

    def _result(self, state: Any) -> Result[Any]:
        result = self.run(state)
        if not isinstance(result, tuple) or len(result) != 3:
            raise CallbackError(
                f"the function of inner_loop({self.name!r}) returned {type(result).__name__}; it"
                " returns what a loop does: lambda state: ciclo.loop(state, data, tasks)"
            )
        return result

    def _summed_up(self, history: History, state: Any) -> Logs:
        logs = Logs()
        steps, samples = history.collect("elapsed.steps", "elapsed.batch_samples")
        if self.weighted and hasattr(state, "__loop_samples__"):
            samples = state.__loop_samples__(samples)  # summed over all processes
        weight_of = dict(zip(steps, samples, strict=True))
        self._check_names(history.names())
        for path in history.names():
            collection, _, name = path.partition(".")
            if collection == "outputs":
                continue
            values, logged_at = history.collect(path, "elapsed.steps")
            weights = [weight_of[step] for step in logged_at]
            how = self._how(collection, name)
            if callable(how):
                found = how(values)
            else:
                is_weighted = self.weighted and any(weights)
                try:
                    found = AGGREGATIONS[how](values, weights if is_weighted else [1] * len(values))
                except TypeError as error:
                    error.add_note(
                        f"ciclo: {how!r} of {path} in inner_loop({self.name!r});"
                        f' aggregation={{{name!r}: "last"}} needs no numbers'
                    )
                    raise
            logs.add(collection, f"{name}_{self.name}" if self.name else name, found)
        return logs

    def _check_names(self, paths: list[str]) -> None:
        """Refuses keys of `aggregation` that match nothing."""
        parts = {part for path in paths for part in path.split(".", 1)} | {*paths, *COLLECTIONS}
        for key in self.aggregation if hasattr(self.aggregation, "get") else ():
            if key not in parts:
                there = ", ".join(paths) or "nothing"
                raise CicloError(
                    f"aggregation={{{key!r}: ...}} in inner_loop({self.name!r}) is neither a"
                    f" collection nor a logged name; the loop logged {there}"
                )

    def _how(self, collection: str, name: str) -> Aggregation:
        if hasattr(self.aggregation, "get"):
            for key in (f"{collection}.{name}", name, collection):
                if key in self.aggregation:
                    chosen: Aggregation = self.aggregation[key]
                    return chosen
            return "last"
        return "last" if collection == "stateful_metrics" else self.aggregation


def _mean(values: list[Any], weights: list[float]) -> Any:
    total = sum(weights)
    if all(isinstance(value, (int, float)) for value in values):
        return fsum(v * w for v, w in zip(values, weights, strict=True)) / total
    parts = [value * weight for value, weight in zip(values, weights, strict=True)]
    return sum(parts[1:], start=parts[0]) / total
