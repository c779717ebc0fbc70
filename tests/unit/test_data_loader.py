"""`ci.batches` over a torch DataLoader: how long the loop waited for data."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import cirron as ci
from cirron import testing

LOAD_S = 0.01


class Slow(Dataset[Any]):
    """Takes a known time for each item."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(LOAD_S)
        return torch.tensor(float(index))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(4.0))


def waits(recorded: testing.Captured) -> list[int]:
    return [span.attrs["data_load_ns"] for span in recorded.spans]


def test_waiting_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch has the time that the loader took for it, and not the time of the body."""
    clock = testing.FakeClock(tick_ns=0)
    monkeypatch.setattr(time, "sleep", clock.advance)
    loader = DataLoader(Slow(), batch_size=2)
    with testing.capture(clock) as recorded:
        for _ in ci.batches(loader):
            clock.advance(0.5)

    assert [2 * LOAD_S * 1e9] * 3 == waits(recorded)
    assert [0.5e9] * 3 == [(span.end_ns or 0) - span.start_ns for span in recorded.spans]


def test_with_real_time() -> None:
    """With the real clock the time is that of the loader, give or take."""
    ci.profile(output="none")
    for _ in ci.batches(DataLoader(Slow(), batch_size=2)):
        pass
    batches = ci.trace(format="dict", name="batch")["roots"]
    found = [batch["attrs"]["data_load_ns"] for batch in batches]

    assert 3 == len(found)
    assert all(2 * LOAD_S * 1e9 <= wait < 5e9 for wait in found)


def test_batches_are_the_loader_s_own() -> None:
    """The values and the length are those of the loader."""
    loader = DataLoader(Slow(), batch_size=4)
    with testing.capture():
        wrapped = ci.batches(loader)

        assert len(loader) == len(wrapped)  # type: ignore[arg-type]
        assert [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0]] == [batch.tolist() for batch in wrapped]


def test_subclasses_and_streams() -> None:
    """A subclass of DataLoader and an iterable dataset are measured as well."""

    class Mine(DataLoader[Any]):
        pass

    with testing.capture() as recorded:
        for _ in ci.batches(Mine(Stream(), batch_size=2)):
            pass

    assert 2 == len(waits(recorded))


def test_epochs_measure_nothing() -> None:
    """Only `ci.batches` measures."""
    with testing.capture() as recorded:
        for _ in ci.epochs(DataLoader(Slow(), batch_size=6)):
            pass

    assert [{}] == [span.attrs for span in recorded.spans]


@pytest.mark.parametrize("iterable", [range(3), [1, 2], iter("ab"), torch.arange(3)])
def test_other_iterables_have_no_such_attribute(iterable: Any) -> None:
    """A plain iterable has no data_load_ns."""
    with testing.capture() as recorded:
        for _ in ci.batches(iterable):
            pass

    assert [{}] * len(recorded.spans) == [span.attrs for span in recorded.spans]
    assert recorded.spans


def test_torch_is_not_imported() -> None:
    """Whoever loops without torch does not get it imported."""
    script = (
        "import sys, cirron as ci\n"
        "ci.profile(output='none')\n"
        "for epoch in ci.epochs(range(2)):\n"
        "    for batch in ci.batches([1, 2]):\n"
        "        ci.mark('loss', 0.5)\n"
        "ci.trace(format='dict'); ci.flush(); ci.shutdown()\n"
        "print([m for m in ('torch', 'numpy', 'jax', 'pandas') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert "[]" == result.stdout.strip()
