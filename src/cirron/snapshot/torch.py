"""Torch models: the names and values of their parameters, copies on a GPU, and statistics there.

If the GPU has no room for a copy, the tensors are measured in place. The program's stream waits for
that, the host does not. Only the worker waits for the device, in `Measured.wait`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._utils import _flatten_dense_tensors
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cirron import captures
from cirron.snapshot import host, stats
from cirron.snapshot.host import PART, Copier, HostCopy, Reader, Tensor
from cirron.snapshot.records import paced

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from cirron.snapshot.host import Copy
    from cirron.snapshot.stats import Summary

# What torch's wrappers insert into the names of modules.
WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))

# Nearly all parameters have these types: they are read with as few calls as possible.
PLAIN_TYPES: frozenset[Any] = frozenset((torch.Tensor, torch.nn.Parameter))
PLAIN = {getattr(torch, name): name for name in ("float32", "bfloat16", "float16", "float64")}

# Tensors are split into rows, padded with NaN. A slab of rows is measured at a time, which needs
# about 200 MB for intermediate results.
ROW = 4096
SLAB_ROWS = 2048

# Raw values are copied to the host in windows of this many elements.
WINDOW = 2**24


class TorchReader(Reader):
    """Reads nn.Modules."""

    is_in_place = True

    def unwrap(self, model: Any) -> Any:
        while True:
            if isinstance(model, (DataParallel, DistributedDataParallel)):
                model = model.module
            elif "_orig_mod" in getattr(model, "_modules", ()):  # torch.compile's
                model = model._orig_mod
            else:
                return model

    def named(self, model: Any) -> Iterable[tuple[str, torch.Tensor]]:
        """The parameters, including every name of a shared one."""
        # torch's own method: a model's override may lack `remove_duplicate`, or leave some out.
        return torch.nn.Module.named_parameters(model, remove_duplicate=False)

    def names(self, model: Any) -> list[str]:
        return [clean(name) for name, _ in self.named(model)]

    def read(self, model: Any, prefix: str, *, only_gradients: bool = False) -> list[Tensor]:
        parameters: dict[int, tuple[torch.Tensor, list[str]]] = {}
        for name, parameter in self.named(model):
            parameters.setdefault(id(parameter), (parameter, []))[1].append(prefix + clean(name))
        weights, gradients = [], []
        with torch._C.DisableTorchFunctionSubclass():  # runs no code of user subclasses
            for parameter, (name, *others) in parameters.values():
                gradient = parameter.grad
                if not only_gradients:
                    attrs: dict[str, Any] = {"shared_with": others} if others else {}
                    if not parameter.requires_grad:
                        attrs["frozen"] = True
                    elif gradient is None:
                        attrs["no_gradient"] = True
                    weights.append(described(parameter, Tensor(name, False, [], "", attrs, prefix)))
                if gradient is not None:
                    its = Tensor(f"{name}.grad", True, [], "", {}, prefix, source=gradient)
                    gradients.append(described(gradient, its))
        return weights + gradients


READER = TorchReader()


def clean(name: str) -> str:
    if "_orig_mod" not in name and "_wrapped_module" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


# -- one tensor ------------------------------------------------------------------------------


def described(given: torch.Tensor, found: Tensor) -> Tensor:
    """The tensor with its shape, dtype, flags and values filled in."""
    try:
        describe(given, found)
    except Exception as error:  # noqa: BLE001  one odd tensor must not hide the others
        found.attrs["unmeasured"] = f"it could not be read: {error!r:.200}"
    return found


def describe(given: torch.Tensor, found: Tensor) -> None:
    if type(given) in PLAIN_TYPES and given.layout is torch.strided:
        kind = PLAIN.get(given.dtype)
        if kind and not (given.is_meta or given.is_neg() or given.is_nested):
            found.shape, found.dtype = list(given.shape), kind
            place(found, given if given.is_cuda else given.detach())
            return
    attrs = found.attrs
    found.dtype = str(given.dtype).removeprefix("torch.")
    if is_lazy(given):  # it has no shape yet
        attrs["unmeasured"] = "it is not initialized yet"
        return
    tensor: Any = given.detach()
    if hasattr(tensor, "placements"):  # a DTensor: the shard of this rank
        attrs["shard_of"] = list(tensor.shape)
        attrs["placements"] = [str(placement) for placement in tensor.placements]
        tensor = tensor.to_local()
    if str(tensor.layout).startswith("torch.sparse_"):  # the gradient of a sparse embedding
        attrs["stored_values_of"] = list(tensor.shape)
        tensor = (tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor).values()
    if not tensor.is_nested:
        found.shape = list(tensor.shape)
    reason = why_unmeasured(tensor)
    if reason is not None:
        attrs["unmeasured"] = reason
        return
    if tensor.is_complex():
        attrs["parts"] = host.PARTS
        tensor = torch.view_as_real(tensor.resolve_conj())
    place(found, tensor.resolve_neg())


def place(found: Tensor, values: torch.Tensor) -> None:
    """Says where the values are, and how NumPy can read them."""
    if values.dtype is torch.bfloat16:
        found.decode = decode_bfloat16
    elif values.dtype not in PLAIN and values.is_floating_point():  # eight bits
        found.decode = float8_values(values.dtype).__getitem__
        values = values.view(torch.uint8)
    if values.is_cpu:
        found.array = as_numpy(values)
    elif values.numel():
        found.array, found.copier = values, GPU_COPIER
    else:
        found.array = as_numpy(values.new_empty(0, device="cpu"))


def why_unmeasured(tensor: Any) -> str | None:
    """Why the values of a tensor cannot be read; None if they can."""
    if tensor.is_meta:
        return "a meta tensor has no values"
    if is_traceable_wrapper_subclass(tensor):
        return f"a {type(tensor).__name__} consists of other tensors"
    if tensor.is_quantized or str(tensor.dtype).startswith("torch.float4"):
        return "its values are packed"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return "its values are not in one piece"
    return None


def decode_bfloat16(block: Any) -> Any:
    return (block.astype(np.uint32) << 16).view(np.float32)


@cache
def float8_values(dtype: torch.dtype) -> Any:
    """The 256 values of an eight-bit float type, as float32."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float().numpy()


