"""`profile()`, `shutdown()`, `flush()`, `health()`, `trace()`: where the stages are put together.

The composition root, and the owner of the process's one session. A session is built whole and then
attached; taking it down is bounded in time; a forked child gets its own on its first record.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cirron import errors, guard, hooks, identity, settings, wire
from cirron._version import __version__
from cirron.blackbox import BlackBox
from cirron.flusher import Flusher
from cirron.process import Process
from cirron.record import clock, hot
from cirron.record.collect import Collector
from cirron.runs import tree
from cirron.sinks.memory import Memory
from cirron.snapshot.taker import Taker, check, refer, stand_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cirron.sinks.base import Sink
    from cirron.snapshot.taker import Taken

ROOT = "cirron.session"
FORMATS = ("tree", "dict", "json", "df")

# A handler waits this long for the worker before the signal takes its course.
SIGNAL_WAIT_S = 3.0
# Of the time that an exit may take, what is kept for storing records when snapshots take long.
STORE_NS = 1_000_000_000
# `ci.flush()` blocks; a disk that hangs must not make it block for ever.
FLUSH_WAIT_S = 60.0


class Session:
    """One profiled stretch of the process's life."""

    def __init__(
        self,
        values: settings.Settings,
        frameworks: tuple[str, ...] | None,
        memory: Memory,
        run_id: str | None,
    ) -> None:
        self.settings = values
        self.memory = memory
        self.anchor = clock.read_anchor()
        self.identity = identity.identify(os.environ, self.anchor, run_id)
        self.taker = Taker(
            values.snapshots,
            values.sample_rate,
            folder=self._folder() if "spool" in values.output else None,
            wall_ns=self.anchor.at,
            deliver=self._deliver,
        )
        self.hooks = hooks.Hooks(values, frameworks, self.taker)
        self.root: hot.Span | None = None
        self.pid = 0  # of the process whose stages these are; 0 while there are none
        self.state: hot.State
        self.collector: Collector
        self.sinks: list[Sink] = []
        self.transport = "file_only"
        self.black_box: BlackBox | None = None
        self.flusher: Flusher

    # -- starting ---------------------------------------------------------------------------

    def start(self) -> None:
        """Builds the stages and attaches them."""
        self._cpu_start_ns = time.process_time_ns()
        attrs = {"framework": self.hooks.imported, **identity.surroundings(os.environ)}
        self.root = hot.new_root(ROOT, attrs, depth=1, number=next(hot.sequence))
        self.state = self._new_state()
        self.state.opened.add(self.root)
        self.state.opened |= hot.opened  # scopes that are open already end in this session
        hot.opened.clear()
        self._given_before = hot.expected() - len(self.state.opened)
        self._too_deep = hot.too_deep
        self._build()
        self.flusher.start()
        for sink in self.sinks:
            sink.tick()  # begins with what an earlier run left to send
        hot.leave_context()
        hot.attach(self.state)

    def start_in_child(self) -> None:
        """After a fork: nothing is made until the child records something of its own.

        Scopes that were open are the parent's to close; what the child records is under the root.
        """
        for sink in self.sinks:
            sink.after_fork()
        self.sinks = []
        self.state = self._new_state()
        self._given_before = hot.expected()
        self.identity = wire.changed(self.identity, pid=os.getpid())
        self.memory = Memory()
        self.taker.after_fork()
        self.pid = 0
        self._starting = threading.Lock()

        def first_append(record: hot.Record) -> None:
            self._begin_in_child()
            self.state.ring.append(record)

        self.state.append = first_append
        hot.attach(self.state)

    def _begin_in_child(self) -> None:
        with self._starting:
            if not self.pid:
                self.state.append = self.state.ring.append
                hot.attach(self.state)
                with guard.quiet("start after fork"):
                    self._build()
                    self.flusher.start()
                    _process.watch_child()

    def _new_state(self) -> hot.State:
        return hot.State(
            deque(maxlen=self.settings.max_pending_records),
            root=self.root,
            at_epoch_end=self.taker.take if self.taker.is_watching else None,
        )

    def _folder(self) -> Path:
        folder = Path(self.settings.output_dir)
        with contextlib.suppress(FileNotFoundError):  # no working directory: the spool will say so
            folder = folder.absolute()  # the program may change it
        return folder

    def _build(self) -> None:
        values = self.settings
        self.pid = os.getpid()
        self.collector = Collector(
            self.state,
            self.memory,
            self.anchor,
            given_before=self._given_before,
            rank=self.identity.rank,
            keep_chunks=True,
            keep_lines=bool({"log", "stdout"} & set(values.output)),
        )
        folder = self._folder()
        self.transport, self.sinks = build_sinks(values, folder, self.identity, self.header)
        self.black_box = (
            BlackBox(
                folder,
                self.identity,
                self.collector,
                self.anchor,
                interval_s=values.flush_interval,
                silence_s=values.silence_after,
                counters=self.counters,
            )
            if "spool" in values.output
            else None
        )
        self.flusher = Flusher(
            self.collector,
            self.sinks,
            interval_s=values.flush_interval,
            header=self.header,
            each_tick=self._tick,
        )

    def header(self) -> wire.Header:
        """The head of a batch that is sealed now."""
        return wire.Header(
            schema_version=wire.SCHEMA_VERSION,
            sdk_version=__version__,
            batch_id=clock.random_id(),
            created_ns=self.anchor.at(clock.now()),
            session=self.identity,
        )

    def watch(self, model: Any) -> None:
        """Takes snapshots of the model from now on."""
        self.taker.watch(model)
        hot.tell_epoch_ends(self.taker.take)

    def _deliver(self, taken: Taken) -> None:
        if not self.pid:  # a forked child, whose first record is this epoch's
            self._begin_in_child()
        self.collector.add_snapshots(taken.snapshots, taken.marks, taken.files)

    def _tick(self) -> None:
        if self.root is not None and self.root.attrs is not None:
            self.root.attrs["framework"] = self.hooks.imported
        if self.black_box is not None:
            self.black_box.write()

    # -- ending -----------------------------------------------------------------------------

    def end(self, how: str, detail: str | None = None) -> None:
        """Closes the root, stores everything, stops the worker; not later than `exit_timeout`."""
        deadline = clock.now() + int(self.settings.exit_timeout * 1e9)
        if self.pid != os.getpid():
            return  # a forked child that recorded nothing has nothing to end

        def before_closing() -> None:
            if self.black_box is not None and how != "clean":
                self.black_box.freeze(with_stacks=how == "signal")

        def last_tick() -> None:
            if self.black_box is not None:
                self.black_box.close(how, detail)

        if self.root is not None and self.root in self.state.opened:
            spent = time.process_time_ns() - self._cpu_start_ns
            self.root.set(framework=self.hooks.imported, cpu_ns=spent)
        if not self.taker.stop(deadline - STORE_NS):
            guard.warn("a snapshot was not finished within exit_timeout, and is lost")
        if not self.flusher.stop(deadline, before_closing, last_tick):
            left = self.collector.seen + len(self.state.ring) - self.flusher.records
            if left > 0:
                limit_s = self.settings.exit_timeout
                guard.warn("%d records were not stored within exit_timeout=%gs", left, limit_s)

    # -- what is known ----------------------------------------------------------------------

    def counters(self) -> dict[str, Any]:
        """What was lost, and what it all cost."""
        found: dict[str, Any] = {
            "record_drop_count": self.collector.dropped(),
            "mark_drop_count": self.collector.lost_values,
            "scope_drop_count": hot.too_deep - self._too_deep,
            "attrs_as_text_count": self.collector.coerced,
            "records_flushed": self.flusher.records,
            "records_pending": len(self.state.ring),
            "flush_latency_ns": self.flusher.latency_ns,
            "flush_cpu_ns": self.flusher.cpu_ns,
            "clock_drift_ns": clock.wall() - self.anchor.at(clock.now()),
            **self.taker.counters(),
        }
        for sink in self.sinks:
            found.update(sink.health())
        return found


