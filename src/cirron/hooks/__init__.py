"""Frameworks that cirron knows, as tables: who exists, and who outranks whom.

A framework that is higher up makes the `epoch` and `step` spans while it runs; the ones below it
make only their own. Nothing here imports a framework.
"""

from __future__ import annotations

import sys
from typing import Any

from cirron import errors

# Highest first.
PRECEDENCE = (
    "transformers",
    "lightning",
    "keras",
    "tensorflow",
    "torch",
    "jax",
    "sklearn",
    "xgboost",
    "lightgbm",
)


def check(frameworks: Any) -> tuple[str, ...] | None:
    """The frameworks that were asked for, checked; None means whatever the program imports."""
    if frameworks is None:
        return None
    if isinstance(frameworks, str) or not isinstance(frameworks, (list, tuple, set, frozenset)):
        raise errors.out_of_range(
            "frameworks", frameworks, "it must be a list of names, such as ['torch']"
        )
    for name in frameworks:
        if name not in PRECEDENCE:
            raise errors.one_of("frameworks", name, PRECEDENCE)
    return tuple(name for name in PRECEDENCE if name in frameworks)


def imported() -> str | None:
    """The highest framework that the program has imported so far."""
    return next((name for name in PRECEDENCE if name in sys.modules), None)
