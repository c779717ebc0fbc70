"""PyTorch on a real GPU: time, memory, captures and ends. `bench/gpu.py` has the figures."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.spools import read_one
from torch import nn
from torch.utils.data import DataLoader

import cirron as ci

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.real.conftest import Scripts

    from cirron import wire

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

SECOND = 1_900_000_000  # cycles, about


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()


def train(network: nn.Module, batches: list[torch.Tensor] | None = None) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    items: Any = list(torch.ones(5, 8, 64, device="cuda")) if batches is None else batches
    for x in DataLoader(items, batch_size=None):
        loss = network(x).square().mean()
        ci.mark("loss", loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def recorded() -> dict[str, list[wire.Span]]:
    """What the session, which ends here, has left on disk, by name."""
    ci.shutdown()
    found: dict[str, list[wire.Span]] = {}
    for span in read_one(Path(".cirron")).spans:
        found.setdefault(span.name, []).append(span)
    return found


@contextlib.contextmanager
def without_synchronising() -> Iterator[None]:
    """Torch raises wherever it would wait for the device, on any thread."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, that the mode is a prototype
def test_nothing_synchronises() -> None:
    """Steps, marks of device values, `ci.flush()` and `ci.trace()` never wait for the device."""
    network = model()
    batches = list(torch.ones(5, 8, 64, device="cuda"))
    ci.profile()
    with without_synchronising():
        train(network, batches)
        peak = torch.cuda.max_memory_allocated()
        ci.flush()
        ci.trace(format="dict")
        lost = ci.health()["mark_drop_count"]
    spans = recorded()

    for name in ("epoch", "step", "forward", "backward", "optimizer_step"):
        assert None not in [span.gpu_ns for span in spans[name]], name
    assert [None] * 5 == [span.gpu_ns for span in spans["data_load"]]
    assert [peak] == [span.memory_peak_bytes for span in spans["epoch"]]
    assert (0, 5) == (lost, sum(len(span.mark_ids) for span in spans["step"]))


def test_the_time_is_the_devices() -> None:
    """A kernel that is issued in no time has its own time, and what is around it too."""
    torch.zeros(1, device="cuda")
    ci.profile()
    with ci.scope("outer"), ci.scope("inner"):
        torch.cuda._sleep(SECOND // 2)
    torch.cuda.synchronize()
    spans = recorded()
    (outer,), (inner,) = spans["outer"], spans["inner"]

    assert outer.gpu_ns is not None
    assert inner.gpu_ns is not None
    assert inner.end_ns is not None
    assert inner.end_ns - inner.start_ns < inner.gpu_ns <= outer.gpu_ns


def test_a_capture_while_times_are_asked_for() -> None:
    """A graph is captured and replayed with hooks in place, and other threads asking."""
    network = model()
    x = torch.ones(8, 64, device="cuda")
    ci.profile()
    train(network)
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            ci.trace(format="dict", last=1)

    asker = threading.Thread(target=ask)
    asker.start()
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        wanted = network(x).clone()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph), torch.no_grad(), ci.scope("capture"):
        found = network(x)
        ci.mark("lost", found.sum())
    with ci.scope("replay"):
        graph.replay()
    torch.cuda.synchronize()
    is_over.set()
    asker.join()
    spans = recorded()

    assert torch.equal(wanted, found)
    assert [None] == [span.gpu_ns for span in spans["capture"]]
    assert [None] != [span.gpu_ns for span in spans["replay"]]


def test_results_are_the_same() -> None:
    """Training gives the same weights with and without profiling."""
    plain, profiled = model(), model()
    train(plain)
    ci.profile(output="none")
    train(profiled)

    assert all(map(torch.equal, plain.parameters(), profiled.parameters()))


def test_an_exit_while_the_device_is_busy(scripts: Scripts) -> None:
    """A program that ends before the device is done has its spans, without that time."""
    ended = scripts.run(f"""
        import torch
        import cirron as ci

        torch.zeros(1, device="cuda")
        ci.profile()
        with ci.scope("done"):
            pass
        torch.cuda.synchronize()
        ci.flush()
        with ci.scope("busy"):
            torch.cuda._sleep({5 * SECOND})
    """)
    times = {span.name: span.gpu_ns is not None for span in scripts.session().spans}

    assert 0 == ended.status
    assert {"done": True, "busy": False, "cirron.session": False} == times


def test_a_device_that_fails(scripts: Scripts) -> None:
    """The program hears of a fault from torch, and nothing more of it from us."""
    ended = scripts.run("""
        import torch
        import cirron as ci

        ci.profile()
        x = torch.zeros(4, device="cuda")
        for _ in range(50):
            with ci.scope("before"):
                x + 1
        try:
            with ci.scope("fault"):
                x[torch.tensor([99], device="cuda")] + 1
                torch.cuda.synchronize()
        except RuntimeError:
            print("heard")
        with ci.scope("after"):
            pass
        print(ci.health()["errors"])
    """)

    assert (0, "heard\n{}\n") == (ended.status, ended.out)
    assert 1 == len(scripts.spans("after"))
    assert 0 == ended.err.count("CUDAEvent")
