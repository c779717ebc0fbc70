"""Reads torch models: names, tensors, one copy at the boundary; a host's copy is reduced here.

On the user's thread there is one copy a device and dtype. On the host it goes into memory
that is kept for the next time: a fresh page costs more than what is copied into it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cirron import guard
from cirron.snapshot import memory, stats
from cirron.snapshot.base import Tensor
from cirron.snapshot.cuda import DeviceCopy, load_kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cirron.snapshot.stats import Summary

# What torch's wrappers put between the names of modules.
WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))

# What nearly every parameter is: these are read with as few calls as can be.
PLAIN_TYPES: frozenset[Any] = frozenset((torch.Tensor, torch.nn.Parameter))
PLAIN = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}

# All that have `values()`.
SPARSE = (
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)

CPU = torch.device("cpu")

# What any host has; asking for less than this what is free would cost more than the copy.
SMALL_BYTES = 16 * 2**20


class Source(NamedTuple):
    """A tensor of a model, as it is found."""

    tensor: Tensor
    flat: torch.Tensor  # its memory as it lies, or as numbers that can be measured
    strides: tuple[int, ...] | None  # None: it lies in its own order
    values: torch.Tensor | None = None  # the tensor itself, where `flat` is not its memory


class TorchReader:
    """Reads nn.Modules."""

    def __init__(self) -> None:
        self._free: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)  # on the host
        self._can_save = False

    def unwrap(self, model: Any) -> Any:
        while True:
            if isinstance(model, (DataParallel, DistributedDataParallel)):
                model = model.module
            elif "_orig_mod" in getattr(model, "_modules", ()):  # torch.compile's
                model = model._orig_mod
            else:
                return model

    def names(self, model: Any) -> list[str]:
        return [clean(name) for name, _ in self.unwrap(model).named_parameters()]

    def prepare(self, models: list[tuple[str, Any]]) -> Callable[[], None]:
        sizes: dict[torch.dtype, int] = defaultdict(int)
        on_gpus: set[tuple[torch.device, torch.dtype]] = set()
        for source in self.find(models).sources:
            if source.flat.is_cuda:
                on_gpus.add((source.flat.device, source.flat.dtype))
            elif not source.tensor.is_gradient and source.flat.device.type == "cpu":
                copies = 1 if "frozen" in source.tensor.attrs else 2  # a gradient will come
                sizes[source.flat.dtype] += source.flat.numel() * copies

        def make_ready() -> None:
            for device, dtype in on_gpus:
                load_kernels(device, dtype)
            if sum(size * dtype.itemsize for dtype, size in sizes.items()) <= host_room():
                for dtype, size in sizes.items():
                    buffer = new_buffer(size, dtype)
                    as_bytes(buffer).fill(0)  # the pages are there from now on
                    self._free[dtype] = [buffer]

        return make_ready

    def find(self, models: list[tuple[str, Any]]) -> TorchFound:
        sources: list[Source] = []
        with torch.no_grad():
            for prefix, model in models:
                with guard.quiet("snapshot"):  # one that fails takes nothing from the others
                    sources += find_sources(self.unwrap(model), prefix)
        return TorchFound(self, sources)

    def copy(self, found: TorchFound, *, raw: bool) -> TorchCopy | None:
        """What `TorchFound.copy` does."""
        if raw and not self._can_save:
            from safetensors.torch import save

            # Imports all that it will need, here: were the program to fork while the worker
            # imports, the child would have half a module for good.
            save({"": torch.zeros(1, device="cpu")})
            self._can_save = True
        on_host = found.size_bytes if raw else found.host_bytes
        if on_host > SMALL_BYTES and on_host > max(host_room(), self._kept_bytes()):
            return None
        for dtype in [dtype for dtype in self._free if (CPU, dtype) not in found.groups]:
            del self._free[dtype]  # the models went to a device
        with torch.inference_mode(False), torch.no_grad():
            copies = [
                self._copy_group([found.sources[number].flat for number in numbers], raw=raw)
                for numbers in found.groups.values()
            ]
            return TorchCopy(self, found, copies, raw=raw)

    def _copy_group(self, flats: list[torch.Tensor], *, raw: bool) -> HostCopy | DeviceCopy:
        if flats[0].is_cuda:
            return DeviceCopy(flats, raw=raw)
        if flats[0].device.type != "cpu":  # another kind of device: its values come over now
            flats = [flat.cpu() for flat in flats]
        sizes = [flat.numel() for flat in flats]
        buffer = self._take(sum(sizes), flats[0].dtype)
        copy_into(buffer, flats)
        return HostCopy(buffer, sizes)

    # -- the host's memory ------------------------------------------------------------------

    def _kept_bytes(self) -> int:
        return sum(buffer.nbytes for kept in self._free.values() for buffer in kept)

    def _take(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        kept = self._free[dtype]
        try:
            while True:
                buffer = kept.pop()  # one that is too small is let go: the models have grown
                if buffer.numel() >= size:
                    return buffer[:size]
        except IndexError:  # none is left; another thread may have had it
            return new_buffer(size, dtype)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Keeps memory for the next copy."""
        self._free[buffer.dtype].append(buffer if buffer._base is None else buffer._base)


