"""Copies of a state that nothing done to the state afterwards can reach, and the way back.

What has `state_dict` and `load_state_dict` (torch modules, optimizers and their kind), and modules
of NNX, are filled in place again, since others hold them; arrays and plain values come back as
copies. JAX arrays get memory of their own, so that donating the state leaves the copy alone.
"""

from __future__ import annotations

import copy
import sys
from typing import Any


class StateCopy:
    """A state as it was."""

    __slots__ = ("_kept",)

    def __init__(self, state: Any) -> None:
        self._kept = _copied(state)

    def restore(self) -> Any:
        """The state as it was; may be asked for again."""
        return _restored(self._kept)

    def plain(self) -> Any:
        """What was kept, without the objects that hold it, for a checkpoint."""
        return _plain(self._kept)

    @classmethod
    def of(cls, plain: Any, like: Any) -> StateCopy:
        """The copy that `plain` was taken of, for a state like this one."""
        copied = cls.__new__(cls)
        copied._kept = _linked(plain, like)
        return copied


class InPlace:
    """An object that can be filled again, and what it held."""

    __slots__ = ("held", "owner")

    def __init__(self, owner: Any, held: Any) -> None:
        self.owner = owner
        self.held = held


def _copied(state: Any) -> Any:
    if _has_state_dict(state):
        return InPlace(state, copy.deepcopy(state.state_dict()))
    if _is_nnx(state):
        return InPlace(state, _copied(sys.modules["flax.nnx"].state(state)))
    if type(state) is dict:
        return {key: _copied(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_copied(value) for value in state)
    if type(state).__module__.partition(".")[0] == "torch" and hasattr(state, "detach"):
        return state.detach().clone().requires_grad_(state.requires_grad)
    if _is_jax_tree(state):
        jax = sys.modules["jax"]
        return jax.tree.map(lambda leaf: leaf.copy(), state)
    return copy.deepcopy(state)


def _restored(kept: Any) -> Any:
    if isinstance(kept, InPlace):
        if _is_nnx(kept.owner):
            sys.modules["flax.nnx"].update(kept.owner, _copied(kept.held))
        else:
            kept.owner.load_state_dict(copy.deepcopy(kept.held))
        return kept.owner
    if type(kept) is dict:
        return {key: _restored(value) for key, value in kept.items()}
    if type(kept) in (list, tuple):
        return type(kept)(_restored(value) for value in kept)
    return _copied(kept)


def _plain(kept: Any) -> Any:
    if isinstance(kept, InPlace):
        return kept.held
    if type(kept) is dict:
        return {key: _plain(value) for key, value in kept.items()}
    if type(kept) in (list, tuple):
        return type(kept)(_plain(value) for value in kept)
    return kept


def _linked(plain: Any, like: Any) -> Any:
    from ciclo.checkpoints.tree import typed

    if _is_nnx(like):
        return InPlace(like, typed(plain, sys.modules["flax.nnx"].state(like)))
    if _has_state_dict(like):
        return InPlace(like, plain)
    if type(like) is dict:
        return {key: _linked(plain[key], value) for key, value in like.items()}
    if type(like) in (list, tuple):
        return type(like)(_linked(a, b) for a, b in zip(plain, like, strict=True))
    return typed(plain, like)


def _has_state_dict(state: Any) -> bool:
    return hasattr(state, "state_dict") and hasattr(state, "load_state_dict")


def _is_nnx(state: Any) -> bool:
    """Whether this is a module or an optimizer of flax.nnx, which change in place."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(state, getattr(nnx, "Pytree", nnx.Module))


def _is_jax_tree(state: Any) -> bool:
    """Whether JAX knows the inside of this type, and all of that is arrays."""
    jax = sys.modules.get("jax")
    if jax is None:
        return False
    leaves = jax.tree.leaves(state)
    return bool(leaves) and all(isinstance(leaf, jax.Array) for leaf in leaves)
