"""Managed states and steps for JAX: you write the loss, the state does the rest.

A `ManagedState` is a pytree of parameters, an optax optimizer, and other training state. A function
decorated with `step` or `train_step` is compiled and sharded by the strategy of its state. A train
step differentiates the losses that it logs.

>>> @managed.train_step
... def train_step(state, batch):
...     logits = state.apply_fn({"params": state.params}, batch["x"])
...     logs = ciclo.logs()
...     logs.add_loss("loss", managed.mean(cross_entropy(logits, batch["y"])))
...     return logs, state
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, dataclass_transform, overload

import jax
import jax.numpy as jnp
import numpy as np

from ciclo import averages
from ciclo.averages import EmaState
from ciclo.binding import creator_of, read
from ciclo.callbacks.base import Unpackable
from ciclo.device_values import describe, library_of
from ciclo.elapsed import samples_in
from ciclo.errors import CallbackError, CicloError, check, need, shown
from ciclo.jax import metrics as stateful
from ciclo.jax.padding import current_mask, find_difference, mask, mean
from ciclo.jax.precision import Policy
from ciclo.jax.strategies import Placed, Strategy, get_strategy
from ciclo.judging import check_training
from ciclo.logs import Logs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Self

    from ciclo.logs import LogsLike

__all__ = ["ManagedState", "Policy", "mask", "mean", "static", "step", "train_step"]

State = TypeVar("State", bound="ManagedState")
STATIC = {"static": True}
ADOPTED = ("step", "params", "opt_state", "batch_stats", "rngs", "metrics", "apply_fn", "tx")
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def static(default: Any = dataclasses.MISSING) -> Any:
    """A static field of a state: a constant of the compiled step, and not saved."""
    return field(default=default, metadata=STATIC)


# -- steps ---------------------------------------------------------------------------------------


class ManagedStep(Unpackable):
    """A function of a state and a batch, run by the state's strategy; also usable as a method."""

    def __init__(
        self, function: Callable[..., Any], trains: bool, strategy: str | Strategy | None = None
    ) -> None:
        check("function", function, callable, "a function of state and batch")
        functools.update_wrapper(self, function)
        self.strategy = strategy  # resolved in the first call, because it may initialise JAX
        self.name = getattr(function, "__name__", "step")
        self.function = function
        self.trains = trains
        self._compiled: dict[Strategy, Callable[..., Any]] = {}
        self._tried: set[Any] = set()  # batch shapes that were tested with padding
        if "loop_state" in inspect.signature(function).parameters:
            raise CallbackError(
                f"{self.name} is managed, so it may be compiled and cannot take loop_state; use"
                " state, batch and elapsed"
            )

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundStep(self, instance)

    def __call__(self, state: Any, *args: Any) -> Any:
        """Runs the step; returns what the function returns."""
        if not isinstance(state, ManagedState):
            raise CallbackError(
                f"{self.name} is a managed step, but {describe(state)} is not a managed state;"
                " create it with ManagedState.create(params=..., tx=...), or derive its class from"
                " ManagedState"
            )
        strategy = state.strategy if self.strategy is None else get_strategy(self.strategy)
        if strategy is not state.strategy:
            return self._elsewhere(strategy, state, args)
        is_ours = state._is_ours
        if strategy.donates:
            state = self._checked(state)
        try:
            placed = self._placed(strategy, args)
            other = self._try_other_rows(state, placed)
            result = self._run(strategy)(state, placed.batch, placed.mask)
        except TypeError as error:
            if any(library_of(leaf) == "torch" for leaf in jax.tree.leaves(args)):
                raise CicloError(
                    f"{self.name} got torch tensors, {describe(args[0])}, but a JAX step takes"
                    " NumPy or JAX arrays: use a collate_fn in the loader, or tensor.numpy()"
                ) from error
            raise
        if strategy.must_wait:
            jax.block_until_ready(result)
        if placed.is_real is not None:
            result = _without_padding(result, placed.is_real)
            if other is not None:
                self._compare(result, _without_padding(other, placed.is_real))
        if strategy.donates and (is_ours or self.trains):
            _mark_donatable(result)
        return result

    def _elsewhere(self, strategy: Strategy, state: Any, args: tuple[Any, ...]) -> Any:
        """Runs the step with its own strategy; the new state keeps the strategy of the old."""
        result = self(state.with_strategy(strategy), *args)
        logs, new = read(self.name, result)
        if new is None:
            return result
        new = new.with_strategy(state.strategy)
        return (logs, new) if isinstance(result, tuple) else new

    def lower(self, state: Any, *args: Any) -> Any:
        """The lowered step, a `jax.stages.Lowered`."""
        placed = self._placed(state.strategy, args)
        return jax.jit(self._traced(state.strategy)).lower(state, placed.batch, placed.mask)

    def collectives(self, state: Any, *args: Any) -> dict[str, int]:
        """The number of collectives in the compiled step, by kind."""
        text = self.lower(state, *args).compile().as_text()
        found = re.findall(rf"= .*? ({'|'.join(COLLECTIVES)})(?:-start)?\(", text)
        return {kind: found.count(kind) for kind in COLLECTIVES if kind in found}

    def _placed(self, strategy: Strategy, args: tuple[Any, ...]) -> Placed:
        """The arguments on the devices; the first is the batch."""
        if not args:
            return Placed(args)
        placed = strategy.place_batch(args[0], self.name)
        return placed._replace(batch=(placed.batch, *args[1:]))

    def _try_other_rows(self, state: Any, placed: Placed) -> Any:
        """The result with other padding, the first time a batch of this shape is padded."""
        if placed.other is None:
            return None
        leaves, structure = jax.tree.flatten(placed.batch)
        types = tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)
        kind = (state.strategy, structure, types)
        if kind in self._tried:
            return None
        self._tried.add(kind)
        batch = (placed.other(), *placed.batch[1:])
        result = self._run(state.strategy)(_copy(state), batch, placed.mask)
        if state.strategy.must_wait:
            jax.block_until_ready(result)
        return result

    def _compare(self, result: Any, other: Any) -> None:
        """Raises if the result depends on the padding."""
        (logs, new), (other_logs, other_new) = read(self.name, result), read(self.name, other)
        plain = [
            {name: dict(one) for name, one in (each or {}).items()} for each in (logs, other_logs)
        ]
        counting = find_difference(*plain) or find_difference(new, other_new)
        if counting is not None:
            self._tried.clear()
            raise CicloError(
                f"{self.name}: this batch was padded so that it divides, and {counting} counts the"
                " padding; use managed.mean(values) on one value per row, leave out rows where"
                " managed.mask() is False, or give batches that divide"
            )

    def _checked(self, state: State) -> State:
        """A state that may be donated: the result of a step, else a copy."""
        if isinstance(state.step, jax.Array) and state.step.is_deleted():
            raise CicloError(
                f"{self.name} got a state that an earlier train step has consumed, because strategy"
                f" {state.strategy.name!r} donates it; continue with the state that the step"
                ' returned, or use strategy="jit"'
            )
        return state if state._is_ours or not self.trains else _copy(state)

    def _run(self, strategy: Strategy) -> Callable[..., Any]:
        run = self._compiled.get(strategy)
        if run is None:
            run = strategy.compile(self._traced(strategy), is_donating=self.trains)
            self._compiled[strategy] = run
        return run

    def _traced(self, strategy: Strategy) -> Callable[..., Any]:
        """The function to compile."""

        def traced(state: Any, args: tuple[Any, ...], is_real: Any) -> Any:
            token = current_mask.set(is_real)
            try:
                logs, new, is_pair = (self._train if self.trains else self._call)(state, args)
            finally:
                current_mask.reset(token)
            if logs is not None:
                held, handle = state if new is None else new, strategy.handle_metric
                logs, new = _with_metrics(self.name, logs, held, new, handle)
                logs = strategy.replicated(logs)
            new = None if new is None else strategy.constrained(new)
            return (logs, new) if is_pair else new if logs is None else logs

        traced.__name__ = self.name  # its name in profiles and compiler logs
        return traced

    def _call(self, state: Any, args: tuple[Any, ...]) -> tuple[Logs | None, Any, bool]:
        given, args = _to_compute(state, args)
        result = self.function(given, *args)
        logs, new = read(self.name, result)
        if new is not None:
            if not isinstance(new, ManagedState):
                raise CallbackError(
                    f"{self.name} returned {describe(new)} as the state; return logs, state"
                )
            if new.params is given.params:
                new = new.replace(params=state.params)
            elif state.policy is not None:  # restore the types of the parameters
                new = new.replace(params=_typed_like(state.params, new.params))
        if logs is not None:
            logs = _to_output(state, Logs(logs))
        return logs, new, isinstance(result, tuple)

    def _train(self, state: Any, args: tuple[Any, ...]) -> tuple[Logs | None, Any, bool]:
        def forward(params: Any) -> Any:
            logs, new, _ = self._call(state.replace(params=params), args)
            total = self._total(logs)
            if new is not None and new.step is not state.step:
                raise CallbackError(
                    f"{self.name} is a train step, which applies the gradients of its losses"
                    " itself, but it has already updated the state; leave apply_gradients out, or"
                    " decorate it with @managed.step"
                )
            return total, (logs, state if new is None else new)

        total, pull_back, (logs, new) = jax.vjp(forward, state.params, has_aux=True)
        one = jnp.ones_like(total)
        if isinstance(state.step, jax.core.Tracer) or state.step == 0:  # only once if eager
            self._check_dependence(pull_back, one, logs, state.params)
        (gradients,) = pull_back(one)
        is_real = mask()
        rows = samples_in(args[0] if args else 0) if is_real is None else is_real.sum()
        new = _as_before(state, new)
        strategy = state.strategy
        stats = strategy.handle_batch_stats(new.batch_stats)
        new = new.replace(params=state.params, batch_stats=stats)
        return logs, new.apply_gradients(strategy.handle_grads(gradients), rows), True

    def _check_dependence(self, pull_back: Any, one: Any, logs: Any, params: Any) -> None:
        """Refuses losses that do not depend on the parameters."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
                raise CicloError(
                    f"params{jax.tree_util.keystr(path)} is {describe(leaf)}, which cannot be"
                    " trained; move it to batch_stats, or to a field of your own state class"
                )
        backward = jax.make_jaxpr(pull_back)(one).jaxpr
        reached = set(map(id, backward.invars))
        for equation in backward.eqns:
            if not reached.isdisjoint(map(id, equation.invars)):
                reached.update(map(id, equation.outvars))
        if backward.outvars and reached.isdisjoint(map(id, backward.outvars)):
            raise CallbackError(
                f"{self.name}: the losses {list(logs['losses'])} do not depend on state.params, so"
                " nothing would be trained; compute them from the state argument, as in"
                ' state.apply_fn({"params": state.params}, batch["x"]), without argmax, round or'
                " stop_gradient"
            )

    def _total(self, logs: LogsLike | None) -> Any:
        losses: Mapping[str, Any] = (logs or {}).get("losses", {})
        if not losses:
            there = Logs(logs).names() if logs else "nothing"
            raise CallbackError(
                f"{self.name} is a train step and logged no loss (it logged {there}); its losses"
                ' are differentiated: logs.add_loss("loss", loss); return logs, state'
            )
        for name, loss in losses.items():
            if not hasattr(loss, "dtype") and not isinstance(loss, (int, float)):
                raise CallbackError(
                    f"{self.name}: the loss {name!r} is {describe(loss)}, not a number"
                )
            if jnp.shape(loss) != ():
                raise CallbackError(
                    f"{self.name}: the loss {name!r} is {describe(loss)}; a loss must be a scalar:"
                    f" logs.add_loss({name!r}, managed.mean(loss))"
                )
            if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
                raise CallbackError(
                    f"{self.name}: the loss {name!r} is {describe(loss)}, which has no gradient; a"
                    " loss must be a float"
                )
        return sum(losses.values())


class BoundStep(functools.partial[Any]):
    """A step bound to a state. A loop calls it with its own, newer state."""

    @property
    def __loop_step__(self) -> ManagedStep:
        step: ManagedStep = self.func  # type: ignore[assignment]
        return step


def _to_compute(state: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    policy = state.policy
    if policy is None or not args:  # a step without a batch computes nothing
        return state, args
    given = state.replace(params=policy.to_compute(state.params))
    return given, (policy.inputs_to_compute(args[0]), *args[1:])


def _to_output(state: Any, values: Any) -> Any:
    return values if state.policy is None else state.policy.to_output(values)


def _as_before(state: Any, new: Any) -> Any:
    """Restores the types of batch_stats, which a step in lower precision may change."""
    if state.policy is None:
        return new
    return new.replace(batch_stats=_typed_like(state.batch_stats, new.batch_stats))


def _typed_like(tree: Any, other: Any) -> Any:
    if jax.tree.structure(tree) != jax.tree.structure(other):  # type: ignore[operator]
        return other
    return jax.tree.map(lambda a, b: jnp.asarray(b, jnp.result_type(a)), tree, other)


def _with_metrics(
    name: str, logs: Logs, state: Any, new: Any, handle: Callable[[Any], Any]
) -> tuple[Logs, Any]:
    """Merges logged metrics into the fields of the state with their names, or into `metrics`.

    The logs get their computed values. A state class that declares `metrics` merges them itself.
    """
    logged = logs.get("stateful_metrics")
    if not logged:
        return logs, new
    is_kept = "metrics" not in state._redeclared
    own = {one.name for one in dataclasses.fields(state)} - _OURS
    fields = {one: getattr(state, one) for one in logged if one in own}
    merged = dict(state.metrics) if is_kept else {}
    values: dict[str, Any] = {}
    for key, value in logged.items():
        if not stateful.is_metric(value):
            values[key] = value
            continue
        metric = handle(value)
        held = fields if key in fields else merged
        if key in held:
            if new is None:
                raise CallbackError(
                    f"{name} logged the metric {key!r}, which is part of the state; return"
                    " logs, state"
                )
            metric = held[key] = stateful.merged(key, held[key], metric)
        elif is_kept:
            raise CicloError(
                f"{name} logged the metric {key!r}, which the state does not have; declare it:"
                f" create(..., metrics={{{key!r}: {type(value).__name__}}})"
            )
        values.update(stateful.computed(key, metric))
    logs = Logs({**logs, "stateful_metrics": values})
    if new is None:
        return logs, new
    return logs, new.replace(**fields, **({"metrics": merged} if is_kept else {}))


def _without_padding(result: Any, find_real: Callable[[], Any]) -> Any:
    """Removes padded rows from the outputs; processes may have padded differently."""
    logs, _ = read("step", result)
    outputs = (logs or {}).get("outputs", {})
    is_real: Any = find_real() if outputs else None
    for name, output in outputs.items():
        cut = jax.tree.map(
            lambda leaf: leaf[is_real] if leaf.shape[:1] == is_real.shape else leaf, output
        )
        logs["outputs"][name] = cut  # type: ignore[index]
    return result


def _mark_donatable(result: Any) -> None:
    """Marks the new state of a step: no one else has it, so the next step may donate it."""
    _, state = read("step", result)
    if state is not None:
        object.__setattr__(state, "_is_ours", True)


@jax.jit
def _copy(state: Any) -> Any:
    return jax.tree.map(jnp.copy, state)


class Decorator:
    """`@managed.step` and `@managed.train_step`, optionally with `strategy=`."""

    def __init__(self, trains: bool) -> None:
        self._trains = trains

    @overload
    def __call__(self, function: Callable[..., Any]) -> ManagedStep: ...
    @overload
    def __call__(
        self, *, strategy: str | Strategy
    ) -> Callable[[Callable[..., Any]], ManagedStep]: ...
    def __call__(
        self, function: Callable[..., Any] | None = None, *, strategy: str | Strategy | None = None
    ) -> Any:
        if function is None:
            return lambda function: ManagedStep(function, self._trains, strategy)
        return ManagedStep(function, self._trains, strategy)


# For evaluation and prediction. It may log, and return another state.
step = Decorator(trains=False)
# For training: the sum of its logged losses is minimised.
train_step = Decorator(trains=True)
_step = step  # inside ManagedState, `step` is a field


# -- the state -----------------------------------------------------------------------------------


class Window(NamedTuple):
    """Accumulated gradients: their sum, weighted by rows."""

    gradients: Any
    rows: jax.Array
    steps: jax.Array


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(static,))
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ManagedState:
    """Parameters and other training state, as an immutable pytree.

    A subclass may add fields, also `managed.static()` ones, and steps as methods.

    >>> state = ManagedState.create(params=params, tx=optax.adam(1e-3), strategy="data_parallel")
    """

    step: jax.Array  # number of completed train steps
    params: Any
    opt_state: Any
    batch_stats: Any  # non-trainable variables of the model
    rngs: dict[str, jax.Array]
    metrics: dict[str, Any]
    window: Window | None
    ema_state: EmaState | None
    apply_fn: Callable[..., Any] | None = field(default=None, metadata=STATIC)
    tx: Any = field(default=None, metadata=STATIC)
    strategy: Strategy = field(default=None, metadata=STATIC)  # type: ignore[assignment]
    policy: Policy | None = field(default=None, metadata=STATIC)
    accumulate: int | None = field(default=None, metadata=STATIC)
    ema_decay: float | None = field(default=None, metadata=STATIC)

    _is_ours: ClassVar[bool] = False  # created by a step, so a later step may donate it
    _redeclared: ClassVar[frozenset[str]] = frozenset()  # our fields that a subclass declares again

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _adopt_fields(cls)
        _register(dataclass(frozen=True, kw_only=True, eq=False, repr=False)(cls))

    @classmethod
    def create(
        cls,
        *,
        params: Any,
        tx: Any = None,
        apply_fn: Callable[..., Any] | None = None,
        strategy: str | Strategy = "jit",
        batch_stats: Any = None,
        rngs: Any = None,
        metrics: Any = None,
        accumulate: int | None = None,
        policy: Policy | str | None = None,
        clip_norm: float | None = None,
        ema_decay: float | None = None,
        **fields: Any,
    ) -> Self:
        """Creates a state and places it by its strategy. Your arrays are not changed.

        params: a tree of arrays, or a function that returns it: then it is created sharded
        tx: an optax optimizer
        batch_stats: non-trainable variables of the model
        rngs: a seed or a key (for "dropout"), or keys by name
        metrics: metrics of clu, flax.nnx or jax_metrics by name. A subclass that declares this
            field, or `rngs`, gets the given value unchanged
        accumulate: number of train steps per update, weighted by rows
        policy: "bfloat16" for mixed precision
        clip_norm: maximum gradient norm (optax.clip_by_global_norm)
        ema_decay: enables `state.ema_params`, a moving average of the parameters
        """
        strategy = get_strategy(strategy)
        if tx is not None and not (hasattr(tx, "init") and hasattr(tx, "update")):
            raise CicloError(
                f"tx={tx!r} is not an optimizer; use one of optax: tx=optax.adam(1e-3)"
            )
        unknown = fields.keys() - {one.name for one in dataclasses.fields(cls)}
        if unknown:
            options = ", ".join(list(inspect.signature(cls.create).parameters)[:-1])
            raise CicloError(
                f"{cls.__name__}.create has no option {min(unknown)!r}; the optimizer is tx=, and"
                f" the other options are {options}, and fields of the class"
            )
        check_training(accumulate, clip_norm, ema_decay)
        _check_params(params)
        if clip_norm is not None and tx is None:
            raise CicloError("clip_norm= needs an optimizer: tx=optax.adam(1e-3)")
        if clip_norm is not None:
            optax = need("optax", "clip_norm=")
            tx = optax.chain(optax.clip_by_global_norm(clip_norm), tx)

        own = {"rngs": rngs, "metrics": metrics}
        fields |= {name: own[name] for name in own.keys() & cls._redeclared}
        fixed = {name: fields.pop(name) for name in _static_names(cls) if name in fields}

        def build(params: Any, batch_stats: Any, fields: dict[str, Any]) -> Any:
            # Created here, because keys cannot be placed on devices of other processes.
            if "rngs" not in cls._redeclared:
                fields = {**fields, "rngs": _keys(rngs)}
            if "metrics" not in cls._redeclared:
                fields = {**fields, "metrics": stateful.declared(metrics)}
            return cls(
                step=jnp.zeros((), jnp.int32),
                params=params,
                opt_state=None if tx is None else tx.init(params),
                batch_stats=batch_stats,
                window=None if accumulate is None else _new_window(params),
                ema_state=None if ema_decay is None else _new_average(params),
                apply_fn=apply_fn,
                tx=tx,
                strategy=strategy,
                policy=Policy.of(policy),
                accumulate=accumulate,
                ema_decay=ema_decay,
                **fixed,
                **fields,
            )

        if _makes(params):
            stats = batch_stats if _makes(batch_stats) else lambda: batch_stats
            return _built(lambda: build(params(), stats(), fields), strategy)  # type: ignore[no-any-return]
        given = strategy.place(jax.tree.map(jnp.asarray, (params, batch_stats, fields)))
        made: Self = build(*given) if strategy.mesh is None else _built(build, strategy, *given)
        return made

    def replace(self, **fields: Any) -> Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **fields)

    def with_strategy(self, strategy: str | Strategy) -> Self:
        """The state with another strategy, placed accordingly."""
        chosen = get_strategy(strategy)
        return chosen.place(self.replace(strategy=chosen))  # type: ignore[no-any-return]

    def __loop_return__(self) -> Self:
        """The state for the caller, which no later step may donate."""
        return self.replace() if self._is_ours else self

    def __loop_trained__(self, logs: LogsLike) -> None:
        """Called after the first train step."""
        if self.tx is not None and logs.get("losses") and not int(self.step):
            raise CallbackError(
                "the train step logged losses but did not train the state: decorate it with"
                " @managed.train_step (@managed.step does not train)"
            )

    def __repr__(self) -> str:
        size = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        name = getattr(self.strategy, "name", None)
        return f"<{type(self).__name__} of {size:,} parameters, strategy {name!r}>"

    # -- random keys and metrics ---------------------------------------------------------------

    def rng(self, name: str = "dropout") -> jax.Array:
        """The random key with this name for this step."""
        if name not in self.rngs:
            there = ", ".join(map(repr, self.rngs)) or "none"
            raise CicloError(
                f"the state has no random key {name!r} (it has {there}); add it:"
                f" create(..., rngs={{{name!r}: jax.random.key(0)}})"
            )
        return jax.random.fold_in(self.rngs[name], self.step)

    @property
    def step_rngs(self) -> dict[str, jax.Array]:
        """All random keys for this step: `apply_fn(..., rngs=state.step_rngs)`."""
        return {name: self.rng(name) for name in self.rngs}

    def update_metrics(self, **values: Any) -> Self:
        """Adds the values of a batch to each metric, as `logits=..., labels=...`."""
        values = _to_output(self, values)
        return self.replace(
            metrics={name: stateful.updated(one, values) for name, one in self.metrics.items()}
        )

    def compute_metrics(self) -> dict[str, Any]:
        """The current values of the metrics."""
        found: dict[str, Any] = {}
        for name, metric in self.metrics.items():
            found.update(stateful.computed(name, metric))
        return found

    def reset_metrics(self) -> Self:
        """Resets all metrics."""
        if "metrics" in self._redeclared:
            return self
        return self.replace(
            metrics={name: stateful.empty(one) for name, one in self.metrics.items()}
        )

    @_step
    def reset_step(self) -> Self:
        """Resets all metrics, at the start of an epoch."""
        return self.reset_metrics()

    # -- updates -------------------------------------------------------------------------------

    @property
    def ema_params(self) -> Any:
        """The moving average of the parameters; before the first update, the parameters."""
        if self.ema_state is None:
            raise CicloError("the state has no average; use create(..., ema_decay=0.999)")
        count, total = self.ema_state
        share = averages.share(jnp.maximum(count, 1), self.ema_decay, jnp.expm1)  # type: ignore[arg-type]
        return jax.tree.map(
            lambda one, now: jnp.where(count > 0, (one / share).astype(now.dtype), now),
            total,
            self.params,
        )

    def apply_gradients(self, grads: Any, rows: Any = 1, **fields: Any) -> Self:
        """The state after an update with these gradients, which are a mean over `rows` rows.

        fields: other fields to change, as in Flax's TrainState
        """
        if self.tx is None:
            raise CicloError(
                "the state has no optimizer, so it cannot be trained; use"
                " create(..., tx=optax.adam(1e-3))"
            )
        state = self.replace(step=self.step + 1, **fields)
        if self.window is None or self.accumulate is None:
            return state._moved(grads)
        window = Window(
            jax.tree.map(lambda a, b: a + b * rows, self.window.gradients, grads),
            self.window.rows + rows,
            self.window.steps + 1,
        )
        state = state.replace(window=window)
        return jax.lax.cond(  # type: ignore[no-any-return]
            window.steps >= self.accumulate, _move_by_window, lambda state: state, state
        )

    @_step
    def flush_step(self) -> Self:
        """Applies accumulated gradients, at the end of an epoch."""
        if self.window is None:
            return self
        return jax.lax.cond(  # type: ignore[no-any-return]
            self.window.steps > 0, _move_by_window, lambda state: state, self
        )

    def _moved(self, gradients: Any) -> Self:
        optax = need("optax", "a train step")
        updates, opt_state = self.tx.update(gradients, self.opt_state, self.params)
        params = optax.apply_updates(self.params, updates)
        average = self.ema_state
        if average is not None:
            average = averages.moved(average, params, self.ema_decay, jax.tree.map)  # type: ignore[arg-type]
        return self.replace(params=params, opt_state=opt_state, ema_state=average)


def _move_by_window(state: State) -> State:
    assert state.window is not None
    gradients = jax.tree.map(lambda sum_: sum_ / state.window.rows, state.window.gradients)  # type: ignore[union-attr]
    return state._moved(gradients).replace(window=_new_window(state.params))


def _new_window(params: Any) -> Window:
    return Window(jax.tree.map(jnp.zeros_like, params), jnp.zeros(()), jnp.zeros((), jnp.int32))


def _new_average(params: Any) -> EmaState:
    def zeros(leaf: Any) -> Any:
        return jnp.zeros_like(leaf, jnp.promote_types(leaf.dtype, jnp.float32))

    return EmaState(jnp.zeros((), jnp.int32), jax.tree.map(zeros, params))


def _keys(given: Any) -> dict[str, jax.Array]:
    if given is None:
        return {}
    named = given if isinstance(given, dict) else {"dropout": given}
    for one in named.values():
        allowed = "a seed, a key such as jax.random.key(0), or a dict of these"
        check("rngs", one, lambda one: isinstance(one, (int, jax.Array, np.ndarray)), allowed)
    return {k: jax.random.key(v) if isinstance(v, int) else v for k, v in named.items()}


def _check_params(params: Any) -> None:
    """Refuses a model or anything else that is not a tree of arrays."""
    if (create := creator_of(params)) is not None:
        raise CicloError(f"params= is a model; write ciclo.{create}(...), or give its parameters")
    for path, leaf in [] if _makes(params) else jax.tree_util.tree_leaves_with_path(params):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (bool, int, float, complex)):
            place = jax.tree_util.keystr(path)
            raise CicloError(f"params{place} is {shown(leaf)}; params= is a tree of arrays")


def _static_names(cls: Any) -> list[str]:
    fields = dataclasses.fields(cls)
    # Flax spells it `flax.struct.field(pytree_node=False)`.
    return [
        one.name
        for one in fields
        if one.metadata.get("static") or one.metadata.get("pytree_node") is False
    ]


def _adopt_fields(cls: type[ManagedState]) -> None:
    """Checks which of our fields a subclass may declare again."""
    redeclared = inspect.get_annotations(cls).keys() & _OURS
    for name in redeclared:
        if name not in ADOPTED:
            raise CicloError(
                f"{cls.__name__}.{name} is a field of ManagedState; use another name for your"
                f" field, as {name}_"
            )
    cls._redeclared = cls._redeclared | frozenset(redeclared & {"metrics", "rngs"})


def _built(build: Callable[..., Any], strategy: Strategy, *given: Any) -> Any:
    """Calls `build`, creating each array on its devices."""
    if not strategy.is_compiled:
        return build(*given)
    if strategy.mesh is None:
        return jax.jit(build)(*given)
    places = strategy.shardings(jax.eval_shape(build, *given))
    return jax.jit(build, out_shardings=places)(*given)


def _makes(given: Any) -> bool:
    """Whether this is a function, and not a callable tree such as an Equinox module."""
    return callable(given) and jax.tree_util.treedef_is_leaf(jax.tree.structure(given))


def _register(cls: type[Any]) -> None:
    fixed = _static_names(cls)
    held = [one.name for one in dataclasses.fields(cls) if one.name not in fixed]
    jax.tree_util.register_dataclass(cls, held, fixed)


_register(ManagedState)
_OURS = frozenset(one.name for one in dataclasses.fields(ManagedState))
