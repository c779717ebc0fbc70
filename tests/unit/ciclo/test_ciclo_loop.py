"""The loop: callback forms, returns, errors, what goes in and what comes out."""

from __future__ import annotations

import functools
import gc
import logging
import signal
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

import ciclo
from ciclo import LoopState

if TYPE_CHECKING:
    from collections.abc import Iterator


def run(callback: Any, state: Any = 0, dataset: Any = (10, 20), **options: Any) -> Any:
    return ciclo.loop(state, dataset, {ciclo.every(1): callback}, **options)


async def slow(state: Any) -> None:
    pass


class Slow:
    async def __call__(self, state: Any) -> None:
        pass


def yields(state: Any) -> Iterator[Any]:
    yield state


class TestForms:
    def test_a_loop_of_plain_python(self) -> None:
        """An int is a state."""
        state, history, elapsed = run(lambda state, batch: state + batch)

        assert (30, 0, 2) == (state, len(history), elapsed.steps)

    @pytest.mark.parametrize(
        ("callback", "expected"),
        [
            (lambda: 5, 5),
            (lambda state: state + 1, 2),
            (lambda s, b: s + b, 30),
            (lambda s, b, e: s + b + e.steps, 31),
            (lambda s, b, e, run: run.state + run.batch, 30),
            (lambda batch: batch, 20),
            (lambda elapsed: elapsed.steps + 7, 8),
            (lambda loop_state: loop_state.state + 1, 2),
            (lambda batch, state: state + batch * 2, 60),
            (lambda s, batch: s + batch, 30),
            (lambda x, batch, lr=0.5: x + batch * lr, 15),
            (lambda x, lr=2, batch=None: x + batch * lr, 60),
            (lambda s, *, elapsed: s + elapsed.steps, 1),
            (lambda s, *, elapsed, lr=3: s + elapsed.steps + lr, 7),
            (lambda *args: args[0] + args[1], 30),
            (lambda **named: named["state"] + named["batch"], 30),
            (functools.partial(lambda lr, state, batch: state + batch * lr, 2), 60),
            (functools.wraps(lambda state, batch: 0)(lambda *a, **k: a[0] + a[1]), 30),
        ],
        ids=range(18),
    )
    def test_arguments(self, callback: Any, expected: Any) -> None:
        """Arguments are given by their names, the others in the order of the seed."""
        assert expected == run(callback).state

    def test_objects(self) -> None:
        """An object with `__loop_callback__`, one with `__call__` and a bound method will do."""

        class Protocol:
            def __loop_callback__(self, loop_state: LoopState[int]) -> tuple[None, int]:
                return None, loop_state.state + 1

            def method(self, state: int) -> int:
                return state + 2

        class Callable_:  # noqa: N801
            def __call__(self, state: int) -> int:
                return state + 3

        assert (2, 4, 6) == tuple(
            run(c).state for c in (Protocol(), Protocol().method, Callable_())
        )

    def test_lists_pairs_and_unpacking(self) -> None:
        """A value may be a list; tasks may be pairs; callback objects are unpacked."""
        seen: list[str] = []

        class Note(ciclo.LoopCallback):
            def __loop_callback__(self, loop_state: LoopState[Any]) -> None:
                seen.append("object")

        ciclo.loop(
            None,
            [1],
            {
                ciclo.every(1): [lambda: seen.append("a"), lambda: seen.append("b")],
                **Note(),
                **Note(),
            },
        )
        ciclo.loop(None, [1], [(ciclo.every(1), lambda: seen.append("c"))])

        assert ["a", "b", "object", "object", "c"] == seen

    def test_a_function_is_a_schedule(self) -> None:
        """A key may be a plain function of `elapsed`."""
        assert 2 == ciclo.loop(0, range(4), {lambda e: e.steps % 2: lambda s: s + 1}).state

    @pytest.mark.parametrize(
        ("tasks", "text"),
        [
            (
                {ciclo.every(1): lambda a, b, c, d, e: None},
                r"<lambda>\(a, b, c, d, e\) cannot be a callback: 'e' is one too many",
            ),
            ({ciclo.every(1): lambda *, x: None}, "the keyword 'x' has no value"),
            ({ciclo.every(1): 3}, r"3 is not a callback; use a function such as\n    def callback"),
            ({ciclo.every(1): ciclo.keras_bar}, r"Did you mean keras_bar\(...\)\?"),
            ({ciclo.every(1): dict.update}, r"wrap it, as in lambda state, batch: update"),
            ({"on_train_step": lambda: None}, "'on_train_step' is a moment of train_loop"),
            ([lambda: None], r"a list of \(schedule, callbacks\)"),
            (lambda: None, r"a list of \(schedule, callbacks\); got <function .*Write \{ciclo"),
            (None, r"a list of \(schedule, callbacks\); got None"),
            ({ciclo.every(1): slow}, "slow is async, and a loop does not wait for it"),
            ({ciclo.every(1): functools.partial(slow, 1)}, "slow is async"),
            ({ciclo.every(1): Slow()}, "Slow is async"),
            ({ciclo.every(1): yields}, "yields has a yield, so calling it does nothing"),
        ],
    )
    def test_checked_when_attached(self, tasks: Any, text: str) -> None:
        """A wrong callback is named, with the right form, before anything runs."""
        with pytest.raises(ciclo.CallbackError, match=text):
            ciclo.loop(0, iter(lambda: pytest.fail("ran"), 1), tasks)

    def test_pairs_may_be_lists_or_come_one_by_one(self) -> None:
        """Whatever gives pairs is tasks, and whatever gives callbacks is several."""
        add = lambda state: state + 1  # noqa: E731
        pairs = [[ciclo.every(1), [add]], [ciclo.every(2), (one for one in [add])]]

        assert 3 == ciclo.loop(0, range(2), pairs).state
        assert 2 == ciclo.loop(0, range(2), ((ciclo.every(1), add) for _ in range(1))).state

    @pytest.mark.parametrize("dataset", [5, None, object()])
    def test_a_dataset_that_is_none(self, dataset: Any) -> None:
        """What is not iterable is said to be so."""
        with pytest.raises(TypeError, match=r"the dataset .* is not iterable"):
            ciclo.loop(0, dataset, {})
        with pytest.raises(TypeError, match=r"the dataset .* is not iterable"):
            ciclo.elapse(dataset)

    @pytest.mark.parametrize("stop", [ciclo.every(3), lambda elapsed: True, timedelta(seconds=1)])
    def test_a_stop_that_is_no_point(self, stop: Any) -> None:
        """The error says how to stop at a point, and how for another reason."""
        with pytest.raises(ciclo.PeriodError, match=r"ciclo.at\(.* set loop_state.stop_iteration"):
            ciclo.loop(0, [1], {}, stop)

    def test_a_number_is_no_schedule(self) -> None:
        """The error shows what to write."""
        with pytest.raises(ciclo.PeriodError, match=r"write ciclo.every\(5\)"):
            ciclo.loop(0, [1], {5: lambda: None})


