"""The transformers Trainer: `epoch` and `step` spans, with torch's inside; logged values as marks.

Each Trainer gets one callback, which hears of epochs and steps. The Trainer's methods, wrapped in
each class that defines one, show the rest: how a run ends, the loss of a step (the Trainer leaves
NaN out of its own log), evaluations, checkpoints.

Runs on the user's threads. Loaded after `transformers.trainer`.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, proxy

from transformers.trainer import Trainer
from transformers.trainer_callback import CallbackHandler, TrainerCallback

from cirron import guard
from cirron.hooks.engine import Tell, Training, Wrapper, scalar_of
from cirron.record import hot

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron.hooks import Snapshots
    from cirron.hooks.engine import Call
    from cirron.settings import Settings

# Logged values that are not metrics: the epoch so far, as a fraction; and the losses, when they are
# 0.0 because every loss was NaN or infinite.
HIDDEN = ("epoch", "loss", "train_loss")


class TransformersHook(Wrapper):
    """Installs and removes the hooks."""

    name = "transformers"
    what = "transformers hooks"

    def __init__(self, settings: Settings, snapshots: Snapshots) -> None:
        super().__init__(settings, snapshots)
        self._handlers: WeakSet[Any] = WeakSet()  # the callback handlers of known Trainers
        self._classes: set[type] = set()  # whose methods are wrapped

    def _replace(self) -> None:
        made = Tell(after=lambda trainer, *_: self._find(trainer))
        self._wrap(Trainer, "__init__", made, lambda trainer: trainer)
        # What other callbacks do is in the epoch, not in its first step.
        began = Tell(after=lambda callback, handler, args, state, *_: callback.await_next(state))
        self._wrap(CallbackHandler, "on_epoch_begin", began, callback_of)
        self._wrap_methods(Trainer)

    def uninstall(self) -> None:
        """Removes the hooks, including the callbacks of existing Trainers."""
        super().uninstall()
        self._classes.clear()
        for handler in list(self._handlers):
            with guard.quiet(self.what):
                while (callback := callback_of(handler)) is not None:
                    handler.callbacks = [one for one in handler.callbacks if one is not callback]
                    callback.let_go()
        self._handlers.clear()

    def _find(self, trainer: Any) -> CirronCallback:
        """The Trainer's callback. A Trainer that was created before the hooks gets it here."""
        handler = trainer.callback_handler
        callback = callback_of(handler)
        if callback is None:
            callback = CirronCallback()
            # First, so that what the others record is inside its spans. In a new list, because the
            # Trainer may be iterating over the old one.
            handler.callbacks = [callback, *handler.callbacks]
        callback.trainer = proxy(trainer)
        if callback.snapshots is None:
            callback.snapshots = self._snapshots
            self._handlers.add(handler)
        if type(trainer) not in self._classes:
            self._wrap_methods(type(trainer))
        return callback

    # -- methods ----------------------------------------------------------------------------

    def _wrap_methods(self, kind: type) -> None:
        calls: dict[str, Callable[..., Any] | Tell] = {
            "train": self._train,
            "_inner_training_loop": self._attempt,
            "training_step": self._step,
            "_maybe_log_save_evaluate": Tell(after=CirronCallback.has_logged),
            "evaluate": functools.partial(self._evaluate, "eval"),
            "predict": functools.partial(self._evaluate, "test"),
            "_save_checkpoint": self._save,
            "save_model": self._save,
        }
        self._classes.add(kind)
        for name, instead in calls.items():
            method = getattr(kind, name)
            if not hasattr(method, "cirron_original"):
                # Its own, or that of a parent or a mixin, which other classes may use too.
                own = vars(kind).get(name) or inherited(kind, name)
                self._wrap(kind, name, instead, self._find, own)

    def _train(self, callback: CirronCallback, call: Call) -> Any:
        return self._runs.call(callback, getattr(call.args[0], "model", None), call)

    def _attempt(self, callback: CirronCallback, call: Call) -> Any:
        """With `auto_find_batch_size`, one that runs out of memory is followed by another."""
        try:
            return call()
        except BaseException as error:  # passes on
            self._tell(callback.end, error)
            raise

    def _step(self, callback: CirronCallback, call: Call) -> Any:
        if callback.is_in_batch:  # a subclass calls its parent's
            return call()
        callback.is_in_batch = True
        try:
            loss = call()
        finally:
            callback.is_in_batch = False
        self._tell(callback.add_loss, loss)
        return loss

    def _evaluate(self, prefix: str, callback: CirronCallback, call: Call) -> Any:
        """`prefix`: the default prefix of metrics. With several datasets, each has its own."""
        name = "evaluation" if prefix == "eval" else "prediction"
        given = call.args[3] if len(call.args) > 3 else call.keywords.get("metric_key_prefix")
        return callback.call_aside(call, name, prefix=given or prefix)

    def _save(self, callback: CirronCallback, call: Call) -> Any:
        global_step = call.args[0].state.global_step
        return callback.call_aside(call, "checkpoint", global_step=global_step)


def callback_of(handler: Any) -> CirronCallback | None:
    for callback in handler.callbacks:  # usually the first
        if callback.__class__ is CirronCallback:
            return callback
    return None


