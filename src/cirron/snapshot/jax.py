"""Reads trees of JAX arrays: parameters, optimizer states, Equinox modules; and Flax NNX modules.

A tree is a value: a training step returns a new one. A `WatchedTree` therefore stands for it. It
gets the next value when the user watches the tree again, or by calling the user's function. It
keeps no array alive.

On the user's thread, the arrays are copied on their devices, without waiting and without compiling
anything, because the program may donate them to its next step. The worker fetches the copies.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from cirron import errors, guard
from cirron.snapshot import host
from cirron.snapshot.host import Copier, HostCopy, Reader, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import TypeAlias

    from cirron.snapshot.host import Copy

    Leaf: TypeAlias = tuple[str, Any]  # a name, and an array or an NNX module

FUNCTIONS = (FunctionType, MethodType, partial)

# The keys that identify gradients in a watched tree.
GRADIENTS = frozenset(("grad", "grads", "gradients"))

# Why there is no snapshot.
GONE = (
    "the arrays passed to ci.watch() no longer exist. A step does not change JAX arrays but creates"
    " new ones: call ci.watch(state) again as the last line of each epoch, or once with a function,"
    " ci.watch(lambda: state)"
)
NOTHING = "the function passed to ci.watch() returned no arrays, or arrays that were donated"


# -- watched trees ---------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class WatchedTree:
    """Stands for a tree that was passed to `ci.watch`, or that a function of the user returns.

    It has no `__weakref__`, so the taker keeps a strong reference.
    """

    key: Any  # the function, or the names and shapes of the tree
    reason: str  # why there would be no leaves
    get: Callable[[], list[Leaf]]  # the current leaves
    is_taken: bool = False  # in a snapshot, and not watched again since
    has_warned: bool = False

    def find(self) -> list[Leaf]:
        """The leaves; none if they no longer exist."""
        found = self.get()
        return [] if any(is_gone(value) for _, value in found) else found

    def leaves(self) -> list[Leaf]:
        """The same, with one warning if they no longer exist. Does not raise."""
        try:
            found, reason = self.find(), self.reason
        except Exception as error:  # noqa: BLE001  the user's function must not break the loop
            found, reason = [], f"the function passed to ci.watch() raised {error!r}"
        if not found and not self.has_warned:
            self.has_warned = True
            guard.warn("a snapshot was skipped: %s", reason)
        return found

    def is_gone_or(self, leaves: list[Leaf]) -> bool:
        """Whether the tree no longer exists, or has these very leaves."""
        pairs = zip(self.find(), leaves, strict=False)
        return all(value is other for (_, value), (_, other) in pairs)


def hold(model: Any, known: Iterable[Any]) -> Any:
    """A `WatchedTree` for a tree, or for a function that returns one; any other object unchanged.

    `known`: the watched models. A tree replaces an earlier one with the same names and shapes that
    no longer exists or was in a snapshot.
    """
    if isinstance(model, WatchedTree):
        return model
    trees = [one for one in known if isinstance(one, WatchedTree)]
    if isinstance(model, FUNCTIONS):
        return next((one for one in trees if one.key == model), None) or ask_first(model)
    leaves = leaves_of(model)
    if not leaves:
        return model
    if any(isinstance(value, jax.core.Tracer) for _, value in leaves):
        raise errors.InputError(
            "ci.watch() was called inside a function that JAX traces (jit, grad, vmap, scan), where"
            " arrays have no values. Call it outside, with what the function returns"
        )
    key = [
        (name, getattr(value, "shape", None), getattr(value, "dtype", type(value)))
        for name, value in leaves
    ]
    references = [(name, weakref.ref(value)) for name, value in leaves]
    alike = [one for one in trees if one.key == key]
    gone = (one for one in alike if one.is_gone_or(leaves))
    taken = (one for one in alike if one.is_taken)
    tree: WatchedTree = next(chain(gone, taken), None) or named(model)(key, GONE, list)
    tree.get = lambda: [(name, reference()) for name, reference in references]
    tree.is_taken = False
    return tree


def ask_first(function: Any) -> WatchedTree:
    """Calls the function once, so that a wrong one raises right away."""
    try:
        tree = function()
    except Exception as error:  # becomes the cause of ours
        raise errors.InputError(
            "ci.watch() calls the function to get the tree, now and at the end of each epoch, and"
            f" it raised {error!r}. Call ci.watch(lambda: state) once there is a state"
        ) from error
    if not leaves_of(tree):
        raise errors.InputError(
            "ci.watch() takes a function that returns a tree of JAX arrays; this one returned"
            f" {type(tree).__name__}"
        )
    found: WatchedTree = named(tree)(function, NOTHING, lambda: leaves_of(function()))
    return found


def named(tree: Any) -> Any:
    """A subclass with the name of the tree's class, which is the prefix if names collide."""
    return type(type(tree).__name__, (WatchedTree,), {"__slots__": ()})