# -- copies ------------------------------------------------------------------------------------


class GpuCopier(Copier):
    """Copies torch tensors on GPUs: one copy for each device and dtype.

    Tensors on other kinds of devices are copied to the host right away.
    """

    def prepare(self, weights: list[Tensor]) -> None:
        """Makes the driver load its kernels, which takes ten times as long as a snapshot."""
        arrays = [tensor.array for tensor in weights]
        floats = [one for one in arrays if one.is_cuda and one.is_floating_point()]
        for on, dtype in {(one.device, one.dtype) for one in floats}:
            with captures.beside(), torch.cuda.device(on), torch.cuda.stream(torch.cuda.Stream()):
                zero = torch.zeros(1, dtype=dtype, device=on)
                few = [Tensor("", False, [1], "", {}, array=zero) for _ in range(2)]
                list(DeviceCopy(few, raw=False).summaries())

    def copy(self, tensors: list[Tensor], *, raw: bool, in_step: bool) -> list[Copy] | None:
        groups: dict[Any, list[Tensor]] = defaultdict(list)
        others: list[Tensor] = []  # on other kinds of devices
        for tensor in tensors:
            array = tensor.array
            its = groups[array.device, array.dtype] if array.is_cuda else others
            its.append(tensor)
        to_fetch = tensors if raw else others
        if not host.has_room(sum(tensor.size_bytes for tensor in to_fetch)):
            return None
        if in_step and (others or not all(map(can_copy, groups.values()))):
            return None
        with torch.inference_mode(False), torch.no_grad():
            copies: list[Copy] = [DeviceCopy(group, raw=raw) for group in groups.values()]
            if others:
                arrays = [as_numpy(tensor.take_array().cpu()) for tensor in others]
                copies.append(HostCopy(others, arrays))
            return copies


