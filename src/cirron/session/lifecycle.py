"""Exit, signals and forks: notifies the session, and does not change the program's behaviour.

A signal has the same effect as without cirron: same exit status, same exception, and the user's own
handler is called. Cirron's handler only lets the worker finish first.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import gc
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, Protocol

from cirron.hooks.patch import Patches
from cirron.record.attrs import describe_error

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

# Limit of an exception's text in the black box: that of a compiler or server may be megabytes.
MAX_DETAIL_BYTES = 4096

# If the handler was not called within this time, the signal was missed.
MISSED_S = 0.05


# Python 3.11 may collect garbage inside `ContextVar.set`. A finalizer that opens a scope then sets
# the same variable and frees the mapping that the outer call is still reading, which crashes Python
# unless another context refers to that mapping. So a copy of the context is kept from the start of
# each collection to the start of the next. Only C code does this: Python would call signal handlers
# in a callback written in Python, and ignore their exceptions.
_contexts: defaultdict[tuple[()], Context] = defaultdict(copy_context)


class Drop(tuple[()]):
    """Reading `start`, the name of a phase of the garbage collector, drops the last copy."""

    start = property(_contexts.pop)


class Keep(tuple[()]):
    """Reading `start` makes a copy. The key of both classes in `_contexts` is `()`."""

    start = property(_contexts.__getitem__)


# Called with the phase and a dict.
KEEPERS = (functools.partial(getattr, Drop()), functools.partial(getattr, Keep()))


class OnSignal(Protocol):
    """Called for a signal; `is_fatal`: the process ends when this returns."""

    def __call__(self, name: str, *, is_fatal: bool) -> None: ...


class Process:
    """Notices the exit, the signals and the forks of this process."""

    def __init__(
        self,
        *,
        on_exit: Callable[[str, str | None], None],
        on_signal: OnSignal,
        on_exec: Callable[[], None],
        after_fork: Callable[[], None],
    ) -> None:
        self._on_exit = on_exit
        self._on_signal = on_signal
        self._on_exec = on_exec
        self._previous: dict[int, Any] = {}
        self._finalizer: Any = None
        self._is_handling = False
        self._patches = Patches()
        # The outermost frame of the program, and the status of its last `sys.exit`.
        self._outermost: FrameType | None = None
        self._status: object = None
        self._after_fork = after_fork
        self._masks: dict[int, set[signal.Signals]] = {}  # of threads that fork
        if hasattr(os, "register_at_fork"):  # cannot be undone
            os.register_at_fork(
                before=self._hold_back,
                after_in_parent=self._let_through,
                after_in_child=self._begin_child,
            )

    def watch(self) -> None:
        """Registers for exit and signals."""
        atexit.register(self._exit)
        if sys.version_info < (3, 12):
            _contexts[()] = copy_context()
            gc.callbacks.extend(KEEPERS)
        # Python forgets the status before it calls `atexit`.
        self._note_status(sys, "exit")
        if hasattr(builtins, "exit"):  # `quit` has the same class; missing under `python -S`
            self._note_status(type(builtins.exit), "__call__")
        for name in ("execv", "execve"):  # all other functions of this kind call one of these
            self._note_exec(name)
        self.watch_multiprocessing()
        if threading.current_thread() is not threading.main_thread():
            return  # Python lets only the main thread set handlers
        self._outermost = find_outermost()
        for number in (signal.SIGTERM, signal.SIGINT):
            current = signal.getsignal(number)
            # Not replaced: an ignored signal; a handler that was set outside Python (None);
            # Python's own handler for Ctrl-C, because an uncaught KeyboardInterrupt reaches
            # `_exit`, and asyncio.run() installs its own only in place of that one; and cirron's
            # handler, which the program may have saved and restored.
            if current in (signal.SIG_IGN, None, signal.default_int_handler, self._handle):
                continue
            self._previous[number] = current
            with contextlib.suppress(ValueError):  # not in a subinterpreter
                signal.signal(number, self._handle)

    def unwatch(self) -> None:
        """Restores what `watch` replaced, unless it was replaced again since."""
        atexit.unregister(self._exit)
        gc.callbacks[:] = [one for one in gc.callbacks if one not in KEEPERS]
        self._patches.undo()
        self._outermost = self._status = None
        if self._finalizer is not None:
            self._finalizer.cancel()
            self._finalizer = None
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in list(self._previous.items()):
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)
                del self._previous[number]

    def watch_multiprocessing(self) -> None:
        """Children of `multiprocessing` end with `os._exit`: atexit is not called, this list is."""
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            self._finalizer = util.Finalize(None, self._exit, exitpriority=100)

    def leave_to_child(self) -> None:
        """In a forked child: gives SIGTERM its default effect until the child records something.

        Python does not call a handler if the signal arrives just before the thread waits for a
        system lock: one in a thousand workers of a Pool would never end.
        """
        if self._is_handled_for_us_alone():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _hold_back(self) -> None:
        """Before a fork: blocks SIGTERM until the child has its default handler.

        Python drops a signal that reaches a child before that. On a busy machine, a Pool may have
        finished and be ending its workers before the last of them has run at all.
        """
        if self._is_handled_for_us_alone():
            held = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
            self._masks[threading.get_ident()] = held  # type: ignore[assignment]

    def _let_through(self) -> None:
        mask = self._masks.pop(threading.get_ident(), None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _begin_child(self) -> None:
        try:
            self._after_fork()
        finally:
            self._let_through()
            self._masks.clear()

    def watch_child(self) -> None:
        """In a forked child that records: notices its exit and SIGTERM."""
        self.watch_multiprocessing()
        if threading.current_thread() is not threading.main_thread():
            return
        current = signal.getsignal(signal.SIGTERM)
        if current == signal.SIG_DFL == self._previous.get(signal.SIGTERM):
            signal.signal(signal.SIGTERM, self._handle)
            self._listen()

    def _is_handled_for_us_alone(self) -> bool:
        """Whether SIGTERM would have its default effect without cirron's handler."""
        return (
            self._previous.get(signal.SIGTERM) == signal.SIG_DFL
            and signal.getsignal(signal.SIGTERM) == self._handle
        )

    def _listen(self) -> None:
        """Starts a thread that sends SIGTERM again if the main thread misses it."""
        try:
            heard, told = os.pipe()
        except OSError:  # no free descriptor: SIGTERM may be delayed by a blocking call
            return
        os.set_blocking(told, False)
        if (before := signal.set_wakeup_fd(told, warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(before)  # already in use, for example by asyncio
            os.close(heard)
            os.close(told)
            return
        main = threading.get_ident()
        self._is_handling = False

        def listen() -> None:
            while signal.SIGTERM not in os.read(heard, 64):
                pass
            while not self._is_handling:
                time.sleep(MISSED_S)
                if not self._is_handling and signal.getsignal(signal.SIGTERM) == self._handle:
                    signal.pthread_kill(main, signal.SIGTERM)

        threading.Thread(target=listen, name="cirron-signals", daemon=True).start()

    def _note_status(self, owner: Any, name: str) -> None:
        """Wraps a function that raises SystemExit, to remember the exit status."""
        raise_exit = getattr(owner, name)

        @functools.wraps(raise_exit)
        def leave(*given: Any, **named: Any) -> Any:
            # In other threads, it ends only the thread.
            if threading.current_thread() is threading.main_thread():
                self._outermost = find_outermost()
                said = (*given[isinstance(owner, type) :], *named.values())
                self._status = next(iter(said), None)
            return raise_exit(*given, **named)

        self._patches.set(owner, name, leave)

    def _note_exec(self, name: str) -> None:
        """Wraps a function that replaces this program: threads and `atexit` end without a word."""
        replace = getattr(os, name)

        @functools.wraps(replace)
        def leave(path: Any, *given: Any) -> Any:
            # `os.execvp` tries each folder of PATH.
            with contextlib.suppress(TypeError, ValueError):  # `replace` raises the right one
                if os.access(path, os.X_OK):
                    self._on_exec()
            return replace(path, *given)

        self._patches.set(os, name, leave)

    def _exit(self) -> None:
        frame, status = self._outermost, None
        if frame is not None and was_left_by_error(frame):
            status = status_raised(frame) if self._status is None else self._status
        self._on_exit(*how_it_ends(status))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._is_handling = True
        previous = self._previous.get(number, signal.SIG_DFL)
        self._on_signal(signal.Signals(number).name, is_fatal=not callable(previous))
        if callable(previous):
            previous(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def find_outermost() -> FrameType:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def was_left_by_error(frame: FrameType) -> bool:
    """Whether an exception has left this frame, which was the outermost one.

    False if the process ends while the frame still runs, as a forked child does.
    """
    import opcode  # here, because it would dominate the import time of cirron

    last = opcode.opname[frame.f_code.co_code[frame.f_lasti]]
    return frame is not find_outermost() and not last.startswith("RETURN")


def status_raised(frame: FrameType) -> object:
    """The status of a `raise SystemExit(3)` that has left the frame of the script.

    The exception is gone by now, so the status is read from the source at that position. None: it
    is not a constant, as in `raise SystemExit(main())`.
    """
    import ast
    import itertools
    import linecache

    with contextlib.suppress(Exception):  # the source may be missing, or different
        places = itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
        line, end_line, column, end_column = next(places)
        lines = linecache.getlines(frame.f_code.co_filename)[(line or 1) - 1 : end_line]
        lines[-1] = lines[-1].encode()[:end_column].decode()
        lines[0] = lines[0].encode()[column:].decode()
        match ast.parse("".join(lines)).body[0]:
            case ast.Raise(exc=ast.Call(func=ast.Name("SystemExit"), args=[ast.Constant(status)])):
                return status
    return None


def how_it_ends(status: object = None) -> tuple[str, str | None]:
    """Why the interpreter exits, as far as Python tells; `status` is that of `sys.exit`."""
    error = last_error()
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return "clean", None  # a prompt continues after an exception
    # Not isinstance(), which may call `__class__` of the exception.
    if error is None or issubclass(kind := type(error), SystemExit):
        status = getattr(error, "code", status)
        if status is None or (isinstance(status, int) and status == 0):
            return "clean", None
        kind, error = SystemExit, SystemExit(status)
    if issubclass(kind, KeyboardInterrupt):
        return "signal", "SIGINT"
    return "exception", describe_error(kind, error, MAX_DETAIL_BYTES)


def last_error() -> BaseException | None:
    """The error that ends the program, if there is one."""
    # A child of `multiprocessing` is still handling its exception; elsewhere it was printed.
    return getattr(sys, "last_value", None) or sys.exc_info()[1]
