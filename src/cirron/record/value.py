"""Reads the value of a mark without waiting for a device. Runs on the user's thread.

A value in host memory becomes a plain Python scalar immediately, so that later changes in place do
not change the record. A value that a device is still computing becomes a `Deferred`, which the
background resolver reads later; so does the device time of a span. A value that does not exist, as
while a function is traced, becomes a lost `Deferred`. `readers.py` knows each library's scalars.
"""

from __future__ import annotations

import math
import os
import time

from cirron import guard

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, TypeAlias

    from cirron.record.hot import DeviceClock

    Reader: TypeAlias = Callable[[Any, DeviceClock | None], Any]

HERE = os.path.join(os.path.dirname(__file__), "")  # cirron's own frames

MAX_TEXT_BYTES = 256

# How often a device is polled. There is no hurry, and each poll takes the GIL from training.
POLL_S = 0.02

# How hooks defer the values of a library, by its name.
TAKERS: dict[str, Callable[[Any], Deferred]] = {}

MAX_READERS = 500  # cached types; for others, the reader is looked up each time


class NotAScalarError(Exception):
    """The value is not a scalar. The caller knows the mark's name and raises the final error."""


class Deferred:
    """A value that may not be ready yet. `value` is set before `is_ready`."""

    __slots__ = ("is_lost", "is_ready", "source", "value")
    is_awaited = False  # another thread is already waiting; polling does not block
    is_batched = False  # reading several at once is cheaper

    def __init__(self, source: Any) -> None:
        self.source = source
        self.value: Any = None
        self.is_ready = False
        self.is_lost = False

    def resolve(self, others: Sequence[Deferred] = ()) -> None:
        """Waits for this value, and for others that become ready at about the same time.

        Afterwards each is ready, or lost if reading it failed. Several threads may call this at
        once: the source is released only after the value is set.
        """
        for deferred in (self, *others):
            while not deferred.poll():
                time.sleep(POLL_S)

    def poll(self) -> bool:
        """Whether it is ready. Blocks until it is, except in subclasses."""
        source = self.source
        if self.is_ready:
            return True
        try:
            self.value = plain(source.item())
        except BaseException as error:  # protects the resolver from a foreign .item()
            if is_for_program(error):
                raise
            self.is_lost = True
        self.is_ready = True
        self.source = None
        return True

    def give_up(self) -> None:
        """Stops waiting: the value is lost if it is not ready."""
        if not self.is_ready:
            self.is_lost = self.is_ready = True
            self.source = None


def keep(value: Any, device_clock: DeviceClock | None) -> Any:
    return value


# Readers by type. Each type is looked up in `readers.py` once.
READERS: dict[type, Reader] = {bool: keep, float: keep, int: keep}
# Faster ones, for values that a framework logs: no function is being traced there.
LOGGED: dict[type, Reader] = {}


def capture(
    value: Any, device_clock: DeviceClock | None = None, readers: dict[type, Reader] = READERS
) -> Any:
    """A plain scalar, or a `Deferred`. Raises `NotAScalarError` if it is clearly not a scalar.

    Raises nothing else, whatever the value's methods do: the value is lost then. `readers`: which
    to prefer.
    """
    try:
        kind = type(value)  # `value.__class__` may be a property that fails
        return (readers.get(kind) or READERS.get(kind) or learn(kind))(value, device_clock)
    except NotAScalarError:
        raise
    except BaseException as error:  # protects the program from a foreign method
        if is_for_program(error):
            raise
        return lost()


# Else TensorFlow's AutoGraph rewrites it, and `float(value)` becomes part of the user's graph.
capture.autograph_info__ = True  # type: ignore[attr-defined]


def learn(kind: type) -> Reader:
    from cirron.record import readers

    reader = readers.reader_of(kind)
    if len(READERS) < MAX_READERS:
        READERS[kind] = reader
    return reader


def is_for_program(error: BaseException) -> bool:
    """Whether an exception was meant for the program, and not raised by the value's own methods.

    That is Ctrl-C, and what a signal handler or another thread raises here.
    """
    import threading

    kind = type(error)  # isinstance() may call its `__class__`
    if issubclass(kind, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    codes = guard.codes_of(error)
    if codes[-1].co_filename.startswith(HERE):  # native code, or none of the value's code
        return not issubclass(kind, Exception)
    return guard.is_of_handler(codes)


def lost() -> Deferred:
    """A value that cannot be read."""
    found = Deferred(None)
    found.give_up()
    return found


def plain(value: Any) -> float | int | bool | str:
    """The Python scalar for the result of `.item()`, or for a subclass of a scalar."""
    kind = type(value)
    if kind is bool:
        return bool(value)
    if issubclass(kind, int):  # a subclass may override int(), float() and str()
        return int.__int__(value)
    if issubclass(kind, float):
        return float.__float__(value)
    if issubclass(kind, str):
        return clip(str.__str__(value))  # of an enum that is a str: its value, not its name
    if hasattr(kind, "__float__"):  # Fraction, Decimal
        try:
            return float(value)
        except OverflowError:  # as of an integer of that size
            return math.inf if value > 0 else -math.inf
        except (TypeError, ValueError):
            raise NotAScalarError from None
    raise NotAScalarError


def clip(text: str, limit: int = MAX_TEXT_BYTES) -> str:
    """The text, cut to at most `limit` bytes of UTF-8, between characters."""
    text = str.__str__(text)  # of an enum that is a str: its value, not its name
    if len(text) * 4 <= limit:
        return text
    return text[:limit].encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")
