"""Reads Keras models on any backend: weights by their paths, such as `sequential/dense/kernel`.

Torch's and JAX's arrays are copied by those who read such models; only torch keeps the gradients of
the last step. TensorFlow's are read, which copies nothing: a step that changes a variable leaves
what was read of it as it is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from cirron import guard
from cirron.snapshot import memory, stats
from cirron.snapshot.base import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cirron.snapshot.base import Found, Reader
    from cirron.snapshot.stats import Summary

# What a safetensors file can hold of NumPy's types; the rest is stored as 32 bits.
STORED = frozenset("?bBhHiIlLqQefd")


class KerasReader:
    """Reads Keras models and layers."""

    def __init__(self) -> None:
        self._torch: Reader | None = None
        if keras.backend.backend() == "torch":
            from cirron.snapshot.torch import TorchReader

            self._torch = TorchReader()

    def unwrap(self, model: Any) -> Any:
        return model

    def names(self, model: Any) -> list[str]:
        return [name for name, _ in named_weights(model)]

    def prepare(self, models: list[tuple[str, Any]]) -> Callable[[], None]:
        if self._torch is not None:
            return self._torch.prepare(as_modules(models))
        return lambda: None  # a device's memory is there

    def find(self, models: list[tuple[str, Any]]) -> Found:
        if self._torch is not None:
            return self._torch.find(as_modules(models))
        weights: list[tuple[str, Any]] = []
        for prefix, model in models:
            with guard.quiet("snapshot"):  # one that fails takes nothing from the others
                weights += [(prefix + name, weight) for name, weight in named_weights(model)]
        return find_in_jax(weights) if keras.backend.backend() == "jax" else ArrayFound(weights)


def named_weights(model: Any) -> Iterator[tuple[str, Any]]:
    """The weights with their paths, kept apart where layers share one."""
    taken: set[str] = set()
    for weight in model.weights:
        name, number = weight.path, 1
        while name in taken:
            number += 1
            name = f"{weight.path}_{number}"
        taken.add(name)
        yield name, weight


def attrs_of(weight: Any) -> dict[str, Any]:
    return {} if weight.trainable else {"frozen": True}


# -- torch and JAX ---------------------------------------------------------------------------


class Module:
    """A Keras model as the reader of torch's models sees one: the names are Keras's."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def named_parameters(self, **_: Any) -> Iterator[tuple[str, Any]]:
        for name, weight in named_weights(self._model):
            yield name, weight.value


def as_modules(models: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(prefix, Module(model)) for prefix, model in models]


def find_in_jax(weights: list[tuple[str, Any]]) -> Found:
    from cirron.snapshot.jax import JaxFound, as_source

    sources = []
    for name, weight in weights:
        source = as_source(weight.value, name, is_gradient=False)
        source.tensor.attrs.update(attrs_of(weight))
        sources.append(source)
    return JaxFound(sources)


# -- TensorFlow, and NumPy -------------------------------------------------------------------


class ArrayFound:
    """Weights whose values NumPy can have."""

    def __init__(self, weights: list[tuple[str, Any]]) -> None:
        self._weights = weights
        self.size_bytes = sum(
            math.prod(weight.shape) * np.dtype(weight.dtype).itemsize for _, weight in weights
        )

    def copy(self, *, raw: bool) -> ArrayCopy | None:
        available = memory.available_bytes()
        if available is not None and self.size_bytes > available * memory.PART:
            return None
        tensors = [
            Tensor(name, False, list(weight.shape), str(weight.dtype), attrs_of(weight))
            for name, weight in self._weights
        ]
        return ArrayCopy(tensors, [read(weight.value) for _, weight in self._weights])


def read(value: Any) -> Any:
    """The value as it is now."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.read_value() if hasattr(value, "read_value") else value


class ArrayCopy:
    """What was read. The worker makes NumPy arrays of it, and so waits for the device."""

    def __init__(self, tensors: list[Tensor], values: list[Any]) -> None:
        self.tensors = tensors
        self.size_bytes = sum(
            math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize for tensor in tensors
        )
        self._values = values

    def summarize(self) -> list[Summary]:
        return [summarize(np.asarray(value).reshape(-1)) for value in self._values]

    def save(self, path: Path, *, gradients: bool) -> None:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        values = {
            tensor.name: as_stored(np.asarray(value))
            for tensor, value in zip(self.tensors, self._values, strict=True)
        }
        try:
            save_file(values, path)
        except SafetensorError as error:  # what it says of a disk, too
            raise OSError(str(error)) from error

    def release(self) -> None:
        self._values = []


def summarize(flat: Any) -> Summary:
    """The summary of an array; one of a type that NumPy does not have itself is made 32 bits."""
    is_own = flat.dtype.char in STORED
    return stats.summarize(flat, None if is_own else lambda block: block.astype(np.float32))


def as_stored(values: Any) -> Any:
    if values.dtype.char not in STORED:
        values = values.astype(np.float32)
    return np.require(values, requirements="C")
