"""Stateful metrics of clu, flax.nnx, jax_metrics and similar libraries.

They differ in how a batch is added: `from_model_output` and `merge` (clu), `update` in place (nnx),
`update` that returns a new metric (jax_metrics). The functions here do not change their arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ciclo.errors import CicloError


@partial(jax.tree_util.register_dataclass, data_fields=["total", "rows"], meta_fields=["of"])
@dataclass(frozen=True)
class Mean:
    """The running mean of a loss, weighted by rows."""

    of: str
    total: Any = 0.0
    rows: Any = 0.0

    __loop_new__ = True  # older checkpoints do not have it

    def empty(self) -> Mean:
        return Mean(self.of, jnp.zeros(()), jnp.zeros(()))

    def update(self, rows: Any, values: dict[str, Any]) -> Mean:
        total = self.total + values[self.of] * rows
        return replace(self, total=total, rows=self.rows + rows)

    def compute(self) -> Any:
        return self.total / self.rows


def is_metric(value: Any) -> bool:
    return callable(getattr(value, "compute", None))


def empty(metric: Any) -> Any:
    """An empty metric, from a metric or its class."""
    if callable(getattr(metric, "empty", None)):
        return metric.empty()
    if isinstance(metric, type):
        return metric()
    fresh = _copied(metric)
    done = fresh.reset()
    return fresh if done is None else done


def updated(metric: Any, values: dict[str, Any]) -> Any:
    """The metric after a batch."""
    for name in ("single_from_model_output", "from_model_output"):
        if callable(make := getattr(type(metric), name, None)):
            return metric.merge(make(**values))
    fresh = _copied(metric)
    done = fresh.update(**values)
    return fresh if done is None else done


def merged(name: str, metric: Any, other: Any) -> Any:
    """Two metrics merged."""
    if not callable(getattr(metric, "merge", None)):
        raise CicloError(
            f"the metric {name!r} ({type(metric).__name__}) has no merge(), so it cannot be"
            " merged into the state; update the state instead:"
            " state = state.update_metrics(...); return logs, state"
        )
    return metric.merge(other)


def computed(name: str, metric: Any) -> dict[str, Any]:
    """The value of a metric by name, or several values of a collection."""
    value = metric.compute()
    named = value if isinstance(value, dict) else {name: value}
    found: dict[str, Any] = {}
    for key, one in named.items():
        if hasattr(one, "__dataclass_fields__"):  # for example, mean and deviation of nnx.Welford
            found |= {f"{key}_{part}": getattr(one, part) for part in one.__dataclass_fields__}
        else:
            found[key] = one
    return found


def declared(metrics: Any) -> dict[str, Any]:
    """The initial metrics of a state, from a dict, a metric or a class."""
    if metrics is None:
        return {}
    named = metrics if isinstance(metrics, dict) else {"metrics": metrics}
    for name, metric in named.items():
        if not is_metric(metric):
            raise CicloError(
                f"metrics[{name!r}] is {metric!r}, which has no compute(); give a metric of clu,"
                " flax.nnx or jax_metrics"
            )
    return {name: empty(metric) for name, metric in named.items()}


def _copied(metric: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf, metric)
