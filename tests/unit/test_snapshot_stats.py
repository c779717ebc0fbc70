"""The statistics of a tensor equal those of NumPy in double precision, whatever it holds."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cirron import wire
from cirron.snapshot import host, stats
from cirron.snapshot.host import Tensor

if TYPE_CHECKING:
    from pathlib import Path

NUMBERS = [
    "float16",
    "float32",
    "float64",
    "longdouble",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
]
EMPTY = [0] * stats.BINS


def check(values: Any) -> stats.Summary:
    """Compares the summary with what NumPy says of the finite values."""
    found = stats.summarize(values)
    numbers = values.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    assert numbers.size == found.size
    assert np.isnan(numbers).sum() == found.nan_count
    assert np.isinf(numbers).sum() == found.inf_count
    histogram = found.stats.histogram
    assert finite.size == sum(histogram.counts)
    assert sorted(histogram.bins) == histogram.bins
    if not finite.size:
        assert wire.Stats(None, None, None, None, None, histogram) == found.stats
        return found
    peak = np.abs(finite).max()
    near = {"rel": 1e-12, "abs": peak * 1e-13}
    assert finite.min() == found.stats.min
    assert finite.max() == found.stats.max
    assert pytest.approx(finite.mean(), **near) == found.stats.mean
    assert pytest.approx(finite.std(), **near) == found.stats.std
    assert pytest.approx(np.linalg.norm(finite), rel=1e-12) == found.stats.norm
    if finite.min() == finite.max() and peak > 2**50:  # no number is half a unit away from these
        return found
    try:
        counts, edges = np.histogram(finite, stats.BINS)
    except ValueError:  # NumPy has no bins where there are hardly any numbers between the extremes
        return found
    assert counts.tolist() == histogram.counts
    assert edges.tolist() == histogram.bins
    return found


ORDINARY = st.floats(-1e100, 1e100, allow_subnormal=False).filter(
    lambda number: number == 0 or abs(number) > 1e-100
)


@settings(max_examples=300, deadline=None)
@given(st.lists(ORDINARY | st.sampled_from([math.nan, math.inf, -math.inf]), max_size=80))
def test_statistics_are_those_of_numpy(numbers: list[float]) -> None:
    """Moments, extremes, norm and histogram of finite values are those of NumPy; others count."""
    check(np.array(numbers, dtype=np.float64))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-64, 64), min_size=1, max_size=80), st.integers(1, 7))
def test_values_on_the_edges_of_bins(numbers: list[int], divisor: int) -> None:
    """A value that is an edge is in the bin that NumPy puts it in."""
    check(np.array(numbers) / divisor)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(NUMBERS))
def test_every_numpy_type_is_measured(data: st.DataObject, dtype: str) -> None:
    """Every type of number that NumPy has is measured in double precision."""
    kind = np.dtype(dtype)
    if kind.kind == "f":
        element = st.floats(-6e4, 6e4, width=16) | st.sampled_from([math.nan, math.inf])
    elif kind.kind == "b":
        element = st.booleans()
    else:
        limits = np.iinfo(kind)
        element = st.integers(int(limits.min), int(limits.max))
    check(np.array(data.draw(st.lists(element, max_size=40)), dtype=kind))


@pytest.mark.parametrize("size", [1, 2, stats.BLOCK - 1, stats.BLOCK, stats.BLOCK + 1, 100_000])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_sizes_around_a_block(size: int, offset: float) -> None:
    """A tensor of several blocks has the statistics of the whole."""
    values = np.random.default_rng(size).normal(offset, 1e-3, size)
    values[::7] = np.nan
    check(values.astype(np.float32))


def test_a_block_that_is_not_finite_at_all() -> None:
    """A block of NaN among ordinary ones changes the counts and nothing else."""
    ordinary = np.linspace(-1, 2, 2 * stats.BLOCK)
    values = np.concatenate([ordinary, np.full(stats.BLOCK, np.nan), [np.inf, -np.inf]])
    found = check(values)

    assert (stats.BLOCK, 2) == (found.nan_count, found.inf_count)
    assert stats.summarize(ordinary).stats.histogram == found.stats.histogram


def test_a_constant_has_no_spread() -> None:
    """A constant has no spread, and is in the middle of a histogram of width 1, as in NumPy."""
    found = check(np.full(1000, 3.0, dtype=np.float32))

    assert 0 == found.stats.std
    assert (2.5, 3.5) == (found.stats.histogram.bins[0], found.stats.histogram.bins[-1])
    assert 1000 == found.stats.histogram.counts[8]


def test_an_empty_tensor_has_no_statistics() -> None:
    """An empty tensor has no statistics, and bins that are empty."""
    found = check(np.zeros(0))

    assert EMPTY == found.stats.histogram.counts
    assert not found.is_all_zero
    assert 0 == found.broken_count


def test_a_tensor_without_finite_values_has_counts_only() -> None:
    """A tensor of NaN and infinity has counts and no statistics."""
    found = check(np.array([math.nan, math.inf, -math.inf, -math.inf]))

    assert (1, 3) == (found.nan_count, found.inf_count)
    assert EMPTY == found.stats.histogram.counts
    assert 4 == found.broken_count


def test_a_single_value_is_its_mean_and_extremes() -> None:
    """A single value is its own mean and extreme."""
    found = check(np.array([-2.5]))

    assert (-2.5, -2.5, -2.5, 0, 2.5) == (
        found.stats.mean,
        found.stats.min,
        found.stats.max,
        found.stats.std,
        found.stats.norm,
    )


@pytest.mark.parametrize("scale", [1e-320, 1e-300, 1e-200, 1e-160, 1e160, 1e200, 1e300])
def test_squares_that_no_float_can_hold(scale: float) -> None:
    """Mean, spread and norm of huge and of tiny values are right, where their squares are not."""
    ordinary = np.random.default_rng(0).uniform(-4, 8, 100)
    expected, found = stats.summarize(ordinary), stats.summarize(ordinary * scale)
    near = 1e-3 if scale < 1e-310 else 1e-12  # the tiniest floats have few digits

    for name in ("mean", "std", "norm"):
        value = getattr(expected.stats, name) * scale
        assert pytest.approx(value, rel=near, abs=0) == getattr(found.stats, name)
    if scale > 1e-310:
        assert expected.stats.histogram.counts == found.stats.histogram.counts


def test_a_range_wider_than_the_largest_float() -> None:
    """From one end of the floats to the other there are still sixteen bins, and strict JSON."""
    found = stats.summarize(np.array([-1.7e308, -1e307, 1e307, 1.7e308]))

    assert [1, *[0] * 6, 1, 1, *[0] * 6, 1] == found.stats.histogram.counts
    assert all(math.isfinite(edge) for edge in found.stats.histogram.bins)
    assert pytest.approx(0, abs=1e295) == found.stats.mean
    assert None is found.stats.norm  # it is larger than any float


@pytest.mark.parametrize(
    ("values", "is_all_zero"),
    [([0, 0.0, -0.0], True), ([0, 1e-320], False), ([0, math.nan], False), ([], False)],
)
def test_all_zero_needs_finite_values(values: list[float], is_all_zero: bool) -> None:
    """A tensor is all zero when it has values, all are finite, and every one is 0."""
    assert is_all_zero is stats.summarize(np.array(values, dtype=np.float64)).is_all_zero


def test_a_type_that_is_decoded() -> None:
    """`decode` makes numbers of what NumPy has no type for, a block at a time."""
    table = np.array([0.0, 0.5, -2.0, np.nan])
    given = np.array([3, 0, 1, 2] * stats.BLOCK, dtype=np.uint8)
    found = stats.summarize(given, table.__getitem__)

    assert check(table[given])[1:] == found[1:]
    assert check(table[given]).stats == found.stats


def test_the_values_are_not_touched() -> None:
    """What is measured is as it was afterwards."""
    values = np.array([1e200, -3.0, np.nan])
    stats.summarize(values)

    assert [1e200, -3.0] == values[:2].tolist()


def test_nothing_is_said() -> None:
    """NumPy's warnings of overflow and NaN do not reach the program's output."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in ("float16", "float32", "float64"):
            limit = np.finfo(dtype).max
            stats.summarize(np.array([limit, -limit, np.nan, np.inf, -np.inf, 0], dtype=dtype))


