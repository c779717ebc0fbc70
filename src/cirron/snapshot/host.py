"""What readers yield, what a copier does, and the copies on the host.

What lies in the host's memory is copied into memory that is kept for the next time: a fresh page
costs more than what is copied into it. What no longer changes, as JAX's copies on its devices
and TensorFlow's values, is fetched by the worker. A copy takes at most a part of the free memory.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cirron.snapshot import stats
from cirron.snapshot.records import STORED, wider

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from cirron.snapshot.stats import Summary

# The part of the free memory that a copy may take: the rest is for the program.
PART = 0.25

# Any host has this much. To ask what is free would cost more than such a copy.
SMALL_BYTES = 16 * 2**20

ALIGNMENT = 64  # bytes: where a tensor may begin in memory that it shares with others

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # a container's limit, which /proc/meminfo does not know of


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
    # The values, until they are copied: in the host's memory (NumPy), or what its copier knows, or
    # what NumPy can read later and nothing changes. None: there are none.
    array: Any = None
    copier: Copier | None = None  # who copies what is not in the host's memory
    decode: Callable[[Any], Any] | None = None  # makes numbers of a block that NumPy cannot read
    strides: tuple[int, ...] | None = None  # how they lie in `array`. None: in their own order
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


class Reader:
    """Yields the tensors of one framework's models: names, arrays and flags. Copies nothing."""

    # Whether the program changes its tensors in place: copies need memory, which is made ready, and
    # a loop may clear gradients before the boundary.
    is_in_place = False

    def unwrap(self, model: Any) -> Any:
        """The user's own model inside of wrappers."""
        return model

    def names(self, model: Any) -> list[str]:
        """The names of its tensors."""
        return [tensor.name for tensor in self.read(model, "")]

    def read(self, model: Any, prefix: str, *, only_gradients: bool = False) -> Iterable[Tensor]:
        """The tensors of a model, weights first; good until the program goes on."""
        raise NotImplementedError


class Copy(Protocol):
    """Some tensors as they were at one moment. The worker's alone."""

    tensors: list[Tensor]
    size_bytes: int

    def value(self, number: int) -> Any:
        """The bytes of one of `tensors`, as a safetensors file has them."""

    def summaries(self) -> Iterable[Summary]:
        """The statistics, in the order of `tensors`. The last thing that is asked for."""

    def release(self) -> None:
        """Lets go of the memory."""


class Copier:
    """Copies arrays of one kind."""

    def prepare(self, weights: list[Tensor]) -> None:
        """Makes ready for copies of these. On the worker."""

    def copy(self, tensors: list[Tensor], *, raw: bool, in_step: bool) -> list[Copy] | None:
        """Copies the tensors; `raw`: their values will be saved. None: there is no memory for it.

        `in_step`: the epoch goes on, so a copy that would wait for a device is not made either.
        """
        raise NotImplementedError


class HostCopy:
    """Arrays that nothing changes any more; NumPy reads them, on the worker."""

    def __init__(
        self,
        tensors: list[Tensor],
        arrays: list[Any],
        give_back: Callable[[], None] = lambda: None,
    ) -> None:
        self.tensors = tensors
        self.size_bytes = sum(0 if array is None else int(array.nbytes) for array in arrays)
        self._arrays = arrays
        self._give_back = give_back

    def value(self, number: int) -> Any:
        return bytes_of(self.tensors[number], np.asarray(self._arrays[number]))

    def summaries(self) -> Iterator[Summary]:
        for number, tensor in enumerate(self.tensors):
            array, self._arrays[number] = self._arrays[number], None  # it goes as soon as it can
            values = np.zeros(0) if array is None else np.asarray(array)
            yield stats.summarize(values, tensor.decode)

    def release(self) -> None:
        self._arrays = []
        self._give_back()