def build_sinks(
    values: settings.Settings,
    folder: Path,
    session: wire.Session,
    header: Callable[[], wire.Header],
) -> tuple[str, list[Sink]]:
    """The transport's name, and the sinks: local ones first, since the spool is the truth."""
    sinks: list[Sink] = []
    outbox: Any = None
    streaming = any(os.environ.get(name) for name in ("CIRRON_RUN_ID", "CIRRON_DEPLOYMENT_ID"))
    sending = values.api_key is not None and not streaming
    if sending:
        from cirron.sinks.outbox import DiskOutbox, MemoryOutbox

        spooled = "spool" in values.output
        outbox = DiskOutbox(folder, session.id) if spooled else MemoryOutbox()
    if "spool" in values.output:
        from cirron.sinks.spool import Spool

        sinks.append(Spool(folder, max_bytes=values.spool_max_bytes, header=header, outbox=outbox))
    if "log" in values.output or "stdout" in values.output:
        from cirron.sinks import console

        if "log" in values.output:
            sinks.append(console.to_logger())
        if "stdout" in values.output:
            sinks.append(console.to_stream(sys.stdout))
    if streaming:
        from cirron.sinks.event_stream import EventStream

        sinks.append(EventStream(sys.stdout))
        return "event_stream", sinks
    if sending:
        from cirron.sinks.http import HttpSink

        assert values.api_key is not None
        sinks.append(HttpSink(values.api_endpoint, values.api_key, outbox, sdk_version=__version__))
        return "http", sinks
    return "file_only", sinks


