"""`resume=`: state, elapsed, history, schedules, callbacks, random numbers, place in the data."""

from __future__ import annotations

import random
import shutil
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ciclo
from ciclo.checkpoints import folder

if TYPE_CHECKING:
    from collections.abc import Iterator

GOLDEN = Path(__file__).parents[1] / "golden" / "ciclo-checkpoint"


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is forced to the disk, which takes most of the time; real processes are killed in
    tests/real."""
    monkeypatch.setattr(folder, "_sync", lambda path: None)
    monkeypatch.setattr(folder, "_sync_folder", lambda path: None)


class CrashError(Exception):
    """Ends a loop as a crash would: nothing more is saved."""


def crash_at(step: int | None) -> Any:
    def crash(elapsed: Any) -> None:
        if elapsed.steps == step:
            raise CrashError

    return crash


def table(history: Any) -> dict[str, Any]:
    return {k: v for k, v in history.to_dict().items() if k not in ("time", "date")}


def run_until(crash: int | None, place: str | None, data: Any, **options: Any) -> Any:
    """A loop with tasks of all kinds, which crashes in a step."""

    def step(state: Any, batch: Any) -> Any:
        return {"metrics": {"x": state * batch[0], "drawn": random.random()}}, state + batch[0]

    def fired(elapsed: Any) -> Any:
        return {"fired": {"at": elapsed.steps}}

    tasks = [
        (ciclo.every(1), crash_at(crash)),
        (ciclo.every(1), step),
        (ciclo.every(samples=11), fired),
        (ciclo.after(samples=9).every(3) | ciclo.at(samples=40), fired),
        (ciclo.piecewise({0: ciclo.every(4), ciclo.at(samples=25): ciclo.every(samples=6)}), fired),
    ]
    if place is not None:
        tasks.append((ciclo.every(3), ciclo.checkpoint(place)))
    options.setdefault("resume", place)
    batches = [[number] * (1 + number % 4) for number in data]
    return ciclo.loop(1, batches, tasks, **options)


class TestResume:
    @given(st.lists(st.integers(0, 39), max_size=4), st.integers(0, 40))
    @settings(
        max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    def test_is_as_if_nothing_had_happened(self, crashes: list[int], stop: int) -> None:
        """Whatever a run was cut at, it ends with the same state, history and firings."""
        import tempfile

        random.seed(0)
        whole = run_until(None, None, range(40), stop=stop)
        with tempfile.TemporaryDirectory() as place:
            for crash in crashes:
                random.seed(0)
                try:
                    run_until(crash, place, range(40), stop=stop)
                except CrashError:
                    pass
            random.seed(0)
            found = run_until(None, place, range(40), stop=stop)

        assert (whole.state, whole.elapsed.steps) == (found.state, found.elapsed.steps)
        assert whole.elapsed.samples == found.elapsed.samples
        assert table(whole.history) == table(found.history)

    def test_an_empty_folder_begins(self) -> None:
        """`resume=` of what is not there yet begins; the same line goes on later."""
        assert 10 == ciclo.loop(0, range(5), {ciclo.every(1): add}, resume="run").state
        assert 45 == ciclo.loop(0, range(10), {ciclo.every(1): add}, resume="run").state

    def test_a_run_that_has_ended(self) -> None:
        """It is not run again, and returns what it did, early stops and best states included."""

        def once() -> Any:
            calls = []
            stop = ciclo.early_stopping("loss", looks=2, restore_best_weights=True)
            result = ciclo.loop(
                0,
                [3.0, 1.0, 2.0, 2.5, 9.0],
                [
                    (
                        ciclo.every(1),
                        lambda state, batch: ({"metrics": {"loss": batch}}, state + 1),
                    ),
                    (ciclo.every(1), lambda: calls.append(1)),
                    (ciclo.every(1), stop),
                ],
                resume="run",
            )
            return result.state, result.elapsed.steps, stop.best, len(calls)

        assert [(2, 4, 1.0, 4), (2, 4, 1.0, 0)] == [once(), once()]

    def test_random_numbers_of_a_run_that_has_ended(self) -> None:
        """What the program draws after the loop is the same too."""
        found = []
        for _ in range(2):
            random.seed(3)
            ciclo.loop(
                0, range(4), {ciclo.every(1): lambda: random.random() and None}, 4, resume="r"
            )
            found.append(random.random())

        assert found[0] == found[1]

    def test_a_checkpoint_says_where(self) -> None:
        """The checkpoint itself may be given, and a longer run goes on after a shorter one."""
        save = ciclo.checkpoint("run")
        tasks = {ciclo.every(1): add, ciclo.every(2): save}
        ciclo.loop(0, range(10), tasks, stop=4, resume=save)
        result = ciclo.loop(0, range(10), tasks, resume=save)

        assert (45, 10) == (result.state, result.elapsed.steps)

    def test_bars_may_come_and_go(self, capsys: pytest.CaptureFixture[str]) -> None:
        """What only shows a run is no part of it."""
        ciclo.loop(0, range(4), {ciclo.every(1): add}, stop=2, resume="run")
        result = ciclo.loop(0, range(4), {**ciclo.keras_bar(), ciclo.every(1): add}, resume="run")

        assert 6 == result.state
        assert "4/" in capsys.readouterr().out

    def test_on_start_runs_again(self) -> None:
        """It sees the state that was restored, and what it returns is not taken over."""
        seen = []

        def start(state: Any) -> Any:
            seen.append(state)
            return {"metrics": {"start": state}}, 100

        for stop in (2, 4):
            result = ciclo.loop(
                0, range(4), {ciclo.every(1): add}, stop, on_start=start, resume="r"
            )

        assert [0, 101] == seen
        assert (106, [0]) == (result.state, result.history.collect("start"))

    def test_accumulated_logs(self) -> None:
        """What was logged long ago is still the newest of its name."""

        def see(loop_state: Any) -> Any:
            return {"seen": {"x": loop_state.accumulated_logs.x}}

        def log(batch: int) -> Any:
            return {"metrics": {"x": batch}} if batch == 1 else None

        tasks = {ciclo.every(1): log, ciclo.after(1): see}
        ciclo.loop(0, range(6), tasks, stop=3, resume="run")
        result = ciclo.loop(0, range(6), tasks, resume="run")

        assert [1] * 5 == result.history.collect("seen.x")


def add(state: Any, batch: Any) -> Any:
    return state + batch


# -- the place in the data -----------------------------------------------------------------------


class Counter:
    """An iterator that says where it is, in the way that torchdata's do."""

    def __init__(self, end: int) -> None:
        self.at, self.end = 0, end

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == self.end:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


