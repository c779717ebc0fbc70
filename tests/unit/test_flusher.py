"""The background worker: when it exports, what it waits for, and how it ends."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from asyncio import CancelledError
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests import spools

import cirron as ci
from cirron import guard, wire
from cirron.record import clock, hot
from cirron.record.value import Deferred
from cirron.ship import flusher
from cirron.ship.collect import Collector
from cirron.ship.flusher import Flusher
from cirron.ship.sinks.base import Outcome, Sealed
from cirron.ship.sinks.memory import Memory
from cirron.testing import MemorySink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_S = 10.0
NEVER_S = 3600.0


class Told(MemorySink):
    """A sink that says when it was given something."""

    def __init__(self) -> None:
        super().__init__()
        self.was_given = threading.Event()
        self.was_ticked = threading.Event()

    def emit(self, batch: Sealed) -> Outcome:
        outcome = super().emit(batch)
        self.was_given.set()
        return outcome

    def tick(self) -> None:
        super().tick()
        self.was_ticked.set()

    @property
    def names(self) -> list[str]:
        return [span.name for batch in self.batches for span in batch.spans]


class Rig:
    """A flusher with a ring and sinks of its own."""

    def __init__(
        self,
        *sinks: Any,
        interval_s: float = NEVER_S,
        each_tick: Callable[[], None] = lambda: None,
        max_batch_bytes: int = flusher.MAX_BATCH_BYTES,
        backlog: int = 0,
    ) -> None:
        self.state = hot.State(deque(maxlen=1_000_000))
        self.collector = Collector(self.state, Memory(), clock.Anchor(0, 0, 0), keep_chunks=True)
        self.flusher = Flusher(
            self.collector,
            sinks,
            interval_s=interval_s,
            header=new_header,
            each_tick=each_tick,
            max_batch_bytes=max_batch_bytes,
        )
        for _ in range(backlog):
            self.record()
        self.flusher.start()

    def record(self, name: str = "step") -> None:
        number = next(self.state.sequence)
        self.state.append((number, 0, name, None, None, 1, 2, 3))

    def stop(self, timeout_s: float = PATIENCE_S) -> bool:
        return self.flusher.stop(clock.now() + int(timeout_s * 1e9), lambda: None)


def new_header() -> wire.Header:
    return wire.Header(
        schema_version=1,
        sdk_version="0",
        batch_id=clock.random_id(),
        created_ns=1,
        session=None,
    )


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(*args: Any, **kwargs: Any) -> Rig:
        rigs.append(Rig(*args, **kwargs))
        return rigs[-1]

    yield make
    for each in rigs:
        each.stop()


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistakes are counted, as they are for users."""
    monkeypatch.setattr(guard, "strict", False)


def test_exported_at_batch_size(rig: Any) -> None:
    """A batch that grows large is handed on before the interval is over."""
    sink = Told()
    made = rig(sink, max_batch_bytes=100_000)
    for _ in range(3_000):
        made.record()

    assert sink.was_given.wait(PATIENCE_S)
    made.stop()
    assert (3_000, True) == (len(sink.names), len(sink.sealed) > 1)
    assert max(batch.size for batch in sink.sealed) < 1_000_000


def test_larger_batches_when_behind(rig: Any) -> None:
    """A worker that is behind makes larger batches, within a bound, and loses nothing."""
    sink = Told()
    made = rig(sink, max_batch_bytes=2_000_000, backlog=100_000)
    made.flusher.flush(PATIENCE_S)
    slice_bytes = flusher.MAX_SLICE * sink.sealed[0].size / sink.sealed[0].records

    assert 100_000 == len(sink.names)
    assert 2_000_000 < max(batch.size for batch in sink.sealed)
    assert max(batch.size for batch in sink.sealed) < flusher.BEHIND_BATCH * 2e6 + slice_bytes


def test_sealed_when_the_interval_is_over(rig: Any) -> None:
    """What was collected is handed on when the interval is over, not when the ring is empty."""
    sink = Told()
    made = rig(sink, interval_s=0.001, max_batch_bytes=2**40, backlog=100_000)
    made.flusher.flush(PATIENCE_S)
    most = max(batch.records for batch in sink.sealed)

    assert (100_000, True) == (len(sink.names), most <= 2 * flusher.MAX_SLICE)


def test_exported_at_the_interval(rig: Any) -> None:
    """What was recorded is handed on when the interval is over, without being asked for."""
    sink = Told()
    made = rig(sink, interval_s=0.01)
    made.record()

    assert sink.was_given.wait(PATIENCE_S)
    assert ["step"] == sink.names


