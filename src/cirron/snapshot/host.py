"""The types of tensors, readers and copiers, and copies in the host's memory.

Arrays in the host's memory are copied into buffers that are reused: a fresh page costs more than
the copy itself. Values that no longer change, such as JAX's copies on devices and TensorFlow's
values, are fetched by the worker. A copy takes at most a part (`PART`) of the free memory.
"""

from __future__ import annotations

import math
from bisect import insort
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cirron.snapshot import stats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from cirron.snapshot.stats import Summary

# The part of the free memory that a copy may take.
PART = 0.25

# Any host has this much memory. Asking how much is free would cost more than the copy.
SMALL_BYTES = 16 * 2**20

ALIGNMENT = 64  # bytes, of tensors in a shared buffer

PARTS = "statistics are over the real and the imaginary parts"  # a flag of complex tensors

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # a container's limit, which /proc/meminfo does not contain


@dataclass(slots=True)
class Tensor:
    """One tensor of a model: a weight or a gradient."""

    name: str  # as in the record: that of a gradient ends in `.grad`
    is_gradient: bool
    shape: list[int]
    dtype: str
    attrs: dict[str, Any]  # the flags of its record
    # Identifies the model if a step may clear all its gradients, else None.
    model: str | None = None
    # The values, until they are copied: a NumPy array, an array that `copier` can copy, or an
    # object that NumPy can read later because nothing changes it. None: there are no values.
    array: Any = None
    copier: Copier | None = None  # None: `array` is in the host's memory
    decode: Callable[[Any], Any] | None = None  # converts a block that NumPy cannot read
    source: Any = None  # the framework's own object, until it is copied
    is_replaced: bool = False  # a newer copy of it is in the same snapshot
    blob_uri: str | None = None  # the file with its raw values

    @property
    def size_bytes(self) -> int:
        return 0 if self.array is None else int(self.array.nbytes)

    def take_array(self) -> Any:
        """Returns the values, and drops the references to the program's memory."""
        array, self.array, self.source = self.array, None, None
        return array


class Reader:
    """Yields the tensors of one framework's models: names, arrays and flags. Copies nothing."""

    # Whether the program changes its tensors in place. Then memory for copies is prepared, and a
    # loop may clear gradients before the boundary.
    is_in_place = False

    def unwrap(self, model: Any) -> Any:
        """The user's model without wrappers."""
        return model

    def names(self, model: Any) -> list[str]:
        """The names of the model's tensors."""
        return [tensor.name for tensor in self.read(model, "")]

    def read(self, model: Any, prefix: str, *, only_gradients: bool = False) -> Iterable[Tensor]:
        """The tensors of a model, weights first. Valid until the program continues."""
        raise NotImplementedError


class Copy(Protocol):
    """Copies of some tensors. Used by the worker only."""

    tensors: list[Tensor]
    size_bytes: int

    def value(self, number: int) -> Any:
        """The values of one of `tensors`, for NumPy."""

    def summaries(self) -> Iterable[Summary]:
        """The statistics, in the order of `tensors`. Called last: it may free the values."""

    def release(self) -> None:
        """Frees the memory."""


class Copier:
    """Copies arrays of one kind."""

    def prepare(self, weights: list[Tensor]) -> None:
        """Prepares for copies of these. Runs on the worker."""

    def copy(self, tensors: list[Tensor], *, raw: bool, in_step: bool) -> list[Copy] | None:
        """Copies the tensors. None: there is not enough memory.

        `raw`: the values will be saved. `in_step`: the epoch continues, so the result is also None
        if the copy would have to wait for a device.
        """
        raise NotImplementedError


class HostCopy:
    """Arrays that no longer change. NumPy reads them, on the worker."""

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
        return np.asarray(self._arrays[number])

    def summaries(self) -> Iterator[Summary]:
        for number, tensor in enumerate(self.tensors):
            array, self._arrays[number] = self._arrays[number], None  # freed as soon as possible
            values = np.zeros(0) if array is None else np.asarray(array)
            yield stats.summarize(values, tensor.decode)

    def release(self) -> None:
        self._arrays = []
        self._give_back()


