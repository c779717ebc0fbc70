"""Logged values: which are still on a device, and how to fetch many of them at once.

A value on the host is copied immediately, so that later in-place changes do not affect the log. A
device value is detached and fetched later, together with others. No framework is imported here:
values are recognised by their type.
"""

from __future__ import annotations

import sys
from functools import cache, lru_cache
from itertools import repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

from ciclo.errors import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    Keeper: TypeAlias = Callable[[Any], tuple[Any, bool]]

STACKED = 64  # number of values that a history column fetches together
FEW = 8  # below this, JAX fetches one by one: compiling takes longer
TARGETS = ("y", "target", "targets", "label", "labels")  # names of targets in a dict batch
PLAIN = frozenset({float, int, bool, str, type(None)})
CONTAINERS = frozenset({list, tuple, dict, set})  # copied recursively
aval_of, sharding_of = attrgetter("aval"), attrgetter("sharding")  # of JAX arrays
MAX_KEEPERS = 500  # maximum number of types in the cache


def library_of(value: Any) -> str:
    """The package of a value's type."""
    return type(value).__module__.partition(".")[0]


def keep(value: Any) -> tuple[Any, bool]:
    """The value to keep in the log, and whether it must be fetched from a device."""
    return keeper_of(type(value))(value)


def _find_keeper(kind: type) -> Keeper:
    library = kind.__module__.partition(".")[0]
    if kind in PLAIN:
        return _keep_as_it_is
    if kind in CONTAINERS:
        return _keep_contents
    if library == "numpy" and hasattr(kind, "item"):
        return _keep_numpy
    if library == "torch" and hasattr(kind, "detach"):
        return _keep_torch
    if library in ("jax", "jaxlib") and hasattr(kind, "is_deleted"):
        return _keep_on_device
    return _keep_computed if is_running(kind) else _keep_other


def is_running(kind: type) -> bool:
    """Whether values of this type are metrics over many steps, such as those of clu."""
    return hasattr(kind, "compute") and (hasattr(kind, "merge") or hasattr(kind, "reset"))


# The function that converts logged values of a type.
keeper_of: Callable[[type], Keeper] = lru_cache(MAX_KEEPERS)(_find_keeper)


def _keep_as_it_is(value: Any) -> tuple[Any, bool]:
    return value, False


def _keep_on_device(value: Any) -> tuple[Any, bool]:
    return value, True


def _keep_contents(value: Any) -> tuple[Any, bool]:
    if isinstance(value, dict):
        return {key: keep(one)[0] for key, one in value.items()}, False
    return type(value)(keep(one)[0] for one in value), False


def _keep_numpy(value: Any) -> tuple[Any, bool]:
    return (value.copy() if value.shape else value.item()), False


def _keep_torch(value: Any) -> tuple[Any, bool]:
    if not value.is_cpu:
        return value.detach().clone(), True  # a copy, because `total += loss` may follow
    return (value.detach().clone() if value.dim() else value.item()), False


def _keep_computed(value: Any) -> tuple[Any, bool]:
    return keep(value.compute())


def _keep_other(value: Any) -> tuple[Any, bool]:
    if hasattr(value, "item") and hasattr(value, "shape") and value.shape == ():
        return value.item(), False  # a scalar of TensorFlow or another NumPy-like library
    return value, False


def fetch(values: Sequence[Any]) -> list[Any]:
    """Device values on the host, with one wait: scalars as Python numbers, the rest as arrays.

    A value that was donated before it was fetched is None.
    """
    return send(values)()


def send(values: Sequence[Any]) -> Callable[[], list[Any]]:
    """Starts the transfer to the host; the returned function waits and returns the values.

    A device works in order, so a value requested now arrives after all work that was started
    before. If it is received later, nothing waits.
    """
    if _are_alike(values):
        return _send_scalars(list(values))
    arrived = list(values)
    groups: dict[Any, tuple[list[int], list[Any]]] = {}  # sent together, with indices
    for i, value in enumerate(values):
        keeper = keeper_of(type(value))
        key: tuple[Any, ...]
        if keeper is _keep_on_device:
            key = (_send_arrays,) if value.shape else (_send_scalars, value.aval, value.sharding)
        elif keeper is _keep_torch and not value.dim():
            key = (_send_torch, value.device, value.dtype)
        else:
            arrived[i] = value.cpu() if keeper is _keep_torch else value
            continue
        places, group = groups.setdefault(key, ([], []))
        places.append(i)
        group.append(value)
    sent = [(places, send(group)) for (send, *_), (places, group) in groups.items()]

    def receive() -> list[Any]:
        for places, group in sent:
            for i, value in zip(places, group(), strict=True):
                arrived[i] = value
        return arrived

    return receive


def _are_alike(values: Sequence[Any]) -> bool:
    """Whether these are JAX scalars with one type and sharding, like most columns.

    This covers every logged value, so there is no Python loop.
    """
    kinds = set(map(type, values))
    if len(kinds) != 1 or keeper_of(kinds.pop()) is not _keep_on_device or values[0].shape:
        return False
    same = [aval_of] if _is_on_cpu(values[0]) else [aval_of, sharding_of]
    return all(all(map(is_, map(what, values), repeat(what(values[0])))) for what in same)


