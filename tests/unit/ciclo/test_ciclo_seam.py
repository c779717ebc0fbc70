"""What a loop records while somebody profiles, and that it records nothing otherwise."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

import ciclo
import cirron as ci
from ciclo import _seam
from cirron import testing
from cirron.record import hot
from cirron.scheduling import Used

if TYPE_CHECKING:
    from collections.abc import Callable


def outline(nodes: list[dict[str, Any]]) -> str:
    """`step[0](data_load train)`, with a "!" behind what failed."""
    parts = []
    for node in nodes:
        index = "" if node["index"] is None else f"[{node['index']}]"
        failed = "!" if "error" in node["attrs"] else ""
        inside = f"({outline(node['children'])})" if node["children"] else ""
        parts.append(f"{node['name']}{index}{failed}{inside}")
    return " ".join(parts)


def train(state: int) -> Any:
    return {"metrics": {"loss": 0.5}}, state + 1


class Model:
    def train_step(self, batch: Any) -> Any:
        return {"metrics": {"loss": float(batch)}}

    def test_step(self, batch: Any) -> Any:
        return {"metrics": {"loss": float(batch)}}


def test_steps_callbacks_and_logs() -> None:
    """A span a step, with the wait for data and each callback in it, and logs as marks."""
    with testing.capture() as captured:
        ciclo.loop(0, "ab", {ciclo.every(1): train, ciclo.every(2): lambda: None})

    assert "step[0](data_load train <lambda>) step[1](data_load train)" == outline(
        captured.dict()["roots"]
    )
    assert [("loss", 0.5), ("loss", 0.5)] == [(mark.name, mark.value) for mark in captured.marks]


def test_epochs_and_evaluation() -> None:
    """A loop that knows epochs has spans for them; an evaluation is a span with its own steps."""
    with testing.capture() as captured:
        ciclo.fit(Model(), [1, 2], [3], epochs=2)

    evaluation = "evaluation(step[0](data_load test_step))"
    assert (
        f"epoch[0](step[0](data_load train_step) step[1](data_load train_step {evaluation})) "
        f"epoch[1](step[2](data_load train_step) step[3](data_load train_step {evaluation}))"
    ) == outline(captured.dict()["roots"])


def test_what_long_epochs_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The epochs of a loop have their CPU time, too."""
    with testing.capture() as captured:
        monkeypatch.setattr(hot, "MEASURED_NS", 0)
        monkeypatch.setattr(hot, "measure", Used)
        ciclo.fit(Model(), [1, 2], epochs=2)

    assert [True, True] == [one.cpu_ns is not None for one in captured.spans if one.name == "epoch"]


def test_a_last_epoch_that_is_cut() -> None:
    """Its evaluation is in it."""
    with testing.capture() as captured:
        ciclo.fit(Model(), [1, 2, 3], [3], steps=1)

    assert "epoch[0](step[0](data_load train_step evaluation(step[0](data_load test_step))))" == (
        outline(captured.dict()["roots"])
    )
    assert ["loss", "loss", "loss_valid"] == [mark.name for mark in captured.marks]


def test_a_loop_by_hand() -> None:
    """`elapse` records steps too."""
    with testing.capture() as captured:
        for _ in ciclo.elapse("abc", stop=2):
            with ci.scope("work"):
                pass

    assert "step[0](data_load work) step[1](data_load work)" == outline(captured.dict()["roots"])


def leave_by_stop() -> None:
    for _ in ciclo.elapse("abc", stop=2):
        pass


def leave_by_break() -> None:
    for elapsed, _ in ciclo.elapse("abc"):
        if elapsed >= ciclo.at(steps=1):
            break


def leave_by_an_error() -> None:
    with suppress(OSError):
        for elapsed, _ in ciclo.elapse("abc"):
            if elapsed.steps == 1:
                raise OSError("disk")


@pytest.mark.parametrize("leave", [leave_by_stop, leave_by_break, leave_by_an_error])
def test_what_comes_after_a_loop_by_hand(leave: Callable[[], None]) -> None:
    """However it is left, its last step ends there."""
    with testing.capture() as captured:
        leave()
        assert set() == hot.opened
        with ci.scope("later"):
            pass

    assert "step[0](data_load) step[1](data_load) later" == outline(captured.dict()["roots"])


def test_an_error_is_on_its_spans() -> None:
    """What failed says so, and nothing stays open."""

    def broken() -> None:
        raise OSError("disk")

    with testing.capture() as captured:
        with pytest.raises(OSError, match="disk"):
            ciclo.loop(0, "ab", {ciclo.every(1): broken})
        assert set() == hot.opened

    assert "step[0]!(data_load broken!)" == outline(captured.dict()["roots"])


def test_a_dataset_that_fails() -> None:
    """The wait for it is what failed."""

    def read(batch: int) -> int:
        raise OSError("disk")

    with testing.capture() as captured, pytest.raises(OSError, match="disk"):
        ciclo.loop(0, map(read, [1]), {ciclo.every(1): train})

    assert "step[0]!(data_load!)" == outline(captured.dict()["roots"])


@pytest.mark.parametrize("stop", [0, 1, 3, None])
def test_what_stops_leaves_nothing_open(stop: int | None) -> None:
    """However a loop ends, its spans are as many as its steps."""
    with testing.capture() as captured:
        result = ciclo.loop(0, "ab", {ciclo.every(1): train}, stop)
        assert set() == hot.opened

    assert result.elapsed.steps == sum(span.name == "step" for span in captured.spans)


def test_nothing_without_a_profiler() -> None:
    """While nobody profiles there is no recorder, and nothing is recorded."""
    assert _seam.watch() is None
    ciclo.loop(0, range(5), {ciclo.every(1): train})
    assert 0 == len(hot.ring)

    ci.profile(enabled=False)
    assert _seam.watch() is None

    ci.shutdown()
    ci.profile(output="none")
    assert _seam.watch() is not None


def test_values_that_are_no_marks_are_left_out() -> None:
    """Outputs and arrays stay in the history."""
    with testing.capture() as captured:
        ciclo.loop(
            0,
            "a",
            {ciclo.every(1): lambda: {"outputs": {"y": 1.0}, "metrics": {"list": [1], "x": 2.0}}},
        )

    assert ["x"] == [mark.name for mark in captured.marks]
