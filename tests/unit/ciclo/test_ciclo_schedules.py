"""Schedules: when something is due."""

from __future__ import annotations

import json
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ciclo
from ciclo.elapsed import Elapsed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def fired(schedule: Callable[[Elapsed], bool], sizes: list[int] | int, **options: Any) -> list[int]:
    """The steps at which a schedule is due, over batches of these sizes."""
    batches = [[0] * size for size in sizes] if isinstance(sizes, list) else range(sizes)
    return [e.steps for e, _ in ciclo.elapse(batches, **options) if schedule(e)]


class TestEvery:
    def test_by_steps_from_zero(self) -> None:
        """By steps a schedule is due at 0, n, 2n."""
        assert [0, 3, 6, 9] == fired(ciclo.every(3), 10)
        assert [0, 3, 6, 9] == fired(ciclo.every(steps=3), 10)

    def test_at_the_end(self) -> None:
        """With `at="end"` it is due in the last step of each n."""
        assert [2, 5, 8] == fired(ciclo.every(3, at="end"), 10)

    def test_by_samples_counts_from_when_it_was_due(self) -> None:
        """By samples it is due once so many have gone by since it was last due, never at first."""
        assert [4, 8, 12] == fired(ciclo.every(samples=100), [32] * 14)
        assert [1, 2] == fired(ciclo.every(samples=2), [7, 2, 1])

    def test_two_loops_at_once_share_nothing(self) -> None:
        """When a schedule was last due belongs to the loop, not to the schedule."""
        schedule = ciclo.every(samples=100)
        one = ciclo.elapse([[0] * 32] * 14)
        other = ciclo.elapse([[0] * 50] * 14)

        due = [(schedule(a), schedule(b)) for (a, _), (b, _) in zip(one, other, strict=True)]

        assert [4, 8, 12] == [step for step, (is_due, _) in enumerate(due) if is_due]
        assert [2, 4, 6, 8, 10, 12] == [step for step, (_, is_due) in enumerate(due) if is_due]

    def test_several_amounts_do_not_disturb_each_other(self) -> None:
        """Each is counted from when it was itself due."""
        both = ciclo.every(samples=100, tokens=70)

        def due(schedule: Any) -> list[int]:
            found = ciclo.elapse(range(14), batch_size_fn=lambda shapes: (32, 32))
            return [e.steps for e, _ in found if schedule(e)]

        assert due(ciclo.every(samples=100) | ciclo.every(tokens=70)) == due(both)

    def test_made_anew_in_each_step(self) -> None:
        """One that was never asked before knows of no earlier time: multiples count."""
        found = ciclo.elapse([[0] * 32] * 14)

        assert [4, 7, 10, 13] == [e.steps for e, _ in found if ciclo.every(samples=100)(e)]

    def test_those_that_are_gone_are_forgotten(self) -> None:
        """A schedule made in each step leaves nothing behind."""
        for elapsed, _ in ciclo.elapse(range(1000)):
            assert ciclo.every(samples=1)(elapsed) == (elapsed.steps > 0)
            ciclo.after(5).every(samples=1)(elapsed)

        assert {} == elapsed._anchors

    def test_by_tokens(self) -> None:
        """Tokens are counted where batches say them."""
        seen = [
            e.steps
            for e, _ in ciclo.elapse(range(6), batch_size_fn=lambda shapes: (1, 5))
            if ciclo.every(tokens=10)(e)
        ]

        assert [2, 4] == seen

    def test_by_time(self) -> None:
        """By time it is due once so many seconds have gone by since the loop began."""
        schedule = ciclo.every(time=60)

        assert not schedule(Elapsed(steps=0, time=0.0))
        assert schedule(Elapsed(steps=5, time=120.0))

    def test_any_of_several(self) -> None:
        """Several amounts are several ways to be due."""
        assert [0, 2, 4, 5] == fired(ciclo.every(steps=5, samples=20), [10] * 6)

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: ciclo.every(0), r"every\(steps=0\) is not valid; use more than 0"),
            (lambda: ciclo.every(-1), "negative"),
            (
                lambda: ciclo.every(2.5),  # type: ignore[arg-type]
                "not a whole number",
            ),
            (lambda: ciclo.every(time=0), "is not valid"),
            (lambda: ciclo.every(), "at least one of"),
            (lambda: ciclo.every(2, at="middle"), 'use "start" or "end"'),
            (lambda: ciclo.every(samples=2, at="end"), 'at="end" is for steps'),
            (lambda: ciclo.after(3).every(0), "is not valid"),
            (lambda: ciclo.piecewise({}), "at least one piece"),
            (lambda: ciclo.piecewise({5: ciclo.always(), 5.5: ciclo.always()}), "whole number"),
            (
                lambda: ciclo.piecewise([(5, ciclo.always()), (4, ciclo.never())]),
                "must be in order",
            ),
            (
                lambda: ciclo.every(1) & 3,  # type: ignore[operator]
                r"write ciclo.every\(3\)",
            ),
        ],
    )
    def test_bad_ones_are_refused_when_made(self, make: Callable[[], Any], text: str) -> None:
        """The error comes from the line that has the mistake."""
        with pytest.raises(ciclo.PeriodError, match=text):
            make()


