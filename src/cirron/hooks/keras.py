"""Keras 3, on any of its backends: `epoch` and `batch`, evaluations, predictions; metrics as marks.

A callback is put into the list of each fit, once: it says which run a list of callbacks belongs to,
and is given the values once Keras has made them plain. When something begins and ends is seen at
the list itself, before its first callback is told and after its last one has been: what they record
is inside. There, too, the end of a batch is seen in time. Where the backend allows, Keras hands it
to another thread, which waits for the device; a callback that insists would make training wait.

Runs on the user's threads. Loaded after keras is, and so after its backend.
"""

from __future__ import annotations

import functools
import inspect
import sys
from _thread import _local, get_ident
from typing import TYPE_CHECKING, Any

import keras
from keras.callbacks import Callback, CallbackList

from cirron import errors, guard
from cirron.hooks.engine import STEPS, Tentative, end_if_used
from cirron.hooks.patch import Patches
from cirron.record import hot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cirron.hooks import Snapshots
    from cirron.settings import Settings

# What the model's methods open; a fit opens its epochs.
PASSES = {"fit": None, "evaluate": "evaluation", "predict": "prediction"}
SINGLES = {
    "train_on_batch": "batch",
    "test_on_batch": "evaluation",
    "predict_on_batch": "prediction",
}
# Where Keras has what makes a TensorFlow dataset of a torch loader.
LOADER_ADAPTER = "keras.src.trainers.data_adapters.torch_data_loader_adapter"


class ThisThread(_local):
    """What is going on in a thread, innermost last: runs, and None for a batch alone."""

    def __init__(self) -> None:
        self.runs: list[Run | None] = []


