"""Which callbacks a ready-made loop calls at each moment.

The order is: methods of the state, then tasks, then `callbacks=`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ciclo.binding import (
    ARGUMENTS,
    STEPPED,
    callback_arguments,
    creator_of,
    listed,
    name_of,
    pairs_of,
    steps_rate,
)
from ciclo.callbacks import adapters
from ciclo.callbacks.base import LoopCallback
from ciclo.errors import CallbackError, did_you_mean, warn
from ciclo.moments import ALIASES, MOMENTS, STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ciclo.loop import LoopState, Tasks


KNOWN = {*MOMENTS, *ALIASES, "on_loop_start", "on_loop_end", "on_loop_done"}


class Plan:
    """The callbacks of a ready-made loop, by moment."""

    def __init__(
        self, state: Any, tasks: Tasks, callbacks: Iterable[Any], replaced: Iterable[str] = ()
    ) -> None:
        self.own, self.tasks, self.methods, self.callbacks = (
            {moment: list[Any]() for moment in MOMENTS} for _ in range(4)
        )
        self.scheduled: list[tuple[Any, Any]] = []
        for name, moment in _names():
            # Some objects have every attribute, so other names than steps must be on the class.
            holder = state if name in STEPS.values() else type(state)
            if moment not in replaced and callable(getattr(holder, name, None)):
                self.own[moment].append(_own_method(state, name))
        self._state = state
        self._add(_without_own(state, {} if tasks is None else tasks), self.tasks)
        for callback in listed(callbacks):
            self._register(callback)

    def at(self, moment: str) -> list[Any]:
        """The callbacks of a moment, without those that have `moments`."""
        return [*self.own[moment], *self.tasks[moment], *self.methods[moment]]

    def all_at(self, moment: str) -> list[Any]:
        """All callbacks of a moment."""
        return [*self.at(moment), *self.callbacks[moment]]

    def steps(self, moment: str) -> list[Any]:
        """The callbacks of a step; an error if there are none."""
        found = self.at(moment)
        if not found:
            method, create = STEPS[moment], creator_of(self._state)
            made = (
                "" if create is None else f", such as ciclo.{create}({name_of(self._state)}, ...)"
            )
            raise CallbackError(
                f"the loop has no {method}: give the tasks {{ciclo.{moment}: {method}}}, or a state"
                f" with a method {method}(batch){made}"
            )
        return found

    def refuse(self, *moments: str) -> None:
        """Refuses callbacks for moments that this loop does not have."""
        for moment in moments:
            if self.callbacks[moment]:
                name = name_of(self.callbacks[moment][0])
                raise CallbackError(
                    f"{name} in callbacks=[...] would never be called: this loop has no {moment}"
                )

    def _add(self, tasks: Tasks, into: dict[str, list[Any]]) -> None:
        for key, callbacks in pairs_of(tasks):
            if not isinstance(key, str):
                self.scheduled.append((key, callbacks))
            else:
                into[_moment(key)] += [_called(one, key) for one in listed(callbacks)]

    def _register(self, callback: Any) -> None:
        callback = adapters.adapt(callback)
        named = [(moment, getattr(callback, name, None)) for name, moment in _names()]
        named = [(moment, method) for moment, method in named if callable(method)]
        moments = getattr(callback, "moments", None)
        moments = (moments,) if isinstance(moments, str) else moments
        if moments is LoopCallback.moments:  # the default
            is_called = type(callback).__loop_callback__ is not LoopCallback.__loop_callback__
            holder = type(callback) if is_called else callback  # else also functions set on it
            moments = () if any(hasattr(holder, name) for name, _ in _names()) else moments
        if isinstance(moments, tuple):
            for moment in moments:
                self.callbacks[_moment(moment)].append(callback)
        elif hasattr(callback, "items"):
            self._add(callback, self.callbacks)
        elif not named or isinstance(callback, type):
            raise CallbackError(_no_moment(callback))
        for name in dir(type(callback)):
            if name.startswith("on_") and name not in KNOWN:
                what = f"{name_of(callback)}.{name}"
                warn(f"{what} is not a moment and is never called{did_you_mean(name, MOMENTS)}")
        for moment, method in named:
            self.methods[moment].append(method)


def _names() -> list[tuple[str, str]]:
    """All method names, with the moment of each."""
    return [*((moment, moment) for moment in MOMENTS), *ALIASES.items()]


def _moment(name: str) -> str:
    found = ALIASES.get(name, name)
    if found not in MOMENTS:
        raise CallbackError(f"{name!r} is not a moment; use one of {', '.join(MOMENTS)}")
    return found


def _called(callback: Any, moment: str) -> Any:
    """The callback itself, or the method of the object for this moment."""
    if callable(callback) or hasattr(type(callback), "__loop_callback__"):
        return callback
    return getattr(callback, moment, callback)


def _no_moment(callback: Any) -> str:
    name = name_of(callback)
    text = f"{name} in callbacks=[...] has no moment: "
    if steps_rate(callback):
        return text + f"give {STEPPED}"
    if isinstance(callback, type):
        return text + f"give an object: {name}()"
    if callable(callback):
        return text + f"give it as {{ciclo.on_epoch_end: {name}}} or {{ciclo.every(100): {name}}}"
    return text + (
        "give its class a method such as"
        "\n    def on_epoch_end(self, state, batch, elapsed, loop_state): ..."
    )


def _own_method(state: Any, name: str) -> Callable[..., Any]:
    """A callback that calls a method of the current state."""
    by_position, by_keyword = callback_arguments(name, getattr(state, name), ARGUMENTS[1:])

    def called(loop_state: LoopState[Any]) -> Any:
        return getattr(loop_state.state, name)(
            *(getattr(loop_state, one) for one in by_position),
            **{key: getattr(loop_state, one) for key, one in by_keyword.items()},
        )

    called.__name__ = name
    return called


def _without_own(state: Any, tasks: Tasks) -> list[tuple[Any, Any]]:
    """The tasks without methods of the state, which run anyway."""
    return [
        (key, [one for one in listed(given) if not _is_own(state, key, one)])
        if isinstance(key, str)
        else (key, given)
        for key, given in pairs_of(tasks)
    ]


def _is_own(state: Any, key: str, callback: Any) -> bool:
    moment = ALIASES.get(key, key)
    own = [getattr(type(state), name, None) for name, other in _names() if other == moment]
    # A bound method, a bound managed step, or the function of the class.
    found = getattr(callback, "__func__", getattr(callback, "__loop_step__", callback))
    return any(found is one for one in own if one is not None)
