"""How the scalar of each library is read: NumPy, torch, JAX, TensorFlow, and anything else.

Reading leaves no trace: a traced graph gets no node, a mode of torch's sees no call, and no device
is waited for. What has no value while it is traced is lost. A reader may raise anything:
`value.capture` makes that a lost value. Runs on the user's thread. No library is imported here: a
program that has a value of one has imported it.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import types
from typing import TYPE_CHECKING, Any

from cirron.record.value import (
    LOGGED,
    TAKERS,
    Deferred,
    NotAScalarError,
    capture,
    keep,
    lost,
    plain,
)

if TYPE_CHECKING:
    from cirron.record.hot import DeviceClock
    from cirron.record.value import Reader

# Libraries whose objects answer immediately. Attributes of others may fail or hang.
LIBRARIES = ("cupy", "decimal", "jax", "jaxlib", "mlx", "pandas", "polars", "tinygrad", "xarray")


def reader_of(kind: type) -> Reader:
    """The function that takes values of this type."""
    if issubclass(kind, (str, int, float)):
        return take_number
    if issubclass(kind, Deferred):  # captured before
        return keep
    for library, names, reader in KNOWN:
        if issubclass(kind, imported(library, *names)):
            return reader
    if issubclass(kind, imported("numpy", "ndarray")):
        return NumpyReader(kind, sys.modules["numpy"])
    if issubclass(kind, imported("torch", "Tensor")) or (
        library_of(kind) == "torch" and hasattr(kind, "item")
    ):
        return torch_reader(kind)
    if library_of(kind) in LIBRARIES:
        return take_array if hasattr(kind, "item") else take_number
    is_plain = kind.__getattribute__ is object.__getattribute__ and not hasattr(kind, "__getattr__")
    return take_object if is_plain and not hasattr(kind, "item") else take_foreign


def library_of(kind: type) -> str:
    module = kind.__module__
    return module.partition(".")[0] if isinstance(module, str) else ""


def imported(library: str, *names: str) -> tuple[Any, ...]:
    """The named attributes of a library, as far as it is imported and has them."""
    module = sys.modules.get(library)
    return tuple(found for name in names if (found := getattr(module, name, None)) is not None)


def take_number(value: Any, device_clock: DeviceClock | None) -> Any:
    return plain(value)


def take_nothing(value: Any, device_clock: DeviceClock | None) -> Deferred:
    return lost()


def refuse(value: Any, device_clock: DeviceClock | None) -> None:
    raise NotAScalarError


def check_size(shape: Any) -> None:
    """Raises `NotAScalarError` for several elements, or none.

    A size that is not a plain int is symbolic: comparing it would add a guard to the trace.
    """
    if shape and all(type(size) is int for size in shape) and math.prod(shape) != 1:
        raise NotAScalarError


# -- torch ---------------------------------------------------------------------------------------


def torch_reader(kind: type) -> Reader:
    torch: Any = sys.modules["torch"]
    reader = TorchReader(torch)
    if kind in (torch.Tensor, torch.nn.Parameter):
        LOGGED[kind] = reader.take_logged
    if not issubclass(kind, torch.Tensor) or kind in LOGGED:
        return reader.take
    if kind.__name__ == "DTensor":
        return reader.take_distributed
    if kind.__module__.startswith("torch._subclasses"):  # FakeTensor, FunctionalTensor
        return reader.take_traced
    return reader.take_subclass


class TorchReader:
    """Reads tensors unseen by modes, traces and transforms.

    It uses private functions of torch 2.4 to 2.13. Any of them may be missing.
    """

    def __init__(self, torch: Any) -> None:
        def nothing(*_: Any) -> None:
            return None

        native = torch._C
        self._torch = torch
        self._trace = getattr(native, "_get_tracing_state", nothing)  # of torch.jit.trace
        self._dispatch_modes = getattr(native, "_len_torch_dispatch_stack", nothing)
        self._function_modes = getattr(native, "_is_torch_function_mode_enabled", nothing)
        self._no_functions = getattr(native, "DisableTorchFunction", contextlib.nullcontext)
        self._no_dispatch = getattr(native, "_DisableTorchDispatch", contextlib.nullcontext)
        self._is_functional = getattr(torch, "_is_functional_tensor", nothing)
        transforms = getattr(native, "_functorch", None)  # vmap, grad, jvp
        self._transform = getattr(transforms, "peek_interpreter_stack", nothing)
        self._is_differentiated = getattr(transforms, "is_gradtrackingtensor", nothing)
        self._is_wrapped = getattr(transforms, "is_functorch_wrapped_tensor", nothing)
        self._unwrap = getattr(transforms, "get_unwrapped", nothing)

    def take(self, value: Any, device_clock: DeviceClock | None) -> Any:
        """A tensor that is not a subclass. Usually nothing watches it."""
        if self._transform() is not None or self._trace() is not None:
            return self.take_watched(value, device_clock)
        return self.take_logged(value, device_clock)

    def take_logged(self, value: Any, device_clock: DeviceClock | None) -> Any:
        """One that is not traced. Asking for that took half of the time to read a value."""
        if self._dispatch_modes() or self._function_modes():
            return self.take_watched(value, device_clock)
        if value.is_cpu:
            try:
                scalar = value.item()
            except Exception:  # raised again, unless the size is the reason
                check_size(value.shape)
                raise
            return scalar if scalar.__class__ is float else plain(scalar)
        return self._take_from_device(value, device_clock)

    def take_watched(self, value: Any, device_clock: DeviceClock | None) -> Any:
        if self._trace() is not None:  # which even notes that we ask for the shape
            return lost()
        with self._no_functions(), self._no_dispatch():
            while self._is_differentiated(value):
                value = self._unwrap(value)
            # Batched by vmap, or functional: reading that one would apply its pending updates.
            if self._is_wrapped(value) or self._is_functional(value):
                check_size(value.shape)
                return lost()
            if not value.is_cpu:
                return self._take_from_device(value, device_clock)
            try:
                return plain(value.item())
            except Exception:  # raised again, unless the size is the reason
                check_size(value.shape)
                raise

    def take_subclass(self, value: Any, device_clock: DeviceClock | None) -> Any:
        is_own = type(value).__torch_dispatch__ is self._torch.Tensor.__torch_dispatch__
        with self._no_functions(), self._no_dispatch():
            is_cpu = value.is_cpu
        if is_own or is_cpu:
            return self.take_watched(value, device_clock)
        return self.take_traced(value, device_clock)  # its data may be anywhere

    def take_traced(self, value: Any, device_clock: DeviceClock | None) -> Deferred:
        if self._trace() is None:
            with self._no_functions(), self._no_dispatch():
                check_size(value.shape)
        return lost()

    def take_distributed(self, value: Any, device_clock: DeviceClock | None) -> Any:
        """The local part of a DTensor, if that is the whole value. Does not contact other ranks."""
        with self._no_functions():
            check_size(value.shape)
            if not all(placement.is_replicate() for placement in value.placements):
                return lost()
            with self._torch.no_grad():  # else it would be a part of the user's graph
                local = value.to_local()
        return capture(local, device_clock)

    def _take_from_device(self, value: Any, device_clock: DeviceClock | None) -> Deferred:
        check_size(value.shape)
        device, cuda = value.device.type, self._torch.cuda
        # Copying freed storage, such as FSDP leaves behind, is a CUDA error.
        if device == "cuda" and hasattr(value, "data_ptr") and not value.data_ptr():
            return lost()
        copy = None if device_clock is None else device_clock.copy(value)
        if copy is not None:
            return copy
        is_capturing = (
            device == "cuda" and cuda.is_initialized() and cuda.is_current_stream_capturing()
        )
        if device == "meta" or is_capturing:
            return lost()
        return Deferred(value.detach().clone())  # an own copy: `total += loss` may follow


# -- NumPy ---------------------------------------------------------------------------------------


def take_numpy_scalar(value: Any, device_clock: DeviceClock | None) -> Any:
    return plain(value.item())


class NumpyReader:
    """Reads arrays with the methods of `numpy.ndarray`, which a subclass may override."""

    def __init__(self, kind: type, numpy: Any) -> None:
        self._item = numpy.ndarray.item
        self._shape = numpy.ndarray.shape.__get__
        self._dtype = numpy.ndarray.dtype.__get__
        self._is_masked = numpy.ma.is_masked if issubclass(kind, numpy.ma.MaskedArray) else None

    def __call__(self, value: Any, device_clock: DeviceClock | None) -> Any:
        kind = self._dtype(value).kind
        if kind in "mMcV":
            raise NotAScalarError
        check_size(self._shape(value))
        if self._is_masked is not None and self._is_masked(value):
            return lost()
        scalar = self._item(value)
        if kind != "O":
            return plain(scalar)
        if type(scalar) is type(value):  # it may even hold itself
            raise NotAScalarError
        return capture(scalar, device_clock)


# -- JAX -----------------------------------------------------------------------------------------


def take_tracer(value: Any, device_clock: DeviceClock | None) -> Deferred:
    check_size(value.shape)
    return lost()  # inside jax.jit there is no value, now or later


def take_array(value: Any, device_clock: DeviceClock | None) -> Deferred:
    shape = value.shape
    if isinstance(shape, tuple):
        check_size(shape)
    return TAKERS.get(library_of(type(value)), Deferred)(value)


# -- TensorFlow and Keras ------------------------------------------------------------------------


def take_tensor(value: Any, device_clock: DeviceClock | None) -> Deferred:
    if not hasattr(type(value), "numpy"):  # inside a graph there is no value
        return lost()
    check_size(tuple(value.shape))
    return Deferred(types.SimpleNamespace(item=lambda: value.numpy().item()))  # it never changes


def take_variable(value: Any, device_clock: DeviceClock | None) -> Any:
    # Inside a graph, reading it would add an operation.
    return plain(value) if sys.modules["tensorflow"].executing_eagerly() else lost()


# -- anything else -------------------------------------------------------------------------------


def take_object(value: Any, device_clock: DeviceClock | None) -> Any:
    """An object whose class has no `item`; usually a number. Looking runs none of its code."""
    if getattr(value, "item", None) is None:
        return plain(value)
    return take_foreign(value, device_clock)


def take_foreign(value: Any, device_clock: DeviceClock | None) -> Any:
    """An object of an unknown library, whose methods may fail or hang.

    `.item()` is called on a background thread. A `shape` that is computed in Python is not read.
    """
    item = inspect.getattr_static(value, "item", None)
    if item is None:
        item = getattr(value, "item", None)
    if item is None:
        return plain(value)
    owner = getattr(item, "__self__", value)
    if owner is not value:  # a wrapper of that object, such as weakref.proxy
        return capture(owner, device_clock)
    shape = inspect.getattr_static(value, "shape", None)
    if isinstance(shape, (types.GetSetDescriptorType, types.MemberDescriptorType)):  # not in Python
        shape = value.shape
    if isinstance(shape, tuple):
        check_size(shape)
    return Deferred(value)


# Classes of libraries, and their readers. The first match counts.
KNOWN: tuple[tuple[str, tuple[str, ...], Reader], ...] = (
    # A traced size: float() of it would add a guard.
    ("torch", ("SymInt", "SymFloat", "SymBool"), take_nothing),
    ("torch.fx", ("Proxy",), take_nothing),
    # Some of these return an int from .item(), and complex ones have a float().
    ("numpy", ("datetime64", "timedelta64", "complexfloating"), refuse),
    ("numpy", ("generic",), take_numpy_scalar),
    ("jax.core", ("Tracer",), take_tracer),
    ("tensorflow", ("Tensor",), take_tensor),
    ("tensorflow", ("Variable",), take_variable),
    ("keras", ("KerasTensor",), take_nothing),
)
