"""Writing from the background thread to a stream that is the program's too.

A process that forks while a thread is inside a write leaves its child a stream whose lock nobody
will ever release: the child hangs at its first print, or when `multiprocessing` flushes its streams
at the end. Programs know that of their own threads, not of ours. So a fork waits until our write is
done; not for ever, since whoever reads the stream may hang.
"""

from __future__ import annotations

import os
import threading

FORK_WAIT_S = 1.0


class ForkLock:
    """Held during a write, and during a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
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
        self._lock = threading.Lock()  # who holds the old one may have stayed in the parent
        self._forking = 0


writing = ForkLock()

if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(
        before=writing.before_fork,
        after_in_parent=writing.after_fork,
        after_in_child=writing.after_fork_in_child,
    )