class Positions(Counter):
    """The same in the way of Grain's."""

    def get_state(self) -> Any:
        return self.at

    def set_state(self, state: Any) -> None:
        self.at = state

    state_dict = None  # type: ignore[assignment]
    load_state_dict = None  # type: ignore[assignment]


class Shuffled:
    """Can be read again, in another order each time, drawn from Python's generator."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(8))
        random.shuffle(order)
        return iter(order)


class TestData:
    @pytest.mark.parametrize(
        "make", [lambda: Counter(8), lambda: Positions(8), lambda: range(8), Shuffled]
    )
    @pytest.mark.parametrize("crash", [1, 4, 7])
    def test_goes_on_where_it_was(self, make: Any, crash: int) -> None:
        """Each batch is seen once, in the order of the run that was not cut."""
        seen: list[int] = []
        found: list[list[int]] = []
        for at, place in ((None, "whole"), (crash, "cut"), (None, "cut")):
            random.seed(1)
            seen = []
            tasks = [
                (ciclo.every(1), crash_at(at)),
                (ciclo.every(1), lambda batch: seen.append(batch)),  # noqa: B023  read at once
                (ciclo.every(1), ciclo.checkpoint(place)),
            ]
            try:
                ciclo.loop(0, make(), tasks, resume=place)
            except CrashError:
                pass
            found.append(seen)

        assert found[0] == found[1] + found[2]

    def test_a_generator_is_refused_at_once(self) -> None:
        """What can be read only once cannot be gone on with; that is said before the first step."""
        with pytest.raises(
            ciclo.CheckpointError, match=r"a generator can be read only once; give a list"
        ):
            ciclo.loop(0, (n for n in range(3)), {ciclo.every(1): add}, resume="run")
        with pytest.raises(ciclo.CheckpointError, match="a list_iterator can be read only once"):
            ciclo.fit(0, iter([1, 2]), steps=2, train_step=add, steps_per_epoch=1, resume="run")

    def test_a_generator_is_fine_without(self) -> None:
        """A loop that only saves may read what it likes."""
        save = ciclo.checkpoint("run")
        ciclo.loop(0, (n for n in range(3)), {ciclo.every(1): add, **save})

        assert 3 == save.restore()

    def test_a_dataset_that_has_shrunk(self) -> None:
        """Less data than was read already is an error, not an early end."""
        ciclo.loop(0, range(5), {ciclo.every(1): add}, resume="run")
        with pytest.raises(ciclo.CheckpointError, match="had read 5 batches of the dataset, which"):
            ciclo.loop(0, range(2), {ciclo.every(1): add}, stop=9, resume="run")


def fit_until(crash: int | None, place: str, train: Any, **options: Any) -> tuple[Any, list[Any]]:
    """Epochs of eight steps; saved in the middle of each and at its end."""
    seen: list[Any] = []
    events: list[str] = []

    def step(state: Any, batch: Any) -> Any:
        seen.append(batch)
        return {"metrics": {"sum": state + batch, "drawn": random.random()}}, state + batch

    result = ciclo.fit(
        0,
        train,
        [1, 2],
        train_step=step,
        test_step=lambda state, batch: {"metrics": {"score": state * batch}},
        tasks=[
            (ciclo.on_epoch_start, lambda: events.append("start")),
            (ciclo.on_epoch_end, lambda loop_state: {"epochs": {"at": loop_state.epoch}}),
            (ciclo.every(1), crash_at(crash)),
        ],
        callbacks=[{ciclo.every(4, at="end"): ciclo.checkpoint(place)}],
        resume=place,
        **options,
    )
    return result, [seen, events]


class TestFit:
    @pytest.mark.parametrize("crash", [2, 6, 8, 13, 17])
    @pytest.mark.parametrize(
        ("make", "options"),
        [
            (lambda: list(range(8)), {"epochs": 3}),
            (Shuffled, {"epochs": 3}),
            (lambda: Shuffled, {"epochs": 3}),
            (lambda: lambda: (n for n in range(8)), {"epochs": 3}),
            (lambda: Counter(50), {"epochs": 3, "steps_per_epoch": 8}),
            (lambda: lambda: Counter(8), {"epochs": 3}),
            (lambda: list(range(8)), {"steps": 21}),
        ],
        ids=["list", "shuffled", "factory", "generators", "stream", "counters", "amid"],
    )
    def test_epochs(self, crash: int, make: Any, options: Any) -> None:
        """At any step of an epoch, with any data, a run that was cut ends as one that was not."""
        random.seed(2)
        whole, (data, events) = fit_until(None, "whole", make(), **options)
        random.seed(2)
        with pytest.raises(CrashError):
            fit_until(crash, "cut", make(), **options)
        random.seed(2)
        found, (rest, more) = fit_until(None, "cut", make(), **options)

        assert whole.state == found.state
        assert table(whole.history) == table(found.history)
        assert data[len(data) - len(rest) :] == rest
        assert len(more) <= len(events)

    def test_train_loop(self) -> None:
        """`train_loop` goes on in the middle of an epoch, and begins none there."""
        calls: list[Any] = []

        def run(crash: int | None, place: str) -> Any:
            return ciclo.train_loop(
                0,
                range(10),
                {
                    ciclo.every(1): crash_at(crash),
                    ciclo.on_train_step: add,
                    ciclo.on_epoch_start: lambda elapsed: calls.append(("start", elapsed.steps)),
                    ciclo.on_epoch_end: lambda elapsed: calls.append(("end", elapsed.steps)),
                },
                epoch_duration=4,
                callbacks=[{ciclo.every(1): ciclo.checkpoint(place)}],
                resume=place,
            )

        whole = run(None, "whole")
        expected = calls[:]
        calls.clear()
        with pytest.raises(CrashError):
            run(5, "cut")

        assert (45, 45) == (whole.state, run(None, "cut").state)
        assert [("start", 0), ("end", 3), ("start", 4)] == expected[:3]
        assert expected == calls

    def test_other_loops(self) -> None:
        """`test_loop` and `predict_loop` take `resume=` as `loop` does."""
        tasks = {ciclo.on_predict_step: lambda batch: {"outputs": {"y": batch}}}
        ciclo.predict_loop(0, range(6), tasks, 3, resume="run")
        result = ciclo.predict_loop(0, range(6), tasks, resume="run")

        assert list(range(6)) == result.history.collect("outputs.y")


# -- what differs --------------------------------------------------------------------------------


class TestDifferences:
    def test_other_tasks(self) -> None:
        """A folder of another loop is refused, and the tasks that differ are named."""
        ciclo.loop(0, range(3), {ciclo.every(1): add}, resume="run")
        with pytest.raises(ciclo.CheckpointError) as caught:
            ciclo.loop(0, range(3), {ciclo.every(2): add, ciclo.every(1): max_of}, resume="run")

        assert "is of a loop with other tasks:" in str(caught.value)
        assert "only in the checkpoint: every(steps=1): add" in str(caught.value)
        assert "only in this run: every(steps=2): add" in str(caught.value)

    def test_other_callbacks_of_a_moment(self) -> None:
        """They are named without the schedule of the moment, which is ciclo's own."""
        saved = [ciclo.early_stopping("x", looks=9)]
        options: Any = {"epochs": 1, "train_step": lambda: {"metrics": {"x": 1.0}}, "resume": "run"}
        ciclo.fit(0, [1], callbacks=saved, **options)
        with pytest.raises(ciclo.CheckpointError) as caught:
            ciclo.fit(0, [1], **options)

        assert str(caught.value).endswith("\n  only in the checkpoint: early_stopping")

    def test_another_state(self) -> None:
        """A state of another shape is refused, and its places are named."""
        ciclo.loop({"w": np.ones(3)}, range(3), {ciclo.every(1): max_of}, resume="run")
        with pytest.raises(
            ciclo.CheckpointError, match=r"state\['w'\]: .* has float64\[3\], .*\[4\]"
        ):
            ciclo.loop({"w": np.ones(4)}, range(3), {ciclo.every(1): max_of}, resume="run")

    def test_a_state_that_was_saved_by_hand(self) -> None:
        """It has no loop to go on with; the error says how to take the state."""
        ciclo.checkpoint("run", asynchronous=False)(ciclo.Elapsed(), 5)
        with pytest.raises(ciclo.CheckpointError, match=r"saved by hand.*restore\(state\)"):
            ciclo.loop(0, range(3), {ciclo.every(1): add}, resume="run")


