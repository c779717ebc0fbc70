"""Threads of ours: workers, the one that says what they have to say, and the length of turns."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from cirron import guard
from cirron.record import clock
from cirron.ship import threads
from cirron.ship.threads import Speaker, Turns, Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 10.0


def soon(seconds: float = PATIENCE_S) -> int:
    return clock.now() + int(seconds * 1e9)


# -- workers ----------------------------------------------------------------------------------


def test_worker_runs_once_however_often_it_is_started() -> None:
    """Threads that start it at the same moment start one thread."""
    runs: list[int] = []
    worker = Worker(lambda: runs.append(1), "cirron-test")
    together = threading.Barrier(8)

    def start() -> None:
        together.wait()
        worker.start()

    starters = [threading.Thread(target=start) for _ in range(8)]
    for one in starters:
        one.start()
    for one in starters:
        one.join()

    assert worker.wait_for_end(soon())
    assert ([1], False) == (runs, worker.is_alive)


def test_rest_ends_when_woken() -> None:
    """Waking ends the present rest; a wake before the rest is not lost, and many count as one."""
    rested: list[float] = []

    def run() -> None:
        began.wait()
        for seconds in (60.0, 0.01):
            since = time.monotonic()
            worker.rest(seconds)
            rested.append(time.monotonic() - since)

    began = threading.Event()
    worker = Worker(run, "cirron-test")
    worker.start()
    worker.wake()
    worker.wake()
    began.set()

    assert worker.wait_for_end(soon())
    assert rested[0] < 30
    assert rested[1] >= 0.009  # the second wake is used up


def test_stop_ends_a_rest() -> None:
    """`stop` ends a pause of the worker."""
    """`stop` ends a pause of the worker."""

    def run() -> None:
        while not worker.is_stopping:
            worker.rest(60.0)

    worker = Worker(run, "cirron-test")
    worker.start()
    assert (True, False) == (worker.is_alive, worker.wait_for_end(clock.now()))
    worker.stop()
    assert (True, False) == (worker.wait_for_end(soon()), worker.is_alive)


@pytest.mark.parametrize("error", [RuntimeError("x"), SystemExit(3), KeyboardInterrupt()])
def test_worker_that_raises_has_ended(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its function raises is contained: whoever waits for its end is let go."""
    monkeypatch.setattr(guard, "strict", False)

    def run() -> None:
        raise error

    worker = Worker(run, "cirron-test")
    worker.start()
    assert (True, False) == (worker.wait_for_end(soon()), worker.is_alive)


def test_worker_never_started_has_no_end_to_wait_for() -> None:
    """Waiting for a worker that never started returns immediately."""
    """Waiting for a worker that never started returns immediately."""
    assert Worker(lambda: None, "cirron-test").wait_for_end(clock.now())


# -- what they say ----------------------------------------------------------------------------


@pytest.fixture
def speaker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Speaker]:
    made = Speaker()
    monkeypatch.setattr(guard, "relay", made.relay)
    yield made
    if made._worker is not None:
        made._worker.stop()


def in_worker(function: object) -> Worker:
    worker = Worker(function, "cirron-test")  # type: ignore[arg-type]
    worker.start()
    return worker


def test_a_warning_that_blocks_holds_up_no_worker(speaker: Speaker) -> None:
    """What a handler makes of it is waited for by the speaker's thread alone; the order is kept."""
    said: list[int] = []
    may_go = threading.Event()

    def say_first() -> None:
        may_go.wait(PATIENCE_S)
        said.append(0)

    def run() -> None:
        assert speaker.relay(say_first)
        for number in range(1, 5):
            assert speaker.relay(functools.partial(said.append, number))

    assert in_worker(run).wait_for_end(soon())
    assert [] == said

    began = time.monotonic()
    speaker.settle(0.05)
    assert 0.04 < time.monotonic() - began < PATIENCE_S / 2  # it does not wait for ever

    may_go.set()
    speaker.settle(PATIENCE_S)
    assert [0, 1, 2, 3, 4] == said


def test_other_threads_say_it_themselves(speaker: Speaker) -> None:
    """Threads of the program log their warnings themselves."""
    """Threads of the program log their warnings themselves."""
    assert not speaker.relay(lambda: None)


def test_a_warning_that_raises_loses_itself_only(
    speaker: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning whose handler raises does not stop later warnings."""
    """A warning whose handler raises does not stop later warnings."""
    monkeypatch.setattr(guard, "strict", False)
    said: list[str] = []

    def fail() -> None:
        raise SystemExit(1)

    def run() -> None:
        speaker.relay(fail)
        speaker.relay(lambda: said.append("next"))

    assert in_worker(run).wait_for_end(soon())
    speaker.settle(PATIENCE_S)
    assert ["next"] == said


def test_what_the_parent_had_to_say_is_not_said_by_a_child(speaker: Speaker) -> None:
    """A forked child does not repeat the pending warnings of its parent."""
    """A forked child does not repeat the pending warnings of its parent."""
    may_go = threading.Event()

    def say() -> None:
        may_go.wait(PATIENCE_S)

    assert in_worker(lambda: speaker.relay(say)).wait_for_end(soon())
    speaker.after_fork()

    began = time.monotonic()
    speaker.settle(PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S / 2
    may_go.set()


# -- turns ------------------------------------------------------------------------------------


@pytest.fixture
def interval() -> Iterator[float]:
    before = sys.getswitchinterval()
    yield before
    sys.setswitchinterval(before)


def test_turns_are_put_back(interval: float) -> None:
    """The switch interval is restored."""
    """The switch interval is restored."""
    turns = Turns()
    turns.shorten()
    turns.shorten()
    assert pytest.approx(Turns.SHORT_S) == sys.getswitchinterval()
    turns.restore()
    turns.restore()
    assert interval == sys.getswitchinterval()


@pytest.mark.parametrize("given", [0.05, 0.0001])
def test_turns_that_the_program_has_set_since_are_left(interval: float, given: float) -> None:
    """A switch interval that the program has changed since is kept."""
    """A switch interval that the program has changed since is kept."""
    turns = Turns()
    turns.shorten()
    sys.setswitchinterval(given)
    turns.restore()
    assert pytest.approx(given) == sys.getswitchinterval()


def test_turns_that_are_short_are_left(interval: float) -> None:
    """A switch interval that is already short is kept."""
    """A switch interval that is already short is kept."""
    sys.setswitchinterval(0.0005)
    turns = Turns()
    turns.shorten()
    assert pytest.approx(0.0005) == sys.getswitchinterval()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_fork_has_the_programs_own_turns(
    interval: float, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """A child that is forked while turns are short: nothing in it would ever put them back."""
    import cirron as ci

    monkeypatch.chdir(str(tmp_path))
    ci.profile(frameworks=[])
    threads.turns.shorten()
    pid = os.fork()
    if not pid:
        os._exit(0 if sys.getswitchinterval() == interval else 1)
    _, status = os.waitpid(pid, 0)
    threads.turns.restore()
    assert 0 == status
