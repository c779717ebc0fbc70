"""Reads Keras models on any backend: weights by their paths, such as `sequential/dense/kernel`.

Arrays of torch and JAX are read and copied as such; only torch keeps the gradients of the last
step. Reading a TensorFlow variable copies nothing: a step that changes the variable does not change
the value that was read.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from cirron.snapshot.host import Reader, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator


class KerasReader(Reader):
    """Reads Keras models and layers on JAX, TensorFlow and NumPy."""

    def read(self, model: Any, prefix: str, *, only_gradients: bool = False) -> list[Tensor]:
        return [describe(weight, prefix + name) for name, weight in named_weights(model)]


def describe(weight: Any, name: str) -> Tensor:
    attrs = {} if weight.trainable else {"frozen": True}
    if keras.backend.backend() == "jax":
        from cirron.snapshot import jax

        return jax.describe(weight.value, name, attrs)
    return Tensor(name, False, list(weight.shape), str(weight.dtype), attrs, array=Value(weight))


READER: Reader = KerasReader()
if keras.backend.backend() == "torch":
    from cirron.snapshot.torch import TorchReader

    class KerasTorchReader(TorchReader):
        """Reads them on torch."""

        def named(self, model: Any) -> Iterator[tuple[str, Any]]:
            return ((name, weight.value) for name, weight in named_weights(model))

    READER = KerasTorchReader()


def named_weights(model: Any) -> Iterator[tuple[str, Any]]:
    """The weights with their paths, numbered if several have the same path."""
    taken: set[str] = set()
    for weight in model.weights:
        name, number = weight.path, 1
        while name in taken:
            number += 1
            name = f"{weight.path}_{number}"
        taken.add(name)
        yield name, weight


class Value:
    """The current value of a TensorFlow or NumPy weight. Only the worker waits for it."""

    def __init__(self, weight: Any) -> None:
        self.nbytes = math.prod(weight.shape) * np.dtype(weight.dtype).itemsize
        value = weight.value
        self._value = value.read_value() if hasattr(value, "read_value") else np.array(value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self._value)
