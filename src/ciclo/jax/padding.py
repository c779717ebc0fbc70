"""Padded batches: which rows are real, and the mean over them.

A step is tested: its results must not depend on the padding.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from ciclo.device_values import describe
from ciclo.errors import CicloError

# The mask of the batch in the step that is being traced.
current_mask: ContextVar[Any] = ContextVar("ciclo_mask", default=None)


def mask() -> Any:
    """Inside a step: True for real rows if the batch is padded, else None."""
    return current_mask.get()


def mean(values: Any) -> Any:
    """Inside a step: the mean of one value per row, over the real rows.

    Outside a step, and for a batch without padding, it is `jnp.mean`.
    """
    values = jnp.asarray(values)
    if jnp.issubdtype(values.dtype, jnp.floating):
        values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    rows = mask()
    if rows is None:
        return jnp.mean(values)
    if not values.shape or values.shape[0] != rows.shape[0]:
        raise CicloError(
            f"managed.mean was given {describe(values)}; it takes a value for each of the"
            f" {rows.shape[0]} rows of the batch, before they are averaged"
        )
    return jnp.mean(values, where=rows.reshape(-1, *[1] * (values.ndim - 1)))


def find_difference(one: Any, other: Any) -> str | None:
    """The path of the first number that differs between two trees, apart from rounding."""
    leaves = jax.tree_util.tree_leaves_with_path(one)
    for (path, a), b in zip(leaves, jax.tree.leaves(other), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            continue
        if not jnp.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True):
            return jax.tree_util.keystr(path, simple=True, separator="/")
    return None