class TestOthers:
    def test_at_is_due_once(self) -> None:
        """`at` as a schedule is due in the step that reaches it, and in no other."""
        assert [4] == fired(ciclo.at(4), 10)
        assert [2] == fired(ciclo.at(samples=5), [3] * 6)
        assert [0] == fired(ciclo.at(samples=0), [3] * 6)
        assert [] == fired(ciclo.at(4), 10, initial=Elapsed(steps=6))
        assert [] == fired(ciclo.at(date=1.0), 10)

    def test_after(self) -> None:
        """`after` is due from a point on."""
        assert [3, 4] == fired(ciclo.after(3), 5)
        assert [2, 3] == fired(ciclo.after(samples=5), [3] * 4)
        assert [0, 1] == fired(ciclo.after(date=1.0), 2)

    def test_after_every_counts_from_there(self) -> None:
        """`after(...).every(...)` begins to count where `after` begins."""
        assert [12, 17] == fired(ciclo.after(12).every(5), 20)
        assert [17] == fired(ciclo.after(12).every(5), 5, initial=Elapsed(steps=14))

    def test_after_one_unit_every_other(self) -> None:
        """Samples may be counted from a step on."""
        assert [5, 7] == fired(
            ciclo.after(steps=3).every(samples=20), [9, 9, 9, 10, 10, 10, 10, 10]
        )

    def test_one_schedule_in_two_loops(self) -> None:
        """What has begun belongs to the loop: a second one starts afresh."""
        schedule = ciclo.after(steps=2).every(samples=4)

        assert [4, 6] == fired(schedule, [2] * 7)
        assert [4, 6] == fired(schedule, [2] * 7)

    def test_one_schedule_inside_and_outside(self) -> None:
        """The same object counts on its own in each place."""
        shared = ciclo.every(samples=100)
        sizes = [32] * 14
        twin = ciclo.after(6).every(samples=100)
        inside = ciclo.piecewise({0: ciclo.never(), 6: shared})

        assert [4, 8, 12] == fired(shared, sizes)
        assert [10] == fired(twin, sizes) == fired(inside, sizes)
        assert [4, 8, 10, 12] == fired(shared | inside, sizes) == fired(inside | shared, sizes)

    def test_piecewise(self) -> None:
        """Each piece counts from where it begins."""
        schedule = ciclo.piecewise({0: ciclo.every(10), 25: ciclo.every(20)})

        assert [0, 10, 20, 25, 45, 65] == fired(schedule, 70)

    def test_piecewise_passes_over_pieces_at_once(self) -> None:
        """A loop that begins late is in the right piece from its first step."""
        schedule = ciclo.piecewise({0: ciclo.every(1), 50: ciclo.every(2), 100: ciclo.every(3)})

        assert [103, 106] == fired(schedule, 7, initial=Elapsed(steps=101))

    def test_always_and_never(self) -> None:
        """One is due in each step, the other in none."""
        assert [0, 1, 2] == fired(ciclo.always(), 3)
        assert [] == fired(ciclo.never(), 3)

    def test_plain_functions_take_part(self) -> None:
        """A function of `elapsed` stands on either side."""
        odd = lambda elapsed: elapsed.steps % 2  # noqa: E731

        assert [3, 9] == fired(ciclo.every(3) & odd, 10)
        assert [3, 9] == fired(odd & ciclo.every(3), 10)
        assert [0, 1, 3] == fired(odd | ciclo.every(3), 5)
        assert [0, 2, 4] == fired(~(ciclo.never() | odd), 5)

    def test_not_is_an_error(self) -> None:
        """`not schedule` would be a plain False, so it is refused with the right form."""
        with pytest.raises(TypeError, match=r"combine schedules with &, \| and ~"):
            assert not ciclo.every(2)

    def test_two_alike_are_two_keys(self) -> None:
        """Schedules are compared by identity, so a dict holds both."""
        assert 2 == len({ciclo.every(1): 1, ciclo.every(1): 2})
        assert 2 == len({ciclo.always(): 1, ciclo.always(): 2})

    def test_repr_is_what_one_would_write(self) -> None:
        """A schedule shows how it was made."""
        schedule = ciclo.after(5).every(2) & ~ciclo.at(9) | ciclo.piecewise({0: ciclo.always()})

        assert (
            "((after(steps=5).every(steps=2) & ~at(steps=9))"
            " | piecewise({period(steps=0): always()}))" == repr(schedule)
        )


