"""The rules: one file a class of finding. Pure functions from facts to a finding, or to why not."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from cirron.verdict.findings import Abstained, Finding

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron.verdict.facts import Facts

Judged: TypeAlias = Finding | Abstained | None
Rule: TypeAlias = "Callable[[Facts], Judged]"


def percent(share: float) -> str:
    """A share as people say it.

    >>> percent(0.314), percent(0.004)
    ('31%', '0.4%')
    """
    return f"{100 * share:.0f}%" if share >= 0.01 else f"{100 * share:.1f}%"


def ms(ns: float) -> str:
    """A time of a step in milliseconds.

    >>> ms(1_234_000), ms(45_600_000)
    ('1.23 ms', '45.6 ms')
    """
    found = ns / 1e6
    return f"{found:.0f} ms" if found >= 100 else f"{found:.3g} ms"
