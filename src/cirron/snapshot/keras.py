"""Reads Keras models on any backend: weights by their paths, such as `sequential/dense/kernel`.

Torch's and JAX's arrays are read and copied as such; only torch keeps the gradients of the last
step. TensorFlow's values are read, which copies nothing: a step that changes a variable leaves what
was read of it as it is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from cirron.snapshot.base import Reader, Tensor
from cirron.snapshot.host import HostCopy, free_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from cirron.snapshot.base import Copy
    from cirron.snapshot.jax import JaxReader
    from cirron.snapshot.torch import TorchReader


class KerasReader(Reader):
    """Reads Keras models and layers."""

    def __init__(self) -> None:
        self._torch: TorchReader | None = None
        self._jax: JaxReader | None = None
        backend = keras.backend.backend()
        if backend == "torch":
            from cirron.snapshot.torch import TorchReader

            self._torch = TorchReader()
            self.clears_gradients = True
        elif backend == "jax":
            from cirron.snapshot.jax import JaxReader

            self._jax = JaxReader()

    def names(self, model: Any) -> list[str]:
        return [name for name, _ in named_weights(model)]

    def read(self, model: Any, prefix: str, *, only_gradients: bool = False) -> Iterable[Tensor]:
        if self._torch is not None:
            return self._torch.read(Module(model), prefix, only_gradients=only_gradients)
        return [self._describe(prefix + name, weight) for name, weight in named_weights(model)]

    def _describe(self, name: str, weight: Any) -> Tensor:
        attrs = {} if weight.trainable else {"frozen": True}
        if self._jax is not None:
            return self._jax.describe(weight.value, name, attrs)
        shape = list(weight.shape)
        return Tensor(name, False, shape, str(weight.dtype), attrs, array=Value(weight))

    def prepare(self, models: list[tuple[Any, str]]) -> Callable[[], None]:
        if self._torch is None:
            return super().prepare(models)
        return self._torch.prepare([(Module(model), prefix) for model, prefix in models])

    def copy(self, tensors: list[Tensor], *, raw: bool, in_step: bool = False) -> list[Copy] | None:
        own = self._torch or self._jax
        if own is not None:
            return own.copy(tensors, raw=raw, in_step=in_step)
        if sum(tensor.size_bytes for tensor in tensors) > free_bytes():
            return None
        return [HostCopy(tensors, [tensor.take_array() for tensor in tensors])]


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


class Module:
    """A Keras model as the reader of torch's models sees one: the names are Keras's."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def named_parameters(self, **_: Any) -> Iterator[tuple[str, Any]]:
        for name, weight in named_weights(self._model):
            yield name, weight.value


class Value:
    """A weight of TensorFlow's, or of NumPy's, as it is now. The worker alone waits for it."""

    def __init__(self, weight: Any) -> None:
        self.nbytes = math.prod(weight.shape) * np.dtype(weight.dtype).itemsize
        value = weight.value
        self._value = value.read_value() if hasattr(value, "read_value") else np.array(value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self._value)
