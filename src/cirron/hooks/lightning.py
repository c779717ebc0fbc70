"""Lightning: `epoch` and `step` spans, with torch's spans inside; logged values as marks.

Cirron hears of each event right before Lightning calls its callbacks, so what they record is inside
the spans that are opened here. A Trainer's list of callbacks is never changed, because Lightning's
tuner uses the first one. Wrapped methods of the loops show what callbacks are not told: when a
batch is about to be fetched, what is evaluated and logged, and how a run ends. The same code serves
`lightning` and `pytorch_lightning`, which are two copies of one package.

Runs on the user's threads. Loaded after one of the two packages.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from cirron import guard
from cirron.hooks.engine import Tell, Tentative, Training, Wrapper, around, end_if_used
from cirron.hooks.torch import TorchHook
from cirron.record import hot

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron.hooks import Snapshots
    from cirron.hooks.engine import Call
    from cirron.settings import Settings


class LightningHook(Wrapper):
    """Installs and removes the hooks."""

    name = "lightning"
    package = "lightning.pytorch"
    what = "lightning hooks"

    def __init__(self, settings: Settings, snapshots: Snapshots) -> None:
        super().__init__(settings, snapshots)
        # By Trainer, for what is outside of its runs, such as an evaluation.
        self._fits: weakref.WeakKeyDictionary[Any, Fit] = weakref.WeakKeyDictionary()
        self._late_step = 0  # number of the last optimizer step that was made to start late
        self._handle: Any = None  # of the hook of optimizers, once a fit needs it

    def _replace(self) -> None:
        find, logger = self._find, "trainer.connectors.logger_connector"
        over = Tell(after=lambda fit, _: fit.end_epoch())
        # Data without a length is fetched ahead, the first batch when the epoch starts to run. A
        # `StopIteration` means that the data is used up, or that a hook has returned -1.
        fetch = Tell(Fit.await_batch, stopped=lambda fit, *_: fit.skip_step())
        for module, owner, name, instead, of in (
            ("trainer", "Trainer", "save_checkpoint", self._save, find),
            ("loops", "_FitLoop", "run", self._fit, None),
            ("loops", "_FitLoop", "setup_data", self._set_up_data, find),
            ("loops", "_FitLoop", "on_advance_end", over, find),
            ("loops", "_TrainingEpochLoop", "on_run_start", fetch, find),
            ("loops", "_TrainingEpochLoop", "advance", fetch, find),
            ("loops", "_EvaluationLoop", "run", self._evaluate, find),
            ("loops", "_PredictionLoop", "run", self._evaluate, find),
            ("loops.optimization.automatic", "Closure", "__call__", self._call_closure, None),
            (logger, "_LoggerConnector", "log_metrics", Tell(Fit.log_metrics), find),
        ):
            with guard.quiet(self.what):
                found = importlib.import_module(f"{self.package}.{module}")
                self._wrap(getattr(found, owner), name, instead, of)
        with guard.quiet(self.what):
            calls = importlib.import_module(f"{self.package}.trainer.call")
            hear = self._make_call_callbacks(calls._call_callback_hooks)
            self._patches.set(calls, "_call_callback_hooks", hear)

    def uninstall(self) -> None:
        super().uninstall()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        with guard.quiet(self.what):
            for fit in self._fits.values():
                fit.end()
        self._fits.clear()

    def _find(self, owner: Any) -> Fit:
        """What is open in a Trainer, or in the Trainer of a loop."""
        trainer = getattr(owner, "trainer", owner)
        runs = self._runs.open
        if runs and runs[-1].trainer is trainer:  # nearly always, several times a step
            return runs[-1]  # type: ignore[no-any-return]
        for fit in reversed(runs):
            if fit.trainer is trainer:
                return fit  # type: ignore[no-any-return]
        if trainer not in self._fits:
            self._fits[trainer] = Fit(self._snapshots, self.watch_optimizers)
        return self._fits[trainer]

    def _make_call_callbacks(self, original: Any) -> Any:
        """Called six times a step, mostly for nothing: not `_wrap`, which would be a third call."""

        @functools.wraps(original)
        def call_callbacks(trainer: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            event = EVENTS.get(name)
            if event is not None and self._is_on:
                try:
                    event(self._find(trainer), trainer)
                except Exception as error:  # noqa: BLE001  protects the training
                    guard.caught(self.what, error)
            return original(trainer, name, *args, **kwargs)

        return call_callbacks

    def watch_optimizers(self) -> None:
        if self._handle is None and self._is_on:
            self._handle = register_optimizer_step_post_hook(self._optimizer_stepped)

    def _optimizer_stepped(self, *_: Any) -> None:
        """An optimizer of any thread, and of a fit inside another one."""
        for fit in self._runs.open[-1:]:
            fit.has_stepped = fit.is_manual

    # -- methods ----------------------------------------------------------------------------

    def _fit(self, call: Call) -> Any:
        """A run. A callback may use the tuner, which starts another one of the same Trainer."""
        fit = Fit(self._snapshots, self.watch_optimizers)
        fit.trainer = call.args[0].trainer
        return self._runs.call(fit, getattr(fit.trainer, "lightning_module", None), call)

    def _set_up_data(self, fit: Fit, call: Call) -> Any:
        """Creates the loaders. One without a length also fetches a batch here."""
        loop = call.args[0]
        before = loop._data_fetcher

        def end(span: hot.Span) -> None:
            # Called before each epoch. It usually does nothing.
            (end_if_used if loop._data_fetcher is before else hot.close)(span)

        return around(hot.begin("data_setup", None, None, Tentative), call, end=end)

    def _evaluate(self, fit: Fit, call: Call) -> Any:
        trainer = call.args[0].trainer
        name = "prediction" if trainer.predicting else "evaluation"
        stage = getattr(trainer.state.stage, "value", None)
        return fit.call_aside(call, name, stage=stage)

    def _save(self, fit: Fit, call: Call) -> Any:
        return fit.call_aside(call, "checkpoint", global_step=call.args[0].global_step)

    def _call_closure(self, call: Call) -> Any:
        """Lightning's optimizers call forward and backward; their own step starts after that."""
        span = hot.current()
        if span is None:
            return call()
        phase, kind = span.phase, span.phase_kind
        number, name = (span.sequence, span.name) if phase is None else phase[:2]
        # LBFGS calls it several times: all but the first call are part of its step.
        if name != "optimizer_step" or number == self._late_step:
            return call()
        self._late_step = number
        if phase is None:
            hot.enter_context(span.parent)
        else:
            span.phase = span.phase_kind = None  # type: ignore[misc]  # it is a step
        try:
            result = call()
        except BaseException:  # passes on; the optimizer has done nothing
            begin_again(span, phase, kind)
            hot.drop(hot.open_phase(span))
            raise
        begin_again(span, phase, kind)
        return result