def test_sinks_get_their_turn_without_batches(rig: Any) -> None:
    """Sinks and black box have their turn at each interval also when nothing was recorded."""
    sink, ticked = Told(), threading.Event()
    rig(sink, interval_s=0.01, each_tick=ticked.set)

    assert sink.was_ticked.wait(PATIENCE_S)
    assert ticked.wait(PATIENCE_S)
    assert [] == sink.sealed


def test_flush_waits(rig: Any) -> None:
    """All that was recorded before a flush is with the sinks when it returns."""
    sink = Told()
    made = rig(sink)
    for i in range(5_000):
        made.record(str(i))

    assert made.flusher.flush(PATIENCE_S)
    assert [str(i) for i in range(5_000)] == sink.names
    assert 5_000 == made.flusher.records
    assert made.flusher.latency_ns > 0


def test_many_threads_may_flush(rig: Any) -> None:
    """Several flushes at once all return."""
    made = rig(Told())
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda: results.append(made.flusher.flush(PATIENCE_S)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [True] * 8 == results


def test_a_flush_gives_up(rig: Any) -> None:
    """A flush that a sink holds up returns False when its time is over."""
    release = threading.Event()

    class Hanging(Told):
        def emit(self, batch: Sealed) -> Outcome:
            release.wait(PATIENCE_S)
            return Outcome.DONE

    made = rig(Hanging())
    made.record()

    assert not made.flusher.flush(0.05)
    release.set()


def test_flushed_before_shutdown(rig: Any) -> None:
    """Everything is with the sinks when stop returns, and the sinks are closed."""
    sink = Told()
    made = rig(sink)
    made.record()

    assert made.stop()
    assert (["step"], True, False) == (sink.names, sink.is_closed, made.flusher.is_alive)


def test_nothing_after_shutdown(rig: Any) -> None:
    """After the end nothing is handed on, a flush returns at once, and stopping again is fine."""
    sink = Told()
    made = rig(sink)
    made.stop()
    made.record()

    assert made.flusher.flush(PATIENCE_S)  # in no time
    assert made.stop()
    assert [] == sink.names


def test_records_during_shutdown_are_bounded(rig: Any) -> None:
    """A thread that goes on recording does not keep the end from coming."""
    sink = Told()
    made = rig(sink)
    going = threading.Event()
    done = threading.Event()

    def record() -> None:
        while not done.is_set():
            made.record()
            going.set()

    thread = threading.Thread(target=record)
    thread.start()
    going.wait(PATIENCE_S)
    try:
        assert made.stop(PATIENCE_S)
    finally:
        done.set()
        thread.join()


def test_told_before_spans_are_closed(rig: Any) -> None:
    """The black box is told while spans are still open; the sinks close after the last batch."""
    order: list[Any] = []

    class Closing(Told):
        def emit(self, batch: Sealed) -> Outcome:
            order.append([span.name for span in batch.decode().spans])
            return Outcome.DONE

        def close(self, deadline_ns: int) -> None:
            order.append("sink")

    made = rig(Closing())
    span = hot.new_root("open", None, depth=1, number=next(made.state.sequence))
    made.state.opened.add(span)
    made.flusher.stop(
        clock.now() + 10**10, lambda: order.append([s.name for s in made.collector.open_spans()])
    )

    assert [["open"], ["open"], "sink"] == order
    assert [] == made.collector.open_spans()


def test_one_export_may_finish(rig: Any) -> None:
    """A batch that a sink is at when the end comes is finished, and the rest comes after it."""
    at_it, go_on = threading.Event(), threading.Event()

    class Slow(Told):
        def emit(self, batch: Sealed) -> Outcome:
            at_it.set()
            go_on.wait(PATIENCE_S)
            return super().emit(batch)

    sink = Slow()
    made = rig(sink, interval_s=0.01)
    made.record("first")
    at_it.wait(PATIENCE_S)
    made.record("second")
    threading.Timer(0.05, go_on.set).start()

    assert made.stop()
    assert ["first", "second"] == sink.names


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("error", [RuntimeError, SystemExit, CancelledError])
@pytest.mark.parametrize("method", ["emit", "tick", "close"])
def test_a_sink_that_raises(method: str, error: type[BaseException], rig: Any) -> None:
    """A sink that fails stops neither the others nor the worker, and is counted."""

    class Broken(Told):
        pass

    def fail(*args: Any) -> Any:
        raise error("broken")

    setattr(Broken, method, fail)
    sink = Told()
    made = rig(Broken(), sink, Broken())
    made.record("a")
    made.flusher.flush(PATIENCE_S)
    made.record("b")

    assert made.stop()
    assert (["a", "b"], True) == (sink.names, sink.is_closed)
    assert guard.errors[f"sink: {error.__name__}"] >= 2


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_tick_that_raises(error: type[BaseException], rig: Any) -> None:
    """A black box that fails does not stop the worker."""
    sink = Told()

    def fail() -> None:
        raise error("broken")

    made = rig(sink, each_tick=fail)
    made.record()
    made.flusher.flush(PATIENCE_S)

    assert (True, ["step"]) == (made.flusher.is_alive, sink.names)


@pytest.mark.parametrize("method", ["emit", "tick", "close"])
def test_a_sink_that_hangs(method: str, rig: Any) -> None:
    """A sink that hangs does not hold up the end beyond its deadline."""
    release = threading.Event()

    class Hanging(Told):
        pass

    setattr(Hanging, method, lambda *args: release.wait(PATIENCE_S))
    made = rig(Hanging(), interval_s=0.01)
    made.record()
    began = clock.now()
    is_stopped = made.stop(0.2)
    took_s = (clock.now() - began) / 1e9
    release.set()

    assert not is_stopped or method == "tick"  # the last flush does not tick
    assert took_s < 2


def test_sinks_hear_of_the_deadline(rig: Any) -> None:
    """A sink may take two seconds at the end, and less when the deadline is nearer."""
    told: list[int] = []

    class Closing(Told):
        def close(self, deadline_ns: int) -> None:
            told.append(deadline_ns)

    deadline_ns = clock.now() + 10**9
    rig(Closing()).flusher.stop(deadline_ns)
    rig(Closing()).flusher.stop(clock.now() + 10**12)

    assert deadline_ns == told[0]
    assert told[1] - clock.now() < 2.1e9


def test_a_patient_sink_gets_all_the_time(rig: Any) -> None:
    """The spool, which is the truth, may take all the time that there is."""
    told: list[int] = []

    class Closing(Told):
        is_patient = True

        def close(self, deadline_ns: int) -> None:
            told.append(deadline_ns)

    deadline_ns = clock.now() + 10**12
    rig(Closing()).flusher.stop(deadline_ns)

    assert [deadline_ns] == told


FORK = """
import os, cirron as ci

ci.profile()
with ci.scope("parent"):
    pass
ci.flush()
if os.fork() == 0:
    with ci.scope("child"):
        pass
    ci.flush()
    os._exit(0 if ci.health()["flusher_alive"] else 3)
status = os.wait()[1]
with ci.scope("after"):
    pass
ci.shutdown()
raise SystemExit(status)
"""


def test_after_a_fork() -> None:
    """A forked child has a worker of its own once it records, and the parent goes on."""
    subprocess.run([sys.executable, "-c", FORK], check=True)
    run = spools.read_one(Path(".cirron"))

    assert ["after", "child", "cirron.session", "parent"] == sorted(s.name for s in run.spans)


def test_a_stopped_flusher_is_collected() -> None:
    """Nothing holds a flusher that has ended."""
    made = Rig(Told())
    threads = [thread for thread in threading.enumerate() if thread.name == "cirron-flush"]
    made.stop()
    for thread in threads:
        thread.join()
    gone = weakref.ref(made.flusher)
    del made
    gc.collect()

    assert gone() is None


def test_values_are_waited_for_when_asked(rig: Any) -> None:
    """The interval does not wait for a device; a flush does."""
    go_on = threading.Event()

    class Scalar:
        def item(self) -> float:
            go_on.wait(PATIENCE_S)
            return 0.5

    sink = Told()
    made = rig(sink, interval_s=0.01)
    made.state.append((next(made.state.sequence), 0, "m", Deferred(Scalar()), "point", None, 1))
    made.record()
    assert sink.was_given.wait(PATIENCE_S)
    assert [] == [mark for batch in sink.batches for mark in batch.marks]

    threading.Timer(0.05, go_on.set).start()
    assert made.flusher.flush(PATIENCE_S)
    assert [0.5] == [mark.value for batch in sink.batches for mark in batch.marks]


def test_the_worker_is_a_daemon() -> None:
    """The worker never keeps a process alive, and has a name that says whose it is."""
    ci.profile(output="none")
    (thread,) = [t for t in threading.enumerate() if t.name.startswith("cirron-flush")]

    assert thread.daemon
    ci.shutdown()
    assert not thread.is_alive()


def test_no_thread_outlives_the_end() -> None:
    """The thread that waits for devices ends with the session."""

    class Scalar:
        def item(self) -> float:
            threads.append(threading.current_thread())
            return 0.5

    threads: list[threading.Thread] = []
    ci.profile(output="none")
    ci.mark("m", Scalar())
    ci.flush()
    ci.shutdown()
    threads[0].join(PATIENCE_S)

    assert ("cirron-values", False) == (threads[0].name, threads[0].is_alive())
