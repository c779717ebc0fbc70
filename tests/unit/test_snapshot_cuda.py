"""What a device measures is what the host does: the same algorithm, run here on CPU tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cirron.snapshot import stats
from cirron.snapshot import torch as snapshot_torch

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and slabs are small, so that tensors span several, and several tensors share one."""
    monkeypatch.setattr(snapshot_torch, "ROW", 8)
    monkeypatch.setattr(snapshot_torch, "SLAB_ROWS", 4)


def check(flats: list[torch.Tensor]) -> None:
    measured = snapshot_torch.Measured(flats)
    measured.wait()
    found = list(measured.summaries())
    assert len(flats) == len(found)
    for flat, summary in zip(flats, found, strict=True):
        expected = stats.summarize(flat.double().numpy())
        assert expected[1:] == summary[1:]
        assert expected.stats.histogram == summary.stats.histogram
        assert (expected.stats.min, expected.stats.max) == (summary.stats.min, summary.stats.max)
        for name in ("mean", "std", "norm"):
            value = getattr(expected.stats, name)
            if value is None:
                assert None is getattr(summary.stats, name)
            else:
                peak = max(abs(expected.stats.min or 0), abs(expected.stats.max or 0))
                near = pytest.approx(value, rel=1e-11, abs=peak * 1e-13)
                assert near == getattr(summary.stats, name)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("sizes", [[1], [8], [9], [32], [33], [100], [1, 31, 32, 33, 7, 64, 8, 1]])
def test_sizes_around_rows_and_slabs(sizes: list[int], dtype: torch.dtype) -> None:
    """Tensors that begin and end anywhere in a slab, or span many, have their own statistics."""
    generator = torch.Generator().manual_seed(0)
    check([torch.randn(size, generator=generator).mul(size).to(dtype) for size in sizes])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_is_not_finite(dtype: torch.dtype) -> None:
    """NaN and infinity are counted for the tensor that has them; padding is counted for none."""
    nan, inf = math.nan, math.inf
    mixed = torch.tensor([1.0, nan, inf, -inf, 2.0, inf, nan, 4.0, -3.0], dtype=dtype)
    nothing = torch.tensor([nan, inf, -inf], dtype=dtype)
    ordinary = torch.arange(5, dtype=dtype)
    all_nan = torch.full((40,), nan, dtype=dtype)
    check([mixed, nothing, ordinary, all_nan])


def test_constants_and_zeros() -> None:
    """A constant has its bin in the middle, whatever the tensors beside it hold."""
    check([torch.full((20,), 3.0), torch.zeros(9), torch.full((1,), -1e30), torch.arange(50.0)])


SOME = st.floats(-1e4, 1e4, width=16) | st.sampled_from([math.nan, math.inf, -math.inf])


@settings(max_examples=60, deadline=None, suppress_health_check=[])
@given(st.data())
def test_device_and_host_statistics_agree(data: st.DataObject) -> None:
    """Whatever the tensors hold, the device and the host agree, edges of bins included."""
    dtype = data.draw(st.sampled_from(TYPES))
    tensors = st.lists(st.lists(SOME, min_size=1, max_size=70), min_size=1, max_size=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_torch, "ROW", data.draw(st.sampled_from([1, 3, 16])))
        patch.setattr(snapshot_torch, "SLAB_ROWS", data.draw(st.sampled_from([1, 2, 5])))
        check([torch.tensor(numbers, dtype=dtype) for numbers in data.draw(tensors)])


def test_the_sizes_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows and slabs as large as on a device, too."""
    monkeypatch.undo()
    generator = torch.Generator().manual_seed(0)
    check([torch.randn(size, generator=generator) for size in (3, 4096, 50_000)])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_raw_values_come_in_windows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is brought to the host in pieces is the whole, bit for bit."""

    class Stream:
        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(snapshot_torch, "WINDOW", 7)
    given = torch.randn(50).to(dtype)
    given[3] = math.nan
    there: Any = snapshot_torch.fetch(given, Stream())  # type: ignore[arg-type]

    assert given.dtype is there.dtype
    assert np.array_equal(given.view(torch.uint8).numpy(), there.view(torch.uint8).numpy())


@pytest.mark.parametrize("count", [1, 3])
def test_a_copy_has_memory_of_its_own(count: int) -> None:
    """What is copied on a device does not change with the tensors, be there one or many."""
    tensors = [torch.nn.Parameter(torch.full((2, 3), float(number))) for number in range(count)]
    with torch.no_grad():
        copy = snapshot_torch.flattened(tensors)
        for tensor in tensors:
            tensor.fill_(-1.0)

    assert [float(number) for number in range(count) for _ in range(6)] == copy.tolist()
