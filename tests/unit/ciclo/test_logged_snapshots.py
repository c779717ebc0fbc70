"""What is logged stays as it was when it was logged."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ciclo
from cirron import testing

if TYPE_CHECKING:
    from collections.abc import Callable


def logged(*steps: Callable[[int], Any], count: int = 3) -> ciclo.History:
    tasks = [(ciclo.every(1), lambda batch, step=step: step(batch)) for step in steps]
    return ciclo.loop(None, range(count), tasks).history


def test_one_dict_that_is_returned_again_and_again() -> None:
    """A callback may fill the same dict in each step."""
    same: dict[str, dict[str, Any]] = {"metrics": {}}

    def step(batch: int) -> Any:
        same["metrics"]["a"] = batch
        return same

    assert [0, 1, 2] == logged(step).collect("a")


def test_a_dict_that_a_later_callback_changes() -> None:
    """What was returned counts, also when it is changed before the iteration is over."""
    same: dict[str, dict[str, Any]] = {}

    def first(batch: int) -> Any:
        same.clear()
        same["metrics"] = {"a": batch}
        return same

    def second(batch: int) -> None:
        same["metrics"]["a"] = same["metrics"]["b"] = -1
        same["losses"] = {"loss": -1}

    history = logged(first, second)

    assert ["metrics.a"] == history.names()
    assert [0, 1, 2] == history.collect("a")


def test_two_callbacks_that_return_the_same_dict() -> None:
    """Each is taken when it returns; the last word on a name counts."""
    same: dict[str, dict[str, Any]] = {"metrics": {}}

    def put(name: str, value: int) -> Any:
        same["metrics"][name] = value
        return same

    history = logged(lambda batch: put("a", batch), lambda batch: put("b", -batch))

    assert ([0, 1, 2], [0, -1, -2]) == history.collect("a", "b")


def test_logs_that_are_filled_after_they_were_returned() -> None:
    """Logs of one's own are copied as dicts are."""
    kept = ciclo.logs()

    def first(batch: int) -> Any:
        return kept.add_metric("a", batch)

    history = logged(first, lambda batch: kept.add_metric("a", -1) and None)

    assert [0, 1, 2] == history.collect("a")


@pytest.mark.parametrize(
    ("value", "change", "expected"),
    [
        ([1, [2]], lambda value: value[1].append(3), [1, [2]]),
        ({"k": [1]}, lambda value: value["k"].append(2), {"k": [1]}),
        (([1], 2), lambda value: value[0].append(2), ([1], 2)),
        (np.zeros(2), lambda value: value.fill(1), [0.0, 0.0]),
        (np.array(0.5), lambda value: value.fill(1), 0.5),
    ],
)
def test_values_that_change_in_place(
    value: Any, change: Callable[[Any], Any], expected: Any
) -> None:
    """Arrays, lists, dicts, and what is inside of them."""
    history = ciclo.history()
    history.commit(ciclo.Elapsed(), {"metrics": {"a": value}})
    change(value)
    (found,) = history.collect("a")

    assert expected == (found.tolist() if isinstance(found, np.ndarray) else found)


def test_torch_tensors_that_change_in_place() -> None:
    """Scalars and others."""
    torch = pytest.importorskip("torch")
    total, many = torch.zeros(()), torch.zeros(2)
    history = ciclo.history()
    for step in range(3):
        total += 1
        many += 1
        history.commit(ciclo.Elapsed(step), {"metrics": {"total": total, "many": many}})

    assert [1.0, 2.0, 3.0] == history.collect("total")
    assert [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]] == [one.tolist() for one in history.collect("many")]


def test_what_changes_after_the_last_step() -> None:
    """The end of a loop adds what is logged there, and leaves the rest as it was."""
    total = np.zeros(1)

    def end() -> Any:
        total[:] = 5
        return {"metrics": {"end": 1}}

    result = ciclo.loop(
        None, range(2), {ciclo.every(1): lambda: {"metrics": {"total": total}}}, on_end=end
    )

    assert [[0.0], [0.0]] == [one.tolist() for one in result.history.collect("total")]
    assert ([1], [1]) == result.history.collect("steps", "end")


