"""`create_flax_state`: a module of flax.linen as a state that every loop can train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ciclo.errors import need

if TYPE_CHECKING:
    from collections.abc import Callable

    from ciclo.states.model import Inputs, ModelState


@dataclass(frozen=True)
class LinenForward:
    """A linen module as a function of its variables."""

    module: Any
    training: tuple[str, bool] | None

    def __call__(
        self, params: Any, stats: Any, rngs: dict[str, Any], inputs: Inputs, is_training: bool
    ) -> tuple[Any, Any]:
        from ciclo.states.model import told

        variables = {"params": params, **stats}
        kwargs = {**inputs.kwargs, **told(self.training, is_training)}
        if not (is_training and stats):
            return self.module.apply(variables, *inputs.args, rngs=rngs, **kwargs), stats
        return self.module.apply(  # type: ignore[no-any-return]
            variables, *inputs.args, rngs=rngs, mutable=list(stats), **kwargs
        )


def create_flax_state(
    module: Any,
    inputs: Any,
    tx: Any = None,
    *,
    losses: Any = None,
    metrics: Any = None,
    strategy: Any = "jit",
    seed: int = 0,
    unpack: Callable[[Any], Any] | None = None,
    **options: Any,
) -> ModelState:
    """A state with `train_step`, `test_step`, `predict_step` and `reset_step`, for every loop.

    inputs: an array like those of a batch, or a tuple of several, to make the parameters with
    tx: an optimizer of optax
    losses: a function of outputs and targets, or a dict of them, which are summed. One that
        returns a value a row is averaged over the rows that are real
    metrics: the same, or metrics of clu, flax.nnx or jax_metrics
    strategy: a name or a `ciclo.Strategy`
    seed: of the parameters, and of dropout
    unpack: a function of a batch that returns inputs and targets; without it, the last item of a
        tuple, or `y`, `target(s)` or `label(s)` of a dict, is the targets
    options: more of `ManagedState.create`: accumulate, policy, clip_norm, and
        ema_decay, with which `test_step` and `predict_step` use the average

    >>> state = ciclo.create_flax_state(
    ...     Model(), jnp.zeros((1, 64)), optax.adam(1e-3), losses=cross_entropy
    ... )
    >>> ciclo.fit(state, train, valid, epochs=3)
    """
    need("flax.linen", "ciclo.create_flax_state()", "flax")
    import jax

    from ciclo.states import model

    training = model.training_argument(type(module).__call__)
    args = inputs if isinstance(inputs, tuple) else (inputs,)

    def init() -> tuple[Any, Any]:
        key, dropout = jax.random.split(jax.random.key(seed))
        keys = {"params": key, "dropout": dropout}
        variables = dict(module.init(keys, *args, **model.told(training, False)))
        return variables.pop("params", {}), variables

    return model.create(
        forward=LinenForward(module, training),
        init=init,
        losses=losses,
        metrics=metrics,
        unpack=unpack,
        apply_fn=module.apply,
        tx=tx,
        strategy=strategy,
        rngs=options.pop("rngs", seed),
        **options,
    )
