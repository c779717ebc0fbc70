"""Reads checkpoints of `torch.distributed.checkpoint` without unpickling.

torch plans which parts of which files each process reads. Its index is a pickle, which is read as
data here and rebuilt; each part must be a plain tensor.
"""

from __future__ import annotations

import io
from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any

from ciclo.checkpoints import inert
from ciclo.checkpoints.manifest import HOW_TO_TRUST
from ciclo.checkpoints.torch import WHAT, load
from ciclo.errors import need

if TYPE_CHECKING:
    from ciclo.checkpoints.manifest import Manifest

INDEX = ".metadata"


class Reader:
    """A torch `StorageReader` for the tensors in `wanted`: shape and type by name."""

    def __init__(self, manifest: Manifest, folder: str, wanted: dict[str, tuple[Any, Any]]) -> None:
        self._manifest = manifest
        self._folder = folder
        self._places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
        content = manifest.read(f"{folder}/{INDEX}")
        try:
            index = _fields(inert.read(content)[0], "Metadata")
            self._find_places(index["storage_data"], wanted)
            found = dict(inert.of(index["state_dict_metadata"], inert.Pairs))
            tensors = {name: self._tensor(found[name], name, *wanted[name]) for name in wanted}
        except Exception as error:  # any error on an index of another form
            raise manifest.damaged(
                f"{folder}/{INDEX} is not an index of tensors as torch writes it ({error});"
                f" {HOW_TO_TRUST}"
            ) from error
        self._metadata = _torch().Metadata(tensors)

    def _find_places(self, pairs: inert.Pairs, wanted: dict[str, Any]) -> None:
        lengths: Counter[str] = Counter()
        for key, value in pairs:
            index, info = _fields(key, "MetadataIndex"), _fields(value, "_StorageInfo")
            if (tensor := inert.of(index["fqn"], str)) not in wanted:
                continue
            if info.get("transform_descriptors"):
                raise ValueError(f"tensor {tensor} is encoded")
            name = f"{self._folder}/{inert.of(info['relative_path'], str)}"
            offset, length = _counts((info["offset"], info["length"]))
            self._places[tensor, _size(index["offset"])] = name, offset, length
            lengths[name] += length
        for name, length in lengths.items():
            if length > self._manifest.files[name]:  # else a few bytes could allocate all memory
                raise ValueError(f"{name} is too short for its tensors")

    def _tensor(self, value: Any, name: str, shape: Any, dtype: Any) -> Any:
        about = _fields(value, "TensorStorageMetadata")
        chunks = []
        for one in about["chunks"]:
            chunk = _fields(one, "ChunkStorageMetadata")
            offsets, sizes = _size(chunk["offsets"]), _size(chunk["sizes"])
            ends = [a + b for a, b in zip(offsets, sizes, strict=True)]
            if any(end > length for end, length in zip(ends, shape, strict=True)):
                raise ValueError(f"a part of tensor {name} is outside of it")
            if prod(sizes) * dtype.itemsize > self._places[name, offsets][2]:
                raise ValueError(f"a part of tensor {name} is larger than its place")
            chunks.append((offsets, sizes))
        is_whole = sum(prod(sizes) for _, sizes in chunks) == prod(shape)
        is_same = about["properties"].state[0].name == str(dtype)
        if not (is_whole and is_same) or _size(about["size"]) != tuple(shape):
            raise ValueError(f"tensor {name} is not the one that is wanted")
        made, size = _torch(), need("torch", WHAT).Size
        parts = [made.ChunkStorageMetadata(size(start), size(sizes)) for start, sizes in chunks]
        return made.TensorStorageMetadata(made.TensorProperties(dtype), size(shape), parts)

    # -- what torch calls ----------------------------------------------------------------------

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return self._metadata

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    def read_data(self, plan: Any, planner: Any) -> Any:
        for item in plan.items:
            at = item.storage_index
            name, offset, length = self._places[at.fqn, tuple(at.offset or ())]
            with self._manifest.open(name) as file:
                file.seek(offset)
                part = load(io.BytesIO(file.read(length)), is_trusted=False)
            for dim, start in enumerate(item.storage_offsets):
                part = part.narrow(dim, start, item.lengths[dim])
            target = planner.resolve_tensor(item).detach()
            if part.shape != target.shape or part.dtype != target.dtype:
                raise self._manifest.damaged(f"tensor {at.fqn} in {name} has another shape or type")
            target.copy_(part)
            planner.commit_tensor(item, target)
        done = need("torch.futures", WHAT).Future()
        done.set_result(None)
        return done


def _torch() -> Any:
    return need("torch.distributed.checkpoint.metadata", WHAT)


def _fields(value: Any, kind: str) -> dict[Any, Any]:
    """The state that a pickle sets on an object of this class."""
    if type(value) is not inert.Call or value.name.rpartition(".")[2] != kind:
        raise ValueError(f"a {kind} is missing")
    return dict(inert.of(value.state, inert.Pairs))


def _size(value: Any) -> tuple[int, ...]:
    """The numbers in a `torch.Size`."""
    return _counts(value.args[0])


def _counts(value: Any) -> tuple[int, ...]:
    if any(type(one) is not int or one < 0 for one in value):
        raise ValueError("a size is not a number")
    return tuple(value)
