"""Torch tensors: a list saved by `torch.save`, loaded with `weights_only`.

Before torch loads a file, its pickle is checked as data: it may only create plain tensors from the
content of the file.

Tensors that are sharded over processes (DTensor, for FSDP and tensor parallelism) are written by
`torch.distributed.checkpoint`, each process its part. That communicates, so it is not done in the
background. `spread.py` reads them.
"""

from __future__ import annotations

import re
import sys
import warnings
from typing import TYPE_CHECKING, Any, BinaryIO

from ciclo.checkpoints import inert
from ciclo.checkpoints.manifest import HOW_TO_TRUST
from ciclo.device_values import library_of
from ciclo.errors import CheckpointError, need

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ciclo.checkpoints.manifest import Manifest

WHAT = "a checkpoint with tensors"
REBUILDS = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
# The element size of each storage type.
STORAGES = re.compile(r"torch\.(?:storage\.)?(\w+)Storage")
SIZES = (
    dict.fromkeys(("Untyped", "Byte", "Char", "Bool"), 1)
    | dict.fromkeys(("Short", "Half", "BFloat16"), 2)
    | dict.fromkeys(("Int", "Float"), 4)
    | dict.fromkeys(("Long", "Double", "ComplexFloat"), 8)
    | {"ComplexDouble": 16}
)


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
    """The tensor to write; for a sharded one, its shape, type and placements."""
    if _is_spread(leaf):
        dims = [place.dim if place.is_shard() else None for place in leaf.placements]
        return list(leaf.shape), leaf.dtype, dims
    # Saving a view would save its whole storage; device memory changes in the next step.
    elements_behind = leaf.untyped_storage().nbytes() // max(leaf.element_size(), 1)
    if is_copied or leaf.device.type != "cpu" or leaf.numel() < elements_behind:
        return leaf.detach().to("cpu", copy=True)
    return leaf.detach()


def read(
    manifest: Manifest, name: str, saved: list[str], likes: dict[int, Any], is_trusted: bool
) -> list[Any]:
    torch = need("torch", WHAT)
    manifest.check_memory(manifest.files.get(name, 0), name)
    with manifest.open(name) as file:
        found: list[Any] = load(file, is_trusted)
    for one in () if is_trusted else found:
        # An expanded tensor, larger than its storage, is never saved by us.
        is_whole = isinstance(one, torch.Tensor)
        if is_whole and one.numel() * one.element_size() > one.untyped_storage().nbytes():
            raise manifest.damaged(f"a tensor in {name} is larger than its memory")
    spread = {str(i): one for i, one in enumerate(found) if isinstance(one, tuple)}
    for i, one in _read_spread(manifest, f"{name}.spread", spread, likes, is_trusted).items():
        found[int(i)] = one
    return found


def _read_spread(
    manifest: Manifest, folder: str, spread: dict[str, Any], likes: dict[int, Any], is_trusted: bool
) -> dict[str, Any]:
    if not spread:
        return {}
    torch = need("torch", WHAT)
    checkpoints = need("torch.distributed.checkpoint", WHAT)
    source: dict[str, Any]
    if is_trusted:
        source = {"checkpoint_id": manifest.folder(folder)}
    else:
        from ciclo.checkpoints.spread import Reader

        wanted = {name: (shape, dtype) for name, (shape, dtype, _) in spread.items()}
        source = {"storage_reader": Reader(manifest, folder, wanted)}
    meshes = [like.device_mesh for like in likes.values() if _is_spread(like)]
    tensor = need("torch.distributed.tensor", WHAT) if meshes else None
    targets = {}
    for name, (shape, dtype, dims) in spread.items():
        if tensor is None:  # this run does not shard
            targets[name] = torch.empty(shape, dtype=dtype)
            continue
        places = [tensor.Replicate() if dim is None else tensor.Shard(dim) for dim in dims]
        mesh = getattr(likes.get(int(name)), "device_mesh", meshes[0])
        targets[name] = tensor.zeros(shape, dtype=dtype, device_mesh=mesh, placements=places)
    with warnings.catch_warnings():
        # A single process may load.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            checkpoints.load(targets, **source)
        except checkpoints.CheckpointException as error:  # a BaseException, with all tracebacks
            reasons = {str(reason) for reason, _ in error.failures.values()}
            raise manifest.damaged("; ".join(sorted(reasons))) from error
    return targets


def load(file: BinaryIO, is_trusted: bool) -> Any:
    """Loads a file of `torch.save`; if not trusted, only plain tensors."""
    if not is_trusted:
        try:
            _check_archive(file)
        except Exception as error:  # any error of ZipFile or pickletools on hostile bytes
            raise CheckpointError(
                f"a file of tensors is not one that torch writes ({error}); {HOW_TO_TRUST}"
            ) from error
    file.seek(0)
    return need("torch", WHAT).load(file, map_location="cpu", weights_only=not is_trusted)


def _check_archive(file: BinaryIO) -> None:
    """Checks the calls of the pickle, and the sizes, which torch before 2.10 does not check."""
    from zipfile import ZIP_STORED, ZipFile

    found = ZipFile(file).infolist()
    entries = {one.filename.partition("/")[2]: one for one in found}
    sizes = {name: one.file_size for name, one in entries.items()}
    if len(entries) < len(found) or any(one.compress_type != ZIP_STORED for one in found):
        raise ValueError("an entry is duplicated or compressed")
    if sum(sizes.values()) > file.seek(0, 2):
        raise ValueError("it is truncated")
    # `ZipFile.read` would refuse a file without checksums.
    file.seek(entries["data.pkl"].header_offset + 26)
    to_skip = sum(int.from_bytes(file.read(2), "little") for _ in range(2))
    file.seek(to_skip, 1)
    for call in inert.read(file.read(sizes["data.pkl"]))[1]:
        if call.name == inert.STORED:
            _, storage, key, _, count = call.args[0]
            kind = STORAGES.fullmatch(storage.name)
            is_plain = kind is not None and sizes[f"data/{key}"] == count * SIZES[kind[1]]
        else:
            is_empty = call.name == "collections.OrderedDict" and call.args == ()
            is_plain = (is_empty or call.name in REBUILDS) and call.state is None
        if not is_plain:
            raise ValueError(f"it calls {call.name}")


def fitted(leaf: Any, like: Any, requires_grad: bool = False) -> Any:
    if library_of(like) != "torch" or not hasattr(like, "requires_grad"):
        return leaf.requires_grad_(requires_grad)
    if not _is_spread(leaf):
        leaf = leaf.to(like.device)
    if type(like).__name__ == "Parameter":
        return type(like)(leaf, requires_grad=like.requires_grad)
    return leaf.requires_grad_(like.requires_grad)
