"""Keeps the worker polite.

A thread that runs Python gives the interpreter lock away every 5 ms, and the training thread would
wait as long each time it wants the lock back. So the worker lets go of it by itself, often.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from cirron.record import clock

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")

TURN_NS = 300_000
PAUSE_S = 0.0001  # long enough for another thread to wake and take the lock


def paced(items: Iterable[T]) -> Iterator[T]:
    """The items, with a pause after each turn of work on them."""
    began = clock.now()
    for item in items:
        yield item
        if clock.now() - began > TURN_NS:
            time.sleep(PAUSE_S)
            began = clock.now()