class Point(NamedTuple):
    x: int
    y: int


class TestReturns:
    @pytest.mark.parametrize(
        ("state", "same"),
        [(0, 0), (0.0, 0.0), ("", ""), (False, False), ([], []), (Point(1, 2), Point(1, 2))],
    )
    def test_a_falsy_state_is_a_state(self, state: Any, same: Any) -> None:
        """Only None means "no new state"."""
        assert same == run(lambda: state, state=9).state
        assert same == run(lambda: (None, state), state=9).state

    def test_states_in_a_pair(self) -> None:
        """A dict, a tuple or an array is a state when it is the second of a pair."""
        assert {} == run(lambda: (None, {}), state=9).state
        assert (1, 2) == run(lambda: (None, (1, 2)), state=9).state
        assert [1.0, 1.0] == list(run(lambda: (None, np.ones(2)), state=9).state)
        assert {"a": {}} == run(lambda: ({}, {"a": {}}), state=9).state

    def test_none_keeps_the_state(self) -> None:
        """A callback may return nothing, or a pair of nothing."""
        assert 9 == run(lambda: None, state=9).state
        assert 9 == run(lambda: (None, None), state=9).state

    def test_logs(self) -> None:
        """A dict of dicts is logs, alone or in a pair."""
        alone = run(lambda batch: {"metrics": {"a": batch}})
        pair = run(lambda state, batch: ({"metrics": {"a": batch}}, state + 1))

        assert ([0, 1], [10, 20]) == alone.history.collect("steps", "a")
        assert (2, [10, 20]) == (pair.state, pair.history.collect("a"))

    @pytest.mark.parametrize(
        ("result", "text"),
        [
            ((1, 2), r"returned the tuple \(int, int\), which is not \(logs, state\)"),
            ((1, 2, 3), r"return logs, state"),
            ({"loss": 1}, r'return {"losses": {.loss.: ...}}'),
            (({"loss": 1}, 2), r'return {"losses": {.loss.: ...}}, state'),
        ],
    )
    def test_what_is_neither(self, result: Any, text: str) -> None:
        """The error names the callback and shows the fix."""

        def train_step() -> Any:
            return result

        with pytest.raises(ciclo.CallbackError, match=f"train_step(.|\n)*{text}"):
            run(train_step)

    def test_the_loop_state_is_no_state(self) -> None:
        """A callback that returns what it was given by mistake is told so."""
        with pytest.raises(ciclo.CallbackError, match="returned the loop_state, not the state"):
            run(lambda loop_state: loop_state)

    def test_logs_of_one_step_are_together(self) -> None:
        """All callbacks of a step fill one row, and each sees what was logged before it."""
        seen = []
        _, history, _ = ciclo.loop(
            0,
            [1],
            [
                (ciclo.every(1), lambda: {"metrics": {"a": 1}}),
                (ciclo.every(1), lambda loop_state: seen.append(loop_state.logs.names())),
                (ciclo.every(1), lambda loop_state: loop_state.logs.add_metric("b", 2)),
            ],
        )

        assert [["metrics.a"]] == seen
        assert ([0], [1], [2]) == history.collect("steps", "a", "b")

    def test_accumulated_logs(self) -> None:
        """The newest value of everything so far, this iteration included."""
        seen = []
        ciclo.loop(
            0,
            range(3),
            [
                (ciclo.every(2), lambda batch: {"metrics": {"a": batch}}),
                (ciclo.at(1), lambda: {"metrics": {"b": 1}}),
                (
                    ciclo.every(1),
                    lambda loop_state: seen.append(loop_state.accumulated_logs.names()),
                ),
                (ciclo.at(2), lambda loop_state: seen.append(loop_state.accumulated_logs.a)),
            ],
        )

        assert [["metrics.a"], ["metrics.a", "metrics.b"], ["metrics.a", "metrics.b"], 2] == seen


