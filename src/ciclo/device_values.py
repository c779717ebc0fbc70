"""Logged values: which of them a device still computes, and how to fetch many of those at once.

A value that the host has becomes plain at once, so that what is changed in place afterwards does
not change the log. One on a device is kept as it is, detached from what made it, and fetched later
with its neighbours. No framework is imported here: a value's type says whose it is.
"""

from __future__ import annotations

import sys
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from ciclo.errors import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    Keeper: TypeAlias = Callable[[Any], tuple[Any, bool]]

STACKED = 64  # as many as a column of the history fetches at a time
FEW = 8  # up to here JAX fetches one by one: compiling would take longer
TARGETS = ("y", "target", "targets", "label", "labels")  # what the dict of a batch calls them
PLAIN = frozenset({float, int, bool, str, type(None)})
CONTAINERS = frozenset({list, tuple, dict, set})  # which are copied, as deep as they are
MAX_KEEPERS = 500  # types of which it is known how to keep a value


def library_of(value: Any) -> str:
    """The package that a value's type comes from."""
    return type(value).__module__.partition(".")[0]


def keep(value: Any) -> tuple[Any, bool]:
    """What to keep of a logged value, and whether it has to be fetched from a device."""
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
    return _keep_other


# The function that keeps the values of a type.
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
        return value.detach().clone(), True  # an own copy: `total += loss` may follow
    return (value.detach().clone() if value.dim() else value.item()), False


def _keep_other(value: Any) -> tuple[Any, bool]:
    if hasattr(value, "item") and hasattr(value, "shape") and value.shape == ():
        return value.item(), False  # a scalar of TensorFlow or of whoever follows NumPy
    return value, False


def fetch(values: Sequence[Any]) -> list[Any]:
    """What the devices hold, waited for once: scalars as plain numbers, the rest on the host.

    A value whose memory was given away (donated) before it was fetched is None.
    """
    return send(values)()


def send(values: Sequence[Any]) -> Callable[[], list[Any]]:
    """Has these values come to the host, and returns what waits for them, as `fetch` gives them.

    A device does one thing after the other, so that a value which is asked for now comes behind
    all that was begun before it. Sent now and received later, nobody waits.
    """
    arrived = list(values)
    if PLAIN.issuperset(map(type, arrived)):
        return lambda: arrived
    alike: dict[Any, tuple[list[int], list[Any]]] = {}  # scalars of a kind, which travel together
    arrays: list[tuple[int, Any]] = []  # of JAX
    is_lost = False
    sharding: Any = None  # of the JAX scalar before, which the next one mostly is like
    dtype: Any = None
    places: list[int] = []
    scalars: list[Any] = []
    kind: Any = None
    keeper: Any = None
    for i, value in enumerate(values):
        if type(value) is not kind:
            kind = type(value)
            keeper = keeper_of(kind)
        if keeper is _keep_on_device:
            arrived[i] = None
            if value.is_deleted():
                is_lost = True
            elif value.shape:
                arrays.append((i, value))
            else:
                if value.sharding is not sharding or value.dtype is not dtype:
                    sharding, dtype = value.sharding, value.dtype
                    places, scalars = alike.setdefault((_send_jax, sharding, dtype), ([], []))
                places.append(i)
                scalars.append(value)
        elif keeper is _keep_torch:
            arrived[i] = value.cpu() if value.dim() else None
            if not value.dim():
                kind = (_send_torch, value.device, value.dtype)
                of_torch = alike.setdefault(kind, ([], []))
                of_torch[0].append(i)
                of_torch[1].append(value)
    sent = [(places, send(scalars)) for (send, *_), (places, scalars) in alike.items()]

    def receive() -> list[Any]:
        for places, numbers in sent:
            for i, number in zip(places, numbers(), strict=True):
                arrived[i] = number
        there = [(i, array) for i, array in arrays if not array.is_deleted()]
        if is_lost or len(there) < len(arrays):
            warn(
                "a logged array was donated before it was fetched and is None in the history; log a"
                " copy of it, as in jnp.copy(value)"
            )
        if there:
            fetched = sys.modules["jax"].device_get([array for _, array in there])
            for (i, _), array in zip(there, fetched, strict=True):
                arrived[i] = array
        return arrived

    return receive


class Queue:
    """Values on their way to the host: some wait to be sent, those before them travel.

    Each has a tag. They come in the order in which they were put.
    """

    __slots__ = ("_receive", "_sent", "last", "tags", "values")

    def __init__(self) -> None:
        self.tags: list[Any] = []  # of what waits, and the values; two lists, since pairs in one
        self.values: list[Any] = []  # would be work for the garbage collector
        self.last: tuple[Any, Any] | None = None  # tag and value of the last that was sent
        self._sent: list[Any] = []  # tags
        self._receive: Callable[[], list[Any]] = list

    def __len__(self) -> int:
        """How many wait to be sent."""
        return len(self.tags)

    @property
    def oldest(self) -> Any:
        """The tag of the first that waits to be sent."""
        return self.tags[0]

    def put(self, tag: Any, value: Any) -> None:
        self.tags.append(tag)
        self.values.append(value)

    def exchange(self) -> tuple[list[Any], list[Any]]:
        """Sends what waits, and gives the tags and values of what was sent the last time."""
        tags, values = self.tags[:], self.values[:]
        if tags:
            self.last = tags[-1], values[-1]
        self.tags.clear()
        self.values.clear()
        if not self._sent and PLAIN.issuperset(map(type, values)):
            return tags, values  # nothing of this is on a device
        came = self._sent, self._receive()
        self._sent, self._receive = tags, send(values)
        return came

    def turn(self) -> list[tuple[Any, Any]]:
        """As `exchange`, in pairs."""
        return list(zip(*self.exchange(), strict=True))

    def settle(self) -> list[tuple[Any, Any]]:
        """Gives all that is left, in pairs."""
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


def _send_jax(scalars: list[Any]) -> Callable[[], list[Any]]:
    jax = sys.modules["jax"]
    if len(scalars[0].sharding.device_set) > 1:  # each device has all of a scalar
        scalars = [scalar.addressable_data(0) for scalar in scalars]
    if len(scalars) < FEW:
        return lambda: [array.item() for array in jax.device_get(scalars)]
    # From a GPU one number takes 80 us, and so do many. They are stacked by one length, filled up
    # with the last, since JAX compiles for each length.
    parts = []
    for start in range(0, len(scalars), STACKED):
        part = scalars[start : start + STACKED]
        parts.append(_jitted_stack()(part + part[-1:] * (STACKED - len(part))))
        parts[-1].copy_to_host_async()
    return lambda: [number for part in parts for number in part.tolist()][: len(scalars)]


@cache
def _jitted_stack() -> Any:
    jax = sys.modules["jax"]
    return jax.jit(lambda scalars: jax.numpy.stack(scalars))


def describe(value: Any, depth: int = 0) -> str:
    """A batch in a few words, for error messages: types and shapes, no contents."""
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
