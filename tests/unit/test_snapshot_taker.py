"""Which models are watched, when they are copied, and what is left out: with a fake framework."""

from __future__ import annotations

import gc
import os
import sys
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import cirron as ci
from cirron import errors, files, guard, hooks, session
from cirron.record import clock, hot
from cirron.snapshot import health, records, stats, taker
from cirron.snapshot.host import Copier, Reader, Tensor
from cirron.snapshot.taker import Taker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cirron.snapshot.host import Copy
    from cirron.snapshot.records import Taken

PATIENCE_S = 20.0


class Model:
    """A model of a framework that nobody has."""

    def __init__(self, **values: list[float]) -> None:
        self.values = values
        self.wrapped: Any = None


class Gan(Model):
    pass


class FakeCopy:
    """Waits for leave before it is measured, so that a test decides when the worker is done."""

    def __init__(self, reader: FakeReader, tensors: list[Tensor], raw: bool) -> None:
        self.tensors = tensors
        self.size_bytes = sum(tensor.size_bytes for tensor in tensors)
        self._reader = reader
        self._values = [tensor.take_array() for tensor in tensors]
        self._raw = raw

    def value(self, number: int) -> Any:
        assert self._raw
        if self._reader.disk_error is not None:
            raise self._reader.disk_error
        return self._values[number]

    def summaries(self) -> list[stats.Summary]:
        assert self._reader.go_on.wait(PATIENCE_S)
        return [stats.summarize(value) for value in self._values]

    def release(self) -> None:
        self._reader.released += 1


class FakeReader(Reader, Copier):
    """Copies what it reads, too."""

    made: FakeReader
    is_in_place = True

    def __init__(self) -> None:
        FakeReader.made = self
        self.go_on = threading.Event()
        self.go_on.set()
        self.prepared: list[list[str]] = []
        self.raws: list[bool] = []
        self.released = 0
        self.error: Exception | None = None
        self.disk_error: Exception | None = None
        self.has_memory = True

    def unwrap(self, model: Any) -> Any:
        return model if model.wrapped is None else model.wrapped

    def names(self, model: Any) -> list[str]:
        return list(model.values)

    def prepare(self, weights: list[Tensor]) -> None:
        self.prepared.append([tensor.name for tensor in weights])

    def read(self, model: Any, prefix: str, *, only_gradients: bool = False) -> Iterator[Tensor]:
        if self.error is not None:
            raise self.error
        for name, values in model.values.items():
            array = np.array(values)
            its = Tensor(prefix + name, name.endswith(".grad"), [len(values)], "float64", {})
            its.array, its.copier = array, self
            yield its

    def copy(self, tensors: list[Tensor], *, raw: bool, in_step: bool) -> list[Copy] | None:
        self.raws.append(raw)
        return [FakeCopy(self, tensors, raw)] if self.has_memory else None


@pytest.fixture(autouse=True)
def _framework(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("fakeframework")
    module.Model, module.READER = Model, FakeReader()
    monkeypatch.setitem(sys.modules, "fakeframework", module)
    monkeypatch.setattr(taker, "READERS", (("fakeframework", "Model", "fakeframework"),))


class Takers:
    """Makes takers, and keeps what they deliver."""

    def __init__(self) -> None:
        self.delivered: list[Taken] = []
        self.made: list[Taker] = []

    def __call__(
        self,
        mode: str = "stats",
        *,
        folder: Path | None = None,
        chance: Callable[[], float] | None = None,
        sample_rate: float = 0.1,
        access: str = "private",
    ) -> Taker:
        made = Taker(
            mode,
            sample_rate,
            folder=folder,
            wall_ns=lambda monotonic_ns: 1000,
            deliver=self.delivered.append,
            chance=chance,
            access=access,
        )
        self.made.append(made)
        return made

    def names(self) -> list[list[str]]:
        return [[record.tensor_name for record in one.snapshots] for one in self.delivered]


@pytest.fixture
def takers() -> Iterator[Takers]:
    found = Takers()
    yield found
    for made in found.made:
        FakeReader.made.go_on.set()
        assert made.stop(soon())


def soon() -> int:
    return clock.now() + int(PATIENCE_S * 1e9)


def epoch(index: int | None = 0) -> hot.Span:
    span = hot.scope("epoch", index)
    span.__enter__()
    return span


def take(one: Taker, *models: Any, index: int = 0) -> hot.Span:
    span = epoch(index)
    one.take(span, *models)
    span.__exit__(None, None, None)
    return span


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "cirron"]


