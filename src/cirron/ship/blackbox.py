"""The black box: a file that says what this process is doing, in case it is killed.

The small file is rewritten at each flush interval. It has the open spans of every thread, the last
step, memory, and the stacks of all threads after a long silence inside one scope. The last write
says how the process ended. Without that, the process was killed or is still running.

It has its own thread, which nothing else can delay, and reads only the collector's state.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import traceback
from collections import deque
from typing import TYPE_CHECKING, Any

from cirron import guard, system, wire
from cirron.record import clock, hot
from cirron.record.value import clip
from cirron.ship.encode import typed, weigh
from cirron.ship.threads import Worker, sleep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cirron.files import Folder
    from cirron.ship.collect import Collector

MAX_OPEN = 1_000  # a server with more requests in flight than this shows the oldest
MAX_HELD = 1_000  # closed spans that wait for their GPU time, so no batch contains them yet
# Approximate limit for the open spans, and for the stacks. Above it, spans are listed without
# attributes and values: which spans are open matters more.
MAX_BYTES = 2**20
LEFT_OUT = {"...": "left out"}
MAX_PATH = 500  # last characters of a file name in a stack
MAX_SIGNALS = 100  # the newest
OUR_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep
STACKS_EVERY_NS = 10_000_000_000
LATE = 1.5  # flush intervals after which it is written even without a flush


class BlackBox:
    """The file of one process."""

    def __init__(
        self,
        folder: Folder,
        session: wire.Session,
        collector: Collector,
        anchor: clock.Anchor,
        *,
        interval_s: float,
        silence_s: float,
        counters: Callable[[], dict[str, Any]],
    ) -> None:
        self.name = f"{session.id}-{os.getpid()}.json"
        self.problem: str | None = None  # why the last write failed, if it did
        self._folder = folder
        self.session = session  # as far as it is known
        self._collector = collector
        self._anchor = anchor
        self._interval_s = interval_s
        self._silence_ns = int(silence_s * 1e9)
        self._counters = counters
        self._process_start = system.process_start(os.getpid())
        self._stacks: list[dict[str, Any]] | None = None
        self._stacks_at = 0
        self._frozen: dict[str, Any] | None = None
        self._ended: dict[str, Any] | None = None
        self.signals: deque[dict[str, Any]] = deque(maxlen=MAX_SIGNALS)
        self._begun = 0  # writes
        self._written = 0
        self._worker = Worker(self._run, "cirron-blackbox")

    # -- called from other threads ----------------------------------------------------------

    def start(self) -> None:
        """Starts the thread, which writes the first state immediately."""
        self._worker.start()

    def wake(self) -> None:
        self._worker.wake()

    def refresh(self, deadline_ns: int) -> None:
        """Waits until the file shows a state from after this call, or until the deadline."""
        wanted = self._begun + 1
        self._worker.wake()
        while self._written < wanted and self._worker.is_alive and clock.now() < deadline_ns:
            sleep(0.001)

    def freeze(self, error: BaseException | None = None) -> None:
        """Keeps the current state for the last write, before open spans are closed.

        Includes the stacks of all threads, or where the error that ends the program was raised.
        """
        self._frozen = self._doing(clock.now())
        self._frozen["stacks"] = all_stacks() if error is None else raised_at(error)

    def close(self, deadline_ns: int, how: str, detail: str | None = None) -> bool:
        """Makes the thread write how the process ended. False: not by the deadline."""
        self._ended = {"how": how, "detail": detail, "at_ns": self._anchor.at(clock.now())}
        self._worker.stop()
        return self._worker.wait_for_end(deadline_ns)

    # -- its own thread ---------------------------------------------------------------------

    def _run(self) -> None:
        while not self._worker.is_stopping:
            self._begun += 1
            with guard.contained("black box"):
                self.write()
            self._written = self._begun
            self._worker.rest(LATE * self._interval_s)
        with guard.contained("black box"):
            self.write(self._ended)

    def write(self, ended: dict[str, Any] | None = None) -> None:
        now = clock.now()
        content = {
            "schema_version": wire.SCHEMA_VERSION,
            "session": self.session,
            "pid": os.getpid(),
            "process_start": self._process_start,
            "heartbeat_ns": self._anchor.at(now),
            "interval_s": self._interval_s,
            "ended": ended,
            **(self._frozen or self._doing(now)),
            "memory_rss_bytes": system.resident_bytes(),
            "signals": list(self.signals),
            "counters": self._counters(),
        }
        try:
            self._folder.put(self.name, [wire.encode(content)])
            self.problem = None
        except OSError as error:
            self.problem = error.strerror or str(error)

    def _doing(self, now: int) -> dict[str, Any]:
        """The open spans, the last step, and the stacks if the threads have been silent."""
        spans = self._collector.open_spans()
        silent_since = self._silent_since(spans, now)
        if silent_since is None:
            self._stacks = None
        elif self._stacks is None or now - self._stacks_at > STACKS_EVERY_NS:
            self._stacks, self._stacks_at = all_stacks(), now
        return {
            "open_count": len(spans),
            "open": self._open(spans[:MAX_OPEN]),
            "closed": within(MAX_BYTES, reversed(self._collector.held_records(MAX_HELD))),
            "last_step": self._step(self._collector.last_step, spans),
            "silent_since_ns": None if silent_since is None else self._anchor.at(silent_since),
            "stacks": self._stacks,
        }

    def _open(self, spans: list[hot.Span]) -> list[dict[str, Any]]:
        names = thread_names()
        found: list[dict[str, Any]] = []
        left = MAX_BYTES
        for span in spans:
            record = self._collector.open_record(span)
            latest = self._latest(span.sequence)
            size = weigh(record.attrs) + weigh(latest) + 40 * len(record.mark_ids)
            if size > left:
                record.attrs, record.mark_ids, latest = LEFT_OUT, [], {}
            else:
                left -= size
            found.append(
                wire.builtins(record) | {"thread_name": names.get(span.thread), "latest": latest}
            )
        return found

    def _step(self, last: hot.Closed | None, spans: list[hot.Span]) -> dict[str, Any] | None:
        """The newest open step, or else the one that closed last."""
        open_step = next((span for span in reversed(spans) if span.name in hot.STEPS), None)
        record = last if open_step is None else hot.record_of(open_step)
        if record is None:
            return None
        number, _, name, index, _, start, end, _ = record
        return {
            "id": self._collector.encoder.ids.hex(number),
            "name": name,
            "index": index,
            "start_ns": self._anchor.at(start),
            "end_ns": self._anchor.at(end) if end else None,
        }

    def _latest(self, number: int) -> dict[str, Any]:
        found = {}
        for name, value in list(self._collector.latest.get(number, {}).items()):
            _, plain, nonfinite = typed(value)
            found[name] = plain if nonfinite is None else nonfinite
        return found

    def _silent_since(self, spans: list[hot.Span], now: int) -> int | None:
        """When the thread that has been silent longest last recorded, if that is long ago."""
        last_closed = self._collector.last_activity
        active: dict[int, int] = {}
        for span in spans:
            if span.depth > 1:  # not the session itself
                active[span.thread] = max(
                    span.start,
                    active.get(span.thread, 0),
                    last_closed.get(span.thread, 0),
                    self._collector.marked_at.get(span.sequence, 0),
                )
        for thread in set(last_closed) - set(active):
            last_closed.pop(thread, None)  # threads come and go
        oldest = min(active.values(), default=now)
        return oldest if now - oldest >= self._silence_ns else None


def within(limit: int, entries: Iterable[Any]) -> list[Any]:
    """The first entries, up to this many bytes."""
    found = []
    for entry in entries:
        limit -= len(wire.encode(entry))
        if limit < 0:
            break
        found.append(entry)
    return found


def all_stacks() -> list[dict[str, Any]]:
    """The stacks of the program's threads, innermost call last, without cirron's own calls."""
    names = thread_names()
    found = []
    left = MAX_BYTES
    main = threading.main_thread().ident
    for thread, stack in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        frames = traceback.StackSummary.extract(
            traceback.walk_stack(stack), limit=64, lookup_lines=False
        )
        inner = itertools.dropwhile(lambda frame: frame.filename.startswith(OUR_FOLDER), frames)
        calls = list(map(_told, inner))
        # Cirron's own threads have these names.
        is_ours = names.get(thread, "").startswith("cirron-")
        if calls and not is_ours and thread != threading.get_ident():
            left -= 400 + sum(map(len, calls))
            if left < 0:
                break
            found.append(
                {"thread_id": thread, "name": names.get(thread, "?"), "frames": calls[::-1]}
            )
    return found


def raised_at(error: BaseException) -> list[dict[str, Any]]:
    """The stack of the main thread where an error was raised, innermost call last."""
    frames = traceback.StackSummary.extract(
        traceback.walk_tb(guard.TRACE(error)), limit=-64, lookup_lines=False
    )
    main = threading.main_thread()
    return [{"thread_id": main.ident, "name": main.name, "frames": list(map(_told, frames))}]


def _told(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename[-MAX_PATH:]}:{frame.lineno} in {frame.name[:MAX_PATH]}"


def thread_names() -> dict[int | None, str]:
    return {thread.ident: clip(thread.name) for thread in threading.enumerate()}