# -- leaves ----------------------------------------------------------------------------------


def nnx_kinds() -> tuple[Any, ...]:
    """The base class of NNX modules and optimizers, if the program has imported NNX."""
    nnx = sys.modules.get("flax.nnx")
    return () if nnx is None else (getattr(nnx, "Pytree", None) or nnx.Object,)


def leaves_of(tree: Any) -> list[Leaf]:
    """The arrays and NNX modules of a tree with their names."""
    kinds = nnx_kinds()
    try:
        found, _ = tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, kinds))
    except (TypeError, ValueError):  # keys that cannot be sorted, or a node that raises
        return []
    arrays = (jax.Array, np.ndarray, *kinds)
    return [(name_of(path), value) for path, value in found if isinstance(value, arrays)]


def name_of(path: Any) -> str:
    """`params.Dense_0.kernel`, without the `.value` of NNX variables."""
    if path and "flax.nnx" in sys.modules and getattr(path[-1], "name", "") == "value":
        path = path[:-1]
    return keystr(path, simple=True, separator=".")


def expand(leaves: list[Leaf]) -> list[Leaf]:
    """The arrays, including those of NNX modules."""
    kinds = nnx_kinds()
    arrays = []
    for name, value in leaves:
        if isinstance(value, kinds):
            inner = leaves_of(sys.modules["flax.nnx"].state(value))
            arrays += [(f"{name}.{own}" if name else own, array) for own, array in inner]
        else:
            arrays.append((name, value))
    return arrays


def is_gone(value: Any) -> bool:
    """Whether it was donated or deleted, or is no longer referenced."""
    return value is None or (isinstance(value, jax.Array) and value.is_deleted())


