"""Strategies: where a state and its batches are placed, and how a step is compiled.

A strategy is a value: a mesh of devices, rules for sharding the state, and the mesh axes that shard
a batch. A step is compiled for all devices at once, and JAX's partitioner inserts the
communication. Several processes form one mesh: each provides the rows for its own devices.
"""

from __future__ import annotations

import inspect
import itertools
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed  # there is no public API for the coordination service
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ciclo.device_values import describe
from ciclo.errors import CicloError, check

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    Rule: TypeAlias = Callable[[str, Any], PartitionSpec]
    Devices: TypeAlias = int | Sequence[jax.Device] | None

__all__ = ["JIT", "DataParallel", "Eager", "Strategy", "get_strategy", "register_strategy"]

# Smaller parameters are not sharded: gathering costs more than it saves.
MIN_SIZE = 1024
# How long a process waits for the others if the size of its batch changes.
AGREE_S = 60


# Methods of 0.1.9 that a step does not call, and what to override instead.
INSTEAD = {
    "__call__": "compile(self, function, is_donating)",
    "from_host": "place(self, tree)",
    "to_host": "place(self, tree)",
    "lift_batch": "place_batch(self, batch, name)",
    "lift_key": "place(self, tree)",
    "lift_batch_size": "place_batch(self, batch, name)",
}


class Placed(NamedTuple):
    """A batch on its devices. `mask` is True for real rows, if the batch was padded."""

    batch: Any
    mask: Any = None
    is_real: Callable[[], Any] | None = None  # the mask of all processes, on the host
    other: Callable[[], Any] | None = None  # the batch with other padding