def inherited(kind: type, name: str) -> Any:
    """A method that calls the next one in the MRO of the object."""

    @functools.wraps(getattr(kind, name))
    def method(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(kind, trainer), name)(*args, **kwargs)

    return method


def event(tell: Callable[..., None]) -> Callable[..., None]:
    """Makes a method an event of the callback: it does nothing when off, and never raises."""

    @functools.wraps(tell)
    def told(callback: CirronCallback, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if callback.snapshots is not None:
            try:
                tell(callback, args, state, kwargs)
            except Exception as error:  # noqa: BLE001  protects the Trainer
                guard.caught("transformers hooks", error)

    return told


class CirronCallback(Training, TrainerCallback):
    """The spans of a Trainer. Each Trainer gets one automatically."""

    marks_loss = True
    snapshots: Snapshots | None  # None: profiling is off
    trainer: Any = None  # SetFit gives callbacks another object as the model
    is_in_batch = False
    _loss: Any = None  # of the current step: the sum over its batches so far
    _last_loss: Any = None  # of the previous step of the epoch
    _epoch_index = 0
    _index = 0  # of the step in its epoch
    _epoch_steps = 0  # in a whole epoch

    def __reduce__(self) -> tuple[type[CirronCallback], tuple[()]]:
        return CirronCallback, ()  # a copied Trainer has its own run

    # -- the Trainer's events ---------------------------------------------------------------

    @event
    def on_train_begin(self, args: Any, state: Any, more: Any) -> None:
        self._find_place(args, state, more)

    @event
    def on_epoch_begin(self, args: Any, state: Any, more: Any) -> None:
        if not self._epoch_steps:  # the callback was added during training
            self._find_place(args, state, more)
        self._last_loss = None
        self.begin_epoch(self._epoch_index, self.trainer.model)

    @event
    def on_step_begin(self, args: Any, state: Any, more: Any) -> None:
        self.begin_step(self._index, global_step=state.global_step + 1)
        self._loss = None

    @event
    def on_optimizer_step(self, args: Any, state: Any, more: Any) -> None:
        # The Trainer clears the gradients right after this.
        is_last = state.global_step + 1 >= state.max_steps
        # A loader without a length says it as well: accelerate's fetches one item ahead.
        is_last |= getattr(more.get("train_dataloader"), "end_of_dataloader", False)
        if is_last or self._index + 1 >= self._epoch_steps:
            self.take_snapshot(self.trainer.model)

    @event
    def on_step_end(self, args: Any, state: Any, more: Any) -> None:
        loss = scalar_of(self._loss)
        self._last_loss, self._loss = None if loss is None else self._loss, None
        if loss is not None:
            hot.mark("step_loss", loss)
        self._index += 1
        self.finish_step()

    @event
    def on_epoch_end(self, args: Any, state: Any, more: Any) -> None:
        if self.is_stepping:  # too few batches for an optimizer step
            self.skip_step()
        self.finish_epoch()
        if self._last_loss is not None:
            self.log({"step_loss": self._last_loss})
        self._epoch_index += 1
        self._index = 0
        self.take_snapshot(self.trainer.model)

    @event
    def on_log(self, args: Any, state: Any, more: Any) -> None:
        logs, last = more["logs"], self._last_loss
        is_zero = 0.0 in (logs.get("loss"), logs.get("train_loss"))
        # The Trainer logs, so the device has computed the last loss.
        is_filtered = is_zero and last is not None and not math.isfinite(last)
        self.log(logs, but=HIDDEN if is_filtered else HIDDEN[:1])

    @event
    def on_predict(self, args: Any, state: Any, more: Any) -> None:
        self.log(more["metrics"])

    @event
    def on_train_end(self, args: Any, state: Any, more: Any) -> None:
        self.end()

    # -- called by the hook -----------------------------------------------------------------

    def add_loss(self, loss: Any) -> None:
        """Adds the loss of one batch, without waiting for the device."""
        self._loss = loss if self._loss is None else self._loss + loss

    def has_logged(self, trainer: Any, *_: Any) -> None:
        """The Trainer has logged, evaluated and saved what was due after a step or an epoch."""
        if self.is_ending:
            self.end_epoch()
        else:
            self.await_next(trainer.state)

    def await_next(self, state: Any) -> None:
        if self._index < self._epoch_steps:
            self.await_step(self._index, global_step=state.global_step + 1)

    def let_go(self) -> None:
        """Profiling has ended."""
        self.snapshots = None
        self.end()

    def _find_place(self, args: Any, state: Any, more: Any) -> None:
        """Finds the position of the run: the start, or the position of a checkpoint."""
        try:
            batches = len(more["train_dataloader"])
            self._epoch_steps = max(-(-batches // args.gradient_accumulation_steps), 1)
        except TypeError:  # without a length, all steps may be in one epoch
            self._epoch_steps = max(state.max_steps, 1)
        self._epoch_index, self._index = divmod(state.global_step, self._epoch_steps)
        if args.ignore_data_skip:  # the epoch of the checkpoint starts again
            self._index = 0
