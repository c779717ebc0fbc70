"""A lane: a sink that may block, raise or lie, and everybody else who does not notice."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import cirron as ci
from cirron import guard, testing, wire
from cirron.errors import SettingError
from cirron.record import clock
from cirron.ship import lane as lanes
from cirron.ship.lane import Lane
from cirron.ship.sinks.base import Outcome, Sealed, Sink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_S = 10.0


def make_batch(number: int = 1, padding: int = 0) -> Sealed:
    header = wire.Header(
        schema_version=1,
        sdk_version="0",
        batch_id=f"{number:032x}",
        created_ns=number,
        session=None,
    )
    mark = wire.Mark("m", "root", "x" * padding, "float", 0.5, {}, number, "point")
    return Sealed(header, wire.Sections(marks=[wire.encode_records([mark])]), records=3)


class Plain:
    """A sink of a user's: one method."""

    def __init__(self, action: Callable[[Sealed], Any] = lambda batch: Outcome.DONE) -> None:
        self.numbers: list[int] = []
        self._action = action

    def emit(self, batch: Sealed) -> Any:
        outcome = self._action(batch)
        self.numbers.append(batch.header.created_ns)
        return outcome


class Blocking(Plain):
    """Blocks in each batch until it is let go."""

    def __init__(self) -> None:
        self.at_it = threading.Event()
        self.go_on = threading.Event()
        super().__init__(self._block)

    def _block(self, batch: Sealed) -> Outcome:
        self.at_it.set()
        self.go_on.wait(PATIENCE_S)
        return Outcome.DONE


class Ours(Sink):
    """A sink of our own, which `close` wakes."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.closed = threading.Event()
        self.at_it = threading.Event()
        self.blocks = False

    def emit(self, batch: Sealed) -> Outcome:
        self.at_it.set()
        if self.blocks:
            self.closed.wait(PATIENCE_S)
            return Outcome.DROPPED
        self.calls.append(batch.header.created_ns)
        return Outcome.DONE

    def close(self, deadline_ns: int) -> None:
        self.calls.append(("close", deadline_ns))
        self.closed.set()

    def health(self) -> dict[str, object]:
        return {"mine_dropped": 0, "mine_sent": 1}


@pytest.fixture
def make() -> Iterator[Callable[..., Lane]]:
    made: list[Lane] = []

    def new(sink: Any, **options: Any) -> Lane:
        made.append(Lane(sink, "mine", **options))
        return made[-1]

    yield new
    for lane in made:
        sink: Any = lane._sink
        if isinstance(sink, Blocking):
            sink.go_on.set()
        lane.close(soon())


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistakes are counted, as they are for users."""
    monkeypatch.setattr(guard, "strict", False)


def soon(seconds: float = PATIENCE_S) -> int:
    return clock.now() + int(seconds * 1e9)


def test_all_in_order(make: Any) -> None:
    """The sink gets every batch, in order, on a thread that is nobody else's."""
    threads = set()
    sink = Plain(lambda batch: threads.add(threading.current_thread().name))
    lane = make(sink)
    for number in range(100):
        assert Outcome.HELD is lane.emit(make_batch(number))
    lane.settle(soon())

    assert list(range(100)) == sink.numbers
    assert ({"cirron-mine"}, 300, 0) == (threads, lane.sent_records, lane.dropped)


def test_nobody_waits_for_one_that_blocks(make: Any) -> None:
    """Handing over takes no time while the sink blocks, and nothing is lost within the limit."""
    sink = Blocking()
    lane = make(sink)
    began = time.monotonic()
    for number in range(100):
        lane.emit(make_batch(number))
    took_s = time.monotonic() - began
    assert sink.at_it.wait(PATIENCE_S)
    assert 99 == lane.health()["mine_pending"]
    sink.go_on.set()
    lane.settle(soon())

    assert (True, list(range(100))) == (took_s < 2, sink.numbers)
    assert {} == lane.health()


