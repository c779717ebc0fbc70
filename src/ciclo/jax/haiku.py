"""`create_haiku_state`: a function of Haiku modules as a managed state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from ciclo.errors import check, need
from ciclo.jax import model
from ciclo.jax.model import told

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Unpack

    from ciclo.jax.model import Inputs, ModelOptions, ModelState

__all__ = ["create_haiku_state"]


@dataclass(frozen=True)
class HaikuForward:
    """A transformed function."""

    transformed: Any
    training: tuple[str, bool] | None

    def __call__(
        self, params: Any, stats: Any, rngs: dict[str, Any], inputs: Inputs, is_training: bool
    ) -> tuple[Any, Any]:
        kwargs = {**inputs.kwargs, **told(self.training, is_training)}
        key = rngs.get("dropout")
        outputs, new = self.transformed.apply(params, stats, key, *inputs.args, **kwargs)
        return outputs, new if is_training else stats


def create_haiku_state(
    function: Callable[..., Any],
    inputs: Any,
    tx: Any = None,
    *,
    seed: int = 0,
    **options: Unpack[ModelOptions],
) -> ModelState:
    """Creates a state with `train_step`, `test_step`, `predict_step` and `reset_step`.

    function: an argument for `hk.transform_with_state`, called with `is_training` if it has that
        parameter; or a result of `hk.transform_with_state` or `hk.transform`
    inputs, tx, seed, options: losses, metrics, strategy, unpack and more, as in
        `create_flax_state`

    >>> state = ciclo.create_haiku_state(
    ...     lambda x: hk.nets.MLP([32, 10])(x),
    ...     jnp.zeros((1, 64)),
    ...     optax.adam(1e-3),
    ...     losses=cross_entropy,
    ... )
    """
    haiku = need("haiku", "ciclo.create_haiku_state()", "dm-haiku")
    training = None
    transformed = function
    if isinstance(function, haiku.Transformed):
        transformed = haiku.with_empty_state(function)
    elif not isinstance(function, haiku.TransformedWithState):
        check("function", function, callable, "a function of Haiku modules")
        transformed = haiku.transform_with_state(function)
        training = model.training_argument(function)
    args = inputs if isinstance(inputs, tuple) else (inputs,)

    def init() -> tuple[Any, Any]:
        # Haiku creates its state in a forward pass for training.
        return transformed.init(jax.random.key(seed), *args, **told(training, True))  # type: ignore[attr-defined, no-any-return]

    return model.create(
        forward=HaikuForward(transformed, training),
        init=init,
        apply_fn=transformed.apply,  # type: ignore[attr-defined]
        tx=tx,
        rngs=options.pop("rngs", seed + 1),
        **options,
    )
