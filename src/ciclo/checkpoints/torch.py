"""Tensors of torch: `torch.save` of a list, read without pickle's powers (`weights_only`).

Those that are spread over processes (DTensor, of FSDP and tensor parallelism) are written by
`torch.distributed.checkpoint`, each process its part; as that talks to the others, it is done at
once and not behind the loop.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

from ciclo.errors import need
from ciclo.values import library_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WHAT = "a checkpoint with tensors"


def owns(value: Any) -> bool:
    return hasattr(value, "detach") and hasattr(value, "untyped_storage")


def traits(value: Any) -> tuple[Any, ...]:
    return (True,) if value.requires_grad else ()


def is_shared(leaves: list[Any]) -> bool:
    return any(map(_is_spread, leaves))


def _is_spread(leaf: Any) -> bool:
    return hasattr(leaf, "placements") and hasattr(leaf, "device_mesh")


def begin(path: Path, leaves: list[Any], is_copied: bool) -> Callable[[], None]:
    torch = need("torch", WHAT)
    kept = [_kept(leaf, is_copied) for leaf in leaves]
    if not is_shared(leaves):
        return lambda: torch.save(kept, path)
    spread = {str(i): leaf.detach() for i, leaf in enumerate(leaves) if _is_spread(leaf)}
    need("torch.distributed.checkpoint", WHAT).save(spread, checkpoint_id=_folder(path))
    is_first = sys.modules["torch"].distributed.get_rank() == 0
    return lambda: torch.save(kept, path) if is_first else None


def _folder(path: Path) -> Path:
    return path.with_name(f"{path.name}.spread")


def _kept(leaf: Any, is_copied: bool) -> Any:
    """What is written of a tensor; of one that is spread, how it lies."""
    if _is_spread(leaf):
        dims = [place.dim if place.is_shard() else None for place in leaf.placements]
        return list(leaf.shape), leaf.dtype, dims
    # A view would bring all of the memory that it looks at; what is on a device changes there.
    elements_behind = leaf.untyped_storage().nbytes() // max(leaf.element_size(), 1)
    if is_copied or leaf.device.type != "cpu" or leaf.numel() < elements_behind:
        return leaf.detach().to("cpu", copy=True)
    return leaf.detach()


def read(path: Path, likes: dict[int, Any]) -> list[Any]:
    torch = need("torch", WHAT)
    found: list[Any] = torch.load(path, map_location="cpu", weights_only=True)
    spread = {str(i): one for i, one in enumerate(found) if isinstance(one, tuple)}
    if not spread:
        return found
    meshes = [like.device_mesh for like in likes.values() if _is_spread(like)]
    tensor = need("torch.distributed.tensor", WHAT) if meshes else None
    targets = {}
    for name, (shape, dtype, dims) in spread.items():
        if tensor is None:  # this run has each tensor whole
            targets[name] = torch.empty(shape, dtype=dtype)
            continue
        places = [tensor.Replicate() if dim is None else tensor.Shard(dim) for dim in dims]
        mesh = getattr(likes.get(int(name)), "device_mesh", meshes[0])
        targets[name] = tensor.zeros(shape, dtype=dtype, device_mesh=mesh, placements=places)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process may read
        need("torch.distributed.checkpoint", WHAT).load(targets, checkpoint_id=_folder(path))
    for name, one in targets.items():
        found[int(name)] = one
    return found


def fitted(leaf: Any, like: Any, requires_grad: bool = False) -> Any:
    if library_of(like) != "torch" or not hasattr(like, "requires_grad"):
        return leaf.requires_grad_(requires_grad)
    if not _is_spread(leaf):
        leaf = leaf.to(like.device)
    if type(like).__name__ == "Parameter":
        return type(like)(leaf, requires_grad=like.requires_grad)
    return leaf.requires_grad_(like.requires_grad)
