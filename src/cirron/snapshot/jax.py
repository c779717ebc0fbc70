"""Reads trees of JAX arrays: parameters, optimizer states, Equinox modules; and Flax NNX modules.

A tree is a value: a training step returns another one. What is watched is therefore `Held`, which
stands for the tree and is given the next one when the user watches it again, or asks a function.
It keeps no array alive: the program's memory is not ours to hold.

On the user's thread the arrays are copied on their devices, without waiting and without compiling
anything: the program may donate them to its next step. The worker fetches the copies.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import defaultdict
from functools import partial
from itertools import accumulate, pairwise
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from cirron import errors, guard
from cirron.snapshot import memory, stats
from cirron.snapshot.base import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from cirron.snapshot.stats import Summary

FUNCTIONS = (FunctionType, MethodType, partial)

# A tree of gradients is told by the name it has in the tree that is watched.
GRADIENTS = frozenset(("grad", "grads", "gradients"))

# What a safetensors file can hold, by NumPy's names; the rest is stored as a wider type.
STORED = frozenset(
    (
        *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
        *("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        "complex64",
    )
)

# What any host has; asking for less than this what is free would cost more than the copy.
SMALL_BYTES = 16 * 2**20


class Leaf(NamedTuple):
    """An array of a tree, or an NNX module that has arrays of its own."""

    name: str
    value: Any


# -- what is watched -------------------------------------------------------------------------


class Held:
    """Stands for a tree. Without `__weakref__`, so that whoever watches it keeps it."""

    __slots__ = ("is_taken",)
    is_taken: bool  # it is in a snapshot, and was not given again since

    def leaves(self) -> list[Leaf] | None:
        """What the tree holds now; None if it is gone."""
        raise NotImplementedError


class Given(Held):
    """A tree that the user gave."""

    __slots__ = ("_known", "_references", "_was_missed")

    def __init__(self, leaves: list[Leaf]) -> None:
        self.give(leaves)
        self._was_missed = False

    def give(self, leaves: list[Leaf]) -> None:
        """Makes this the tree."""
        self._references = [(name, weakref.ref(value)) for name, value in leaves]
        self._known = outline(leaves)
        self.is_taken = False

    def can_be(self, leaves: list[Leaf], *, even_taken: bool) -> bool:
        """Whether these are the next value of the tree, or the same."""
        if self._known != outline(leaves):
            return False
        found = self._found()
        is_same = found is not None and all(
            one.value is other.value for one, other in zip(found, leaves, strict=True)
        )
        return found is None or is_same or (even_taken and self.is_taken)

    def leaves(self) -> list[Leaf] | None:
        found = self._found()
        if found is None and not self._was_missed:
            self._was_missed = True
            guard.warn(
                "a snapshot was left out: the arrays that ci.watch() was given are gone. JAX arrays"
                " do not change, a step makes new ones: call ci.watch(state) again as the last"
                " line of each epoch, or once with a function, ci.watch(lambda: state)"
            )
        return found

    def _found(self) -> list[Leaf] | None:
        found = [Leaf(name, reference()) for name, reference in self._references]
        return (
            None if any(leaf.value is None or is_deleted(leaf.value) for leaf in found) else found
        )


class Asked(Held):
    """A tree that a function of the user's returns."""

    __slots__ = ("_was_missed", "function")

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.is_taken = self._was_missed = False

    def leaves(self) -> list[Leaf] | None:
        try:
            found = leaves_of(self.function())
        except Exception as error:  # noqa: BLE001  protects the loop from the user's function
            found, reason = None, f"raised {error!r}"
        else:
            reason = "returned no arrays, or arrays that were donated"
            if found is not None and any(is_deleted(leaf.value) for leaf in found):
                found = None
        if found is None and not self._was_missed:
            self._was_missed = True
            guard.warn("a snapshot was left out: the function given to ci.watch() %s", reason)
        return found


def hold(model: Any, known: Iterable[Any]) -> Any:
    """What stands for a tree, or for a function that returns one; anything else as it is.

    `known` is what is watched already: a tree takes the place of an earlier one that has the same
    names and shapes, and is gone or was in a snapshot.
    """
    if isinstance(model, Held):
        return model
    if isinstance(model, FUNCTIONS):
        known_functions = (one for one in known if isinstance(one, Asked))
        same = next((one for one in known_functions if one.function == model), None)
        return ask_first(model) if same is None else same
    leaves = leaves_of(model)
    if leaves is None:
        return model
    if any(isinstance(leaf.value, jax.core.Tracer) for leaf in leaves):
        raise errors.InputError(
            "ci.watch() was called inside a function that JAX traces (jit, grad, vmap, scan), where"
            " arrays have no values. Call it outside, with what the function returns"
        )
    given = [one for one in known if isinstance(one, Given)]
    for even_taken in (False, True):  # one that is gone goes first
        for one in given:
            if one.can_be(leaves, even_taken=even_taken):
                one.give(leaves)
                return one
    return named(Given, model)(leaves)