class Parts:
    """An array on devices, or the shards of it in this process. NumPy can read it."""

    def __init__(self, parts: list[Any], places: list[Any], shape: list[int]) -> None:
        self.parts = parts
        self.nbytes = sum(part.nbytes for part in parts)
        self._places = places  # the position of each part in an array of this shape
        self.shape = shape

    def replaced(self, copies: Iterator[Any]) -> Parts:
        """The same array, made of copies of its parts."""
        return Parts([next(copies) for _ in self.parts], self._places, self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        with jax.transfer_guard("allow"):
            if len(self.parts) == 1:
                return np.asarray(self.parts[0])
            whole = np.empty(self.shape, self.parts[0].dtype)
            for part, place in zip(self.parts, self._places, strict=True):
                whole[place] = np.asarray(part).reshape(whole[place].shape)
        return whole


def local_box(array: Any) -> Parts:
    """The shards of this process as one array, without replicas.

    If they do not form a box, they are concatenated.
    """
    shards = list({str(one.index): one for one in array.addressable_shards}.values())
    parts = [one.data for one in shards]
    ranges = [
        [side.indices(length)[:2] for side, length in zip(one.index, array.shape, strict=True)]
        for one in shards
    ]
    boxes = np.array(ranges, int).reshape(len(shards), -1, 2)  # shard, axis, first and last
    low, high = boxes[..., 0].min(0), boxes[..., 1].max(0)
    shape = (high - low).tolist()
    places: list[Any] = [tuple(slice(*side) for side in box - low[:, None]) for box in boxes]
    if math.prod(shape) != sum(part.size for part in parts):
        starts = [0, *accumulate(part.size for part in parts)]
        shape, places = [starts[-1]], [slice(*ends) for ends in pairwise(starts)]
    return Parts(parts, places, shape)


# -- reading ---------------------------------------------------------------------------------


class JaxReader(Reader):
    """Reads what `hold` returned."""

    def names(self, model: Any) -> list[str]:
        return [tensor.name for tensor in tensors_of(model, "")]

    def read(self, model: Any, prefix: str, *, only_gradients: bool = False) -> list[Tensor]:
        model.is_taken = True
        return tensors_of(model, prefix)


READER = JaxReader()


def tensors_of(tree: WatchedTree, prefix: str) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    names: set[str] = set()
    for path, array in expand(tree.leaves()):
        head, _, rest = path.partition(".")
        is_gradient = head in GRADIENTS
        name = prefix + (f"{rest}.grad" if is_gradient and rest else path)
        known = found.get(id(array))
        if known is not None:
            known.attrs.setdefault("shared_with", []).append(name)
            continue
        while name in names:  # {"a.b": ...} beside {"a": {"b": ...}}
            name += "_"
        names.add(name)
        found[id(array)] = describe(array, name, {}, is_gradient=is_gradient)
    return list(found.values())


def describe(array: Any, name: str, attrs: dict[str, Any], *, is_gradient: bool = False) -> Tensor:
    found = Tensor(name, is_gradient, list(array.shape), str(array.dtype), attrs, array=array)
    if isinstance(array, jax.Array):  # else NumPy's, which the host's copier copies
        found.array, found.copier = Parts([array], [()], found.shape), COPIER
        if len(array.sharding.device_set) > 1:
            attrs["sharding"] = str(getattr(array.sharding, "spec", array.sharding))
            if not array.is_fully_addressable:
                attrs["shard_of"] = found.shape
                found.array = local_box(array)
                found.shape = found.array.shape
    reason = why_unmeasured(array.dtype)
    if reason is not None:
        attrs["unmeasured"] = reason
        found.array = found.copier = None
    elif np.issubdtype(array.dtype, np.complexfloating):
        attrs["parts"] = host.PARTS
    return found


def why_unmeasured(dtype: Any) -> str | None:
    """Why values of a type have no statistics; None if they have."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return "a random key is not a number"
    if dtype == jax.dtypes.float0:
        return "the gradient of an integer has no values"
    # To NumPy, durations are integers.
    if dtype.kind == "m" or not (dtype.kind == "b" or jnp.issubdtype(dtype, np.number)):
        return "its values are not numbers"  # but text, dates, objects or records
    return None


# -- copying ---------------------------------------------------------------------------------


class JaxCopier(Copier):
    """Copies arrays on their devices, because the program may donate them to the next step."""

    def copy(self, tensors: list[Tensor], *, raw: bool, in_step: bool) -> list[Copy] | None:
        arrays = [tensor.take_array() for tensor in tensors]
        parts = [part for array in arrays for part in array.parts]
        if not has_room(parts):
            return None
        put = getattr(jax.device_put, "cirron_original", jax.device_put)  # without a span
        with jax.transfer_guard("allow"):
            copies = iter(put(parts, may_alias=False))
        return [HostCopy(tensors, [array.replaced(copies) for array in arrays])]


COPIER = JaxCopier()


def has_room(parts: list[Any]) -> bool:
    """Whether a copy fits in the free memory of the host and of each device."""
    sizes: dict[Any, int] = defaultdict(int)  # None: the host
    for part in parts:
        shard_bytes = math.prod(part.sharding.shard_shape(part.shape)) * part.dtype.itemsize
        for device in part.sharding.addressable_devices:
            sizes[None if device.platform == "cpu" else device] += shard_bytes
    on_host = sizes.pop(None, 0)
    return host.has_room(on_host) and all(size <= free_bytes(on) for on, size in sizes.items())


def free_bytes(device: Any) -> float:
    known = device.memory_stats() or {}
    if "bytes_limit" not in known:
        return math.inf
    return float(known["bytes_limit"] - known["bytes_in_use"]) * host.PART
