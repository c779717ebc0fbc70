"""Independent copies of a state, and how to restore them.

Objects with `state_dict` and `load_state_dict` (torch modules, optimizers) and NNX modules are
restored in place, because the program refers to them; arrays and plain values are returned as
copies. JAX arrays get their own memory, so the state can be donated without affecting the copy.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

from ciclo._trees import mapped
from ciclo.checkpoints.tree import typed
from ciclo.device_values import library_of


class StateCopy:
    """A copy of a state."""

    __slots__ = ("_kept",)

    def __init__(self, state: Any) -> None:
        self._kept = mapped(_copied, state)

    def restore(self) -> Any:
        """The copied state; can be called again."""
        return mapped(_restored, self._kept)

    def plain(self) -> Any:
        """The copied values without their owners, for a checkpoint."""
        return mapped(lambda one: one.held if isinstance(one, InPlace) else one, self._kept)

    @classmethod
    def of(cls, plain: Any, like: Any) -> StateCopy:
        """The copy from the result of `plain()`, for a state like `like`."""
        copied = cls.__new__(cls)
        copied._kept = mapped(_linked, like, plain)
        return copied


class InPlace:
    """An object that is restored in place, and its copied content."""

    __slots__ = ("held", "owner")

    def __init__(self, owner: Any, held: Any) -> None:
        self.owner = owner
        self.held = held


def _copied(state: Any) -> Any:
    if _has_state_dict(state):
        return InPlace(state, copy.deepcopy(state.state_dict()))
    if _is_nnx(state):
        return InPlace(state, _copied(sys.modules["flax.nnx"].state(state)))
    if library_of(state) == "torch" and hasattr(state, "detach"):
        return state.detach().clone().requires_grad_(state.requires_grad)
    if _is_jax_tree(state):
        return sys.modules["jax"].tree.map(lambda leaf: leaf.copy(), state)
    return copy.deepcopy(state)


def _restored(kept: Any) -> Any:
    if not isinstance(kept, InPlace):
        return _copied(kept)
    if _is_nnx(kept.owner):
        sys.modules["flax.nnx"].update(kept.owner, _copied(kept.held))
    else:
        kept.owner.load_state_dict(copy.deepcopy(kept.held))
    return kept.owner


def _linked(like: Any, plain: Any) -> Any:
    if _is_nnx(like):
        return InPlace(like, typed(plain, sys.modules["flax.nnx"].state(like)))
    return InPlace(like, plain) if _has_state_dict(like) else typed(plain, like)


def _has_state_dict(state: Any) -> bool:
    return hasattr(state, "state_dict") and hasattr(state, "load_state_dict")


def _is_nnx(state: Any) -> bool:
    """Whether this is a module or an optimizer of flax.nnx."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(state, getattr(nnx, "Pytree", nnx.Module))


def _is_jax_tree(state: Any) -> bool:
    """Whether this is a pytree of JAX arrays only."""
    jax = sys.modules.get("jax")
    if jax is None:
        return False
    leaves = jax.tree.leaves(state)
    return bool(leaves) and all(isinstance(leaf, jax.Array) for leaf in leaves)
