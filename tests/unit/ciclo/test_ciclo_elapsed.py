"""Time: `Elapsed`, `Period`, `elapse`."""

from __future__ import annotations

import datetime
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ciclo
from ciclo import elapsed as time_module
from ciclo.elapsed import samples_in, tokens_in


class TestElapse:
    def test_counts_from_zero(self) -> None:
        """Inside the loop `steps` and `samples` count what was done before."""
        seen = [(e.steps, e.samples, b) for e, b in ciclo.elapse([[1, 2], [3], [4, 5, 6]])]

        assert [(0, 0, [1, 2]), (1, 2, [3]), (2, 3, [4, 5, 6])] == seen

    @pytest.mark.parametrize("stop", [0, ciclo.at(0), ciclo.at(samples=0), ciclo.at(time=0)])
    def test_a_stop_that_is_reached_fetches_nothing(self, stop: Any) -> None:
        """`stop=0` runs nothing and asks the dataset for nothing."""

        asked: list[int] = []
        dataset = map(asked.append, range(3))

        assert [] == list(ciclo.elapse(dataset, stop=stop))
        assert [] == asked

    def test_no_batch_is_fetched_beyond_the_stop(self) -> None:
        """A loop that stops leaves the rest of an iterator to others."""
        items = iter(range(10))

        assert [0, 1, 2] == [batch for _, batch in ciclo.elapse(items, stop=3)]
        assert 3 == next(items)

    @pytest.mark.parametrize("stop", [5, np.int64(5), ciclo.at(steps=5), ciclo.at(5, time=1e9)])
    def test_whole_numbers_of_any_kind_are_steps(self, stop: Any) -> None:
        """A stop may be an int, a NumPy integer or a period."""
        assert 5 == len(list(ciclo.elapse(range(100), stop=stop)))

    def test_stop_by_samples(self) -> None:
        """The loop ends once so many samples are done."""
        batches = [np.zeros((4, 2))] * 10

        assert 3 == len(list(ciclo.elapse(batches, stop=ciclo.at(samples=10))))

    def test_stop_by_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The loop ends once so many seconds are over."""
        clock = iter(range(1000))
        monkeypatch.setattr(time_module, "monotonic", lambda: float(next(clock)))
        steps = len(list(ciclo.elapse(range(1000), stop=ciclo.at(time=20))))

        assert 5 < steps < 21

    def test_going_on_repeats_and_skips_nothing(self) -> None:
        """The counts go on from `elapsed.done()`."""
        for elapsed, _ in ciclo.elapse(["a", "b"]):
            last = elapsed
        seen = [e.steps for e, _ in ciclo.elapse(["c", "d"], initial=last.done())]

        assert [2, 3] == seen

    def test_own_batch_size(self) -> None:
        """`batch_size_fn` gets shapes, and says how many samples, or samples and tokens."""
        arrays = [{"x": np.zeros((n, 2)), "n": [1, np.zeros(())]} for n in (3, 4, 5)]
        shapes: list[Any] = []

        def rows(given: Any) -> int:
            shapes.append(given)
            return int(given[0][0])

        seen = [e.samples for e, _ in ciclo.elapse(arrays, batch_size_fn=rows)]
        both = ciclo.elapse(arrays, batch_size_fn=lambda s: (s[0][0], s[0][0] * 10))

        assert [0, 3, 7] == seen
        assert [(3, 2), (), ()] == shapes[0]
        assert [0, 30, 70] == [e.tokens for e, _ in both]

    def test_a_batch_size_fn_that_expects_a_batch(self) -> None:
        """It would count something else in silence, so the error shows the form."""
        with pytest.raises(ciclo.PeriodError, match=r"write batch_size_fn=lambda shapes: shapes"):
            ciclo.elapse([[1]], batch_size_fn=lambda batch: len(batch))
        with pytest.raises(TypeError) as raised:
            list(ciclo.elapse([[1]], batch_size_fn=lambda b: b["x"]))  # type: ignore[call-overload]
        assert "batch_size_fn gets the shapes" in raised.value.__notes__[0]

    def test_time_and_date_go_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Both come from one monotonic clock, so they move by the same amount."""
        clock = iter([100.0, 101.5, 104.0])
        monkeypatch.setattr(time_module, "monotonic", lambda: next(clock))
        monkeypatch.setattr(time_module, "time", lambda: 5000.0)
        seen = [(e.time, e.date) for e, _ in ciclo.elapse([1, 2])]

        assert [(1.5, 5001.5), (4.0, 5004.0)] == seen


class TestElapsed:
    def test_any_field_reaches_a_period(self) -> None:
        """`elapsed >= period` when any of its fields is reached, and `<` is its opposite."""
        elapsed = ciclo.Elapsed(steps=5, samples=100)

        assert elapsed >= ciclo.at(steps=5)
        assert elapsed >= ciclo.at(steps=50, samples=100)
        assert not elapsed >= ciclo.at(steps=6)
        assert elapsed < ciclo.at(steps=6, samples=101)
        assert elapsed >= 5

    def test_difference(self) -> None:
        """What went by between two points, time included."""
        gone = ciclo.Elapsed(10, 100, 7, time=105.0, date=9.0) - ciclo.Elapsed(4, 40, 2, time=100.0)

        assert (6, 60, 5, 5.0, 9.0) == (gone.steps, gone.samples, gone.tokens, gone.time, gone.date)

    def test_saved_and_restored(self) -> None:
        """Plain values hold all of it, and so does a pickle."""
        (elapsed, _), *_ = list(ciclo.elapse([[1, 2], [3]], initial=ciclo.Elapsed(7, 70)))
        done = elapsed.done()
        restored = ciclo.Elapsed.from_state_dict(done.state_dict())

        assert done.state_dict() == restored.state_dict()
        assert done.state_dict() == pickle.loads(pickle.dumps(done)).state_dict()
        assert 8 == restored.steps


