"""`profile()`, `shutdown()`, `flush()`, `health()`, `trace()`, `watch()`: the public calls.

Holds the one session of this process. `compose.py` builds a session; `lifecycle.py` handles exit,
signals and forks.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from cirron import errors, guard, hooks, settings, wire
from cirron.record import clock, hot
from cirron.record.budget import renew
from cirron.runs import tree
from cirron.session.compose import Flushed as Flushed
from cirron.session.compose import Session
from cirron.session.lifecycle import Process
from cirron.ship.collect import Collector
from cirron.ship.sinks.memory import Memory
from cirron.snapshot.taker import check, refer, stand_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cirron.session.compose import Recorded
    from cirron.ship.sinks.base import Emitter
    from cirron.verdict.findings import Report

P = ParamSpec("P")
R = TypeVar("R")
FORMATS = ("tree", "dict", "json", "df")

# How long a signal handler waits for the worker before the signal has its usual effect.
SIGNAL_WAIT_S = 3.0
# `ci.flush()` blocks, but not forever if the disk hangs.
FLUSH_WAIT_S = 60.0
# How long `cirron run` lets a program wait for its first black box: usually a millisecond.
FIRST_BOX_S = 0.25

_lock = threading.RLock()
_memory = Memory()
_idle_state = hot.State(hot.ring, opened=hot.opened)  # where records go without a session
_idle = Collector(_idle_state, _memory, clock.read_anchor())
_profiler: Profiler | None = None
_owner = 0  # the process that created it
_session: Session | None = None
_memory_is_old = False  # it holds records of a session that has ended
_recorded: Recorded | None = None  # of the last session that has ended
_is_automatic = False  # started by `cirron run`: the program's own call replaces it
_to_watch: list[Callable[[], Any]] = []  # passed to `ci.watch()` before there was a session


def _begin(
    values: settings.Settings,
    flags: Mapping[str, Any],
    frameworks: tuple[str, ...] | None,
    sinks: tuple[Emitter, ...],
    *,
    enabled: bool,
) -> Profiler:
    global _profiler, _session, _owner, _memory_is_old, _is_automatic
    with _lock:
        if _profiler is not None and _owner != os.getpid():  # inherited by a fork
            _end("clean")
        if _profiler is not None and _is_automatic:  # the program's own settings take precedence
            if _session is not None:
                _session.is_removed_if_empty = True
            _end("clean")
        if _profiler is not None:
            guard.warn(
                "ci.profile() was called again; the running profiler continues unchanged."
                " Call ci.shutdown() first to start another"
            )
            return _profiler
        _profiler = Profiler(flags, enabled=enabled)
        _owner = os.getpid()
        _is_automatic = False
        if _memory_is_old:
            _memory.clear()
            _memory_is_old = False
        if not enabled:
            hot.attach(hot.State(deque(maxlen=0), opened=hot.opened, off=True))
            return _profiler
        with guard.quiet("start"):
            _idle.drain()
            renew(values.overhead)
            session = Session(values, frameworks, _memory, _process.watch_child, sinks, flags)
            session.start()
            _session = session
            waiting = [model for known in _to_watch if (model := known()) is not None]
            _to_watch.clear()
            for model in waiting:
                session.watch(model)
            session.hooks.install()
            _process.watch()
        return _profiler


def begin_by_itself() -> None:
    """For `cirron run`: starts profiling, until the program calls `ci.profile()` itself."""
    global _is_automatic
    with _lock:
        if _profiler is not None:
            return
        profile()
        _is_automatic = True
    if _session is None:
        return
    # Workers of a pool and of a loader import a framework, and often record nothing.
    _session.is_removed_if_empty = _session.is_child
    if _session.black_box is not None:
        # A program that dies in its first line leaves a run, too.
        _session.black_box.refresh(clock.now() + int(FIRST_BOX_S * 1e9))


def shutdown() -> None:
    """Ends the session: closes the root scope, stores everything, stops the background thread.

    `ci.profile()` may be called again afterwards. A second call of `ci.shutdown()` does nothing.
    """
    _finish("clean")


def _finish(how: str, detail: str | None = None) -> None:
    session = _session
    _end(how, detail)
    if session is not None and session.pid == os.getpid():
        from cirron.session import closing

        with guard.quiet("report"):
            if closing.speaks(session, how):
                closing.say(session, how)


def _end(how: str, detail: str | None = None) -> None:
    global _profiler, _session, _memory_is_old, _recorded
    with _lock:
        if _profiler is None:
            return
        _profiler = None
        if _session is not None:
            with guard.quiet("hooks"):
                _session.hooks.uninstall()  # they close their own spans
        hot.attach(_idle_state)
        _memory_is_old = True
        try:
            with guard.quiet("shutdown"):
                if _session is not None:
                    _session.end(how, detail)  # a signal handler still finds the session, and waits
                    _recorded = _session.recorded if _session.pid == os.getpid() else None
                _process.unwatch()
        finally:
            _session = None


def flush() -> Flushed:
    """Blocks until everything recorded before the call is on disk; returns the result.

    >>> ci.flush().ok
    True
    """
    session = _session
    if session is None or session.pid != os.getpid():
        return Flushed(ok=True, on_disk=0, sent=0, held=0, lost=0, why=None)
    if hot.device_clock is not None:
        hot.device_clock.settle()
    return session.flush(clock.now() + int(FLUSH_WAIT_S * 1e9))


def watch(model: Any) -> None:
    """Takes a snapshot of the model's weights and gradients at the end of each epoch.

    May be called for several models. Not needed for Keras and the Trainer of transformers: their
    hooks know the model.

    >>> ci.profile(snapshots="stats")
    >>> ci.watch(model)
    """
    if not hot.off and not hooks.is_installed("numpy"):
        raise errors.missing("ci.watch()", "numpy")
    with _lock:
        session = _session
        if session is not None and session.pid in (0, os.getpid()):
            session.watch(model)
        elif not hot.off:
            model = stand_in(model, [known() for known in _to_watch])
            check(model)
            if all(known() is not model for known in _to_watch):
                _to_watch.append(refer(model))


def health() -> dict[str, Any]:
    """Counters and state of the profiler; never raises."""
    found: dict[str, Any] = {
        "enabled": _profiler is not None and _profiler.enabled,
        "frameworks_installed": [],
        "transport": "file_only",
        "scope_depth": 0,
        "mark_drop_count": 0,
        "record_drop_count": 0,
        "spool_drop_count": 0,
        "spool_bytes": 0,
        "flush_latency_ns": None,
    }
    with guard.quiet("health"):
        found["scope_depth"] = hot.depth()
        found["errors"] = dict(guard.errors)
        session = _session
        if session is not None and session.pid == os.getpid():
            found["transport"] = session.sinks.transport
            found["frameworks_installed"] = session.hooks.installed
            found["session_id"] = session.identity.id
            found["run_id"] = session.identity.run_id
            found["rank"] = session.identity.rank
            found["flusher_alive"] = session.flusher.is_alive
            found.update(session.counters())
    return found


def trace(format: str = "tree", name: str | None = None, last: int | None = None) -> Any:
    """The tree of this process's spans, from memory.

    `format` is "tree" (prints it, or shows it in a notebook cell), "dict", "json" or "df" (a pandas
    DataFrame, one row per span). `name` selects spans of that name with their descendants, `last`
    the spans that closed last.

    >>> ci.trace(name="epoch")
    """
    if format not in FORMATS:
        raise errors.one_of("format", format, FORMATS)
    if last is not None and (isinstance(last, bool) or not isinstance(last, int) or last < 0):
        raise errors.out_of_range("last", last, "it must be a whole number, 0 or more")
    if name is not None and not isinstance(name, str):
        raise errors.out_of_range("name", name, "it must be the name of a scope")
    found = tree.select(_collect(), name=name, last=last)
    if format == "dict":
        return tree.to_dict(found)
    if format == "json":
        return tree.to_json(found)
    if format == "df":
        return tree.to_frame(found)
    from cirron.view import notebook, text

    if hot.off:
        text.print_safely("profiling is off: ci.profile(enabled=False) or CIRRON_ENABLED=0")
        return None
    if notebook.in_notebook():
        return found  # the cell shows it as HTML
    text.print_safely(text.render(found))
    return None


def report() -> Report:
    """The verdict on the session so far: why it is slow, what to do, and the expected gain.

    Prints it, or shows it in a notebook cell. Never raises: if there is no verdict, it says why.

    >>> ci.report().verdict.kind
    'input-bound'
    """
    from cirron.session import closing
    from cirron.view import notebook, text

    session = _session
    recorded, opened = None if hot.off else _recorded, []
    with guard.quiet("report"):
        flush()
        if session is not None and session.pid == os.getpid():
            recorded, collector = session.recorded, session.collector
            opened = [collector.open_record(span) for span in collector.open_spans()]
    found = closing.judge(recorded, opened)
    if not notebook.in_notebook() and not hasattr(sys, "ps1"):  # a prompt shows return values
        text.print_safely(repr(found))
    return found


def _collect() -> tree.Tree:
    session = _session
    memory, collectors = _memory, [_idle]
    if session is not None and session.pid == os.getpid():
        memory = session.memory
        collectors.append(session.collector)
    spans: list[wire.Span] = []
    for collector in collectors:
        collector.drain()
        collector.settle()
        spans += [collector.open_record(span) for span in collector.open_spans()]
        spans += collector.held_records()
    marks = collectors[-1].kept_losses()
    for span_bytes, mark_bytes in memory.chunks():
        spans += wire.decode_spans(span_bytes)
        marks += wire.decode_marks(mark_bytes)
    anchor = _idle.anchor if session is None else session.anchor
    found = tree.build(spans, marks, now_ns=anchor.at(clock.now()))
    found.is_partial = memory.evicted_bytes > 0
    return found


# -- signals and forks -----------------------------------------------------------------------


def _on_signal(name: str, *, is_fatal: bool) -> None:
    """Lets the worker store all records before the signal has its usual effect.

    Runs in a signal handler: the interrupted code may hold any lock, so this takes none. It only
    waits for the worker, within a time limit.
    """
    session = _session
    if session is None or session.pid != os.getpid():
        return
    if session.black_box is not None:
        at_ns = session.anchor.at(clock.now())
        session.black_box.signals.append({"name": name, "at_ns": at_ns})
    if is_fatal:
        hot.attach(_idle_state)
        if session.rank() is None and _is_daemon():
            session.end("clean")
        else:
            session.end("signal", name)
    else:
        session.store(clock.now() + int(SIGNAL_WAIT_S * 1e9))


def _is_daemon() -> bool:
    """Whether this is a daemonic child, such as a Pool's worker: its parent ends it by a signal."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.current_process().daemon


