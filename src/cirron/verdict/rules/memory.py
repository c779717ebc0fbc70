"""memory-growth: memory keeps growing.

The median of the steps' peaks (at least 2 in each quarter of the steps; else those of at least 4
epochs) grows by 1 % in each quarter, by 10 % and 64 MiB from the first quarter to the last, and in
the last quarter by at least half of the mean growth. With fewer than 20 peaks, it must grow by
half. The last step is left out: the program may have freed its memory by then. Memory that grows by
half will end the run, so it takes precedence over rules about speed, except over a compile storm
that explains it. There is no gain.
"""

from __future__ import annotations

import itertools
from statistics import mean, median
from typing import TYPE_CHECKING

from cirron.verdict import facts as known
from cirron.verdict.findings import Abstained, Class, Finding
from cirron.verdict.rules import compiling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cirron.verdict.facts import Facts
    from cirron.verdict.rules import Judged

KIND: Class = "memory-growth"
MIN_STEPS, MIN_EPOCHS = 8, 4  # with a peak: two steps in each quarter, or an epoch
GROWTH, RISE = 0.10, 0.01
# Cirron itself keeps up to 32 MB of records in memory, and as much may wait to be written.
MIN_GROWTH_BYTES = 64 * 2**20
URGENT = 0.5
MANY = 20  # steps with a peak; fewer cover seconds, in which every run grows at first
COMPILED_BYTES = 16 * 2**20  # of a compiled function: small ones take 2 to 4 MiB
LASTING = 0.5  # of the mean growth; memory that settles grows less and less


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
    if min(rises) < RISE * first or sum(rises) < max(GROWTH * first, MIN_GROWTH_BYTES):
        return None
    if rises[-1] < LASTING * mean(rises):
        return None
    if what == "steps" and len(peaks) < MANY and sum(rises) < URGENT * first:
        return Abstained(
            KIND,
            f"memory grew by {sum(rises) / 2**20:.0f} MiB, but in so short a time it may settle:"
            f" it was measured in {len(peaks)} steps, and {MANY} are needed",
        )
    # Compiled functions are kept: they are the growth if each would take no more than this.
    is_compiled = isinstance(compiling.judge(facts), Finding) and sum(
        rises
    ) <= COMPILED_BYTES * len(facts.compiles)
    return Finding(
        KIND,
        "memory keeps growing",
        None,
        None,
        "",
        [
            f"peak memory of {len(peaks)} {what}: {levels[0] / 2**20:.0f} MiB in the first quarter,"
            f" {levels[-1] / 2**20:.0f} MiB in the last, more in each"
        ],
        "compiled functions stay in memory: compile less often first"
        if is_compiled
        else "something keeps what each step creates: losses in a list (use .item() or .detach()),"
        " graphs, growing caches",
        is_urgent=sum(rises) >= URGENT * first
        and len(facts.steps) >= known.MIN_STEPS
        and not is_compiled,
    )


def quarter(peaks: Sequence[tuple[int, int]]) -> list[list[float]]:
    """The peaks in each quarter of the steps, as medians of four parts.

    Peaks are measured by the clock, so slow steps have more of them.
    """
    cells: list[list[int]] = [[] for _ in range(16)]
    for at, memory in peaks:
        first, last = peaks[0][0], peaks[-1][0]
        cells[16 * (at - first) // (last - first + 1)].append(memory)
    return [[median(one) for one in cells[at : at + 4] if one] for at in range(0, 16, 4)]
