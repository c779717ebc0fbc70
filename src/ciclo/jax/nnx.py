"""`create_nnx_state`: a flax.nnx module as a managed state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ciclo.binding import creator_of
from ciclo.errors import CicloError, need, shown
from ciclo.jax import model

if TYPE_CHECKING:
    from typing import Unpack

    from ciclo.jax.model import Inputs, ModelOptions, ModelState

__all__ = ["create_nnx_state", "nnx_module"]


@dataclass(frozen=True)
class NnxForward:
    """An NNX module as a function of its parameters and other variables."""

    graph: Any

    def __call__(
        self, params: Any, stats: Any, rngs: dict[str, Any], inputs: Inputs, is_training: bool
    ) -> tuple[Any, Any]:
        from flax import nnx

        module = nnx.merge(self.graph, params, stats)
        module.train() if is_training else module.eval()
        outputs = module(*inputs.args, **inputs.kwargs)
        # The static part of a module does not change.
        return outputs, _others(module) if is_training else stats


def _others(module: Any) -> Any:
    """All variables except parameters, as a plain dict."""
    from flax import nnx

    return nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))


def create_nnx_state(module: Any, tx: Any = None, **options: Unpack[ModelOptions]) -> ModelState:
    """Creates a state with `train_step`, `test_step`, `predict_step` and `reset_step`.

    module: an NNX module, which is not changed, or a function that returns one: then the parameters
        are created sharded. `nnx_module(state)` returns the trained module
    tx, options: losses, metrics, strategy, unpack and more, as in `create_flax_state`

    >>> state = ciclo.create_nnx_state(
    ...     Model(rngs=nnx.Rngs(0)), optax.adam(1e-3), losses=cross_entropy
    ... )
    """
    nnx = need("flax.nnx", "ciclo.create_nnx_state()", "flax")
    is_made = isinstance(module, nnx.Module)
    if not is_made and (not callable(module) or creator_of(module) or isinstance(module, type)):
        hint = f"; use ciclo.{create}" if (create := creator_of(module)) else ""
        raise CicloError(
            f"create_nnx_state was given {shown(module)}; give a module of flax.nnx, or a"
            f" function that returns one, as lambda: Model(rngs=nnx.Rngs(0)){hint}"
        )

    def parts(made: Any) -> tuple[Any, Any]:
        return nnx.to_pure_dict(nnx.state(made, nnx.Param)), _others(made)

    return model.create(
        forward=NnxForward(nnx.graphdef(module if is_made else nnx.eval_shape(module))),
        init=parts(module) if is_made else lambda: parts(module()),
        tx=tx,
        **options,
    )


def nnx_module(state: ModelState) -> Any:
    """The module with the current values of a state."""
    model.check_made_by("create_nnx_state", state, NnxForward)
    from flax import nnx

    return nnx.merge(state.forward.graph, state.params, state.batch_stats)