def _on_exec() -> None:
    """Ends the session, because another program will replace this one. It is of the same run."""
    session = _session
    if session is not None and session.pid == os.getpid():
        _finish("clean")
        session.hand_down()


def _after_fork() -> None:
    """In a forked child: replaces locks, and the records that the parent will write."""
    global _lock, _memory, _idle, _recorded
    _lock = threading.RLock()
    _memory = Memory()
    _idle = Collector(_idle_state, _memory, clock.read_anchor())
    _recorded = None
    if _session is not None:
        _process.leave_to_child()
        _session.start_in_child()


_process = Process(on_exit=_finish, on_signal=_on_signal, on_exec=_on_exec, after_fork=_after_fork)


# -- as objects ------------------------------------------------------------------------------


class Calls:
    """The public functions of a running session, as methods."""

    flush = staticmethod(flush)
    health = staticmethod(health)
    trace = staticmethod(trace)
    report = staticmethod(report)


class Profiler(Calls):
    """The handle that `ci.profile()` returns."""

    def __init__(self, config: Mapping[str, Any], *, enabled: bool) -> None:
        self.config = config  # the user's feature flags
        self.enabled = enabled

    def shutdown(self) -> None:
        """Ends this profiler's session, like `ci.shutdown()`."""
        if _profiler is self:
            shutdown()

    def __repr__(self) -> str:
        return f"<cirron profiler, {'on' if self.enabled else 'off'}>"


