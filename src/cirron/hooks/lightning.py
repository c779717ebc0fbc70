"""Lightning: `epoch` and `step`, with torch's spans beneath; what is logged as marks.

Where Lightning calls its callbacks, it tells us first: what they record is inside of what is opened
here, and a Trainer's list of them, of which Lightning's tuner takes the first, is never touched.
What callbacks are not told is learned from the loops, whose methods are wrapped: when a batch is
about to be fetched, what is evaluated and logged, how a run ends. The same code serves `lightning`
and `pytorch_lightning`, which are two copies of one.

Runs on the user's threads. Loaded after one of the two is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from cirron import guard
from cirron.hooks.engine import Tentative, Training, Wrapper, around, end_if_used
from cirron.record import hot

if TYPE_CHECKING:
    from cirron.hooks import Snapshots
    from cirron.settings import Settings


class LightningHook(Wrapper):
    """Installs and removes the hooks."""

    name = "lightning"
    package = "lightning.pytorch"
    what = "lightning hooks"

    def __init__(self, settings: Settings, snapshots: Snapshots) -> None:
        super().__init__(settings, snapshots)
        self._fits: WeakKeyDictionary[Any, Fit] = WeakKeyDictionary()  # by Trainer
        self._late_step: hot.Span | None = None  # of an optimizer, the last that began late

    def install(self) -> None:
        self.uninstall()
        self._is_on = True
        find, logger = self._find, "trainer.connectors.logger_connector"
        for module, owner, name, call, of in (
            ("trainer", "Trainer", "save_checkpoint", self._save, find),
            ("loops", "_FitLoop", "run", self._fit, find),
            ("loops", "_FitLoop", "setup_data", self._set_up_data, find),
            ("loops", "_FitLoop", "on_advance_end", self._end_epoch, find),
            ("loops", "_TrainingEpochLoop", "advance", self._advance, find),
            ("loops", "_EvaluationLoop", "run", self._evaluate, find),
            ("loops", "_PredictionLoop", "run", self._evaluate, find),
            ("loops.optimization.automatic", "Closure", "__call__", self._call_closure, None),
            ("trainer.call", "", "_call_callback_hooks", self._tell_callbacks, None),
            (logger, "_LoggerConnector", "log_metrics", self._log, find),
        ):
            with guard.quiet(self.what):
                found = importlib.import_module(f"{self.package}.{module}")
                self._wrap(getattr(found, owner) if owner else found, name, call, of)

    def uninstall(self) -> None:
        """Takes everything off, and closes what is open."""
        self._is_on = False
        self._patches.undo()
        with guard.quiet(self.what):
            for training in (*reversed(self._runs.open), *self._fits.values()):
                training.end()
        self._fits.clear()

    def _find(self, owner: Any) -> Fit:
        """What is open in a Trainer, or in that of a loop. It may be older than the hooks."""
        trainer = getattr(owner, "trainer", owner)
        fit = self._fits.get(trainer)
        if fit is None:
            fit = self._fits[trainer] = Fit(self._snapshots)
        return fit

    def _tell_callbacks(self, original: Any, args: Any, kwargs: Any) -> Any:
        if len(args) > 1 and args[1] in EVENTS:
            self._tell(self._tell_fit, *args[:2])
        return original(*args, **kwargs)

    def _tell_fit(self, trainer: Any, event: str) -> None:
        EVENTS[event](self._find(trainer), trainer)

    # -- methods ----------------------------------------------------------------------------

    def _fit(self, before: Fit, original: Any, args: Any, kwargs: Any) -> Any:
        trainer = args[0].trainer
        # A run of its own, also if the same Trainer is in the middle of one: its tuner is used in
        # callbacks.
        fit = self._fits[trainer] = Fit(self._snapshots)
        model = getattr(trainer, "lightning_module", None)
        try:
            return self._runs.call(fit, model, original, args, kwargs)
        finally:
            if self._is_on:
                self._fits[trainer] = before

    def _set_up_data(self, fit: Fit, original: Any, args: Any, kwargs: Any) -> Any:
        """The loaders are made; one without a length is asked for a batch before the epoch is."""
        before = args[0]._data_fetcher

        def end(span: hot.Span) -> None:
            # Called before each epoch, and mostly for nothing.
            (end_if_used if args[0]._data_fetcher is before else hot.close)(span)

        return around(hot.begin("data_setup", None, None, Tentative), original, args, kwargs, end)

    def _end_epoch(self, fit: Fit, original: Any, args: Any, kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._tell(fit.end_epoch)
        return result

    def _advance(self, fit: Fit, original: Any, args: Any, kwargs: Any) -> Any:
        self._tell(fit.await_batch, args[0].trainer)
        try:
            return original(*args, **kwargs)
        except StopIteration:  # there is no more data, or the module wants no more of it
            fit.skip_step()
            raise

    def _evaluate(self, fit: Fit, original: Any, args: Any, kwargs: Any) -> Any:
        trainer = args[0].trainer
        name = "prediction" if trainer.predicting else "evaluation"
        stage = getattr(trainer.state.stage, "value", None)
        return fit.call_aside(name, {"stage": stage}, original, args, kwargs)

    def _save(self, fit: Fit, original: Any, args: Any, kwargs: Any) -> Any:
        attrs = {"global_step": args[0].global_step}
        return fit.call_aside("checkpoint", attrs, original, args, kwargs)

    def _log(self, fit: Fit, original: Any, args: Any, kwargs: Any) -> Any:
        metrics = args[1] if len(args) > 1 else kwargs.get("metrics")
        # Between batches these are the values of all of them.
        is_batch = getattr(args[0], "_first_loop_iter", None) is not None
        self._tell(fit.log, metrics, (), is_batch)
        return original(*args, **kwargs)

    def _call_closure(self, original: Any, args: Any, kwargs: Any) -> Any:
        """Lightning has its optimizer call forward and backward: the optimizer's step is after."""
        span = hot.innermost()
        # Called again by the same step, as LBFGS does: that belongs to it.
        if span.name != "optimizer_step" or span is self._late_step:
            return original(*args, **kwargs)
        self._late_step = span
        hot.enter_context(span.parent)
        # If it fails, the optimizer's own part was never reached.
        return around(span, original, args, kwargs, begin_now, drop)


