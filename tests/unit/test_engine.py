"""What the hooks share: a call inside a span, and what is open in a training."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import sys
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

import cirron as ci
from cirron import guard, testing
from cirron.hooks import engine
from cirron.hooks.engine import Runs, Training, around
from cirron.record import hot


def new_training() -> Training:
    return Training(SimpleNamespace(expect=lambda _: None, take=lambda *_: None))


def outline(captured: Any) -> list[str]:
    return [line.partition(" - ")[0] for line in captured.text().splitlines()]


def test_a_call_in_a_span() -> None:
    """Its result and its error are the program's, with a span or without one."""
    with testing.capture() as captured:
        assert [3, 3] == [around(span, max, (1, 3)) for span in (None, hot.begin("fine"))]
        for span in (None, hot.begin("broken")):
            with pytest.raises(ValueError, match="empty"):
                around(span, max, ((),))

    fine, broken = captured.spans
    assert ("fine", {}) == (fine.name, fine.attrs)
    assert "ValueError" in broken.attrs["error"]


def test_a_step_that_does_not_come_about() -> None:
    """It leaves no record, whatever other threads record, or one by another name."""
    training = new_training()
    with testing.capture() as captured:
        training.begin_epoch(0, None)
        training.await_step(0, global_step=1)
        thread = threading.Thread(target=lambda: ci.mark("elsewhere", 1))
        thread.start()
        thread.join()
        training.end_step()
        training.await_step(0, global_step=1)
        with ci.scope("mine"):
            pass
        training.end()

    assert ["epoch[0]", "  skipped", "    mine"] == outline(captured)[:3]
    assert 3 == len(captured.spans)
    assert {} == next(span.attrs for span in captured.spans if span.name == "skipped")


def train_steps(training: Training) -> None:
    """Three steps; the second one has a scope of another context, which ends in the third."""
    context, scope = contextvars.copy_context(), ci.scope("saving")
    training.begin_epoch(0, None)
    for index in range(3):
        training.await_step(index, global_step=index + 1)
        training.begin_step(index)
        step: Any = hot.current()
        if index == 1:
            context = contextvars.copy_context()
            context.run(scope.__enter__)
        hot.within(step, "forward", None, hot.OwnSpan, 0, lambda: None, (), {})
        ci.mark("metric", index)
        training.finish_step(global_step=index + 1)
    context.run(scope.__exit__, None, None, None)
    training.await_step(3, global_step=4)
    training.end()


def test_steps_that_follow_one_another() -> None:
    """Each has what was recorded in it; the one that does not come about leaves no record."""
    with testing.capture() as captured:
        train_steps(new_training())

    steps = [span for span in captured.spans if span.name == "step"]
    inside: dict[Any, list[str]] = {span.parent_id: [] for span in captured.spans}
    for span in captured.spans:
        inside[span.parent_id].append(span.name)
    marks = {mark.span_id: mark.value for mark in captured.marks if mark.kind == "point"}
    wanted = [(0, 1, ["forward"], 0), (1, 2, ["forward", "saving"], 1), (2, 3, ["forward"], 2)]
    assert wanted == [
        (span.index, span.attrs["global_step"], sorted(inside[span.id]), marks[span.id])
        for span in steps
    ]
    assert all(one.end_ns == two.start_ns for one, two in itertools.pairwise(steps))
    assert {"step": 3, "forward": 3, "saving": 1, "epoch": 1} == Counter(
        span.name for span in captured.spans
    )


def test_a_thread_that_records_in_a_step_that_does_not_come_about() -> None:
    """Its context is a copy from an earlier step. Its records are in the epoch, which is there."""
    training = new_training()

    def record() -> None:
        ci.mark("late", 1)
        with ci.scope("saving"):
            pass

    with testing.capture() as captured:
        training.begin_epoch(0, None)
        training.await_step(0)
        training.begin_step(0)
        context = contextvars.copy_context()
        training.finish_step()
        training.await_step(1)
        thread = threading.Thread(target=context.run, args=(record,))
        thread.start()
        thread.join()
        training.end()

    (epoch,) = [span for span in captured.spans if span.name == "epoch"]
    assert ["step", "saving"] == [one.name for one in captured.spans if one.parent_id == epoch.id]
    assert {epoch.id} == {mark.span_id for mark in captured.marks}