@dataclass(frozen=True, eq=False, kw_only=True)
class Strategy:
    """How a state is placed and a step is compiled; see also `ciclo.get_strategy`.

    mesh: the devices; None for one device
    rules: how the state is sharded: a function of path and array that returns a PartitionSpec, or
        pairs of a regular expression for the path and a PartitionSpec; the first match counts.
        Without a match, an array is replicated
    batch_axes: the mesh axes that shard the rows of a batch
    uneven: whether to "refuse" or "pad" a batch whose rows do not divide
    donates: whether a train step donates its state

    >>> mesh = jax.make_mesh((4, 2), ("data", "model"))
    >>> ciclo.Strategy(name="wide", mesh=mesh, rules=[("kernel", jax.P(None, "model"))])
    """

    name: str = "custom"
    mesh: Mesh | None = None
    rules: Rule | Sequence[tuple[str, PartitionSpec]] = ()
    batch_axes: tuple[str, ...] | str = ("data",)
    uneven: str = "refuse"
    donates: bool = False
    is_compiled: bool = True

    def __post_init__(self) -> None:
        check("uneven", self.uneven, lambda one: one in ("refuse", "pad"), '"refuse" or "pad"')
        if not callable(self.rules):
            allowed = "a function, or pairs of a pattern and a PartitionSpec"
            check("rules", self.rules, lambda rules: all(len(one) == 2 for one in rules), allowed)
        if isinstance(self.batch_axes, str):
            object.__setattr__(self, "batch_axes", (self.batch_axes,))
        if self.mesh is None:
            return
        check("mesh", self.mesh, Mesh, "jax.make_mesh(...), or None")
        # Automatic axes: with explicit ones, user code would have to specify shardings.
        automatic = Mesh(self.mesh.devices, self.mesh.axis_names)
        object.__setattr__(self, "mesh", automatic)
        names = self.mesh.axis_names
        allowed = f"axes of the mesh, which are {names!r}"
        check("batch_axes", self.batch_axes, lambda axes: set(axes) <= {*names}, allowed)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in vars(cls).keys() & INSTEAD.keys():
            raise CicloError(
                f"{cls.__name__}.{name} is never called by a step; override this instead:\n"
                f"    def {INSTEAD[name]}: ..."
            )

    # -- what a class of your own may change ---------------------------------------------------

    def handle_grads(self, grads: Any) -> Any:
        """In a train step: the gradients for the optimizer, over all devices."""
        return grads

    def handle_metric(self, metric: Any) -> Any:
        """In a step: a stateful metric of this batch, over all devices."""
        return metric

    def handle_batch_stats(self, batch_stats: Any) -> Any:
        """In a train step: the new non-trainable variables."""
        return batch_stats

    # -- names of Ciclo 0.1.9, for loops that place things by hand -----------------------------

    def from_host(self, tree: Any) -> Any:
        """`place`."""
        return self.place(tree)

    def to_host(self, tree: Any) -> Any:
        """The tree on one device."""
        if self.mesh is None:
            return tree
        return jax.device_put(tree, jax.local_devices()[0])

    def lift_batch(self, batch: Any) -> Any:
        """`place_batch`; no device axis is added."""
        return self.place_batch(batch).batch

    def lift_key(self, key: Any) -> Any:
        """The key unchanged: all devices run one program."""
        return key

    def lift_batch_size(self, batch_size: int) -> int:
        """The size unchanged: a step sees the whole batch."""
        return batch_size

    # -- the state -----------------------------------------------------------------------------

    def shardings(self, tree: Any) -> Any:
        """The sharding of each array of a tree; arrays may be abstract."""
        assert self.mesh is not None
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: NamedSharding(self.mesh, self._spec(path, leaf)),  # type: ignore[arg-type]
            tree,
        )

    def _spec(self, path: Any, leaf: Any) -> PartitionSpec:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if callable(self.rules):
            return self.rules(name, leaf)
        for pattern, spec in self.rules:
            # Optimizer counts have the path of a parameter, but not its axes.
            if re.search(pattern, name) and len(spec) <= leaf.ndim:
                return spec
        return PartitionSpec()

    def place(self, tree: Any) -> Any:
        """The tree on its devices."""
        if self.mesh is not None:
            return jax.device_put(tree, self.shardings(tree))
        here = jax.local_devices()[0]

        def placed(leaf: Any) -> Any:
            is_spread = isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1
            return jax.device_put(leaf, here) if is_spread else leaf

        return jax.tree.map(placed, tree)

    def constrained(self, tree: Any) -> Any:
        """`place` inside a compiled function."""
        if self.mesh is None:
            return tree
        return jax.lax.with_sharding_constraint(tree, self.shardings(tree))

    def replicated(self, tree: Any) -> Any:
        """Inside a compiled function: replicated, so that each process can read it."""
        if self.mesh is None:
            return tree
        return jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, PartitionSpec()))

    # -- batches -------------------------------------------------------------------------------

    def place_batch(self, batch: Any, name: str = "the step") -> Placed:
        """The rows of this process on its devices; `name` is the step's name in errors."""
        if not self.is_compiled:  # same types as in a compiled step, such as 32 bits
            as_array = lambda x: jnp.asarray(x) if hasattr(x, "dtype") else x  # noqa: E731
            return Placed(jax.tree.map(as_array, batch))
        if self.mesh is None:
            return Placed(batch)
        count = _rows(batch)
        if count is None:
            return Placed(batch)
        rows, parts = self._rows
        missing = -count % parts
        if missing and self.uneven == "refuse":
            raise self._refusal(name, batch, count, parts)
        if len(self._processes) > 1:
            _agree(name, count + missing, self._processes)

        def spread(batch: Any) -> Any:
            return jax.tree.map(lambda leaf: _spread(leaf, rows), batch)

        # Another process may pad where this one does not, and all must run the same program.
        if not missing and (self.uneven == "refuse" or len(self._processes) == 1):
            return Placed(spread(batch))
        is_real = np.arange(count + missing) < count
        return Placed(
            spread(jax.tree.map(lambda leaf: _filled(leaf, missing, -1), batch)),
            _spread(is_real, rows),
            lambda: multihost_utils.process_allgather(is_real).reshape(-1),
            lambda: spread(jax.tree.map(lambda leaf: _filled(leaf, missing, 0), batch)),
        )

    @cached_property
    def _rows(self) -> tuple[NamedSharding, int]:
        """The sharding of a batch, and the number of shards in this process."""
        assert self.mesh is not None
        rows = NamedSharding(self.mesh, PartitionSpec(self.batch_axes))
        places = rows.addressable_devices_indices_map((self.mesh.size,)).values()
        return rows, len({str(place) for place in places})

    @cached_property
    def _processes(self) -> list[int]:
        assert self.mesh is not None
        return sorted({device.process_index for device in self.mesh.devices.flat})

    def _refusal(self, name: str, batch: Any, count: int, parts: int) -> CicloError:
        padding = "dataclasses.replace(state.strategy, "
        if _made.get(self.name) is self:
            padding = f"ciclo.get_strategy({self.name!r}, "
        whose = f" of this process (of {jax.process_count()})" if jax.process_count() > 1 else ""
        return CicloError(
            f"{name}: a batch of {count} rows cannot be split over the {parts} devices{whose} of"
            f" {self.name!r}: {describe(batch)}. Give batches of {count + -count % parts} rows"
            " (drop a short last batch), or pad them:"
            f' strategy={padding}uneven="pad")'
        )

    # -- steps ---------------------------------------------------------------------------------

    def compile(self, function: Callable[..., Any], is_donating: bool) -> Callable[..., Any]:
        """Compiles a function whose first argument is the state."""
        if not self.is_compiled:
            return function
        return jax.jit(function, donate_argnums=(0,) if is_donating and self.donates else ())

    @cached_property
    def must_wait(self) -> bool:
        """Whether to wait for each step: emulated CPU devices can deadlock."""
        mesh = self.mesh
        return mesh is not None and mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


