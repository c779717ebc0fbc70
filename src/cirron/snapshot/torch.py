"""Reads torch models: the names of their parameters, and their values in memory order."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cirron.snapshot import cuda
from cirron.snapshot.host import Reader, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

# What torch's wrappers insert into the names of modules.
WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))

# Nearly all parameters have these types: they are read with as few calls as possible.
PLAIN_TYPES: frozenset[Any] = frozenset((torch.Tensor, torch.nn.Parameter))
PLAIN = {getattr(torch, name): name for name in ("float32", "bfloat16", "float16", "float64")}


GPU_COPIER = cuda.GpuCopier()


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
        return torch.nn.Module.named_parameters(self.unwrap(model), remove_duplicate=False)

    def names(self, model: Any) -> list[str]:
        return [clean(name) for name, _ in self.named(model)]

    def read(self, model: Any, prefix: str, *, only_gradients: bool = False) -> list[Tensor]:
        parameters: dict[int, tuple[torch.Tensor, list[str]]] = {}
        for name, parameter in self.named(model):
            parameters.setdefault(id(parameter), (parameter, []))[1].append(prefix + clean(name))
        weights, gradients = [], []
        with torch._C.DisableTorchFunctionSubclass():  # runs no code of user subclasses
            for parameter, names in parameters.values():
                gradient = parameter.grad
                if not only_gradients:
                    attrs: dict[str, Any] = {}
                    if len(names) > 1:
                        attrs["shared_with"] = names[1:]
                    if not parameter.requires_grad:
                        attrs["frozen"] = True
                    elif gradient is None:
                        attrs["no_gradient"] = True
                    its = Tensor(names[0], False, [], "", attrs, prefix)
                    weights.append(described(parameter, its))
                if gradient is not None:
                    its = Tensor(f"{names[0]}.grad", True, [], "", {}, prefix, source=gradient)
                    gradients.append(described(gradient, its))
        return weights + gradients


def clean(name: str) -> str:
    if "_orig_mod" not in name and "_wrapped_module" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


# -- one tensor ------------------------------------------------------------------------------


def described(given: torch.Tensor, found: Tensor) -> Tensor:
    """Fills in shape, dtype, flags and values of a tensor."""
    try:
        return describe(given, found)
    except Exception as error:  # noqa: BLE001  one odd tensor must not hide the others
        found.attrs["unmeasured"] = f"it could not be read: {error!r:.200}"
        return found


def describe(given: torch.Tensor, found: Tensor) -> Tensor:
    if type(given) in PLAIN_TYPES and given.layout is torch.strided:
        kind = PLAIN.get(given.dtype)
        is_odd = given.is_meta or given.is_neg() or given.is_nested
        if kind is not None and not is_odd and given.is_contiguous():
            found.shape, found.dtype = list(given.shape), kind
            # Tensors on a GPU are flattened together, by the copier.
            return place(found, given if given.is_cuda else given.detach().view(-1), None)
    attrs = found.attrs
    found.dtype = str(given.dtype).removeprefix("torch.")
    if is_lazy(given):  # it has no shape yet
        attrs["unmeasured"] = "it is not initialized yet"
        return found
    tensor = given.detach()
    if hasattr(tensor, "to_local"):  # a DTensor: the shard of this rank
        tensor = tensor.to_local()
    if hasattr(given, "placements"):
        attrs["shard_of"] = list(given.shape)
        attrs["placements"] = [str(placement) for placement in given.placements]
    if str(tensor.layout).startswith("torch.sparse_"):  # the gradient of a sparse embedding
        attrs["stored_values_of"] = list(tensor.shape)
        tensor = (tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor).values()
    if not tensor.is_nested:
        found.shape = list(tensor.shape)
    reason = why_unmeasured(tensor)
    if reason is not None:
        attrs["unmeasured"] = reason
        return found
    if tensor.is_complex():
        attrs["parts"] = "statistics are over the real and the imaginary parts"
        tensor = torch.view_as_real(tensor.resolve_conj())
    return place(found, *as_it_lies(tensor.resolve_neg()))


def place(found: Tensor, flat: torch.Tensor, strides: tuple[int, ...] | None) -> Tensor:
    found.strides = strides
    if flat.dtype is torch.bfloat16:
        found.decode = decode_bfloat16
    elif flat.dtype not in PLAIN and flat.is_floating_point():  # eight bits
        found.decode = numbers_of(flat.dtype).__getitem__
        flat = flat.view(torch.uint8)
    if not flat.is_cpu and not flat.numel():
        flat = flat.new_empty(0, device="cpu")
    if flat.is_cpu:
        found.array = cuda.as_numpy(flat)
    else:
        found.array, found.copier = flat, GPU_COPIER
    return found


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


def as_it_lies(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The tensor in one dimension, in memory order; copied only if its memory has gaps."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    if not tensor.permute(order).is_contiguous():
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)), tensor.stride()


# -- on the worker ---------------------------------------------------------------------------


def decode_bfloat16(block: Any) -> Any:
    return (block.astype(np.uint32) << 16).view(np.float32)


@cache
def numbers_of(dtype: torch.dtype) -> Any:
    """The 256 values of an eight-bit float type, as float32."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float().numpy()
