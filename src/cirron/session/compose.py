"""The composition root: one session of this process, built out of the stages.

A session is built whole and then attached; taking it down is bounded in time; a forked child gets
stages of its own on its first record.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cirron import guard, hooks, settings, wire
from cirron._version import __version__
from cirron.record import clock, hot
from cirron.session import identity
from cirron.ship.blackbox import BlackBox
from cirron.ship.collect import Collector
from cirron.ship.flusher import Flusher
from cirron.ship.sinks.memory import Memory
from cirron.snapshot.taker import Taker

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron.ship.sinks.base import Sink
    from cirron.snapshot.taker import Taken

ROOT = "cirron.session"

# Of the time that an exit may take, what is kept for storing records when snapshots take long.
STORE_NS = 1_000_000_000


class Session:
    """One profiled stretch of the process's life."""

    def __init__(
        self,
        values: settings.Settings,
        frameworks: tuple[str, ...] | None,
        memory: Memory,
        run_id: str | None,
        on_child: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = values
        self._on_child = on_child  # called in a forked child that begins to record
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
                    self._on_child()

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
        # Batch ids are a random half and a counter, so that the outbox can tell this process's.
        self._batches = clock.Ids(), itertools.count(1)
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
        self.transport, self.sinks = build_sinks(
            values, folder, self._batches[0].prefix, self.header
        )
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
        ids, numbers = self._batches
        return wire.Header(
            schema_version=wire.SCHEMA_VERSION,
            sdk_version=__version__,
            batch_id=ids.hex(next(numbers)),
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
    prefix: str,
    header: Callable[[], wire.Header],
) -> tuple[str, list[Sink]]:
    """The transport's name, and the sinks: local ones first, since the spool is the truth."""
    sinks: list[Sink] = []
    outbox: Any = None
    streaming = any(os.environ.get(name) for name in ("CIRRON_RUN_ID", "CIRRON_DEPLOYMENT_ID"))
    sending = values.api_key is not None and not streaming
    if sending:
        from cirron.ship.outbox import DiskOutbox, MemoryOutbox

        spooled = "spool" in values.output
        outbox = DiskOutbox(folder, prefix) if spooled else MemoryOutbox()
    if "spool" in values.output:
        from cirron.ship.sinks.spool import Spool

        sinks.append(Spool(folder, max_bytes=values.spool_max_bytes, header=header, outbox=outbox))
    if "log" in values.output or "stdout" in values.output:
        from cirron.ship.sinks import console

        if "log" in values.output:
            sinks.append(console.to_logger())
        if "stdout" in values.output:
            sinks.append(console.to_stream(sys.stdout))
    if streaming:
        from cirron.ship.sinks.event_stream import EventStream

        sinks.append(EventStream(sys.stdout))
        return "event_stream", sinks
    if sending:
        from cirron.ship.sinks.http import HttpSink

        assert values.api_key is not None
        sinks.append(HttpSink(values.api_endpoint, values.api_key, outbox, sdk_version=__version__))
        return "http", sinks
    return "file_only", sinks