class TestMemory:
    """How much a copy may take."""

    @pytest.fixture(autouse=True)
    def _files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host, "MEMINFO", tmp_path / "meminfo")
        monkeypatch.setattr(host, "CGROUP", tmp_path)

    def test_free_host_memory_is_what_linux_calls_available(self, tmp_path: Path) -> None:
        """What Linux calls available is."""
        (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 7 kB\n")

        assert 7 * 1024 == host.available_bytes()

    def test_free_container_memory_is_limit_minus_use(self, tmp_path: Path) -> None:
        """A container has its limit less what it uses; files that are kept in memory are no use."""
        (tmp_path / "meminfo").write_text("MemAvailable: 700 kB\n")
        (tmp_path / "memory.max").write_text("1000\n")
        (tmp_path / "memory.current").write_text("900\n")
        (tmp_path / "memory.stat").write_text("anon 200\ninactive_file 650\nactive_file 50\n")

        assert 750 == host.available_bytes()

    def test_a_container_without_a_limit(self, tmp_path: Path) -> None:
        """No limit is no bound."""
        (tmp_path / "meminfo").write_text("MemAvailable: 7 kB\n")
        (tmp_path / "memory.max").write_text("max\n")

        assert 7 * 1024 == host.available_bytes()

    def test_unknown_free_memory_is_no_bound(self) -> None:
        """Where there is no such file, nothing is known, and nothing is skipped."""
        assert math.inf == host.available_bytes()


def arrays(*sizes: int) -> list[Tensor]:
    return [
        Tensor(str(size), False, [size], "float32", {}, array=np.full(size, size, np.float32))
        for size in sizes
    ]


def test_memory_of_copies_is_used_again() -> None:
    """A copy goes into the smallest memory that is large enough; what is too small is let go."""
    copier = host.HostCopier()

    def copy(*sizes: int) -> host.Copy:
        copies = copier.copy(arrays(*sizes), raw=False, in_step=False)
        assert copies is not None
        return copies[0]

    weights = arrays(3, 144)
    weights[1].attrs["frozen"] = True  # it will have no gradient
    copier.prepare(weights)
    assert [640, 64] == [len(one) for one in copier._free]
    small = copier._free[-1]
    first, second = copy(3), copy(100, 3)
    assert [] == copier._free
    first.release()
    second.release()
    assert [640, 64] == [len(one) for one in copier._free]
    third = copy(100)

    assert [small.ctypes.data] == [one.ctypes.data for one in copier._free]
    assert [100.0] == [found.stats.mean for found in third.summaries()]
    copy(1000)
    assert [] == copier._free
