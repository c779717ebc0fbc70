"""The exponential moving average, one rule for the callback `ema` and the states of frameworks.

It begins at zero and is corrected for that when it is read, so that after one value it is that
value, and nothing leans towards the start. Numbers of less than 32 bits are summed up in 32: in 16
bits a decay of 0.999 is 1, and an average would stand still or grow.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class EmaState(NamedTuple):
    """How many values there were, and their sum: each counts `decay` times as much as the next."""

    count: Any
    ema: Any


def moved(state: EmaState, value: Any, decay: float, combine: Callable[..., Any]) -> EmaState:
    """With one more value.

    combine: applies a function of two leaves to two trees
    """
    rule = lambda old, new: old * decay + new * (1 - decay)  # noqa: E731  as short as a formula
    return EmaState(state.count + 1, combine(rule, state.ema, value))


def share(count: Any, decay: float, expm1: Callable[[Any], Any] = math.expm1) -> Any:
    """What the weights of so many values add up to: the average is the sum, divided by it.

    It is 1 - decay**count, which in 32 bits has few digits left where the decay is near 1.
    """
    return -expm1(count * (math.log(decay) if decay else -math.inf))


def wide(leaf: Any) -> Any:
    """The leaf in 32 bits, where it has fewer."""
    if getattr(getattr(leaf, "dtype", None), "itemsize", 4) >= 4:
        return leaf
    return leaf.float() if hasattr(leaf, "float") else leaf.astype("float32")
