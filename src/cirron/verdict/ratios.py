"""Whether a phase has become slower, and by how much: pure statistics.

The estimate is the ratio of medians. Its interval comes from a seeded bootstrap that draws runs,
ranks and blocks of consecutive steps, because neighbouring steps are not independent. Few runs say
little about the noise between runs, so each draw adds a minimum of it; a change of all phases at
once is attributed to the machine, and so is a wait for a CPU. The false discovery rate over all
names is held at 5 % (Benjamini and Hochberg).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from statistics import NormalDist, median, quantiles, stdev, variance
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

SEED = 20_260_101
DRAWS = 200
LEVEL = 0.05
# The deviation of medians between runs of a program on a quiet machine.
RUN_NOISE = 0.007
# With fewer runs on a side, the noise between runs is unknown. Then it is this, plus:
LEAST_NOISE = 0.0055
FEW_RUNS = 3
# - the difference between the parts of a run beyond chance (this many times its variance);
PARTS = 4
BY_CHANCE = 3.0
# - if the other phases have moved by this many deviations, the effect of the machine, up to:
MOVED = 2.5
MOST_NOISE = 0.2
MOST_NOISE_NS = 100_000
# - for a name without other phases to compare with, and for phases of microseconds:
LONE_NOISE = 0.03
FLOOR_NS = 3_000
# - a run that waited for a CPU for a share s of its time takes log 1 / (1 - s) longer as a whole.
#   This part of it was seen in the medians of phases. Short waits do not move a median.
STARVED_NOISE = 0.7
HARMLESS = 0.05
#   From a hidden factor of two on, phases are unknown if the step is.
CROWDED_NOISE = math.log(2) / 2
# Without a significant change, the outcome is `same` if the interval is within this.
CLOSE = 0.05
MIN_PART = 5  # spans
WHOLE = ("step", "batch")  # the other names are parts of these

Outcome = Literal["slower", "faster", "same", "unknown"]


# The durations of one name: runs, their ranks, and the spans of each in order.
Runs: TypeAlias = "list[list[list[int]]]"


@dataclass(frozen=True)
class Change:
    """The change of one span name."""

    name: str
    before_ns: float
    after_ns: float
    ratio: float
    low: float
    high: float
    p: float
    spans: tuple[int, int]
    outcome: Outcome


@dataclass(frozen=True)
class Estimate:
    """The estimate for one span name, before it is compared with other names."""

    name: str
    before_ns: float
    after_ns: float
    spread: float  # standard deviation of the log ratio
    drift: float  # deviation between the parts of a run beyond chance
    freedom: float
    spans: tuple[int, int]
    has_few_runs: bool

    @property
    def log(self) -> float:
        return math.log(max(self.after_ns, 1.0) / max(self.before_ns, 1.0))


def compare(name: str, old: Runs, new: Runs) -> Estimate:
    """The medians of both sides, and the uncertainty of their ratio."""
    draw = random.Random(f"{SEED} {name}")  # noqa: S311  not a secret
    noise, freedom = between(old, new)
    noise *= math.sqrt(1 / len(old) + 1 / len(new))
    spread = stdev(
        math.log(max(drawn(draw, new), 1.0) / max(drawn(draw, old), 1.0)) + draw.gauss(0, noise)
        for _ in range(DRAWS)
    )
    counts = [sum(len(rank) for run in side for rank in run) for side in (old, new)]
    return Estimate(
        name,
        middle(old),
        middle(new),
        spread or 1e-12,
        drift([rank for side in (old, new) for run in side for rank in run]),
        freedom,
        spans=(counts[0], counts[1]),
        has_few_runs=max(len(old), len(new)) < FEW_RUNS,
    )


def drift(ranks: list[list[int]]) -> float:
    """The deviation between the medians of a run's parts, beyond chance."""
    seen, by_chance = [], []
    for walls in ranks:
        size = len(walls) // PARTS
        if size >= MIN_PART:
            parts = [median(walls[at * size : (at + 1) * size]) for at in range(PARTS)]
            seen.append(variance(math.log(max(one, 1.0)) for one in parts))
            low, _, high = (max(one, 1.0) for one in quantiles(walls, n=4))
            # The variance of the median of normal values, with quartiles 1.35 deviations apart.
            by_chance.append((1.25 * math.log(high / low) / 1.35) ** 2 / size)
    return math.sqrt(max(sum(seen) - BY_CHANCE * sum(by_chance), 0.0) / max(len(seen), 1))


def between(*sides: Runs) -> tuple[float, float]:
    """The noise between runs of a program, and the degrees of freedom of a comparison.

    The noise is that of a quiet machine, unless three runs of a side differ by more than twice
    that. Then the runs set the degrees of freedom, else the blocks of steps.
    """
    blocks = sum(len(rank) / block_of(rank) for side in sides for run in side for rank in run)
    freedom = max(blocks - 2, 2.0)
    seen = [
        stdev(math.log(max(middle([run]), 1.0)) for run in side)
        for side in sides
        if len(side) >= FEW_RUNS
    ]
    if not seen:
        return LEAST_NOISE, freedom
    if max(seen) <= 2 * RUN_NOISE:
        return RUN_NOISE, freedom
    return max(seen), max(min(freedom, sum(map(len, sides)) - len(sides)), 2.0)


