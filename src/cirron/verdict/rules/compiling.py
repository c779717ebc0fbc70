"""compile-storm: functions are compiled again and again, after warm-up.

At least 3 compiles after warm-up that take 5 % of the window or more. The gain is all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cirron.verdict.facts import MIN_STEPS
from cirron.verdict.findings import Abstained, Class, Finding
from cirron.verdict.rules import Judged, percent
from cirron.verdict.whatif import without

if TYPE_CHECKING:
    from cirron.verdict.facts import Facts

KIND: Class = "compile-storm"
MIN_COMPILES = 3
SHARE = 0.05


def judge(facts: Facts) -> Judged:
    if len(facts.steps) < MIN_STEPS:
        return Abstained(KIND, "too few steps")
    ns = max(sum(one for _, one in facts.compiles), facts.account.get("compile", 0))
    share = min(ns / facts.window_ns, 1.0)
    if len(facts.compiles) < MIN_COMPILES or share < SHARE:
        return None
    return Finding(
        KIND,
        "the model is compiled again and again",
        share,
        without(facts, ns),
        [f"{len(facts.compiles)} compiles after warm-up take {percent(share)} of the time"],
        "keep shapes and types the same: pad or bucket the batches, drop_last=True,"
        " mark what varies as dynamic",
        "compile",
    )
