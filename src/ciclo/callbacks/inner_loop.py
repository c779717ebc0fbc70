"""`inner_loop`: a loop as a callback of another, summed up into one step of it."""

from __future__ import annotations

from math import fsum
from typing import TYPE_CHECKING, Any

from ciclo.callbacks.base import LoopCallback
from ciclo.errors import CallbackError
from ciclo.logs import Logs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeAlias

    from ciclo.history import History
    from ciclo.loop import LoopState, Result

    Aggregation: TypeAlias = str | Callable[[list[Any]], Any]

# Takes the values and their weights.
AGGREGATIONS: dict[str, Callable[[list[Any], list[float]], Any]] = {
    "last": lambda values, weights: values[-1],
    "first": lambda values, weights: values[0],
    "mean": lambda values, weights: _mean(values, weights),
    "sum": lambda values, weights: sum(values[1:], start=values[0]),
    "min": lambda values, weights: min(values),
    "max": lambda values, weights: max(values),
}


class inner_loop(LoopCallback):  # noqa: N801  a name like the functions beside it
    """Runs a loop and logs what came of it, as `loss_test` for a loop named "test".

    run: a function of the state that runs a loop and returns what `ciclo.loop` returns
    aggregation: "mean", "sum", "min", "max", "first", "last", a function of the list of values, or
        a dict from a name to one of these. Stateful metrics are always the last.
    weighted: whether a mean counts each step by the samples of its batch
    output_state: whether the outer loop goes on with the inner one's state

    >>> ciclo.inner_loop("test", lambda state: ciclo.loop(state, test_data, tasks))
    """

    moments = ("on_epoch_end",)

    def __init__(
        self,
        name: str,
        run: Callable[[Any], Result[Any]],
        *,
        aggregation: Aggregation | Mapping[str, Aggregation] = "mean",
        weighted: bool = False,
        output_state: bool = False,
    ) -> None:
        chosen = aggregation.values() if hasattr(aggregation, "values") else [aggregation]
        for one in chosen:
            if not callable(one) and one not in AGGREGATIONS:
                allowed = ", ".join(map(repr, AGGREGATIONS))
                raise ValueError(f"aggregation={one!r} is not valid; use {allowed} or a function")
        self.name = name
        self.run = run
        self.aggregation = aggregation
        self.weighted = weighted
        self.output_state = output_state

    def __loop_callback__(self, loop_state: LoopState[Any]) -> tuple[Logs, Any] | None:
        result = self.run(loop_state.state)
        if not isinstance(result, tuple) or len(result) != 3:
            raise CallbackError(
                f"the function of inner_loop({self.name!r}) returned {type(result).__name__}; it"
                " returns what a loop does: lambda state: ciclo.loop(state, data, tasks)"
            )
        if getattr(result, "is_interrupted", False):
            return None  # half an evaluation is none
        logs = self._summed_up(result[1], result[0])
        return logs, result[0] if self.output_state else None

    def _summed_up(self, history: History, state: Any) -> Logs:
        logs = Logs()
        steps, samples = history.collect("steps", "batch_samples")
        if self.weighted and hasattr(state, "__loop_samples__"):
            samples = state.__loop_samples__(samples)  # of all processes, so that they agree
        weight_of = dict(zip(steps, samples, strict=True))
        for path in history.names():
            collection, _, name = path.partition(".")
            if collection == "outputs":
                continue
            values, logged_at = history.collect(path, "steps")
            weights = [weight_of[step] for step in logged_at]
            how = "last" if collection == "stateful_metrics" else self._how(name)
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
            logs.add(collection, f"{name}_{self.name}", found)
        return logs

    def _how(self, name: str) -> Aggregation:
        if hasattr(self.aggregation, "get"):
            found: Aggregation = self.aggregation.get(name, "mean")
            return found
        return self.aggregation


def _mean(values: list[Any], weights: list[float]) -> Any:
    total = sum(weights)
    if all(isinstance(value, (int, float)) for value in values):
        return fsum(v * w for v, w in zip(values, weights, strict=True)) / total
    parts = [value * weight for value, weight in zip(values, weights, strict=True)]
    return sum(parts[1:], start=parts[0]) / total
