"""memory-growth: memory goes up and does not stop.

The peaks of the steps, at least 2 in each quarter of them, or of the epochs, at least 4: the median
up by 1 % in each quarter, by 10 % and 64 MiB from the first to the last, and in the last by half of
the mean rise or more. The last step is left out: its memory may be that of the end, after the
program has let go of all. Of fewer than 20 steps it has to be up by half. No gain is given. Up by
half, it comes before all that is about speed: it will end the run.
"""

from __future__ import annotations

import itertools
from statistics import mean, median
from typing import TYPE_CHECKING

from cirron.verdict import facts as known
from cirron.verdict.findings import Abstained, Class, Finding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cirron.verdict.facts import Facts
    from cirron.verdict.rules import Judged

KIND: Class = "memory-growth"
MIN_STEPS, MIN_EPOCHS = 8, 4  # with a peak: two steps in each quarter, or an epoch
GROWTH, RISE = 0.10, 0.01
# Less may be ours: the records that are kept in memory take up to 32 MB, and as much waits.
MIN_GROWTH_BYTES = 64 * 2**20
URGENT = 0.5
MANY = 20  # steps with a peak; of fewer, which are seconds, a smaller growth is how a run begins
LASTING = 0.5  # of the mean rise: what settles rises less and less


def judge(facts: Facts) -> Judged:
    peaks = [(at, one.memory) for at, one in enumerate(facts.steps[:-1]) if one.memory is not None]
    what, least = "steps", MIN_STEPS
    if len(peaks) < MIN_STEPS:
        peaks = [(at, one) for at, (_, _, one) in enumerate(facts.epochs) if one is not None]
        what, least = "epochs", MIN_EPOCHS
    quarters = quarter(peaks)
    if min(map(len, quarters)) < least // 4:
        return Abstained(KIND, "memory was measured too few times")
    levels = [median(one) for one in quarters]
    rises = [after - before for before, after in itertools.pairwise(levels)]
    first = max(levels[0], 1)
    growth = GROWTH if what == "epochs" or len(peaks) >= MANY else URGENT
    if min(rises) < RISE * first or sum(rises) < max(growth * first, MIN_GROWTH_BYTES):
        return None
    if rises[-1] < LASTING * mean(rises):
        return None
    return Finding(
        KIND,
        "memory goes up and does not stop",
        None,
        None,
        "",
        [
            f"peak memory of {len(peaks)} {what}: {levels[0] / 2**20:.0f} MiB at first,"
            f" {levels[-1] / 2**20:.0f} MiB at last, up in each quarter"
        ],
        "something keeps what each step makes: losses in a list (use .item() or .detach()), graphs,"
        " growing caches",
        is_urgent=sum(rises) >= URGENT * first and len(facts.steps) >= known.MIN_STEPS,
    )


def quarter(peaks: Sequence[tuple[int, int]]) -> list[list[float]]:
    """The peaks in each quarter of the steps, those of each of its quarters as their median.

    They are taken by the clock: where the steps are slow, there are more of them.
    """
    cells: list[list[int]] = [[] for _ in range(16)]
    for at, memory in peaks:
        first, last = peaks[0][0], peaks[-1][0]
        cells[16 * (at - first) // (last - first + 1)].append(memory)
    return [[median(one) for one in cells[at : at + 4] if one] for at in range(0, 16, 4)]
