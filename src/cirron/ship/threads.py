"""Cirron's threads: real ones even if gevent has replaced Python's. They are woken and awaited with
bare locks, which are safe in a signal handler, where the interrupted code may hold any other lock.
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

# How often a wait for the end of a thread checks whether it has ended.
LOOK_S = 0.1


def real(module: str, name: str) -> Any:
    """A function of the standard library itself, not gevent's replacement.

    A greenlet in place of a thread would not run while another greenlet computes.
    """
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None:
        return monkey.get_original(module, name)
    return getattr(sys.modules[module], name)


def new_lock() -> _thread.LockType:
    """A real lock, even under gevent."""
    lock: _thread.LockType = real("_thread", "allocate_lock")()
    return lock


def sleep(seconds: float) -> None:
    real("time", "sleep")(seconds)


class Worker:
    """A daemon thread that runs a function once; the function sleeps with `rest`."""

    def __init__(self, run: Callable[[], None], name: str) -> None:
        self.ident: int | None = None
        self.has_started = False
        self.is_stopping = False
        self.has_ended = False
        self.problem: str | None = None  # why it could not be started
        self._run = run
        self._name = name
        self._wake = new_lock()
        self._wake.acquire()
        self._ended = new_lock()
        self._ended.acquire()
        self._may_start = new_lock()

    def start(self) -> bool:
        """Starts the thread, once. False: Python cannot start one (a limit, or it is exiting)."""
        if not self._may_start.acquire(blocking=False):
            return True  # already started
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
        """Ends the current `rest`, or the next one."""
        try:
            self._wake.release()
        except RuntimeError:  # it is awake already
            pass

    def stop(self) -> None:
        """Asks the function to return."""
        self.is_stopping = True
        self.wake()

    def wait_for_end(self, deadline_ns: int) -> bool:
        """Waits for the end of the thread. False: it has not ended by the deadline.

        It polls the flag and does not rely on the lock: a signal may arrive while this thread holds
        the lock, and its handler waits here too.
        """
        while self.has_started and not self.has_ended:
            left_s = (deadline_ns - clock.now()) / 1e9
            if left_s <= 0:
                return False
            if self._ended.acquire(timeout=min(left_s, LOOK_S)):
                self._ended.release()  # for other waiters
        return True

    # -- called from the thread itself ------------------------------------------------------

    def rest(self, seconds: float) -> None:
        """Waits until woken, or for this long."""
        self._wake.acquire(timeout=max(0.0, seconds))


class Turns:
    """Python's switch interval: how long a busy thread keeps the GIL when others want it (5 ms).

    If several threads are busy, cirron's thread waits for each of them after every system call.
    The interval is therefore shortened while the backlog is large.
    """

    SHORT_S = 0.001

    def __init__(self) -> None:
        self._before_s = 0.0  # the original interval; 0: not changed

    def shorten(self) -> None:
        if not self._before_s and sys.getswitchinterval() > self.SHORT_S:
            self._before_s = sys.getswitchinterval()
            sys.setswitchinterval(self.SHORT_S)

    def restore(self) -> None:
        """Restores the interval, unless the program has changed it since."""
        before_s, self._before_s = self._before_s, 0.0
        if before_s and abs(sys.getswitchinterval() - self.SHORT_S) < 1e-6:
            sys.setswitchinterval(before_s)


turns = Turns()


class Ours(threading.local):
    """Whether the current thread is one of cirron's."""

    is_here = False


_ours = Ours()


class Speaker:
    """Logs the warnings of cirron's threads, on a separate thread.

    Logging handlers belong to the user. They may block, and must not delay the recording.
    """

    def __init__(self) -> None:
        self._messages: deque[Callable[[], None]] = deque(maxlen=100)
        self._worker: Worker | None = None
        self._is_busy = False

    def relay(self, say: Callable[[], None]) -> bool:
        """Queues a message. False: this is not a thread of cirron, and logs directly."""
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
        """Waits until all messages are logged, or for this long."""
        deadline_ns = clock.now() + int(timeout_s * 1e9)
        while (self._messages or self._is_busy) and clock.now() < deadline_ns:
            sleep(0.001)

    def after_fork(self) -> None:
        """In a forked child: the thread and its messages belong to the parent."""
        self.__init__()  # type: ignore[misc]

    def _run(self) -> None:
        worker = self._worker
        assert worker is not None
        while True:
            while self._messages:
                self._is_busy = True
                with contextlib.suppress(IndexError):
                    say = self._messages.popleft()
                    _ours.is_here = False  # log directly from here
                    with guard.contained("warning"):
                        say()
            self._is_busy = False
            worker.rest(3600.0)


speaker = Speaker()
guard.relay = speaker.relay