# -- laws ----------------------------------------------------------------------------------------

amounts = st.integers(1, 12)
leaves = st.one_of(
    st.builds(lambda n: ciclo.every(n), amounts),
    st.builds(lambda n: ciclo.every(samples=n), amounts),
    st.builds(lambda n: ciclo.at(n), amounts),
    st.builds(lambda n: ciclo.at(samples=n), amounts),
    st.builds(lambda n, m: ciclo.after(n).every(samples=m), amounts, amounts),
    st.builds(lambda n, m: ciclo.after(samples=n).every(m), amounts, amounts),
    st.builds(lambda n, m: ciclo.every(n, samples=m), amounts, amounts),
    st.builds(
        lambda n, m: ciclo.piecewise({0: ciclo.every(n), ciclo.at(samples=m): ciclo.every(1)}),
        amounts,
        amounts,
    ),
)


def in_two_places(inner: Any, n: int, m: int) -> Any:
    """The same schedule on the loop's time and, from two points on, on its own."""
    return inner | ciclo.piecewise([(n, inner), (ciclo.at(samples=n + m), ~inner)])


schedules = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
        st.builds(in_two_places, inner, amounts, amounts),
    ),
    max_leaves=6,
)
batch_sizes = st.lists(st.integers(1, 9), min_size=1, max_size=40)


@settings(deadline=None)
@given(schedules, schedules, schedules, batch_sizes)
def test_the_algebra_is_boolean(a: Any, b: Any, c: Any, sizes: list[int]) -> None:
    """Commutative, associative, distributive, De Morgan, double negation, absorption."""
    for elapsed, _ in ciclo.elapse([[0] * size for size in sizes]):
        assert (a & b)(elapsed) == (b & a)(elapsed) == (a(elapsed) and b(elapsed))
        assert (a | b)(elapsed) == (b | a)(elapsed) == (a(elapsed) or b(elapsed))
        assert ((a & b) & c)(elapsed) == (a & (b & c))(elapsed)
        assert (a & (b | c))(elapsed) == ((a & b) | (a & c))(elapsed)
        assert (~(a & b))(elapsed) == (~a | ~b)(elapsed)
        assert (~~a)(elapsed) == a(elapsed) == (a | (a & b))(elapsed)


@settings(deadline=None)
@given(schedules, batch_sizes)
def test_asked_again_they_answer_the_same(schedule: Any, sizes: list[int]) -> None:
    """Asked twice at once, or again about all steps afterwards, a schedule says the same."""
    timeline = [e for e, _ in ciclo.elapse([[0] * size for size in sizes])]
    answers = [(schedule(e), schedule(e)) for e in timeline]

    assert all(first == second for first, second in answers)
    assert [first for first, _ in answers] == [schedule(e) for e in timeline]


@settings(deadline=None)
@given(amounts, amounts, batch_sizes)
def test_none_is_missed_and_none_fires_twice(n: int, begin: int, sizes: list[int]) -> None:
    """By samples it is due exactly if so many have gone by since it was last due, or began."""

    def expected(begin: int) -> list[int]:
        last, due = begin, []
        for step, samples in enumerate([0, *accumulate(sizes)][:-1]):
            if samples - last >= n:
                last = samples
                due.append(step)
        return due

    assert expected(0) == fired(ciclo.every(samples=n), sizes)
    assert expected(begin) == fired(ciclo.after(samples=begin).every(samples=n), sizes)


@settings(deadline=None)
@given(schedules, batch_sizes, st.lists(st.integers(1, 40), max_size=4))
def test_stopping_and_going_on_changes_nothing(
    schedule: Any, sizes: list[int], cuts: list[int]
) -> None:
    """A loop that is stopped anywhere and goes on fires in the same steps as one in one piece."""
    batches = [[0] * size for size in sizes]
    whole: list[int] = []
    ciclo.loop(None, batches, {schedule: lambda elapsed: whole.append(elapsed.steps)})

    parts: list[int] = []
    elapsed = ciclo.Elapsed()
    rest = iter(batches)
    for cut in [*sorted(cuts), 10**6]:
        _, _, elapsed = ciclo.loop(
            None,
            rest,
            {schedule: lambda elapsed: parts.append(elapsed.steps)},
            cut,
            elapsed=elapsed,
        )

    assert whole == parts
    assert len(sizes) == elapsed.steps


