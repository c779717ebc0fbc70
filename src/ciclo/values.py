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
    from collections.abc import Sequence

STACKED = 64  # as many as a column of the history fetches at a time
FEW = 8  # up to here JAX fetches one by one: compiling would take longer
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
    fetched = list(values)
    alike: dict[Any, list[int]] = {}  # scalars of one kind, which travel together
    others: list[int] = []
    for i, value in enumerate(values):
        library = library_of(value)
        if library == "torch":
            if value.dim():
                fetched[i] = value.cpu()
            else:
                alike.setdefault(("torch", value.device, value.dtype), []).append(i)
        elif library in ("jax", "jaxlib"):
            fetched[i] = None
            if not value.is_deleted():
                devices = () if value.shape else value.devices()
                if len(devices) == 1:
                    alike.setdefault(("jax", *devices, value.dtype), []).append(i)
                else:
                    others.append(i)
    for (library, *_), places in alike.items():
        for i, number in zip(places, _numbers(library, [values[i] for i in places]), strict=True):
            fetched[i] = number
    if others:
        arrays = sys.modules["jax"].device_get([values[i] for i in others])
        for i, array in zip(others, arrays, strict=True):
            fetched[i] = array if array.shape else array.item()
    return fetched


def _numbers(library: str, scalars: list[Any]) -> list[Any]:
    """Scalars of one device and type, as plain numbers."""
    numbers: list[Any] = []
    if library == "torch":
        numbers += sys.modules["torch"].stack(scalars).tolist()
    elif len(scalars) < FEW:
        numbers += [array.item() for array in sys.modules["jax"].device_get(scalars)]
    else:
        # From a GPU one number takes 80 us, and so do many. They are stacked by one length, filled
        # up with the last, since JAX compiles for each length.
        for start in range(0, len(scalars), STACKED):
            part = scalars[start : start + STACKED]
            filled = part + part[-1:] * (STACKED - len(part))
            numbers += _jitted_stack()(filled).tolist()[: len(part)]
    return numbers


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