class TestWatching:
    def test_a_boundary_records_each_tensor_once(self, takers: Takers) -> None:
        """A boundary leaves one record a tensor: its statistics, its epoch, and when it was."""
        one, model = takers(), Model(weight=[1.0, 3.0])
        one.watch(model)
        span = take(one, index=4)
        assert one.settle(soon())

        ((record,),) = [taken.snapshots for taken in takers.delivered]
        assert ("weight", [2], "float64", "stats", None) == (
            record.tensor_name,
            record.shape,
            record.dtype,
            record.mode,
            record.blob_uri,
        )
        assert (span.id, 1000, {}) == (record.span_id, record.ts_ns, record.attrs)
        assert 2.0 == record.stats.mean
        assert span.attrs == {"snapshot_ns": one.held_ns}
        assert one.held_ns > 0

    def test_nothing_is_watched(self, takers: Takers) -> None:
        """Without a model a boundary costs nothing and starts no thread."""
        one = takers()
        span = take(one)

        assert None is span.attrs
        assert None is one._thread

    def test_watching_twice_changes_nothing(self, takers: Takers) -> None:
        """A model that is watched already stays as it is, also inside a wrapper."""
        one, model, wrapper = takers(), Model(weight=[1.0]), Model()
        wrapper.wrapped = model
        for given in (model, model, wrapper):
            one.watch(given)
        take(one)
        assert one.settle(soon())

        assert [["weight"]] == takers.names()

    def test_names_of_several_models_stay_apart(self, takers: Takers) -> None:
        """Names are kept apart by the model's class, then by a number; the first keeps its own."""
        one = takers()
        models = [Model(weight=[1.0], bias=[1.0]), Gan(weight=[1.0]), Gan(weight=[1.0])]
        models += [Gan(other=[1.0]), Gan(bias=[1.0])]
        for model in models:
            one.watch(model)
        take(one)
        assert one.settle(soon())

        names = ["weight", "bias", "Gan.weight", "Gan_2.weight", "other", "Gan.bias"]
        assert [names] == takers.names()
        assert names == FakeReader.made.prepared[-1]

    def test_a_model_that_a_hook_expects(self, takers: Takers) -> None:
        """Memory is made ready once for it and for the watched ones; it keeps its name."""
        one, watched, found, later = takers(), Model(a=[1.0]), Model(a=[2.0]), Model()
        one.watch(watched)
        for model in (found, found, watched, later):
            one.expect(model)
        later.values["b"] = [3.0]
        take(one, found)
        take(one, later, index=1)
        assert one.settle(soon())

        assert [["a"], ["a", "Model.a"]] == FakeReader.made.prepared
        assert [["a", "Model.a"], ["a", "b"]] == takers.names()

    def test_a_model_that_a_hook_has_found_is_watched(self, takers: Takers) -> None:
        """It keeps its names, is prepared once, and is in every snapshot from then on."""
        one, model = takers(), Model(a=[1.0])
        one.expect(model)
        one.watch(model)
        take(one, model)
        take(one)
        assert one.settle(soon())

        assert [["a"]] == FakeReader.made.prepared
        assert [["a"]] * 2 == takers.names()

    def test_a_model_of_a_hook(self, takers: Takers) -> None:
        """A model that a framework's hook has found is taken with the watched ones, and once."""
        one, watched, found = takers(), Model(a=[1.0]), Model(a=[2.0])
        one.watch(watched)
        take(one, found, watched)
        take(one, found, found)
        assert one.settle(soon())

        assert [["a", "Model.a"]] * 2 == takers.names()

    def test_models_are_not_kept_alive(self, takers: Takers) -> None:
        """A watched model that the program lets go of is gone, and others are still taken."""
        one, kept, model = takers(), Model(kept=[1.0]), Model(weight=[1.0])
        gone = weakref.ref(model)
        one.watch(model)
        one.watch(kept)
        take(one)
        assert one.settle(soon())
        del model
        gc.collect()
        take(one)
        assert one.settle(soon())

        assert None is gone()
        assert [["weight", "kept"], ["kept"]] == takers.names()

    def test_a_name_that_is_free_again(self, takers: Takers) -> None:
        """A new model may have the names of one that is gone."""
        one, model = takers(), Model(weight=[1.0])
        one.watch(model)
        assert one.settle(soon())
        model = Model(weight=[2.0])
        gc.collect()
        one.watch(model)
        take(one)
        assert one.settle(soon())

        assert [["weight"]] == takers.names()

    @pytest.mark.parametrize("given", [None, 42, "model", Model])
    def test_watching_something_else_is_an_error(self, takers: Takers, given: Any) -> None:
        """What is no model is an error that says what was given and what is taken."""
        one = takers()
        with pytest.raises(errors.InputError) as caught:
            one.watch(given)

        assert str(caught.value).startswith("ci.watch() takes a model, such as a torch.nn.Module")
        assert f"got {type(given).__name__}. Keras and Trainer models are found without it" in str(
            caught.value
        )


