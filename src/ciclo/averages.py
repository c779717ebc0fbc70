"""The exponential moving average, for the callback `ema` and for `ema_decay=` of states.

It starts at zero and is bias-corrected when it is read, so after one value it equals that value.
It is kept in at least 32 bits: in 16 bits, a decay of 0.999 rounds to 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class EmaState(NamedTuple):
    """The number of values, and their exponentially weighted sum."""

    count: Any
    ema: Any


def moved(state: EmaState, value: Any, decay: float, combine: Callable[..., Any]) -> EmaState:
    """The average after one more value.

    combine: applies a function of two leaves to two trees
    """
    rule = lambda old, new: old * decay + new * (1 - decay)  # noqa: E731  as short as a formula
    return EmaState(state.count + 1, combine(rule, state.ema, value))


def share(count: Any, decay: float, expm1: Callable[[Any], Any] = math.expm1) -> Any:
    """The bias correction: the sum of the weights of `count` values.

    It is 1 - decay**count, computed with expm1 because it loses digits if decay is near 1.
    """
    return -expm1(count * (math.log(decay) if decay else -math.inf))


def wide(leaf: Any) -> Any:
    """The leaf in at least 32 bits."""
    if getattr(getattr(leaf, "dtype", None), "itemsize", 4) >= 4:
        return leaf
    return leaf.float() if hasattr(leaf, "float") else leaf.astype("float32")
