"""`mapped` walks trees of any values; `register` registers `Logs` and `Elapsed` as pytrees.

JAX is never imported here: a program that needs this has imported it.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from math import nan
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ciclo.elapsed import Elapsed

is_done = False


def mapped(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Applies `function` to the leaves of trees of the same structure."""
    kind = type(tree)
    if kind is dict or kind is OrderedDict:
        pairs = ((key, mapped(function, tree[key], *(one[key] for one in others))) for key in tree)
        return kind(pairs)
    if kind is list or kind is tuple:
        return kind([mapped(function, *each) for each in zip(tree, *others, strict=True)])
    is_named = isinstance(tree, tuple) and hasattr(tree, "_fields")
    if is_named and all(type(one) is kind for one in others):
        return kind(*(mapped(function, *each) for each in zip(tree, *others, strict=True)))
    return function(tree, *others)


def register() -> None:
    """Registers the pytrees once, if JAX is imported."""
    global is_done
    jax = sys.modules.get("jax")
    if is_done or jax is None or not hasattr(jax, "tree_util"):
        return
    is_done = True
    from ciclo.elapsed import Elapsed
    from ciclo.logs import Collection, Logs

    # As plain dicts: logs have one tree structure, however their collections were created.
    jax.tree_util.register_pytree_node(
        Logs,
        lambda logs: (({k: {**v} if isinstance(v, dict) else v for k, v in logs.items()},), None),
        lambda _, children: Logs._of(children[0]),
    )
    jax.tree_util.register_pytree_node(
        Collection,
        lambda values: ((dict(values),), None),
        lambda _, children: Collection(children[0]),
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
