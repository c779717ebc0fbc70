"""The composition root: builds a session from its stages.

A session is built completely before it is attached. Ending it has a time limit. A forked child
builds its own stages at its first record.
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
from typing import TYPE_CHECKING, Any, NamedTuple

from cirron import files, guard, hooks, settings, wire
from cirron._version import __version__
from cirron.record import attrs as attributes
from cirron.record import clock, hot
from cirron.record.budget import budget
from cirron.scheduling import Scheduled, Used
from cirron.session import identity, lifecycle, program
from cirron.ship.blackbox import BlackBox
from cirron.ship.collect import Collector
from cirron.ship.flusher import MAX_BATCH_BYTES, Flusher
from cirron.ship.keeper import Keeper
from cirron.ship.lane import Lane
from cirron.ship.sinks import console
from cirron.ship.sinks.event_stream import EventStream
from cirron.ship.sinks.memory import Memory
from cirron.ship.sinks.spool import Spool
from cirron.ship.sinks.stream import MAX_LINE_BYTES, Stream
from cirron.ship.threads import Worker, speaker, turns
from cirron.snapshot.taker import Taker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cirron.ship.sinks.base import Emitter, Sink
    from cirron.ship.sinks.http import HttpSink
    from cirron.snapshot.records import Taken

ROOT = "cirron.session"

# The part of the time limit of an exit or a flush that is reserved for storing records if snapshots
# take long.
STORE_NS = 1_000_000_000

# How long a flush waits for lanes and the black box after the spool has its batches.
SETTLE_NS = 1_000_000_000
# How long it waits for warnings: the user's logging handler may block.
SPEAK_S = 0.3
# How long the end of a short program waits for `git status`.
DESCRIBE_NS = 500_000_000


class Session:
    """One profiling session of this process."""

    def __init__(
        self,
        values: settings.Settings,
        frameworks: tuple[str, ...] | None,
        memory: Memory,
        on_child: Callable[[], None],
        user_sinks: Sequence[Emitter],
        config: Mapping[str, Any],
    ) -> None:
        self.settings = values
        self.user_sinks = user_sinks
        self._on_child = on_child  # called in a forked child that starts to record
        self.memory = memory
        self.anchor = clock.read_anchor()
        self._identity = identity.identify(os.environ, self.anchor)
        self._rank = self._identity.rank, self._identity.world_size
        self._handed_down = identity.HandedDown()
        # Only one process of a run calls git: a thousand ranks share a file system.
        self.is_child = identity.is_child(os.environ)
        self.is_first = self._identity.rank in (None, 0) and not self.is_child
        self._program = program.Description(values.tags, config, os.environ, runs_git=self.is_first)
        self._describer = Worker(self._program.find_out, "cirron-program")
        self.taker = Taker(
            values.snapshots,
            values.sample_rate,
            folder=self._folder() if "spool" in values.output else None,
            wall_ns=self.anchor.at,
            deliver=self._deliver,
            access=values.access,
        )
        self.hooks = hooks.Hooks(values, frameworks, self.taker)
        self.root: hot.Span | None = None
        self.pid = 0  # of the process that owns the stages; 0: there are none
        self.is_removed_if_empty = False
        self._is_removed = False
        self.state: hot.State
        self.collector: Collector
        self.sinks: Sinks
        self.black_box: BlackBox | None = None
        self.flusher: Flusher

    @property
    def identity(self) -> wire.Session:
        """Who records, as far as it is known."""
        self.rank()
        rank, world_size = self._rank
        return wire.changed(
            self._identity, rank=rank, world_size=world_size, program=self._program.known
        )

    def hand_down(self) -> None:
        """Lets child processes, and a program that replaces this one, join the run."""
        self._handed_down.give(os.environ, self._identity.run_id)

    def rank(self) -> int | None:
        """The rank of this process. torch may provide it later, and then forget it."""
        self._rank = identity.distributed() or self._rank
        return self._rank[0]

    # -- starting ---------------------------------------------------------------------------

    def start(self) -> None:
        self._cpu_start_ns = time.process_time_ns()
        self._scheduled = Scheduled()
        attrs = {"framework": self.hooks.imported, **identity.surroundings(os.environ)}
        self.root = hot.new_root(ROOT, attrs, depth=1, number=next(hot.sequence))
        self.state = self._new_state()
        self.state.opened.add(self.root)
        self.state.opened |= hot.opened  # scopes that are already open end in this session
        hot.opened.clear()
        self._given_before = hot.expected() - len(self.state.opened)
        self._too_deep = hot.too_deep
        self._names_cut = hot.names_cut
        self._attrs_cut = attributes.cut
        self.hand_down()
        self._describer.start()
        self._build()
        hot.leave_context()
        hot.attach(self.state)

    def start_in_child(self) -> None:
        """After a fork: nothing is built until the child opens a scope or marks a value.

        The parent closes the scopes that were open. The child's records are under the root.
        """
        for sink in self.sinks.all:
            sink.after_fork()
        self.is_first = False
        self.user_sinks = ()  # they belong to the parent
        speaker.after_fork()
        turns.restore()
        self.state = self._new_state()
        self._given_before = hot.expected()
        self._identity = wire.changed(self._identity, pid=os.getpid())
        self.memory = Memory()
        self.taker.begin()
        self._program.after_fork()
        self._describer = Worker(self._program.find_out, "cirron-program")  # not started
        self.pid = 0
        self._starting = threading.Lock()
        opened = self.state.opened

        class FirstOpened(set[hot.Span]):
            """Stands in for the set of open spans until the child opens its first one."""

            def add(_, span: hot.Span) -> None:  # noqa: N805  `self` is the session
                opened.add(span)
                self._begin_in_child()

        def first_append(record: hot.Record) -> None:
            self.state.ring.append(record)
            self._begin_in_child()

        hot.attach(self.state.replaced(opened=FirstOpened(), append=first_append))

    def _begin_in_child(self) -> None:
        with self._starting:
            if not self.pid:
                hot.attach(self.state)
                with guard.quiet("start after fork"):
                    self._build()
                    self._on_child()

    def _new_state(self) -> hot.State:
        return hot.State(
            deque(maxlen=self.settings.max_pending_records),
            root=self.root,
            at_epoch_end=self.taker.take if self.taker.is_watching else None,
            measure=Used,
        )

    def _folder(self) -> Path:
        folder = Path(self.settings.output_dir)
        with contextlib.suppress(FileNotFoundError):  # no working directory: the spool will warn
            folder = folder.absolute()  # the program may change it
        return folder

    def _build(self) -> None:
        """Builds and starts the stages. Does not touch the disk: each thread creates its folder."""
        values = self.settings
        self.pid = os.getpid()
        self._batch_prefix = clock.random_id()[:16]
        self._batch_numbers = itertools.count(1)
        self.collector = Collector(
            self.state,
            self.memory,
            self.anchor,
            given_before=self._given_before,
            rank=self.rank,
            keep_chunks=True,
            keep_lines=bool({"log", "stdout"} & set(values.output)),
        )
        self.sinks = Sinks(
            values, self._folder(), self.identity, self.header, self._batch_prefix, self.user_sinks
        )
        if "spool" in values.output:
            self.black_box = BlackBox(
                self.sinks.boxes,
                self.identity,
                self.collector,
                self.anchor,
                interval_s=values.flush_interval,
                silence_s=values.silence_after,
                counters=self.counters,
            )
        self.flusher = Flusher(
            self.collector,
            self.sinks.all,
            interval_s=values.flush_interval,
            header=self.header,
            each_tick=self._tick,
            max_batch_bytes=self.sinks.max_batch_bytes,
        )
        for sink in self.sinks.all:
            sink.start()
        self.flusher.start()
        if self.flusher.problem is not None:
            guard.warn(
                "%s; training goes on, records stay in memory, and ci.flush() or the end of the"
                " session stores them if a thread can be started then",
                self.flusher.problem,
            )
        if self.black_box is not None:
            self.black_box.start()

    def header(self) -> wire.Header:
        return wire.Header(
            schema_version=wire.SCHEMA_VERSION,
            sdk_version=__version__,
            batch_id=f"{self._batch_prefix}{next(self._batch_numbers):016x}",
            created_ns=self.anchor.at(clock.now()),
            session=self.identity,
        )

    def watch(self, model: Any) -> None:
        """Takes snapshots of the model from now on."""
        self.taker.watch(model)
        hot.tell_epoch_ends(self.taker.take)

    def _deliver(self, taken: Taken) -> None:
        if not self.pid:  # a forked child whose first record is this snapshot
            self._begin_in_child()
        self.collector.add_snapshots(taken.snapshots, taken.marks, taken.files)

    def _tick(self) -> None:
        if self.root is not None and self.root.attrs is not None:
            self.root.attrs["framework"] = self.hooks.imported
        self._program.look_again()
        if self.black_box is not None:
            self.black_box.session = self.identity
            self.black_box.start()  # if it could not be started before
            self.black_box.wake()

    # -- ending -----------------------------------------------------------------------------

    def end(self, how: str, detail: str | None = None) -> None:
        """Closes the root, stores everything and stops the worker, within `exit_timeout`."""
        deadline = clock.now() + int(self.settings.exit_timeout * 1e9)
        self._handed_down.take_back(os.environ)
        if self.pid != os.getpid():
            return  # a forked child that recorded nothing
        if self.is_removed_if_empty and how == "clean" and self.is_empty:
            self._is_removed = True  # also if a signal interrupts this and ends the session again
        error = lifecycle.last_error() if how == "exception" else None

        def before_closing() -> None:
            if self.black_box is not None and how != "clean":
                self.black_box.freeze(error)

        if self.root is not None and self.root in self.state.opened:
            spent = time.process_time_ns() - self._cpu_start_ns
            self.root.set(framework=self.hooks.imported, cpu_ns=spent, **self._scheduled.since())
            if how != "clean":  # for a server, which has no black box
                self.root.set(ended=how)
        if not self._describer.wait_for_end(min(deadline - STORE_NS, clock.now() + DESCRIBE_NS)):
            self._program.give_up()
        self._program.look_again()
        if not self.taker.stop(deadline - STORE_NS):
            guard.warn("a snapshot is lost: it was not finished within exit_timeout")
        left = 0
        if not self.flusher.stop(deadline, before_closing):
            left = max(0, self.collector.unstored(self.flusher.records))
        if self.sinks.spool is not None:
            left += self.sinks.spool.held_records  # if the disk hangs
        if left:
            problem = self.flusher.problem
            why = f"within exit_timeout={self.settings.exit_timeout:g}s"
            guard.warn(
                "%d records were not stored%s", left, f": {problem}" if problem else f" {why}"
            )
        if self.black_box is not None:
            self.black_box.close(deadline, how, detail)
        if self._is_removed:
            self._remove()
        speaker.settle(SPEAK_S)

    @property
    def recorded(self) -> Recorded:
        folder = None if self.sinks.spool is None else self._folder()
        return Recorded(folder, self.header(), self.memory)

    @property
    def is_empty(self) -> bool:
        """Whether nothing but the root was recorded."""
        recorded = self.collector.seen + self.collector.pending
        return not recorded and self.state.opened <= {self.root}

    def _remove(self) -> None:
        """Removes the files, unless a forked child has recorded something in this session."""
        parts = {self.sinks.boxes: f"{self._identity.id}-", self.sinks.folder: self._batch_prefix}
        with contextlib.suppress(OSError):
            found = [
                (folder, entry.name)
                for folder, part in parts.items()
                for entry in folder.entries()
                if part in entry.name
            ]
            if sum(folder is self.sinks.boxes for folder, _ in found) <= 1:
                for folder, name in found:
                    folder.remove(name)

    # -- flushing and counters --------------------------------------------------------------

    def flush(self, deadline_ns: int) -> Flushed:
        """Stores everything that was recorded before the call, and returns the result."""
        is_settled = self.taker.settle(deadline_ns - STORE_NS)
        in_time = self.store(deadline_ns)
        for sink in self.sinks.all:
            if not sink.is_patient:
                sink.settle(min(deadline_ns, clock.now() + SETTLE_NS))
        speaker.settle(SPEAK_S)
        stored = self.stored()
        if (is_settled and in_time) or stored.why is not None:
            return stored
        late = self.sinks.folder.path if is_settled else "the worker that measures snapshots"
        why = f"{late} did not answer in time"
        guard.warn("ci.flush() did not store everything: %s", why)
        return stored._replace(ok=False, why=why)

    def store(self, deadline_ns: int) -> bool:
        """Writes the records and the current state to disk. False: not by the deadline.

        Takes no lock that code interrupted by a signal could hold.
        """
        in_time = self.flusher.flush((deadline_ns - clock.now()) / 1e9)
        for sink in self.sinks.all:
            if sink.is_patient:
                in_time &= sink.settle(deadline_ns)
        if self.black_box is not None:
            self.black_box.refresh(min(deadline_ns, clock.now() + SETTLE_NS))
        return in_time

    def stored(self, dropped: int | None = None) -> Flushed:
        """Where the session's records are, and why some are not on disk."""
        lost = self.collector.dropped() if dropped is None else dropped
        lost += self.collector.encoder.failed
        on_disk = held = 0
        why = self.flusher.problem
        spool = self.sinks.spool
        if spool is not None:
            lost += spool.lost_records
            on_disk, held = spool.written_records, spool.held_records
            if spool.problem is not None:
                why = f"cannot write to {spool.folder.path}: {spool.problem}"
        if lost and not why:
            why = f"{lost} records were lost: see ci.health()"
        return Flushed(why is None, on_disk, self.sinks.sent_records, held, lost, why)

    def counters(self) -> dict[str, Any]:
        """What was lost, and the cost of recording."""
        dropped = self.collector.dropped()
        stored = self.stored(dropped)
        lag_ns = max(self.collector.lag_ns(), self.sinks.lag_ns(self.anchor.at(clock.now())))
        found: dict[str, Any] = {
            "record_drop_count": dropped,
            "record_error_count": self.collector.encoder.failed,
            "mark_drop_count": self.collector.lost_values,
            "scope_drop_count": hot.too_deep - self._too_deep,
            "names_cut_count": hot.names_cut - self._names_cut,
            "attrs_cut_count": attributes.cut - self._attrs_cut,
            "attrs_as_text_count": self.collector.coerced,
            "records_flushed": stored.on_disk if self.sinks.spool else self.flusher.records,
            "records_pending": self.collector.pending,
            "records_on_disk": stored.on_disk,
            "records_sent": stored.sent,
            "records_held": stored.held,
            "records_lost": stored.lost,
            "flush_problem": stored.why,
            "flush_lag_s": round(lag_ns / 1e9, 3),
            "flush_latency_ns": self.flusher.latency_ns,
            "flush_cpu_ns": self.flusher.cpu_ns,
            "clock_drift_ns": clock.wall() - self.anchor.at(clock.now()),
            **budget.health(),
            **self.taker.counters(),
        }
        if self.black_box is not None:
            found["blackbox_problem"] = self.black_box.problem
        for sink in self.sinks.all:
            found.update(sink.health())
        return found


