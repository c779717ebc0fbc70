"""A linen module as a function of its variables; it may write losses and metrics itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from ciclo.states.model import told

if TYPE_CHECKING:
    from collections.abc import Callable

    from ciclo.states.model import Inputs, ModelState

WRITTEN = ("losses", "metrics")  # collections of variables that are logged, and not kept


@dataclass(frozen=True)
class Phase:
    """How a module is called in training, or otherwise."""

    mutable: Any = None  # collections that change; those of the state if None
    rngs: tuple[str, ...] | None = None  # keys that it is given; all in training if None
    method: str | Callable[..., Any] | None = None
    training: tuple[str, bool] | None = None  # how it is told that it is trained


@dataclass(frozen=True)
class LinenForward:
    """A linen module as a function of its variables."""

    module: Any
    train: Phase = Phase()
    evaluate: Phase = Phase()
    kept: tuple[str, ...] | None = None  # collections beside the parameters; all if None
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
            changing = [*changing, *WRITTEN]  # else True: all may change
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
        """The random keys that the module is given in this step."""
        names = (self.train if is_training else self.evaluate).rngs
        if names is None:
            names = tuple(state.rngs) if is_training else ()
        return {name: state.rng(name) for name in names}

    def take_written(self, stats: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Takes what is to be logged out of what the module has changed."""
        return {
            name: named_values(stats.pop(name, {}), name == "losses", self.has_full_paths)
            for name in WRITTEN
        }

    def only_kept(self, variables: dict[str, Any]) -> dict[str, Any]:
        """The collections that the state keeps, and those that are logged."""
        if self.kept is None:
            return variables
        return {k: v for k, v in variables.items() if k in (*self.kept, *WRITTEN)}


def named_values(collection: Any, is_summed: bool, is_full: bool) -> dict[str, Any]:
    """What a module wrote into a collection, by name: the last of it, or the sum of it for losses.

    A name that several modules use becomes its whole path.
    """
    found: dict[tuple[str, ...], Any] = {}
    leaves = jax.tree_util.tree_leaves_with_path(collection, is_leaf=lambda x: isinstance(x, tuple))
    for path, value in leaves:
        names = tuple(str(getattr(part, "key", part)) for part in path)
        if isinstance(value, tuple):  # what `sow` makes of several calls
            value = sum(value[1:], start=value[0]) if is_summed else value[-1]
        found[names] = value
    counts = Counter(names[-1] for names in found)
    return {
        "/".join(names) if is_full or counts[names[-1]] > 1 else names[-1]: value
        for names, value in found.items()
    }
