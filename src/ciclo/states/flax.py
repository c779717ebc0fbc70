"""`create_flax_state`: a module of flax.linen as a state that every loop can train."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ciclo.errors import CicloError, need

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ciclo.states.model import ModelState

# Options for each of these: `mutable_train=`, `rngs_init=`, `method_eval=`, and so on.
PHASES = {"init": ("init",), "train": ("train",), "apply": ("train", "evaluate")}
PHASES |= dict.fromkeys(("eval", "test", "predict"), ("evaluate",))


def create_flax_state(
    module: Any,
    inputs: Any,
    tx: Any = None,
    *,
    losses: Any = None,
    metrics: Any = None,
    strategy: Any = "jit",
    seed: int = 0,
    key: Any = None,
    unpack: Callable[[Any], Any] | None = None,
    init_training_value: bool = False,
    logs_full_path: bool = False,
    keep_collections: Iterable[str] | None = None,
    **options: Any,
) -> ModelState:
    """A state with `train_step`, `test_step`, `predict_step` and `reset_step`, for every loop.

    inputs: an array like those of a batch, or a tuple or mapping of several, to make the parameters
    tx: an optimizer of optax
    losses: a function of `preds` and `target`, or a dict of them, which are summed. They are called
        by the names of their parameters: inputs, sample_weight, params, batch_stats, module and
        key_seq are there too. One that returns a value a row is averaged over the rows that are
        real. The mean so far of each is logged as `avg_<name>`
    metrics: the same, or metrics of clu, flax.nnx or jax_metrics
    strategy: a name or a `ciclo.Strategy`
    seed, key: of the parameters, and of dropout
    unpack: a function of a batch that returns inputs and targets; without it, a batch is x, (x, y)
        or (x, y, sample_weight), or a dict whose `y`, `target(s)` or `label(s)` is the targets
    init_training_value: what the module is told of training when the parameters are made
    logs_full_path: whether what the module writes into the collections `losses` and `metrics` is
        logged by its whole path
    keep_collections: the collections beside the parameters that the state keeps; all if not given
    options: `mutable_train`, `rngs_train`, `method_train`, and the same for `_init` and `_eval`, as
        `module.apply` takes them; and more of `ManagedState.create`: accumulate, policy, clip_norm,
        and ema_decay, with which `test_step` and `predict_step` use the average

    >>> state = ciclo.create_flax_state(
    ...     Model(), jnp.zeros((1, 64)), optax.adam(1e-3), losses=cross_entropy
    ... )
    >>> ciclo.fit(state, train, valid, epochs=3)
    """
    need("flax.linen", "ciclo.create_flax_state()", "flax")
    import jax

    from ciclo.states import linen, model

    phases = _phases(options)
    training = {name: _training(module, phase.get("method")) for name, phase in phases.items()}
    forward = linen.LinenForward(
        module,
        linen.Phase(**phases["train"], training=training["train"]),
        linen.Phase(**phases["evaluate"], training=training["evaluate"]),
        None if keep_collections is None else tuple(keep_collections),
        logs_full_path,
    )
    first = model.Inputs.of(inputs)
    start = jax.random.key(seed) if key is None else key
    names = phases["init"].pop("rngs", None)
    names = ("dropout",) if names is None else tuple(one for one in names if one != "params")

    def variables() -> dict[str, Any]:
        params, *others = jax.random.split(start, 1 + len(names))
        keys = {"params": params, **dict(zip(names, others, strict=True))}
        kwargs = {**first.kwargs, **model.told(training["init"], init_training_value)}
        return dict(module.init(keys, *first.args, **phases["init"], **kwargs))

    def init() -> tuple[Any, Any]:
        found = variables()
        params = found.pop("params", {})
        return params, {k: v for k, v in forward.only_kept(found).items() if k not in linen.WRITTEN}

    written = jax.eval_shape(variables).get("losses", {})
    return model.create(
        forward=forward,
        init=init,
        losses=losses,
        metrics=metrics,
        averaged=[
            *model.named("losses", losses, "loss"),
            *linen.named_values(written, False, logs_full_path),
        ],
        unpack=unpack,
        apply_fn=module.apply,
        tx=tx,
        strategy=strategy,
        rngs=options.pop("rngs") if "rngs" in options else _keys(start, phases),
        **options,
    )


def _phases(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Takes the options of phases out of all options."""
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
        if what == "rngs" and given is not None:
            given = (given,) if isinstance(given, str) else tuple(given)
        elif isinstance(given, list):
            given = tuple(given)  # it is compiled for
        for phase in PHASES[when]:
            if found[phase].setdefault(what, given) != given:
                raise CicloError(f"{name}={given!r} contradicts another option; give {what}_eval")
    return found


def _keys(start: Any, phases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The random keys of a state: for dropout, and what its phases name."""
    import jax

    asked = [phases[one].get("rngs") or () for one in ("train", "evaluate")]
    names = dict.fromkeys(("dropout", *asked[0], *asked[1]))
    return {n: jax.random.fold_in(start, i) if i else start for i, n in enumerate(names)}


def _training(module: Any, method: Any) -> tuple[str, bool] | None:
    """What a method of a module calls it that it is trained."""
    from ciclo.states.model import training_argument

    named = "__call__" if method is None else method
    return training_argument(getattr(type(module), named) if isinstance(named, str) else named)