def max_of(state: Any) -> None:
    return None


class TestWrongUse:
    def test_resume_is_no_folder(self) -> None:
        """`resume=True` says what to write."""
        with pytest.raises(ciclo.CheckpointError, match=r'resume=True is not a folder; .*"runs/1"'):
            ciclo.loop(0, range(3), {}, resume=True)

    def test_a_folder_that_is_a_file(self, tmp_path: Path) -> None:
        """It is an error before the first step, not after the last."""
        (tmp_path / "file").touch()
        done: list[int] = []
        for place in (tmp_path / "file", tmp_path / "file" / "run"):
            tasks: Any = {ciclo.every(1): [done.append, ciclo.checkpoint(place)]}
            with pytest.raises(ciclo.CheckpointError, match="file is a file"):
                ciclo.loop(0, range(3), tasks)
            with pytest.raises(ciclo.CheckpointError, match="file is a file"):
                ciclo.loop(0, range(3), {}, resume=place)
        assert [] == done

    def test_two_checkpoints_in_one_folder(self, tmp_path: Path) -> None:
        """They would remove each other's; one of them at two schedules is fine."""
        one, other = (ciclo.checkpoint(tmp_path / "run", keep=None) for _ in range(2))
        with pytest.raises(ciclo.CheckpointError, match="two checkpoints of this loop save into"):
            ciclo.loop(0, range(3), {ciclo.every(1): one, ciclo.every(2): other})
        ciclo.loop(0, range(3), {ciclo.every(2): one, ciclo.at(3): one})

        assert [1, 3] == one.steps


