"""compile-storm: functions are compiled again and again after warm-up.

It is a finding if compilations after warm-up, in 3 steps (or evaluations) or more, take 5 % of the
window or more. A first evaluation that compiles many functions counts once, and the first
compilation of a JAX function does not count. The gain is the time of all other compilations, and of
the tracing in the same steps.
"""

from __future__ import annotations

import math
from bisect import bisect
from statistics import median
from typing import TYPE_CHECKING

from cirron.verdict.facts import MIN_STEPS
from cirron.verdict.findings import Abstained, Class, Finding
from cirron.verdict.rules import Judged, percent
from cirron.verdict.whatif import without

if TYPE_CHECKING:
    from cirron.verdict.facts import Facts

KIND: Class = "compile-storm"
MIN_TIMES = 3
SHARE = 0.05
# Causes that the JAX hook gives: a function is new; shapes and types have not changed.
FIRST, SAME = "first call", "the same arguments"


def judge(facts: Facts) -> Judged:
    if len(facts.steps) < MIN_STEPS:
        return Abstained(KIND, "too few steps")
    again = [one for one in facts.compiles if one[2] != FIRST]
    first_ns = sum(ns for _, ns, cause in facts.compiles if cause == FIRST)
    ns = max(sum(one for _, one, _ in again), facts.account.get("compile", 0) - first_ns)
    share = min(ns / facts.window_ns, 1.0)
    starts = [step.start for step in facts.steps]
    at = {bisect(starts, start) for start, *_ in again}  # numbered from 1
    times = len(at)
    if times < MIN_TIMES or share < SHARE:
        return None
    # A step that compiles also traces, which no span covers.
    usual = [step.work for number, step in enumerate(facts.steps, 1) if number not in at]
    typical = median(usual) if len(usual) >= MIN_STEPS else math.inf
    tracing = {one - 1: max(facts.steps[one - 1].work - typical, 0.0) for one in at if one > 0}
    evidence = [
        f"{len(again)} compiles after warm-up, in {times} of {len(starts)} steps, take"
        f" {percent(share)} of the time"
    ]
    causes = [cause for *_, cause in again if cause]
    evidence += [f"the last one: {cause}" for cause in causes[-1:]]
    is_anew = sum(cause.startswith(SAME) for cause in causes) > len(again) / 2
    begins = set(facts.first_of_epochs)
    is_at_starts = sum(bool({one, one - 1} & begins) for one in at) > times / 2
    return Finding(
        KIND,
        "the model is compiled again and again",
        share,
        *without(facts, ns + sum(tracing.values()), tracing),
        evidence,
        "compile once for all trainings: a new model or step function for each fold or trial is"
        " compiled again; reuse one, and give it new weights"
        if is_anew and is_at_starts
        else "create the compiled function once, before the loop: a new lambda or partial, or"
        " another value of a static argument, is compiled again"
        if is_anew
        else "keep shapes and types the same: pad or bucket the batches, drop_last=True,"
        " or mark dimensions that vary as dynamic",
        "compile",
    )
