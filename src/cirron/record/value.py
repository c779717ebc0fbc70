"""Takes the value of a mark without waiting for a device. Runs on the user's thread.

A value that the host already has becomes a plain Python scalar at once, so that what the user
changes in place afterwards does not change the record. A value that a device still computes is kept
as `Deferred`, and the background resolver asks for it.
"""

from __future__ import annotations

import math

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_TEXT_BYTES = 256


class NotAScalarError(Exception):
    """The value is no scalar; the caller knows the mark's name and makes the message."""


class Deferred:
    """A value that somebody has to wait for. `value` is set before `is_ready` is."""

    __slots__ = ("is_lost", "is_ready", "source", "value")

    def __init__(self, source: Any) -> None:
        self.source = source
        self.value: Any = None
        self.is_ready = False
        self.is_lost = False

    def resolve(self) -> None:
        """Waits for the value. Afterwards it is ready, or lost if it could not be had.

        Several threads may ask at once: the source is only let go once the value is there.
        """
        source = self.source
        if self.is_ready:
            return
        try:
            self.value = plain(source.item())
        except Exception:  # noqa: BLE001  protects the resolver from a foreign .item()
            self.is_lost = True
        self.is_ready = True
        self.source = None


def capture(value: Any) -> Any:
    """A plain scalar, or `Deferred`; raises `NotAScalarError` for anything else."""
    if isinstance(value, (bool, str, int, float)):
        return plain(value)
    if not hasattr(value, "item"):
        return plain(value)
    shape = getattr(value, "shape", ())
    if isinstance(shape, tuple) and math.prod(shape) != 1:
        raise NotAScalarError
    library = type(value).__module__.partition(".")[0]
    if library == "numpy":
        return plain(value.item())
    if library == "torch":
        if value.device.type == "cpu":
            return plain(value.item())
        return Deferred(value.detach().clone())  # an own copy: `total += loss` may follow
    if "Tracer" in type(value).__name__:  # inside jax.jit there is no value, now or later
        lost = Deferred(None)
        lost.is_ready = lost.is_lost = True
        return lost
    return Deferred(value)


def plain(value: Any) -> float | int | bool | str:
    """The Python scalar for what `.item()` gave, or for a subclass of a scalar."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return clip(value)
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
        return str.__str__(text)  # of an enum that is a str: its value, not its name
    return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")
