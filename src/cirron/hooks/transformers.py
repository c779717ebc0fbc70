"""The transformers Trainer: `epoch` and `step`, with torch's spans beneath; what it logs as marks.

A callback is put into each Trainer, once, and tells where epochs and steps are. What callbacks do
not tell is learned from the Trainer's methods, wrapped in each class that defines one: how a run
ends, the loss of a step (the Trainer leaves NaN out of its own log), evaluations, checkpoints.

Runs on the user's threads. Loaded after `transformers.trainer` is.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from transformers.trainer import Trainer
from transformers.trainer_callback import TrainerCallback

from cirron import guard
from cirron.hooks.patch import Patches
from cirron.hooks.training import Runs, Training, in_run, scalar_of
from cirron.record import hot

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron.hooks import Snapshots
    from cirron.settings import Settings

# What the Trainer logs and is no value: the epoch so far, as a fraction; and 0.0 for the mean of
# losses none of which is a number.
HIDDEN = ("epoch", "loss", "train_loss")


class TransformersHook:
    """Installs and removes the hooks."""

    name = "transformers"

    def __init__(self, settings: Settings, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._patches = Patches()
        self._handlers: WeakSet[Any] = WeakSet()  # of callbacks, of the Trainers that were met
        self._classes: set[type] = set()  # whose methods are wrapped
        self._runs = Runs()
        self._is_on = False  # somebody may hold our functions after they are taken off

    def install(self) -> None:
        self.uninstall()
        self._is_on = True
        self._patches.set(Trainer, "__init__", self._make_init(Trainer.__init__))
        self._wrap_methods(Trainer)

    def uninstall(self) -> None:
        """Takes everything off, the callbacks of Trainers that live on included."""
        self._is_on = False
        self._patches.undo()
        self._classes.clear()
        for handler in list(self._handlers):
            with guard.quiet("transformers hooks"):
                for callback in handler.callbacks:
                    if isinstance(callback, CirronCallback):
                        callback.let_go()
                handler.callbacks = [
                    one for one in handler.callbacks if not isinstance(one, CirronCallback)
                ]
        self._handlers.clear()

    def _make_init(self, original: Any) -> Any:
        @functools.wraps(original)
        def __init__(trainer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(trainer, *args, **kwargs)
            self._find(trainer)

        return __init__

    def _find(self, trainer: Any) -> CirronCallback | None:
        """The Trainer's callback, which it gets here if it has none: it may be older than we."""
        if not self._is_on:
            return None
        try:
            handler = trainer.callback_handler
            callback = None
            for one in handler.callbacks:  # nearly always the first
                if one.__class__ is CirronCallback:
                    callback = one
                    break
            else:
                callback = CirronCallback()
                # First: what the others record is inside of what it opens. A new list: the Trainer
                # may just be going through the old one.
                handler.callbacks = [callback, *handler.callbacks]
            if callback.training is None:
                callback.training = Training(self._snapshots, marks_loss=True)
                self._handlers.add(handler)
            if type(trainer) not in self._classes:
                self._wrap_methods(type(trainer))
        except Exception as error:  # noqa: BLE001  protects a Trainer that is like no other
            guard.caught("transformers hooks", error)
            return None
        return callback

    # -- methods ----------------------------------------------------------------------------

    def _wrap_methods(self, kind: type) -> None:
        makers: dict[str, Callable[[Any], Any]] = {
            "train": self._make_train,
            "training_step": self._make_training_step,
            "_maybe_log_save_evaluate": self._make_log,
            "evaluate": functools.partial(self._make_aside, "evaluation", "eval"),
            "predict": functools.partial(self._make_aside, "prediction", "test"),
            "_save_checkpoint": functools.partial(self._make_aside, "checkpoint", None),
            "save_model": functools.partial(self._make_aside, "checkpoint", None),
        }
        for owner in reversed(kind.__mro__):
            if issubclass(owner, Trainer) and owner not in self._classes:
                self._classes.add(owner)
                for name, make in makers.items():
                    if name in owner.__dict__:
                        self._patches.set(owner, name, make(owner.__dict__[name]))
                    elif not issubclass(definer(owner, name), Trainer):
                        # A mixin's. It is left as it is: others than Trainers may have it, too.
                        self._patches.set(owner, name, make(inherited(owner, name)))

    def _make_train(self, original: Any) -> Any:
        @functools.wraps(original)
        def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            callback = self._find(trainer)
            training = None if callback is None else callback.training
            if training is None:
                return original(trainer, *args, **kwargs)
            model = getattr(trainer, "model", None)
            return in_run(self._runs, training, model, original, trainer, *args, **kwargs)

        return train

    def _make_training_step(self, original: Any) -> Any:
        @functools.wraps(original)
        def training_step(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            callback = self._find(trainer)
            if callback is None or callback.is_stepping:  # a subclass calls its parent's
                return original(trainer, *args, **kwargs)
            callback.is_stepping = True
            try:
                loss = original(trainer, *args, **kwargs)
            finally:
                callback.is_stepping = False
            callback.add_loss(loss)
            return loss

        return training_step

    def _make_log(self, original: Any) -> Any:
        @functools.wraps(original)
        def _maybe_log_save_evaluate(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(trainer, *args, **kwargs)
            callback = self._find(trainer)
            if callback is not None:
                callback.has_logged(trainer.state)
            return result

        return _maybe_log_save_evaluate

    def _make_aside(self, name: str, prefix: str | None, original: Any) -> Any:
        """`prefix`: of metrics, if none is given. None: there are no metrics."""

        @functools.wraps(original)
        def method(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            callback = self._find(trainer)
            training = None if callback is None else callback.training
            span = None
            if training is not None:
                with guard.quiet("transformers hooks"):
                    if prefix is None:
                        attrs = {"global_step": trainer.state.global_step}
                    else:
                        given = args[2] if len(args) > 2 else kwargs.get("metric_key_prefix")
                        attrs = {"prefix": given or prefix}
                    # Inside one of the same: a subclass has called its parent's. Where there are
                    # several datasets, each has a prefix of its own.
                    span = training.begin_aside(name, **attrs)
            if training is None or span is None:
                return original(trainer, *args, **kwargs)
            try:
                result = original(trainer, *args, **kwargs)
            except BaseException as error:  # passes on, with the span closed
                training.end_aside(span, error)
                raise
            training.end_aside(span)
            return result

        return method


def definer(kind: type, name: str) -> type:
    """The class that an attribute of another one comes from."""
    return next((one for one in kind.__mro__ if name in one.__dict__), kind)


def inherited(kind: type, name: str) -> Any:
    """A method of a class's parents, whichever of them is next for the object it is called of."""

    @functools.wraps(getattr(kind, name))
    def method(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(kind, trainer), name)(*args, **kwargs)

    return method


def event(tell: Callable[..., None]) -> Callable[..., None]:
    """An event of the callback: nothing unless somebody profiles, and no mistake gets out."""

    @functools.wraps(tell)
    def told(callback: CirronCallback, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        training = callback.training
        if training is not None:
            try:
                tell(callback, training, args, state, kwargs)
            except Exception as error:  # noqa: BLE001  protects the Trainer
                guard.caught("transformers hooks", error)

    return told


class CirronCallback(TrainerCallback):
    """Tells the hook what its Trainer does. A Trainer gets one by itself; it needs only one."""

    def __init__(self) -> None:
        self.training: Training | None = None  # None while nobody profiles
        self.is_stepping = False
        self._loss: Any = None  # of the step so far, where there are several batches to it
        self._last_loss: Any = None  # of the last step of the epoch that is done
        self._epoch_index = 0
        self._step_index = 0
        self._epoch_steps = 0  # that a whole epoch has

    def __reduce__(self) -> tuple[type[CirronCallback], tuple[()]]:
        return CirronCallback, ()  # a copy of its Trainer has its own run

    # -- what the Trainer tells -------------------------------------------------------------

    @event
    def on_train_begin(self, training: Training, args: Any, state: Any, more: Any) -> None:
        training.end()  # of a try with a larger batch, that had not enough memory
        self._find_place(args, state, more)

    @event
    def on_epoch_begin(self, training: Training, args: Any, state: Any, more: Any) -> None:
        if not self._epoch_steps:  # it has begun without us
            self._find_place(args, state, more)
        self._last_loss = None
        training.begin_epoch(self._epoch_index, more["model"])
        self._await_step(training, state)

    @event
    def on_step_begin(self, training: Training, args: Any, state: Any, more: Any) -> None:
        training.begin_step(self._step_index, global_step=state.global_step + 1)
        self._loss = None

    @event
    def on_optimizer_step(self, training: Training, args: Any, state: Any, more: Any) -> None:
        # The gradients are there until the Trainer clears them, right after this.
        is_last = state.global_step + 1 >= state.max_steps
        if is_last or self._step_index + 1 >= self._epoch_steps:
            training.take_snapshot(more["model"])

    @event
    def on_step_end(self, training: Training, args: Any, state: Any, more: Any) -> None:
        loss = scalar_of(self._loss)
        self._last_loss, self._loss = None if loss is None else self._loss, None
        if loss is not None:
            hot.mark("step_loss", loss)
        self._step_index += 1
        training.finish_step()

    @event
    def on_epoch_end(self, training: Training, args: Any, state: Any, more: Any) -> None:
        if training.is_stepping:  # batches that were too few for an optimizer step
            training.skip_step()
        training.finish_epoch()
        if self._last_loss is not None:
            training.log({"step_loss": self._last_loss})
        self._epoch_index += 1
        self._step_index = 0
        training.take_snapshot(more["model"])

    @event
    def on_log(self, training: Training, args: Any, state: Any, more: Any) -> None:
        logs = more["logs"]
        has_none = 0.0 in (logs.get("loss"), logs.get("train_loss")) and self._is_lost()
        training.log(logs, but=HIDDEN if has_none else HIDDEN[:1])

    @event
    def on_predict(self, training: Training, args: Any, state: Any, more: Any) -> None:
        training.log(more["metrics"])

    @event
    def on_train_end(self, training: Training, args: Any, state: Any, more: Any) -> None:
        training.end()

    # -- what the hook has seen -------------------------------------------------------------

    def add_loss(self, loss: Any) -> None:
        """Of one batch. It is not waited for, if a device has it."""
        try:
            self._loss = loss if self._loss is None else self._loss + loss
        except Exception as error:  # noqa: BLE001  protects the Trainer from a loss that is none
            guard.caught("transformers hooks", error)

    def has_logged(self, state: Any) -> None:
        """A step has been logged, evaluated and saved, or else an epoch has."""
        training = self.training
        if training is not None:
            with guard.quiet("transformers hooks"):
                if training.is_ending:
                    training.end_epoch()
                else:
                    self._await_step(training, state)

    def let_go(self) -> None:
        """Nobody profiles any more."""
        training, self.training = self.training, None
        if training is not None:
            training.end()

    def _is_lost(self) -> bool:
        """Whether the last loss is not finite. The Trainer, which logs, has waited for it."""
        return self._last_loss is not None and not math.isfinite(self._last_loss)

    def _find_place(self, args: Any, state: Any, more: Any) -> None:
        """Where the run is: at 0 and 0, or where a checkpoint is gone on from."""
        try:
            batches = len(more["train_dataloader"])
            self._epoch_steps = max(-(-batches // args.gradient_accumulation_steps), 1)
        except TypeError:  # it has no length: the Trainer makes one epoch of all steps
            self._epoch_steps = max(state.max_steps, 1)
        self._epoch_index, self._step_index = divmod(state.global_step, self._epoch_steps)
        if args.ignore_data_skip:  # the epoch that a checkpoint was saved in begins again
            self._step_index = 0

    def _await_step(self, training: Training, state: Any) -> None:
        if self._step_index < self._epoch_steps:
            training.await_step(self._step_index, global_step=state.global_step + 1)