class TestGoingOn:
    def test_counts_what_is_done(self) -> None:
        """Going on with what a loop returned repeats and skips nothing."""
        seen: list[int] = []
        note = {ciclo.every(1): lambda elapsed: seen.append(elapsed.steps)}
        _, _, elapsed = ciclo.loop(0, range(3), note)
        _, _, elapsed = ciclo.loop(0, range(3), note, elapsed=elapsed)

        assert [0, 1, 2, 3, 4, 5] == seen
        assert 6 == elapsed.steps

    def test_history_goes_on(self) -> None:
        """A history that is given is continued: it is the same object afterwards."""
        first = run(lambda batch: {"metrics": {"a": batch}})
        second = run(
            lambda batch: {"metrics": {"a": batch}}, history=first.history, elapsed=first.elapsed
        )

        assert ([0, 1, 2, 3], [10, 20, 10, 20]) == second.history.collect("steps", "a")
        assert first.history is second.history

    def test_a_passed_stop_runs_nothing(self) -> None:
        """A stop that the given `elapsed` has passed ends the loop before it begins."""
        assert 9 == run(lambda: 1, state=9, stop=3, elapsed=ciclo.Elapsed(steps=3)).state

    def test_inputs_are_not_changed(self) -> None:
        """Tasks, elapsed and metadata are the caller's."""
        tasks = {ciclo.every(1): [lambda: None]}
        before = {key: list(value) for key, value in tasks.items()}
        elapsed = ciclo.Elapsed(steps=2)
        seen = []
        ciclo.loop(0, [1], tasks, elapsed=elapsed)
        run(lambda loop_state: seen.append(loop_state.metadata), metadata={"a": 1}, dataset=[1])

        assert (before, 2) == (tasks, elapsed.steps)
        assert [{"a": 1}] == seen


