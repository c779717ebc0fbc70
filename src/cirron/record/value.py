"""Takes the value of a mark without waiting for a device. Runs on the user's thread.

A value that the host already has becomes a plain Python scalar at once, so that what the user
changes in place afterwards does not change the record. A value that a device still computes is kept
as `Deferred`, and the background resolver asks for it. So is the time that a device took for a
span.
"""

from __future__ import annotations

import math
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from cirron.record.hot import DeviceClock

MAX_TEXT_BYTES = 256

# How often a device is asked whether it is done. Nobody is in a hurry, and each time costs training
# the interpreter lock for a moment.
POLL_S = 0.02

# Who takes the scalars of a library, while its hooks are in.
TAKERS: dict[str, Callable[[Any], Deferred]] = {}


class NotAScalarError(Exception):
    """The value is no scalar; the caller knows the mark's name and makes the message."""


class Polled:
    """The source of a value that can be asked without waiting for it."""

    __slots__ = ()

    def poll(self) -> Any:
        """The value, or None while it is not there. Raises if it never will be."""
        raise NotImplementedError


class Deferred:
    """A value that somebody has to wait for. `value` is set before `is_ready` is."""

    __slots__ = ("is_lost", "is_ready", "source", "value")
    is_awaited = False  # somebody does already, and to poll it is not to wait

    def __init__(self, source: Any) -> None:
        self.source = source
        self.value: Any = None
        self.is_ready = False
        self.is_lost = False

    def resolve(self) -> None:
        """Waits for the value. Afterwards it is ready, or lost if it could not be had.

        Several threads may ask at once: the source is only let go once the value is there.
        """
        while not self.poll():
            time.sleep(POLL_S)

    def poll(self) -> bool:
        """Whether it is ready by now. Waits for it where its source cannot be asked."""
        source = self.source
        if self.is_ready:
            return True
        try:
            if isinstance(source, Polled):
                found = source.poll()
                if found is None:
                    return self.is_ready
                self.value = found
            else:
                self.value = plain(source.item())
        except Exception:  # noqa: BLE001  protects the resolver from a foreign .item()
            self.is_lost = True
        self.is_ready = True
        self.source = None
        return True

    def give_up(self) -> None:
        """Waits no longer: it is lost, unless it is there."""
        if not self.is_ready:
            self.is_lost = self.is_ready = True
            self.source = None

    def resolve_all(self, others: list[Deferred]) -> None:
        """Waits for this value, and for others that are there at about the same time."""
        for deferred in (self, *others):
            deferred.resolve()


class Several(Deferred):
    """Values in the order in which they come."""

    __slots__ = ()

    def resolve(self) -> None:
        *others, last = self.source
        last.resolve_all(others)


def capture(value: Any, device_clock: DeviceClock | None = None) -> Any:
    """A plain scalar, or `Deferred`; raises `NotAScalarError` for anything else."""
    if isinstance(value, (bool, str, int, float)):
        return plain(value)
    if isinstance(value, Deferred):  # captured before
        return value
    if not hasattr(value, "item"):
        return plain(value)
    shape = getattr(value, "shape", ())
    if shape and isinstance(shape, tuple) and math.prod(shape) != 1:
        raise NotAScalarError
    library = type(value).__module__.partition(".")[0]
    if library == "numpy":
        return plain(value.item())
    if library == "torch":
        if value.is_cpu:
            scalar = value.item()
            return scalar if scalar.__class__ is float else plain(scalar)
        copy = None if device_clock is None else device_clock.copy(value)
        # In each case an own copy: `total += loss` may follow.
        return Deferred(value.detach().clone()) if copy is None else copy
    if "Tracer" in type(value).__name__:  # inside jax.jit there is no value, now or later
        return lost()
    return TAKERS.get(library, Deferred)(value)


def lost() -> Deferred:
    """A value that nobody can have."""
    found = Deferred(None)
    found.give_up()
    return found


def plain(value: Any) -> float | int | bool | str:
    """The Python scalar for what `.item()` gave, or for a subclass of a scalar."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return clip(str.__str__(value))  # of an enum that is a str: its value, not its name
    if hasattr(type(value), "__float__"):  # Fraction, Decimal
        try:
            return float(value)
        except OverflowError:  # as of an integer of that size
            return math.inf if value > 0 else -math.inf
        except (TypeError, ValueError):
            raise NotAScalarError from None
    raise NotAScalarError


def clip(text: str, limit: int = MAX_TEXT_BYTES) -> str:
    """The text, cut to at most `limit` bytes of UTF-8, between characters."""
    if len(text) * 4 <= limit:
        return text
    return text[:limit].encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")