def _rows(batch: Any) -> int | None:
    """The number of rows of a batch; None without arrays."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(batch) if getattr(leaf, "shape", ())]
    lengths = {shape[0] for shape in shapes}
    if len(lengths) > 1:
        raise CicloError(
            f"the arrays of a batch have different numbers of rows, {sorted(lengths)}, so they"
            f" cannot be split together: {describe(batch)}. Give each array one row per sample"
        )
    return lengths.pop() if lengths else None


_calls = itertools.count()  # number of calls of `_agree`, the same in all processes
_rows_before: dict[str, int] = {}  # by step name


def _agree(name: str, rows: int, processes: list[int]) -> None:
    """Checks that all processes have the same number of rows; else their programs would differ.

    They communicate only if the number of a step changes. A process that is alone with a change
    times out.
    """
    number = next(_calls)
    client = distributed.global_state.client
    if client is None or _rows_before.get(name) == rows:
        return
    _rows_before[name] = rows
    place = f"ciclo/rows/{number}"
    client.key_value_set(f"{place}/{jax.process_index()}", str(rows))
    try:
        client.wait_at_barrier(place, AGREE_S * 1000, processes)
    except jax.errors.JaxRuntimeError as error:
        cause: Exception | None = error
    else:
        cause = None
    found = {key.rpartition("/")[2]: text for key, text in client.key_value_dir_get(place)}
    if cause is not None or len(set(found.values())) > 1:
        there = ", ".join(f"process {key}: {found[key]}" for key in sorted(found, key=int))
        absent = "" if cause is None else "; the others have as many as before"
        raise CicloError(
            f"{name}: processes have different numbers of rows ({there}{absent}), but need the"
            ' same; drop short batches at the end of an epoch, or use uneven="pad" if they'
            " differ by less than one row per device"
        ) from cause


def _filled(leaf: Any, missing: int, row: int) -> Any:
    """Pads by repeating a real row, which cannot cause a new division by zero."""
    if not getattr(leaf, "shape", ()):
        return leaf
    library = jnp if isinstance(leaf, jax.Array) else np
    return library.concatenate([leaf, library.repeat(leaf[row][None], missing, 0)])


def _spread(leaf: Any, rows: NamedSharding) -> Any:
    if not getattr(leaf, "shape", ()):
        return leaf
    if jax.process_count() == 1:
        return jax.device_put(leaf, rows)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return leaf  # already sharded
    return jax.make_array_from_process_local_data(rows, np.asarray(leaf))


# -- the usual ones --------------------------------------------------------------------------------


class Eager(Strategy):
    """Not compiled, for debugging."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{"name": "eager", "is_compiled": False, **fields})


class JIT(Strategy):
    """Compiled, on one device; `donate_args` donates the state."""

    def __init__(self, donate_args: bool = False, **fields: Any) -> None:
        name = "jit_donate" if donate_args else "jit"
        super().__init__(**{"name": name, "donates": donate_args, **fields})


class DataParallel(Strategy):
    """Replicates the state and shards the batch.

    donate_args: whether a train step donates its state
    devices: a number or a list; all by default
    """

    def __init__(self, donate_args: bool = False, devices: Devices = None, **fields: Any) -> None:
        name = "data_parallel_donate" if donate_args else "data_parallel"
        if "mesh" not in fields:
            fields["mesh"] = _mesh(devices, name)
        super().__init__(**{"name": name, "donates": donate_args, **fields})


def _data_parallel(donate_args: bool) -> Callable[..., Strategy]:
    return lambda devices=None, uneven="refuse": DataParallel(donate_args, devices, uneven=uneven)


