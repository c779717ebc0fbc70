"""The rules, one file per class: pure functions from facts to a finding, or a reason for none."""

from __future__ import annotations

import itertools
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

from cirron.verdict.facts import MIN_STEPS
from cirron.verdict.findings import Abstained, Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cirron.verdict.facts import Facts

BOOSTERS = ("xgboost", "lightgbm")
ESTIMATORS = ("sklearn", *BOOSTERS)  # frameworks whose training is a call of `fit`
STARVED = "the delay may come from other work on the machine: the training waited for a CPU"
FEW = "too few steps"
ISSUED = "JAX computes the steps after they have ended"
UNMARKED = f"{ISSUED}: to know where the time goes, mark the loss in each step, or wait for it"
MOST = 0.65  # of the time: a larger delay does not come from other work on the machine
MIN_LONG = 3  # one or two steps that are longer than all others are no pattern
MIN_LOOSE = 5  # a period of at least this many steps may be off by one

Judged: TypeAlias = Finding | Abstained | None
Rule: TypeAlias = "Callable[[Facts], Judged]"


def unclear(facts: Facts) -> str:
    """Why the times of the steps do not tell where the time goes; empty if they do."""
    if len(facts.steps) < MIN_STEPS:
        return FEW
    return UNMARKED if facts.is_only_issued and not facts.device_ns else ""


def percent(share: float) -> str:
    """A share as a percentage.

    >>> percent(0.314), percent(0.004)
    ('31%', '0.4%')
    """
    return f"{100 * share:.0f}%" if share >= 0.01 else f"{100 * share:.1f}%"


def ms(ns: float) -> str:
    """A time in milliseconds; in microseconds below 0.1, and in seconds from 10 seconds on.

    >>> ms(12_400), ms(1_234_000), ms(45_600_000), ms(215_995e6)
    ('12.4 us', '1.23 ms', '45.6 ms', '216 s')
    """
    found, unit = (ns / 1e6, "ms") if abs(ns) < 1e10 else (ns / 1e9, "s")
    if 0 < abs(ns) < 1e5:
        found, unit = ns / 1e3, "us"
    return f"{found:.0f} {unit}" if found >= 100 else f"{found:.3g} {unit}"


def longest(times: Sequence[float]) -> list[int]:
    """The indices of the long times: at least half as long as those that make up half of the sum.

    >>> longest([1, 80, 1, 3, 80, 1])
    [1, 4]
    """
    left = sum(times) / 2
    least = next((one for one in sorted(times, reverse=True) if (left := left - one) <= 0), 0.0) / 2
    return [at for at, one in enumerate(times) if one > least]


def repeated(times: Sequence[float]) -> list[int]:
    """The indices of the long times, without one or two that are longer than all others.

    >>> repeated([1, 900, 80, 1, 80, 1, 80, 1])
    [2, 4, 6]
    """
    left, at = list(times), longest(times)
    while 0 < len(at) < MIN_LONG:
        left = [0 if number in at else one for number, one in enumerate(left)]
        at = longest(left)
    return at


def period_of(at: Sequence[int]) -> int | None:
    """The distance between indices, if it is nearly always the same.

    >>> period_of([9, 19, 29, 39]), period_of([9, 12, 40, 90]), period_of([1, 2, 4, 7, 9, 10])
    (10, None, None)
    """
    gaps = [after - before for before, after in itertools.pairwise(at)]
    if len(gaps) < 3:
        return None
    usual = round(median(gaps))
    off = 1 if usual >= MIN_LOOSE else 0  # 1 to 3 are not a period of 2
    is_periodic = usual > 1 and sum(abs(gap - usual) <= off for gap in gaps) > 0.8 * len(gaps)
    return usual if is_periodic else None