class KerasHook:
    """Installs and removes the hooks."""

    name = "keras"

    def __init__(self, settings: Settings, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._patches = Patches()
        self._this_thread = ThisThread()
        self._is_on = False  # somebody may hold our functions after they are taken off

    def install(self) -> None:
        self.uninstall()
        self._is_on = True
        put, model = self._patches.set, keras.Model
        for name in PASSES:
            put(model, name, self._make_pass(name, getattr(model, name)))
        for name in SINGLES:
            put(model, name, self._make_single(name, getattr(model, name)))
        for name, (before, after) in EVENTS.items():
            if before is Run.begin_batch and Run.fetches_first:
                continue  # it is open by then
            put(CallbackList, name, self._make_event(getattr(CallbackList, name), before, after))
        for name, flag in BATCH_ENDS.items():
            put(CallbackList, name, self._make_batch_end(getattr(CallbackList, name), flag))
        if keras.backend.backend() == "torch":  # on the others a step is compiled
            optimizer = keras.optimizers.Optimizer
            put(optimizer, "apply", self._make_apply(optimizer.apply))
        if keras.backend.backend() == "tensorflow":
            dataset = sys.modules["tensorflow"].data.Dataset
            load = self._make_from_generator(dataset.from_generator)
            put(dataset, "from_generator", staticmethod(load))
            adapters = sys.modules.get(LOADER_ADAPTER)
            if adapters is not None:
                adapter = adapters.TorchDataLoaderAdapter
                put(adapter, "get_tf_dataset", self._make_first_look(adapter.get_tf_dataset))

    def uninstall(self) -> None:
        """Takes everything off. A run that goes on keeps its callback, which does nothing."""
        self._is_on = False
        self._patches.undo()
        with guard.quiet("keras hooks"):
            for run in reversed(self._this_thread.runs):
                if run is not None:
                    run.end()

    # -- the model's methods ----------------------------------------------------------------

    def _make_pass(self, name: str, original: Any) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def method(model: Any, *args: Any, **kwargs: Any) -> Any:
            run = None
            try:
                bound = signature.bind(model, *args, **kwargs)
            except TypeError:
                return original(model, *args, **kwargs)  # which says what is wrong
            callbacks, runs = bound.arguments.get("callbacks"), self._this_thread.runs
            if self._is_on and find_run(callbacks) is None:
                with guard.quiet("keras hooks"):
                    run = Run(self._snapshots)
                    bound.arguments["callbacks"] = add_run(run, callbacks, model)
                    run.begin(name, model, is_inner=any(one and one.is_open for one in runs))
            if run is None:
                return original(model, *args, **kwargs)
            runs.append(run)
            error: BaseException | None = None
            try:
                return original(*bound.args, **bound.kwargs)
            except BaseException as caught:  # passes on, with the spans closed
                error = caught
                raise
            finally:
                with guard.quiet("keras hooks"):
                    runs.remove(run)
                    run.end(error)
                    if isinstance(callbacks, CallbackList):
                        callbacks.callbacks.remove(run)

        return method

    def _make_single(self, name: str, original: Any) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def method(model: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(model, *args, **kwargs)
            except TypeError:
                return original(model, *args, **kwargs)  # which says what is wrong
            if not self._is_on:
                return original(model, *args, **kwargs)
            is_training, has_values = name == "train_on_batch", name != "predict_on_batch"
            # Only a dict tells which value is which. Keras makes a list of it in this way.
            wants_list = has_values and not bound.arguments.get("return_dict")
            flatten = getattr(model, "_flatten_metrics_in_order", None) if wants_list else None
            if flatten is not None:
                bound.arguments["return_dict"] = True
            span = None
            if not is_training or STEPS.isdisjoint(hot.open_names()):
                span = hot.begin(SINGLES[name])
                hot.own_loss(span)
            self._this_thread.runs.append(None)
            try:
                result = values = original(*bound.args, **bound.kwargs)
                if flatten is not None:
                    result = flatten(values)
            except BaseException as error:  # passes on, with the span closed
                if span is not None:
                    hot.fail(span, error)
                raise
            finally:
                self._this_thread.runs.pop()
            with guard.quiet("keras hooks"):
                if has_values and isinstance(values, dict):
                    mark_all(values, "point" if is_training else "summary")
                if span is not None:
                    hot.close(span)
            return result

        return method

    # -- lists of callbacks -----------------------------------------------------------------

    def _make_event(self, original: Any, before: Event | None, after: Event | None) -> Any:
        @functools.wraps(original)
        def event(callbacks: Any, *args: Any, **kwargs: Any) -> Any:
            run = find_run(callbacks) if self._is_on else None
            if before is not None:
                self._tell(before, run, args)
            result = original(callbacks, *args, **kwargs)
            if after is not None:
                self._tell(after, run, args)
            return result

        return event

    def _make_batch_end(self, original: Any, flag: str) -> Any:
        @functools.wraps(original)
        def event(callbacks: Any, *args: Any, **kwargs: Any) -> Any:
            run = find_run(callbacks) if self._is_on else None
            if getattr(callbacks, flag, False):  # the values are a device's, and not waited for
                self._tell(Run.end_batch, run, args)
                result = original(callbacks, *args, **kwargs)
            else:
                result = original(callbacks, *args, **kwargs)
                if run is not None:
                    self._tell(Run.end_batch, run, (*args[:1], run.logs))
            if Run.fetches_first:
                self._tell(Run.await_batch, run, ())
            return result

        return event

    def _tell(self, event: Event, run: Run | None, args: tuple[Any, ...]) -> None:
        if run is not None and self._is_on:
            try:
                event(run, *args)
            except Exception as error:  # noqa: BLE001  protects the training
                guard.caught("keras hooks", error)

    # -- TensorFlow -------------------------------------------------------------------------

    def _make_from_generator(self, original: Any) -> Any:
        """Has the torch hooks leave alone what a thread of TensorFlow's own loads.

        There, nothing of a fit is open: to them a DataLoader would be a loop by itself.
        """

        def loading(generator: Any) -> Any:
            @functools.wraps(generator)
            def load(*args: Any) -> Any:
                items = iter(generator(*args))
                while True:
                    span = begin_tentatively("data_load") if self._is_on else None
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                    finally:
                        if span is not None:
                            end_if_used(span)
                    yield item

            return load

        @functools.wraps(original)
        def from_generator(generator: Any, *args: Any, **kwargs: Any) -> Any:
            given = loading(generator) if callable(generator) else generator
            return original(given, *args, **kwargs)

        return from_generator

    def _make_first_look(self, original: Any) -> Any:
        """Keras looks at some batches to learn their shapes, between two batches of an epoch."""

        @functools.wraps(original)
        def get_tf_dataset(adapter: Any) -> Any:
            if not self._is_on:
                return original(adapter)
            with hot.scope("data_load"):
                return original(adapter)

        return get_tf_dataset

    # -- torch ------------------------------------------------------------------------------

    def _make_apply(self, original: Any) -> Any:
        """A Keras optimizer's step, of which the torch hooks know nothing."""
        from torch.compiler import is_dynamo_compiling
        from torch.optim import optimizer as optimizers

        from cirron.hooks.torch import TorchHook

        @functools.wraps(original)
        def apply(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or hot.innermost().name == "optimizer_step" or not self._is_on:
                return original(optimizer, *args, **kwargs)
            ours = None
            for listener in list(optimizers._global_optimizer_post_hooks.values()):
                if isinstance(getattr(listener, "__self__", None), TorchHook):
                    ours = listener
            if ours is None:  # they are not wanted
                return original(optimizer, *args, **kwargs)
            span = hot.begin("optimizer_step")
            try:
                result = original(optimizer, *args, **kwargs)
            except BaseException as error:  # passes on, with the span closed
                hot.fail(span, error)
                raise
            hot.close(span)
            if not self._this_thread.runs:  # a loop of the program's own, whose steps they count
                ours(optimizer, (), {})
            return result

        return apply


class Run(Callback):  # type: ignore[misc]  # untyped
    """What one call of `fit`, `evaluate` or `predict` has open."""

    async_safe = True  # it only keeps what it is given: Keras need not wait for its sake
    fetches_first = keras.backend.backend() == "torch"  # before it says that a batch begins

    def __init__(self, snapshots: Snapshots) -> None:
        super().__init__()
        self.logs: Mapping[str, Any] | None = None  # the last that Keras made plain
        self._snapshots = snapshots
        self._thread = get_ident()
        self._setup: hot.Span | None = None
        self._is_fit = False
        self._inner: hot.Span | None = None  # a fit inside another run
        self._epoch: hot.Span | None = None  # None also where the program has opened one itself
        self._aside: hot.Span | None = None  # an evaluation, a prediction
        self._batch: hot.Span | None = None
        self._makes_batches = False
        self._has_begun = False  # the batch, not only the wait for its data
        self._index = 0  # of the batch that has begun, or will

    # -- what Keras tells: values -----------------------------------------------------------

    def on_epoch_end(self, number: int, logs: Any = None) -> None:
        if get_ident() == self._thread:
            self.logs = logs

    on_train_batch_end = on_test_batch_end = on_epoch_end

    def on_test_end(self, logs: Any = None) -> None:
        self.logs = logs

    # -- the run ----------------------------------------------------------------------------

    def begin(self, method: str, model: Any, *, is_inner: bool) -> None:
        aside = PASSES[method]
        self._is_fit = aside is None
        if aside is not None:
            self._aside = hot.begin(aside)
        elif is_inner:  # its epochs are no epochs of the training that it is a part of
            self._inner = hot.begin("fit", None, {"model": model.name})
        if aside is not None or is_inner or STEPS.isdisjoint(hot.open_names()):
            # Keras may look at a batch to build the model. While it does, the torch hooks see a
            # batch that is somebody's, and make none.
            self._setup = begin_tentatively("batch")

    @property
    def is_open(self) -> bool:
        spans = (self._setup, self._inner, self._epoch, self._aside, self._batch)
        return any(span is not None for span in spans)

    def end(self, error: BaseException | None = None) -> None:
        """Closes what is open: the run is over, or has failed."""
        if error is None:
            self.end_setup()
            self.leave_batch()
        elif self._setup is not None:
            self._setup.name = "build"
        for span in (self._setup, self._batch, self._aside, self._epoch, self._inner):
            if span is not None:
                if error is not None:
                    hot.fail(span, error)
                hot.close(span)
        self._setup = self._batch = self._aside = self._epoch = self._inner = None

    def end_setup(self, *_: Any) -> None:
        setup, self._setup = self._setup, None
        if setup is not None:
            setup.name = "build"
            end_if_used(setup)

    # -- epochs -----------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, *_: Any) -> None:
        self.end_setup()
        names = hot.open_names(but=self._epoch)
        self._makes_batches = self._inner is not None or STEPS.isdisjoint(names)
        if self._makes_batches and self._inner is None and "epoch" not in names:
            self._epoch = hot.begin("epoch", epoch)
            self._snapshots.expect(self.model)
        self._index = 0

    def end_epoch(self, *_: Any) -> None:
        mark_all(self.logs, "summary")
        span = hot.innermost()
        while span.name != "epoch" and span.parent is not span:
            span = span.parent
        if span.name == "epoch" and self._inner is None:
            with guard.quiet("keras hooks"):  # the epoch ends all the same
                self._snapshots.take(span, self.model)
        if self._epoch is not None:
            hot.close(self._epoch)
            self._epoch = None

    # -- evaluations and predictions --------------------------------------------------------

    def begin_aside(self, *_: Any) -> None:
        self.end_setup()
        self.leave_batch()
        if self._aside is None:  # inside a fit
            self._aside = hot.begin("evaluation")
        self._makes_batches = True
        self._index = 0

    def end_evaluation(self, *_: Any) -> None:
        mark_all(self.logs, "summary")
        self.end_aside()

    def end_aside(self, *_: Any) -> None:
        aside, self._aside = self._aside, None
        if aside is not None:
            hot.close(aside)

    # -- batches ----------------------------------------------------------------------------

    def await_batch(self, *_: Any) -> None:
        """Opens the next batch, where its data is fetched before it begins."""
        if self.fetches_first and self._makes_batches and self._batch is None:
            self._batch = begin_tentatively("batch", self._index)

    def begin_batch(self, index: int, *_: Any) -> None:
        self._index = index
        self._has_begun = True
        if self._batch is not None:
            self._batch.index = index
        elif self._makes_batches:
            self._batch = begin_tentatively("batch", index)

    def end_batch(self, last: int, logs: Mapping[str, Any] | None = None, *_: Any) -> None:
        if not self._has_begun and not self.fetches_first:
            return
        if self._aside is None or self._aside.name != "prediction":
            mark_all(logs, "point")
        batch, self._batch, self._has_begun = self._batch, None, False
        if batch is not None:
            if last > self._index:
                steps = min(last + 1, self._step_count() or last + 1) - self._index
                if steps > 1:
                    batch.set(steps=steps)
            hot.close(batch)
        self._index = last + 1

    def _step_count(self) -> int | None:
        """How many steps there are in all, where Keras knows: the last batch may have fewer."""
        if self._is_fit and self._aside is not None:  # the parameters are those of the fit
            data = getattr(self.model, "_eval_epoch_iterator", None)
            return getattr(data, "num_batches", None)
        return (self.params or {}).get("steps")

    def leave_batch(self, *_: Any) -> None:
        """There was no more data: the batch that was awaited is none, though it may have begun."""
        batch, self._batch, self._has_begun = self._batch, None, False
        if batch is not None:
            batch.name, batch.index = "data_load", None
            end_if_used(batch)


if TYPE_CHECKING:
    Event = Callable[..., None]

# Methods of a list of callbacks: what a run is told before they are called, and after.
EVENTS: dict[str, tuple[Event | None, Event | None]] = {
    "on_train_begin": (Run.end_setup, None),
    "on_epoch_begin": (Run.begin_epoch, Run.await_batch),
    "on_epoch_end": (Run.leave_batch, Run.end_epoch),
    "on_train_batch_begin": (Run.begin_batch, None),
    "on_test_begin": (Run.begin_aside, Run.await_batch),
    "on_test_batch_begin": (Run.begin_batch, None),
    "on_test_end": (Run.leave_batch, Run.end_evaluation),
    "on_predict_begin": (Run.begin_aside, Run.await_batch),
    "on_predict_batch_begin": (Run.begin_batch, None),
    "on_predict_end": (Run.leave_batch, Run.end_aside),
}

# And those at a batch's end: where the list says that it hands that on to another thread.
BATCH_ENDS = {
    "on_train_batch_end": "_async_train",
    "on_test_batch_end": "_async_test",
    "on_predict_batch_end": "_async_predict",
}


def add_run(run: Run, callbacks: Any, model: Any) -> Any:
    """What the user has given as `callbacks`, with ours first; his own list is left as it is."""
    if isinstance(callbacks, CallbackList):
        run.set_model(model)
        run.set_params(callbacks.params)
        callbacks.callbacks.insert(0, run)
        return callbacks
    if callbacks is None:
        return [run]
    if isinstance(callbacks, (list, tuple)):
        return [run, *callbacks]
    # One callback alone, say. Keras asks the members of a list, and of nothing else, whether they
    # may be told in another thread.
    return {0: run, 1: callbacks}


def find_run(callbacks: Any) -> Run | None:
    given = callbacks.callbacks if isinstance(callbacks, CallbackList) else callbacks
    if isinstance(given, (list, tuple)):
        for one in given:
            if type(one) is Run:
                return one
    return None


def begin_tentatively(name: str, index: int | None = None) -> hot.Span:
    """As `hot.begin`. Keras marks the loss of a batch itself."""
    span = hot.begin(name, index, None, Tentative)
    hot.own_loss(span)
    return span


def mark_all(logs: Mapping[str, Any] | None, kind: str) -> None:
    """Marks the scalars among Keras's values."""
    for name, one in (logs or {}).items():
        if isinstance(one, dict):
            mark_all(one, kind)
            continue
        try:
            hot.mark(name, one, kind)
        except errors.InputError:  # it is no scalar
            pass
        except Exception as error:  # noqa: BLE001  protects the others from a value that objects
            guard.caught("keras metrics", error)
