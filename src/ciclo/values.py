"""Logged values: which of them a device still computes, and how to fetch many of those at once.

A value that the host has becomes plain at once, so that what is changed in place afterwards does
not change the log. One on a device is kept as it is, detached from what made it, and fetched later
with its neighbours. No framework is imported here: a value's type says whose it is.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STACKED = 64  # as many as a column of the history fetches at a time
FEW = 8  # up to here JAX fetches one by one: compiling would take longer
TARGETS = ("y", "target", "targets", "label", "labels")  # what the dict of a batch calls them
PLAIN = frozenset({float, int, bool, str, type(None)})


def library_of(value: Any) -> str:
    """The package that a value's type comes from."""
    return type(value).__module__.partition(".")[0]


def keep(value: Any) -> tuple[Any, bool]:
    """What to keep of a logged value, and whether it has to be fetched from a device."""
    if type(value) in PLAIN:
        return value, False
    library = library_of(value)
    if library == "numpy":
        return (value.copy() if getattr(value, "shape", ()) else value.item()), False
    if library == "torch" and hasattr(value, "detach"):
        if value.device.type != "cpu":
            return value.detach().clone(), True  # an own copy: `total += loss` may follow
        return (value.detach().clone() if value.dim() else value.item()), False
    if library in ("jax", "jaxlib") and hasattr(value, "is_deleted"):
        return value, True
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
    alike: dict[Any, list[tuple[int, Any]]] = {}  # scalars of one kind, which travel together
    arrays: list[tuple[int, Any]] = []  # of JAX
    for i, value in enumerate(values):
        library = library_of(value)
        if library == "torch":
            arrived[i] = value.cpu() if value.dim() else None
            if not value.dim():
                alike.setdefault((_send_torch, value.device, value.dtype), []).append((i, value))
        elif library in ("jax", "jaxlib"):
            arrived[i] = None
            if value.is_deleted():
                continue
            if value.shape:
                arrays.append((i, value))
            else:
                here = value.addressable_data(0)  # every device has all of a scalar
                alike.setdefault((_send_jax, *here.devices(), here.dtype), []).append((i, here))
    sent = [
        ([i for i, _ in scalars], send([scalar for _, scalar in scalars]))
        for (send, *_), scalars in alike.items()
    ]

    def receive() -> list[Any]:
        for places, numbers in sent:
            for i, number in zip(places, numbers(), strict=True):
                arrived[i] = number
        there = [(i, array) for i, array in arrays if not array.is_deleted()]
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

    __slots__ = ("_sent", "_waiting")

    def __init__(self) -> None:
        self._sent: tuple[list[Any], Callable[[], list[Any]]] = ([], list)
        self._waiting: list[tuple[Any, Any]] = []

    def __len__(self) -> int:
        """How many wait to be sent."""
        return len(self._waiting)

    @property
    def oldest(self) -> Any:
        """The tag of the first that waits to be sent."""
        return self._waiting[0][0]

    def put(self, tag: Any, value: Any) -> None:
        self._waiting.append((tag, value))

    def turn(self) -> list[tuple[Any, Any]]:
        """Sends what waits, and gives what was sent the last time."""
        tags, receive = self._sent
        came = list(zip(tags, receive(), strict=True))
        self._sent = ([tag for tag, _ in self._waiting], send([one for _, one in self._waiting]))
        self._waiting = []
        return came

    def settle(self) -> list[tuple[Any, Any]]:
        """Gives all that is left."""
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
