"""`ciclo.checkpoint`: what it keeps, what it gives back, what it refuses."""

from __future__ import annotations

import json
import os
import random
from array import array
from collections import Counter, OrderedDict, deque, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ciclo
from ciclo.checkpoints import folder, tree

NAN = float("nan")
Pair = namedtuple("Pair", "left right")


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is forced to the disk, which takes most of the time; real processes are killed in
    tests/real."""
    monkeypatch.setattr(folder, "_sync", lambda path: None)
    monkeypatch.setattr(folder, "_sync_folder", lambda path: None)


def there_and_back(state: Any, like: Any = tree.NOTHING, **options: Any) -> Any:
    """What a checkpoint gives back of a state."""
    save = ciclo.checkpoint("there", overwrite=True)
    save(ciclo.Elapsed(), state)
    return save.restore(like, **options)


def add(state: Any, batch: Any) -> Any:
    return {"metrics": {"loss": batch}}, state + batch


# -- what comes back -----------------------------------------------------------------------------

plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
        | st.frozensets(st.integers())
        | st.sets(st.text())
    ),
    max_leaves=12,
)


def assert_same(expected: Any, found: Any) -> None:
    """Equal, and of the same types at every place; a negative zero too."""
    assert type(expected) is type(found)
    if isinstance(expected, (list, tuple)):
        assert len(expected) == len(found)
        for one, other in zip(expected, found, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert_same(list(expected.items()), list(found.items()))
    elif isinstance(expected, (set, frozenset)):
        assert expected == found
    else:
        assert repr(expected) == repr(found)


class TestPlainValues:
    @given(plain_values)
    @settings(max_examples=60, deadline=None)
    def test_are_the_same(self, value: Any) -> None:
        """Whatever is made of plain Python is the same, with the same types, without a `like`."""
        frozen = tree.freeze(value, "state")
        structure = json.loads(json.dumps(frozen.structure))

        assert_same(value, tree.Plan(structure).build(frozen.leaves))

    @pytest.mark.parametrize(
        "value",
        [
            0,
            {},
            None,
            2**200,
            -0.0,
            array("d", [1.5, NAN]),
            bytearray(b"x"),
            deque([1, 2], maxlen=3),
            OrderedDict(b=1, a=2),
            Counter("aab"),
            "\ud800",
            [float("inf"), NAN],
        ],
        ids=lambda given: repr(given).partition(" at 0x")[0],
    )
    def test_one_by_one(self, value: Any) -> None:
        """Falsy states, long numbers, NaN and the containers of the standard library too."""
        found = there_and_back(value)

        assert repr(value) == repr(found)
        assert type(value) is type(found)

    @pytest.mark.parametrize(
        "value",
        [
            np.arange(6, dtype="i2").reshape(2, 3)[:, ::2],
            np.float32(1.5),
            np.array(2.5),
            np.zeros((0, 3), bool),
            np.array(["a", "bcd"]),
            np.array([1, 2], dtype=">i4"),
            np.array(["2020-01-01"], dtype="datetime64[s]"),
        ],
        ids=lambda value: str(value.dtype),
    )
    def test_numpy(self, value: Any) -> None:
        """Arrays and scalars of NumPy keep type, shape and byte order, and can be written to."""
        found = there_and_back([value])[0]

        assert type(value) is type(found)
        assert (value.dtype, value.shape) == (found.dtype, found.shape)
        assert value.tobytes() == found.tobytes()
        if value.shape:
            assert found.flags.writeable


@dataclass
class Point:
    x: float
    at: Any


class Model:
    """An object without methods of its own for this."""

    def __init__(self, size: int) -> None:
        self.weights = np.full(size, float(size))
        self.steps = 0
        self.activation = max


class Stateful:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


class TestTypes:
    def test_containers_of_other_types(self) -> None:
        """Named tuples and dataclasses come back as such, in the shape of `like`."""
        found = there_and_back(Pair(1, Point(2.0, [3])), Pair(0, Point(0.0, [])))

        assert Pair(1, Point(2.0, [3])) == found
        assert Pair is type(found)

    def test_objects_are_filled_in_place(self) -> None:
        """An object that others hold is filled; its code stays its own."""
        model, like = Model(3), Model(3)
        model.weights += 1
        model.steps = 7
        found = there_and_back({"model": model}, {"model": like})

        assert found["model"] is like
        assert (7, [4.0] * 3, max) == (like.steps, like.weights.tolist(), like.activation)

    def test_state_dicts(self) -> None:
        """What has `state_dict` and `load_state_dict` is saved and filled by them."""
        like = Stateful(0)
        found = there_and_back((Stateful(5), 1), (like, 0))

        assert found[0] is like
        assert (5, 1) == (like.value, found[1])

    def test_random_generators(self) -> None:
        """Generators of Python and NumPy go on with the same numbers."""
        made = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)
        for one in made:
            one.random()
        like = random.Random(0), np.random.default_rng(0), np.random.RandomState(0)
        found = there_and_back(made, like)

        assert [one.random() for one in made] == [one.random() for one in found]

    def test_a_copy_is_saved(self) -> None:
        """What the next step does to the state is not in the checkpoint, however late it is."""
        state: dict[str, Any] = {"w": np.zeros(100_000), "list": [1]}
        save = ciclo.checkpoint("there")
        save(ciclo.Elapsed(), state)
        state["w"] += 1
        state["list"].append(2)

        assert 0.0 == save.restore()["w"].sum()
        assert [1] == save.restore()["list"]

    def test_plain_values_may_come_and_go(self) -> None:
        """Lists that grow and keys that come are no difference; nor is a number as an array."""
        saved = {"seen": [1, 2, 3], "step": np.int64(3), "new": "x", "best": np.ones(2)}
        like = {"seen": [], "step": 0, "old": 1, "best": None}
        found = there_and_back(saved, like)

        assert [1, 2, 3] == found["seen"]
        assert {"seen", "step", "new", "best"} == set(found)

    def test_pickles_need_trust(self) -> None:
        """What only pickle can save is read where the caller says that the folder is trusted."""
        date = {"when": Path("a")}
        with pytest.raises(ciclo.CheckpointError, match=r"restore\(like, trusted=True\)"):
            there_and_back(date, date)

        assert date == there_and_back(date, date, trusted=True)

    def test_what_cannot_be_saved(self) -> None:
        """The error says where it is and what to write."""
        with pytest.raises(
            ciclo.CheckpointError, match=r"state\['a'\]\[1\] is a generator.*load_state_dict"
        ):
            there_and_back({"a": [1, (n for n in range(0))]})
        loop: list[Any] = []
        loop.append(loop)
        with pytest.raises(ciclo.CheckpointError, match=r"state\[0\] contains itself"):
            there_and_back(loop)

    @pytest.mark.parametrize(
        "key",
        [b"x", Path("a"), (1, b"x"), Pair(1, 2)],
        ids=lambda given: repr(given).partition(" at 0x")[0],
    )
    def test_keys_that_would_not_come_back(self, key: Any) -> None:
        """A key that is not a plain value is refused when it is saved, not when it is needed."""
        with pytest.raises(ciclo.CheckpointError, match=r"state\['a'\] has the key .* use numbers"):
            there_and_back({"a": {key: 1}})


class TestDifferences:
    @pytest.mark.parametrize(
        ("saved", "like", "lines"),
        [
            (
                {"w": np.ones(3), "b": np.ones(1)},
                {"w": np.ones(4), "c": np.ones(1)},
                [
                    "state['w']: the checkpoint has float64[3], this run has float64[4]",
                    "state['b']: the checkpoint has float64[1], this run has nothing",
                    "state['c']: the checkpoint has nothing, this run has float64[1]",
                ],
            ),
            (
                np.ones(2),
                np.ones(2, "f4"),
                ["state: the checkpoint has float64[2], this run has float32"],
            ),
            (
                [np.ones(2)] * 2,
                [np.ones(2)],
                ["state[1]: the checkpoint has float64[2], this run has no"],
            ),
            (
                {"a": np.ones(1)},
                np.ones(1),
                ["state: the checkpoint has {a}, this run has float64[1]"],
            ),
            (Pair(1, 2), Point(1, 2), ["state: the checkpoint has a Pair, this run has Point"]),
            (3.0, np.ones(2), ["state: the checkpoint has 3.0, this run has float64[2]"]),
        ],
    )
    def test_are_listed(self, saved: Any, like: Any, lines: list[str]) -> None:
        """All places where a checkpoint does not fit are said, before anything is changed."""
        with pytest.raises(ciclo.CheckpointError) as caught:
            there_and_back(saved, like)

        assert "step-00000001 does not fit:" in str(caught.value)
        for line in lines:
            assert line in str(caught.value)


# -- what is kept --------------------------------------------------------------------------------


def losses(values: list[float], **options: Any) -> ciclo.checkpoint:
    """A checkpoint in each step of a loop that logs these."""
    save = ciclo.checkpoint("run", **options)
    ciclo.loop(0, values, [(ciclo.every(1), add), (ciclo.every(1), save)])
    return save


class TestKeep:
    @pytest.mark.parametrize(
        ("options", "steps"),
        [
            ({}, [6]),
            ({"keep": 2}, [5, 6]),
            ({"keep": None}, [1, 2, 3, 4, 5, 6]),
            ({"monitor": "loss"}, [3, 6]),
            ({"monitor": "loss", "mode": "max"}, [2, 6]),
            ({"monitor": "loss", "keep": 2}, [3, 4, 5, 6]),
            ({"keep_every_n_steps": 2}, [2, 4, 6]),
        ],
    )
    def test_newest_and_best(self, options: Any, steps: list[int]) -> None:
        """The newest stay, and with `monitor` the best beside them; NaN is never one."""
        save = losses([3.0, 9.0, 1.0, 2.0, NAN, 5.0], **options)

        assert steps == save.steps
        assert 6 == save.latest_step

    def test_the_best_is_restored(self) -> None:
        """`restore(step="best")` gives the state that had the best value."""
        save = losses([3.0, 1.0, 2.0], monitor="loss")

        assert (2, 4.0) == (save.best_step, save.restore(0, step="best"))
        assert 6.0 == save.restore(0)
        assert 4.0 == ciclo.checkpoint("run").restore(0, step=2)

    def test_the_last_step_is_saved(self) -> None:
        """A loop's last state is saved, whatever the schedule says."""
        save = ciclo.checkpoint("run")
        ciclo.loop(0, range(10), [(ciclo.every(1), add), (ciclo.every(4), save)])

        assert (10, 45) == (save.latest_step, save.restore(0))

    def test_a_failing_loop_saves_nothing_more(self) -> None:
        """A state that an error has cut in half is not saved; the last whole one stays."""
        save = ciclo.checkpoint("run")
        with pytest.raises(ZeroDivisionError):
            ciclo.loop(0, [1, 2, 0], {ciclo.every(1): lambda batch: 1 // batch, **save})

        assert [2] == save.steps

    def test_evaluation_comes_first(self) -> None:
        """In `fit` a checkpoint of an epoch sees the evaluation of that epoch."""
        values = iter([3.0, 1.0, 2.0])
        save = ciclo.checkpoint("run", monitor="error_valid")
        ciclo.fit(
            0,
            [1, 2],
            [1],
            epochs=3,
            train_step=lambda: None,
            test_step=lambda: {"metrics": {"error": next(values)}},
            callbacks=[save],
        )

        assert ([4, 6], 4) == (save.steps, save.best_step)

    def test_only_what_was_evaluated_can_be_best(self, caplog: pytest.LogCaptureFixture) -> None:
        """A value belongs to the state of its step; if none of those is saved, that is said."""

        def log(batch: int) -> Any:
            return {"metrics": {"error": 3.0 - batch}} if batch in (0, 2) else None

        for saved, best in ((ciclo.every(1), 3), (ciclo.at(3), None)):
            save = ciclo.checkpoint("run", monitor="error", overwrite=True)
            ciclo.loop(0, range(6), [(ciclo.every(1), log), (saved, save)])

            assert best == save.best_step
        assert "monitors 'error', which was not logged in any saved step" in caplog.text

    def test_a_name_that_is_never_logged(self) -> None:
        """It is an error at the first save, in a loop and by hand."""
        save = ciclo.checkpoint("run", monitor="never")
        tasks = {ciclo.every(1): [lambda: {"metrics": {"loss": 1.0}}, save]}
        with pytest.raises(
            ciclo.MonitorError, match=r"'never', which was not logged; the logs have m"
        ):
            ciclo.loop(0, range(3), tasks)
        with pytest.raises(ValueError, match="the logs have nothing"):
            ciclo.checkpoint("other", monitor="never")(ciclo.Elapsed(), 1)

    def test_a_prefix(self) -> None:
        """Two checkpoints with names of their own share a folder, and a run goes on from it."""

        def run(stop: int) -> Any:
            newest = ciclo.checkpoint("run", prefix="checkpoint_")
            best = ciclo.checkpoint("run", prefix="best_", monitor="loss")
            log = lambda state, batch: ({"metrics": {"loss": float(-batch)}}, state + 1)  # noqa: E731
            tasks = {ciclo.every(1): [log, newest, best]}
            return ciclo.loop(0, range(6), tasks, stop, resume="run").state

        assert (2, 5) == (run(2), run(5))
        assert ["best_00000005", "checkpoint_00000005"] == sorted(
            path.name for path in Path("run").iterdir()
        )
        with pytest.raises(ValueError, match="prefix='a/b' is not valid"):
            ciclo.checkpoint("run", prefix="a/b")

    def test_by_hand(self) -> None:
        """In a loop written by hand it is called with elapsed and state."""
        save = ciclo.checkpoint("logdir/my-model", keep=2)
        state = 0
        for elapsed, batch in ciclo.elapse(range(5)):
            state += batch
            save(elapsed, state)

        assert ([4, 5], 10) == (save.steps, save.restore())

    def test_relative_paths(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A relative path means the folder where the program was when it was given."""
        save = ciclo.checkpoint("run")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        save(ciclo.Elapsed(), 1)

        assert 1 == save.restore()
        assert (tmp_path / "run" / "step-00000001" / "meta.json").exists()


# -- what goes wrong -----------------------------------------------------------------------------


class TestErrors:
    def test_options(self) -> None:
        """A wrong option says what is allowed."""
        with pytest.raises(ValueError, match=r'mode=\'avg\' is not valid; use "min" or "max"'):
            ciclo.checkpoint("run", mode="avg")
        with pytest.raises(ValueError, match=r"keep=0 is not valid; use 1 or more"):
            ciclo.checkpoint("run", keep=0)
        with pytest.raises(ValueError, match="keep_every_n_steps=0"):
            ciclo.checkpoint("run", keep_every_n_steps=0)
        with pytest.raises(ValueError, match="step='first' is not valid"):
            ciclo.checkpoint("run").restore(step="first")

    def test_nothing_there(self) -> None:
        """Restoring what is not there says what is."""
        with pytest.raises(ciclo.CheckpointError, match="has no latest checkpoint; it has no step"):
            ciclo.checkpoint("run").restore(0)
        losses([1.0])
        with pytest.raises(ciclo.CheckpointError, match="has no 7 checkpoint; it has 1"):
            ciclo.checkpoint("run").restore(0, step=7)

    def test_another_run_is_in_the_way(self) -> None:
        """A run that begins anew in the folder of another one is told what it can do."""
        losses([1.0, 2.0, 3.0])
        with pytest.raises(
            ciclo.CheckpointError, match=r"step 3 of an earlier.*resume=.*overwrite"
        ):
            losses([5.0])

        assert [1] == losses([5.0], overwrite=True).steps
        assert 5.0 == ciclo.checkpoint("run").restore()

    @pytest.mark.parametrize("asynchronous", [True, False])
    def test_a_full_disk(self, asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """An error of the writer is raised by the end of the loop; what is whole stays."""
        save = ciclo.checkpoint("run", asynchronous=asynchronous)
        save(ciclo.Elapsed(), np.ones(3))
        save.wait()

        def full(*args: Any) -> Any:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(json, "dumps", full)
            with pytest.raises(ciclo.CheckpointError, match=r"not be written.*No space left"):
                ciclo.loop(np.ones(3), range(2), {ciclo.every(1): save}, elapsed=ciclo.Elapsed(1))

        assert [1] == ciclo.checkpoint("run").steps

    def test_what_is_not_whole_is_not_used(self, caplog: pytest.LogCaptureFixture) -> None:
        """A checkpoint that something has damaged is passed over with a warning."""
        save = losses([1.0, 2.0], keep=2)
        path = save.folder.place(2) / "state.json"
        path.write_text(path.read_text() + " ")

        assert 1.0 == save.restore()
        assert "is incomplete" in caplog.text

    def test_the_only_one_is_damaged(self) -> None:
        """A run does not begin again in silence because its one checkpoint is damaged."""
        save = losses([1.0])
        path = save.folder.place(1) / "state.json"
        path.write_text("")

        with pytest.raises(ciclo.CheckpointError, match=r"step-00000001 is damaged.*remove it"):
            ciclo.loop(0.0, range(2), {ciclo.every(1): ciclo.checkpoint("run")}, resume="run")
        assert path.exists()

    def test_what_a_killed_process_has_left(self) -> None:
        """Half a checkpoint is none, and is removed by the next run; a moved one comes back."""
        save = losses([1.0, 2.0], keep=2)
        place = save.folder.place(2)
        (place.parent / ".step-00000003.tmp").mkdir()
        place.rename(place.parent / ".step-00000002.old")
        found = folder.Folder("run")
        found.clear()

        assert [1, 2] == found.steps()
        assert {"step-00000001", "step-00000002"} == set(os.listdir("run"))

    def test_a_name_that_is_no_number(self) -> None:
        """`monitor` must be a number."""
        save = ciclo.checkpoint("run", monitor="text")
        with pytest.raises(ciclo.CheckpointError, match="'text', which is not a number"):
            ciclo.loop(0, [1], {ciclo.every(1): lambda: {"metrics": {"text": "x"}}, **save})


def test_who_reads_waits_for_another_object_that_writes() -> None:
    """A second `checkpoint` of the same folder sees what the first still writes."""
    save = ciclo.checkpoint("run", keep=None)
    for elapsed, _ in ciclo.elapse(range(4)):
        save(elapsed, np.full(100_000, elapsed.steps))

        assert elapsed.steps == ciclo.checkpoint("run").restore(np.zeros(100_000, int))[0]