def begin_again(span: Any, phase: Any, kind: Any) -> None:
    """Begins the step of an optimizer, or the phase of a step, once more."""
    if phase is not None:
        is_noted = getattr(span, "noted", 0) == phase[0]  # its records may not begin before it
        start = phase[3] if is_noted else hot.now()
        span.phase, span.phase_kind = (*phase[:3], start), kind
        return
    hot.enter_context(span)
    span.start = hot.now()
    if hot.device_clock is not None:
        hot.device_clock.start(span)


class PytorchLightningHook(LightningHook):
    """The same, for the older name of the package."""

    name = "pytorch_lightning"
    package = "pytorch_lightning"


class Fit(Training):
    """The spans of a run. Its methods are named after Lightning's events."""

    trainer: Any = None  # during a run
    is_manual = False  # the module steps its optimizers by itself
    has_stepped = False  # an optimizer, in this batch of a module that does so
    _index = 0  # of the step in its epoch
    _global_step = 0
    _is_epoch_new = False  # none of its batches has begun

    def __init__(self, snapshots: Snapshots, watch_optimizers: Callable[[], None]) -> None:
        super().__init__(snapshots)
        self._watch_optimizers = watch_optimizers

    def on_train_start(self, trainer: Any) -> None:
        self._index, self._global_step = 0, trainer.global_step
        if getattr(trainer.fit_loop, "restarted_mid_epoch", False):
            # Resumed inside an epoch: Lightning does not announce its start.
            batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self._index = batches // trainer.accumulate_grad_batches
            self._begin_epoch(trainer)

    def on_train_epoch_start(self, trainer: Any) -> None:
        self._index = 0
        self._begin_epoch(trainer)

    def _begin_epoch(self, trainer: Any) -> None:
        self._is_epoch_new = True
        self.begin_epoch(trainer.current_epoch, trainer.lightning_module)
        TorchHook.describe(trainer.strategy.model, is_training=True)

    def on_validation_start(self, trainer: Any) -> None:
        TorchHook.describe(trainer.strategy.model, is_training=False)

    on_test_start = on_validation_start

    def on_train_batch_start(self, trainer: Any) -> None:
        self.has_stepped = False
        if self._is_epoch_new:  # the module may decide in its hooks before
            self._is_epoch_new = False
            self.is_manual = not trainer.lightning_module.automatic_optimization
            if self.is_manual:  # Lightning does not count the steps of a torch optimizer
                self._watch_optimizers()
        self.begin_step(self._index)

    def on_train_batch_end(self, trainer: Any) -> None:
        before, self._global_step = self._global_step, trainer.global_step
        is_last = trainer.is_last_batch  # may be left over from gradients accumulated by the module
        if is_last or self.has_stepped or self._global_step != before:
            self.finish_step(global_step=self._global_step)
            self._index += 1
        if is_last:
            # A validation that follows clears the gradients.
            self.take_snapshot(trainer.lightning_module)

    def on_train_epoch_end(self, trainer: Any) -> None:
        self.finish_epoch()
        self.take_snapshot(trainer.lightning_module)

    def on_validation_epoch_end(self, trainer: Any) -> None:
        """Ends the last batch: the torch hooks would leave it open until the loader ends."""
        span = hot.innermost()
        if self.asides and span.parent is self.asides[-1] and span.name == "batch":
            hot.close(span)

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def log_metrics(self, connector: Any, metrics: Any, *_: Any) -> None:
        # Between batches, the values are those of the whole epoch.
        self.log(metrics, (), getattr(connector, "_first_loop_iter", None) is not None)

    def await_batch(self, *_: Any) -> None:
        """A batch is about to be fetched."""
        self.await_step(self._index, global_step=self._global_step + 1)


EVENTS = {name: event for name, event in vars(Fit).items() if name.startswith("on_")}