def test_a_loop_that_logs_by_what_it_was_given() -> None:
    """Chained calls on the logs of the loop may be what a lambda returns."""
    history = ciclo.loop(
        None, range(2), {ciclo.every(1): lambda loop_state: loop_state.logs.add_metric("a", 1)}
    ).history

    assert [1, 1] == history.collect("a")


def test_logs_seen_by_later_callbacks() -> None:
    """They see what was logged before them, by any form, and the loop sees what they add."""
    seen: list[Any] = []

    def look(loop_state: ciclo.LoopState[Any]) -> None:
        seen.append((loop_state.logs.metrics.a, loop_state.accumulated_logs.a))
        loop_state.logs.add_loss("b", 2)

    history = logged_with(look)

    assert [(0, 0), (1, 1)] == seen
    assert ([0, 1], [2, 2], [3, 3]) == history.collect("a", "b", "c")


def logged_with(look: Callable[..., None]) -> ciclo.History:
    tasks = [
        (ciclo.every(1), lambda batch: {"metrics": {"a": batch}}),
        (ciclo.every(1), look),
        (ciclo.every(1), lambda: ciclo.logs().add("mine", "c", 3)),
    ]
    return ciclo.loop(None, range(2), tasks).history


def test_an_interrupt_amid_a_commit_leaves_whole_rows() -> None:
    """Whatever moment Ctrl-C hits, values stay with their rows."""

    class Slow:
        shape = ()

        def item(self) -> float:
            signal.raise_signal(signal.SIGINT)
            return 1.0

    found: list[ciclo.History] = []

    def step(batch: Any, loop_state: ciclo.LoopState[Any]) -> Any:
        found.append(loop_state.history)
        return {"metrics": {"a": 0.5, "b": batch}}

    with pytest.raises(KeyboardInterrupt):
        ciclo.loop(
            None, [0.0, 1.0, Slow(), 3.0], {ciclo.every(1): step}, catch_keyboard_interrupt=False
        )
    history = found[-1]
    history.commit(ciclo.Elapsed(steps=9), {"metrics": {"a": 9.0, "b": 9.0}})

    assert 9.0 == history[-1].a == history[-1].b
    assert 9 == history.collect("steps")[-1]


class OnDevice:
    """A torch scalar on a device, which counts its copies."""

    shape = ()
    is_cpu = False
    copies = 0

    def detach(self) -> OnDevice:
        return self

    def clone(self) -> OnDevice:
        OnDevice.copies += 1
        return OnDevice()

    def dim(self) -> int:
        return 0


def test_a_marked_device_value_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark of a profiled loop takes the copy that the history has made."""
    from ciclo import device_values
    from cirron.record import hot, value

    taken: list[Any] = []

    class Clock:
        def keep(self, scalar: Any, now_ns: int) -> value.Deferred:
            taken.append(scalar)
            found = value.Deferred(None)
            found.value, found.is_ready = 0.5, True
            return found

    OnDevice.__module__ = "torch"
    monkeypatch.setattr(device_values, "_send_torch", lambda ones: lambda: [0.5] * len(ones))
    monkeypatch.setattr(OnDevice, "device", "gpu", raising=False)
    monkeypatch.setattr(OnDevice, "dtype", "float32", raising=False)
    loss = OnDevice()
    with testing.capture() as captured:
        from ciclo import _seam

        history = ciclo.history()
        watch = _seam.watch()
        assert watch is not None
        monkeypatch.setattr(hot, "device_clock", Clock())
        with_clock = {"losses": {"loss": loss}}
        for step in range(3):
            history.commit(ciclo.Elapsed(step), with_clock)
            watch.mark(with_clock, history.kept)
        monkeypatch.setattr(hot, "device_clock", None)

    assert 3 == OnDevice.copies
    assert 2 == len(taken)  # the first was fetched at once
    assert loss not in taken
    assert 3 == len(captured.marks)
    assert [0.5, 0.5, 0.5] == history.collect("loss")
