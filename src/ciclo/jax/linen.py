"""`create_flax_state`: a flax.linen module as a managed state.

The module may write losses and metrics to collections with these names.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from ciclo.binding import name_of
from ciclo.errors import CicloError, check, need, shown
from ciclo.jax import model
from ciclo.jax.model import told
from ciclo.judging import named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ciclo.jax.model import Inputs, ModelState

__all__ = ["create_flax_state"]

WRITTEN = ("losses", "metrics")  # collections that are logged and not kept
# Options for each phase: `mutable_train=`, `rngs_init=`, `method_eval=`, and so on.
PHASES = {"init": ("init",), "train": ("train",), "apply": ("train", "evaluate")}
PHASES |= dict.fromkeys(("eval", "test", "predict"), ("evaluate",))


@dataclass(frozen=True)
class Phase:
    """How a module is called in one phase."""

    mutable: Any = None  # mutable collections; None for those of the state
    rngs: tuple[str, ...] | None = None  # random keys; None for all, in training only
    method: str | Callable[..., Any] | None = None
    training: tuple[str, bool] | None = None  # its argument for training


@dataclass(frozen=True)
class LinenForward:
    """A linen module as a function of its variables."""

    module: Any
    train: Phase = Phase()
    evaluate: Phase = Phase()
    kept: tuple[str, ...] | None = None  # collections besides the parameters; None for all
    has_full_paths: bool = False  # in the logs

    def __call__(
        self, params: Any, stats: Any, rngs: dict[str, Any], inputs: Inputs, is_training: bool
    ) -> tuple[Any, Any]:
        phase = self.train if is_training else self.evaluate
        changing = phase.mutable
        if changing is None:
            changing = list(stats) if is_training else []
        if changing is False or isinstance(changing, (str, list, tuple)):
            changing = [changing] if isinstance(changing, str) else list(changing or ())
            changing = [*changing, *WRITTEN]  # else True: all are mutable
        outputs, changed = self.module.apply(
            {"params": params, **stats},
            *inputs.args,
            rngs=rngs,
            mutable=changing,
            method=phase.method,
            **{**inputs.kwargs, **told(phase.training, is_training)},
        )
        changed = dict(changed)
        changed.pop("params", None)
        return outputs, {**stats, **self.only_kept(changed)}

    def keys(self, state: ModelState, is_training: bool) -> dict[str, Any]:
        """The random keys for this step."""
        names = (self.train if is_training else self.evaluate).rngs
        if names is None:
            names = tuple(state.rngs) if is_training else ()
        return {name: state.rng(name) for name in names}

    def take_written(self, stats: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Removes the logged collections from the changed ones, and returns them."""
        return {
            name: named_values(stats.pop(name, {}), name == "losses", self.has_full_paths)
            for name in WRITTEN
        }

    def only_kept(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Only the collections that the state keeps, and those that are logged."""
        if self.kept is None:
            return variables
        return {k: v for k, v in variables.items() if k in (*self.kept, *WRITTEN)}


def named_values(collection: Any, is_summed: bool, is_full: bool) -> dict[str, Any]:
    """The values that a module wrote to a collection: the last of each name, or the sum of losses.

    A name that several modules use is replaced by its full path.
    """
    found: dict[tuple[str, ...], Any] = {}
    leaves = jax.tree_util.tree_leaves_with_path(collection, is_leaf=lambda x: isinstance(x, tuple))
    for path, value in leaves:
        names = tuple(str(getattr(part, "key", part)) for part in path)
        if isinstance(value, tuple):  # `sow` collects several calls
            value = sum(value[1:], start=value[0]) if is_summed else value[-1]
        found[names] = value
    counts = Counter(names[-1] for names in found)
    return {
        "/".join(names) if is_full or counts[names[-1]] > 1 else names[-1]: value
        for names, value in found.items()
    }


def create_flax_state(
    module: Any,
    inputs: Any,
    tx: Any = None,
    key: Any = None,
    losses: Any = None,
    metrics: Any = None,
    *,
    strategy: Any = "jit",
    seed: int = 0,
    unpack: Callable[[Any], Any] | None = None,
    init_training_value: bool = False,
    logs_full_path: bool = False,
    keep_collections: Iterable[str] | None = None,
    **options: Any,
) -> ModelState:
    """Creates a state with `train_step`, `test_step`, `predict_step` and `reset_step`.

    inputs: example inputs to create the parameters: an array, or a tuple or mapping of arrays
    tx: an optax optimizer
    losses: a function of `preds` and `target`, or a dict of functions, whose values are summed.
        Their parameters are passed by name: also inputs, sample_weight, params, batch_stats, module
        and key_seq. A value per row is averaged over the real rows. The running mean of each loss
        is logged as `avg_<name>`
    metrics: functions like losses, or metrics of clu, flax.nnx or jax_metrics
    strategy: a name or a `ciclo.Strategy`
    seed, key: for the parameters and dropout; `key` is a JAX key or a seed
    unpack: a function of a batch that returns inputs and targets. By default a batch is x, (x, y)
        or (x, y, sample_weight), or a dict in which `y`, `target(s)` or `label(s)` is the target
    init_training_value: the module's training argument when the parameters are created
    logs_full_path: whether values in the collections `losses` and `metrics` of the module are
        logged with their full paths
    keep_collections: the collections besides the parameters to keep in the state; all by default
    options: `mutable_train`, `rngs_train`, `method_train`, and the same with `_init` and `_eval`,
        for `module.apply`; and accumulate, policy, clip_norm and ema_decay of
        `ManagedState.create`. With ema_decay, `test_step` and `predict_step` use the average

    >>> state = ciclo.create_flax_state(
    ...     Model(), jnp.zeros((1, 64)), optax.adam(1e-3), losses=cross_entropy
    ... )
    >>> ciclo.fit(state, train, valid, epochs=3)
    """
    _check_module(module)
    if hasattr(inputs, "init") and hasattr(inputs, "update"):
        raise CicloError(
            "inputs is an optimizer; the second argument is an example of the module's inputs:"
            " create_flax_state(module, jnp.zeros((1, 64)), optimizer)"
        )
    if not any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(inputs)):
        raise CicloError(
            f"inputs={shown(inputs)} has no array; give an example of the module's inputs:"
            " create_flax_state(module, jnp.zeros((1, 64)), optimizer)"
        )
    phases = _phases(options)
    training = {name: _training(module, phase.get("method")) for name, phase in phases.items()}
    forward = LinenForward(
        module,
        Phase(**phases["train"], training=training["train"]),
        Phase(**phases["evaluate"], training=training["evaluate"]),
        _names("keep_collections", keep_collections),
        logs_full_path,
    )
    if key is None or isinstance(key, int):
        key = jax.random.key(seed if key is None else key)
    check("key", key, lambda one: one.dtype, "jax.random.key(0), or a seed")
    flags = told(training["init"], init_training_value)

    def init() -> tuple[Any, Any]:
        found = _variables(module, inputs, key, phases["init"], flags)
        params = found.pop("params", {})
        return params, {k: v for k, v in forward.only_kept(found).items() if k not in WRITTEN}

    written = jax.eval_shape(lambda: _variables(module, inputs, key, phases["init"], flags))
    own = named_values(written.get("losses", {}), False, logs_full_path)
    return model.create(
        forward=forward,
        init=init,
        losses=losses,
        metrics=metrics,
        averaged=[*named("losses", losses, "loss"), *own],
        unpack=unpack,
        apply_fn=module.apply,
        tx=tx,
        strategy=strategy,
        rngs=options.pop("rngs") if "rngs" in options else _keys(key, phases),
        **options,
    )


def _check_module(module: Any) -> None:
    if not isinstance(module, need("flax.linen", "ciclo.create_flax_state()", "flax").Module):
        raise CicloError(
            f"{name_of(module)} is not a module of flax.linen; give an object, as Model(). For"
            " flax.nnx use ciclo.create_nnx_state, for Haiku ciclo.create_haiku_state"
        )


def _variables(
    module: Any, inputs: Any, key: Any, phase: dict[str, Any], flags: dict[str, bool]
) -> dict[str, Any]:
    """The initial parameters and other collections of a module."""
    first = model.Inputs.of(inputs)
    options = dict(phase)
    names = options.pop("rngs", None)
    names = ("dropout",) if names is None else [one for one in names if one != "params"]
    keys = zip(("params", *names), jax.random.split(key, 1 + len(names)), strict=True)
    return dict(module.init(dict(keys), *first.args, **options, **{**first.kwargs, **flags}))


def _phases(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Removes the options of phases from all options, and returns them."""
    found: dict[str, dict[str, Any]] = {"init": {}, "train": {}, "evaluate": {}}
    for name in [*options]:
        match = re.fullmatch(r"(mutable|rngs|method)_(\w+)", name)
        if match is None:
            continue
        what, when = match.groups()
        if when not in PHASES:
            raise CicloError(
                f"create_flax_state has no {name!r}; use {what}_init, {what}_train or {what}_eval"
            )
        given = options.pop(name)
        if what == "rngs":
            given = _names(name, given)
        elif isinstance(given, list):
            given = tuple(given)  # hashable, for jit
        for phase in PHASES[when]:
            if found[phase].setdefault(what, given) != given:
                raise CicloError(f"{name}={given!r} contradicts another option; give {what}_eval")
    return found


def _names(option: str, given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    check(option, given, lambda one: "".join(one) is not None, "a list of names, or None")
    return (given,) if isinstance(given, str) else tuple(given)


def _keys(start: Any, phases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The random keys of a state: dropout, and the names in its phases."""
    asked = [phases[one].get("rngs") or () for one in ("train", "evaluate")]
    names = dict.fromkeys(("dropout", *asked[0], *asked[1]))
    return {n: jax.random.fold_in(start, i) if i else start for i, n in enumerate(names)}


def _training(module: Any, method: Any) -> tuple[str, bool] | None:
    """The training argument of a method of a module."""
    named = "__call__" if method is None else method
    return model.training_argument(
        getattr(type(module), named) if isinstance(named, str) else named
    )
