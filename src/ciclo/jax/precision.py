"""Mixed precision in JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ciclo.device_values import TARGETS
from ciclo.errors import check


@dataclass(frozen=True)
class Policy:
    """The types of mixed precision: for computation, and for logs.

    Parameters, gradients and the optimizer keep their types.

    >>> ManagedState.create(params=params, tx=tx, policy="bfloat16")
    """

    compute: str = "float32"
    output: str = "float32"

    def __post_init__(self) -> None:
        for name in ("compute", "output"):
            check(
                name,
                getattr(self, name),
                lambda one: jnp.issubdtype(one, jnp.floating),
                '"bfloat16"',
            )

    @classmethod
    def of(cls, given: Policy | str | None) -> Policy | None:
        if given is None or isinstance(given, Policy):
            return given
        allowed = "'bfloat16', 'float32' or a managed.Policy. float16 would need its losses scaled"
        check("policy", given, lambda one: one in ("float32", "bfloat16"), allowed)
        return cls(compute=given)

    def to_compute(self, tree: Any) -> Any:
        return _cast(tree, self.compute)

    def inputs_to_compute(self, batch: Any) -> Any:
        """Casts the inputs of a batch: the first of a tuple, or all but the targets of a dict."""
        if isinstance(batch, dict):
            return {k: v if k in TARGETS else self.to_compute(v) for k, v in batch.items()}
        if type(batch) in (tuple, list) and len(batch) > 1:
            return type(batch)([self.to_compute(batch[0]), *batch[1:]])
        return self.to_compute(batch)

    def to_output(self, tree: Any) -> Any:
        return _cast(tree, self.output)


def _cast(tree: Any, kind: Any) -> Any:
    """Casts the floating-point arrays of a tree."""

    def cast(leaf: Any) -> Any:
        is_floating = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.asarray(leaf, kind) if is_floating else leaf

    return jax.tree.map(cast, tree)