def test_a_checkpoint_of_the_first_version(tmp_path: Path) -> None:
    """One that an earlier ciclo wrote is restored, and its run goes on with all that it knew."""
    shutil.copytree(GOLDEN, tmp_path / "run")

    def step(state: Any, batch: Any) -> Any:
        return {"metrics": {"loss": batch}}, {**state, "w": state["w"] + 1, "count": 1}

    begin: dict[str, Any] = {"w": np.zeros((2, 3)), "count": 0, "bytes": b"", "ints": array("q")}
    begin |= {"scalar": np.float32(0), "names": np.array(["", "12"])}
    save = ciclo.checkpoint(tmp_path / "run")
    saved = save.restore(begin)
    stopping = ciclo.early_stopping("loss", patience=50, restore_best_weights=True)
    average = ciclo.ema(0.5, select=lambda state: {"w": state["w"]})
    tasks = [(ciclo.every(1), one) for one in (step, stopping, average)]
    result = ciclo.loop(
        begin,
        [3.0, 1.0, 2.0, 4.0, 5.0, 6.0],
        [*tasks, (ciclo.every(2), save)],
        stop=6,
        resume=save,
    )

    first = np.arange(6.0).reshape(2, 3)
    assert (4, b"xyz", array("q", [1, 2])) == (saved["count"], saved["bytes"], saved["ints"])
    assert (np.float32(2.5), ["a", "bc"]) == (saved["scalar"], list(saved["names"]))
    assert np.array_equal(first + 4, saved["w"])
    assert [3.0, 1.0, 2.0, 4.0, 5.0, 6.0] == result.history.collect("loss")
    assert (1.0, 2) == (stopping.best, result.state["count"])
    assert np.array_equal(first + 2, result.state["w"])
    assert np.array_equal(first + 5.03125, average.value["w"])
