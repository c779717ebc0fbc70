"""Snapshots of real torch models: when, of what, and that training does not notice."""

from __future__ import annotations

import gc
import http.server
import json
import logging
import math
import os
import random
import subprocess
import sys
import textwrap
import threading
import urllib.parse
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests import spools
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import cirron as ci
from cirron import guard, session
from cirron.snapshot import host, stats, taker
from cirron.snapshot import records as snapshot_records
from cirron.snapshot import torch as snapshot_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cirron import wire


def loader_of(batches: int = 2, **options: Any) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(batches * 2, 4), torch.randn(batches * 2, 1))
    return DataLoader(data, batch_size=2, **options)


class Loop:
    """A small model, and the lines that train it."""

    def __init__(self) -> None:
        self.model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(batch[0]), batch[1]).backward()
        self.optimizer.step()


WEIGHTS = ["0.weight", "0.bias", "2.weight", "2.bias"]
GRADIENTS = [f"{name}.grad" for name in WEIGHTS]


def recorded() -> tuple[spools.Recorded, dict[str, wire.Span]]:
    """The only session, and its epochs by id."""
    ci.flush()
    run = spools.read_one(Path(".cirron"))
    return run, {span.id: span for span in run.spans if span.name == "epoch"}


def by_epoch() -> dict[int | None, dict[str, wire.Snapshot]]:
    """The records of each epoch, by tensor."""
    run, epochs = recorded()
    found: dict[int | None, dict[str, wire.Snapshot]] = {}
    for record in run.snapshots:
        its = found.setdefault(epochs[record.span_id].index, {})
        assert record.tensor_name not in its
        its[record.tensor_name] = record
    return found


def of_one(model: nn.Module, mode: Any = "stats") -> dict[str, wire.Snapshot]:
    """The records of a model that nobody trains."""
    ci.profile(snapshots=mode)
    ci.watch(model)
    for _ in ci.epochs(range(1)):
        pass
    return by_epoch()[0]


def raw_values(record: wire.Snapshot) -> torch.Tensor:
    assert record.blob_uri is not None
    parts = urllib.parse.urlsplit(record.blob_uri)
    assert "file" == parts.scheme
    return load_file(urllib.parse.unquote(parts.path))[record.tensor_name]


def holding(**tensors: torch.Tensor) -> nn.Module:
    """A model that holds these tensors, frozen."""
    model = nn.Module()
    for name, tensor in tensors.items():
        setattr(model, name, nn.Parameter(tensor, requires_grad=False))
    return model


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "cirron"]


class TestWhen:
    @pytest.mark.parametrize("batches", [iter, ci.batches])
    def test_when_the_loader_in_a_handmade_epoch_is_exhausted(self, batches: Any) -> None:
        """An epoch that the user made with ci.scope has its snapshot, and its evaluation none."""
        loop = Loop()
        ci.profile()
        ci.watch(loop.model)
        for epoch in range(2):
            with ci.scope("epoch", epoch):
                for batch in batches(loader_of()):
                    loop.step(batch)
                with torch.no_grad():
                    for batch in loader_of():
                        loop.model(batch[0])

        assert {0: [*WEIGHTS, *GRADIENTS], 1: [*WEIGHTS, *GRADIENTS]} == {
            index: list(records) for index, records in by_epoch().items()
        }

    def test_when_a_loader_is_exhausted(self) -> None:
        """Each pass over a DataLoader that trains has one snapshot, of weights and gradients."""
        loop = Loop()
        ci.profile()
        ci.watch(loop.model)
        for _ in range(3):
            for batch in loader_of():
                loop.step(batch)

        found = by_epoch()
        assert [0, 1, 2] == sorted(found, key=str)
        assert [WEIGHTS + GRADIENTS] * 3 == [list(records) for records in found.values()]
        assert 3 == ci.health()["snapshot_count"]

    def test_at_each_iteration_of_epochs(self) -> None:
        """`ci.epochs` over anything has a snapshot at the end of each iteration."""
        loop, data = Loop(), [(torch.ones(2, 4), torch.ones(2, 1))] * 3
        ci.profile()
        ci.watch(loop.model)
        for _ in ci.epochs(range(2)):
            for batch in ci.batches(data):
                loop.step(batch)

        assert [WEIGHTS + GRADIENTS] * 2 == [list(records) for records in by_epoch().values()]

    @pytest.mark.parametrize("wrap", [ci.batches, iter], ids=["batches", "loader"])
    def test_epochs_and_a_loader_make_one(self, wrap: Callable[[Any], Any]) -> None:
        """A DataLoader inside `ci.epochs` adds no second snapshot, nor does a second pass."""
        loop = Loop()
        ci.profile()
        ci.watch(loop.model)
        for _ in ci.epochs(range(2)):
            for _ in range(2):
                for batch in wrap(loader_of()):
                    loop.step(batch)

        assert [0, 1] == list(by_epoch())
        assert 2 == ci.health()["snapshot_count"]

    def test_every_so_many_steps(self) -> None:
        """Without a loader, an epoch and its snapshot come every `steps_per_epoch` steps."""
        loop = Loop()
        ci.Cirron(steps_per_epoch=3).profile()
        ci.watch(loop.model)
        for _ in range(10):
            loop.step((torch.ones(2, 4), torch.ones(2, 1)))
        ci.flush()

        run, epochs = recorded()
        taken = {record.span_id for record in run.snapshots}
        assert len(taken) >= 2
        assert taken <= set(epochs)
        assert len(taken) * len(WEIGHTS + GRADIENTS) == len(run.snapshots)

    def test_an_endless_loader(self) -> None:
        """A loader without a length has them every `steps_per_epoch` steps, and at the end."""

        class Endless(IterableDataset[Any]):
            def __iter__(self) -> Iterator[Any]:
                while True:
                    yield torch.ones(4), torch.ones(1)

        loop = Loop()
        ci.Cirron(steps_per_epoch=2).profile()
        ci.watch(loop.model)
        for number, batch in enumerate(DataLoader(Endless(), batch_size=2)):
            loop.step(batch)
            if number == 4:
                break

        assert [0, 1, 2] == list(by_epoch())

    def test_break(self) -> None:
        """An epoch that is left early has its snapshot."""
        loop = Loop()
        ci.profile()
        ci.watch(loop.model)
        for _ in range(2):
            for batch in loader_of(5):
                loop.step(batch)
                break
        for _ in ci.epochs(range(5)):
            loop.step((torch.ones(2, 4), torch.ones(2, 1)))
            break
        ci.flush()

        assert 3 == ci.health()["snapshot_count"]

    def test_an_exception(self) -> None:
        """So has one that an exception ends: the weights of a crash are worth having."""
        loop = Loop()
        ci.profile()
        ci.watch(loop.model)

        def train() -> None:
            for _ in ci.epochs(range(5)):
                for batch in loader_of():
                    loop.step(batch)
                    raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            train()
        ci.flush()

        assert 1 == ci.health()["snapshot_count"]

    def test_evaluation(self) -> None:
        """A pass that trains nothing has none."""
        loop = Loop()
        ci.profile()
        ci.watch(loop.model)
        for _ in range(2):
            for batch in loader_of():
                loop.step(batch)
            loop.model.eval()
            with torch.no_grad():
                for batch in loader_of():
                    loop.model(batch[0])
            loop.model.train()
        for _ in loader_of():
            pass
        ci.flush()

        assert 2 == ci.health()["snapshot_count"]

    def test_no_gradients(self) -> None:
        """Gradients that were set to None before the boundary leave no records, which is said."""
        loop = Loop()
        ci.profile()
        ci.watch(loop.model)
        for _ in ci.epochs(range(1)):
            loop.step((torch.ones(2, 4), torch.ones(2, 1)))
            loop.optimizer.zero_grad()

        (records,) = by_epoch().values()
        assert WEIGHTS == list(records)
        assert [{"no_gradient": True}] * 4 == [record.attrs for record in records.values()]

    def test_shutdown_in_mid_epoch(self) -> None:
        """What was taken is stored, nothing fails, and a second session takes its own."""
        loop = Loop()
        for _ in range(2):
            ci.profile()
            ci.watch(loop.model)
            for number, batch in enumerate(loader_of(4)):
                loop.step(batch)
                if number == 1:
                    ci.shutdown()
        ci.profile()
        ci.watch(loop.model)
        for batch in loader_of():
            loop.step(batch)
        ci.shutdown()

        runs = spools.read(Path(".cirron"))
        assert 3 == len(runs)
        assert [8] * 3 == [len(run.snapshots) for run in runs]