class TorchFound:
    """The tensors of some models, where they are; those of a group are copied together."""

    def __init__(self, reader: TorchReader, sources: list[Source]) -> None:
        self.sources = sources
        self.groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        self.size_bytes = 0
        self.host_bytes = 0  # of those that a snapshot without raw values brings to the host
        self._reader = reader
        for number, source in enumerate(sources):
            flat = source.flat
            size = flat.nbytes
            if size:
                self.groups[flat.device, flat.dtype].append(number)
                self.size_bytes += size
                if not flat.is_cuda:
                    self.host_bytes += size

    def copy(self, *, raw: bool) -> TorchCopy | None:
        return self._reader.copy(self, raw=raw)


class TorchCopy:
    """The copies of all groups, and which tensors are in which."""

    def __init__(
        self,
        reader: TorchReader,
        found: TorchFound,
        copies: list[HostCopy | DeviceCopy],
        *,
        raw: bool,
    ) -> None:
        self.tensors = [source.tensor for source in found.sources]
        self.size_bytes = found.size_bytes
        self._reader = reader
        self._groups = list(found.groups.values())
        self._copies = copies
        # The program's own memory is not ours to hold.
        self._strides = [source.strides for source in found.sources]
        self._values = {
            number: source.values.clone()
            for number, source in enumerate(found.sources)
            if raw and source.values is not None
        }

    def summarize(self) -> list[Summary]:
        found = [stats.summarize(np.zeros(0))] * len(self.tensors)
        for numbers, copy in zip(self._groups, self._copies, strict=True):
            for number, summary in zip(numbers, copy.summarize(), strict=True):
                found[number] = summary
        return found

    def save(self, path: Path, *, gradients: bool) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        flats = {
            number: flat
            for numbers, copy in zip(self._groups, self._copies, strict=True)
            for number, flat in zip(numbers, copy.values(), strict=True)
        }
        values = {}
        for number, tensor in enumerate(self.tensors):
            if tensor.is_gradient is gradients and tensor.has_values:
                values[tensor.name] = self._whole(number, tensor, flats.get(number))
        try:
            save_file(values, path)
        except SafetensorError as error:  # what it says of a disk, too
            raise OSError(str(error)) from error

    def _whole(self, number: int, tensor: Tensor, flat: torch.Tensor | None) -> torch.Tensor:
        """The tensor in its own shape, as safetensors can hold it."""
        dtype = getattr(torch, tensor.dtype)
        if flat is None:
            return torch.zeros(tensor.shape, dtype=dtype)
        if number in self._values:
            return self._values[number].cpu().contiguous()
        strides = self._strides[number]
        if strides is None:
            return flat.view(tensor.shape)
        if not dtype.is_complex:
            return flat.as_strided(tensor.shape, strides).contiguous()
        parts = flat.as_strided((*tensor.shape, 2), strides)
        if dtype is not torch.complex64:  # the only complex type of safetensors
            return parts.contiguous()
        parts = parts.contiguous()
        if parts.storage_offset() % 2:  # it lies behind others, and a pair begins at an even place
            parts = parts.clone()
        return torch.view_as_complex(parts)

    def release(self) -> None:
        for copy in self._copies:
            if isinstance(copy, HostCopy):
                self._reader.give_back(copy.buffer)
        self._copies = []


# -- what a model holds ----------------------------------------------------------------------


def clean(name: str) -> str:
    if "_orig_mod" not in name and "_wrapped_module" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor is on this rank."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def why_unmeasured(tensor: Any) -> str | None:
    """Why a tensor has no values that could be read, if it has none."""
    if tensor.is_meta:
        return "a meta tensor has no values"
    if is_traceable_wrapper_subclass(tensor):
        return f"a {type(tensor).__name__} is made of other tensors"
    if tensor.is_quantized or str(tensor.dtype).startswith("torch.float4"):
        return "its values are packed"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return "its values are not in one piece"
    return None


def find_sources(model: Any, prefix: str) -> list[Source]:
    found: dict[int, tuple[torch.nn.Parameter, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), (parameter, []))[1].append(prefix + clean(name))
    weights, gradients = [], []
    for parameter, names in found.values():
        attrs: dict[str, Any] = {}
        if len(names) > 1:
            attrs["shared_with"] = names[1:]
        if not parameter.requires_grad:
            attrs["frozen"] = True
        weights.append(as_source(parameter, names[0], attrs, False, prefix))
        gradient = parameter.grad
        if gradient is not None:
            gradients.append(as_source(gradient, names[0] + ".grad", {}, True, prefix))
    return weights + gradients


