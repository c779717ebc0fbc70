"""Batches that were filled up so that they divide: which rows are real, and the mean over those.

Whether a step leaves the added rows out is tried: what it computes must not depend on them.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from ciclo.device_values import describe
from ciclo.errors import CicloError

# Of the batch of the step that is traced.
current_mask: ContextVar[Any] = ContextVar("ciclo_mask", default=None)


def mask() -> Any:
    """Inside a step: which rows of the batch are real, where it was filled up; else None."""
    return current_mask.get()


def mean(values: Any) -> Any:
    """Inside a step: the mean over the real rows of a batch, of a value a row.

    Anywhere else, and for a batch that was not filled up, it is `jnp.mean`.
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
    """The path of the first number that is not the same in two trees, but for rounding."""
    leaves = jax.tree_util.tree_leaves_with_path(one)
    for (path, a), b in zip(leaves, jax.tree.leaves(other), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            continue
        if not jnp.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True):
            return jax.tree_util.keystr(path, simple=True, separator="/")
    return None
