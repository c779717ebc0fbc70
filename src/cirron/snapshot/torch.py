"""Reads torch models: the names of their parameters, and their values as they lie in memory."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cirron.snapshot import cuda
from cirron.snapshot.base import Reader, Tensor
from cirron.snapshot.host import HostCopier, size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cirron.snapshot.base import Copy

# What torch's wrappers put between the names of modules.
WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))

# What nearly every parameter is: these are read with as few calls as can be.
PLAIN_TYPES: frozenset[Any] = frozenset((torch.Tensor, torch.nn.Parameter))
PLAIN = {getattr(torch, name): name for name in ("float32", "bfloat16", "float16", "float64")}


class TorchReader(Reader):
    """Reads nn.Modules."""

    clears_gradients = True

    def __init__(self) -> None:
        self._host = HostCopier()
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

    def read(self, model: Any, prefix: str, *, only_gradients: bool = False) -> Iterator[Tensor]:
        found: dict[int, tuple[torch.nn.Parameter, list[str]]] = {}
        for name, parameter in self.unwrap(model).named_parameters(remove_duplicate=False):
            found.setdefault(id(parameter), (parameter, []))[1].append(prefix + clean(name))
        for parameter, names in () if only_gradients else found.values():
            attrs: dict[str, Any] = {}
            if len(names) > 1:
                attrs["shared_with"] = names[1:]
            if not parameter.requires_grad:
                attrs["frozen"] = True
            elif parameter.grad is None:
                attrs["no_gradient"] = True
            yield describe(parameter, Tensor(names[0], False, [], "", attrs, prefix))
        for parameter, names in found.values():
            gradient = parameter.grad
            if gradient is not None:
                its = Tensor(f"{names[0]}.grad", True, [], "", {}, prefix, source=gradient)
                yield describe(gradient, its)

    def prepare(self, models: list[tuple[Any, str]]) -> Callable[[], None]:
        weights: list[Tensor] = []
        on_gpus: set[tuple[torch.device, torch.dtype]] = set()
        for model, prefix in models:
            for tensor in self.read(model, prefix):
                if isinstance(tensor.array, torch.Tensor):
                    on_gpus.add((tensor.array.device, tensor.array.dtype))
                elif not tensor.is_gradient:
                    weights.append(tensor)
        will_have = [tensor for tensor in weights if "frozen" not in tensor.attrs]  # a gradient
        sizes = [size for size in (size_of(weights), size_of(will_have)) if size]

        def make_ready() -> None:
            for device, dtype in on_gpus:
                if device.type == "cuda" and dtype.is_floating_point:
                    cuda.load_kernels(device, dtype)
            self._host.prepare(sizes)

        return make_ready

    def copy(self, tensors: list[Tensor], *, raw: bool, in_step: bool = False) -> list[Copy] | None:
        if raw and not self._can_save:
            from safetensors.torch import save

            # Imports all that it will need, here: were the program to fork while the worker
            # imports, the child would have half a module for good.
            save({"": torch.zeros(1, device="cpu")})
            self._can_save = True
        # On the host, weights and gradients are apart: gradients may be copied before the weights.
        here: dict[bool, list[Tensor]] = {False: [], True: []}
        groups: dict[Any, list[Tensor]] = defaultdict(list)  # what a GPU copies together
        others: list[Tensor] = []  # on another kind of device
        for tensor in tensors:
            array = tensor.array
            if isinstance(array, torch.Tensor) and array.is_cuda:
                groups[array.device, array.dtype].append(tensor)
            else:
                here[tensor.is_gradient].append(tensor)
                if isinstance(array, torch.Tensor):
                    others.append(tensor)
        on_host = sum(map(size_of, here.values()))
        if not self._host.has_room(size_of(tensors) if raw else on_host):
            return None
        if in_step and (others or not all(map(cuda.can_copy, groups.values()))):
            return None
        for tensor in others:  # their values come over now
            tensor.array = cuda.as_numpy(tensor.array.cpu())
        if not (in_step or on_host):
            self._host.clear()  # the models went to a device
        with torch.inference_mode(False), torch.no_grad():
            copies: list[Copy] = [self._host.copy(some) for some in here.values() if some]
            return copies + [cuda.DeviceCopy(group, raw=raw) for group in groups.values()]


def clean(name: str) -> str:
    if "_orig_mod" not in name and "_wrapped_module" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


# -- what a tensor holds ---------------------------------------------------------------------


def describe(given: torch.Tensor, found: Tensor) -> Tensor:
    """Fills in what the tensor is, and where its values are."""
    if type(given) in PLAIN_TYPES and given.layout is torch.strided:
        kind = PLAIN.get(given.dtype)
        if kind is not None and given.is_contiguous() and not given.is_meta:
            found.shape, found.dtype = list(given.shape), kind
            # A GPU's are flattened all at once.
            return place(found, given if given.is_cuda else given.detach().view(-1), None)
    attrs = found.attrs
    found.dtype = str(given.dtype).removeprefix("torch.")
    if is_lazy(given):  # it raises when it is asked for more
        attrs["unmeasured"] = "it is not initialized yet"
        return found
    tensor = given.detach()
    if hasattr(tensor, "to_local"):  # what of it is on this rank
        tensor = tensor.to_local()
    if hasattr(given, "placements"):
        attrs["shard_of"] = list(given.shape)
        attrs["placements"] = [str(placement) for placement in given.placements]
    if str(tensor.layout).startswith("torch.sparse_"):  # the gradient of a sparse embedding
        attrs["stored_values_of"] = list(tensor.shape)
        tensor = (tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor).values()
    found.shape = list(tensor.shape)
    reason = why_unmeasured(tensor)
    if reason is not None:
        attrs["unmeasured"] = reason
        return found
    if tensor.is_complex():
        attrs["parts"] = "statistics are over the real and the imaginary parts"
        tensor = torch.view_as_real(tensor.resolve_conj())
    return place(found, *as_it_lies(tensor))


def place(found: Tensor, flat: torch.Tensor, strides: tuple[int, ...] | None) -> Tensor:
    found.restore, found.strides = restore, strides
    if flat.dtype is torch.bfloat16:
        found.decode = decode_bfloat16
    elif flat.dtype not in PLAIN and flat.is_floating_point():  # eight bits
        found.decode = numbers_of(flat.dtype).__getitem__
        flat = flat.view(torch.uint8)
    if not flat.is_cpu and not flat.numel():
        flat = flat.new_empty(0, device="cpu")
    found.array = cuda.as_numpy(flat) if flat.is_cpu else flat
    return found


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


# -- on the worker ---------------------------------------------------------------------------


def restore(tensor: Tensor, values: Any) -> Any:
    """The tensor in its own shape, as safetensors can hold it."""
    kind, strides = getattr(torch, tensor.dtype), tensor.strides
    flat = torch.as_tensor(values)
    if strides is None:
        return flat.view(kind).view(tensor.shape)
    if not kind.is_complex:
        return flat.view(kind).as_strided(tensor.shape, strides).contiguous()
    parts = flat.as_strided((*tensor.shape, 2), strides).contiguous()
    if kind is not torch.complex64:  # the only complex type of safetensors
        return parts
    return torch.view_as_complex(parts.clone())  # a pair begins at an even place


def decode_bfloat16(block: Any) -> Any:
    return (block.astype(np.uint32) << 16).view(np.float32)


@cache
def numbers_of(dtype: torch.dtype) -> Any:
    """What each of the 256 values of an eight-bit float is."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float().numpy()
