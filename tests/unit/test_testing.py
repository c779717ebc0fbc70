"""The public test kit: fake clock, ids from 1, a memory sink, and `capture()`."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import cirron as ci
from cirron import guard, testing, wire
from cirron.record import hot
from cirron.ship.sinks.base import Outcome, Sealed


def test_the_public_names() -> None:
    """The kit is these names, each with a docstring."""
    assert ["Captured", "FakeClock", "MemorySink", "capture"] == testing.__all__
    assert all(getattr(testing, name).__doc__ for name in testing.__all__)


class TestClock:
    def test_it_ticks_when_read(self) -> None:
        """Each reading is a tick later than the one before."""
        clock = testing.FakeClock(start_ns=5, tick_ns=10)

        assert (15, 25) == (clock(), clock())

    def test_it_advances_when_told(self) -> None:
        """Time passes when the test says so."""
        clock = testing.FakeClock(tick_ns=0)
        clock.advance(1.5)

        assert 1_500_000_000 == clock()


class TestCapture:
    def test_the_example_of_its_docstring(self) -> None:
        """What the module shows is what comes out."""
        with testing.capture() as captured, ci.scope("outer"):
            ci.mark("loss", 0.5)

        assert "outer - 2.0us {loss=0.5}" == captured.text()
        assert captured.text() in (testing.__doc__ or "")

    def test_ids_and_times_are_known(self) -> None:
        """Ids count from 1 and times are the fake clock's, so whole records can be compared."""
        with testing.capture() as captured, ci.scope("outer", index=1):
            ci.mark("loss", 0.5)
        (span,) = captured.spans
        (mark,) = captured.marks

        assert ("0" * 31 + "1", "0" * 31 + "2") == (span.id, mark.id)
        assert (1_000, 2_000, 3_000) == (span.start_ns, mark.ts_ns, span.end_ns)
        assert [mark.id] == span.mark_ids

    def test_a_clock_of_one_s_own(self) -> None:
        """A given clock makes durations exact."""
        clock = testing.FakeClock(tick_ns=0)
        with testing.capture(clock) as captured, ci.scope("epoch"):
            clock.advance(0.000142)

        assert "epoch - 142us" == captured.text()

    def test_it_can_be_read_meanwhile(self) -> None:
        """Open spans are in the tree, closed ones in the list."""
        with testing.capture() as captured, ci.scope("outer"):
            with ci.scope("inner"):
                pass
            assert ["inner"] == [span.name for span in captured.spans]
            (root,) = captured.dict()["roots"]

        assert ("outer", True, ["inner"]) == (
            root["name"],
            root["open"],
            [child["name"] for child in root["children"]],
        )

    def test_it_is_apart_from_everything_else(self) -> None:
        """Inside of a session's scope a capture starts at the top, and leaves no trace there."""
        ci.profile(output="none")
        with ci.scope("session's"):
            with testing.capture() as captured, ci.scope("captured"):
                pass
            with ci.scope("after"):
                pass
        (root,) = ci.trace(format="dict")["roots"]

        assert [None] == [span.parent_id for span in captured.spans]
        assert ["session's"] == [child["name"] for child in root["children"]]
        assert ["after"] == [child["name"] for child in root["children"][0]["children"]]

    def test_threads_are_captured(self) -> None:
        """What other threads record meanwhile is captured too."""
        with testing.capture() as captured:
            thread = threading.Thread(target=lambda: ci.mark("there", 1))
            thread.start()
            thread.join()

        assert ["there"] == [mark.name for mark in captured.marks]

    def test_it_works_when_profiling_is_off(self) -> None:
        """A capture records also where profiling is off, and leaves it off."""
        ci.profile(enabled=False)
        with testing.capture() as captured, ci.scope("x"):
            pass

        assert ["x"] == [span.name for span in captured.spans]
        assert hot.off

    def test_mistakes_are_loud(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Errors inside cirron are raised in a capture, and only there."""
        monkeypatch.setattr(guard, "strict", False)
        with testing.capture(), pytest.raises(RuntimeError), guard.quiet("test"):
            raise RuntimeError("ours")

        assert not guard.strict

    def test_an_exception_ends_it(self) -> None:
        """An exception in the block restores everything."""
        before = hot.append
        with pytest.raises(ValueError, match="x"), testing.capture():
            raise ValueError("x")

        assert before is hot.append


def test_the_memory_sink() -> None:
    """The fake sink keeps what it is given, and shows it as a reader would see it."""
    sink = testing.MemorySink()
    header = wire.Header(
        schema_version=1, sdk_version="0", batch_id="b", created_ns=1, session=None
    )

    assert Outcome.DONE is sink.emit(Sealed(header, wire.Sections(), records=0))
    sink.tick()
    sink.close(0)
    assert ["b"] == [batch.batch_id for batch in sink.batches]
    assert (1, True, {"memory_batches": 1}) == (sink.ticks, sink.is_closed, sink.health())


class TestGuard:
    def test_quiet_for_users(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A mistake of ours is counted and said once, and the program goes on."""
        monkeypatch.setattr(guard, "strict", False)
        for _ in range(3):
            with guard.quiet("drain"):
                raise RuntimeError("ours")

        assert {"drain: RuntimeError": 3} == dict(guard.errors)
        assert 1 == caplog.text.count("internal error in drain; your program is fine")
        assert {"drain: RuntimeError": 3} == ci.health()["errors"]

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
    def test_exits_go_through(
        self, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ctrl-C and exits are nobody's mistake."""
        monkeypatch.setattr(guard, "strict", False)

        with pytest.raises(kind), guard.quiet("drain"):
            raise kind

    def test_nothing_happens_without_a_mistake(self) -> None:
        """A block without an error is just a block."""
        with guard.quiet("drain"):
            value: Any = 1

        assert (1, {}) == (value, dict(guard.errors))
