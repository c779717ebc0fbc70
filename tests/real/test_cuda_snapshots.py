"""Snapshots of models on a GPU. Skipped where there is none; `bench/results/` has a run."""

from __future__ import annotations

import glob
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

import cirron as ci
from cirron import session
from cirron.snapshot import stats
from cirron.snapshot import torch as snapshot_torch

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def device() -> Iterator[torch.device]:
    yield torch.device("cuda")
    torch.cuda.set_sync_debug_mode("default")
    torch.use_deterministic_algorithms(False)


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randn(size, generator=generator).mul(scale).to(dtype)
        for size, scale in [(10, 1.0), (4096, 2.0), (5000, 3.0), (1, 1.0), (9_000_000, 1e-3)]
    ]
    made[2][3:7] = torch.tensor([float("nan"), float("inf"), float("-inf"), float("inf")])
    return [*made, torch.zeros(7, dtype=dtype), torch.full((5,), float("nan"), dtype=dtype)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_gpu_measures_what_the_host_does(
    device: torch.device, dtype: torch.dtype, deterministic: bool
) -> None:
    """Statistics from the device equal those of NumPy, with no wait for the device meanwhile."""
    given = tensors(dtype)
    there = [tensor.to(device) for tensor in given]
    torch.use_deterministic_algorithms(deterministic)
    torch.cuda.set_sync_debug_mode("error")
    measured = snapshot_torch.Measured(there)
    measured.wait()
    torch.cuda.set_sync_debug_mode("default")
    for tensor, found in zip(given, measured.summaries(), strict=True):
        expected = stats.summarize(tensor.double().numpy())

        assert expected.stats.histogram.counts == found.stats.histogram.counts
        assert expected[1:] == found[1:]
        for name in ("mean", "std", "min", "max", "norm"):
            value = getattr(expected.stats, name)
            near = pytest.approx(value, rel=1e-12, abs=1e-15) if value is not None else None
            assert near == getattr(found.stats, name)


def train(model: torch.nn.Module, epochs: int = 3) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(16, 8, device="cuda")
    for _ in ci.epochs(range(epochs)):
        for batch in ci.batches(data.split(4)):
            optimizer.zero_grad(set_to_none=False)
            model(batch).square().mean().backward()
            optimizer.step()
    return {name: value.cpu() for name, value in model.state_dict().items()}


def snapshots() -> list[dict[str, Any]]:
    batches = [json.loads(path.read_text()) for path in Path(".cirron/spool").glob("*.json")]
    return [record for batch in batches for record in batch["snapshots"]]


@pytest.mark.parametrize("room", ["enough", "none"])
def test_raw_values_are_those_of_the_boundary(
    device: torch.device,
    room: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is saved is what the model held, whether or not a copy fits; results are the same."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    first = {name: value.clone() for name, value in model.state_dict().items()}
    plain = train(model.to(device))
    model.load_state_dict(first)
    if room == "none":
        monkeypatch.setattr(snapshot_torch, "has_room", lambda device, size_bytes: False)
    ci.profile(snapshots="full")
    ci.watch(model)
    profiled = train(model)
    ci.shutdown()

    assert all(torch.equal(plain[name], profiled[name]) for name in plain)
    last = max(snapshots(), key=lambda record: record["ts_ns"])["span_id"]
    saved = load_file(f".cirron/snapshots/{last}/weights.safetensors")
    assert set(saved) == set(profiled)
    assert all(torch.equal(saved[name], profiled[name]) for name in saved)
    for record in snapshots():
        if record["span_id"] == last and not record["tensor_name"].endswith(".grad"):
            expected = stats.summarize(profiled[record["tensor_name"]].flatten().numpy())
            assert expected.stats.mean == pytest.approx(record["stats"]["mean"])
            assert expected.stats.histogram.counts == record["stats"]["histogram"]["counts"]


def test_nothing_waits_for_the_device(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A boundary with a snapshot passes torch's own check for synchronisation."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(8, 8).to(device)
    train(model, epochs=1)
    ci.profile(snapshots="stats")
    ci.watch(model)
    torch.cuda.set_sync_debug_mode("error")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.ones(4, 8, device=device)
    for _ in ci.epochs(range(5)):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    ci.flush()
    torch.cuda.set_sync_debug_mode("default")

    assert 5 == ci.health()["snapshot_count"]
    ci.shutdown()


@pytest.mark.parametrize("case", ["kept", "no room", "captured"])
def test_gradients_that_the_loop_clears(
    device: torch.device, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept without a wait for the device, or the weight's record says there are none."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(8, 8).to(device)
    data = torch.ones(4, 8, device=device)
    model(data).square().mean().backward()  # the libraries are loaded
    model.zero_grad()
    ci.profile(snapshots="full", frameworks=[])
    ci.watch(model)
    ci.flush()
    assert session._session is not None
    keep = session._session.taker.keep_gradients
    for _ in ci.epochs(range(1)):
        model(data).square().mean().backward()
        assert model.weight.grad is not None
        expected = model.weight.grad.cpu()
        with monkeypatch.context() as patch:
            if case == "no room":
                patch.setattr(snapshot_torch, "has_room", lambda device, size_bytes: False)
            if case == "captured":
                patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            torch.cuda.set_sync_debug_mode("error")
            keep()
            torch.cuda.set_sync_debug_mode("default")
        model.weight.grad.fill_(-1.0)
        model.zero_grad()
    ci.shutdown()

    found = {record["tensor_name"]: record for record in snapshots()}
    if case != "kept":
        assert {"weight", "bias"} == set(found)
        assert {"no_gradient": True} == found["weight"]["attrs"] == found["bias"]["attrs"]
        return
    assert {"weight", "bias", "weight.grad", "bias.grad"} == set(found)
    assert {} == found["weight"]["attrs"] == found["bias"]["attrs"]
    assert expected.double().mean().item() == pytest.approx(found["weight.grad"]["stats"]["mean"])
    (path,) = glob.glob(".cirron/snapshots/*/gradients.safetensors")
    assert torch.equal(expected, load_file(path)["weight.grad"])


def test_odd_types_are_saved_as_they_are(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integers, float8 and complex numbers on a GPU come back bit for bit."""
    monkeypatch.chdir(tmp_path)

    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = {
                "whole": torch.tensor([2**60 + 1, -3]),
                "small": torch.randn(5).to(torch.float8_e4m3fn),
                "both": torch.randn(3, dtype=torch.complex64),
                "last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            }
            for name, value in made.items():
                setattr(self, name, torch.nn.Parameter(value.to(device), requires_grad=False))

    model = Odd()
    ci.profile(snapshots="full")
    ci.watch(model)
    for _ in ci.epochs(range(1)):
        pass
    ci.shutdown()

    (path,) = glob.glob(".cirron/snapshots/*/weights.safetensors")
    saved = load_file(path)
    for name, value in model.named_parameters():
        assert value.shape == saved[name].shape
        expected, found = (t.cpu().contiguous().flatten() for t in (value, saved[name]))
        assert torch.equal(expected.view(torch.uint8), found.view(torch.uint8)), name


def test_a_graph_is_captured_while_the_worker_measures(device: torch.device) -> None:
    """What the worker asks of the driver does not end a capture that goes on meanwhile."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(20))).to(device)
    data = torch.ones(8, 1024, device=device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        expected = model(data)
    stream.synchronize()
    ci.profile(snapshots="full")
    ci.watch(model)
    for _ in ci.epochs(range(3)):
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            output = model(data)
        graph.replay()
        torch.cuda.synchronize()

        assert torch.equal(expected, output)
    for _ in range(20):  # the worker is busy with the last epoch now
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            output = model(data)
    ci.flush()

    assert 3 == ci.health()["snapshot_count"] + ci.health()["snapshot_skip_count"]