def test_nothing_to_mark() -> None:
    """A framework that logs no scalars does not make a step of one that never runs."""
    training = new_training()
    with testing.capture() as captured:
        training.begin_epoch(0, None)
        training.await_step(0)
        training.log({"shape": (2, 3)})
        training.end()

    assert ["epoch"] == [span.name for span in captured.spans]


def test_code_that_interrupts_a_training_may_record() -> None:
    """Whatever a signal handler records, and wherever, has a parent among the records."""
    count = 0
    is_here = False

    def interrupt(frame: Any, event: str, argument: Any) -> None:
        nonlocal count, is_here
        if not is_here and "cirron" in frame.f_code.co_filename:
            is_here = True
            count += 1
            with ci.scope("handler") if count % 3 else contextlib.nullcontext():
                ci.mark("count", count)
            is_here = False

    with testing.capture() as captured:
        sys.setprofile(interrupt)
        try:
            train_steps(new_training())
        finally:
            sys.setprofile(None)

    names = Counter(span.name for span in captured.spans)
    assert (3, 3, 1) == (names["step"], names["forward"], names["epoch"])
    ids = {span.id for span in captured.spans}
    assert {None, *ids} >= {span.parent_id for span in captured.spans}
    assert {"root", *ids} >= {mark.span_id for mark in captured.marks}


def test_a_run_inside_another_fails() -> None:
    """All that is open has the error, in the order in which it was opened, and nothing is left."""
    runs, outer, inner = Runs(), new_training(), new_training()

    def train_inner() -> None:
        inner.begin_epoch(0, None)
        inner.begin_step(0)
        raise ValueError("no more")

    def train() -> None:
        outer.begin_epoch(0, None)
        outer.begin_step(0)
        outer.finish_step()
        runs.call(inner, "model", train_inner)

    with testing.capture() as captured, pytest.raises(ValueError, match="no more"):
        runs.call(outer, "model", train)

    assert ["epoch[0]", "  step[0]", "  fit", "    step[0]"] == outline(captured)
    errors = {(span.name, span.index, "error" in span.attrs) for span in captured.spans}
    assert {
        ("epoch", 0, True),
        ("step", 0, False),
        ("fit", None, True),
        ("step", 0, True),
    } == errors
    assert all((span.cpu_ns or 0) > 0 for span in captured.spans if span.name in ("epoch", "fit"))
    assert ([], False, False) == (runs.open, outer.is_open, inner.is_open)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_span_that_is_closed_later_than_it_ended(is_late: bool) -> None:
    """What it used is not known if much has happened since."""
    with testing.capture() as captured:
        span = hot.begin("epoch", 0, None, engine.Long)
        if not is_late:
            span.start -= 60_000_000_000
        engine.close_long(span, span.start + 1 if is_late else hot.now())

    assert is_late == (captured.spans[0].cpu_ns is None)


def test_loops_that_cannot_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a hook's own code does not keep a framework from training."""

    def fail() -> None:
        raise ZeroDivisionError

    with testing.capture():
        monkeypatch.setattr(guard, "strict", False)
        monkeypatch.setattr(guard, "errors", Counter())
        monkeypatch.setattr(engine, "END_INFERRED", [fail])
        result = Runs().call(Training(), None, lambda: "trained")

    assert "trained" == result


@pytest.mark.filterwarnings("ignore")  # of `torch.jit`; as errors, they would hide a reading
def test_a_value_that_the_program_logs_in_a_trace() -> None:
    """The traced graph is the same as without reading it; no value is known there."""
    torch = pytest.importorskip("torch")
    found = []

    def kinds(read: Any) -> list[str]:
        def forward(given: Any) -> Any:
            found.append(read(given.sum()))
            return given * 2

        traced = torch.jit.trace(forward, torch.ones(2), check_trace=False)
        return [node.kind() for node in traced.graph.nodes()]

    assert 1.0 == engine.scalar_of(torch.ones(()))  # now the type is known
    assert kinds(lambda _: None) == kinds(engine.scalar_of)
    assert getattr(found[-1], "is_lost", False)
