"""Logs and the history of them."""

from __future__ import annotations

import builtins
import copy
import pickle
import sys
import types
from typing import Any

import numpy as np
import pytest

import ciclo
from ciclo import device_values
from ciclo.device_values import STACKED


class TestLogs:
    def test_collections(self) -> None:
        """Each kind of value has its collection, and own ones are as good."""
        logs = ciclo.logs()
        logs.add_metric("accuracy", 0.5)
        logs.add_loss("loss", 2.0)
        logs.add_stateful_metric("mean", 1.0)
        logs.add_output("logits", [1])
        logs.add("mine", "x", 3)

        assert {
            "metrics": {"accuracy": 0.5},
            "losses": {"loss": 2.0},
            "stateful_metrics": {"mean": 1.0},
            "outputs": {"logits": [1]},
            "mine": {"x": 3},
        } == logs

    def test_attributes(self) -> None:
        """Collections and values are attributes; a missing one says what there is."""
        logs = ciclo.logs()
        logs.add_loss("loss", 2.0)

        assert {"loss": 2.0} == logs.losses
        assert {} == logs.metrics
        assert 2.0 == logs.loss
        with pytest.raises(AttributeError, match=r"no 'acc'; they have \['losses.loss'\]"):
            _ = logs.acc

    def test_every_add_returns_the_logs(self) -> None:
        """So calls chain; there is one for several values too."""
        logs = (
            ciclo.logs()
            .add_metric("a", 1)
            .add_metrics(b=2, c=3)
            .add_loss("loss", 0.5, add_metric=True)
            .add_losses(l1=0.1, add_metrics=True)
            .add_losses(l2=0.2)
            .add_stateful_metric("mean", 4)
            .add_stateful_metrics(best=5)
            .add_output("x", 6)
            .add_outputs(y=7)
            .add_entry("mine", "p", 8)
            .add_entries("mine", q=9, collection=10)
        )

        assert {
            "metrics": {"a": 1, "b": 2, "c": 3, "loss": 0.5, "l1": 0.1},
            "losses": {"loss": 0.5, "l1": 0.1, "l2": 0.2},
            "stateful_metrics": {"mean": 4, "best": 5},
            "outputs": {"x": 6, "y": 7},
            "mine": {"p": 8, "q": 9, "collection": 10},
        } == logs

    def test_from_a_dict(self) -> None:
        """Logs are made from a dict of dicts, or from keywords; what was given stays as it was."""
        given = {"metrics": {"a": 1}}
        logs = ciclo.logs(given, losses={"loss": 2}).add_metric("b", 3)

        assert {"metrics": {"a": 1, "b": 3}, "losses": {"loss": 2}} == logs
        assert {"metrics": {"a": 1}} == given

    def test_values_are_attributes_of_their_collection(self) -> None:
        """However the collection is come by."""
        logs = ciclo.logs({"losses": {"loss": 2.0}}).add("mine", "x", 3)
        logs["late"] = {"y": 4}

        assert (2.0, 2.0, 3, 4) == (
            logs.losses.loss,
            logs["losses"].loss,  # type: ignore[attr-defined]
            logs.mine.x,
            logs.late.y,
        )
        assert ("loss" in logs, "mine" in logs, "nope" in logs) == (True, True, False)
        assert 2.0 == logs["loss"]  # type: ignore[comparison-overlap]

    @pytest.mark.parametrize(
        ("read", "near"),
        [
            (lambda logs: logs.losss, "'loss'"),
            (lambda logs: logs.metric, "'metrics'"),
            (lambda logs: logs.add_metirc("x", 1), "'add_metric'"),
            (lambda logs: logs.losses.los, "'loss'"),
        ],
    )
    def test_a_typo_is_told_what_is_near(self, read: Any, near: str) -> None:
        """Of values, collections and methods."""
        with pytest.raises(AttributeError, match=f"Did you mean .*{near}"):
            read(ciclo.logs({"losses": {"loss": 2.0}}))
        with pytest.raises(KeyError, match="Did you mean 'loss'"):
            ciclo.logs({"losses": {"loss": 2.0}})["los"]

    def test_a_metric_that_counts_over_steps_is_no_value(self) -> None:
        """The error says where it belongs."""

        class Average:
            def merge(self, other: Average) -> Average:
                return other

            def compute(self) -> float:
                return 0.5

        with pytest.raises(ciclo.CallbackError, match=r"write logs.add_stateful_metric\('acc'"):
            ciclo.logs().add_metric("acc", Average())

    def test_entries_by_name(self) -> None:
        """A name that two collections have needs its path there."""
        logs = ciclo.logs({"metrics": {"a": 1, "loss": 2}, "losses": {"loss": 3}})

        assert (1, 3) == (logs.entry_value("a"), logs.entry_value("losses.loss"))
        assert ("metrics", "a") == logs.entry_path("a")
        assert ("metrics", None) == (logs.entry_collection("a"), logs.entry_collection("nope"))
        with pytest.raises(ValueError, match=r"\['metrics', 'losses'\]; write 'metrics.loss' or"):
            logs.entry_value("loss")
        with pytest.raises(KeyError, match="nope"):
            logs.entry_value("nope")

    def test_a_collection_may_be_filled(self) -> None:
        """One that was not there yet too; looking at one leaves no row in the history."""
        logs = ciclo.logs()
        logs.metrics["loss"] = 2.0
        seen = ciclo.loop(
            0, [1], {ciclo.every(1): lambda loop_state: loop_state.logs.metrics and 1}
        )

        assert {"metrics": {"loss": 2.0}} == logs
        assert 0 == len(seen.history)

    def test_what_is_no_dict_of_dicts(self) -> None:
        """The error shows the right form."""
        logs = ciclo.logs()
        with pytest.raises(ciclo.CallbackError, match=r'write \{"metrics": \{.loss.: ...\}\}'):
            logs.updates = {"loss": 1.0}  # type: ignore[dict-item]
        for flat in ({"loss": 0}, {"loss": np.zeros(2)}):
            with pytest.raises(ciclo.CallbackError, match=r"history.commit\(elapsed, \{.metrics"):
                ciclo.history().commit(ciclo.Elapsed(), flat)  # type: ignore[arg-type]
        with pytest.raises(ciclo.CallbackError, match=r"must be strings: got 1 in .metrics."):
            filled({1: 2.0})  # type: ignore[dict-item]

    def test_updates_merge(self) -> None:
        """Assigning to `updates` merges, as does `merge`; what was given stays as it was."""
        logs = ciclo.logs()
        given = {"metrics": {"a": 1}}
        logs.updates, state = given, 5
        logs.merge({"metrics": {"a": 2, "b": 3}})

        assert ({"metrics": {"a": 2, "b": 3}}, 5) == (logs, state)
        assert {"metrics": {"a": 1}} == given

    def test_names_with_and_without_collection(self) -> None:
        """A name is found in the metrics first; a path says which."""
        logs = ciclo.Logs({"losses": {"loss": 1}, "metrics": {"loss": 2}})

        assert (2, 2, 1) == (
            logs.value("loss"),
            logs.value("metrics.loss"),
            logs.value("losses.loss"),
        )
        with pytest.raises(KeyError, match="not in the logs"):
            logs.value("metrics.other")

    def test_copies(self) -> None:
        """Logs can be copied and pickled."""
        logs = ciclo.Logs({"metrics": {"a": 1}})

        assert logs == copy.deepcopy(logs) == pickle.loads(pickle.dumps(logs))
        assert ciclo.Logs is type(copy.copy(logs))


