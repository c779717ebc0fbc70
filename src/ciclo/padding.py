"""Batches that were filled up so that they divide: which rows are real, and the mean over those.

A step is traced with the padding of its batch as the current one.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ciclo.errors import CicloError, need
from ciclo.values import describe

need("jax", "ciclo.managed")
import jax.numpy as jnp  # noqa: E402  checked first: the error says what to install


@dataclass
class Padding:
    """The rows of the batch that is traced, and whether the step has asked which are real."""

    mask: Any
    is_averaged: bool = False
    is_asked: bool = False


current_padding: ContextVar[Padding | None] = ContextVar("ciclo_padding", default=None)


def mask() -> Any:
    """Inside a step: which rows of the batch are real, where it was filled up; else None."""
    padding = current_padding.get()
    if padding is None or padding.mask is None:
        return None
    padding.is_asked = True
    return padding.mask


def mean(values: Any) -> Any:
    """Inside a step: the mean over the real rows of a batch, of a value a row.

    Anywhere else, and for a batch that was not filled up, it is `jnp.mean`.
    """
    values = jnp.asarray(values)
    if jnp.issubdtype(values.dtype, jnp.floating):
        values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    padding = current_padding.get()
    if padding is None or padding.mask is None:
        return jnp.mean(values)
    if not values.shape or values.shape[0] != padding.mask.shape[0]:
        raise CicloError(
            f"managed.mean was given {describe(values)}; it takes a value for each of the"
            f" {padding.mask.shape[0]} rows of the batch, before they are averaged"
        )
    padding.is_averaged = True
    is_real = padding.mask.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.mean(values, where=is_real)