class Recorded(NamedTuple):
    """Where the records of a session are, even after its end."""

    folder: Path | None  # None: only in memory
    header: wire.Header
    memory: Memory


class Flushed(NamedTuple):
    """Where the session's records are so far; `ci.flush()` returns it."""

    ok: bool  # everything recorded before the call is stored
    on_disk: int
    sent: int
    held: int  # in memory, because writing failed
    lost: int
    why: str | None  # the problem, if there is one


class Sinks:
    """The sinks: the spool first, as the source of truth; those that may block, in lanes."""

    def __init__(
        self,
        values: settings.Settings,
        root: Path,
        session: wire.Session,
        header: Callable[[], wire.Header],
        prefix: str,
        of_user: Sequence[Emitter],
    ) -> None:
        self.all: list[Sink] = []
        self.spool: Spool | None = None
        self.folder = files.Folder(root / "spool", files.BATCH, values.access)
        self.boxes = files.Folder(root / "blackbox", files.BLACK_BOX, values.access)
        self.transport = "file_only"
        self.max_batch_bytes = min(MAX_BATCH_BYTES, max(values.spool_max_bytes // 8, 1))
        self._sender: Any = None  # the sink that counts sent records
        is_spooled = "spool" in values.output
        streaming = any(os.environ.get(name) for name in ("CIRRON_RUN_ID", "CIRRON_DEPLOYMENT_ID"))
        outbox: Any = None
        http: HttpSink | None = None
        if values.api_key is not None and not streaming:
            from cirron.ship.outbox import DiskOutbox, MemoryOutbox
            from cirron.ship.sinks.http import HttpSink

            outbox = MemoryOutbox()
            if is_spooled:
                outbox = DiskOutbox(root, prefix, access=values.access)
            self.transport = "http"
            self._sender = http = HttpSink(
                values.api_endpoint, values.api_key, outbox, sdk_version=__version__
            )
        if is_spooled:
            keeper = Keeper(
                self.folder,
                self.boxes,
                max_bytes=values.spool_max_bytes,
                host=session.host,
                header=header,
                is_own=lambda name: f"-{prefix}" in name,
                is_pending=(lambda name: False) if http is None else outbox.is_pending,
            )
            announce = (lambda: None) if http is None else outbox.open
            self.spool = Spool(self.folder, keeper, http, announce)
            self.all.append(self.spool)
        elif http is not None:
            self.all.append(http)
        if streaming or "stdout" in values.output:
            stdout = Stream(sys.stdout)
        if "log" in values.output:
            self.all.append(Lane(console.to_logger(), "log"))
        if "stdout" in values.output:
            self.all.append(Lane(console.to_stream(stdout), "stdout"))
        if streaming:
            self.transport = "event_stream"
            self.max_batch_bytes = min(self.max_batch_bytes, MAX_LINE_BYTES)
            self._sender = Lane(EventStream(stdout), "event_stream")
            self.all.append(self._sender)
        for number, sink in enumerate(of_user):
            name = type(sink).__name__ if number == 0 else f"{type(sink).__name__}_{number}"
            self.all.append(Lane(sink, name))

    def lag_ns(self, wall_ns: int) -> int:
        """The age of the oldest batch that is not on disk yet."""
        sealed_ns = None if self.spool is None else self.spool.held_since_ns
        return 0 if sealed_ns is None else max(0, wall_ns - sealed_ns)

    @property
    def sent_records(self) -> int:
        """Records that the platform has."""
        return 0 if self._sender is None else int(self._sender.sent_records)
