"""The state shared by all JAX frameworks: the steps of a model with losses and metrics.

A framework adds a `Forward`, which calls its model.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypedDict

import jax
import jax.numpy as jnp

from ciclo.device_values import describe
from ciclo.elapsed import samples_in
from ciclo.errors import CallbackError, CicloError, warn
from ciclo.jax import managed
from ciclo.jax import metrics as stateful
from ciclo.jax.managed import ManagedState
from ciclo.judging import (
    Asked,
    check_training,
    crossed,
    crossed_shape,
    named,
    named_outputs,
    split,
    wants,
)
from ciclo.logs import Logs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

TRAINING = ("train", "training", "is_training")  # names of the training argument of a model


class Inputs:
    """The arguments of a model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs

    @classmethod
    def of(cls, given: Any) -> Inputs:
        """From a tuple (positional), a dict (by name), or a single input."""
        if isinstance(given, dict):
            return cls(**given)
        return cls(*given) if isinstance(given, (tuple, list)) else cls(given)

    def leaves(self) -> list[Any]:
        return [*self.args, *self.kwargs.values()]

    def plain(self) -> Any:
        """As given by the user: one input, a tuple, or a dict."""
        if self.kwargs:
            return self.kwargs
        return self.args[0] if len(self.args) == 1 else self.args


class KeySeq:
    """An iterator of random keys: `next(key_seq)` or `key_seq()`."""

    def __init__(self, key: Any) -> None:
        self._key = key

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._key is None:
            raise CallbackError("the state has no random keys; use create(..., rngs=0)")
        self._key, key = jax.random.split(self._key)
        return key

    __call__ = __next__


class ModelOptions(TypedDict, total=False):
    """The options for all frameworks; see `create_flax_state`."""

    losses: Any
    metrics: Any
    strategy: Any
    unpack: Callable[[Any], Any] | None
    rngs: Any
    accumulate: int | None
    policy: Any
    clip_norm: float | None
    ema_decay: float | None


class Forward(Protocol):
    """A model as a function; hashable, because it is a static argument of compiled steps.

    It may have `keys(state, is_training)`, which returns its random keys, and
    `take_written(stats)`, which removes and returns values that the model wrote for logging.
    """

    def __call__(
        self, params: Any, stats: Any, rngs: dict[str, Any], inputs: Inputs, is_training: bool
    ) -> tuple[Any, Any]:
        """The outputs, and the new non-trainable variables."""