@settings(deadline=None)
@given(schedules, batch_sizes, st.integers(1, 39))
def test_saved_between_two_steps_and_loaded_changes_nothing(
    schedule: Any, sizes: list[int], cut: int
) -> None:
    """What a loop saves between two iterations is enough to go on exactly."""
    batches = [[0] * size for size in sizes]
    cut = min(cut, len(sizes))
    saved: list[dict[str, Any]] = []
    whole: list[int] = []

    def save(loop_state: ciclo.LoopState[None]) -> None:
        if loop_state.elapsed.steps == cut - 1:
            loop_state.defer(lambda state: saved.append(state.state_dict()))

    def watched(into: list[int]) -> list[tuple[Any, Any]]:
        return [(schedule, lambda elapsed: into.append(elapsed.steps)), (ciclo.always(), save)]

    ciclo.loop(None, batches, watched(whole))
    from ciclo.binding import bind_tasks

    later: list[int] = []
    run: ciclo.LoopState[None] = ciclo.LoopState(None)
    run._tasks = bind_tasks(watched(later), None)
    saved[0]["anchors"] = json.loads(json.dumps(saved[0]["anchors"]))  # they are plain values
    run.load_state_dict(saved[0])
    ciclo.loop(None, batches[cut:], watched(later), elapsed=run.elapsed)

    assert cut == run.elapsed.steps
    assert [step for step in whole if step >= cut] == later


class Noting(ciclo.LoopCallback):
    """Without a state: a run goes on without it or with another."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __loop_callback__(self, loop_state: ciclo.LoopState[Any]) -> None:
        self.steps.append(loop_state.elapsed.steps)


def due_by_samples() -> list[tuple[Any, list[int]]]:
    """Schedules over batches of 32, and the steps of 14 in which they are due."""
    shared = ciclo.every(samples=100)
    return [
        (shared, [4, 8, 12]),
        (ciclo.after(2).every(samples=100), [6, 10]),
        (ciclo.piecewise({0: ciclo.never(), 1: shared}), [5, 9, 13]),
        (ciclo.every(samples=100) & ciclo.every(tokens=250), [8]),
    ]


@pytest.mark.parametrize("cut", range(1, 14))
def test_a_loop_that_goes_on_anywhere(cut: int) -> None:
    """Whether the step before was due or not, the next loop counts on."""
    due: list[list[int]] = [[] for _ in due_by_samples()]
    tasks = [
        (schedule, lambda elapsed, into=into: into.append(elapsed.steps))
        for (schedule, _), into in zip(due_by_samples(), due, strict=True)
    ]
    elapsed = ciclo.Elapsed()
    for count in (cut, 14 - cut):
        size = lambda shapes: (32, 32)  # noqa: E731
        _, _, elapsed = ciclo.loop(0, range(count), tasks, elapsed=elapsed, batch_size_fn=size)

    assert [steps for _, steps in due_by_samples()] == due


@pytest.mark.parametrize("cut", [3, 5, 7, 9])
def test_a_resumed_loop_fires_as_one_in_one_piece(cut: int, tmp_path: Path) -> None:
    """What was last due when is in the checkpoint, for bars and loggers too."""
    noting = [Noting() for _ in due_by_samples()]

    def run(stop: int, *more: Any) -> ciclo.Elapsed:
        due = [(s, one) for (s, _), one in zip(due_by_samples(), noting, strict=True)]
        tasks = [*more, *due, (ciclo.every(1), ciclo.checkpoint(tmp_path))]
        size = lambda shapes: (32, 32)  # noqa: E731
        return ciclo.loop(0, range(14), tasks, stop, batch_size_fn=size, resume=tmp_path).elapsed

    run(cut)
    assert cut * 32 == run(cut).tokens  # once more, with nothing to do
    elapsed = run(14, (ciclo.every(samples=50), ciclo.noop))

    assert [steps for _, steps in due_by_samples()] == [one.steps for one in noting]
    assert (14, 14 * 32, 14 * 32) == (elapsed.steps, elapsed.samples, elapsed.tokens)


def test_a_maker_of_schedules_is_none() -> None:
    """Forgotten parentheses are told when the loop is set up."""
    with pytest.raises(ciclo.PeriodError, match=r"every is not called: write ciclo.every\("):
        ciclo.loop(0, range(1), {ciclo.every: lambda: None})


def test_a_schedule_class_of_the_user() -> None:
    """It defines `__call__`, and combines like the others."""

    class Odd(ciclo.Schedule):
        def __call__(self, elapsed: ciclo.Elapsed) -> bool:
            return elapsed.steps % 2 == 1

    seen: list[int] = []
    tasks = {Odd() & ~ciclo.at(3): lambda elapsed: seen.append(elapsed.steps)}
    ciclo.loop(None, range(8), {**tasks, Odd(): lambda elapsed: seen.append(-elapsed.steps)})

    assert seen == [1, -1, -3, 5, -5, 7, -7]
    with pytest.raises(NotImplementedError, match="Schedule has no __call__"):
        ciclo.Schedule()(ciclo.Elapsed())