def ask_first(function: Any) -> Asked:
    """Asks the function once, so that a wrong one is told at once."""
    try:
        tree = function()
    except Exception as error:  # the user's own, told as the reason of ours
        raise errors.InputError(
            f"ci.watch() asks the function that it is given for the tree, now and at the end of"
            f" each epoch, and it raised {error!r}. Call ci.watch(lambda: state) once there is a"
            " state"
        ) from error
    if leaves_of(tree) is None:
        raise errors.InputError(
            "ci.watch() takes a function that returns a tree of JAX arrays; this one returned"
            f" {type(tree).__name__}"
        )
    asked: Asked = named(Asked, tree)(function)
    return asked


def named(kind: Any, tree: Any) -> Any:
    """The class under the name of the tree's: what is put before the names of a second one."""
    return type(type(tree).__name__, (kind,), {"__slots__": ()})


def outline(leaves: list[Leaf]) -> list[tuple[Any, ...]]:
    return [
        (name, getattr(value, "shape", None), getattr(value, "dtype", type(value)))
        for name, value in leaves
    ]


# -- what a tree holds -----------------------------------------------------------------------


def nnx_kinds() -> tuple[Any, ...]:
    """The base of NNX's modules and optimizers, if the program has imported it."""
    nnx = sys.modules.get("flax.nnx")
    return () if nnx is None else (getattr(nnx, "Pytree", None) or nnx.Object,)


def leaves_of(tree: Any) -> list[Leaf] | None:
    """The arrays and NNX modules of a tree, with the names that users know; None if it has none."""
    kinds = nnx_kinds()
    try:
        found, _ = tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, kinds))
    except (TypeError, ValueError):  # keys that cannot be sorted, or a node that objects
        return None
    leaves = [
        Leaf(name_of(path), value)
        for path, value in found
        if isinstance(value, (jax.Array, np.ndarray, *kinds))
    ]
    return leaves or None


def name_of(path: Any) -> str:
    """`params.Dense_0.kernel`; an NNX variable's own `.value` is left out."""
    if path and "flax.nnx" in sys.modules and getattr(path[-1], "name", "") == "value":
        path = path[:-1]
    return keystr(path, simple=True, separator=".")


def expand(leaves: list[Leaf]) -> list[Leaf]:
    """The arrays, those inside of modules too."""
    kinds = nnx_kinds()
    arrays = []
    for name, value in leaves:
        if isinstance(value, kinds):
            inner = leaves_of(sys.modules["flax.nnx"].state(value)) or []
            arrays += [Leaf(f"{name}.{own}" if name else own, array) for own, array in inner]
        else:
            arrays.append(Leaf(name, value))
    return arrays


def is_deleted(value: Any) -> bool:
    """Whether it was donated, or deleted by hand."""
    return isinstance(value, jax.Array) and value.is_deleted()


class Source(NamedTuple):
    """An array as it is found, and what of it is measured here."""

    tensor: Tensor
    parts: list[Any]  # one, or the shards of this process; none if it has no numbers
    places: list[Any]  # where they are in the array of `tensor.shape`, if several


def sources_of(leaves: list[Leaf], prefix: str) -> list[Source]:
    found: dict[int, Source] = {}
    names: set[str] = set()
    for leaf in expand(leaves):
        head, _, rest = leaf.name.partition(".")
        is_gradient = head in GRADIENTS
        name = prefix + (f"{rest}.grad" if is_gradient and rest else leaf.name)
        known = found.get(id(leaf.value))
        if known is not None:
            known.tensor.attrs.setdefault("shared_with", []).append(name)
            continue
        while name in names:  # {"a.b": ...} beside {"a": {"b": ...}}
            name += "_"
        names.add(name)
        found[id(leaf.value)] = as_source(leaf.value, name, is_gradient=is_gradient)
    return list(found.values())


def as_source(array: Any, name: str, *, is_gradient: bool) -> Source:
    attrs: dict[str, Any] = {}
    shape = list(array.shape)
    parts: list[Any] = [array]
    places: list[Any] = [()]
    if isinstance(array, jax.Array) and len(array.sharding.device_set) > 1:
        attrs["sharding"] = str(getattr(array.sharding, "spec", array.sharding))
        if not array.is_fully_addressable:
            attrs["shard_of"] = shape
            shape, parts, places = local_box(array)
    tensor = Tensor(name, is_gradient, shape, str(array.dtype), attrs)
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        attrs["unmeasured"] = "a random key is no number"
        return Source(tensor, [], [])
    if array.dtype == jax.dtypes.float0:
        attrs["unmeasured"] = "the gradient of an integer has no values"
        return Source(tensor, [], [])
    if np.issubdtype(array.dtype, np.complexfloating):
        attrs["parts"] = "statistics are over the real and the imaginary parts"
    return Source(tensor, parts, places)