class ModelState(ManagedState):
    """A model with losses and metrics, created by `create_flax_state` and similar functions."""

    forward: Any = managed.static(None)
    losses: tuple[tuple[str, Callable[..., Any]], ...] = managed.static(())
    measures: tuple[tuple[str, Callable[..., Any]], ...] = managed.static(())
    unpack: Callable[[Any], Any] | None = managed.static(None)

    @managed.train_step
    def train_step(self, batch: Any) -> tuple[Logs, ModelState]:
        """Trains on a batch, and logs its losses and metrics."""
        given = self._unpacked(batch)
        outputs, stats, written = self._run(given.inputs, True)
        state = self.replace(batch_stats=stats)
        if not self.losses and not written.get("losses"):
            raise CicloError(
                "train_step: the state has no losses to train on; give create_flax_state, or the"
                " function that created it, losses=lambda preds, target: (preds - target) ** 2, or"
                " a dict of losses"
            )
        return state._judged(outputs, given, written)

    @managed.step
    def test_step(self, batch: Any) -> tuple[Logs, ModelState]:
        """Logs the losses and metrics of a batch."""
        given = self._unpacked(batch)
        outputs, stats, written = self._run(given.inputs, False)
        return self.replace(batch_stats=stats)._judged(outputs, given, written)

    @managed.step
    def predict_step(self, batch: Any) -> tuple[Logs, ModelState]:
        """Logs the outputs for a batch, with or without targets."""
        outputs = self._run(self._unpacked(batch).inputs, False)[0]
        return Logs({"outputs": named_outputs(outputs, "preds")}), self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the model, in evaluation mode."""
        return self._run(Inputs(*args, **kwargs), False)[0]

    def _run(self, inputs: Inputs, is_training: bool) -> tuple[Any, Any, dict[str, dict[str, Any]]]:
        """The outputs, the non-trainable variables, and logs that the model wrote."""
        params = self.params
        if not is_training:
            params = self.params if self.ema_state is None else self.ema_params
            params = params if self.policy is None else self.policy.to_compute(params)
        rngs = self.step_rngs if is_training else {}
        if hasattr(self.forward, "keys"):
            rngs = self.forward.keys(self, is_training)
        outputs, stats = self.forward(params, self.batch_stats, rngs, inputs, is_training)
        written = self.forward.take_written(stats) if hasattr(self.forward, "take_written") else {}
        return outputs, stats, written

    def _unpacked(self, batch: Any) -> Given:
        if self.unpack is None:
            return unpacked(batch)
        inputs, *rest = self.unpack(batch)
        return Given(Inputs.of(inputs), *rest)

    def _judged(
        self, outputs: Any, given: Given, written: dict[str, dict[str, Any]]
    ) -> tuple[Logs, ModelState]:
        values = self._values(outputs, given)
        logs = Logs()
        for name, loss in self.losses:
            value = _called(name, loss, values)
            _check_broadcast(name, loss, value, values)
            logs.add_loss(name, _averaged(name, value))
        for name, value in written.get("losses", {}).items():
            logs.add_loss(name, _averaged(name, value))
        losses: dict[str, Any] = logs.get("losses", {})
        total = sum(losses.values())
        if len(losses) > 1 and "loss" not in losses:
            logs.add_metric("loss", total)
        values = {"loss": total, **values, **losses}
        for name, measure in self.measures:
            logs.add_metric(name, _averaged(name, _called(name, measure, values)))
        for name, value in written.get("metrics", {}).items():
            logs.add_metric(name, _averaged(name, value))
        if not self.metrics:
            return logs, self
        is_real = managed.mask()
        counted = [name for name, one in self.metrics.items() if not isinstance(one, stateful.Mean)]
        if is_real is not None and counted:
            raise CicloError(
                f"the metrics {', '.join(counted)} would count the padding of this batch; give"
                " batches that divide, or metrics as functions of outputs and targets that return"
                " one value per row"
            )
        rows = samples_in(given.inputs.leaves()) if is_real is None else is_real.sum()
        means = {n: one.update(rows, losses) for n, one in self.metrics.items() if n not in counted}
        seen = {"logits": outputs, "labels": given.target, "preds": outputs, "loss": total}
        seen |= {**losses, "target": given.target, **given.named_targets()}
        others = {name: self.metrics[name] for name in counted}
        others = self.replace(metrics=others).update_metrics(**seen).metrics
        state = self.replace(metrics={**others, **means})
        logs["stateful_metrics"] = state.compute_metrics()
        return logs, state

    def _values(self, outputs: Any, given: Given) -> dict[str, Any]:
        """The values available to losses and metrics."""
        functions = [function for _, function in (*self.losses, *self.measures)]
        if given.sample_weight is not None and not any(
            wants(f, "sample_weight") for f in functions
        ):
            raise CicloError(
                "the third item of the batch is read as sample weights, but no loss or metric uses"
                " them; write losses=lambda preds, target, sample_weight: ..., or, if it is the"
                " target, give batches of the form ((a, b), y)"
            )
        key = next(iter(self.step_rngs.values()), None)
        inputs = given.inputs.plain()
        return {
            "preds": outputs,
            "target": given.target,
            "inputs": inputs,
            "sample_weight": given.sample_weight,
            "params": self.params,
            "batch_stats": self.batch_stats,
            "module": getattr(self.forward, "module", None),
            "key_seq": KeySeq(key),
            **(inputs if isinstance(inputs, dict) else {}),
            **given.named_targets(),
        }


FlaxState = ModelState  # the name in 0.1.9


def check_made_by(creator: str, state: Any, kind: type) -> None:
    """Refuses a state of another framework."""
    if not isinstance(getattr(state, "forward", None), kind):
        raise CicloError(f"{describe(state)} was not created by ciclo.{creator}; give its state")


def _called(name: str, function: Callable[..., Any], values: dict[str, Any]) -> Any:
    value = Asked(name, function, tuple(values), fills_rest=True)(values)
    if value is None:
        raise CallbackError(f"{name!r} returned None; a loss or metric must return its value")
    return value


def _check_broadcast(name: str, loss: Any, value: Any, values: dict[str, Any]) -> None:
    """JAX broadcasts outputs [n,1] and targets [n] to [n,n]."""
    outputs, target = values["preds"], values["target"]
    if (shape := crossed_shape(outputs, target)) is None:
        return
    if jnp.shape(value) == shape:
        raise CicloError(crossed(name, outputs, target))

    def again(preds: Any, target: Any) -> Any:
        return _called(name, loss, {**values, "preds": preds, "target": target})

    # A loss over pairs of outputs has that shape too, so this only warns.
    if str(list(shape)).replace(" ", "") in str(jax.make_jaxpr(again)(outputs, target)):
        warn(crossed(name, outputs, target))


def _averaged(name: str, value: Any) -> Any:
    """The mean of one value per row; a scalar is returned unchanged."""
    if jnp.ndim(value) == 0:
        if managed.mask() is not None:
            raise CicloError(
                f"{name!r} is a scalar, but this batch was padded so that it divides; return one"
                " value per row instead, which is averaged"
            )
        return value
    return managed.mean(value)


class Given(NamedTuple):
    """The parts of a batch."""

    inputs: Inputs
    target: Any = None
    sample_weight: Any = None

    def named_targets(self) -> dict[str, Any]:
        """The targets by name, if they are a mapping."""
        return self.target if isinstance(self.target, dict) else {}


def unpacked(batch: Any) -> Given:
    """Reads x, (x,), (x, y) or (x, y, sample_weight); x may be a tuple or a mapping of inputs.

    In a dict, the targets are found by name.
    """
    if isinstance(batch, dict):
        inputs, target = split(batch)
        return Given(Inputs(*inputs.values()) if len(inputs) == 1 else Inputs(**inputs), target)
    if not isinstance(batch, (tuple, list)):
        return Given(Inputs(batch))
    if not 1 <= len(batch) <= 3:
        raise CicloError(
            f"a batch of {len(batch)} items is not x, (x, y) or (x, y, sample_weight):"
            f" {describe(batch)}. For several inputs give ((a, b), y), or use"
            " unpack=lambda batch: (inputs, targets)"
        )
    inputs, *rest = batch
    return Given(Inputs.of(inputs), *rest)


def create(
    *,
    forward: Forward,
    init: Callable[[], tuple[Any, Any]] | tuple[Any, Any],
    losses: Any = None,
    metrics: Any = None,
    unpack: Callable[[Any], Any] | None = None,
    averaged: Iterable[str] = (),
    **options: Any,
) -> ModelState:
    """Creates the state of a model.

    init: parameters and non-trainable variables, or a function that returns both
    averaged: losses whose running mean is logged as `avg_<name>`
    """
    check_training(unpack=unpack)
    params, stats = init if isinstance(init, tuple) else (lambda: init()[0], lambda: init()[1])
    found = named("metrics", metrics, None)
    kept = {name: one for name, one in found.items() if stateful.is_metric(one)}
    kept |= {f"avg_{name}": stateful.Mean(name) for name in averaged}
    return ModelState.create(
        params=params,
        batch_stats=stats,
        forward=forward,
        losses=tuple(named("losses", losses, "loss").items()),
        metrics=kept,
        measures=tuple((name, one) for name, one in found.items() if name not in kept),
        unpack=unpack,
        **options,
    )


def training_argument(function: Callable[..., Any]) -> tuple[str, bool] | None:
    """The training argument of a model, and whether it is negated; None if it has none."""
    names = inspect.signature(function).parameters
    found = next((name for name in TRAINING if name in names), None)
    if found is not None:
        return found, False
    return ("deterministic", True) if "deterministic" in names else None


def told(argument: tuple[str, bool] | None, is_training: bool) -> dict[str, bool]:
    """The training argument and its value, as keywords."""
    return {} if argument is None else {argument[0]: is_training is not argument[1]}