class TestTheCopy:
    def test_it_is_what_the_model_held_then(self) -> None:
        """Statistics and raw values are of the boundary, whatever the program does right after."""
        model = holding(weight=torch.arange(1000.0), bias=torch.ones(3))
        ci.profile(snapshots="full")
        ci.watch(model)
        for _ in ci.epochs(range(4)):
            pass
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(math.nan)

        for records in by_epoch().values():
            assert 499.5 == records["weight"].stats.mean
            assert torch.equal(torch.arange(1000.0), raw_values(records["weight"]))
            assert torch.equal(torch.ones(3), raw_values(records["bias"]))

    def test_each_epoch_has_its_own(self) -> None:
        """Memory that is used again holds no values of an earlier epoch."""
        model = holding(weight=torch.zeros(500), count=torch.zeros(3, dtype=torch.int64))
        ci.profile(snapshots="full")
        ci.watch(model)
        for index in ci.epochs(range(6)):
            for parameter in model.parameters():
                parameter.data.fill_(index)

        for number, records in by_epoch().items():
            assert number is not None
            assert number == records["weight"].stats.max == records["weight"].stats.min
            assert torch.equal(torch.full((500,), float(number)), raw_values(records["weight"]))
            assert torch.equal(torch.full((3,), number), raw_values(records["count"]))

    def test_statistics_are_numpys(self) -> None:
        """What is recorded of a trained model is what NumPy says of its tensors."""
        loop = Loop()
        ci.profile()
        ci.watch(loop.model)
        for batch in loader_of():
            loop.step(batch)

        records = by_epoch()[0]
        for name, parameter in loop.model.named_parameters():
            assert parameter.grad is not None
            for key, tensor in ((name, parameter.detach()), (f"{name}.grad", parameter.grad)):
                record, values = records[key], tensor.double().numpy()
                assert (list(tensor.shape), "float32", "stats") == (
                    record.shape,
                    record.dtype,
                    record.mode,
                )
                assert pytest.approx(values.mean()) == record.stats.mean
                assert pytest.approx(values.std()) == record.stats.std
                assert pytest.approx(np.linalg.norm(values)) == record.stats.norm
                counts, edges = np.histogram(values, 16)
                assert counts.tolist() == record.stats.histogram.counts
                assert edges.tolist() == record.stats.histogram.bins

    def test_training_does_not_notice(self) -> None:
        """Weights, optimizer and every random state are bit for bit those without snapshots."""

        def train() -> list[Any]:
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            loop = Loop()
            loop.model.append(nn.Dropout(0.5))  # type: ignore[operator]
            optimizer = torch.optim.Adam(loop.model.parameters())
            loop.optimizer = optimizer  # type: ignore[assignment]
            ci.watch(loop.model)
            for _ in ci.epochs(range(2)):
                for batch in loader_of(3, shuffle=True):
                    loop.step(batch)
            state = optimizer.state_dict()["state"]
            return [
                *loop.model.state_dict().values(),
                *(value for moments in state.values() for value in moments.values()),
                torch.get_rng_state(),
                torch.tensor(random.getstate()[1]),
                torch.tensor(np.random.get_state()[1].astype(np.int64)),  # type: ignore[index]
            ]

        ci.profile(enabled=False)
        plain = train()
        ci.shutdown()
        ci.profile(snapshots="full")
        profiled = train()
        ci.flush()

        assert 2 == ci.health()["snapshot_count"]
        assert len(plain) == len(profiled)
        assert all(map(torch.equal, plain, profiled))

    def test_the_model_is_as_it_was(self) -> None:
        """No attribute, hook or buffer is added to the model, and its gradients are not touched."""
        loop = Loop()
        loop.step((torch.ones(2, 4), torch.ones(2, 1)))
        before = {name: list(vars(module)) for name, module in loop.model.named_modules()}
        gradients = [
            (id(p.grad), p.grad.clone()) for p in loop.model.parameters() if p.grad is not None
        ]
        of_one(loop.model, "full")
        ci.shutdown()

        assert before == {name: list(vars(module)) for name, module in loop.model.named_modules()}
        for (identity, values), parameter in zip(gradients, loop.model.parameters(), strict=True):
            assert parameter.grad is not None
            assert identity == id(parameter.grad)
            assert torch.equal(values, parameter.grad)

    def test_no_memory(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A copy that is more than its part of free memory is left out, said and counted."""
        monkeypatch.setattr(host, "SMALL_BYTES", 100)
        monkeypatch.setattr(host, "available_bytes", lambda: 1000)
        model = holding(weight=torch.zeros(1000))
        ci.profile()
        ci.watch(model)
        for _ in ci.epochs(range(2)):
            pass
        ci.flush()

        assert (0, 2) == tuple(
            ci.health()[name] for name in ("snapshot_count", "snapshot_skip_count")
        )
        (warning,) = warnings(caplog)
        assert "might not fit in free memory" in warning

    def test_memory_is_used_again(self) -> None:
        """Epoch after epoch the same memory is copied into, and it goes with the session."""
        model = holding(weight=torch.zeros(1000))
        reader, copier = snapshot_torch.TorchReader(), host.HostCopier()

        def copy_of(one: nn.Module) -> Any:
            copies = copier.copy(reader.read(one, ""), raw=False, in_step=False)
            assert copies is not None
            assert 1 == len(copies)
            return copies[0]

        copier.prepare(reader.read(model, ""))
        (prepared,) = copier._free
        for _ in range(3):
            copy = copy_of(model)
            assert [] == copier._free
            copy.release()
            (again,) = copier._free
            assert prepared is again
        copy_of(nn.Linear(1, 1, bias=False).to("meta"))
        assert [] == copier._free  # the model is elsewhere now


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{name}.grad": parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


class TestKeptGradients:
    """A loop that clears its gradients right after the optimizer step."""

    def start(self, *models: nn.Module, mode: Any = "full") -> taker.Taker:
        ci.profile(snapshots=mode, frameworks=[])  # no hook keeps gradients beside the test
        for model in models:
            ci.watch(model)
        assert session._session is not None
        return session._session.taker

    def step(self, loop: Loop, scale: float = 1.0) -> dict[str, torch.Tensor]:
        loop.step((torch.ones(2, 4) * scale, torch.ones(2, 1)))
        return gradients(loop.model)

    @pytest.mark.parametrize("clear", ["before", "after", "after, to zero"])
    def test_either_order(self, clear: str) -> None:
        """The snapshot has the last step's gradients, whether they are cleared or still there."""
        loop = Loop()
        one = self.start(loop.model)
        for _ in ci.epochs(range(2)):
            for scale in (1.0, 2.0):
                expected = self.step(loop, scale)
                one.keep_gradients()
                if clear != "before":
                    loop.optimizer.zero_grad(set_to_none=clear == "after")

        if clear == "after, to zero":  # they are there, and what they are is recorded
            expected = {name: torch.zeros_like(value) for name, value in expected.items()}
        records = by_epoch()[1]
        assert WEIGHTS + GRADIENTS == list(records)
        assert all({} == record.attrs for record in records.values())
        for name, value in expected.items():
            assert torch.equal(value, raw_values(records[name]))
            assert pytest.approx(value.mean().item()) == records[name].stats.mean
        for name, parameter in loop.model.named_parameters():
            assert torch.equal(parameter, raw_values(records[name]))
        assert 1 == len({records[name].blob_uri for name in GRADIENTS})

    def test_gradients_that_are_as_they_were_are_copied_once(self) -> None:
        """What was kept and is unchanged is not copied again; the memory is the same each epoch."""
        loop = Loop()
        one = self.start(loop.model)
        ci.flush()
        assert one._host is not None
        memory = {id(buffer) for buffer in one._host._free}
        for _ in ci.epochs(range(3)):
            ci.flush()  # the worker has given the memory back
            self.step(loop)
            one.keep_gradients()
            one.keep_gradients()
        ci.flush()

        assert 2 == len(memory)
        assert memory == {id(buffer) for buffer in one._host._free}
        assert 3 == ci.health()["snapshot_count"]

    def test_a_later_gradient_wins(self) -> None:
        """Where the loop went on after the gradients were kept, the newest are recorded."""
        loop = Loop()
        one = self.start(loop.model)
        for _ in ci.epochs(range(1)):
            self.step(loop)
            one.keep_gradients()
            expected = self.step(loop, 3.0)
            expected["0.bias.grad"] = torch.zeros(8)
            for name, parameter in loop.model.named_parameters():
                if name == "0.bias":
                    assert parameter.grad is not None
                    parameter.grad.zero_()

        records = by_epoch()[0]
        assert WEIGHTS + GRADIENTS == list(records)
        for name, value in expected.items():
            assert torch.equal(value, raw_values(records[name]))

    def test_some_are_cleared(self) -> None:
        """Kept and newer gradients of one model are recorded side by side, once each."""
        loop = Loop()
        one = self.start(loop.model)
        for _ in ci.epochs(range(1)):
            expected = self.step(loop)
            one.keep_gradients()
            first, last = loop.model[0], loop.model[2]  # type: ignore[index]
            first.zero_grad()
            last.weight.grad.mul_(2)

        expected["2.weight.grad"] *= 2
        records = by_epoch()[0]
        assert sorted(WEIGHTS + GRADIENTS) == sorted(records)
        for name, value in expected.items():
            assert torch.equal(value, raw_values(records[name]))

    def test_they_are_of_one_epoch(self) -> None:
        """Gradients that were kept in one epoch are not in the next, which says it has none."""
        loop = Loop()
        one = self.start(loop.model)
        for index in ci.epochs(range(2)):
            self.step(loop)
            if index == 0:
                one.keep_gradients()
            loop.optimizer.zero_grad()

        found = by_epoch()
        assert [WEIGHTS + GRADIENTS, WEIGHTS] == [list(records) for records in found.values()]
        assert all({"no_gradient": True} == record.attrs for record in found[1].values())

    def test_a_weight_that_has_none(self) -> None:
        """Among weights with gradients, one that nothing was backpropagated to says so."""
        model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
        one = self.start(model, mode="stats")
        for _ in ci.epochs(range(1)):
            model[0](torch.ones(2)).backward()
            one.keep_gradients()
            model.zero_grad()

        records = by_epoch()[0]
        assert ["0.weight", "1.weight", "0.weight.grad"] == list(records)
        assert ({}, {"no_gradient": True}) == tuple(
            records[f"{number}.weight"].attrs for number in range(2)
        )

    def test_two_models_that_take_turns(self) -> None:
        """What was kept of one model stays when only the other has gradients."""
        first, second = Loop(), Loop()
        one = self.start(first.model, second.model)
        for _ in ci.epochs(range(1)):
            for loop in (first, second):
                self.step(loop)
                one.keep_gradients()
                loop.optimizer.zero_grad()

        names = WEIGHTS + [f"Sequential.{name}" for name in WEIGHTS]
        assert sorted([*names, *(f"{name}.grad" for name in names)]) == sorted(by_epoch()[0])

    def test_no_model_is_watched(self) -> None:
        """Without a watched model nothing is read, and no thread starts."""
        loop = Loop()
        one = self.start()
        self.step(loop)
        one.keep_gradients()

        assert None is one._thread

    def test_what_is_alive_after(self) -> None:
        """What is kept holds no gradient of the program's, and the span says the time it took."""
        loop = Loop()
        one = self.start(loop.model)
        gone = []
        for _ in ci.epochs(range(1)):
            self.step(loop)
            gone = [weakref.ref(parameter.grad) for parameter in loop.model.parameters()]
            one.keep_gradients()
            keeping_ns = one._keeping_ns
            loop.optimizer.zero_grad()
            gc.collect()

            assert [None] * 4 == [reference() for reference in gone]
        _, epochs = recorded()
        (span,) = epochs.values()
        assert span.attrs["snapshot_ns"] > keeping_ns > 0

    def test_no_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where there is no memory to keep them, the records of the weights say so."""
        loop = Loop()
        one = self.start(loop.model)
        ci.flush()
        for _ in ci.epochs(range(1)):
            self.step(loop)
            with monkeypatch.context() as patch:
                patch.setattr(host, "has_room", lambda size, kept: False)
                one.keep_gradients()
            loop.optimizer.zero_grad()

        assert WEIGHTS == list(by_epoch()[0])


class TestClearedBeforeTheBoundary:
    """Loops whose last step only shows afterwards, and that clear the gradients in each."""

    def train(self, batches: Any) -> list[dict[str, torch.Tensor]]:
        """The gradients of each step."""
        found = []
        for batch in batches:
            self.loop.step(batch)
            found.append(gradients(self.loop.model))
            self.loop.optimizer.zero_grad()
        return found

    def start(self, **settings: Any) -> None:
        self.loop = Loop()
        ci.Cirron(**settings).profile(snapshots="full")
        ci.watch(self.loop.model)

    def check(self, *expected: dict[str, torch.Tensor]) -> None:
        for its, records in zip(expected, by_epoch().values(), strict=True):
            assert WEIGHTS + list(its) == list(records)
            assert all(torch.equal(its[name], raw_values(records[name])) for name in its)

    def test_as_many_steps_as_in_the_epoch_before(self) -> None:
        """Without a loader, or without its length, an epoch is taken to be as long as the last."""
        self.start()
        found = []
        for index in ci.epochs(range(4)):
            steps = 3 if index < 3 else 2
            found.append(self.train(Numbers(steps)))

        self.check({}, found[1][-1], found[2][-1], {})

    def test_an_endless_loader(self) -> None:
        """Epochs of a loader without a length are as long as the settings say."""
        self.start(steps_per_epoch=4)
        found = self.train(DataLoader(Numbers(10), batch_size=None))

        self.check(found[3], found[7], {})  # nothing says that the last one ends early


class Numbers(IterableDataset[Any]):
    """Items without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.count):
            yield torch.randn(2, 4), torch.randn(2, 1)