class HostCopier(Copier):
    """Copies arrays in the host's memory; keeps that of the copies for the next time."""

    def __init__(self) -> None:
        # The largest first. Two threads may take from it, and the worker gives back.
        self._free: list[Any] = []

    def prepare(self, weights: list[Tensor]) -> None:
        will_have = [its for its in weights if "frozen" not in its.attrs]  # a gradient
        sizes = [size for size in (size_of(weights), size_of(will_have)) if size]
        if sum(sizes) <= free_bytes():
            self._free.clear()
            for size in sizes:
                buffer = np.empty(size, np.uint8)
                buffer.fill(0)  # the pages are there from now on
                self._give_back(buffer)

    def copy(self, tensors: list[Tensor], *, raw: bool, in_step: bool) -> list[Copy] | None:
        size = sum(tensor.size_bytes for tensor in tensors)
        if not has_room(size, sum(buffer.nbytes for buffer in self._free)):
            return None
        if not (in_step or size):
            self._free.clear()  # the models went to a device
        # Weights and gradients are apart: gradients may be copied before the weights.
        parts = ([its for its in tensors if its.is_gradient is kind] for kind in (False, True))
        return [self._copy(part) for part in parts if part]

    def _copy(self, tensors: list[Tensor]) -> Copy:
        """Copies the arrays, one after the other, on this thread alone.

        torch would share each tensor out over its threads and wait for all of them: where other
        programs want the cores, that takes a turn of the scheduler a tensor, a second for a
        ResNet-50. One thread is as quick on a quiet machine: it is the memory that takes the time.
        """
        buffer = self._take(size_of(tensors))
        copies: list[Any] = []
        first = 0
        for tensor in tensors:
            array = tensor.take_array()
            if isinstance(array, np.ndarray):
                target = buffer[first : first + array.nbytes].view(array.dtype)
                target[:] = array
                first += aligned(array.nbytes)
                array = target
            copies.append(array)
        return HostCopy(tensors, copies, lambda: self._give_back(buffer))

    def _take(self, size: int) -> Any:
        """The smallest that is large enough."""
        passed = []
        try:
            while (buffer := self._free.pop()).nbytes < size:
                passed.append(buffer)
        except IndexError:  # there is none; another thread may have it
            buffer = np.empty(size, np.uint8)
            del passed[-1:]  # the models have grown
        for one in passed:
            self._give_back(one)
        return buffer

    def _give_back(self, buffer: Any) -> None:
        insort(self._free, buffer, key=lambda one: -one.nbytes)


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def size_of(tensors: list[Tensor]) -> int:
    """How much memory a copy of those that are copied here takes."""
    arrays = (tensor.array for tensor in tensors)
    return sum(aligned(array.nbytes) for array in arrays if isinstance(array, np.ndarray))


def bytes_of(tensor: Tensor, values: Any) -> Any:
    """The values in the order of their own shape, as a safetensors file has them."""
    if tensor.strides is not None:
        shape = (*tensor.shape, 2)[: len(tensor.strides)]  # complex: of their parts
        steps = [stride * values.itemsize for stride in tensor.strides]
        values = as_strided(values, shape, steps)
    if tensor.dtype not in STORED and tensor.dtype != "complex128":
        decoded = values if tensor.decode is None else tensor.decode(values)
        values = decoded.astype(wider(tensor.dtype))
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


# -- memory ----------------------------------------------------------------------------------


def has_room(size: int, kept: int = 0) -> bool:
    """Whether a copy fits in what the host has free, or in memory that is kept for copies."""
    return size <= max(SMALL_BYTES, kept) or size <= free_bytes()


def free_bytes() -> float:
    """What a copy on the host may take."""
    available = available_bytes()
    return math.inf if available is None else available * PART


def available_bytes() -> int | None:
    """The memory that the host and the container have left; None where it is not known."""
    return min(
        (known for known in (host_bytes(), container_bytes()) if known is not None), default=None
    )


def host_bytes() -> int | None:
    try:
        for line in MEMINFO.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    except (OSError, ValueError):
        pass
    return None


def container_bytes() -> int | None:
    try:
        limit = int((CGROUP / "memory.max").read_text())  # "max": a ValueError, there is none
        used = int((CGROUP / "memory.current").read_text())
        lines = (CGROUP / "memory.stat").read_text().splitlines()
        # The page cache of files that were read: the kernel frees it when memory is needed.
        cached = next(
            (int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0
        )
        return max(0, limit - used + cached)
    except (OSError, ValueError):
        return None
