"""Takes the value of a mark without waiting for a device. Runs on the user's thread.

A value that the host already has becomes a plain Python scalar at once, so that what the user
changes in place afterwards does not change the record. A value that a device still computes is kept
as `Deferred`, and the background resolver asks for it. So is the time that a device took for a
span. A value that nobody can have, as while a function is traced, is a `Deferred` that is lost.
`readers.py` knows the scalars of each library.
"""

from __future__ import annotations

import math
import os
import time

from cirron import guard

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeAlias

    from cirron.record.hot import DeviceClock

    Reader: TypeAlias = Callable[[Any, DeviceClock | None], Any]

HERE = os.path.join(os.path.dirname(__file__), "")  # where frames are ours

MAX_TEXT_BYTES = 256

# How often a device is asked whether it is done. Nobody is in a hurry, and each time costs training
# the interpreter lock for a moment.
POLL_S = 0.02

# Who takes the scalars of a library, while its hooks are in.
TAKERS: dict[str, Callable[[Any], Deferred]] = {}

MAX_READERS = 500  # types that are remembered; of others the reader is found each time


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
    is_batched = False  # it is cheaper to get several of its kind at once

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
            if issubclass(type(source), Polled):  # isinstance() may ask the source for its class
                found = source.poll()
                if found is None:
                    return self.is_ready
                self.value = found
            else:
                self.value = plain(source.item())
        except BaseException as error:  # protects the resolver from a foreign .item()
            if is_for_program(error):
                raise
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
    """A plain scalar, or `Deferred`; raises `NotAScalarError` for what is plainly something else.

    Nothing else is raised, whatever the value does: then it is lost.
    """
    try:
        kind = type(value)  # `value.__class__` may be a property that fails
        reader = READERS.get(kind)
        if reader is None:
            reader = learn(kind)
        return reader(value, device_clock)
    except NotAScalarError:
        raise
    except BaseException as error:  # protects the program from a foreign method
        if is_for_program(error):
            raise
        return lost()


# TensorFlow's AutoGraph would rewrite it, so that `float(value)` became part of the user's graph.
capture.autograph_info__ = True  # type: ignore[attr-defined]


def learn(kind: type) -> Reader:
    """The function that takes values of this type."""
    from cirron.record import readers

    reader = readers.reader_of(kind)
    if len(READERS) < MAX_READERS:
        READERS[kind] = reader
    return reader


def keep(value: Any, device_clock: DeviceClock | None) -> Any:
    return value


def is_for_program(error: BaseException) -> bool:
    """Whether an exception was meant for the program, and not made by the value that was asked.

    That is Ctrl-C, and what a signal handler or another thread raises here in the meantime.
    """
    import threading

    kind = type(error)  # not isinstance(), which may ask the exception for its class
    if issubclass(kind, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    codes = guard.codes_of(error)
    if codes[-1].co_filename.startswith(HERE):  # native code, or nothing of the value's at all
        return not issubclass(kind, Exception)
    return guard.is_of_handler(codes)


def lost() -> Deferred:
    """A value that nobody can have."""
    found = Deferred(None)
    found.give_up()
    return found


def plain(value: Any) -> float | int | bool | str:
    """The Python scalar for what `.item()` gave, or for a subclass of a scalar."""
    kind = type(value)
    if kind is bool:
        return bool(value)
    if issubclass(kind, int):  # whatever a subclass makes of int(), float() and str()
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


# How the values of a type are taken. Each type is looked up in `readers.py` once.
READERS: dict[type, Reader] = {bool: keep, float: keep, int: keep}
