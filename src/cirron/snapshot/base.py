"""The contract between the taker and what reads a framework's models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cirron.snapshot.stats import Summary


class Tensor(NamedTuple):
    """One tensor of a model: a weight, or the gradient of one."""

    name: str  # as the record has it: a gradient's ends in `.grad`
    is_gradient: bool
    shape: list[int]
    dtype: str
    attrs: dict[str, Any]
    # Whose it is, where a step may clear all gradients of a model. None: they are values.
    model: str | None = None

    @property
    def has_values(self) -> bool:
        """Whether it is in the file of raw values."""
        return "unmeasured" not in self.attrs


class Copy(Protocol):
    """The tensors of all models as they were at the boundary. After that, the worker's alone."""

    tensors: list[Tensor]
    size_bytes: int

    def summarize(self) -> list[Summary]:
        """The statistics, in the order of `tensors`."""

    def save(self, path: Path, *, gradients: bool) -> None:
        """Writes the raw values, of the weights or of the gradients, as safetensors.

        OSError: the disk refuses them.
        """

    def release(self) -> None:
        """Lets go of the memory."""


class Found(Protocol):
    """What some models hold now; good until the program goes on."""

    size_bytes: int

    def copy(self, *, raw: bool) -> Copy | None:
        """Copies it; `raw`: with the values, for `save`. None: there is not enough memory."""


class Reader(Protocol):
    """Reads the models of one framework. A model comes with the prefix of its names."""

    def unwrap(self, model: Any) -> Any:
        """The user's own model inside of wrappers."""

    def names(self, model: Any) -> list[str]:
        """The names of its tensors."""

    def prepare(self, models: list[tuple[str, Any]]) -> Callable[[], None]:
        """What gets memory ready for a copy, on the worker."""

    def find(self, models: list[tuple[str, Any]]) -> Found:
        """Finds the tensors of the models; one that cannot be read is counted and left out."""