class TestBounds:
    def test_one_snapshot_an_epoch(self, takers: Takers) -> None:
        """Two boundaries of the same span, such as a hook's and a loop's, make one snapshot."""
        one, model = takers(), Model(weight=[1.0])
        one.watch(model)
        span = epoch()
        one.take(span)
        one.take(span)
        span.__exit__(None, None, None)
        assert one.settle(soon())

        assert 1 == one.counters()["snapshot_count"]

    def test_while_the_worker_is_busy(
        self, takers: Takers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Copies that wait are bounded in bytes; what has no room is left out, said and counted."""
        monkeypatch.setattr(taker, "PENDING_BYTES", 3 * 8)
        monkeypatch.setattr(taker, "WAIT_S", 0.001)
        one, model = takers(), Model(weight=[1.0])
        one.watch(model)
        assert one.settle(soon())  # what is made ready waits for the worker, too
        FakeReader.made.go_on.clear()
        for index in range(6):
            take(one, index=index)

        assert (0, 3, 3) == tuple(
            one.counters()[f"snapshot_{name}"] for name in ("count", "skip_count", "pending")
        )
        FakeReader.made.go_on.set()
        assert one.settle(soon())
        take(one)
        assert one.settle(soon())

        assert (4, 3, 0) == tuple(
            one.counters()[f"snapshot_{name}"] for name in ("count", "skip_count", "pending")
        )
        assert 4 == FakeReader.made.released
        assert [
            "cirron: a snapshot was skipped: the worker is still busy with earlier ones."
            " ci.health() counts them"
        ] == warnings(caplog)

    def test_a_model_larger_than_the_bound(
        self, takers: Takers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One copy is always let in, however large."""
        monkeypatch.setattr(taker, "PENDING_BYTES", 1)
        one, model = takers(), Model(weight=[1.0] * 100)
        one.watch(model)
        take(one)
        assert one.settle(soon())

        assert 1 == one.counters()["snapshot_count"]

    def test_the_loop_waits_a_moment(self, takers: Takers, monkeypatch: pytest.MonkeyPatch) -> None:
        """A worker that is done within the wait loses no snapshot."""
        monkeypatch.setattr(taker, "PENDING_BYTES", 1)
        monkeypatch.setattr(taker, "WAIT_S", PATIENCE_S)
        one, model = takers(), Model(weight=[1.0])
        one.watch(model)
        for index in range(5):
            take(one, index=index)
        assert one.settle(soon())

        assert (5, 0) == (one.taken, one.skipped)

    def test_a_copy_that_does_not_fit_is_skipped(
        self, takers: Takers, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A copy that might not fit in memory is left out, said once and counted."""
        one, model = takers(), Model(weight=[1.0] * 1_000_000)
        one.watch(model)
        FakeReader.made.has_memory = False
        take(one)
        take(one)
        assert one.settle(soon())

        assert (0, 2) == (one.taken, one.skipped)
        (warning,) = warnings(caplog)
        assert "a copy of 8 MB might not fit in free memory" in warning

    def test_a_reader_that_fails(
        self, takers: Takers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A failure warns once, is counted each time, and the next snapshot is taken."""
        monkeypatch.setattr(guard, "strict", False)
        one, model = takers(), Model(weight=[1.0])
        one.watch(model)
        FakeReader.made.error = RuntimeError("no")
        take(one)
        take(one)
        FakeReader.made.error = None
        take(one)
        assert one.settle(soon())

        assert {"snapshot: RuntimeError": 2} == dict(guard.errors)
        assert 1 == one.taken
        (warning,) = warnings(caplog)
        assert "internal error in snapshot; your program is fine" in warning

    def test_a_worker_that_fails(
        self, takers: Takers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A failure on the worker releases the copy, is counted, and the worker goes on."""
        monkeypatch.setattr(guard, "strict", False)
        one, model = takers(), Model(weight=["nonsense"])  # type: ignore[list-item]
        one.watch(model)
        take(one)
        assert one.settle(soon())
        model.values = {"weight": [1.0]}
        take(one)
        assert one.settle(soon())

        assert 1 == sum(guard.errors.values())
        assert (1, 2, 0) == (one.taken, FakeReader.made.released, one._pending_bytes)

    def test_stop_ends_the_worker(self, takers: Takers) -> None:
        """After `stop` nothing is taken, the thread ends, and the taker is let go of."""
        one, model = takers(), Model(weight=[1.0])
        one.watch(model)
        take(one)
        thread = one._thread
        assert thread is not None
        assert one.stop(soon())
        thread.join(PATIENCE_S)
        take(one)

        assert not thread.is_alive()
        assert (1, 0) == (one.taken, one.counters()["snapshot_pending"])
        gone = weakref.ref(one)
        takers.made.clear()
        del one
        gc.collect()
        assert None is gone()

    def test_the_end_is_bounded(self, takers: Takers) -> None:
        """`stop` says when it did not get done by its deadline."""
        one, model = takers(), Model(weight=[1.0])
        one.watch(model)
        assert one.settle(soon())
        FakeReader.made.go_on.clear()
        take(one)

        assert not one.stop(clock.now())


class TestRawValues:
    def test_full_mode_writes_every_epoch(self, takers: Takers, tmp_path: Path) -> None:
        """Every epoch's weights and gradients are in files of their own, named by the span."""
        one, model = takers("full", folder=tmp_path), Model(weight=[1.0])
        one.watch(model)
        first = take(one)
        model.values["weight.grad"] = [2.0]
        second = take(one)
        assert one.settle(soon())

        folder = tmp_path / "snapshots"
        assert [
            folder / first.id / "weights.safetensors",
            folder / second.id / "gradients.safetensors",
            folder / second.id / "weights.safetensors",
        ] == sorted(folder.glob("*/*"), key=lambda path: (path.parent.name != first.id, path.name))
        records = takers.delivered[1].snapshots
        assert [
            (folder / second.id / "weights.safetensors").as_uri(),
            (folder / second.id / "gradients.safetensors").as_uri(),
        ] == [record.blob_uri for record in records]
        assert [
            f"snapshots/{second.id}/{kind}.safetensors" for kind in ("weights", "gradients")
        ] == [key for _, key in takers.delivered[1].files]

    def test_a_name_that_safetensors_reserves(self, takers: Takers, tmp_path: Path) -> None:
        """A tensor called `__metadata__` has statistics only; the file of the others is whole."""
        one, model = takers("full", folder=tmp_path), Model(weight=[1.0], __metadata__=[2.0])
        one.watch(model)
        span = take(one)
        assert one.settle(soon())

        found = load_file(tmp_path / "snapshots" / span.id / "weights.safetensors")
        assert {"weight": 1.0} == {name: value.item() for name, value in found.items()}
        (taken,) = takers.delivered
        assert {"weight": True, "__metadata__": False} == {
            record.tensor_name: record.blob_uri is not None for record in taken.snapshots
        }

    def test_sampled_mode_writes_a_share_of_the_epochs(
        self, takers: Takers, tmp_path: Path
    ) -> None:
        """Raw values are kept when chance says less than the rate; statistics always are."""
        chances = iter([0.3, 0.29, 0.9, 0.0])
        one = takers("sampled", folder=tmp_path, chance=chances.__next__, sample_rate=0.3)
        model = Model(weight=[1.0])
        one.watch(model)
        for index in range(4):
            take(one, index=index)
        assert one.settle(soon())

        assert [False, True, False, True] == FakeReader.made.raws
        records = [taken.snapshots[0] for taken in takers.delivered]
        assert [False, True, False, True] == [bool(record.blob_uri) for record in records]
        assert ["sampled"] * 4 == [record.mode for record in records]

    @pytest.mark.parametrize(("rate", "kept"), [(0.0, 0), (1.0, 50)])
    def test_rates_at_the_ends(
        self, takers: Takers, tmp_path: Path, rate: float, kept: int
    ) -> None:
        """A rate of 0 keeps none, a rate of 1 all."""
        one, model = takers("sampled", folder=tmp_path, sample_rate=rate), Model(weight=[1.0])
        one.watch(model)
        for index in range(50):
            take(one, index=index)
        assert one.settle(soon())

        assert kept == sum(FakeReader.made.raws)

    def test_stats_mode_writes_no_files(self, takers: Takers, tmp_path: Path) -> None:
        """Statistics alone write nothing."""
        one, model = takers("stats", folder=tmp_path), Model(weight=[1.0])
        one.watch(model)
        take(one)
        assert one.settle(soon())

        assert [] == list(tmp_path.iterdir())

    def test_without_a_folder_no_raw_values_are_copied(self, takers: Takers) -> None:
        """Where nothing is written to disk, no raw values are copied either."""
        one, model = takers("full"), Model(weight=[1.0])
        one.watch(model)
        take(one)
        assert one.settle(soon())

        assert [False] == FakeReader.made.raws
        assert "full" == takers.delivered[0].snapshots[0].mode

    def test_a_disk_that_refuses(
        self, takers: Takers, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Files that cannot be written are counted and said once; statistics are kept."""
        one = takers("full", folder=tmp_path)
        model = Model(**{"weight": [1.0], "weight.grad": [1.0]})
        one.watch(model)
        FakeReader.made.disk_error = OSError(28, "No space left on device")
        take(one)
        take(one)
        assert one.settle(soon())

        assert (2, 4) == (one.taken, one.counters()["snapshot_unsaved_count"])
        assert [[None, None]] * 2 == [
            [record.blob_uri for record in taken.snapshots] for taken in takers.delivered
        ]
        assert [files.MADE] == [path.name for path in tmp_path.rglob("*") if path.is_file()]
        (warning,) = warnings(caplog)
        assert "could not be written to" in warning
        assert "(No space left on device). Its statistics are kept" in warning

    def test_any_other_error(
        self,
        takers: Takers,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """A mistake of ours in saving is counted and said once, too; statistics are kept."""
        monkeypatch.setattr(guard, "strict", False)
        one = takers("full", folder=tmp_path)
        model = Model(**{"weight": [1.0], "weight.grad": [1.0]})
        one.watch(model)
        FakeReader.made.disk_error = RuntimeError("no such view")
        take(one)
        take(one)
        assert one.settle(soon())

        assert (2, 4) == (one.taken, one.counters()["snapshot_unsaved_count"])
        assert [["weight", "weight.grad"]] * 2 == takers.names()
        assert {None} == {
            record.blob_uri for taken in takers.delivered for record in taken.snapshots
        }
        assert [] == [file for taken in takers.delivered for file in taken.files]
        assert {"snapshot: RuntimeError": 4} == guard.errors
        (warning,) = warnings(caplog)
        assert "internal error in snapshot; your program is fine" in warning

    def test_large_raw_values_warn_once(
        self,
        takers: Takers,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """One warning says the bytes and the parameters of raw values that are large."""
        monkeypatch.setattr(records, "LARGE_BYTES", 100)
        one = takers("full", folder=tmp_path)
        model = Model(**{"weight": [1.0] * 10, "weight.grad": [1.0] * 10})
        one.watch(model)
        take(one)
        take(one)
        assert one.settle(soon())

        (warning,) = warnings(caplog)
        assert "the raw values of this epoch are 0.0 MB (160 bytes, 10 parameters)" in warning
        assert 4 == len(list(tmp_path.glob("snapshots/*/*")))

    @pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
    @pytest.mark.parametrize(
        ("access", "modes"), [("private", ("700", "600")), ("all", ("755", "644"))]
    )
    def test_who_may_read(
        self, access: str, modes: tuple[str, str], mask: int, takers: Takers, tmp_path: Path
    ) -> None:
        """Folders and files of raw values have the modes that the setting says."""
        before = os.umask(mask)
        try:
            one = takers("full", folder=tmp_path / ".cirron", access=access)
            model = Model(weight=[1.0])
            one.watch(model)
            take(one)
            assert one.settle(soon())
        finally:
            os.umask(before)

        (file,) = tmp_path.glob(".cirron/snapshots/*/*")
        folder_mode, file_mode = modes
        assert [file_mode, folder_mode, folder_mode, folder_mode] == [
            f"{path.stat().st_mode & 0o7777:o}" for path in (file, *list(file.parents)[:3])
        ]

    def test_a_folder_that_cannot_be_made(
        self, takers: Takers, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A file where the folder should be is said once, and is no mistake of ours."""
        (tmp_path / "file").write_text("mine")
        one, model = takers("full", folder=tmp_path / "file"), Model(weight=[1.0])
        one.watch(model)
        take(one)
        assert one.settle(soon())

        assert (1, "mine") == (
            one.counters()["snapshot_unsaved_count"],
            (tmp_path / "file").read_text(),
        )
        (warning,) = warnings(caplog)
        assert "(Not a directory). Its statistics are kept" in warning

    def plant(self, folder: Path) -> list[str]:
        """Puts a whole file and a half-written one there."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("weights.safetensors", "gradients.safetensors.tmp"):
            (folder / name).write_text("x")
        return sorted(path.name for path in folder.iterdir())

    def test_what_a_killed_process_left(
        self, takers: Takers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Half-written files of long ago are removed, whole ones and those of now are not."""
        files.Folder(tmp_path / "snapshots", files.SPAN).make()
        old = tmp_path / "snapshots" / f"{7:032x}"
        self.plant(old)
        records.sweep(tmp_path)
        assert 2 == len(list(old.iterdir()))
        monkeypatch.setattr(records, "STALE_NS", -1)
        one, model = takers("full", folder=tmp_path), Model(weight=[1.0])
        one.watch(model)
        take(one)
        assert one.settle(soon())

        assert ["weights.safetensors"] == [path.name for path in old.iterdir()]

    @pytest.mark.parametrize("what", ["folder", "name", "link", "link above", "no file"])
    def test_only_what_is_ours_is_removed(
        self, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing goes from a folder that we did not make, has another name, or is a link."""
        monkeypatch.setattr(records, "STALE_NS", -1)
        home = files.Folder(tmp_path / "snapshots", files.SPAN)
        old = home.path / ("mine" if what == "name" else f"{7:032x}")
        if what not in ("folder", "link above"):
            home.make()
        if what == "link":
            self.plant(tmp_path / "precious")
            old.symlink_to(tmp_path / "precious")
        elif what == "link above":
            home.make()
            home.path.rmdir()
            self.plant(tmp_path / "precious" / old.name)
            home.path.symlink_to(tmp_path / "precious")
        elif what == "no file":
            (old / "gradients.safetensors.tmp").mkdir(parents=True)
            (old / "weights.safetensors.tmp").symlink_to(tmp_path / files.MADE)
        else:
            self.plant(old)
        found = sorted(old.iterdir())
        records.sweep(tmp_path)

        assert (found, True) == (sorted(old.iterdir()), len(found) > 1)


class TestHealth:
    def test_marks_and_one_warning(self, takers: Takers, caplog: pytest.LogCaptureFixture) -> None:
        """Each finding is a mark on its epoch; what is new in it is a warning, too."""
        one = takers()
        model = Model(**{"a.grad": [1.0], "b.grad": [1.0], "c": [1.0]})
        one.watch(model)
        take(one, index=0)
        model.values = {"a.grad": [0.0] * 8, "b.grad": [0.0] * 8, "c": [1.0]}
        ill = take(one, index=1)
        take(one, index=2)
        model.values = {"a.grad": [1.0], "b.grad": [0.0] * 8, "c": [1.0]}
        take(one, index=3)
        assert one.settle(soon())

        marks = [
            [
                (mark.value, mark.attrs["tensors"], mark.attrs["epoch"], mark.attrs["since"])
                for mark in taken.marks
            ]
            for taken in takers.delivered
        ]
        assert [
            [],
            [("dead: a.grad, since 1; b.grad, since 1", ["a.grad", "b.grad"], 1, 1)],
            [("dead: a.grad, since 1; b.grad, since 1", ["a.grad", "b.grad"], 2, 1)],
            [
                ("recovered: a.grad, since 1", ["a.grad"], 3, 1),
                ("dead: b.grad, since 1", ["b.grad"], 3, 1),
            ],
        ] == marks
        mark = takers.delivered[1].marks[0]
        assert (ill.id, "training_health", "string", "point", 1000) == (
            mark.span_id,
            mark.name,
            mark.value_type,
            mark.kind,
            mark.ts_ns,
        )
        assert [
            "cirron: training health: dead: a.grad, b.grad, since epoch 1: every value of its"
            " gradient is 0. The marks named training_health say more"
        ] == warnings(caplog)

    def test_each_tensor_has_its_own_since(
        self, takers: Takers, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A tensor that falls ill later is named first in that epoch's mark, and in a warning."""
        one, model = takers(), Model(**{"a.grad": [1.0], "b.grad": [1.0]})
        one.watch(model)
        for index, (a, b) in enumerate([(1.0, 1.0), (0.0, 1.0), (0.0, 0.0), (0.0, 0.0)]):
            model.values = {"a.grad": [a] * 8, "b.grad": [b] * 8}
            take(one, index=index)
        assert one.settle(soon())

        assert [
            ("dead: a.grad, since 1", ["a.grad"], [1]),
            ("dead: b.grad, since 2; a.grad, since 1", ["b.grad", "a.grad"], [2, 1]),
            ("dead: a.grad, since 1; b.grad, since 2", ["a.grad", "b.grad"], [1, 2]),
        ] == [
            (mark.value, mark.attrs["tensors"], mark.attrs["sinces"])
            for taken in takers.delivered
            for mark in taken.marks
        ]
        first, second = warnings(caplog)
        assert "dead: a.grad, since epoch 1:" in first
        assert "dead: b.grad, since epoch 2:" in second

    def test_one_warning_a_tensor(self, takers: Takers, caplog: pytest.LogCaptureFixture) -> None:
        """A tensor that is ill every other epoch is worth one warning, and a mark each time."""
        one, model = takers(), Model(a=[1.0])
        one.watch(model)
        for index in range(6):
            model.values = {"a": [1.0 if index % 2 else float("nan")]}
            take(one, index=index)
        assert one.settle(soon())

        assert [
            "not finite: a, since 0",
            "recovered: a, since 0",
            "not finite: a, since 2",
            "recovered: a, since 2",
            "not finite: a, since 4",
            "recovered: a, since 4",
        ] == [mark.value for taken in takers.delivered for mark in taken.marks]
        assert 1 == len(warnings(caplog))

    def test_one_warning_a_kind(self, takers: Takers, caplog: pytest.LogCaptureFixture) -> None:
        """Another kind of problem is worth another warning."""
        one, model = takers(), Model(a=[float("nan")])
        one.watch(model)
        take(one)
        model.values = {"a": [1.0], "b.grad": [0.0] * 8}
        take(one)
        model.values = {"a": [float("nan")]}
        take(one)
        assert one.settle(soon())

        first, second = warnings(caplog)
        assert "training health: not finite: a, since epoch 0" in first
        assert "training health: dead: b.grad, since epoch 0" in second

    def test_another_model_has_no_past(
        self, takers: Takers, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A model whose names an earlier one had is not compared with that one."""
        one = takers()
        for scale in (1.0, 1.1, 0.9, 1.0):
            model = Model(a=[1.0], **{"a.grad": [scale]})
            one.watch(model)
            take(one)
            assert one.settle(soon())
            del model
        other = Model(a=[1.0], **{"a.grad": [1e6]})
        one.watch(other)
        take(one)
        assert one.settle(soon())

        assert [] == [mark.value for taken in takers.delivered for mark in taken.marks]
        assert [] == warnings(caplog)

    def test_what_is_gone_is_not_counted_as_taken(self, takers: Takers) -> None:
        """A boundary that leaves no record is one that was left out."""
        one = takers()
        one.watch(Model())
        model = Model()
        one.watch(model)
        take(one)
        assert one.settle(soon())

        assert (0, 1) == (one.taken, one.skipped)

    def test_marks_and_warnings_are_bounded(
        self, takers: Takers, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A model that is all NaN has one mark and one warning: some names, and how many more."""
        one = takers()
        model = Model(**{f"layer{number}": [float("nan")] for number in range(50)})
        one.watch(model)
        take(one)
        assert one.settle(soon())

        (taken,) = takers.delivered
        (mark,) = taken.marks
        assert health.MAX_NAMES == len(mark.attrs["tensors"])
        assert health.MAX_NAMES == len(mark.attrs["sinces"])
        assert 50 == mark.attrs["tensor_count"]
        some = "not finite: layer0, since 0; layer1, since 0; layer2, since 0; and 47 more"
        assert some == mark.value
        (warning,) = warnings(caplog)
        assert "not finite: layer0, layer1, layer2, and 47 more, since epoch 0: 1 of 1" in warning

    def test_a_new_one_among_many(self, takers: Takers) -> None:
        """The mark of a tensor's first epoch names it, however many were ill before."""
        one = takers()
        values = {f"layer{number}": [float("nan")] for number in range(50)}
        model = Model(**values, last=[1.0])
        one.watch(model)
        take(one, index=0)
        model.values["last"] = [float("nan")]
        take(one, index=1)
        assert one.settle(soon())

        (mark,) = takers.delivered[1].marks
        assert ("last", 1, 51) == (
            mark.attrs["tensors"][0],
            mark.attrs["sinces"][0],
            mark.attrs["tensor_count"],
        )

    def test_what_is_not_finite_is_counted(self, takers: Takers) -> None:
        """NaN and infinity are counted in the record's attributes; a clean one has none."""
        inf, nan = float("inf"), float("nan")
        one, model = takers(), Model(a=[1.0, nan, inf, -inf], b=[1.0])
        one.watch(model)
        take(one)
        assert one.settle(soon())

        assert [{"nonfinite_count": 3, "nan_count": 1, "inf_count": 2}, {}] == [
            record.attrs for record in takers.delivered[0].snapshots
        ]


class TestSession:
    """`ci.watch` and the session."""

    def test_a_model_can_be_watched_before_profile(self) -> None:
        """A model that is given before `ci.profile()` is watched from then on."""
        model = Model(weight=[1.0])
        ci.watch(model)
        ci.watch(model)
        ci.profile(output="none")
        for _ in ci.epochs(range(3)):
            pass
        ci.flush()

        assert 3 == ci.health()["snapshot_count"]

    def test_before_profile_and_gone(self) -> None:
        """A model that is gone before `ci.profile()` was not kept alive for it."""
        model = Model(weight=[1.0])
        gone = weakref.ref(model)
        ci.watch(model)
        del model
        gc.collect()

        assert None is gone()
        ci.profile(output="none")
        assert [] == session._to_watch

    def test_no_model_before_profile(self) -> None:
        """What is no model is an error where it is given, not in `ci.profile()`."""
        with pytest.raises(errors.InputError, match=r"ci.watch\(\) takes a model.* got int"):
            ci.watch(42)
        ci.profile(output="none")

        assert {} == ci.health()["errors"]

    def test_watch_does_nothing_when_disabled(self) -> None:
        """When profiling is off, `ci.watch` does nothing and keeps nothing."""
        model = Model(weight=[1.0])
        ci.profile(enabled=False)
        ci.watch(model)
        for _ in ci.epochs(range(2)):
            pass

        assert [] == session._to_watch
        assert [] == FakeReader.made.prepared

    def test_flush_waits(self) -> None:
        """After `ci.flush()` the snapshots of the epochs before it are in the spool."""
        model = Model(weight=[1.0])
        ci.profile()
        ci.watch(model)
        FakeReader.made.go_on.clear()
        for _ in ci.epochs(range(2)):
            pass
        assert 0 == ci.health()["snapshot_count"]
        threading.Timer(0.05, FakeReader.made.go_on.set).start()
        ci.flush()

        assert (2, 0) == tuple(ci.health()[name] for name in ("snapshot_count", "snapshot_pending"))

    def test_flush_is_bounded(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Where the worker does not get done, `ci.flush()` stores the rest and says so."""
        monkeypatch.setattr(session, "FLUSH_WAIT_S", 1.0)
        model = Model(weight=[1.0])
        ci.profile()
        ci.watch(model)
        FakeReader.made.go_on.clear()
        for _ in ci.epochs(range(1)):
            pass
        flushed = ci.flush()
        FakeReader.made.go_on.set()

        assert (False, "the worker that measures snapshots did not answer in time") == (
            flushed.ok,
            flushed.why,
        )
        (warning,) = warnings(caplog)
        assert "ci.flush() did not store everything: the worker that measures" in warning

    def test_a_second_session(self) -> None:
        """Models belong to the session that they were given to; its thread ends with it."""
        model = Model(weight=[1.0])
        ci.profile(output="none")
        ci.watch(model)
        for _ in ci.epochs(range(1)):
            pass
        ci.shutdown()
        workers = [t for t in threading.enumerate() if t.name == "cirron-snapshots"]
        for worker in workers:
            worker.join(PATIENCE_S)
        ci.profile(output="none")
        for _ in ci.epochs(range(1)):
            pass
        ci.flush()

        assert 0 == ci.health()["snapshot_count"]
        assert not any(worker.is_alive() for worker in workers)
        ci.watch(model)
        for _ in ci.epochs(range(1)):
            pass
        ci.flush()
        assert 1 == ci.health()["snapshot_count"]

    def test_a_mark_is_in_the_trace(self) -> None:
        """What is found ill is a mark of its epoch in `ci.trace()`."""
        model = Model(weight=[float("nan")])
        ci.profile(output="none")
        ci.watch(model)
        for _ in ci.epochs(range(1)):
            pass
        ci.flush()

        (root,) = ci.trace(format="dict")["roots"]
        (span,) = root["children"]
        assert [("training_health", "not finite: weight, since 0")] == [
            (mark["name"], mark["value"]) for mark in span["marks"]
        ]

    def test_break_ends_an_epoch_with_one_snapshot(self) -> None:
        """An epoch that is left by `break` has its snapshot, one."""
        model = Model(weight=[1.0])
        ci.profile(output="none")
        ci.watch(model)
        for index in ci.epochs(range(5)):
            if index == 2:
                break
        ci.flush()

        assert 3 == ci.health()["snapshot_count"]

    def test_a_framework_that_is_half_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A module that is blocked, or has no models yet, reads none, and others are asked."""
        monkeypatch.setitem(sys.modules, "blocked", None)
        monkeypatch.setitem(sys.modules, "halfway", types.ModuleType("halfway"))
        names = ("blocked", "halfway", "absent")
        odd = tuple((name, "Model", name) for name in names)
        monkeypatch.setattr(taker, "READERS", odd + taker.READERS)
        model = Model(weight=[1.0])
        ci.profile(output="none")
        ci.watch(model)
        for _ in ci.epochs(range(1)):
            pass
        ci.flush()

        assert 1 == ci.health()["snapshot_count"]

    def test_without_numpy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Statistics are NumPy's work: without it `ci.watch` has an error with the line to type."""
        monkeypatch.setattr(hooks, "is_installed", lambda name: name != "numpy")
        with pytest.raises(ImportError) as caught:
            ci.watch(Model(weight=[1.0]))

        assert ("ci.watch() needs numpy, which is not installed: pip install numpy") == str(
            caught.value
        )