def local_box(array: Any) -> tuple[list[int], list[Any], list[Any]]:
    """The shards of this process: the shape of all together, each, and where it is in that shape.

    Copies count once. Shards that do not make a box lie one after the other.
    """
    shards = list({str(one.index): one for one in array.addressable_shards}.values())
    parts = [one.data for one in shards]
    ranges = [
        [side.indices(length)[:2] for side, length in zip(one.index, array.shape, strict=True)]
        for one in shards
    ]
    low = [min(first for first, _ in sides) for sides in zip(*ranges, strict=True)]
    high = [max(last for _, last in sides) for sides in zip(*ranges, strict=True)]
    shape = [last - first for first, last in zip(low, high, strict=True)]
    if math.prod(shape) == sum(part.size for part in parts):
        return (
            shape,
            parts,
            [
                tuple(slice(a - base, b - base) for (a, b), base in zip(sides, low, strict=True))
                for sides in ranges
            ],
        )
    starts = [0, *accumulate(part.size for part in parts)]
    return [starts[-1]], parts, [slice(*ends) for ends in pairwise(starts)]


# -- reading ---------------------------------------------------------------------------------


class JaxReader:
    """Reads what `hold` returned."""

    def unwrap(self, model: Held) -> Held:
        return model

    def names(self, model: Held) -> list[str]:
        return [source.tensor.name for source in sources_of(model.leaves() or [], "")]

    def prepare(self, models: list[tuple[str, Held]]) -> Callable[[], None]:
        return lambda: None  # a device's memory is there

    def find(self, models: list[tuple[str, Held]]) -> JaxFound:
        sources = []
        for prefix, model in models:
            leaves = model.leaves()
            if leaves is not None:
                model.is_taken = True
                sources += sources_of(leaves, prefix)
        return JaxFound(sources)


class JaxFound:
    """The arrays of all trees, at the boundary."""

    def __init__(self, sources: list[Source]) -> None:
        self._sources = sources
        self.size_bytes = sum(part.nbytes for source in sources for part in source.parts)

    def copy(self, *, raw: bool) -> JaxCopy | None:
        parts = [part for source in self._sources for part in source.parts]
        if not has_room(parts):
            return None
        put = getattr(jax.device_put, "cirron_original", jax.device_put)  # the hook sees the rest
        on_device = [part for part in parts if isinstance(part, jax.Array)]
        with jax.transfer_guard("allow"):
            copies = iter(put(on_device, may_alias=False))
        # NumPy's arrays are the user's to change.
        taken = [next(copies) if isinstance(part, jax.Array) else part.copy() for part in parts]
        return JaxCopy(self._sources, taken, self.size_bytes)


class JaxCopy:
    """The copies; the program's own arrays are let go."""

    def __init__(self, sources: list[Source], parts: list[Any], size_bytes: int) -> None:
        self.tensors = [source.tensor for source in sources]
        self.size_bytes = size_bytes
        self._places = [source.places for source in sources]
        rest = iter(parts)
        self._parts = [[next(rest) for _ in source.parts] for source in sources]

    def summarize(self) -> list[Summary]:
        found = []
        for number in range(len(self.tensors)):
            found.append(summarize(self._values(number)))
            self._parts[number] = []  # as soon as it can be
        return found

    def save(self, path: Path, *, gradients: bool) -> None:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        values = {
            tensor.name: as_stored(self._values(number))
            for number, tensor in enumerate(self.tensors)
            if tensor.is_gradient is gradients and tensor.has_values
        }
        try:
            save_file(values, path)
        except SafetensorError as error:  # what it says of a disk, too
            raise OSError(str(error)) from error

    def release(self) -> None:
        self._parts = [[] for _ in self.tensors]

    def _values(self, number: int) -> Any:
        """The array on the host, in the shape of its tensor. Waits for its device."""
        parts, places = self._parts[number], self._places[number]
        if not parts:
            return np.zeros(0)
        with jax.transfer_guard("allow"):
            if len(parts) == 1:
                return np.asarray(parts[0])
            whole = np.empty(self.tensors[number].shape, parts[0].dtype)
            for part, place in zip(parts, places, strict=True):
                whole[place] = np.asarray(part).reshape(whole[place].shape)
        return whole


def has_room(parts: list[Any]) -> bool:
    """Whether a copy fits in what is free, on the host and on each device."""
    sizes: dict[Any, int] = defaultdict(int)  # None: the host
    for part in parts:
        if isinstance(part, jax.Array):
            shard_bytes = math.prod(part.sharding.shard_shape(part.shape)) * part.dtype.itemsize
            devices: Any = part.sharding.addressable_devices
            for device in devices:
                sizes[None if device.platform == "cpu" else device] += shard_bytes
        else:
            sizes[None] += part.nbytes
    return all(size <= free_bytes(place, size) for place, size in sizes.items())


def free_bytes(device: Any, wanted: int) -> float:
    if device is None:
        free = None if wanted <= SMALL_BYTES else memory.available_bytes()
    else:
        known = device.memory_stats() or {}
        free = known["bytes_limit"] - known["bytes_in_use"] if "bytes_limit" in known else None
    return math.inf if free is None else free * memory.PART


# -- on the worker ---------------------------------------------------------------------------


def summarize(values: Any) -> Summary:
    flat = values.reshape(-1)
    if flat.dtype.kind == "c":
        return stats.summarize(flat.view(flat.real.dtype))
    is_own = flat.dtype.isbuiltin == 1  # else of ml_dtypes: bfloat16, the eight-bit floats
    return stats.summarize(flat, None if is_own else as_float32)


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
