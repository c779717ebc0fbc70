"""Makes `Logs` and `Elapsed` pytrees of JAX, so that jitted functions take and return them.

JAX is never imported here: whoever needs this has imported it.
"""

from __future__ import annotations

import sys
from math import nan
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ciclo.elapsed import Elapsed

_is_done = False


def register() -> None:
    """Registers both, once, if JAX is there."""
    global _is_done
    jax = sys.modules.get("jax")
    if _is_done or jax is None or not hasattr(jax, "tree_util"):
        return
    _is_done = True
    from ciclo.elapsed import Elapsed
    from ciclo.logs import Logs

    jax.tree_util.register_pytree_node(
        Logs, lambda logs: ((dict(logs),), None), lambda _, children: Logs._of(children[0])
    )
    # Not the date: as float32 it would be a minute off. Inside a jitted function it is NaN.
    jax.tree_util.register_pytree_node(
        Elapsed,
        lambda elapsed: ((elapsed.steps, elapsed.samples, elapsed.tokens, elapsed.time), None),
        lambda _, children: _unflatten(Elapsed, children),
    )


def _unflatten(kind: type[Elapsed], children: tuple[Any, ...]) -> Elapsed:
    elapsed = kind.__new__(kind)
    elapsed.steps, elapsed.samples, elapsed.tokens, elapsed.time = children
    elapsed.date = nan
    elapsed.batch_samples = elapsed.batch_tokens = 0
    elapsed._before = (0, 0, 0.0, nan)
    elapsed._anchors = {}
    elapsed._noted = None
    return elapsed