def filled(*rows: dict[str, Any]) -> ciclo.History:
    history = ciclo.history()
    for step, row in enumerate(rows):
        history.commit(ciclo.Elapsed(steps=step, samples=step * 10), {"metrics": row})
    return history


class TestHistory:
    def test_collect_before_anything_is_logged(self) -> None:
        """A callback that plots may run in the first step, before its logs are committed."""
        assert [] == ciclo.history().collect("loss")
        assert ([], []) == ciclo.history().collect("steps", "loss")

    def test_collect(self) -> None:
        """Several names give their lists, of the steps that have all of them."""
        history = filled({"a": 1.0}, {"a": 2.0, "b": 5}, {"b": 6}, {"a": 4.0, "b": 7})

        assert ([1, 3], [2.0, 4.0], [5, 7]) == history.collect("steps", "a", "b")
        assert [1.0, 2.0, 4.0] == history.collect("a")
        assert ([10, 20, 30], [5, 6, 7]) == history.collect("samples", "metrics.b")
        assert [0, 1, 2, 3] == history.collect("steps")

    def test_a_name_that_is_not_there(self) -> None:
        """The error says what there is."""
        with pytest.raises(KeyError, match=r"no 'c'; it has steps, .*, metrics.a"):
            filled({"a": 1}).collect("c")

    def test_two_commits_of_a_step_are_one_row(self) -> None:
        """What is logged later in the same step goes into its row; the last word counts."""
        history = ciclo.history()
        elapsed = ciclo.Elapsed(steps=3)
        history.commit(elapsed, {"metrics": {"a": 1.0}})
        history.commit(elapsed, {"metrics": {"b": 2.0, "a": 3.0}})

        assert ([3], [3.0], [2.0]) == history.collect("steps", "a", "b")
        assert 1 == len(history)

    def test_kinds_are_kept(self) -> None:
        """Values come back as they were: ints, floats, bools, texts, None, large ints, arrays."""
        for kinds in ([1, 2], [1.0, 2.0], [1, 2.5], [True], ["x"], [None, 1.0], [2**70, 1]):
            found = filled(*({"a": value} for value in kinds)).collect("a")

            assert [(type(v), v) for v in kinds] == [(type(v), v) for v in found]

    def test_what_changes_later_stays_as_it_was(self) -> None:
        """An array that is changed in place after it was logged is not changed in the history."""
        total = np.zeros(2)
        history = filled({"a": total})
        total += 1

        assert [0.0, 0.0] == list(history.collect("a")[0])

    def test_rows(self) -> None:
        """A row is a dict; the newest value has a short form."""
        history = filled({"a": 1.0}, {"b": 2.0})

        last: Any = history[-1]
        assert 2.0 == last["b"] == last.metrics.b == last.b
        assert (0, 10) == (history[0].elapsed.steps, last["samples"])
        assert [2.0] == [row.b for row in history[1:]]
        assert ["steps", "samples", "tokens", "time", "date", "date_start"] == list(
            history[0].elapsed
        )
        assert "a" not in history[1]
        assert [0, 1] == [row.steps for row in history]
        assert 1.0 == history.last("a")
        assert "<History of 2 steps: metrics.a, metrics.b>" == repr(history)
        with pytest.raises(
            TypeError, match=r"history\['a'\] is not a row; for columns: history.coll"
        ):
            history["a"]  # type: ignore[call-overload]

    def test_made_of_rows(self) -> None:
        """A history is made from the rows of another, or from logs."""
        history = filled({"a": 1.0}, {"b": 2.0})
        again = ciclo.history(history[:])
        logs = [ciclo.logs().add_metric("a", 1.0), {"metrics": {"a": 2.0}}]

        assert history.to_dict() == again.to_dict()
        assert ([0, 1], [1.0, 2.0]) == ciclo.history(logs).collect("steps", "a")

    def test_counts_have_a_collection(self) -> None:
        """`elapsed` is that of the counts, and of nothing else."""
        history = filled({"a": 1.0}, {"a": 2.0})
        starts = [d - t for d, t in zip(*history.collect("date", "time"), strict=True)]

        assert [0, 1] == history.collect("elapsed.steps")
        assert starts == history.collect("date_start")
        with pytest.raises(ciclo.CallbackError, match=r"got \['x'\]: use another name"):
            history.commit(ciclo.Elapsed(steps=9), {"elapsed": {"x": 1}})

    def test_many_rows(self) -> None:
        """All come back, however many wait, and whichever rows have a value."""
        rows = [{"a": float(i), "b": i} if i % 3 else {"a": float(i)} for i in range(1000)]
        history = filled(*rows)

        assert [float(i) for i in range(1000)] == history.collect("a")
        assert [i for i in range(1000) if i % 3] == history.collect("b")
        assert (998, 998.0) == (history[998].b, history[998].a)
        assert "b" not in history[999]

    def test_copies_of_a_history(self) -> None:
        """It can be pickled and copied, and the copy grows on its own."""
        history = filled({"a": 1.0}, {"a": 2})
        for again in (pickle.loads(pickle.dumps(history)), copy.deepcopy(history)):
            again.commit(ciclo.Elapsed(steps=9), {"metrics": {"a": "x"}})

            assert [1.0, 2, "x"] == again.collect("a")
        assert [1.0, 2] == history.collect("a")

    def test_saved_and_restored(self) -> None:
        """Plain values hold all of it."""
        history = filled({"a": 1.0, "b": 1}, {"a": 2.0}, {"b": "x"})
        restored = ciclo.History()
        restored.load_state_dict(pickle.loads(pickle.dumps(history.state_dict())))
        restored.commit(ciclo.Elapsed(steps=9), {"metrics": {"a": 3.0}})

        assert {**history.to_dict(), "a": [1.0, 2.0, None]} == history.to_dict()
        assert [1.0, 2.0, 3.0] == restored.collect("a")
        assert [1, "x"] == restored.collect("b")

    def test_to_pandas(self) -> None:
        """A row a step, NaN where a step has no value."""
        frame = filled({"a": 1.0}, {"b": 2.0}).to_pandas()

        assert [0, 1] == list(frame["steps"])
        assert [1.0, 2.0] == [frame["a"][0], frame["b"][1]]
        assert frame["a"].isna()[1]

    def test_to_polars(self) -> None:
        """A row a step, null where a step has no value."""
        frame = pytest.importorskip("polars") and filled({"a": 1.0}, {"b": 2.0}).to_polars()

        assert [1.0, None] == frame["a"].to_list()

    def test_to_arrow(self) -> None:
        """A row a step, null where a step has no value."""
        table = pytest.importorskip("pyarrow") and filled({"a": 1.0}, {"b": 2}).to_arrow()

        assert [None, 2] == table["b"].to_pylist()

    def test_tables_of_anything(self) -> None:
        """Arrays are lists in a table, and values of several kinds are text in Arrow."""
        arrow, polars = pytest.importorskip("pyarrow"), pytest.importorskip("polars")
        history = filled({"x": np.arange(2), "y": 1}, {"x": np.arange(3), "y": "b"}, {"y": 2**70})

        assert isinstance(history.to_arrow(), arrow.Table)
        assert [[0, 1], [0, 1, 2], None] == history.to_arrow()["x"].to_pylist()
        assert ["1", "b", str(2**70)] == history.to_arrow()["y"].to_pylist()
        assert isinstance(history.to_polars(), polars.DataFrame)
        assert [[0, 1], [0, 1, 2], None] == history.to_polars()["x"].to_list()

    def test_plot(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One line for each value that is a number."""
        monkeypatch.setenv("MPLBACKEND", "agg")
        pytest.importorskip("matplotlib")
        history = filled({"a": 1.0, "text": "x"}, {"a": 2.0, "text": "y"})
        figure = history.plot()

        assert ["a"] == [axis.get_ylabel() for axis in figure.axes]
        assert [0, 1] == list(figure.axes[0].lines[0].get_xdata())

    @pytest.mark.parametrize(
        ("method", "package"),
        [
            ("to_pandas", "pandas"),
            ("to_polars", "polars"),
            ("to_arrow", "pyarrow"),
            ("plot", "matplotlib"),
        ],
    )
    def test_without_the_package(
        self, method: str, package: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The error says what to install."""
        forget(package, monkeypatch)

        with pytest.raises(
            ciclo.MissingDependencyError,
            match=rf"history.{method}\(\) needs {package}, .*: pip install {package}$",
        ):
            getattr(filled({"a": 1.0}), method)()


def forget(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a package one that is not installed."""
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    class Finder:
        def find_spec(self, name: str, *args: Any) -> None:
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in list(sys.modules):
        if name.partition(".")[0] == package:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])


class Sharding:
    device_set = (types.SimpleNamespace(platform="gpu"),) * 2


class FakeArray:
    """A scalar on two devices; `Device` counts how many are asked for at a time."""

    shape = ()
    aval = "float32[]"
    sharding = Sharding()

    def __init__(self, value: float) -> None:
        self.value = value

    def is_deleted(self) -> bool:
        return False

    def addressable_data(self, index: int) -> FakeArray:
        return self


FakeArray.__module__ = "jaxlib.fake"


class Stacked:
    """Many scalars as one array."""

    def __init__(self, numbers: list[float], device: Device) -> None:
        self.numbers = numbers
        self.device = device

    def copy_to_host_async(self) -> None:
        self.device.sent.append(len(self.numbers))

    def tolist(self) -> list[float]:
        self.device.received.append(len(self.numbers))
        return self.numbers


class Device:
    def __init__(self) -> None:
        self.fetched: list[int] = []
        self.sent: list[int] = []
        self.received: list[int] = []

    def device_get(self, arrays: list[FakeArray]) -> list[np.float32]:
        self.fetched.append(len(arrays))
        return [np.float32(array.value) for array in arrays]

    def stack(self, arrays: list[FakeArray]) -> Stacked:
        return Stacked([array.value for array in arrays], self)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake = Device()
    monkeypatch.setitem(sys.modules, "jax", fake)
    monkeypatch.setattr(device_values, "_jitted_stack", lambda: fake.stack)
    return fake


class TestDeviceValues:
    def test_come_many_at_once(self, device: Device) -> None:
        """After the first, they are sent by the half of a queue, and received a half later."""
        half = STACKED
        history = filled(*({"a": FakeArray(step)} for step in range(2 * half)))
        assert ([1], [half], []) == (device.fetched, device.sent, device.received)

        history.commit(ciclo.Elapsed(steps=999), {"metrics": {"a": FakeArray(7.0)}})
        assert ([half, half], [half]) == (device.sent, device.received)

        assert [float(n) for n in range(2 * half)] + [7.0] == history.collect("a")
        assert ([1], [half, half]) == (device.fetched, device.received)

    def test_are_not_kept_alive(self, device: Device) -> None:
        """Of many device values only a queue's worth is alive at any time."""
        import weakref

        made: list[weakref.ref[FakeArray]] = []

        def array(step: int) -> FakeArray:
            value = FakeArray(step)
            made.append(weakref.ref(value))
            return value

        history = filled(*({"a": array(step)} for step in range(0)))
        for step in range(1000):
            history.commit(ciclo.Elapsed(steps=step), {"metrics": {"a": array(step)}})
            assert sum(ref() is not None for ref in made) <= 2 * STACKED + 1

    def test_of_a_donated_state_are_fetched_at_once(self, device: Device) -> None:
        """Where the first value's memory was given away by the next step, none is left waiting."""

        class Donated(FakeArray):
            is_gone = False

            def is_deleted(self) -> bool:
                return self.is_gone

        Donated.__module__ = "jaxlib.fake"
        history = ciclo.history()
        for step in range(5):
            array = Donated(step)
            history.commit(ciclo.Elapsed(steps=step), {"metrics": {"a": array}})
            array.is_gone = True

        assert [0.0, 1.0, 2.0, 3.0, 4.0] == history.collect("a")

    def test_one_that_is_lost_is_said(
        self, device: Device, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A value that was given away while it waited is None, with a warning what to do."""

        class Donated(FakeArray):
            def is_deleted(self) -> bool:
                return self.value == 2

        Donated.__module__ = "jaxlib.fake"
        history = filled(*({"a": Donated(step)} for step in range(4)))

        assert [0.0, 1.0, None, 3.0] == history.collect("a")
        assert "log a copy: jnp.copy(value)" in caplog.text


class FakeTensor:
    """A torch scalar on a GPU."""

    device = "cuda:0"
    is_cpu = False
    dtype = "float32"

    def __init__(self, value: float) -> None:
        self.value = value

    def detach(self) -> FakeTensor:
        return self

    def clone(self) -> FakeTensor:
        return FakeTensor(self.value)

    def dim(self) -> int:
        return 0

    def item(self) -> float:
        pytest.fail("waited for a single value")


FakeTensor.__module__ = "torch.fake"


def test_torch_scalars_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied when logged, and sent many at a time."""
    stacked: list[int] = []

    class Stack:
        device = types.SimpleNamespace(type="another")

        def __init__(self, tensors: list[FakeTensor]) -> None:
            stacked.append(len(tensors))
            self.numbers = [tensor.value for tensor in tensors]

        def tolist(self) -> list[float]:
            return self.numbers

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(stack=Stack))
    total = FakeTensor(0.0)
    history = ciclo.history()
    for step in range(2 * STACKED + 1):
        total.value = float(step)  # changed in place, as `total += loss` does
        history.commit(ciclo.Elapsed(steps=step), {"metrics": {"total": total}})

    assert [1, STACKED, STACKED] == stacked
    assert [float(step) for step in range(2 * STACKED + 1)] == history.collect("total")


def test_a_batch_in_a_few_words() -> None:
    """Errors describe a batch by types and shapes, however large it is."""
    batch = {"x": np.zeros((3, 2), "float32"), "y": ([1] * 100, "a" * 100), "z": object()}

    assert (
        "{x: float32[3,2], y: (list, 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...), z: object}"
        == device_values.describe(batch)
    )
