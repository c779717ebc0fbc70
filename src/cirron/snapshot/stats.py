"""Exact statistics of a tensor, block by block: pure reductions over NumPy arrays.

Two passes: the extremes first, which the histogram's bins need, then the moments and the counts.
A block stays in the processor's cache and is reduced in double precision; the blocks' means and
squared deviations are put together as Chan, Golub and LeVeque do, which loses nothing to the size
of the tensor. NumPy, because it uses one thread: torch's own reductions would take every core from
the training. What a device has measured by itself comes as the same rows.
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

# Where squares, and the sums of many, are still numbers of double precision.
TINY, HUGE = 1e-130, 1e130

# The columns of a row: what is known of one block of a tensor.
COUNT, NAN, POSITIVE_INF, NEGATIVE_INF, LOW, HIGH, MEAN, SQUARES = range(8)


class Summary(NamedTuple):
    """A tensor's statistics, and how many of its values were not finite."""

    stats: wire.Stats
    size: int
    nan_count: int
    inf_count: int

    @property
    def is_all_zero(self) -> bool:
        """Whether there are values and every one is 0."""
        return self.size > 0 and self.stats.min == self.stats.max == 0 and not self.is_broken

    @property
    def is_broken(self) -> bool:
        """Whether some values are NaN or infinite."""
        return self.nan_count + self.inf_count > 0


def summarize(values: Any, decode: Callable[[Any], Any] | None = None) -> Summary:
    """The summary of an array; `decode` makes numbers of a block that NumPy has no type for."""
    values = values.reshape(-1)
    if values.dtype.kind == "c":
        values = values.view(values.real.dtype)
    elif decode is None and values.dtype.isbuiltin != 1:  # of ml_dtypes: bfloat16, 8-bit floats
        decode = as_float32
    with np.errstate(all="ignore"):  # NaN and infinity are what we count, not news
        table = np.array([extremes(block) for block in blocks(values, decode)]).reshape(-1, 8)
        low, high = bounds(table)
        inner = np.array(histogram_edges(low, high)[1:-1])[:, None]
        unit = unit_of(low, high)
        counts = np.zeros(BINS, dtype=np.int64)
        for row, block in zip(table, blocks(values, decode), strict=True):
            if row[COUNT]:
                finite = block if row[COUNT] == block.size else block[np.isfinite(block)]
                numbers = finite.astype(np.float64)
                # One call of NumPy's for all edges: each hands the interpreter lock over.
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
    """A row without its moments. The extremes of a block tell at once whether it is all finite."""
    low, high = float(block.min()), float(block.max())
    if math.isfinite(low) and math.isfinite(high):
        return [block.size, 0, 0, 0, low, high, 0, 0]
    finite = block[np.isfinite(block)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (np.inf, -np.inf)
    nan, above = int(np.isnan(block).sum()), int((block == np.inf).sum())
    below = block.size - finite.size - nan - above
    return [finite.size, nan, above, below, low, high, 0, 0]


def bounds(table: Any) -> tuple[float, float]:
    """The lowest and the highest finite value; infinity and its opposite where there is none."""
    if not len(table):
        return np.inf, -np.inf
    return float(table[:, LOW].min()), float(table[:, HIGH].max())


def histogram_edges(low: float, high: float) -> list[float]:
    """As `numpy.histogram` has them: a constant is in the middle of a width of 1."""
    if low > high:
        low, high = 0.0, 1.0
    elif low == high:
        low, high = low - 0.5, high + 0.5
    step = (high / 2 - low / 2) / BINS  # halves: their difference is a number in any case
    return [low, *((low / 2 + edge * step) * 2 for edge in range(1, BINS)), high]


def unit_of(low: float, high: float) -> float:
    """What the moments are counted in: 1, or a power of two where squares under- or overflow."""
    peak = max(abs(low), abs(high))
    if low > high or peak == 0 or TINY < peak < HUGE:
        return 1.0
    return math.ldexp(1.0, math.frexp(peak)[1] - 1)


def combine(table: Any, counts: Any, unit: float = 1.0) -> Summary:
    """The summary of a tensor from the rows of its blocks and the counts of its bins."""
    count, nan, above, below = (int(one) for one in table[:, COUNT:LOW].sum(axis=0))
    inf = above + below
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