class Queue:
    """Values in transfer to the host: some are queued, earlier ones have been sent.

    Each has a tag. They arrive in the order of `put`.
    """

    __slots__ = ("_receive", "_sent", "last", "tags", "values")

    def __init__(self) -> None:
        self.tags: list[Any] = []  # of the queued values; two lists, because a list of
        self.values: list[Any] = []  # pairs is more work for the garbage collector
        self.last: tuple[Any, Any] | None = None  # tag and value that were sent last
        self._sent: list[Any] = []  # tags
        self._receive: Callable[[], list[Any]] = list

    def __len__(self) -> int:
        """The number of queued values."""
        return len(self.tags)

    @property
    def oldest(self) -> Any:
        """The tag of the first queued value."""
        return self.tags[0]

    def put(self, tag: Any, value: Any) -> None:
        self.tags.append(tag)
        self.values.append(value)

    def exchange(self) -> tuple[list[Any], list[Any]]:
        """Sends the queued values, and returns the tags and values that were sent before."""
        tags, values = self.tags[:], self.values[:]
        if tags:
            self.last = tags[-1], values[-1]
        self.tags.clear()
        self.values.clear()
        if not self._sent and PLAIN.issuperset(map(type, values)):
            return tags, values  # no device values
        came = self._sent, self._receive()
        self._sent, self._receive = tags, send(values)
        return came

    def turn(self) -> list[tuple[Any, Any]]:
        """Like `exchange`, as pairs."""
        return list(zip(*self.exchange(), strict=True))

    def settle(self) -> list[tuple[Any, Any]]:
        """All remaining values, as pairs."""
        return [*self.turn(), *self.turn()]


def _send_torch(scalars: list[Any]) -> Callable[[], list[Any]]:
    torch = sys.modules["torch"]
    stacked = torch.stack(scalars)
    if stacked.device.type != "cuda":
        return stacked.tolist  # type: ignore[no-any-return]
    there = torch.empty_like(stacked, device="cpu", pin_memory=True)
    there.copy_(stacked, non_blocking=True)
    has_come = torch.cuda.current_stream(stacked.device).record_event()

    def receive() -> list[Any]:
        has_come.synchronize()
        return there.tolist()  # type: ignore[no-any-return]

    return receive


def _send_arrays(arrays: list[Any]) -> Callable[[], list[Any]]:
    return lambda: _got(arrays)


def _send_scalars(scalars: list[Any]) -> Callable[[], list[Any]]:
    if _is_on_cpu(scalars[0]):
        return lambda: _read(scalars)
    if len(scalars) < FEW:
        return lambda: _got(scalars)
    # Fetching from a GPU takes 80 us, for one number or many. They are stacked and padded to one
    # length, because JAX compiles for each length.
    is_lost = [one.is_deleted() for one in scalars]
    there = [one for one, is_gone in zip(scalars, is_lost, strict=True) if not is_gone]
    if len(scalars[0].sharding.device_set) > 1:  # a scalar is replicated
        there = [one.addressable_data(0) for one in there]
    parts = []
    for start in range(0, len(there), STACKED):
        part = there[start : start + STACKED]
        parts.append(_jitted_stack()(part + part[-1:] * (STACKED - len(part))))
        parts[-1].copy_to_host_async()

    def receive() -> list[Any]:
        numbers = (number for part in parts for number in part.tolist())
        return _with_lost(is_lost, numbers)

    return receive


def _is_on_cpu(array: Any) -> bool:
    return next(iter(array.sharding.device_set)).platform == "cpu"  # type: ignore[no-any-return]


def _read(scalars: list[Any]) -> list[Any]:
    """Reads JAX scalars in host memory; `device_get` is ten times slower."""
    try:
        found = sys.modules["numpy"].frombuffer(b"".join(scalars), scalars[0].dtype)
    except TypeError:  # one was donated, or the buffer protocol lacks the type (bfloat16)
        return _got(scalars)
    return found.tolist()  # type: ignore[no-any-return]


def _got(arrays: list[Any]) -> list[Any]:
    """JAX arrays on the host, as NumPy arrays or numbers; None if donated."""
    is_lost = [one.is_deleted() for one in arrays]
    there = [one for one, is_gone in zip(arrays, is_lost, strict=True) if not is_gone]
    found = sys.modules["jax"].device_get(there)
    return _with_lost(is_lost, (one if one.shape else one.item() for one in found))


def _with_lost(is_lost: list[bool], found: Iterator[Any]) -> list[Any]:
    """The values that arrived, with None for each donated one."""
    if any(is_lost):
        warn(
            "a logged array was donated before it was fetched, so it is None in the history; log a"
            " copy: jnp.copy(value)"
        )
    return [None if is_gone else next(found) for is_gone in is_lost]


@cache
def _jitted_stack() -> Any:
    jax = sys.modules["jax"]
    return jax.jit(lambda scalars: jax.numpy.stack(scalars))


def describe(value: Any, depth: int = 0) -> str:
    """A short description for error messages: types and shapes, no contents."""
    shape = getattr(value, "shape", None)
    if shape is not None and not isinstance(value, type):
        kind = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
        return f"{kind}[{','.join(str(length) for length in shape)}]"
    if isinstance(value, dict) and depth < 2:
        items = [f"{key}: {describe(item, depth + 1)}" for key, item in list(value.items())[:6]]
        return "{" + ", ".join(items + ["..."] * (len(value) > 6)) + "}"
    if isinstance(value, (list, tuple)) and depth < 2:
        inner = [describe(item, depth + 1) for item in value[:4]] + ["..."] * (len(value) > 4)
        return ("[{}]" if isinstance(value, list) else "({})").format(", ".join(inner))
    if type(value) in PLAIN:
        text = repr(value)
        return text if len(text) <= 40 else text[:37] + "..."
    return type(value).__name__