class DeviceCopy:
    """Tensors of one dtype on a GPU: copied there, or measured right away if they do not fit."""

    def __init__(self, tensors: list[Tensor], *, raw: bool) -> None:
        arrays = [tensor.take_array() for tensor in tensors]
        self.tensors = tensors
        self.size_bytes = sum(array.nbytes for array in arrays)
        self._sizes = [array.numel() for array in arrays]
        self._buffer: torch.Tensor | None = None
        self._on_host: torch.Tensor | None = None
        # Integers cannot be padded with NaN. They are rare: the host measures them.
        self._is_odd = not arrays[0].is_floating_point()
        device = arrays[0].device
        with torch.cuda.device(device):
            self._side = torch.cuda.Stream()
            if self._is_odd or has_room(device, self.size_bytes):
                self._buffer = flattened(arrays)
                self._side.wait_stream(torch.cuda.current_stream())
            else:
                if raw:
                    self._on_host = _flatten_dense_tensors([array.cpu() for array in arrays])
                self._side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._side):
                    self._measured = Measured(arrays)
                torch.cuda.current_stream().wait_stream(self._side)

    def value(self, number: int) -> Any:
        first = sum(self._sizes[:number])
        return as_numpy(self._fetched().narrow(0, first, self._sizes[number]))

    def summaries(self) -> Iterable[Summary]:
        if self._is_odd:
            pairs = zip(self.tensors, self._fetched().split(self._sizes), strict=True)
            return (stats.summarize(as_numpy(flat), tensor.decode) for tensor, flat in pairs)
        with captures.beside(), torch.cuda.stream(self._side):  # also selects the device
            if self._buffer is not None:
                self._measured = Measured(list(self._buffer.split(self._sizes)))
            self._measured.wait()
        return self._measured.summaries()

    def release(self) -> None:
        self._buffer = self._on_host = None

    def _fetched(self) -> torch.Tensor:
        """All values, on the host."""
        if self._on_host is None:
            assert self._buffer is not None
            with captures.beside(), torch.cuda.stream(self._side):
                self._on_host = fetch(self._buffer, self._side)
        return self._on_host


def can_copy(tensors: list[Tensor]) -> bool:
    """Whether a copy needs no waiting, and no CUDA graph is being captured."""
    size_bytes = sum(tensor.size_bytes for tensor in tensors)
    is_capturing = torch.cuda.is_current_stream_capturing()
    return not is_capturing and has_room(tensors[0].array.device, size_bytes)


def as_numpy(tensor: torch.Tensor) -> Any:
    """A tensor in the host's memory as a NumPy array; bfloat16 as integers."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of all tensors, flattened in row-major order and concatenated."""
    flat: torch.Tensor = _flatten_dense_tensors(tensors)
    return flat.clone() if len(tensors) == 1 else flat  # torch does not copy a single tensor