class TestPeriod:
    @pytest.mark.parametrize(
        ("bad", "text"),
        [
            ({}, "needs at least one of steps, samples, tokens, time, date"),
            ({"steps": -1}, "steps=-1 is negative; use 0 or more"),
            ({"steps": 5.0}, r"steps=5.0 is not a whole number \(float\); write steps=1000"),
            ({"steps": True}, "not a whole number"),
            ({"samples": "9"}, "samples='9' is not a whole number"),
            ({"time": float("nan")}, "time=nan is not valid; use seconds or a timedelta"),
            ({"time": "1h"}, "use seconds or a timedelta"),
            ({"date": "tomorrow"}, "use a datetime or seconds since 1970"),
        ],
    )
    def test_bad_periods_are_refused_when_made(self, bad: dict[str, Any], text: str) -> None:
        """The error says what was given and what is allowed."""
        with pytest.raises(ciclo.PeriodError, match=text):
            ciclo.at(**bad)

    def test_units(self) -> None:
        """Time may be a timedelta and a date a datetime."""
        when = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
        period = ciclo.at(time=datetime.timedelta(minutes=2), date=when)

        assert (120.0, when.timestamp()) == (period.time, period.date)
        assert 0.5 == ciclo.at(time=Fraction(1, 2)).time  # type: ignore[arg-type]
        assert isinstance(period, ciclo.Period)
        assert "at(steps=3, time=2.0)" == repr(ciclo.at(3, time=2))


class Tokens:
    num_tokens = 7


@pytest.mark.parametrize(
    ("batch", "samples", "tokens"),
    [
        (3, 1, 0),
        ("text", 1, 0),
        (None, 1, 0),
        ([1, 2, 3], 3, 0),
        ([], 0, 0),
        (["a", "b"], 2, 0),
        (np.zeros((4, 2)), 4, 0),
        (np.float32(3), 1, 0),
        ((np.zeros((5, 2)), np.zeros(5)), 5, 0),
        ([np.zeros((6, 2)), np.zeros(6)], 6, 0),
        ([np.float32(1), np.float32(2)], 2, 0),
        ({"x": np.zeros((7, 2)), "y": 1}, 7, 0),
        ({"id": "one", "x": np.zeros((7, 2))}, 7, 0),
        ({"input_ids": np.zeros((2, 9))}, 2, 18),
        ({"input_ids": np.zeros((2, 9)), "num_tokens": 11}, 2, 11),
        ([{"x": 1}, {"x": 2}], 2, 0),
        ((1, 2), 1, 0),
        (Tokens(), 1, 7),
    ],
    ids=lambda given: str(given).partition(" at 0x")[0],
)
def test_what_a_batch_holds(batch: Any, samples: int, tokens: int) -> None:
    """Samples are the first axis of the first array, tokens what the batch says."""
    assert (samples, tokens) == (samples_in(batch), tokens_in(batch))


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), max_size=30),
    stop=st.integers(0, 60),
    unit=st.sampled_from(["steps", "samples"]),
)
def test_a_stop_ends_at_the_first_batch_that_reaches_it(
    sizes: list[int], stop: int, unit: str
) -> None:
    """However large batches are, the loop ends right after the one that reaches the stop."""
    counts = [0]
    for size in sizes:
        counts.append(counts[-1] + (1 if unit == "steps" else size))
    expected = next((n for n, count in enumerate(counts) if count >= stop), len(sizes))
    batches = [[0] * size for size in sizes]
    period = ciclo.at(steps=stop) if unit == "steps" else ciclo.at(samples=stop)

    assert expected == len(list(ciclo.elapse(batches, stop=period)))


@pytest.mark.parametrize("size", [1.5, None, (1, 2, 3), "4"])
def test_a_batch_size_that_is_none(size: Any) -> None:
    """The error says what the function returned and what it should."""
    with pytest.raises(TypeError, match=r"batch_size_fn returned .* or \(samples, tokens\)"):
        list(ciclo.elapse([1], batch_size_fn=lambda shapes: size))


@pytest.mark.parametrize("initial", [5, (0, None, ciclo.Elapsed())])
def test_an_initial_that_is_no_elapsed(initial: Any) -> None:
    """The error shows what to give."""
    with pytest.raises(TypeError, match=r"or ciclo.Elapsed\(steps=1000\)"):
        ciclo.elapse([1], initial=initial)
    with pytest.raises(TypeError, match=r"or ciclo.Elapsed\(steps=1000\)"):
        ciclo.loop(0, [1], {}, elapsed=initial)