# -- tensors of all kinds --------------------------------------------------------------------

KINDS = {
    "float64": torch.linspace(-1, 1, 37, dtype=torch.float64),
    "float16": torch.linspace(-1, 1, 37, dtype=torch.float16),
    "bfloat16": torch.linspace(-1, 1, 37, dtype=torch.bfloat16),
    "float8_e4m3fn": torch.linspace(-4, 4, 37).to(torch.float8_e4m3fn),
    "float8_e5m2": torch.linspace(-4, 4, 37).to(torch.float8_e5m2),
    "int8": torch.arange(-20, 17, dtype=torch.int8),
    "uint8": torch.arange(37, dtype=torch.uint8),
    "int16": torch.arange(37, dtype=torch.int16),
    "int32": torch.arange(37, dtype=torch.int32),
    "int64": torch.arange(37) * 2**50,
    "uint16": torch.arange(37).to(torch.uint16),
    "bool": torch.arange(37) % 3 == 0,
}


class TestKinds:
    @pytest.mark.parametrize("dtype", KINDS)
    def test_types(self, dtype: str) -> None:
        """Numbers of every type are measured as they are, and read back bit for bit."""
        given = KINDS[dtype]
        record = of_one(holding(weight=given.clone()), "full")["weight"]

        values = given.double().numpy()
        assert (dtype, [37], {"frozen": True}) == (record.dtype, record.shape, record.attrs)
        assert pytest.approx(values.mean()) == record.stats.mean
        assert (values.min(), values.max()) == (record.stats.min, record.stats.max)
        assert np.histogram(values, 16)[0].tolist() == record.stats.histogram.counts
        saved = raw_values(record)
        assert given.dtype is saved.dtype
        assert torch.equal(given.view(torch.uint8), saved.view(torch.uint8))

    @pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
    def test_complex(self, dtype: torch.dtype) -> None:
        """Complex numbers are measured by their parts, and saved: the larger ones as parts."""
        given = torch.randn(3, 4, dtype=dtype)
        record = of_one(holding(weight=given.clone(), back=given.clone().mT.conj()), "full")[
            "weight"
        ]

        parts = torch.view_as_real(given).numpy()
        assert ([3, 4], str(dtype).removeprefix("torch.")) == (record.shape, record.dtype)
        assert "real and the imaginary parts" in record.attrs["parts"]
        assert pytest.approx(parts.mean()) == record.stats.mean
        assert 24 == sum(record.stats.histogram.counts)
        saved = raw_values(record)
        expected = given if dtype is torch.complex64 else torch.view_as_real(given)
        assert torch.equal(expected, saved)

    def test_complex_behind_others(self) -> None:
        """A complex tensor is saved wherever it lies among real ones of its precision."""
        given = torch.randn(3, 2, dtype=torch.complex64)
        tensors = {"odd": torch.ones(3), "weight": given, "back": given.mT, "one": given[0]}
        records = of_one(holding(**{k: v.clone() for k, v in tensors.items()}), "full")

        assert set(tensors) == set(records)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, raw_values(records[name]))

    def test_empty_and_scalar(self) -> None:
        """An empty tensor has no statistics, a scalar its own value, and both are saved."""
        records = of_one(holding(empty=torch.zeros(0, 5), scalar=torch.tensor(2.5)), "full")

        empty, scalar = records["empty"], records["scalar"]
        assert ([0, 5], None, None) == (empty.shape, empty.stats.mean, empty.stats.norm)
        assert ([], 2.5, 2.5) == (scalar.shape, scalar.stats.mean, scalar.stats.norm)
        assert (0, 5) == raw_values(empty).shape
        assert torch.equal(torch.tensor(2.5), raw_values(scalar))

    def test_without_values(self) -> None:
        """Meta tensors, and lazy ones before their first call, are named and said to have none."""
        model = nn.Sequential(nn.Linear(2, 3, device="meta"), nn.LazyLinear(4), nn.Linear(2, 1))
        records = of_one(model, "full")

        assert "a meta tensor has no values" == records["0.weight"].attrs["unmeasured"]
        assert ([3, 2], None) == (records["0.weight"].shape, records["0.weight"].stats.mean)
        assert "it is not initialized yet" == records["1.weight"].attrs["unmeasured"]
        assert "unmeasured" not in records["2.weight"].attrs
        assert {"2.weight", "2.bias"} == set(load_file(str(blob(records["2.weight"]))))
        assert {"2.weight", "2.bias"} == {name for name in records if records[name].blob_uri}

    def test_nothing_but_tensors_without_values(self) -> None:
        """Where no tensor has values there is no file of them."""
        records = of_one(nn.Linear(2, 3, device="meta"), "full")

        assert [None, None] == [record.blob_uri for record in records.values()]
        assert [] == list(Path(".cirron").glob("snapshots/*/*"))

    def test_a_tensor_made_of_others(self) -> None:
        """A tensor subclass that only holds other tensors is named, and said to have no values."""
        from torch.testing._internal.two_tensor import TwoTensor

        records = of_one(holding(two=TwoTensor(torch.ones(2), torch.ones(2)), one=torch.ones(2)))

        assert "a TwoTensor consists of other tensors" == records["two"].attrs["unmeasured"]
        assert (1.0, None) == (records["one"].stats.mean, records["two"].stats.mean)

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
    def test_an_odd_tensor_takes_nothing_from_the_others(self) -> None:
        """A tensor that cannot be read says why in its record, and the others are measured."""

        class Refusing(torch.Tensor):
            @classmethod
            def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
                raise RuntimeError("not me")

        class Overriding(torch.Tensor):
            @classmethod
            def __torch_function__(cls, function: Any, *_: Any) -> Any:
                raise RuntimeError("nor me")

        odd = {
            "refusing": torch.Tensor._make_wrapper_subclass(Refusing, (3,)),
            "overriding": torch.ones(3).as_subclass(Overriding),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "negative": torch.tensor([1 + 2j])
            .conj()
            .imag,  # a view that is negated when it is read
        }
        model = nn.Linear(2, 2)
        model._parameters.update(odd)  # type: ignore[arg-type]
        records = of_one(model)

        assert ["weight", "bias", *odd] == list(records)
        assert (
            "it could not be read: RuntimeError('not me')"
            == (records["refusing"].attrs["unmeasured"])
        )
        assert "its values are not in one piece" == records["nested"].attrs["unmeasured"]
        assert (1.0, -2.0) == (records["overriding"].stats.mean, records["negative"].stats.mean)
        assert None is not records["weight"].stats.mean

    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
    def test_packed_and_sparse_weights(self) -> None:
        """Packed types have no numbers; of a compressed sparse tensor the stored ones are taken."""
        packed = torch.ones(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        sparse = torch.tensor([[0.0, 2.0], [0.0, 0.0]]).to_sparse_csr()
        records = of_one(holding(packed=packed, sparse=sparse, one=torch.ones(2)), "full")

        assert "its values are packed" == records["packed"].attrs["unmeasured"]
        assert ([1], 2.0) == (records["sparse"].shape, records["sparse"].stats.mean)
        assert [2, 2] == records["sparse"].attrs["stored_values_of"]
        assert {"one", "sparse"} == set(load_file(blob(records["one"])))

    @pytest.mark.parametrize(
        "given",
        [
            torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            torch.randn(6, 4).t(),
            torch.randn(10, 10)[2:7, ::3],
            torch.randn(3, 1).expand(3, 4).clone(memory_format=torch.preserve_format),
            torch.randn(2, 1, 3).permute(2, 0, 1),
        ],
        ids=["channels_last", "transposed", "strided", "expanded", "permuted"],
    )
    def test_memory_in_any_order(self, given: torch.Tensor) -> None:
        """A tensor that does not lie in its own order is read, and saved, in it."""
        record = of_one(holding(weight=given), "full")["weight"]

        assert list(given.shape) == record.shape
        assert pytest.approx(given.double().mean().item()) == record.stats.mean
        assert torch.equal(given, raw_values(record))

    def test_an_expanded_gradient(self) -> None:
        """A gradient whose elements share memory is read element by element."""
        model = nn.Linear(4, 2, bias=False)
        model.weight.grad = torch.full((1, 1), 3.0).expand(2, 4)
        record = of_one(model, "full")["weight.grad"]

        assert (8, 3.0) == (sum(record.stats.histogram.counts), record.stats.mean)
        assert torch.equal(torch.full((2, 4), 3.0), raw_values(record))

    def test_a_sparse_gradient(self) -> None:
        """Of the gradient of a sparse embedding the stored values are taken, and it is said so."""
        model = nn.Embedding(100, 3, sparse=True)
        model(torch.tensor([7, 7, 9])).sum().backward()
        record = of_one(model, "full")["weight.grad"]

        assert ([2, 3], [100, 3]) == (record.shape, record.attrs["stored_values_of"])
        assert (1.0, 2.0) == (record.stats.min, record.stats.max)
        assert torch.equal(torch.tensor([[2.0] * 3, [1.0] * 3]), raw_values(record))

    def test_shared_and_frozen(self) -> None:
        """A shared parameter is there once, and names the others; flags say what it has not."""
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        model[1].bias.requires_grad_(False)
        records = of_one(model)

        assert ["0.weight", "0.bias", "1.weight", "1.bias", "2.bias"] == list(records)
        expected = {"shared_with": ["2.weight"], "no_gradient": True}
        assert expected == records["0.weight"].attrs
        assert {"frozen": True} == records["1.bias"].attrs

    def test_not_finite(self, caplog: pytest.LogCaptureFixture) -> None:
        """NaN and infinity are counted, left out of the statistics, and said once."""
        given = torch.tensor([1.0, math.nan, math.inf, -math.inf, 3.0, math.nan])
        record = of_one(holding(weight=given), "full")["weight"]

        counts = {"nonfinite_count": 4, "nan_count": 2, "inf_count": 2}
        assert {"frozen": True, **counts} == record.attrs
        assert (2.0, 1.0, 3.0) == (record.stats.mean, record.stats.min, record.stats.max)
        assert 2 == sum(record.stats.histogram.counts)
        assert torch.equal(given.isnan(), raw_values(record).isnan())
        (warning,) = warnings(caplog)
        assert "not finite: weight, since epoch 0: 4 of 6 values" in warning

    def test_many_tensors_of_many_types(self) -> None:
        """Tensors of different types lie in different copies, and none is taken for another."""
        given = {
            f"{dtype}_{number}": (KINDS[dtype].double() + number).to(KINDS[dtype].dtype)
            for number in range(4)
            for dtype in ("float64", "bfloat16", "int32", "float16")
        }
        records = of_one(holding(**{name: value.clone() for name, value in given.items()}), "full")

        assert set(given) == set(records)
        for name, value in given.items():
            expected = stats.summarize(value.double().numpy())
            assert expected.stats.histogram == records[name].stats.histogram
            assert torch.equal(value, raw_values(records[name]))


def blob(record: wire.Snapshot) -> Path:
    assert record.blob_uri is not None
    return Path(urllib.parse.unquote(urllib.parse.urlsplit(record.blob_uri).path))


# -- models of all kinds ---------------------------------------------------------------------


class TestModels:
    @pytest.mark.parametrize("kind", ["compiled", "data parallel", "both", "inner", "checkpointed"])
    def test_wrappers(self, kind: str) -> None:
        """Names are those of the user's own model, whatever it is wrapped in."""
        model: Any = Loop().model
        if kind in ("data parallel", "both"):
            model = nn.DataParallel(model)
        if kind in ("compiled", "both"):
            model = torch.compile(model, backend="eager")
        if kind == "inner":
            model[0] = torch.compile(model[0], backend="eager")
        if kind == "checkpointed":
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
                checkpoint_wrapper,
            )

            model[2] = checkpoint_wrapper(model[2])

        assert WEIGHTS == list(of_one(model))

    def test_names_like_a_wrappers(self) -> None:
        """Only whole parts of a name are a wrapper's."""
        model = nn.Module()
        model.my_orig_mod = nn.Linear(1, 1)

        assert ["my_orig_mod.weight", "my_orig_mod.bias"] == list(of_one(model))

    def test_a_compiled_model_that_trains(self) -> None:
        """A model that is compiled is taken as the plain one is, without a recompile."""
        loop = Loop()
        compiled: Any = torch.compile(loop.model, backend="eager")
        ci.profile()
        ci.watch(compiled)
        ci.watch(loop.model)
        loop.model = compiled
        torch._dynamo.config.error_on_recompile, before = (
            True,
            torch._dynamo.config.error_on_recompile,
        )
        try:
            for _ in range(3):
                for batch in loader_of():
                    loop.step(batch)
        finally:
            torch._dynamo.config.error_on_recompile = before

        assert [WEIGHTS + GRADIENTS] * 3 == [list(records) for records in by_epoch().values()]

    def test_two_models(self) -> None:
        """A GAN's two models are both taken, and names that both have are kept apart."""

        class Generator(nn.Sequential):
            pass

        class Critic(nn.Sequential):
            pass

        generator, critic = Generator(nn.Linear(2, 2)), Critic(nn.Linear(2, 1), nn.Linear(1, 1))
        ci.profile(snapshots="full")
        ci.watch(generator)
        ci.watch(critic)
        for _ in ci.epochs(range(2)):
            pass

        names = [
            "0.weight",
            "0.bias",
            *(f"Critic.{n}" for n in ["0.weight", "0.bias", "1.weight", "1.bias"]),
        ]
        found = by_epoch()
        assert [names] * 2 == [list(records) for records in found.values()]
        for records in found.values():
            assert 1 == len({record.blob_uri for record in records.values()})
            saved = load_file(str(blob(records["0.weight"])))
            assert set(names) == set(saved)
            assert torch.equal(critic.state_dict()["0.weight"], saved["Critic.0.weight"])

    def test_a_model_that_grows(self) -> None:
        """Parameters that come and go during training are taken while they are there."""
        model = nn.Sequential(nn.Linear(2, 2, bias=False))
        ci.profile()
        ci.watch(model)
        for index in ci.epochs(range(3)):
            if index == 1:
                model.append(nn.Linear(100, 100, bias=False))
            if index == 2:
                del model[0]

        assert [["0.weight"], ["0.weight", "1.weight"], ["0.weight"]] == [
            list(records) for records in by_epoch().values()
        ]
        assert [100, 100] == by_epoch()[2]["0.weight"].shape

    def test_a_model_that_names_its_parameters_itself(self) -> None:
        """A `named_parameters` of the user's, as older code has it, is not asked."""

        class Old(nn.Linear):
            def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
                return super().named_parameters(prefix, recurse)

        assert ["weight", "bias"] == list(of_one(Old(2, 2)))

    def test_a_model_without_parameters(self) -> None:
        """A model that has nothing to take is no problem."""
        ci.profile()
        ci.watch(nn.ReLU())
        model = nn.ReLU()
        ci.watch(model)
        for _ in ci.epochs(range(2)):
            pass
        ci.flush()

        assert {} == by_epoch()
        assert {} == ci.health()["errors"]

    @pytest.mark.parametrize("kind", ["modules", "attributes"])
    def test_a_model_that_objects(
        self, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A model that cannot be read warns once and is counted; training and others go on."""
        monkeypatch.setattr(guard, "strict", False)

        class Objects(nn.Linear):
            is_closed = False

            def named_modules(self, *args: Any, **kwargs: Any) -> Any:
                if self.is_closed and kind == "modules":
                    raise PermissionError("no")
                return super().named_modules(*args, **kwargs)

            def __getattribute__(self, name: str) -> Any:
                if kind == "attributes" and type(self).is_closed and name[:1] != "_":
                    raise PermissionError(name)
                return super().__getattribute__(name)

        other, model = Loop(), Objects(1, 1)
        ci.profile()
        ci.watch(model)
        ci.watch(other.model)
        Objects.is_closed = True
        late = Objects(1, 1) if kind == "modules" else model
        ci.watch(late)
        for _ in ci.epochs(range(3)):
            for batch in loader_of():
                other.step(batch)

        assert [WEIGHTS + GRADIENTS] * 3 == [list(records) for records in by_epoch().values()]
        errors = ci.health()["errors"]
        assert ["snapshot: PermissionError"] == list(errors)
        assert errors["snapshot: PermissionError"] >= 3
        assert 1 == sum("internal error in snapshot" in text for text in warnings(caplog))
        Objects.is_closed = False


# -- raw values and where they go ------------------------------------------------------------


class TestRawValues:
    def test_full(self) -> None:
        """An epoch has a file of weights and one of gradients, under its span, by record name."""
        loop = Loop()
        ci.profile(snapshots="full")
        ci.watch(loop.model)
        for batch in loader_of():
            loop.step(batch)

        run, epochs = recorded()
        (span,) = epochs.values()
        folder = Path(".cirron/snapshots") / span.id
        assert ["gradients.safetensors", "weights.safetensors"] == sorted(os.listdir(folder))
        weights, gradients = (
            load_file(folder / f"{k}.safetensors") for k in ("weights", "gradients")
        )
        assert set(WEIGHTS) == set(weights)
        assert set(GRADIENTS) == set(gradients)
        for name, parameter in loop.model.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(parameter, weights[name])
            assert torch.equal(parameter.grad, gradients[f"{name}.grad"])
        assert {"full"} == {record.mode for record in run.snapshots}
        assert {
            folder.absolute().as_uri() + f"/{k}.safetensors" for k in ("weights", "gradients")
        } == {record.blob_uri for record in run.snapshots}

    def test_sampled(self) -> None:
        """A rate of 1 keeps every epoch, of 0 none; both have statistics."""
        model = holding(weight=torch.ones(2))
        for rate, kept in ((1.0, 3), (0.0, 0)):
            ci.profile(snapshots="sampled", sample_rate=rate, path=f"rate-{rate}")
            ci.watch(model)
            for _ in ci.epochs(range(3)):
                pass
            ci.shutdown()
            run = spools.read_one(Path(f"rate-{rate}"))

            assert ["sampled"] * 3 == [record.mode for record in run.snapshots]
            assert kept == sum(record.blob_uri is not None for record in run.snapshots)
            assert kept == len(list(Path(f"rate-{rate}").glob("snapshots/*/*")))

    def test_stats(self) -> None:
        """Statistics alone leave no folder of raw values."""
        assert None is of_one(holding(weight=torch.ones(2)))["weight"].blob_uri
        assert not Path(".cirron/snapshots").exists()

    def test_a_path_with_odd_characters(self) -> None:
        """The address of a file is a URI that any reader understands."""
        model = holding(weight=torch.ones(2))
        ci.profile(snapshots="full", path="a folder/ü#%20?")
        ci.watch(model)
        for _ in ci.epochs(range(1)):
            pass
        ci.shutdown()

        run = spools.read_one(Path("a folder/ü#%20?"))
        assert torch.equal(torch.ones(2), raw_values(run.snapshots[0]))

    def test_no_output(self) -> None:
        """With `output="none"` nothing is written anywhere."""
        model = holding(weight=torch.ones(2))
        ci.profile(snapshots="full", output="none")
        ci.watch(model)
        for _ in ci.epochs(range(2)):
            pass
        ci.flush()

        assert 2 == ci.health()["snapshot_count"]
        assert [] == list(Path.cwd().iterdir())

    def test_large(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        """More than the limit in one epoch is one warning with bytes and parameters."""
        monkeypatch.setattr(snapshot_records, "LARGE_BYTES", 8000)
        model = nn.Linear(1000, 2)
        model(torch.ones(1000)).sum().backward()
        ci.profile(snapshots="full")
        ci.watch(model)
        for _ in ci.epochs(range(3)):
            pass
        ci.flush()

        (warning,) = warnings(caplog)
        assert "(16016 bytes, 2002 parameters)" in warning
        assert 6 == len(list(Path(".cirron").glob("snapshots/*/*.safetensors")))

    def test_over_http(self, server: Server) -> None:
        """Raw values are put under their keys, after the batch that names them."""
        model = holding(weight=torch.arange(5.0))
        ci.Cirron(api_key="secret", api_endpoint=server.url).profile(snapshots="full")
        ci.watch(model)
        for _ in ci.epochs(range(1)):
            pass
        ci.shutdown()

        run = spools.read_one(Path(".cirron"))
        (record,) = run.snapshots
        requests = [(method, path) for method, path, _ in server.requests]
        put = ("PUT", f"/api/traces/blobs/snapshots/{record.span_id}/weights.safetensors")
        assert 1 == requests.count(put)
        assert "POST" == requests[requests.index(put) - 1][0]
        assert blob(record).read_bytes() == server.requests[requests.index(put)][2]

    def test_over_the_event_stream(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A file of raw values is announced with its path and its key, after its batch."""
        monkeypatch.setenv("CIRRON_RUN_ID", "run")
        model = holding(weight=torch.arange(5.0))
        ci.profile(snapshots="full")
        ci.watch(model)
        for _ in ci.epochs(range(1)):
            pass
        ci.shutdown()

        events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        (announced,) = [e for e in events if e["__cirron_event__"] == "trace_blob"]
        batch = events[events.index(announced) - 1]
        (record,) = batch["payload"]["snapshots"]
        key = f"snapshots/{record['span_id']}/weights.safetensors"
        assert (str(Path(".cirron").absolute() / key), key) == (announced["path"], announced["key"])
        assert torch.equal(torch.arange(5.0), load_file(announced["path"])["weight"])


class Server:
    """Accepts everything, and keeps it."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, bytes]] = []
        requests = self.requests

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                requests.append((self.command, self.path, body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_PUT = do_POST  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


# -- training health -------------------------------------------------------------------------


class TestHealth:
    def marks(self) -> list[tuple[Any, ...]]:
        run, epochs = recorded()
        return [
            (epochs[mark.span_id].index, mark.attrs["problem"], name, since)
            for mark in run.marks
            if mark.name == "training_health"
            for name, since in zip(mark.attrs["tensors"], mark.attrs["sinces"], strict=True)
        ]

    def test_a_dead_layer(self, caplog: pytest.LogCaptureFixture) -> None:
        """A layer behind a ReLU that never fires is found dead, and well again when it recovers."""
        first, second = nn.Linear(4, 8), nn.Linear(8, 1)
        model = nn.Sequential(first, nn.ReLU(), second)
        ci.profile()
        ci.watch(model)
        for index in ci.epochs(range(4)):
            with torch.no_grad():
                first.weight.fill_(1.0)
                first.bias.fill_(-100.0 if index in (1, 2) else 0.0)
            model.zero_grad()
            model(torch.ones(3, 4)).sum().backward()

        dead = ("0.weight.grad", "0.bias.grad", "2.weight.grad")
        assert [
            *((1, "dead", name, 1) for name in dead),
            *((2, "dead", name, 1) for name in dead),
            *((3, "recovered", name, 1) for name in dead),
        ] == self.marks()
        (warning,) = warnings(caplog)
        assert "dead: 0.weight.grad, 0.bias.grad, 2.weight.grad, since epoch 1" in warning

    def test_a_second_dead_layer(self, caplog: pytest.LogCaptureFixture) -> None:
        """A layer that dies after another has its own warning, and its own epoch in the marks."""
        first, second = nn.Linear(2, 4), nn.Linear(4, 2)
        model = nn.Sequential(first, second)
        ci.profile()
        ci.watch(model)
        for index in ci.epochs(range(4)):
            model.zero_grad()
            model(torch.ones(3, 2)).sum().backward()
            for layer, dies in ((first, 1), (second, 2)):
                assert layer.weight.grad is not None
                if index >= dies:
                    layer.weight.grad.zero_()

        assert [
            (1, "dead", "0.weight.grad", 1),
            (2, "dead", "1.weight.grad", 2),
            (2, "dead", "0.weight.grad", 1),
            (3, "dead", "0.weight.grad", 1),
            (3, "dead", "1.weight.grad", 2),
        ] == self.marks()
        early, late = warnings(caplog)
        assert "dead: 0.weight.grad, since epoch 1:" in early
        assert "dead: 1.weight.grad, since epoch 2:" in late

    def test_cleared_gradients(self, caplog: pytest.LogCaptureFixture) -> None:
        """Gradients set to zero at the end of a step are no dead layers."""
        loop = Loop()
        ci.profile()
        ci.watch(loop.model)
        for _ in range(2):
            for batch in loader_of():
                loop.step(batch)
                loop.optimizer.zero_grad(set_to_none=False)

        assert {0.0} == {by_epoch()[1][name].stats.norm for name in GRADIENTS}
        assert [] == self.marks()
        assert [] == warnings(caplog)

    def test_one_of_two_models_is_cleared(self) -> None:
        """Cleared gradients of one model hide no dead layer of another, and heal none."""
        model, other = nn.Linear(8, 1), nn.Linear(8, 1)
        ci.profile()
        ci.watch(model)
        ci.watch(other)
        for index in ci.epochs(range(3)):
            for one in (model, other):
                one.zero_grad()
                one(torch.ones(8)).backward()
            assert model.weight.grad is not None
            model.weight.grad.zero_()
            other.zero_grad(set_to_none=False)
            if index == 1:
                model.zero_grad(set_to_none=False)

        assert [(0, "dead", "weight.grad", 0), (2, "dead", "weight.grad", 0)] == self.marks()

    def test_a_loss_that_explodes(self, caplog: pytest.LogCaptureFixture) -> None:
        """Gradients that leap, vanish, or turn NaN are found in the epoch in which they do."""
        model = nn.Linear(2, 1, bias=False)
        ci.profile()
        ci.watch(model)
        for scale in ci.epochs([1.0, 1.1, 0.9, 1e4, 1.0, 1e-6, math.nan]):
            model.zero_grad()
            (model(torch.ones(2)) * scale).sum().backward()

        assert [
            (3, "exploding", "weight.grad", 3),
            (4, "recovered", "weight.grad", 3),
            (5, "vanishing", "weight.grad", 5),
            (6, "not finite", "weight.grad", 6),
        ] == self.marks()
        assert ["exploding", "vanishing", "not finite"] == [
            text.split(": ")[2] for text in warnings(caplog)
        ]

    def test_a_training_that_is_well(self, caplog: pytest.LogCaptureFixture) -> None:
        """An ordinary training has no marks and no warnings."""
        torch.manual_seed(0)
        loop = Loop()
        ci.profile()
        ci.watch(loop.model)
        loader = loader_of(4)
        for _ in range(12):
            for batch in loader:
                loop.step(batch)

        assert [] == self.marks()
        assert [] == warnings(caplog)


# -- several ranks ---------------------------------------------------------------------------

RANKS = """
    import torch
    import torch.distributed as dist
    import cirron as ci

    ci.profile(snapshots="full")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    {wrap}
    ci.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
    sampler = torch.utils.data.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()
"""
WRAPS = {
    "DDP": "model = torch.nn.parallel.DistributedDataParallel(model)",
    "FSDP2": "from torch.distributed.fsdp import fully_shard; "
    "[fully_shard(part) for part in model if len(list(part.parameters()))]; fully_shard(model)",
}


@pytest.mark.parametrize("kind", WRAPS)
def test_two_ranks(tmp_path: Path, kind: str) -> None:
    """Each of two ranks takes its own part, under clean names, and says when it is a part."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(RANKS.format(wrap=WRAPS[kind])))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert 0 == done.returncode, done.stderr
    assert "internal error" not in done.stderr

    runs = spools.read(tmp_path / ".cirron")
    assert {0, 1} == {run.spans[0].rank for run in runs}
    sizes: dict[str, int] = {}
    for run in runs:
        epochs = {span.id for span in run.spans if span.name == "epoch"}
        assert 2 == len(epochs)
        assert epochs == {record.span_id for record in run.snapshots}
        for epoch in epochs:
            records = [record for record in run.snapshots if record.span_id == epoch]
            assert WEIGHTS + GRADIENTS == [record.tensor_name for record in records]
        for record in records:
            saved = raw_values(record)
            assert record.shape == list(saved.shape)
            if saved.numel():
                assert pytest.approx(saved.double().mean().item()) == record.stats.mean
            assert (kind == "FSDP2") is ("shard_of" in record.attrs)
            if kind == "FSDP2":
                assert ["S(0)"] == record.attrs["placements"]
                sizes[record.tensor_name] = sizes.get(record.tensor_name, 0) + saved.shape[0]
    if kind == "FSDP2":
        whole = {"0.weight": 8, "0.bias": 8, "2.weight": 1, "2.bias": 1}
        assert whole | {f"{name}.grad": size for name, size in whole.items()} == sizes


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="cirron")