# -- the process's one session ---------------------------------------------------------------

_lock = threading.RLock()
_memory = Memory()
_idle_state = hot.State(hot.ring, opened=hot.opened)  # where records go while nobody profiles
_idle = Collector(_idle_state, _memory, clock.read_anchor())
_profiler: Profiler | None = None
_owner = 0  # the process that made it
_session: Session | None = None
_memory_is_old = False  # it holds a session that has ended
_to_watch: list[Callable[[], Any]] = []  # given to `ci.watch()` before there was a session


class Profiler:
    """The handle that `ci.profile()` returns."""

    def __init__(self, config: Mapping[str, Any], *, enabled: bool) -> None:
        self.config = config  # the user's feature flags
        self.enabled = enabled

    def flush(self) -> None:
        """Blocks until what was recorded is on disk."""
        flush()

    def health(self) -> dict[str, Any]:
        """Counters and state; never raises."""
        return health()

    def trace(self, format: str = "tree", name: str | None = None, last: int | None = None) -> Any:
        """The session's tree, as `ci.trace()`."""
        return trace(format, name, last)

    def shutdown(self) -> None:
        """Ends the session, as `ci.shutdown()`, unless it has ended and another one runs."""
        if _profiler is self:
            shutdown()

    def __repr__(self) -> str:
        return f"<cirron profiler, {'on' if self.enabled else 'off'}>"


class Cirron:
    """A set of settings to profile with, for self-hosted endpoints and for tests.

    >>> cirron = ci.Cirron(api_endpoint="http://localhost:8000", api_key="secret")
    >>> cirron.profile()
    """

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
        max_pending_records: int | None = None,
        silence_after: float | None = None,
        exit_timeout: float | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}
        self._given = settings.check(given)

    scope = staticmethod(hot.scope)
    mark = staticmethod(hot.mark)
    epochs = staticmethod(hot.epochs)
    batches = staticmethod(hot.batches)

    @property
    def settings(self) -> settings.Settings:
        """What `profile()` would use now."""
        return settings.resolve(self._given)

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
    ) -> Profiler:
        """Starts profiling this process. Call it once; the handle may be ignored.

        Everything is checked before anything is touched: a bad argument raises `ValueError` and
        names the valid ones. A second call logs a warning and returns the first handle.

        >>> ci.profile(output=["spool", "stdout"])
        """
        given = settings.check(
            {
                "snapshots": snapshots,
                "sample_rate": sample_rate,
                "flush_interval": flush_interval,
                "output_dir": path,
                "output": output,
            },
            output_dir="path",
        )
        on = settings.switch("enabled", enabled)
        values = settings.resolve({**self._given, **given})
        flags = settings.flags(config)
        wanted = hooks.check(frameworks)
        if on and values.snapshots != "stats" and not hooks.is_installed("safetensors"):
            raise errors.missing(f"snapshots={values.snapshots!r}", "safetensors", "snapshots")
        return _begin(values, flags, wanted, enabled=on and values.enabled)

    def flush(self) -> None:
        """Blocks until what was recorded is on disk."""
        flush()

    def health(self) -> dict[str, Any]:
        """Counters and state; never raises."""
        return health()

    def trace(self, format: str = "tree", name: str | None = None, last: int | None = None) -> Any:
        """The session's tree, as `ci.trace()`."""
        return trace(format, name, last)

    def shutdown(self) -> None:
        """Ends the session, as `ci.shutdown()`."""
        shutdown()


def _begin(
    values: settings.Settings,
    flags: Mapping[str, Any],
    frameworks: tuple[str, ...] | None,
    *,
    enabled: bool,
) -> Profiler:
    global _profiler, _session, _owner, _memory_is_old
    with _lock:
        run = None
        if _profiler is not None and _owner != os.getpid():  # inherited by a fork
            run = None if _session is None else _session.identity.run_id
            _end("clean")
        if _profiler is not None:
            guard.warn(
                "ci.profile() was called again; the profiler that runs goes on as it is."
                " Call ci.shutdown() first to start another"
            )
            return _profiler
        _profiler = Profiler(flags, enabled=enabled)
        _owner = os.getpid()
        if _memory_is_old:
            _memory.clear()
            _memory_is_old = False
        if not enabled:
            hot.attach(hot.State(deque(maxlen=0), opened=hot.opened, off=True))
            return _profiler
        with guard.quiet("start"):
            _idle.drain()
            session = Session(values, frameworks, _memory, run)
            session.start()
            _session = session
            for model in _take_waiting():
                session.watch(model)
            session.hooks.install()
            _process.watch()
        return _profiler


