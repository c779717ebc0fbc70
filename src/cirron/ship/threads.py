"""Threads of ours: real ones even where gevent has replaced Python's, woken and awaited by bare
locks, which are safe in a signal handler, where the interrupted code may hold any other lock.
"""

from __future__ import annotations

import _thread
import sys
import threading
import time  # noqa: F401  `real` looks it up among the imported modules
from typing import TYPE_CHECKING, Any

from cirron import guard
from cirron.record import clock

if TYPE_CHECKING:
    from collections.abc import Callable

# Whoever waits for a thread's end looks this often whether it has come.
LOOK_S = 0.1


def real(module: str, name: str) -> Any:
    """A function of the standard library itself, not what gevent has put in its place.

    A thread that is a greenlet never runs while another greenlet computes.
    """
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None:
        return monkey.get_original(module, name)
    return getattr(sys.modules[module], name)


def new_lock() -> _thread.LockType:
    """A lock of the operating system."""
    lock: _thread.LockType = real("_thread", "allocate_lock")()
    return lock


def sleep(seconds: float) -> None:
    """Lets other threads run."""
    real("time", "sleep")(seconds)


class Worker:
    """A daemon thread that runs a function once; the function sleeps by `rest`."""

    def __init__(self, run: Callable[[], None], name: str) -> None:
        self.ident: int | None = None
        self.is_stopping = False
        self.has_ended = False
        self._has_started = False
        self._run = run
        self._name = name
        self._wake = new_lock()
        self._wake.acquire()
        self._ended = new_lock()
        self._ended.acquire()

    def start(self) -> bool:
        """False: Python starts no more threads, since the interpreter is ending."""
        try:
            if real("_thread", "start_new_thread") is _thread.start_new_thread:
                threading.Thread(target=self._main, name=self._name, daemon=True).start()
            else:
                real("_thread", "start_new_thread")(self._main, ())
        except RuntimeError:
            return False
        self._has_started = True
        return True

    def _main(self) -> None:
        self.ident = _thread.get_ident()
        try:
            with guard.contained(self._name):
                self._run()
        finally:
            self.has_ended = True
            self._ended.release()

    # -- called from other threads ----------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return self._has_started and not self.has_ended

    def wake(self) -> None:
        """Ends a `rest`, the present one or the next."""
        try:
            self._wake.release()
        except RuntimeError:  # it is awake already
            pass

    def stop(self) -> None:
        """Asks the function to return."""
        self.is_stopping = True
        self.wake()

    def wait_for_end(self, deadline_ns: int) -> bool:
        """False: it has not ended by the deadline.

        Waits in short turns and trusts the flag, not the lock: a signal may come just when this
        thread has the lock, and its handler waits here too.
        """
        while not self.has_ended:
            left_s = (deadline_ns - clock.now()) / 1e9
            if left_s <= 0:
                return False
            if self._ended.acquire(timeout=min(left_s, LOOK_S)):
                self._ended.release()  # for whoever else waits
        return True

    # -- called from the thread itself ------------------------------------------------------

    def rest(self, seconds: float) -> None:
        """Waits until it is woken, not for longer than this."""
        self._wake.acquire(timeout=max(0.0, seconds))