def named(where: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a misspelt argument an error that says what to write."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        code = function.__code__
        names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]  # without `self`

        @functools.wraps(function)
        def call(*args: P.args, **given: P.kwargs) -> R:
            for name in given:
                if name not in names:
                    is_elsewhere = where == "ci.profile" and name in settings.BY_NAME
                    hint = f"write ci.Cirron({name}=...).profile()" if is_elsewhere else ""
                    raise errors.no_argument(where, name, names, hint)
            return function(*args, **given)

        return call

    return decorate


class Cirron(Calls):
    """A profiler with explicit settings, for self-hosted endpoints and tests.

    >>> cirron = ci.Cirron(api_endpoint="http://localhost:8000", api_key="secret")
    >>> cirron.profile()
    """

    @named("ci.Cirron")
    def __init__(
        self,
        api_key: str | None = None,
        api_endpoint: str | None = None,
        output_dir: str | None = None,
        snapshots: str | None = None,
        sample_rate: float | None = None,
        flush_interval: float | None = None,
        spool_max_bytes: int | None = None,
        output: str | list[str] | None = None,
        steps_per_epoch: int | None = None,
        loss_marks: bool | None = None,
        loggers: bool | None = None,
        max_pending_records: int | None = None,
        silence_after: float | None = None,
        exit_timeout: float | None = None,
        access: Literal["private", "group", "all"] | None = None,
        allow_insecure: bool | None = None,
        sinks: Sequence[Emitter] | None = None,
        tags: list[str] | dict[str, str] | None = None,
        overhead: float | None = None,
        report: bool | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "sinks")}
        self._given = settings.check(given)
        self._sinks = check_sinks(sinks)

    shutdown = staticmethod(shutdown)
    scope = staticmethod(hot.scope)
    mark = staticmethod(hot.mark)
    epochs = staticmethod(hot.epochs)
    batches = staticmethod(hot.batches)

    @property
    def settings(self) -> settings.Settings:
        """The settings that `profile()` would use."""
        return settings.resolve(self._given)

    @named("ci.profile")
    def profile(
        self,
        config: dict[str, Any] | None = None,
        frameworks: list[str] | None = None,
        snapshots: Literal["stats", "sampled", "full"] | None = None,
        sample_rate: float | None = None,
        flush_interval: float | None = None,
        enabled: bool = True,
        path: str | None = None,
        output: str | list[str] | None = None,
        sinks: Sequence[Emitter] | None = None,
        tags: list[str] | dict[str, str] | None = None,
        overhead: float | None = None,
        report: bool | None = None,
        loss_marks: bool | None = None,
    ) -> Profiler:
        """Starts profiling this process. Call it once; the handle may be ignored.

        An invalid argument raises `ValueError` with the valid values, and changes nothing. A second
        call logs a warning and returns the first handle. `sinks` are your own destinations: objects
        with `emit(batch) -> Outcome`. `tags` and `config` are recorded with the run.

        >>> ci.profile(output=["spool", "stdout"], tags=["baseline"], config={"lr": 0.1})
        """
        given = settings.check(
            {
                "snapshots": snapshots,
                "sample_rate": sample_rate,
                "flush_interval": flush_interval,
                "output_dir": path,
                "output": output,
                "tags": tags,
                "overhead": overhead,
                "report": report,
                "loss_marks": loss_marks,
            },
            output_dir="path",
        )
        on = settings.switch("enabled", enabled)
        values = settings.resolve({**self._given, **given})
        flags = settings.flags(config)
        wanted = hooks.check(frameworks)
        own = (*self._sinks, *check_sinks(sinks))
        return _begin(values, flags, wanted, own, enabled=on and values.enabled)


def check_sinks(given: Sequence[Emitter] | None) -> tuple[Emitter, ...]:
    sinks = [] if given is None else given
    if not isinstance(sinks, (list, tuple)) or not all(
        callable(getattr(one, "emit", None)) and not isinstance(one, type) for one in sinks
    ):
        rule = (
            "it must be a list of sinks: objects with a method emit(batch), which returns"
            " ci.Outcome.DONE or ci.Outcome.DROPPED"
        )
        raise errors.out_of_range("sinks", given, rule)
    return tuple(sinks)


profile = Cirron().profile