class TestStartAndEnd:
    def test_both_run_on_an_empty_dataset(self) -> None:
        """What is to run at the start and at the end runs, even if nothing is between."""
        seen: list[str] = []
        run(
            lambda: seen.append("step"),
            dataset=[],
            on_start=lambda: seen.append("start"),
            on_end=[lambda: seen.append("end"), lambda: seen.append("end 2")],
        )

        assert ["start", "end", "end 2"] == seen

    def test_their_logs_and_states_count(self) -> None:
        """Both may log and return a state."""
        result = run(
            lambda state: state + 1,
            on_start=lambda state: ({"metrics": {"begin": 1.0}}, state + 100),
            on_end=lambda state: ({"metrics": {"final": 2.0}}, state + 1000),
        )

        assert 1102 == result.state
        assert ([0], [1.0]) == result.history.collect("steps", "begin")
        assert ([1], [2.0]) == result.history.collect("steps", "final")

    def test_the_start_has_the_first_batch(self) -> None:
        """`on_start` runs once, with the first batch in hand, before any task."""
        seen: list[Any] = []
        run(lambda batch: seen.append(batch), on_start=lambda batch: seen.append(("start", batch)))

        assert [("start", 10), 10, 20] == seen

    def test_a_stop_at_the_start(self) -> None:
        """A loop that is stopped by `on_start` runs no step."""

        def stop(loop_state: LoopState[int]) -> None:
            loop_state.stop_iteration = True

        assert 0 == run(lambda s: s + 1, on_start=stop).elapsed.steps

    def test_a_stop_ends_its_iteration(self) -> None:
        """The tasks after the one that stops do not run, and the step counts as done."""
        seen = []

        def stop(loop_state: LoopState[int]) -> None:
            loop_state.stop_iteration = loop_state.elapsed.steps == 1

        tasks = [
            (ciclo.every(1), stop),
            (ciclo.every(1), lambda elapsed: seen.append(elapsed.steps)),
        ]

        assert 2 == ciclo.loop(0, range(9), tasks).elapsed.steps
        assert [0] == seen

    def test_between_two_iterations(self) -> None:
        """What is deferred runs once all of the iteration is done and in the history."""
        seen = []

        def defer(loop_state: LoopState[int]) -> None:
            loop_state.defer(lambda run: seen.append((run.done().steps, run.history.last("a"))))

        ciclo.loop(
            0,
            range(2),
            [(ciclo.every(1), defer), (ciclo.every(1), lambda batch: {"metrics": {"a": batch}})],
        )

        assert [(1, 0), (2, 1)] == seen


class TestErrors:
    def test_keep_their_type_and_say_where(self) -> None:
        """A note says which callback, step and batch."""

        def train_step(batch: Any) -> None:
            if batch["x"][0]:
                raise ZeroDivisionError("mine")

        batches = [{"x": np.zeros(3)}, {"x": np.ones(3)}]
        with pytest.raises(ZeroDivisionError, match="mine") as caught:
            run(train_step, dataset=batches)

        assert [
            "ciclo: in callback train_step, step 1, batch {x: float64[3]}"
        ] == caught.value.__notes__

    def test_of_the_dataset(self) -> None:
        """A dataset that fails is said to have failed, with the step that it was for."""

        def dataset() -> Iterator[int]:
            yield 1
            raise OSError("disk")

        with pytest.raises(OSError, match="disk") as caught:
            run(lambda: None, dataset=dataset())

        assert ["ciclo: while fetching the batch of step 1"] == caught.value.__notes__

    def test_the_end_runs_whatever_happens(self) -> None:
        """`on_end` and the ends of callbacks run after an error too."""
        seen = []

        class Closing(ciclo.LoopCallback):
            def __loop_callback__(self, loop_state: LoopState[Any]) -> None:
                raise KeyError("first")

            def on_loop_end(self, loop_state: LoopState[Any]) -> None:
                seen.append("closed")

        def on_end() -> None:
            seen.append("on_end")
            raise ValueError("second")

        with pytest.raises(KeyError, match="first") as caught:
            run(Closing(), on_end=[on_end, lambda: seen.append("last")])

        assert ["closed", "on_end", "last"] == seen
        assert "then on_end failed: ValueError: second" == caught.value.__notes__[-1]

    def test_of_the_end_alone(self) -> None:
        """An error of `on_end` is raised when there is no other."""

        def on_end() -> None:
            raise ValueError("mine")

        with pytest.raises(ValueError, match="mine") as caught:
            run(lambda: None, on_end=on_end)

        assert "in callback on_end" in caught.value.__notes__[0]

    def test_what_is_deferred(self) -> None:
        """An error between two iterations says which function and step."""

        def save(loop_state: LoopState[int]) -> None:
            raise OSError("full")

        with pytest.raises(OSError, match="full") as caught:
            run(lambda loop_state: loop_state.defer(save))

        assert ["ciclo: in callback save, step 0, batch 10"] == caught.value.__notes__