def test_a_full_lane_drops_its_oldest_batches(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Past the limit the oldest batches go, are counted, and are spoken of once."""
    sink = Blocking()
    lane = make(sink, max_bytes=3 * make_batch(1).size)
    lane.emit(make_batch(0))
    assert sink.at_it.wait(PATIENCE_S)
    for number in range(1, 9):
        lane.emit(make_batch(number))
    health = lane.health()
    sink.go_on.set()
    lane.settle(soon())

    assert {"mine_dropped": 5, "mine_pending": 3} == health
    assert ([0, 6, 7, 8], 12) == (sink.numbers, lane.sent_records)
    assert 1 == caplog.text.count("the sink 'mine' does not keep up")


def test_one_that_is_larger_than_the_limit(make: Any) -> None:
    """A batch that is larger than the limit by itself gets through when it is the only one."""
    sink = Plain()
    lane = make(sink, max_bytes=10)
    lane.emit(make_batch(1, padding=1_000))
    lane.settle(soon())

    assert ([1], 0) == (sink.numbers, lane.dropped)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_one_that_raises(
    error: type[BaseException], make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a sink raises costs that batch, is counted, and the next one gets through."""

    def fail_twice(batch: Sealed) -> Outcome:
        if batch.header.created_ns < 2:
            raise error("broken")
        return Outcome.DONE

    sink = Plain(fail_twice)
    lane = make(sink)
    for number in range(4):
        lane.emit(make_batch(number))
    lane.settle(soon())

    assert ([2, 3], 2, 6) == (sink.numbers, lane.dropped, lane.sent_records)
    assert {"mine_dropped": 2} == lane.health()
    assert 1 == caplog.text.count("the sink 'mine'")


@pytest.mark.parametrize(
    ("outcome", "is_sent"),
    [(Outcome.DONE, True), (Outcome.HELD, True), (None, True), (Outcome.DROPPED, False)],
)
def test_only_an_explicit_outcome_counts_as_dropped(
    outcome: Outcome | None, is_sent: bool, make: Any
) -> None:
    """A sink that returns nothing has taken the batch; one that says so has dropped it."""
    lane = make(Plain(lambda batch: outcome))
    lane.emit(make_batch())
    lane.settle(soon())

    assert ((3, 0) if is_sent else (0, 1)) == (lane.sent_records, lane.dropped)


class TestSettle:
    def test_a_slow_one_is_waited_for(self, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """A sink that gets on, however slowly, is waited for."""
        monkeypatch.setattr(lanes, "STALL_NS", 200_000_000)
        sink = Plain(lambda batch: time.sleep(0.05))
        lane = make(sink)
        for number in range(10):
            lane.emit(make_batch(number))
        lane.settle(soon())

        assert list(range(10)) == sink.numbers

    def test_a_stalled_one_is_not(self, make: Any) -> None:
        """A sink that does not get on is waited for a moment."""
        sink = Blocking()
        lane = make(sink)
        lane.emit(make_batch())
        began = time.monotonic()
        lane.settle(soon())

        assert lanes.STALL_NS / 1e9 <= time.monotonic() - began < 2

    def test_closing_keeps_the_deadline(self, make: Any) -> None:
        """Nobody is waited for past the deadline."""
        lane = make(Blocking())
        lane.emit(make_batch())
        began = time.monotonic()
        lane.settle(soon(0.05))

        assert time.monotonic() - began < lanes.STALL_NS / 1e9

    def test_nothing_to_wait_for(self, make: Any) -> None:
        """A lane that was given nothing is settled."""
        began = time.monotonic()
        make(Blocking()).settle(soon())

        assert time.monotonic() - began < 0.1


class TestClose:
    def test_what_is_there_gets_through(self, make: Any) -> None:
        """What was handed over before the end gets through, then the sink is closed, once."""
        sink = Ours()
        lane = make(sink)
        for number in range(50):
            lane.emit(make_batch(number))
        deadline_ns = soon()
        lane.close(deadline_ns)
        sink.closed.wait(PATIENCE_S)

        assert [*range(50), ("close", deadline_ns)] == sink.calls
        assert 0 == lane.dropped

    def test_a_stalled_one_is_not_waited_for(
        self, make: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The end does not wait for a sink that stands still; what is left is counted and said."""
        sink = Blocking()
        lane = make(sink)
        for number in range(5):
            lane.emit(make_batch(number))
        began = time.monotonic()
        lane.close(soon())
        took_s = time.monotonic() - began
        sink.go_on.set()

        assert (True, 5) == (took_s < 2, lane.dropped)
        assert "5 batches did not get through to 'mine' before the end" in caplog.text

    def test_nothing_after_the_end(self, make: Any) -> None:
        """A sink that comes back after the end gets no more batches."""
        sink = Blocking()
        lane = make(sink)
        for number in range(5):
            lane.emit(make_batch(number))
        lane.close(soon())
        sink.go_on.set()
        for thread in threading.enumerate():
            if thread.name == "cirron-mine":
                thread.join(PATIENCE_S)

        assert [0] == sink.numbers

    def test_one_of_ours_that_waits_is_woken(self, make: Any) -> None:
        """A sink of ours that waits for a reader is told that this is the end."""
        sink = Ours()
        sink.blocks = True
        lane = make(sink)
        lane.emit(make_batch())
        assert sink.at_it.wait(PATIENCE_S)
        lane.close(soon())

        assert sink.closed.is_set()

    def test_one_without_a_close(self, make: Any) -> None:
        """A sink needs `emit` and nothing else."""
        lane = make(Plain())
        lane.emit(make_batch())
        lane.after_fork()
        lane.tick()
        lane.close(soon())

        assert ({}, 3) == (lane.health(), lane.sent_records)

    @pytest.mark.usefixtures("quiet")
    @pytest.mark.parametrize("error", [RuntimeError, SystemExit])
    def test_a_close_that_raises(
        self, error: type[BaseException], make: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What a sink raises when it is closed is said in one line, as the sink's own error."""

        class Rude(Plain):
            def close(self, deadline_ns: int) -> None:
                raise error("broken")

        before = dict(guard.errors)
        lane = make(Rude())
        lane.emit(make_batch())
        lane.close(soon())

        assert (3, before) == (lane.sent_records, guard.errors)
        assert f"the sink 'mine' raised {error.__name__}: broken in close()" in caplog.text

    def test_the_thread_ends(self, make: Any) -> None:
        """No thread is left over."""
        lane = make(Plain())
        lane.emit(make_batch())
        lane.close(soon())
        left = [thread for thread in threading.enumerate() if thread.name == "cirron-mine"]
        for thread in left:
            thread.join(PATIENCE_S)

        assert not any(thread.is_alive() for thread in left)


def test_health_has_the_drops_of_lane_and_sink(make: Any) -> None:
    """What the lane dropped is not hidden by what the sink says of itself."""
    sink = Ours()
    sink.blocks = True
    lane = make(sink, max_bytes=2 * make_batch(1).size)
    lane.emit(make_batch(0))
    assert sink.at_it.wait(PATIENCE_S)
    for number in range(1, 5):
        lane.emit(make_batch(number))

    assert {"mine_dropped": 2, "mine_pending": 2, "mine_sent": 1} == lane.health()


class TestOfTheUser:
    """`ci.profile(sinks=[...])`: an object with `emit(batch) -> Outcome`."""

    def test_all_batches_in_order(self) -> None:
        """A sink of the user's gets everything, in order, beside the spool."""
        sink = testing.MemorySink()
        ci.profile(sinks=[sink], flush_interval=0.01)
        for number in range(2_000):
            with ci.scope("step", index=number):
                ci.mark("loss", 0.5)
        flushed = ci.flush()
        ci.shutdown()
        steps = [
            span.index for batch in sink.batches for span in batch.spans if span.name == "step"
        ]

        assert list(range(2_000)) == steps
        assert 2_000 == sum(len(batch.marks) for batch in sink.batches)
        assert (True, 4_000, 0) == (flushed.ok, flushed.on_disk, flushed.lost)
        assert sink.is_closed

    def test_several_sinks_get_the_same_batches(self) -> None:
        """Several sinks, of the settings and of the call, get the same batches."""
        sinks = [testing.MemorySink() for _ in range(3)]
        cirron = ci.Cirron(output="none", sinks=[sinks[0]])
        cirron.profile(sinks=(sinks[1], sinks[2]))
        with ci.scope("step"):
            pass
        ci.shutdown()
        names = [[span.name for batch in sink.batches for span in batch.spans] for sink in sinks]

        assert [["step", "cirron.session"]] * 3 == names

    def test_one_that_blocks(self) -> None:
        """A sink that blocks holds up neither the spool, nor a flush, nor the end."""
        sink, other = Blocking(), testing.MemorySink()
        ci.profile(sinks=[sink, other])
        with ci.scope("step"):
            pass
        began = time.monotonic()
        flushed = ci.flush()
        ci.shutdown()
        took_s = time.monotonic() - began
        sink.go_on.set()

        assert (True, 1, True) == (flushed.ok, flushed.on_disk, took_s < 4)
        assert 2 == sum(len(batch.spans) for batch in other.batches)

    @pytest.mark.usefixtures("quiet")
    def test_one_that_raises(self) -> None:
        """A sink that raises is in `ci.health()`, and the spool has everything."""

        class Rude:
            def emit(self, batch: Sealed) -> Outcome:
                raise SystemExit

        ci.profile(sinks=[Rude()])
        with ci.scope("step"):
            pass
        flushed = ci.flush()

        assert (True, 1) == (flushed.ok, flushed.on_disk)
        assert 1 == ci.health()["Rude_dropped"]

    @pytest.mark.parametrize("given", [testing.MemorySink(), "spool", {"a": 1}, 3], ids=type)
    def test_not_a_list(self, given: Any) -> None:
        """What is not a list is an error that says so."""
        with pytest.raises(SettingError, match=r"sinks.*it must be a list of sinks"):
            ci.profile(sinks=given)
        with pytest.raises(SettingError, match=r"sinks.*it must be a list of sinks"):
            ci.Cirron(sinks=given)
        assert not ci.health()["enabled"]

    @pytest.mark.parametrize(
        "given",
        [None, 3, "stdout", print, testing.MemorySink, object()],
        ids=lambda given: repr(given).partition(" at 0x")[0],
    )
    def test_not_a_sink(self, given: Any) -> None:
        """What has no `emit`, or is a class and not an object, is an error that says what to do."""
        with pytest.raises(SettingError) as raised:
            ci.profile(sinks=[testing.MemorySink(), given])

        assert "emit(batch)" in str(raised.value)
        assert "ci.Outcome.DONE" in str(raised.value)
        assert not ci.health()["enabled"]
