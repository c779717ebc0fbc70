"""Writing from a background thread to a stream that is the program's too.

Two things must not happen. A process that forks while a thread is inside a write leaves its child a
stream whose lock nobody will ever release: so a fork waits a moment for our write. And a write that
blocks because nobody reads the pipe keeps the stream's lock: the program would hang at its next
print, and abort at its end. So we write only what the pipe has room for, or when it is empty, which
it is while somebody reads it.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from cirron import system
from cirron.ship.threads import new_lock, sleep

if TYPE_CHECKING:
    from typing import TextIO

FORK_WAIT_S = 0.1
POLL_S = 0.01
# What the program itself may have in the stream's buffer, which goes out with our line.
BUFFERED_BYTES = 8192
# A pipe of ours should hold, as far as the system allows: the largest that it grants to anybody.
PIPE_BYTES = 2**20
# A line that fits into such a pipe with what else may be in it.
MAX_LINE_BYTES = 2**19


class ForkLock:
    """Held during a write, and during a fork."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._forking = 0  # the thread that has the lock for a fork

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def before_fork(self) -> None:
        if self._lock.acquire(timeout=FORK_WAIT_S):
            self._forking = threading.get_ident()

    def after_fork(self) -> None:
        if self._forking == threading.get_ident():
            self._forking = 0
            self._lock.release()

    def after_fork_in_child(self) -> None:
        self._lock = new_lock()  # who holds the old one may have stayed in the parent
        self._forking = 0


writing = ForkLock()
# Logging handlers have one of their own: they are the user's, and may block.
logging = ForkLock()

if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    for lock in (writing, logging):
        os.register_at_fork(
            before=lock.before_fork,
            after_in_parent=lock.after_fork,
            after_in_child=lock.after_fork_in_child,
        )


class Stream:
    """The stream that was stdout when profiling began. It is the program's: never closed."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self._is_closed = False
        self._is_read = False  # somebody has emptied the pipe since we wrote to it
        try:
            self._descriptor: int | None = file.fileno()
        except (OSError, ValueError, AttributeError):  # a notebook's, a test's
            self._descriptor = None
        else:
            system.widen_pipe(self._descriptor, PIPE_BYTES)

    def write(self, text: str) -> None:
        """Writes a text whole, and waits until there is room for it, or until `close`."""
        if self._descriptor is not None:
            self._wait_for_room(self._descriptor, len(text.encode()))
        self._write(text)

    def close(self) -> None:
        """Ends a wait for room; what waited is not written."""
        self._is_closed = True

    def _wait_for_room(self, descriptor: int, size: int) -> None:
        while (level := system.pipe_level(descriptor)) is not None:
            waiting, capacity = level
            # Up to half of each of its pages may be unused.
            if 2 * waiting + size + BUFFERED_BYTES <= capacity or (not waiting and self._is_read):
                return
            if not waiting:  # it is too long for the pipe: find out whether somebody reads it
                self._write("\n")
            self._wait_until_empty(descriptor)
            self._is_read = True

    def _wait_until_empty(self, descriptor: int) -> None:
        while (level := system.pipe_level(descriptor)) is not None and level[0]:
            if self._is_closed:
                raise TimeoutError("nobody reads the pipe")
            sleep(POLL_S)

    def _write(self, text: str) -> None:
        with writing:
            self.file.write(text)
            self.file.flush()