def fsdp(
    *,
    devices: Devices = None,
    uneven: str = "refuse",
    min_size: int = MIN_SIZE,
    donates: bool = True,
) -> Strategy:
    """Shards the state and the batch; parameters are gathered when they are used.

    An array is sharded along its longest axis that divides. Arrays with fewer than `min_size`
    elements are replicated.
    """
    mesh = _mesh(devices, "fsdp")

    def split(path: str, leaf: Any) -> PartitionSpec:
        axes = [axis for axis in range(leaf.ndim) if leaf.shape[axis] % mesh.size == 0]
        if not axes or leaf.size < min_size:
            return PartitionSpec()
        longest = max(axes, key=lambda axis: leaf.shape[axis])
        return PartitionSpec(*[None] * longest, "data")

    return Strategy(name="fsdp", mesh=mesh, rules=split, uneven=uneven, donates=donates)


def _mesh(devices: Devices, name: str) -> Mesh:
    there = jax.devices()
    if isinstance(devices, int):
        if not 0 < devices <= len(there):
            platform = there[0].platform
            hint = f"use 1 to {len(there)}"
            if platform == "cpu" and devices > 0:
                hint += (
                    "; to try more on this machine, set"
                    f" XLA_FLAGS=--xla_force_host_platform_device_count={devices} before Python"
                    " starts"
                )
            raise CicloError(
                f"{name} needs {devices} devices, but JAX has {len(there)} ({platform}); {hint}"
            )
        devices = there[:devices]
    chosen: Any = there if devices is None else devices
    allowed = "a number, or devices of jax.devices()"
    check("devices", chosen, lambda some: {*map(type, some)} == {type(there[0])}, allowed)
    return jax.make_mesh((len(chosen),), ("data",), devices=chosen, axis_types=(AxisType.Auto,))


_makers: dict[str, Callable[..., Strategy]] = {
    "eager": lambda: Eager(),
    "jit": lambda: JIT(),
    "jit_donate": lambda: JIT(donate_args=True),
    "data_parallel": _data_parallel(False),
    "data_parallel_donate": _data_parallel(True),
    "fsdp": fsdp,
}
_made: dict[str, Strategy] = {}  # strategies without options, created once


def register_strategy(
    name: str,
    strategy: Strategy | Callable[..., Strategy] | None = None,
    *,
    constructor: Callable[..., Strategy] | None = None,
) -> Any:
    """Registers a strategy, or a function or class that returns one, for `strategy="name"`.

    With only a name, it is a decorator.

    >>> ciclo.register_strategy("wide", lambda: ciclo.Strategy(name="wide", mesh=mesh))
    """
    given = constructor if strategy is None else strategy
    if given is None:
        return lambda made: register_strategy(name, made)
    if not isinstance(given, Strategy) and not callable(given):
        raise CicloError(
            f"register_strategy({name!r}, ...) takes a ciclo.Strategy, or a function that returns"
            f" one; got {given!r}"
        )
    name = _normal(name)
    _made.pop(name, None)
    _makers[name] = (lambda: given) if isinstance(given, Strategy) else given
    return given


def get_strategy(strategy: str | Strategy, **options: Any) -> Strategy:
    """A strategy by name, "data_parallel" or "data-parallel", optionally with options.

    >>> ciclo.get_strategy("data_parallel", devices=4, uneven="pad")
    """
    if isinstance(strategy, Strategy):
        return strategy
    name = _normal(strategy)
    if name not in _makers:
        raise CicloError(
            f"strategy={strategy!r} does not exist; use one of {', '.join(map(repr, _makers))}, a"
            " ciclo.Strategy, or ciclo.register_strategy(name, ...) first"
        )
    if options:
        maker = _makers[name]
        unknown = options.keys() - inspect.signature(maker).parameters.keys()
        if unknown:
            there = ", ".join(inspect.signature(maker).parameters) or "none"
            raise CicloError(f"strategy {name!r} has no option {min(unknown)!r}; it has {there}")
        return maker(**options)
    if name not in _made:
        made = _makers[name]()
        if not isinstance(made, Strategy):
            raise CicloError(
                f"strategy {name!r} was registered with {_makers[name]!r}, which returned"
                f" {made!r}; it must return a ciclo.Strategy"
            )
        _made[name] = made
    return _made[name]


def _normal(name: str) -> str:
    if isinstance(name, Mesh):
        raise CicloError("a mesh is not a strategy; use ciclo.Strategy(name='mine', mesh=mesh)")
    if not isinstance(name, str):
        raise CicloError(
            f"a strategy is a ciclo.Strategy or a name, as {', '.join(map(repr, _makers))}; got"
            f" {name!r}"
        )
    return name.replace("-", "_")
