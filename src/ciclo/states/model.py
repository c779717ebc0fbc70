"""What the states of all JAX frameworks share: the steps of a model with losses and metrics.

A framework adds a `Forward`: how its model is called with parameters, and with what else it keeps.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Protocol

import jax.numpy as jnp

from ciclo import managed
from ciclo import metrics as stateful
from ciclo.binding import name_of
from ciclo.errors import CicloError
from ciclo.logs import Logs
from ciclo.managed import ManagedState
from ciclo.values import TARGETS, describe

if TYPE_CHECKING:
    from collections.abc import Callable

TRAINING = ("train", "training", "is_training")  # what a model calls it that it is trained


class Inputs:
    """What a model is called with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs


class Forward(Protocol):
    """A model as a function; hashable, since steps are compiled for it."""

    def __call__(
        self, params: Any, stats: Any, rngs: dict[str, Any], inputs: Inputs, is_training: bool
    ) -> tuple[Any, Any]:
        """The outputs, and what the model keeps beside its parameters."""


class ModelState(ManagedState):
    """A model with its losses and metrics; `create_flax_state` and its like make it."""

    forward: Any = managed.static(None)
    losses: tuple[tuple[str, Callable[..., Any]], ...] = managed.static(())
    measures: tuple[tuple[str, Callable[..., Any]], ...] = managed.static(())
    unpack: Callable[[Any], Any] | None = managed.static(None)

    @managed.train_step
    def train_step(self, batch: Any) -> tuple[Logs, ModelState]:
        """Logs the losses and metrics of a batch, and learns from it."""
        if not self.losses:
            raise CicloError(
                "train_step: this state was made without losses, and they give the gradients; give"
                " create_flax_state, or what made it, a function of outputs and targets:"
                " losses=lambda outputs, targets: (outputs - targets) ** 2, or a dict of several"
            )
        inputs, targets = self._unpacked(batch)
        rngs = self.step_rngs
        outputs, stats = self.forward(self.params, self.batch_stats, rngs, inputs, True)
        return self.replace(batch_stats=stats)._judged(outputs, targets)

    @managed.step
    def test_step(self, batch: Any) -> tuple[Logs, ModelState]:
        """Logs the losses and metrics of a batch."""
        inputs, targets = self._unpacked(batch)
        return self._judged(self._outputs(inputs), targets)

    @managed.step
    def predict_step(self, batch: Any) -> Logs:
        """Logs what the model puts out for a batch, with or without targets in it."""
        outputs = self._outputs(self._unpacked(batch)[0])
        if isinstance(outputs, dict):
            return Logs({"outputs": outputs})
        if isinstance(outputs, tuple):
            return Logs({"outputs": {f"outputs_{i}": one for i, one in enumerate(outputs)}})
        return Logs({"outputs": {"outputs": outputs}})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model puts out, not trained."""
        return self._outputs(Inputs(*args, **kwargs))

    def _outputs(self, inputs: Inputs) -> Any:
        params = self.params if self.ema_state is None else self.ema_params
        if self.policy is not None:
            params = self.policy.to_compute(params)
        return self.forward(params, self.batch_stats, {}, inputs, False)[0]

    def _unpacked(self, batch: Any) -> tuple[Inputs, Any]:
        if self.unpack is None:
            return unpacked(batch)
        inputs, targets = self.unpack(batch)
        return inputs if isinstance(inputs, Inputs) else Inputs(inputs), targets

    def _judged(self, outputs: Any, targets: Any) -> tuple[Logs, ModelState]:
        logs = Logs()
        for name, loss in self.losses:
            logs.add_loss(name, _averaged(name, loss(outputs, targets)))
        total = sum(logs.losses.values())
        if len(self.losses) > 1:
            logs.add_metric("loss", total)
        for name, measure in self.measures:
            logs.add_metric(name, _averaged(name, measure(outputs, targets)))
        if not self.metrics:
            return logs, self
        if managed.mask() is not None:
            raise CicloError(
                f"the metrics {', '.join(self.metrics)} would count rows that were added to this"
                " batch so that it divides; give batches that divide, or metrics as functions of"
                " outputs and targets that return a value a row"
            )
        state = self.update_metrics(
            logits=outputs, labels=targets, preds=outputs, target=targets, loss=total
        )
        logs["stateful_metrics"] = state.compute_metrics()
        return logs, state


def _averaged(name: str, value: Any) -> Any:
    """One number, from a value a row; a function that averages cannot leave rows out."""
    if jnp.ndim(value) == 0:
        if managed.mask() is not None:
            raise CicloError(
                f"{name!r} is one number for a batch that rows were added to so that it divides;"
                " return a value a row instead, and they are averaged"
            )
        return value
    return managed.mean(value)


def unpacked(batch: Any) -> tuple[Inputs, Any]:
    """Inputs and targets: the last of a tuple, or what a dict calls so, is the targets."""
    if isinstance(batch, dict):
        key = next((one for one in TARGETS if one in batch), None)
        inputs = {name: value for name, value in batch.items() if name != key}
        given = Inputs(*inputs.values()) if len(inputs) == 1 else Inputs(**inputs)
        return given, None if key is None else batch[key]
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return Inputs(*batch[:-1]), batch[-1]
    return Inputs(*batch) if isinstance(batch, (tuple, list)) else Inputs(batch), None


def create(
    *,
    forward: Forward,
    init: Callable[[], tuple[Any, Any]] | tuple[Any, Any],
    losses: Any,
    metrics: Any,
    unpack: Callable[[Any], Any] | None,
    **options: Any,
) -> ModelState:
    """The state of a model, from what its framework made of it.

    init: parameters and what the model keeps beside them, or a function that makes both
    """
    params, stats = init if isinstance(init, tuple) else (lambda: init()[0], lambda: init()[1])
    found = _named("metrics", metrics, None)
    kept = {name: one for name, one in found.items() if stateful.is_metric(one)}
    return ModelState.create(
        params=params,
        batch_stats=stats,
        forward=forward,
        losses=tuple(_named("losses", losses, "loss").items()),
        metrics=kept,
        measures=tuple((name, one) for name, one in found.items() if name not in kept),
        unpack=unpack,
        **options,
    )


def _named(argument: str, given: Any, default: str | None) -> dict[str, Any]:
    if given is None:
        return {}
    named = given if isinstance(given, dict) else {default or name_of(given): given}
    for name, one in named.items():
        if not callable(one) and not stateful.is_metric(one):
            raise CicloError(
                f"{argument}[{name!r}] is {describe(one)}; use a function of outputs and targets,"
                " as lambda outputs, targets: ..."
            )
    return dict(named)


def training_argument(function: Callable[..., Any]) -> tuple[str, bool] | None:
    """What a model calls it that it is trained, and whether it means the opposite; else None."""
    names = inspect.signature(function).parameters
    found = next((name for name in TRAINING if name in names), None)
    if found is not None:
        return found, False
    return ("deterministic", True) if "deterministic" in names else None


def told(argument: tuple[str, bool] | None, is_training: bool) -> dict[str, bool]:
    """That argument, as a model is told."""
    return {} if argument is None else {argument[0]: is_training is not argument[1]}
