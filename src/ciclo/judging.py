"""Calls losses and metrics by the names of their parameters.

Parameters with unknown names get the outputs and the targets, by position.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ciclo.binding import Offer, arguments_of, name_of
from ciclo.device_values import TARGETS, describe
from ciclo.errors import CallbackError, check

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# The names that libraries use for outputs and for targets.
ROLES = (
    ("preds", "pred", "predictions", "prediction", "outputs", "output", "logits", "y_pred"),
    ("target", "targets", "labels", "label", "y_true", "y"),
)

NO_TARGETS = (
    "ciclo: the batch has no targets; give batches of the form (x, y), or"
    " unpack=lambda batch: (inputs, targets)"
)


def check_training(
    accumulate: Any = None, clip_norm: Any = None, ema_decay: Any = None, unpack: Any = None
) -> None:
    """Checks the options that the states of all frameworks have."""
    for name, given, is_valid, allowed in (
        ("accumulate", accumulate, lambda one: type(one) is int and one > 0, "1 or more"),
        ("clip_norm", clip_norm, lambda one: type(one) is not bool and one > 0, "a number above 0"),
        ("ema_decay", ema_decay, lambda one: 0 <= one < 1, "a decay such as 0.999"),
        ("unpack", unpack, callable, "a function: lambda batch: (inputs, targets)"),
    ):
        if given is not None:
            check(name, given, is_valid, f"{allowed}, or None")


def named(argument: str, given: Any, default: str | None) -> dict[str, Any]:
    """Losses or metrics by name, from a dict, a list, or a single one."""
    if given is None:
        return {}
    if isinstance(given, dict):
        found = dict(given)
    elif isinstance(given, (list, tuple)):
        found = {name_of(one): one for one in given}
        if len(found) < len(given):
            raise ValueError(
                f'{argument}: two have the same name; write {argument}={{"a": ..., "b": ...}}'
            )
    else:
        found = {default or name_of(given): given}
    for name, one in found.items():
        if not callable(one) and not callable(getattr(one, "compute", None)):
            raise CallbackError(
                f"{argument}[{name!r}] is {describe(one)}; use a function or a callable object"
                " of outputs and targets"
            )
    return found


def split(batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """The inputs and the targets of a dict batch; the targets are found by name."""
    key = next((one for one in TARGETS if one in batch), None)
    inputs = {name: value for name, value in batch.items() if name != key}
    return inputs, None if key is None else batch[key]


def named_outputs(outputs: Any, name: str) -> dict[str, Any]:
    """The outputs of a model by name; a single output gets `name`."""
    if isinstance(outputs, dict):  # including the outputs of transformers
        return dict(outputs)
    if isinstance(outputs, tuple):
        names = getattr(outputs, "_fields", None) or [f"{name}_{i}" for i in range(len(outputs))]
        return dict(zip(names, outputs, strict=True))
    return {name: outputs}


class Asked:
    """A loss or a metric, called with the values that its parameters name.

    names: the available values
    order: which of them are the outputs and the targets
    fills_rest: whether `**rest` receives all remaining values
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        names: tuple[str, ...],
        order: tuple[str, str] = ("preds", "target"),
        *,
        fills_rest: bool = False,
    ) -> None:
        self.function = function
        self._targets = order[1]
        read = getattr(function, "forward", function)  # for a torch module

        def wrong(what: str) -> CallbackError:
            return CallbackError(
                f"{name!r}{inspect.signature(read)} cannot be called: {what}. Losses and metrics"
                f" are called by name, as\n    lambda {', '.join(order)}: ...\nAvailable"
                f" names: {', '.join(names)}"
            )

        aliases = {one: meant for role, meant in zip(ROLES, order, strict=True) for one in role}
        try:
            self._arguments = arguments_of(read, Offer(names, order, wrong, aliases, fills_rest))
        except ValueError:  # a C function without a signature
            self._arguments = list(order), {}

    def __call__(self, values: Mapping[str, Any]) -> Any:
        by_position, by_keyword = self._arguments
        try:
            return self.function(
                *[values[one] for one in by_position],
                **{key: values[one] for key, one in by_keyword.items()},
            )
        except Exception as error:  # any error of the loss or metric; raised again
            if values.get(self._targets) is None and self._targets in (
                *by_position,
                *by_keyword.values(),
            ):
                error.add_note(NO_TARGETS)
            raise


def crossed_shape(outputs: Any, targets: Any) -> tuple[int, int] | None:
    """(n, n) if outputs of shape [n,1] would be broadcast against targets of shape [n]."""
    shapes = {tuple(getattr(one, "shape", ())) for one in (outputs, targets)}
    rows = max(shapes, key=len)[:1]
    is_crossed = shapes == {rows, (*rows, 1)} and rows[0] > 1
    return (rows[0], rows[0]) if is_crossed else None


def crossed(name: str, outputs: Any, targets: Any) -> str:
    """The message for a loss that broadcasts outputs against targets."""
    return (
        f"the loss {name!r} compares each output with all targets: outputs are"
        f" {describe(outputs)}, targets {describe(targets)}. Have the model return y[..., 0], or"
        " give targets[..., None]"
    )


def wants(function: Callable[..., Any], name: str) -> bool:
    """Whether a function takes a value of this name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return False
    return any(one.name == name or one.kind is one.VAR_KEYWORD for one in parameters)