def has_room(device: torch.device, size_bytes: int) -> bool:
    """Whether a copy fits in the free memory of the driver and of torch's allocator."""
    free, _ = torch.cuda.mem_get_info(device)
    if size_bytes <= free * PART:
        return True
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return size_bytes <= (free + kept) * PART


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, complete when the stream reaches this point."""
    there = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return there.copy_(tensor, non_blocking=True)


def fetch(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    """The tensor in pageable memory, copied through a small window of pinned memory."""
    there = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
    for source, target in zip(tensor.split(WINDOW), there.split(WINDOW), strict=True):
        window = to_host(source)
        stream.synchronize()
        target.view(torch.uint8).numpy()[:] = window.view(torch.uint8).numpy()
    return there


GPU_COPIER = GpuCopier()


# -- statistics on a GPU -----------------------------------------------------------------------


class Measured:
    """Computes the statistics of tensors on their device. Only `wait` waits for it.

    Each operation works on a slab of rows, which may belong to many tensors: a model of three
    hundred tensors takes a few hundred kernel launches instead of ten thousand.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._sizes = [tensor.numel() for tensor in tensors]
        self._rows = [-(-size // ROW) for size in self._sizes]  # of each tensor
        is_cuda = tensors[0].is_cuda
        owners = np.repeat(np.arange(len(tensors)), self._rows)
        owner = torch.from_numpy(owners)  # of each row
        if is_cuda:
            owner = owner.pin_memory().to(tensors[0].device, non_blocking=True)
        table = torch.cat([extremes(slab) for _, slab in slabs(tensors)])
        inner = inner_edges(table, owner, len(tensors))
        counts = table.new_zeros(len(tensors), stats.BINS)
        moments = []
        for first, slab in slabs(tensors):
            last = first + len(slab)
            its_owner = owner[first:last]
            begin, end = int(owners[first]), int(owners[last - 1]) + 1  # the tensors in this slab
            found, counted = measure(
                slab, inner[its_owner], its_owner[:, None] - begin, end - begin
            )
            moments.append(found)
            counts[begin:end].add_(counted)
        rows = torch.cat([table, torch.cat(moments)], 1)
        self._found = to_host(torch.cat([rows.flatten(), counts.flatten()]))
        self._done = torch.cuda.current_stream().record_event() if is_cuda else None

    def wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()

    def summaries(self) -> Iterator[Summary]:
        found = self._found.numpy()
        place = sum(self._rows) * stats.COLUMNS
        table, counts = found[:place].reshape(-1, stats.COLUMNS), found[place:]
        tables = np.split(table, np.cumsum(self._rows)[:-1])
        for size, rows, its_counts in paced(
            zip(self._sizes, tables, counts.reshape(-1, stats.BINS), strict=True)
        ):
            rows[-1, stats.NAN] -= len(rows) * ROW - size  # the padding
            yield stats.combine(rows, its_counts)


def slabs(tensors: list[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """Slabs of rows in double precision, each with the index of its first row."""
    pad = torch.full((ROW,), math.nan, dtype=tensors[0].dtype, device=tensors[0].device)
    first, size = 0, 0
    pieces: list[torch.Tensor] = []
    for tensor in paced(tensors):
        flat = tensor.reshape(-1)
        for piece in flat.split(ROW * SLAB_ROWS) if flat.numel() > ROW * SLAB_ROWS else (flat,):
            rows = -(-piece.numel() // ROW)
            if size + rows > SLAB_ROWS:
                yield first, torch.cat(pieces).view(-1, ROW).double()
                first, size, pieces = first + size, 0, []
            pieces += [piece, pad[: rows * ROW - piece.numel()]]
            size += rows
    yield first, torch.cat(pieces).view(-1, ROW).double()


def extremes(slab: torch.Tensor) -> torch.Tensor:
    """The first columns of each row."""
    finite = slab.isfinite()
    columns = [
        slab.isnan().sum(1),
        slab.isinf().sum(1),
        torch.where(finite, slab, math.inf).amin(1),
        torch.where(finite, slab, -math.inf).amax(1),
    ]
    return torch.stack([column.double() for column in columns], 1)


def inner_edges(table: torch.Tensor, owner: torch.Tensor, tensors: int) -> torch.Tensor:
    """For each tensor `stats.histogram_edges`, without the first and the last edge."""
    start = table.new_full((tensors,), math.inf)
    low = start.scatter_reduce(0, owner, table[:, stats.LOW], "amin")
    high = (-start).scatter_reduce(0, owner, table[:, stats.HIGH], "amax")
    middle = torch.where(low == high, 0.5, 0.0)
    low, high = low - middle, high + middle
    step = (high / 2 - low / 2) / stats.BINS
    number = torch.arange(1, stats.BINS, dtype=table.dtype, device=table.device)
    return (low[:, None] / 2 + number * step[:, None]) * 2


def measure(
    slab: torch.Tensor, inner: torch.Tensor, owner: torch.Tensor, tensors: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last columns of each row, and the counts of each tensor's bins."""
    finite = slab.isfinite()
    count = finite.sum(1, dtype=torch.float64)
    mean = torch.where(finite, slab, 0.0).sum(1) / count.clamp(min=1)
    squares = torch.where(finite, slab - mean[:, None], 0.0).square_().sum(1)
    size = tensors * stats.BINS
    keys = torch.searchsorted(inner, slab, right=True).add_(owner * stats.BINS)
    keys = torch.where(finite, keys, size).flatten()  # not finite: a bin after the last one
    if keys.is_cuda:  # integers: deterministic, and without waiting for the device
        counts = torch.histc(keys, bins=size + 1, min=0, max=size + 1)[:size]
    else:
        counts = keys.bincount(minlength=size + 1)[:size]
    return torch.stack([count, mean, squares], 1), counts.double().view(tensors, stats.BINS)
