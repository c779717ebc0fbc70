"""Names of Ciclo 0.1.9 that have another form here; see docs/ciclo-coming-from.md.

They are only for existing programs, and each says what to use in new ones. The modules `types`,
`utils`, `timetracking` and `logging` have some of these names, as in 0.1.9.
"""

from __future__ import annotations

import inspect
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ciclo.binding import with_arguments
from ciclo.callbacks.base import LoopCallback
from ciclo.elapsed import samples_of
from ciclo.errors import check
from ciclo.logs import LogsLike

if TYPE_CHECKING:
    from collections.abc import Callable

    from ciclo.elapsed import BatchSize
    from ciclo.loop import LoopState

__all__ = ["LoopCallbackBase", "LoopElement", "callback", "inject"]

S = TypeVar("S")
B = TypeVar("B")
Batch = Any
CallbackOutput = tuple[LogsLike, S]


class OptimizationMode(StrEnum):
    """Whether the smallest or the largest value is the best: "min" or "max"."""

    min = "min"
    max = "max"


class LoopElement(LoopCallback):
    """Use `ciclo.LoopCallback`."""


class LoopCallbackBase(LoopElement, Generic[S]):
    """The base of callbacks, generic in the type of the state. Use `ciclo.LoopCallback`."""


class callback(LoopCallback):  # noqa: N801  a name like the functions beside it
    """A function as a callback object. Use the function itself."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = getattr(function, "__name__", "callback")
        self._call = with_arguments(self.name, function)

    def __loop_callback__(self, loop_state: LoopState[Any]) -> Any:
        return self._call(loop_state)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def inject(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function to ignore surplus positional arguments.

    A loop binds the arguments of callbacks itself, by name.

    >>> ciclo.inject(lambda state, batch: state + batch)(1, 2, 3, 4)
    3
    """
    check("function", function, callable, "a function")
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return function
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    count = sum(one.kind in places for one in parameters)

    def injected(*args: Any) -> Any:
        return function(*args[:count])

    return injected


def is_scalar(value: Any) -> bool:
    """Whether this is a Python number or a scalar array."""
    return isinstance(value, (int, float, complex)) or getattr(value, "shape", None) == ()


def get_batch_size(batch: Any, batch_size_fn: BatchSize | None = None) -> int:
    """The number of samples in a batch, as a loop counts them."""
    return samples_of(batch, batch_size_fn)
