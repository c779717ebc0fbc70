"""Copies on the host, their statistics, and how much memory a copy may take.

What lies in the host's memory is copied into memory that is kept for the next time: a fresh page
costs more than what is copied into it. What a framework has copied itself, as JAX does on its
devices, is fetched by the worker.
"""

from __future__ import annotations

import math
from bisect import insort
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cirron.snapshot import stats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cirron.snapshot.base import Tensor
    from cirron.snapshot.stats import Summary

# Of what is free, a copy takes at most this part: the rest is the program's.
PART = 0.25

# Any host has this much. To ask what is free would cost more than such a copy.
SMALL_BYTES = 16 * 2**20

ALIGNMENT = 64  # bytes: where a tensor may begin in memory that it shares with others

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # a container's limit, which /proc/meminfo does not know of

# What a safetensors file can hold, by NumPy's names; the rest is stored as a wider type.
STORED = frozenset(
    (
        *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
        *("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        "complex64",
    )
)


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
        tensor, values = self.tensors[number], np.asarray(self._arrays[number])
        return as_stored(values) if tensor.restore is None else tensor.restore(tensor, values)

    def summaries(self) -> Iterator[Summary]:
        for number, tensor in enumerate(self.tensors):
            array, self._arrays[number] = self._arrays[number], None  # it goes as soon as it can
            yield summarize(np.zeros(0) if array is None else np.asarray(array), tensor.decode)

    def release(self) -> None:
        self._arrays = []
        self._give_back()


class HostCopier:
    """Copies arrays in the host's memory; keeps that of the copies for the next time."""

    def __init__(self) -> None:
        # The largest first. Two threads may take from it, and the worker gives back.
        self._free: list[Any] = []

    def prepare(self, sizes: list[int]) -> None:
        """Makes memory ready for copies of so many bytes each. On the worker."""
        if sum(sizes) <= free_bytes():
            self.clear()
            for size in sizes:
                buffer = np.empty(size, np.uint8)
                buffer.fill(0)  # the pages are there from now on
                self._give_back(buffer)

    def has_room(self, size: int) -> bool:
        return size <= SMALL_BYTES or size <= max(free_bytes(), sum(b.nbytes for b in self._free))

    def copy(self, tensors: list[Tensor]) -> HostCopy:
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
            if array is not None:
                target = buffer[first : first + array.nbytes].view(array.dtype)
                target[:] = array
                first += aligned(array.nbytes)
                array = target
            copies.append(array)
        return HostCopy(tensors, copies, lambda: self._give_back(buffer))

    def clear(self) -> None:
        """Lets go of the memory that is kept."""
        self._free.clear()

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
    """How much memory a copy of them takes."""
    arrays = (tensor.array for tensor in tensors)
    return sum(aligned(array.nbytes) for array in arrays if array is not None)


# -- on the worker ---------------------------------------------------------------------------


def summarize(values: Any, decode: Callable[[Any], Any] | None) -> Summary:
    flat = values.reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(flat.real.dtype)
    elif decode is None and flat.dtype.isbuiltin != 1:  # of ml_dtypes: bfloat16, 8-bit floats
        decode = as_float32
    return stats.summarize(flat, decode)


def as_float32(block: Any) -> Any:
    return block.astype(np.float32)


def as_stored(values: Any) -> Any:
    """The array in a type that a safetensors file can hold."""
    name = values.dtype.name
    if name == "complex128":
        values = np.stack([values.real, values.imag], axis=-1)
    elif name not in STORED:
        values = values.astype(np.int8 if "int" in name else np.float32)
    return np.require(values, requirements="C")


# -- memory ----------------------------------------------------------------------------------


def free_bytes() -> float:
    """What a copy on the host may take."""
    available = available_bytes()
    return math.inf if available is None else available * PART


def available_bytes() -> int | None:
    """What the host, and the container, have left; None where nobody says."""
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
        # Files that were read and are still in memory: they go when somebody needs the room.
        cached = next(
            (int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0
        )
        return max(0, limit - used + cached)
    except (OSError, ValueError):
        return None
