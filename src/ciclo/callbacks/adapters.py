"""Other libraries' callbacks in a ciclo loop: clu's periodic actions and Keras callbacks.

Neither library is imported: objects are recognised by their classes. In tasks and in
`callbacks=[...]` they are adapted automatically; the classes here take options.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ciclo.callbacks.base import LoopCallback, number, scalars
from ciclo.errors import CallbackError, check

if TYPE_CHECKING:
    from collections.abc import Callable

    from ciclo.loop import LoopState

__all__ = ["clu_action", "keras_callback", "register_adapter"]


class clu_action(LoopCallback):  # noqa: N801  a name like the functions beside it
    """Calls a clu periodic action in each step."""

    def __init__(self, action: Callable[..., Any]) -> None:
        check("action", action, callable, "a periodic action of clu")
        self.action = action
        self.name = type(action).__name__

    def __loop_callback__(self, loop_state: LoopState[Any]) -> None:
        self.action(loop_state.elapsed.steps, t=loop_state.elapsed.date)


class keras_callback(LoopCallback):  # noqa: N801  a name like the functions beside it
    """Calls a Keras callback at the start and end of training, epochs and batches.

    model: the callback's model; without it, an object that only has `stop_training`, which ends
        the loop
    """

    moments = ("on_train_step", "on_epoch_end")

    def __init__(self, callback: Any, model: Any = None) -> None:
        check("callback", callback, lambda one: one.set_model, "an object of keras.callbacks")
        self.callback = callback
        self.name = type(callback).__name__
        self.model = SimpleNamespace(stop_training=False) if model is None else model
        self._epoch: int | None = None  # the current one
        self._step: int | None = None

    def on_loop_start(self, loop_state: LoopState[Any]) -> None:
        stop = loop_state.stop
        self.callback.set_params({"verbose": 0, "steps": stop and stop.steps})
        self.callback.set_model(self.model)
        self.callback.on_train_begin({})

    def __loop_callback__(self, loop_state: LoopState[Any]) -> None:
        step = loop_state.elapsed.steps
        logs = _numbers(loop_state)
        if self._epoch is None:
            self._epoch = loop_state.epoch or 0
            self.callback.on_epoch_begin(self._epoch, {})
        if step != self._step:
            self._step = step
            self.callback.on_train_batch_begin(step, {})
            self.callback.on_train_batch_end(step, logs)
        else:  # the second call in one step is the end of the epoch
            self._end_epoch(logs)
        if self.model.stop_training:
            loop_state.stop_iteration = True

    def on_loop_end(self, loop_state: LoopState[Any]) -> None:
        self._end_epoch(_numbers(loop_state))
        self.callback.on_train_end({})

    def _end_epoch(self, logs: dict[str, float]) -> None:
        if self._epoch is not None:
            self.callback.on_epoch_end(self._epoch, logs)
            self._epoch = None


def _numbers(loop_state: LoopState[Any]) -> dict[str, float]:
    """The latest value of each name, as Keras callbacks expect."""
    return {
        name: value
        for name, logged in scalars(loop_state.accumulated_logs).items()
        if (value := number(logged)) is not None
    }


_registered: dict[type, Callable[[Any], Any]] = {}


def register_adapter(kind: Any, adapter: Any = None) -> Any:
    """Makes objects of a class callbacks: a loop calls `adapter(object)` instead.

    >>> @ciclo.register_adapter(Timer)
    ... def timer_callback(timer):
    ...     return lambda elapsed: timer.tick(elapsed.steps)
    """
    if adapter is None:
        return lambda made: register_adapter(kind, made)
    if isinstance(adapter, type) and not isinstance(kind, type):
        kind, adapter = adapter, kind
    if not isinstance(kind, type) or not callable(adapter):
        raise CallbackError(
            "register_adapter takes a class and a function that converts its objects to callbacks;"
            f" got {kind!r} and {adapter!r}"
        )
    _registered[kind] = adapter
    return adapter


def adapt(callback: Any) -> Any:
    """The adapter for an object of a known class; anything else unchanged."""
    for kind in type(callback).__mro__ if _registered else ():
        if kind in _registered:
            return _registered[kind](callback)
    origins = {(kind.__module__, kind.__name__) for kind in type(callback).__mro__}
    if ("clu.periodic_actions", "PeriodicAction") in origins:
        return clu_action(callback)
    if any(name == "Callback" and module.partition(".")[0] == "keras" for module, name in origins):
        return keras_callback(callback)
    return callback
