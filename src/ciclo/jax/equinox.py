"""`create_equinox_state`: an Equinox module as a managed state."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import jax

from ciclo.errors import check, need
from ciclo.jax import model

if TYPE_CHECKING:
    from typing import Unpack

    from ciclo.jax.model import Inputs, ModelOptions, ModelState

__all__ = ["create_equinox_state", "equinox_module"]


class EquinoxForward:
    """An Equinox module as a function of its arrays, mapped over the rows of a batch."""

    def __init__(self, module: Any, has_state: bool) -> None:
        import equinox

        # Everything but the arrays: functions and sizes, which are constants of the compiled step.
        self.rest = equinox.filter(module, equinox.is_array, inverse=True)
        self.has_state = has_state
        self.takes_key = "key" in inspect.signature(type(module).__call__).parameters

    def __call__(
        self, params: Any, stats: Any, rngs: dict[str, Any], inputs: Inputs, is_training: bool
    ) -> tuple[Any, Any]:
        import equinox

        fixed, kept = stats
        module = equinox.nn.inference_mode(
            equinox.combine(params, fixed, self.rest), not is_training
        )
        rows = jax.tree.leaves(inputs.args)[0].shape[0]
        has_keys = self.takes_key and bool(rngs)
        keys = jax.random.split(rngs["dropout"], rows) if has_keys else None

        def call(key: Any, *args: Any) -> Any:
            state = (kept,) if self.has_state else ()
            named = {"key": key} if self.takes_key else {}
            return module(*args, *state, **named)

        out_axes = (0, None) if self.has_state else 0
        in_axes = (0 if has_keys else None, *[0] * len(inputs.args))
        called = jax.vmap(call, in_axes=in_axes, out_axes=out_axes, axis_name="batch")
        result = called(keys, *inputs.args)
        outputs, kept = result if self.has_state else (result, kept)
        return outputs, (fixed, kept) if is_training else stats


def create_equinox_state(
    module: Any,
    tx: Any = None,
    *,
    model_state: Any = None,
    seed: int = 0,
    **options: Unpack[ModelOptions],
) -> ModelState:
    """Creates a state with `train_step`, `test_step`, `predict_step` and `reset_step`.

    module: an Equinox module, called for each row with `jax.vmap(..., axis_name="batch")`, and with
        `key=` if it has that parameter. `equinox_module(state)` returns the trained module
    model_state: the second result of `equinox.nn.make_with_state`, if there is one
    seed: for dropout
    tx, options: losses, metrics, strategy, unpack and more, as in `create_flax_state`

    >>> state = ciclo.create_equinox_state(
    ...     eqx.nn.MLP(64, 10, 32, 1, key=key), optax.adam(1e-3), losses=cross_entropy
    ... )
    """
    equinox = need("equinox", "ciclo.create_equinox_state()")
    check("module", module, equinox.Module, "an object of equinox.Module")
    params, others = equinox.partition(module, equinox.is_inexact_array)
    fixed = equinox.filter(others, equinox.is_array)
    return model.create(
        forward=EquinoxForward(module, model_state is not None),
        init=(params, (fixed, model_state)),
        tx=tx,
        rngs=options.pop("rngs", seed),
        **options,
    )


def equinox_module(state: ModelState) -> Any:
    """The module with the current values of a state."""
    model.check_made_by("create_equinox_state", state, EquinoxForward)
    import equinox

    return equinox.combine(state.params, state.batch_stats[0], state.forward.rest)
