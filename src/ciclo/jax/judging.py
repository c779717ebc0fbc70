"""How losses and metrics of a model are called: by the names of their parameters.

A function asks for what it needs: `preds`, `target`, `inputs`, `sample_weight`, `params`,
`batch_stats`, `module`, `key_seq`, the losses by their names, and the labels and inputs by theirs
where these are mappings. A function whose parameters have other names gets preds and target.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax

from ciclo.errors import CallbackError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ORDER = ("preds", "target")
# What other libraries call these two.
ALIASES = {
    **dict.fromkeys(("pred", "predictions", "prediction", "outputs", "output"), "preds"),
    **dict.fromkeys(("logits", "y_pred"), "preds"),
    **dict.fromkeys(("targets", "labels", "label", "y_true", "y"), "target"),
}
NAMES = (*ORDER, *ALIASES, "inputs", "sample_weight", "params", "batch_stats", "module", "key_seq")


class KeySeq:
    """Random keys, as many as are asked for: `next(key_seq)` or `key_seq()`."""

    def __init__(self, key: Any) -> None:
        self._key = key

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._key is None:
            raise CallbackError("the state has no random keys; say create(..., rngs=0)")
        self._key, key = jax.random.split(self._key)
        return key

    __call__ = __next__


def called(name: str, function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """What a loss or a metric makes of these values."""
    parameters = _parameters(function)
    if parameters is None:  # a function of C, whose parameters cannot be read
        return function(*(values[one] for one in ORDER))
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    fixed = [
        one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    unknown = [one.name for one in fixed if one.default is one.empty and not _is_known(one, values)]
    args: list[Any] = []
    if unknown:
        args = _by_place(name, function, fixed, values)
    given = {
        one.name: values[ALIASES.get(one.name, one.name) if one.name not in values else one.name]
        for one in parameters[len(args) :]
        if one.kind is not one.VAR_POSITIONAL and _is_known(one, values)
    }
    rest = values if takes_all else {}
    taken = {one.name for one in fixed[: len(args)]}
    return function(*args, **{k: v for k, v in rest.items() if k not in taken} | given)


def wants(function: Callable[..., Any], name: str) -> bool:
    """Whether a function takes a value of this name."""
    parameters = _parameters(function) or ()
    return any(one.name == name or one.kind is one.VAR_KEYWORD for one in parameters)


@lru_cache(maxsize=1000)
def _parameters(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...] | None:
    try:
        return tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _is_known(parameter: inspect.Parameter, values: Mapping[str, Any]) -> bool:
    if parameter.kind is parameter.VAR_KEYWORD:
        return False
    return parameter.name in values or ALIASES.get(parameter.name) in values


def _by_place(
    name: str,
    function: Callable[..., Any],
    fixed: list[inspect.Parameter],
    values: Mapping[str, Any],
) -> list[Any]:
    """Preds and target, for a function that calls them otherwise; names must not contradict."""
    needed = [one for one in fixed if one.default is one.empty]
    for place, one in enumerate(needed):
        meant = ALIASES.get(one.name, one.name)
        is_there = place < len(ORDER) and "target" in values
        if not is_there or (_is_known(one, values) and meant != ORDER[place]):
            raise CallbackError(
                f"{name!r}{inspect.signature(function)} cannot be called: it is not clear what"
                f" {next(p.name for p in needed if not _is_known(p, values))!r} is. Losses and"
                " metrics are called by name, as\n    lambda preds, target: ...\nThere is"
                f" {', '.join(values)}"
            )
    return [values[one] for one in ORDER[: len(needed)]]