def chance(t: float, freedom: float) -> float:
    """The two-sided p-value of Student's distribution, by Wallace's approximation."""
    z = math.sqrt(freedom * math.log1p(t * t / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
    return math.erfc(z / 2**0.5)


def quantile(p: float, freedom: float) -> float:
    """Student's quantile, by the same approximation: 4 % too large for 2 degrees of freedom."""
    z = NormalDist().inv_cdf(p) * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(z * z / freedom))


def block_of(rank: list[int]) -> int:
    """The number of consecutive steps in a block."""
    return max(math.isqrt(len(rank)), 1)


def middle(side: Runs) -> float:
    return float(median(wall for run in side for rank in run for wall in rank))


def drawn(draw: random.Random, side: Runs) -> float:
    """The median of one draw of runs, ranks and blocks of steps."""
    walls: list[int] = []
    for _ in side:
        run = draw.choice(side)
        for _ in run:
            rank = draw.choice(run)
            size = block_of(rank)
            for _ in range(-(-len(rank) // size)):
                at = draw.randrange(max(len(rank) - size, 0) + 1)
                walls += rank[at : at + size]
    return float(median(walls)) if walls else 1.0


def starvation(before: Sequence[float], after: Sequence[float]) -> float:
    """What a busy machine adds to the deviation, given the share that each run waited for a CPU.

    Three runs on a side show their own noise: then only waits longer than theirs count.
    """
    sides = [
        [-STARVED_NOISE * math.log1p(-min(max(share - HARMLESS, 0.0), 0.99)) for share in side]
        for side in (before, after)
    ]
    few = [side for side in sides if len(side) < FEW_RUNS]
    if len(few) == len(sides):
        return math.hypot(*(math.hypot(*side) / len(side) for side in sides))
    known = max(max(side) for side in sides if len(side) >= FEW_RUNS)
    return max([0.0, *(one - known for side in few for one in side)])


def judge(found: list[Estimate], starved: float = 0.0) -> list[Change]:
    """Decides which changes are significant, at a limited false discovery rate.

    `starved` is added to all deviations: see `starvation`. If it hides a change by a factor of two,
    and the step may have changed, too, the machine may have changed any part of it.
    """
    spreads = [math.hypot(widened(one, found), starved) for one in found]
    chances = [
        chance(one.log / spread, one.freedom) for one, spread in zip(found, spreads, strict=True)
    ]
    allowed = max(
        (p for place, p in enumerate(sorted(chances), 1) if p <= LEVEL * place / len(chances)),
        default=-1.0,
    )
    judged = []
    for one, spread, p in zip(found, spreads, chances, strict=True):
        half = spread * quantile(1 - LEVEL / 2, one.freedom)
        low, high = math.exp(one.log - half), math.exp(one.log + half)
        outcome: Outcome = "same" if low > 1 - CLOSE and high < 1 + CLOSE else "unknown"
        if p <= allowed:
            outcome = "slower" if one.log > 0 else "faster"
        ratio = one.after_ns / max(one.before_ns, 1.0)
        judged.append(
            Change(one.name, one.before_ns, one.after_ns, ratio, low, high, p, one.spans, outcome)
        )
    unclear = any(one.name in WHOLE and one.outcome == "unknown" for one in judged)
    if unclear and starved >= CROWDED_NOISE:
        judged = [replace(one, outcome="unknown") for one in judged]
    return sorted(judged, key=lambda one: -abs(math.log(max(one.ratio, 1e-9))))


def widened(one: Estimate, found: Sequence[Estimate]) -> float:
    """The deviation of a name's ratio, including the effect of the machine seen in other names.

    A change in the program affects some phases. A slower machine affects all of them: by a share of
    their time, or, with cold caches, by some microseconds each, which is much for a short phase. So
    if the other phases have moved, a phase must move by more than they did.
    """
    spread, before_ns = one.spread, max(one.before_ns, 1.0)
    others = [each for each in found if each.name not in (one.name, *WHOLE)]
    if one.has_few_runs:
        noise = math.hypot(one.drift, FLOOR_NS / before_ns, 0 if others else LONE_NOISE)
        spread = math.hypot(spread, noise * 2**0.5)
        if root_mean_square([each.log / each.spread for each in others]) > MOVED:
            share = weighted_median([(abs(each.log), each.before_ns) for each in others])
            moved_ns = root_mean_square([each.log * each.before_ns for each in others])
            spread = math.hypot(
                spread, min(share, MOST_NOISE), min(moved_ns, MOST_NOISE_NS) / before_ns
            )
    if one.name not in WHOLE:
        return spread
    # Noise in all phases adds up in the step.
    return max(spread, sum(widened(each, found) * each.before_ns for each in others) / before_ns)


def root_mean_square(values: list[float]) -> float:
    return math.hypot(*values) / math.sqrt(max(len(values), 1))


def weighted_median(values: list[tuple[float, float]]) -> float:
    """The median of pairs of a value and its weight."""
    left = sum(weight for _, weight in values) / 2
    return next(one for one, weight in sorted(values) if (left := left - weight) <= 0)
