"""JAX arrays, written by Orbax (by every process if sharded), and JAX containers."""

from __future__ import annotations

import sys
from math import prod
from typing import TYPE_CHECKING, Any

from ciclo.device_values import describe, library_of
from ciclo.errors import need

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ciclo.checkpoints.manifest import Manifest

WHAT = "a checkpoint with JAX arrays"


def owns(value: Any) -> bool:
    return library_of(value) in ("jax", "jaxlib") and hasattr(value, "is_deleted")


def is_abstract(value: Any) -> bool:
    return type(value).__name__ == "ShapeDtypeStruct"


def traits(value: Any) -> tuple[Any, ...]:
    return (True,) if getattr(value, "weak_type", False) and not value.shape else ()


def is_shared(leaves: list[Any]) -> bool:
    return bool(sys.modules["jax"].process_count() > 1)


def begin(path: Path, leaves: list[Any], is_copied: bool) -> Callable[[], None]:
    """Orbax copies the values before it returns, so the next step may donate the arrays."""
    orbax = need("orbax.checkpoint", WHAT, "orbax-checkpoint")
    writer = orbax.AsyncCheckpointer(orbax.StandardCheckpointHandler())
    writer.save(path, args=orbax.args.StandardSave({str(i): one for i, one in enumerate(leaves)}))
    return lambda: writer.close()  # waits, and raises errors


def read(
    manifest: Manifest, name: str, saved: list[str], likes: dict[int, Any], is_trusted: bool
) -> list[Any]:
    jax = need("jax", WHAT)
    orbax = need("orbax.checkpoint", WHAT, "orbax-checkpoint")
    path = manifest.folder(name)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    targets, needed = {}, 0
    with orbax.Checkpointer(orbax.StandardCheckpointHandler()) as reader:
        tree = reader.metadata(path).item_metadata.tree
        for i, described in enumerate(saved):
            one = tree[str(i)]
            # Orbax stores the data of a random key, which has another shape.
            if describe(one) != described and not described.startswith("key<"):
                raise manifest.damaged(f"{name} has {describe(one)} in place of {described}")
            sharding = getattr(likes.get(i), "sharding", None)
            # A few bytes can describe a huge array of zeros. Arrays with a `like` are not counted:
            # they may be sharded over many machines.
            chunk = getattr(one.storage, "chunk_shape", None) or ()
            lengths = (one.shape if sharding is None else (), chunk)
            needed += max(map(prod, lengths)) * one.dtype.itemsize
            targets[str(i)] = jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding or here)
        manifest.check_memory(needed, name)
        arrays = reader.restore(path, args=orbax.args.StandardRestore(targets))
    return [arrays[str(i)] for i in range(len(arrays))]


def fitted(leaf: Any, like: Any, is_weak: bool = False) -> Any:
    if is_weak:  # from a Python number, so that it is weakly typed again
        return sys.modules["jax.numpy"].asarray(leaf.item())
    if library_of(like) == "numpy":
        return need("numpy", WHAT).array(leaf)
    return leaf


# -- containers ----------------------------------------------------------------------------------


def children(value: Any) -> dict[Any, Any] | None:
    """The direct children of a JAX container by key; None if it is not a container."""
    jax = sys.modules.get("jax")
    is_leaf = value is None or owns(value) or is_abstract(value)
    if is_leaf or jax is None or not hasattr(jax, "tree_util"):
        return None
    if jax.tree_util.default_registry.flatten_one_level(value) is None:
        return None
    found, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda one: one is not value)
    return {jax.tree_util.keystr(path): child for path, child in found}


def with_children(like: Any, found: list[Any]) -> Any:
    """`like` with other children."""
    jax = sys.modules["jax"]
    structure = jax.tree_util.tree_structure(like, is_leaf=lambda one: one is not like)
    return jax.tree_util.tree_unflatten(structure, found)
