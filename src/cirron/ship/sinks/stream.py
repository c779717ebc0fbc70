"""Writes from a background thread to a stream that the program uses too.

If the process forked during a write, the lock of the stream would stay held in the child, so a fork
waits a moment for the write. If a write blocked because the pipe is not read, it would hold the
lock: the program would hang at its next print, and abort at exit. A line is therefore written only
if the pipe has room for it, or is empty, which it is while it is being read.
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
# What the program may have in the buffer of the stream, which is flushed together with the line.
BUFFERED_BYTES = 8192
# The size that a pipe is set to: the largest that Linux allows every user.
PIPE_BYTES = 2**20
# A line of this size fits into such a pipe, along with other data.
MAX_LINE_BYTES = 2**19


class ForkLock:
    """Held during a write, and during a fork."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._forking = 0  # the thread that holds the lock for a fork

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
        self._lock = new_lock()  # the old one may be held by a thread of the parent
        self._forking = 0


writing = ForkLock()
# A separate lock for logging handlers, which belong to the user and may block.
logging = ForkLock()

if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    for lock in (writing, logging):
        os.register_at_fork(
            before=lock.before_fork,
            after_in_parent=lock.after_fork,
            after_in_child=lock.after_fork_in_child,
        )


class Stream:
    """The stream that was stdout when profiling began. It belongs to the program: never closed."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self._is_closed = False
        self._is_read = False  # the pipe was emptied after the last write
        try:
            self._descriptor: int | None = file.fileno()
        except (OSError, ValueError, AttributeError):  # in a notebook or a test
            self._descriptor = None
        else:
            system.widen_pipe(self._descriptor, PIPE_BYTES)

    def write(self, text: str) -> None:
        """Waits until there is room for the whole text, or until `close`, and writes it."""
        if self._descriptor is not None:
            self._wait_for_room(self._descriptor, len(text.encode()))
        self._write(text)

    def close(self) -> None:
        """Ends a wait for room; the waiting text is not written."""
        self._is_closed = True

    def _wait_for_room(self, descriptor: int, size: int) -> None:
        while (level := system.pipe_level(descriptor)) is not None:
            waiting, capacity = level
            # Up to half of each page of the pipe may be unused.
            if 2 * waiting + size + BUFFERED_BYTES <= capacity or (not waiting and self._is_read):
                return
            if not waiting:  # the text is too long: find out whether the pipe is being read
                self._write("\n")
            self._wait_until_empty(descriptor)
            self._is_read = True

    def _wait_until_empty(self, descriptor: int) -> None:
        while (level := system.pipe_level(descriptor)) is not None and level[0]:
            if self._is_closed:
                raise TimeoutError("the pipe is not being read")
            sleep(POLL_S)

    def _write(self, text: str) -> None:
        with writing:
            self.file.write(text)
            self.file.flush()
