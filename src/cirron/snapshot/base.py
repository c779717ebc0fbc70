"""What readers yield, what a copy can do, and how the worker keeps its pace."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from cirron.record import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from cirron.snapshot.stats import Summary

T = TypeVar("T")

# The worker pauses after each turn. A thread that runs Python gives the interpreter lock away every
# 5 ms only, and the training thread would wait that long each time it wants the lock back.
TURN_NS = 300_000
PAUSE_S = 0.0001  # long enough for another thread to wake and take the lock


@dataclass(slots=True)
class Tensor:
    """One tensor of a model: a weight, or the gradient of one."""

    name: str  # as the record has it: a gradient's ends in `.grad`
    is_gradient: bool
    shape: list[int]
    dtype: str
    attrs: dict[str, Any]  # the flags of its record
    # Whose it is, where a step may clear all gradients of a model. None: they are values.
    model: str | None = None
    # The values, until they are copied: in the host's memory (NumPy), on a GPU (torch), or whatever
    # NumPy can read later. None: there are none.
    array: Any = None
    decode: Callable[[Any], Any] | None = None  # makes numbers of a block that NumPy cannot read
    strides: tuple[int, ...] | None = None  # how they lie in `array`. None: in their own order
    restore: Callable[[Tensor, Any], Any] | None = None  # makes what is saved of copied values
    source: Any = None  # the framework's own object, until it is copied
    is_replaced: bool = False  # a newer copy of it is in the same snapshot

    @property
    def has_values(self) -> bool:
        return "unmeasured" not in self.attrs

    @property
    def size_bytes(self) -> int:
        return 0 if self.array is None else int(self.array.nbytes)

    def take_array(self) -> Any:
        """Hands the values over: the program's own memory is not ours to hold."""
        array, self.array, self.source = self.array, None, None
        return array


class Copy(Protocol):
    """Some tensors as they were at one moment. The worker's alone."""

    tensors: list[Tensor]
    size_bytes: int

    def value(self, number: int) -> Any:
        """The raw values of one of `tensors`, as safetensors can hold them."""

    def summaries(self) -> Iterable[Summary]:
        """The statistics, in the order of `tensors`. The last thing that is asked for."""

    def release(self) -> None:
        """Lets go of the memory."""


class Reader:
    """Reads the models of one framework, and knows which copier takes what it yields."""

    clears_gradients = False  # whether a loop may clear them before the boundary

    def unwrap(self, model: Any) -> Any:
        """The user's own model inside of wrappers."""
        return model

    def names(self, model: Any) -> list[str]:
        """The names of its weights."""
        raise NotImplementedError

    def read(self, model: Any, prefix: str, *, only_gradients: bool = False) -> Iterable[Tensor]:
        """The tensors of a model, weights first; good until the program goes on."""
        raise NotImplementedError

    def prepare(self, models: list[tuple[Any, str]]) -> Callable[[], None]:
        """Returns what gets memory ready for these, given with their prefixes; for the worker."""
        return lambda: None

    def copy(self, tensors: list[Tensor], *, raw: bool, in_step: bool = False) -> list[Copy] | None:
        """Copies the tensors; `raw`: their values will be saved. None: there is no memory for it.

        `in_step`: the epoch goes on, so a copy that would wait for a device is not made either.
        """
        raise NotImplementedError


def paced(items: Iterable[T]) -> Iterator[T]:
    """The items, with a pause after each turn of work on them."""
    began = clock.now()
    for item in items:
        yield item
        if clock.now() - began > TURN_NS:
            time.sleep(PAUSE_S)
            began = clock.now()
