"""uneven-steps: some steps take much longer than the others, for no reason that another rule names.

A step is long if its work (without data loading, evaluations, checkpoints and compilations) takes
more than three times the median. Of the long steps, those count that are at least half as long as
the ones that make up half of the time. It is a finding if there are 3 or more of them, and they
take 10 % of the window beyond the median. One or two steps that are longer than all others are
ignored. The gain is the time beyond the median.

The rule abstains if the steps have no period and the training waited for a CPU for half of that
time, or there are fewer than 100 steps; and if the long steps run more forward passes: a GAN, or an
RL agent, does so by design.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from cirron.verdict import facts as known
from cirron.verdict.findings import Abstained, Class, Finding
from cirron.verdict.rules import ISSUED, STARVED, Judged, ms, percent, period_of, repeated, unclear
from cirron.verdict.whatif import without

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cirron.verdict.facts import Facts

KIND: Class = "uneven-steps"
MIN_STEPS = 100  # without a period
RATIO = 3.0
SHARE = 0.10
PASSES = 1.5  # times the usual number of forward passes: these steps do more by design
REST = "in no phase"
PARTS = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer_step",
    "own": REST,
}
# Usual causes, if the extra time is in a phase, and if it is not.
CAUSES = (
    "an evaluation, longer samples or larger batches than usual, garbage collection",
    "logging, saving, garbage collection",
)


def judge(facts: Facts) -> Judged:
    if len(facts.steps) < known.MIN_STEPS or facts.is_only_issued:
        return Abstained(KIND, unclear(facts) or ISSUED)
    typical = median(step.work for step in facts.steps)
    beyond = [step.work - typical if step.work > RATIO * typical else 0.0 for step in facts.steps]
    at = repeated(beyond)
    rare = {number: beyond[number] for number in at}
    share = sum(rare.values()) / facts.window_ns
    every = period_of(at)  # other work on the machine has no period
    if len(facts.steps) < MIN_STEPS and not every:
        return Abstained(KIND, f"needs {MIN_STEPS} steps, or a period")
    if share < SHARE:
        return None
    if not every and facts.is_starved(share * facts.window_ns):
        return Abstained(KIND, STARVED)
    if has_more_passes(facts, at):
        return Abstained(KIND, "the long steps run more forward passes than the others")
    long = [facts.steps[number].work for number in at]
    excess = {
        part: sum(
            (getattr(facts.steps[number], name) or 0)
            - median(getattr(step, name) or 0 for step in facts.steps)
            for number in at
        )
        for name, part in PARTS.items()
    }
    inside = {
        name: ns
        for name, (count, ns) in facts.scopes.items()
        if len(long) / 2 <= count <= 2 * len(long) and ns > SHARE * share * facts.window_ns
    }
    where = max(inside or excess, key=(inside or excess).__getitem__)
    evidence = [
        f"{len(long)} of {len(facts.steps)} steps take {ms(median(long))}, others {ms(typical)}:"
        f" that is {percent(share)} of the time, most of it "
        + (where if where == REST else f"in {where}")
        + (f", {facts.gap[0]}" if where == REST and facts.gap[1] > facts.account[REST] / 2 else "")
    ]
    what = f"cirron show --name {where}" if inside else CAUSES[where == REST]
    return Finding(
        KIND,
        "some steps take far longer" + (f", one every {every}" if every else ""),
        share,
        *without(facts, sum(rare.values()), rare),
        evidence,
        f"check what those steps do: {what}" + ("" if every else ", or other work on the machine"),
        where,
    )


def has_more_passes(facts: Facts, at: Sequence[int]) -> bool:
    """Whether these steps run more forward passes by design: a GAN, an RL agent."""
    usual = median(step.forwards for step in facts.steps)
    return median(facts.steps[number].forwards for number in at) >= PASSES * max(usual, 1)
