"""slow-rank: ranks wait for a late one, which is always the same or changes.

In data-parallel training, all ranks wait for the last one in a collective. Their steps take the
same time, and the slow rank waits least. So phases are compared, in their order: data_load,
forward, time in no phase, optimizer. A delay comes before the wait that it causes, so the cause is
in the first phase in which the ranks differ. Backward is left out because it contains the
collectives: a delay there looks the same on all ranks.

The slowest rank of that phase must take 10 % of a step more than the mean of the others, in the
median step. It is one slow rank if a binomial test of "same rank last" (times the number of ranks
and phases) gives less than 1 in 1,000; else the ranks take turns. The gain is a replay in which the
slow rank takes the mean of the others, or all ranks take the mean of all. A rank that is late in
forward, with more data or a slower machine, is late in backward too: there is no gain.
"""

from __future__ import annotations

import math
from collections import Counter
from operator import add
from statistics import mean, median
from typing import TYPE_CHECKING, NamedTuple

from cirron.verdict.findings import Abstained, Class, Finding, Prediction
from cirron.verdict.rules import Judged, ms, percent
from cirron.verdict.whatif import without

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cirron.verdict.facts import Facts, RankStep

KIND: Class = "slow-rank"
MIN_COMPARED = 20
CHANCE = 1e-3
LATE = 0.10  # of a step
# In their order in a step, with their names in the account.
PHASES = {
    "data_load": "data_load",
    "forward": "forward",
    "own": "in no phase",
    "optimizer": "optimizer_step",
}
LOCAL = ("data_load", "forward")  # before the collectives


class Lag(NamedTuple):
    """How the ranks differ in one phase."""

    phase: str
    late: float  # ns, median
    slowest: int  # the rank that is slowest most often
    times: int
    chance: float  # of being slowest so often

    @property
    def where(self) -> str:
        return "outside the phases" if self.phase == "own" else f"in {PHASES[self.phase]}"


def judge(facts: Facts) -> Judged:
    steps = together(facts.ranks)
    if not facts.ranks:
        return None
    if len(steps) < MIN_COMPARED:
        return Abstained(
            KIND, f"the ranks have {len(steps)} steps in common; {MIN_COMPARED} are needed"
        )
    usual = median(max(one.wall for one in ranks) for ranks in steps)
    for phase in PHASES:
        lag = compare(steps, phase)
        if lag.late > LATE * usual:
            found = persistent if lag.chance < CHANCE else rotating
            return found(facts, steps, lag, usual)
    return Abstained(
        KIND,
        "no rank is late outside backward; inside it, this rule cannot tell: all ranks wait there",
    )


def together(rows: Sequence[RankStep]) -> list[list[RankStep]]:
    """The steps that all of several ranks have, one row per rank."""
    found: dict[tuple[int | None, int | None], list[RankStep]] = {}
    for one in rows:
        found.setdefault((one.epoch, one.number), []).append(one)
    world = len({one.rank for one in rows})
    return [ranks for ranks in found.values() if len(ranks) == world > 1]


def compare(steps: Sequence[Sequence[RankStep]], phase: str) -> Lag:
    """Which rank is slowest in a phase, how often, and by how much."""
    longest: Counter[int] = Counter()
    lates = []
    world = len(steps[0])
    for ranks in steps:
        took = sorted((getattr(one, phase) or 0, one.rank) for one in ranks)
        longest[took[-1][1]] += 1
        lates.append(took[-1][0] - mean(one for one, _ in took[:-1]))
    slowest, times = longest.most_common(1)[0]
    chance = tail(times, len(steps), 1 / world) * world * len(PHASES)
    return Lag(phase, median(lates), slowest, times, min(chance, 1.0))


def predict(
    facts: Facts, steps: Sequence[Sequence[RankStep]], phase: str, is_persistent: bool
) -> Prediction:
    if phase == "forward":
        return Prediction(None, "the rank may be late in backward too, where all wait")
    return without(facts, saved(steps, phase, is_persistent) * facts.window_ns)


def saved(steps: Sequence[Sequence[RankStep]], phase: str, is_persistent: bool) -> float:
    """The share of the steps' time that is saved if the ranks reach the collective together.

    The last rank sets the time, before and after. One slow rank becomes as fast as the mean of the
    others. If ranks take turns, all take the mean of all: the work is spread, not saved.
    """
    less = walls = 0.0
    for ranks in steps:
        took = [float(getattr(one, phase) or 0) for one in ranks]
        rest = [sum(getattr(one, name) or 0 for name in LOCAL if name != phase) for one in ranks]
        late = took.index(max(took))
        others = [*took[:late], *took[late + 1 :]] if is_persistent else took
        level = mean(others)
        mended = [level if at == late or not is_persistent else one for at, one in enumerate(took)]
        less += max(map(add, took, rest)) - max(map(add, mended, rest))
        walls += max(one.wall for one in ranks)
    return max(less / walls, 0.0)


def persistent(
    facts: Facts, steps: Sequence[Sequence[RankStep]], lag: Lag, usual: float
) -> Finding:
    name, world = PHASES[lag.phase], len(steps[0])
    times = percent(lag.times / len(steps))
    return Finding(
        KIND,
        f"rank {lag.slowest} slows the others down",
        lag.late / usual,
        *predict(facts, steps, lag.phase, is_persistent=True),
        [
            f"rank {lag.slowest} is the slowest {lag.where} in {times} of {len(steps)} steps"
            f" (by chance: {percent(1 / world)}; p < {CHANCE})",
            f"it takes {ms(lag.late)} longer there than the others; a step takes {ms(usual)}",
        ],
        f"check its machine and its share of the data: cirron show --rank {lag.slowest}",
        name,
    )


def rotating(facts: Facts, steps: Sequence[Sequence[RankStep]], lag: Lag, usual: float) -> Finding:
    name = PHASES[lag.phase]
    return Finding(
        KIND,
        "the ranks slow each other down in turn",
        lag.late / usual,
        *predict(facts, steps, lag.phase, is_persistent=False),
        [
            f"in each step some rank takes {ms(lag.late)} longer than the others {lag.where}; a"
            f" step takes {ms(usual)}",
            f"no rank is slowest more often than by chance (rank {lag.slowest}:"
            f" {percent(lag.times / len(steps))} of {len(steps)} steps)",
        ],
        "give all ranks the same work in each step: batches of equal length (bucketing, packing),"
        " the same number of samples; no machine is to blame",
        name,
    )


def tail(successes: int, trials: int, p: float) -> float:
    """The probability of at least this many successes."""
    total = 0.0
    for count in range(successes, trials + 1):
        total += math.exp(
            math.lgamma(trials + 1)
            - math.lgamma(count + 1)
            - math.lgamma(trials - count + 1)
            + count * math.log(p)
            + (trials - count) * math.log1p(-p)
        )
        if total > 1:
            return 1.0
    return total