def shutdown() -> None:
    """Ends the session: closes the root scope, stores everything, stops the background thread.

    `ci.profile()` may be called anew afterwards. A second call does nothing.
    """
    _end("clean")


def _end(how: str, detail: str | None = None) -> None:
    global _profiler, _session, _memory_is_old
    with _lock:
        if _profiler is None:
            return
        _profiler = None
        if _session is not None:
            with guard.quiet("hooks"):
                _session.hooks.uninstall()  # what they have open is theirs to close
        hot.attach(_idle_state)
        _memory_is_old = True
        try:
            with guard.quiet("shutdown"):
                if _session is not None:
                    _session.end(how, detail)  # a signal meanwhile finds the session, and waits too
                _process.unwatch()
        finally:
            _session = None


def flush() -> None:
    """Blocks until what was recorded before the call is on disk."""
    session = _session
    if session is None or session.pid != os.getpid():
        return
    session.taker.settle(clock.now() + int(FLUSH_WAIT_S * 1e9))
    if not session.flusher.flush(FLUSH_WAIT_S):
        guard.warn("ci.flush() gave up after %gs; see ci.health()", FLUSH_WAIT_S)


def watch(model: Any) -> None:
    """Takes a snapshot of the model's weights and gradients at the end of each epoch.

    May be called for several models. Not needed for Keras and for the Trainer, which tell by
    themselves what they train.

    >>> ci.profile(snapshots="stats")
    >>> ci.watch(model)
    """
    if not hot.off and not hooks.is_installed("numpy"):
        raise errors.missing("ci.watch()", "numpy", "snapshots")
    with _lock:
        session = _session
        if session is not None and session.pid in (0, os.getpid()):
            session.watch(model)
        elif not hot.off:
            model = stand_in(model, [known() for known in _to_watch])
            check(model)
            if all(known() is not model for known in _to_watch):
                _to_watch.append(refer(model))


def _take_waiting() -> list[Any]:
    waiting = [model for known in _to_watch if (model := known()) is not None]
    _to_watch.clear()
    return waiting


def health() -> dict[str, Any]:
    """Counters and state of the profiler, for people and for monitoring; never raises."""
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
            found["transport"] = session.transport
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
    DataFrame, one row a span). `name` keeps spans of that name and what is inside them, `last` the
    ones that closed last.

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
        print("profiling is off: by ci.profile(enabled=False), or by CIRRON_ENABLED=0")
        return None
    if notebook.in_notebook():
        return notebook.TraceView(found)
    print(text.render(found))
    return None


def _collect() -> tree.Tree:
    session = _session
    memory, collectors = _memory, [_idle]
    if session is not None and session.pid == os.getpid():
        memory = session.memory
        collectors.append(session.collector)
    spans: list[wire.Span] = []
    held: list[wire.Span] = []
    for collector in collectors:
        collector.drain()
        collector.settle()
        spans += [collector.open_record(span) for span in collector.open_spans()]
        held += collector.held_records()
    closed: list[wire.Span] = []
    marks: list[wire.Mark] = []
    for span_bytes, mark_bytes in memory.chunks():
        closed += wire.decode_spans(span_bytes)
        marks += wire.decode_marks(mark_bytes)
    anchor = _idle.anchor if session is None else session.anchor
    found = tree.build(closed + held, marks, spans, now_ns=anchor.at(clock.now()))
    found.is_partial = memory.evicted_bytes > 0
    return found


# -- what befalls the process ----------------------------------------------------------------


def _on_signal(name: str, *, is_fatal: bool) -> None:
    """Has the worker store what there is, before the signal takes its course.

    Runs in a signal handler: the interrupted code may hold any lock, so this takes none, and only
    waits, not for long, for the worker.
    """
    session = _session
    if session is None or session.pid != os.getpid():
        return
    if session.black_box is not None:
        at_ns = session.anchor.at(clock.now())
        session.black_box.signals.append({"name": name, "at_ns": at_ns})
    if is_fatal:
        hot.attach(_idle_state)
        session.end("signal", name)
    else:
        session.flusher.flush(SIGNAL_WAIT_S)


def _after_fork() -> None:
    """In a forked child: nothing of the parent's is written twice, and no lock is inherited."""
    global _lock, _memory, _idle
    _lock = threading.RLock()
    _memory = Memory()
    _idle = Collector(_idle_state, _memory, clock.read_anchor())
    if _session is not None:
        _process.leave_to_child()
        _session.start_in_child()


_process = Process(on_exit=_end, on_signal=_on_signal, after_fork=_after_fork)


profile = Cirron().profile
