"""Exact statistics of a tensor, block by block: pure reductions over NumPy arrays.

Two passes: first the extremes, which the histogram's bins need, then the moments and the counts. A
block fits in the CPU cache and is reduced in double precision. The means and squared deviations of
the blocks are combined with the method of Chan, Golub and LeVeque, which loses no precision in
large tensors. NumPy uses one thread; torch's reductions would take every core from the training.
Results of a GPU come as rows of the same format.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cirron import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BINS = 16
BLOCK = 32_768  # elements: 256 KiB in double precision

# Between these, squares and their sums neither underflow nor overflow.
TINY, HUGE = 1e-130, 1e130

# The columns of a row, which describes one block of a tensor: how many values are NaN or infinite,
# the extremes of the finite ones, how many there are, their mean and squared deviations.
COLUMNS = 7
NAN, INF, LOW, HIGH, COUNT, MEAN, SQUARES = range(COLUMNS)


class Summary(NamedTuple):
    """A tensor's statistics, and how many of its values are not finite."""

    stats: wire.Stats
    size: int
    nan_count: int
    inf_count: int

    @property
    def is_all_zero(self) -> bool:
        """Whether there are values and all are 0."""
        return self.stats.min == self.stats.max == 0 and not self.broken_count

    @property
    def broken_count(self) -> int:
        """How many values are NaN or infinite."""
        return self.nan_count + self.inf_count


def summarize(values: Any, decode: Callable[[Any], Any] | None = None) -> Summary:
    """The summary of an array; `decode` converts a block whose type NumPy does not have."""
    values = values.reshape(-1)
    if values.dtype.kind == "c":
        values = values.view(values.real.dtype)
    elif decode is None and values.dtype.isbuiltin != 1:  # ml_dtypes: bfloat16, 8-bit floats
        decode = as_float32
    with np.errstate(all="ignore"):  # NaN and infinity are expected
        rows = [extremes(block) for block in blocks(values, decode)]
        table = np.array(rows).reshape(-1, COLUMNS)
        low, high = bounds(table)
        inner = np.array(histogram_edges(low, high)[1:-1])[:, None]
        unit = unit_of(low, high)
        counts = np.zeros(BINS, dtype=np.int64)
        for row, block in zip(table, blocks(values, decode), strict=True):
            if row[COUNT]:
                finite = block if row[COUNT] == block.size else block[np.isfinite(block)]
                numbers = finite.astype(np.float64)
                # One call of NumPy for all edges, because each call may release the GIL.
                below = map(np.count_nonzero, np.less(numbers, inner))
                counts += np.diff([0, *below, numbers.size])
                if unit != 1:
                    numbers /= unit
                row[MEAN] = mean = numbers.mean()
                numbers -= mean
                row[SQUARES] = np.square(numbers, out=numbers).sum()
        return combine(table, counts, unit)


def blocks(values: Any, decode: Callable[[Any], Any] | None) -> Iterator[Any]:
    for first in range(0, values.size, BLOCK):
        block = values[first : first + BLOCK]
        yield block if decode is None else decode(block)


def as_float32(block: Any) -> Any:
    return block.astype(np.float32)


def extremes(block: Any) -> list[float]:
    """A row without its moments. If the extremes are finite, the whole block is."""
    low, high = float(block.min()), float(block.max())
    if math.isfinite(low) and math.isfinite(high):
        return [0, 0, low, high, block.size, 0, 0]
    finite = block[np.isfinite(block)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (np.inf, -np.inf)
    nan = int(np.isnan(block).sum())
    return [nan, block.size - finite.size - nan, low, high, finite.size, 0, 0]


def bounds(table: Any) -> tuple[float, float]:
    """The lowest and highest finite value; infinity and -infinity if there is none."""
    if not len(table):
        return np.inf, -np.inf
    return float(table[:, LOW].min()), float(table[:, HIGH].max())


def histogram_edges(low: float, high: float) -> list[float]:
    """The edges of `numpy.histogram`: a constant is in the middle of a range of width 1."""
    if low > high:
        low, high = 0.0, 1.0
    elif low == high:
        low, high = low - 0.5, high + 0.5
    step = (high / 2 - low / 2) / BINS  # halves, because `high - low` may overflow
    return [low, *((low / 2 + edge * step) * 2 for edge in range(1, BINS)), high]


def unit_of(low: float, high: float) -> float:
    """The unit of the moments: 1, or a power of two if squares would underflow or overflow."""
    peak = max(abs(low), abs(high))
    if low > high or peak == 0 or TINY < peak < HUGE:
        return 1.0
    return math.ldexp(1.0, math.frexp(peak)[1] - 1)


def combine(table: Any, counts: Any, unit: float = 1.0) -> Summary:
    """The summary of a tensor, from the rows of its blocks and the counts of its bins."""
    nan, inf, count = (int(table[:, column].sum()) for column in (NAN, INF, COUNT))
    low, high = bounds(table)
    histogram = wire.Histogram(histogram_edges(low, high), counts.astype(int).tolist())
    size = count + nan + inf
    if not count:
        return Summary(wire.Stats(None, None, None, None, None, histogram), size, nan, inf)
    with np.errstate(all="ignore"):
        mean = (table[:, MEAN] * (table[:, COUNT] / count)).sum()
        apart = np.square(table[:, MEAN] - mean) * table[:, COUNT]
        squares = (table[:, SQUARES] + apart).sum()
        stats = wire.Stats(
            mean=plain(mean * unit),
            std=plain(np.sqrt(squares / count) * unit),
            min=low,
            max=high,
            norm=plain(np.sqrt(squares + np.square(mean) * count) * unit),
            histogram=histogram,
        )
    return Summary(stats, size, nan, inf)


def plain(number: Any) -> float | None:
    """A float that JSON can hold, or None."""
    return float(number) if math.isfinite(number) else None