def as_source(
    given: torch.Tensor, name: str, attrs: dict[str, Any], is_gradient: bool, model: str
) -> Source:
    if type(given) in PLAIN_TYPES and given.layout is torch.strided:
        kind = PLAIN.get(given.dtype)
        if kind is not None and given.is_contiguous() and not given.is_meta:
            described = Tensor(name, is_gradient, list(given.shape), kind, attrs, model)
            # A GPU's are flattened all at once.
            return Source(described, given if given.is_cuda else given.detach().view(-1), None)
    if is_lazy(given):  # it raises when it is asked for more
        dtype = str(given.dtype).removeprefix("torch.")
        attrs["unmeasured"] = "it is not initialized yet"
        return Source(
            Tensor(name, is_gradient, [], dtype, attrs), torch.zeros(0, device="cpu"), None
        )
    tensor = local(given.detach())
    if hasattr(given, "placements"):
        attrs["shard_of"] = list(given.shape)
        attrs["placements"] = [str(placement) for placement in given.placements]
    if tensor.layout in SPARSE:  # the gradient of a sparse embedding
        attrs["stored_values_of"] = list(tensor.shape)
        tensor = (tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor).values()
    dtype = str(tensor.dtype).removeprefix("torch.")
    described = Tensor(name, is_gradient, list(tensor.shape), dtype, attrs, model)
    reason = why_unmeasured(tensor)
    if reason is not None:
        attrs["unmeasured"] = reason
        return Source(described, torch.zeros(0, device="cpu"), None)
    values = None
    if tensor.is_cuda and (tensor.dtype.itemsize == 1 or not tensor.is_floating_point()):
        values = tensor  # few and rare; a row of these could not be padded with NaN
        if not tensor.is_complex():
            tensor = tensor.float() if tensor.is_floating_point() else tensor.double()
    if tensor.is_complex():
        attrs["parts"] = "statistics are over the real and the imaginary parts"
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat, strides = as_it_lies(tensor)
    return Source(described, flat, strides, values)


def as_it_lies(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The tensor in one dimension, without a copy where its memory has no gaps, in any order."""
    if not tensor.is_contiguous():
        axes = sorted(zip(tensor.stride(), tensor.shape, strict=True))
        expected = 1
        for stride, size in axes:
            if size > 1 and stride != expected:
                tensor = tensor.contiguous()
                break
            expected *= size
    return tensor.as_strided((tensor.numel(),), (1,)), tensor.stride()


# -- on the host -----------------------------------------------------------------------------


def host_room() -> float:
    available = memory.available_bytes()
    return math.inf if available is None else available * memory.PART


def new_buffer(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="cpu")


def copy_into(buffer: torch.Tensor, flats: list[torch.Tensor]) -> None:
    """Copies the tensors into the buffer, one after the other, on this thread alone.

    torch would share each tensor out over its threads and wait for all of them: where other
    programs want the cores, that takes a turn of the scheduler a tensor, a second for a ResNet-50.
    One thread is as quick on a quiet machine, since it is the memory that takes the time.
    """
    target = as_bytes(buffer)
    first = 0
    for flat in flats:
        last = first + flat.nbytes
        target[first:last] = as_bytes(flat)
        first = last


def as_bytes(flat: torch.Tensor) -> Any:
    return flat.view(torch.uint8).numpy()


class HostCopy:
    """Tensors of one dtype, one after the other, on the host."""

    def __init__(self, buffer: torch.Tensor, sizes: list[int]) -> None:
        self.buffer = buffer
        self._sizes = sizes

    def values(self) -> Iterator[torch.Tensor]:
        return iter(self.buffer.split(self._sizes))

    def summarize(self) -> Iterator[Summary]:
        for flat in self.values():
            yield summarize(flat)


def summarize(flat: torch.Tensor) -> Summary:
    """The summary of a tensor on the host; NumPy reads its memory, and knows most types."""
    if flat.dtype is torch.bfloat16:
        return stats.summarize(flat.view(torch.uint16).numpy(), decode_bfloat16)
    if flat.is_floating_point() and flat.dtype.itemsize == 1:
        numbers = torch.arange(256, dtype=torch.uint8).view(flat.dtype).float().numpy()
        return stats.summarize(flat.view(torch.uint8).numpy(), numbers.__getitem__)
    return stats.summarize(flat.numpy())


def decode_bfloat16(block: Any) -> Any:
    return (block.astype(np.uint32) << 16).view(np.float32)