class HostCopier(Copier):
    """Copies arrays in the host's memory into buffers that are reused."""

    def __init__(self) -> None:
        # Free buffers, the largest first. Two threads may take one, and the worker gives them back.
        self._free: list[Any] = []

    def prepare(self, weights: list[Tensor]) -> None:
        trainable = [its for its in weights if "frozen" not in its.attrs]  # these have gradients
        sizes = [size for size in (size_of(weights), size_of(trainable)) if size]
        if has_room(sum(sizes)):
            self._free.clear()
            for size in sizes:
                self._give_back(np.full(size, 0, np.uint8))  # np.zeros allocates no pages yet

    def copy(self, tensors: list[Tensor], *, raw: bool, in_step: bool) -> list[Copy] | None:
        size = sum(tensor.size_bytes for tensor in tensors)
        if not has_room(size, sum(buffer.nbytes for buffer in self._free)):
            return None
        if not (in_step or size):
            self._free.clear()  # the models were moved to a device
        # Separate copies, because gradients may be copied before the weights.
        parts = ([its for its in tensors if its.is_gradient is kind] for kind in (False, True))
        return [self._copy(part) for part in parts if part]

    def _copy(self, tensors: list[Tensor]) -> Copy:
        """Copies the arrays one after the other, on this thread only.

        torch would split each tensor over its threads and wait for all of them. On a busy machine
        that takes a time slice of the scheduler per tensor, a second for a ResNet-50. One thread is
        as fast on an idle machine, because memory bandwidth is the limit.
        """
        buffer = self._take(size_of(tensors))
        copies: list[Any] = []
        first = 0
        for tensor in tensors:
            array = tensor.take_array()
            if isinstance(array, np.ndarray):
                target = buffer[first : first + array.nbytes].view(array.dtype)
                target.reshape(array.shape)[...] = array  # in row-major order
                first += aligned(array.nbytes)
                array = target
            copies.append(array)
        return HostCopy(tensors, copies, lambda: self._give_back(buffer))

    def _take(self, size: int) -> Any:
        """The smallest free buffer that is large enough, or a new one."""
        passed = []
        try:
            while (buffer := self._free.pop()).nbytes < size:
                passed.append(buffer)
        except IndexError:  # there is none, or another thread has it
            buffer = np.empty(size, np.uint8)
            del passed[-1:]  # the models have grown: replace the largest
        for one in passed:
            self._give_back(one)
        return buffer

    def _give_back(self, buffer: Any) -> None:
        insort(self._free, buffer, key=lambda one: -one.nbytes)


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def size_of(tensors: list[Tensor]) -> int:
    """The memory that a copy takes of those that are in the host's memory."""
    arrays = (tensor.array for tensor in tensors)
    return sum(aligned(array.nbytes) for array in arrays if isinstance(array, np.ndarray))


# -- memory ----------------------------------------------------------------------------------


def has_room(size: int, kept: int = 0) -> bool:
    """Whether a copy fits in the free memory of the host, or in `kept` bytes of free buffers."""
    return size <= max(SMALL_BYTES, kept) or size <= available_bytes() * PART


def available_bytes() -> float:
    """The free memory of the host and the container; infinity if it is unknown."""
    on_host = in_container = math.inf
    with suppress(OSError, ValueError, KeyError):
        on_host = numbers_of(MEMINFO)["MemAvailable"] * 1024
    with suppress(OSError, ValueError):  # without a limit, "max" is a ValueError
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        # The kernel frees the page cache when memory is needed.
        cached = numbers_of(CGROUP / "memory.stat").get("inactive_file", 0)
        in_container = max(0, limit - used + cached)
    return min(on_host, in_container)


def numbers_of(path: Path) -> dict[str, int]:
    """The first number of each line of a file, by the name before it."""
    lines = path.read_text().splitlines()
    return {name.rstrip(":"): int(number) for name, number, *_ in map(str.split, lines)}
