"""Threads of ours: real ones even where gevent has replaced Python's, woken and awaited by bare
locks, which are safe in a signal handler, where the interrupted code may hold any other lock.
"""

from __future__ import annotations

import _thread
import contextlib
import sys
import threading
import time  # noqa: F401  `real` looks it up among the imported modules
from collections import deque
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
        self.has_started = False
        self.is_stopping = False
        self.has_ended = False
        self.problem: str | None = None  # why it could not be started, while it cannot
        self._run = run
        self._name = name
        self._wake = new_lock()
        self._wake.acquire()
        self._ended = new_lock()
        self._ended.acquire()
        self._may_start = new_lock()

    def start(self) -> bool:
        """Starts it, once. False: Python starts no more threads: too many run, or it is ending."""
        if not self._may_start.acquire(blocking=False):
            return True  # somebody has
        self.has_started = True
        try:
            if real("_thread", "start_new_thread") is _thread.start_new_thread:
                threading.Thread(target=self._main, name=self._name, daemon=True).start()
            else:
                real("_thread", "start_new_thread")(self._main, ())
            self.problem = None
        except RuntimeError as error:
            self.problem = f"no background thread could be started ({error})"
            self.has_started = False
            self._may_start.release()
        return self.has_started

    def _main(self) -> None:
        self.ident = _thread.get_ident()
        _ours.is_here = True
        try:
            with guard.contained(self._name):
                self._run()
        finally:
            self.has_ended = True
            self._ended.release()

    # -- called from other threads ----------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return self.has_started and not self.has_ended

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
        while self.has_started and not self.has_ended:
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


class Turns:
    """How long a busy thread keeps the interpreter lock when others want it: Python says 5 ms.

    Where several are busy, a thread of ours waits for the turn of each, at every call of the
    system. While it has much to do, the turns are shorter.
    """

    SHORT_S = 0.001

    def __init__(self) -> None:
        self._before_s = 0.0  # what they were; 0: they are not changed

    def shorten(self) -> None:
        if not self._before_s and sys.getswitchinterval() > self.SHORT_S:
            self._before_s = sys.getswitchinterval()
            sys.setswitchinterval(self.SHORT_S)

    def restore(self) -> None:
        """Makes them as they were, unless the program has set them since."""
        before_s, self._before_s = self._before_s, 0.0
        if before_s and abs(sys.getswitchinterval() - self.SHORT_S) < 1e-6:
            sys.setswitchinterval(before_s)


turns = Turns()


class Ours(threading.local):
    """Whether this thread is one of ours."""

    is_here = False


_ours = Ours()


class Speaker:
    """Says what our threads have to say, on a thread of its own.

    A logging handler is the user's: it may block, and must not hold up the recording.
    """

    def __init__(self) -> None:
        self._messages: deque[Callable[[], None]] = deque(maxlen=100)
        self._worker: Worker | None = None
        self._is_busy = False

    def relay(self, say: Callable[[], None]) -> bool:
        """False: the caller is no thread of ours, and says it itself."""
        if not _ours.is_here:
            return False
        if self._worker is None or not self._worker.is_alive:
            worker = self._worker = Worker(self._run, "cirron-warnings")
            if not worker.start():
                return False
        self._messages.append(say)
        self._worker.wake()
        return True

    def settle(self, timeout_s: float) -> None:
        """Waits until all is said, not for longer than this."""
        deadline_ns = clock.now() + int(timeout_s * 1e9)
        while (self._messages or self._is_busy) and clock.now() < deadline_ns:
            sleep(0.001)

    def after_fork(self) -> None:
        """In a forked child: the thread, and what it had to say, are the parent's."""
        self.__init__()  # type: ignore[misc]

    def _run(self) -> None:
        worker = self._worker
        assert worker is not None
        while True:
            while self._messages:
                self._is_busy = True
                with contextlib.suppress(IndexError):
                    say = self._messages.popleft()
                    _ours.is_here = False  # what it says is said here
                    with guard.contained("warning"):
                        say()
            self._is_busy = False
            worker.rest(3600.0)


speaker = Speaker()
guard.relay = speaker.relay