class TestInterrupts:
    def test_the_first_finishes_the_step(
        self, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Ctrl-C ends the loop after the step, runs `on_end`, and the result says so."""
        seen = []

        def step(state: int) -> int:
            if state == 2:
                signal.raise_signal(signal.SIGINT)
            return state + 1

        result = ciclo.loop(0, range(9), {ciclo.every(1): step}, on_end=lambda: seen.append("end"))

        assert (3, 3, True) == (result.state, result.elapsed.steps, result.is_interrupted)
        assert ["end"] == seen
        assert "interrupted after 3 steps" in caplog.text
        assert "stopping after this step" in capfd.readouterr().err
        assert signal.default_int_handler is signal.getsignal(signal.SIGINT)

    def test_the_second_raises(self) -> None:
        """Ctrl-C twice stops at once, and still runs `on_end`."""
        seen = []

        def step() -> None:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("went on")

        with pytest.raises(KeyboardInterrupt):
            run(step, on_end=lambda: seen.append("end"))

        assert ["end"] == seen

    def test_an_inner_loop_stops_too(self) -> None:
        """Ctrl-C inside an evaluation ends it and the loop around it."""
        steps = []

        def inner_step(batch: int) -> None:
            steps.append(batch)
            if batch == 3:
                signal.raise_signal(signal.SIGINT)

        def evaluate(state: int) -> None:
            ciclo.loop(state, range(100), {ciclo.every(1): inner_step})

        result = run(evaluate, dataset=range(100))

        assert (1, True, [0, 1, 2, 3]) == (result.elapsed.steps, result.is_interrupted, steps)

    def test_one_that_is_raised_by_a_callback(self) -> None:
        """It is taken as Ctrl-C; the step that it cut short does not count."""

        def step(batch: int) -> None:
            if batch == 2:
                raise KeyboardInterrupt

        assert (2, True) == (
            (result := run(step, dataset=range(9))).elapsed.steps,
            result.is_interrupted,
        )
        with pytest.raises(KeyboardInterrupt):
            run(step, dataset=range(9), catch_keyboard_interrupt=False)

    def test_one_that_an_inner_loop_catches_stops_the_outer(self) -> None:
        """Whatever raises it, nobody has to press Ctrl-C once for each loop."""

        def interrupt() -> None:
            raise KeyboardInterrupt

        inner = ciclo.inner_loop("test", lambda state: run(interrupt, state))
        result = run([lambda state: state + 1, inner], dataset=range(9))

        assert (1, True) == (result.state, result.is_interrupted)

    def test_a_step_that_is_cut_short_leaves_the_state_before(self) -> None:
        """State and elapsed are of the same time, so going on repeats and skips nothing."""

        def interrupt(elapsed: ciclo.Elapsed) -> None:
            if elapsed.steps == 2:
                raise KeyboardInterrupt

        result = run([lambda state, batch: [*state, batch], interrupt], [], range(5))
        on = ciclo.loop(
            result.state,
            range(result.elapsed.steps, 5),
            {ciclo.every(1): lambda state, batch: [*state, batch]},
            elapsed=result.elapsed,
        )

        assert [0, 1] == result.state
        assert [0, 1, 2, 3, 4] == on.state

    def test_a_handler_of_the_users_stays(self) -> None:
        """Where the program has its own handler, it is called and the loop goes on."""
        seen: list[int] = []
        before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
        try:
            result = run(lambda: signal.raise_signal(signal.SIGINT))
        finally:
            signal.signal(signal.SIGINT, before)

        assert ([signal.SIGINT, signal.SIGINT], False) == (seen, result.is_interrupted)


def test_a_batch_is_not_kept_alive() -> None:
    """While a loop waits for a batch it holds at most the one before; afterwards none."""

    class Batch:
        pass

    made: list[weakref.ref[Batch]] = []

    def dataset() -> Iterator[Batch]:
        for _ in range(20):
            batch = Batch()
            made.append(weakref.ref(batch))
            yield batch
            del batch
            assert sum(ref() is not None for ref in made) <= 1

    run(lambda: None, dataset=dataset())
    gc.collect()

    assert 0 == sum(ref() is not None for ref in made)


def test_nothing_is_said_while_all_is_well(caplog: pytest.LogCaptureFixture) -> None:
    """A loop logs nothing on its own."""
    with caplog.at_level(logging.DEBUG):
        run(lambda: None)

    assert "" == caplog.text


@pytest.mark.parametrize(
    "state", [{"dense": {"w": 1.0}}, ({"dense": {"w": 1.0}}, "optimizer")], ids=["dict", "pair"]
)
def test_a_state_that_would_be_taken_for_logs(state: Any) -> None:
    """Nested parameters that a callback returns are refused as logs, and taken as (None, state)."""

    def step(state: Any, batch: int) -> Any:
        return state

    with pytest.raises(
        ciclo.CallbackError, match=r"that looks like the state.*\n.*\n.*None, state"
    ):
        ciclo.loop(state, range(1), {ciclo.every(1): step})
    kept = ciclo.loop(state, range(1), {ciclo.every(1): lambda state, batch: (None, state)})
    assert state == kept.state