class PytorchLightningHook(LightningHook):
    """The same, for the older name of the package."""

    name = "pytorch_lightning"
    package = "pytorch_lightning"


def begin_now(span: hot.Span) -> None:
    """Has an open span begin anew."""
    hot.enter_context(span)
    span.start = hot.now()
    if hot.device_clock is not None:
        hot.device_clock.start(span)


def drop(span: hot.Span, error: BaseException) -> None:
    hot.drop(span)


class Fit(Training):
    """The spans of a Trainer, which tells what it does."""

    _index = 0  # of the step in its epoch
    _steps_before = 0  # of optimizers, when the step began

    def on_train_start(self, trainer: Any) -> None:
        self._index = 0
        if getattr(trainer.fit_loop, "restarted_mid_epoch", False):
            # Resumed inside an epoch, of which Lightning does not say that it begins.
            batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self._index = batches // trainer.accumulate_grad_batches
            self.begin_epoch(trainer.current_epoch, trainer.lightning_module)

    def on_train_epoch_start(self, trainer: Any) -> None:
        self._index = 0
        self.begin_epoch(trainer.current_epoch, trainer.lightning_module)
        self.await_batch(trainer)

    def on_train_batch_start(self, trainer: Any) -> None:
        self.begin_step(self._index)

    def on_train_batch_end(self, trainer: Any) -> None:
        steps = trainer.global_step
        if steps != self._steps_before:
            # Several optimizers may have stepped: it is known only now which step this was.
            self.finish_step(global_step=steps)
            self._index += 1
        if trainer.is_last_batch:
            # A validation that follows clears the gradients.
            self.take_snapshot(trainer.lightning_module)

    def on_train_epoch_end(self, trainer: Any) -> None:
        self.finish_epoch()
        self.take_snapshot(trainer.lightning_module)

    def await_batch(self, trainer: Any) -> None:
        """A batch is about to be fetched."""
        if not self.is_stepping:  # else gradients are being accumulated
            self._steps_before = trainer.global_step
            self.await_step(self._index, global_step=self._steps_before + 1)


EVENTS = {name: event for name, event in vars(Fit).items() if name.startswith("on_")}
