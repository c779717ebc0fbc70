"""Lightning: `epoch` and `step`, with torch's spans beneath; what is logged as marks.

Where Lightning calls its callbacks, it tells us first: what they record is inside of what is opened
here, and a Trainer's list of them, of which Lightning's tuner takes the first, is never touched.
What callbacks are not told is learned from the loops, whose methods are wrapped: when a batch is
about to be fetched, what is evaluated and logged, how a run ends. The same code serves `lightning`
and `pytorch_lightning`, which are two copies of one.

Runs on the user's threads. Loaded after one of the two is.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from cirron import guard
from cirron.hooks.patch import Patches
from cirron.hooks.training import Runs, Training, in_run
from cirron.record import hot

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron.hooks import Snapshots
    from cirron.settings import Settings

LOGGER = "connectors.logger_connector"


class LightningHook:
    """Installs and removes the hooks."""

    name = "lightning"
    package = "lightning.pytorch"

    def __init__(self, settings: Settings, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._patches = Patches()
        self._tellers: WeakKeyDictionary[Any, Teller] = WeakKeyDictionary()  # by Trainer
        self._runs = Runs()
        self._late_step: hot.Span | None = None  # of an optimizer, the last that began late
        self._is_on = False  # somebody may hold our functions after they are taken off

    def install(self) -> None:
        self.uninstall()
        self._is_on = True
        for module, owner, name, make in (
            ("trainer", "Trainer", "save_checkpoint", self._make_save),
            ("loops", "_FitLoop", "run", self._make_fit),
            ("loops", "_FitLoop", "setup_data", self._make_setup_data),
            ("loops", "_FitLoop", "on_advance_end", self._make_epoch_end),
            ("loops", "_TrainingEpochLoop", "advance", self._make_advance),
            ("loops", "_EvaluationLoop", "run", self._make_evaluation),
            ("loops", "_PredictionLoop", "run", self._make_evaluation),
            ("loops.optimization.automatic", "Closure", "__call__", self._make_closure),
            ("trainer.call", "", "_call_callback_hooks", self._make_events),
            (f"trainer.{LOGGER}", "_LoggerConnector", "log_metrics", self._make_log),
        ):
            with guard.quiet("lightning hooks"):
                found = importlib.import_module(f"{self.package}.{module}")
                kind = getattr(found, owner) if owner else found
                original = kind.__dict__[name]
                self._patches.set(kind, name, functools.wraps(original)(make(original)))

    def uninstall(self) -> None:
        """Takes everything off, and closes what is open."""
        self._is_on = False
        self._patches.undo()
        with guard.quiet("lightning hooks"):
            trainings = [teller.training for teller in list(self._tellers.values())]
            for training in (*reversed(self._runs.open), *trainings):
                training.end()
        self._tellers.clear()

    def _find(self, trainer: Any) -> Teller | None:
        """What is known of the Trainer; it may be older than we."""
        if not self._is_on:
            return None
        try:
            teller = self._tellers.get(trainer)
            if teller is None:
                teller = self._tellers[trainer] = Teller(Training(self._snapshots))
        except Exception as error:  # noqa: BLE001  protects a Trainer that is like no other
            guard.caught("lightning hooks", error)
            return None
        return teller

    def _training_of(self, trainer: Any) -> Training | None:
        teller = self._find(trainer)
        return None if teller is None else teller.training

    # -- what callbacks are told ------------------------------------------------------------

    def _make_events(self, original: Any) -> Any:
        def _call_callback_hooks(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
            event = EVENTS.get(hook_name)
            teller = None if event is None else self._find(trainer)
            if event is not None and teller is not None:
                try:
                    event(teller, teller.training, trainer)
                except Exception as error:  # noqa: BLE001  protects the Trainer
                    guard.caught("lightning hooks", error)
            return original(trainer, hook_name, *args, **kwargs)

        return _call_callback_hooks

    # -- methods ----------------------------------------------------------------------------

    def _make_fit(self, original: Any) -> Any:
        def run(loop: Any, *args: Any, **kwargs: Any) -> Any:
            trainer = loop.trainer
            before = self._find(trainer)
            if before is None:
                return original(loop, *args, **kwargs)
            # A run of its own, also if the same Trainer is in the middle of one: its tuner is used
            # in callbacks.
            training = Training(self._snapshots)
            self._tellers[trainer] = Teller(training)
            try:
                model = getattr(trainer, "lightning_module", None)
                return in_run(self._runs, training, model, original, loop, *args, **kwargs)
            finally:
                if self._is_on:
                    self._tellers[trainer] = before

        return run

    def _make_setup_data(self, original: Any) -> Any:
        """The loaders are made; one without a length is asked for a batch before the epoch is."""

        def setup_data(loop: Any, *args: Any, **kwargs: Any) -> Any:
            if self._training_of(loop.trainer) is None:
                return original(loop, *args, **kwargs)
            before = loop._data_fetcher
            span = hot.begin("data_setup")
            try:
                result = original(loop, *args, **kwargs)
            except BaseException as error:  # passes on, with the span closed
                hot.fail(span, error)
                raise
            # Called before each epoch, and mostly for nothing.
            (hot.drop if loop._data_fetcher is before else hot.close)(span)
            return result

        return setup_data

    def _make_epoch_end(self, original: Any) -> Any:
        def on_advance_end(loop: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(loop, *args, **kwargs)
            training = self._training_of(loop.trainer)
            if training is not None:
                with guard.quiet("lightning hooks"):
                    training.end_epoch()
            return result

        return on_advance_end

    def _make_advance(self, original: Any) -> Any:
        def advance(loop: Any, *args: Any, **kwargs: Any) -> Any:
            teller = self._find(loop.trainer)
            if teller is None:
                return original(loop, *args, **kwargs)
            teller.await_step(loop.trainer)
            try:
                return original(loop, *args, **kwargs)
            except StopIteration:  # there is no more data, or the module wants no more of it
                teller.training.skip_step()
                raise

        return advance

    def _make_evaluation(self, original: Any) -> Any:
        def run(loop: Any, *args: Any, **kwargs: Any) -> Any:
            trainer = loop.trainer
            training = self._training_of(trainer)
            if training is None:
                return original(loop, *args, **kwargs)
            stage = getattr(trainer.state.stage, "value", None)
            name = "prediction" if trainer.predicting else "evaluation"
            return in_aside(training, name, {"stage": stage}, original, loop, *args, **kwargs)

        return run

    def _make_save(self, original: Any) -> Any:
        def save_checkpoint(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            training = self._training_of(trainer)
            if training is None:
                return original(trainer, *args, **kwargs)
            attrs = {"global_step": trainer.global_step}
            return in_aside(training, "checkpoint", attrs, original, trainer, *args, **kwargs)

        return save_checkpoint

    def _make_closure(self, original: Any) -> Any:
        """Lightning has its optimizer call forward and backward: the optimizer's step is after."""

        def __call__(closure: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            span = hot.innermost()
            # Called again by the same step, as LBFGS does: that belongs to it.
            if not self._is_on or span.name != "optimizer_step" or span is self._late_step:
                return original(closure, *args, **kwargs)
            self._late_step = span
            hot.enter_context(span.parent)
            try:
                result = original(closure, *args, **kwargs)
            except BaseException:  # passes on: it never came to the optimizer's own part
                hot.drop(span)
                raise
            hot.enter_context(span)
            span.start = hot.now()
            if hot.device_clock is not None:
                hot.device_clock.start(span)
            return result

        return __call__

    def _make_log(self, original: Any) -> Any:
        def log_metrics(connector: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
            training = self._training_of(connector.trainer)
            if training is not None:
                with guard.quiet("lightning hooks"):
                    # Between batches these are the values of all of them.
                    is_batch = getattr(connector, "_first_loop_iter", None) is not None
                    training.log(metrics, is_point=is_batch)
            return original(connector, metrics, *args, **kwargs)

        return log_metrics


class PytorchLightningHook(LightningHook):
    """The same, for the older name of the package."""

    name = "pytorch_lightning"
    package = "pytorch_lightning"


def in_aside(
    training: Training, name: str, attrs: dict[str, Any], original: Any, *args: Any, **kwargs: Any
) -> Any:
    span = None
    with guard.quiet("lightning hooks"):
        span = training.begin_aside(name, **attrs)
    if span is None:
        return original(*args, **kwargs)
    try:
        result = original(*args, **kwargs)
    except BaseException as error:  # passes on, with the span closed
        training.end_aside(span, error)
        raise
    training.end_aside(span)
    return result


class Teller:
    """Tells the spans of a Trainer what it does."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self._step_index = 0
        self._steps_before = 0  # that the optimizers had made when the step began

    def on_train_start(self, training: Training, trainer: Any) -> None:
        self._step_index = 0
        if getattr(trainer.fit_loop, "restarted_mid_epoch", False):
            # Resumed inside an epoch, of which Lightning does not say that it begins.
            batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self._step_index = batches // trainer.accumulate_grad_batches
            training.begin_epoch(trainer.current_epoch, trainer.lightning_module)

    def on_train_epoch_start(self, training: Training, trainer: Any) -> None:
        self._step_index = 0
        training.begin_epoch(trainer.current_epoch, trainer.lightning_module)
        self.await_step(trainer)

    def on_train_batch_start(self, training: Training, trainer: Any) -> None:
        training.begin_step(self._step_index)

    def on_train_batch_end(self, training: Training, trainer: Any) -> None:
        if trainer.global_step != self._steps_before:
            training.finish_step()
            self._step_index += 1
        if trainer.is_last_batch:
            # A validation that follows clears the gradients.
            training.take_snapshot(trainer.lightning_module)

    def on_train_epoch_end(self, training: Training, trainer: Any) -> None:
        training.finish_epoch()
        training.take_snapshot(trainer.lightning_module)

    def await_step(self, trainer: Any) -> None:
        """A batch is about to be fetched."""
        training = self.training
        try:
            if not training.is_stepping:  # else gradients are being accumulated
                self._steps_before = trainer.global_step
                training.await_step(self._step_index, global_step=self._steps_before + 1)
        except Exception as error:  # noqa: BLE001  protects the Trainer
            guard.caught("lightning hooks", error)


EVENTS: dict[str, Callable[[Teller, Training, Any], None]] = {
    event.__name__: event
    for event in (
        Teller.on_train_start,
        Teller.on_train_epoch_start,
        Teller.on_train_batch_start,
        Teller.on_train_batch_end,
        Teller.on_train_epoch_end,
    )
}
