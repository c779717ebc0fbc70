"""memory-growth: memory goes up and does not stop.

The peaks of the steps, at least 8, or of the epochs, at least 4: the median up by 1 % in each
quarter, by 10 % and 64 MiB from the first quarter to the last, and in the last quarter by half of
the mean rise or more. The last step is left out: its memory may be that of the end, after the
program has let go of all. No gain is given. Up by half, it comes before all that is about speed: it
will end the run.
"""

from __future__ import annotations

import itertools
from statistics import mean, median
from typing import TYPE_CHECKING

from cirron.verdict import facts as known
from cirron.verdict.findings import Abstained, Class, Finding

if TYPE_CHECKING:
    from cirron.verdict.facts import Facts
    from cirron.verdict.rules import Judged

KIND: Class = "memory-growth"
MIN_STEPS, MIN_EPOCHS = 8, 4  # with a peak: two steps in each quarter, or an epoch
GROWTH, RISE = 0.10, 0.01
# Less may be ours: the records that are kept in memory take up to 32 MB, and as much waits.
MIN_GROWTH_BYTES = 64 * 2**20
URGENT = 0.5
LASTING = 0.5  # of the mean rise: what settles rises less and less


def judge(facts: Facts) -> Judged:
    peaks = [step.memory for step in facts.steps[:-1] if step.memory is not None]
    what = "steps"
    if len(peaks) < MIN_STEPS:
        peaks = [memory for _, _, memory in facts.epochs if memory is not None]
        what = "epochs"
    if len(peaks) < (MIN_STEPS if what == "steps" else MIN_EPOCHS):
        return Abstained(KIND, "memory was measured too few times")
    quarter = max(len(peaks) // 4, 1)
    levels = [median(peaks[at : at + quarter]) for at in range(0, 4 * quarter, quarter)]
    rises = [after - before for before, after in itertools.pairwise(levels)]
    first = max(levels[0], 1)
    if min(rises) < RISE * first or sum(rises) < max(GROWTH * first, MIN_GROWTH_BYTES):
        return None
    if rises[-1] < LASTING * mean(rises):
        return None
    return Finding(
        KIND,
        "memory goes up and does not stop",
        None,
        None,
        [
            f"peak memory of {len(peaks)} {what}: {levels[0] / 2**20:.0f} MiB at first,"
            f" {levels[-1] / 2**20:.0f} MiB at last, up in each quarter"
        ],
        "something keeps what each step makes: losses in a list (use .item() or .detach()), graphs,"
        " growing caches",
        is_urgent=sum(rises) >= URGENT * first and len(facts.steps) >= known.MIN_STEPS,
    )
