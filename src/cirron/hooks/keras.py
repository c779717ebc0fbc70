"""Keras 3, on any of its backends: `epoch` and `batch`, evaluations, predictions; metrics as marks.

Each fit gets one callback. It identifies the run that a list of callbacks belongs to, and receives
the values once Keras has converted them to floats. Spans are opened and closed by wrapped methods
of the list itself: before its first callback is called and after its last one, so that what
callbacks record is inside. On some backends Keras calls callbacks in another thread, which waits
for the device; wrapping the list shows the end of a batch in time, without making training wait.

Runs on the user's threads. Loaded after Keras and its backend.
"""

from __future__ import annotations

import functools
import inspect
import sys
from _thread import get_ident
from typing import TYPE_CHECKING, Any

import keras
from keras.callbacks import Callback, CallbackList

from cirron import guard
from cirron.hooks.engine import (
    STEPS,
    Fetch,
    Tell,
    Tentative,
    Training,
    Wrapper,
    around,
    end_if_used,
    end_inferred,
    is_noted,
    scalars_of,
)
from cirron.record import hot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cirron.hooks import Snapshots
    from cirron.hooks.engine import Call

# The span that each method opens. A fit opens epochs.
PASSES = {"fit": None, "evaluate": "evaluation", "predict": "prediction"}
SINGLES = {
    "train_on_batch": "batch",
    "test_on_batch": "evaluation",
    "predict_on_batch": "prediction",
}
# Converts a torch loader to a TensorFlow dataset.
LOADER_ADAPTER = "keras.src.trainers.data_adapters.torch_data_loader_adapter"
# Fetches the batches of an epoch on JAX.
JAX_TRAINER = "keras.src.backend.jax.trainer"


class KerasHook(Wrapper):
    """Replaces functions of Keras. A fit that outlives that keeps a callback that does nothing."""

    name = "keras"
    what = "keras hooks"
    loading_ns = 0  # spent in TensorFlow's threads

    def _replace(self) -> None:
        model, backend = keras.Model, keras.backend.backend()
        for name in PASSES:
            self._wrap_argument(model, name, "callbacks", self._call_pass)
        for name in SINGLES:
            self._wrap_argument(model, name, "return_dict", self._call_single)
        for name in ("save", "save_weights"):
            self._wrap(model, name, save)
        heard: dict[str, Tell] = {
            "on_train_begin": Tell(Run.leave_batch),
            "on_epoch_begin": Tell(Run.epoch_begins, Run.await_batch),
            "on_epoch_end": Tell(Run.leave_batch, Run.epoch_ends),
        }
        for kind in ("train", "test", "predict"):
            heard[f"on_{kind}_batch_end"] = make_batch_end(f"_async_{kind}")
            if not Run.fetches_first:  # else the batch is already open
                heard[f"on_{kind}_batch_begin"] = Tell(Run.batch_begins)
            if kind != "train":
                heard[f"on_{kind}_begin"] = Tell(Run.aside_begins, Run.await_batch)
                heard[f"on_{kind}_end"] = Tell(Run.leave_batch, Run.aside_ends)
        for name, tell in heard.items():
            self._wrap(CallbackList, name, tell, find_run)
        if backend == "torch":  # the other backends compile the step
            optimizer = keras.optimizers.Optimizer
            self._patches.set(optimizer, "apply", self._make_apply(optimizer.apply))
        if backend == "jax":  # fetches inside the batch
            iterators = sys.modules.get(JAX_TRAINER)
            if iterators is not None:
                self._wrap(iterators.JAXEpochIterator, "_get_iterator", self._get_iterator)
        if backend == "tensorflow":
            dataset = sys.modules["tensorflow"].data.Dataset
            self._wrap_argument(dataset, "from_generator", "generator", self._from_generator)
            adapters = sys.modules.get(LOADER_ADAPTER)
            if adapters is not None:
                self._wrap(adapters.TorchDataLoaderAdapter, "get_tf_dataset", look_at_batches)

    # -- the model's methods ----------------------------------------------------------------

    def _wrap_argument(
        self, owner: Any, name: str, argument: str, instead: Callable[..., Any]
    ) -> None:
        """Calls `instead`, with the value of an argument, and a function that gives it another one.

        The others are passed as the program passes them, because MLflow and others, which wrap
        these methods too, add their own by name.
        """
        position = [*inspect.signature(getattr(owner, name)).parameters, argument].index(argument)

        def call_instead(call: Call) -> Any:
            args, kwargs = call.args, call.keywords
            is_positional = position < len(args)

            def change(value: Any) -> Call:
                if is_positional:
                    changed = (*args[:position], value, *args[position + 1 :])
                    return functools.partial(call.func, *changed, **kwargs)
                return functools.partial(call, **{argument: value})

            given = args[position] if is_positional else kwargs.get(argument)
            return instead(name, call, given, change)

        self._wrap(owner, name, call_instead)

    def _call_pass(self, name: str, call: Call, callbacks: Any, change: Any) -> Any:
        run, runs, model = None, self._runs.open, call.args[0]
        if find_run(callbacks) is None:
            with guard.quiet(self.what):
                is_inner = any(one.is_open for one in runs)
                if name == "fit" and not is_inner:
                    end_inferred()
                run = Run(self, self._snapshots)
                runs.append(run)
                call = change(add_run(run, callbacks, model))
                run.begin(name, model, is_inner=is_inner)

        def end(run: Run, error: BaseException | None = None) -> None:
            with guard.quiet(self.what):
                runs.remove(run)
                run.end(error)
                if isinstance(callbacks, CallbackList):
                    callbacks.callbacks.remove(run)

        return around(run, call, end=end, fail=end)

    def _call_single(self, name: str, call: Call, is_dict: Any, change: Any) -> Any:
        is_training, has_values = name == "train_on_batch", name != "predict_on_batch"
        # Only a dict has the names of the values. Keras converts it to a list in the same way.
        wants_list = has_values and not is_dict
        flatten = getattr(call.args[0], "_flatten_metrics_in_order", None) if wants_list else None
        if flatten is not None:
            call = change(True)
        span = None
        if not is_training or STEPS.isdisjoint(hot.open_names()):
            span = hot.begin(SINGLES[name])
            hot.own_loss(span)

        def call_and_mark() -> Any:
            values = call()
            if has_values and isinstance(values, dict):
                self._tell(mark_all, values, "point" if is_training else "summary")
            return values if flatten is None else flatten(values)

        self._runs.open.append(Training())  # without spans
        try:
            return around(span, call_and_mark)
        finally:
            self._runs.open.pop()

    # -- loading ----------------------------------------------------------------------------

    def _loads(self, items: Any, kind: type[hot.OwnSpan], end: Any, fail: Any) -> Any:
        """Yields the same items, each fetched inside a `data_load`."""
        while True:
            span = hot.begin("data_load", None, None, kind) if self._is_on else None
            try:
                item = around(span, next, (items,), None, end, fail)
            except StopIteration:
                return
            yield item

    def _get_iterator(self, call: Call) -> Any:
        return self._loads(iter(call()), Fetch, hot.close, fail_load)

    def _from_generator(self, name: str, call: Call, generator: Any, change: Any) -> Any:
        """Counts how long TensorFlow's threads load data: the compiled step fetches it inside.

        The open span hides the thread from the torch hooks. They would take a DataLoader there for
        a loop of its own, because nothing of the fit is open in that thread.
        """

        def end(span: hot.Span, error: BaseException | None = None) -> None:
            end_if_used(span)

        @functools.wraps(generator)
        def load(*args: Any) -> Any:
            items = self._loads(iter(generator(*args)), Tentative, end, end)
            while True:
                began = hot.now()
                try:
                    item = next(items)
                except StopIteration:
                    return
                finally:
                    self.loading_ns += hot.now() - began
                yield item

        return change(load)() if callable(generator) else call()

    # -- torch ------------------------------------------------------------------------------

    def _make_apply(self, original: Any) -> Any:
        """The step of a Keras optimizer, which the torch hooks do not see."""
        from torch.compiler import is_dynamo_compiling

        from cirron.hooks.torch import TorchHook

        @functools.wraps(original)
        def apply(*args: Any, **kwargs: Any) -> Any:
            torch_hook, step = TorchHook.installed, hot.current()
            # One optimizer may wrap another.
            is_inner = step is not None and "optimizer_step" in (step.name, *(step.phase or ()))
            if is_dynamo_compiling() or is_inner or torch_hook is None or not self._is_on:
                return original(*args, **kwargs)
            if isinstance(step, hot.Step) and step.phase is None and not step.end:
                kind = hot.OwnSpan
                result = hot.within(step, "optimizer_step", None, kind, 0, original, args, kwargs)
            else:
                result = around(hot.begin("optimizer_step"), original, args, kwargs)
            if not self._runs.open:  # the program's own loop: the torch hooks count its steps
                torch_hook.after_step(args[0], (), {})
            return result

        return apply


def fail_load(span: hot.Span, error: BaseException) -> None:
    """Drops the span of the fetch that finds the end of the data, unless it is used."""
    if isinstance(error, StopIteration):
        (hot.close if is_noted(span) else hot.drop)(span)
    else:
        hot.fail(span, error)


def look_at_batches(call: Call) -> Any:
    """Keras reads some batches to learn their shapes, between two batches of an epoch."""
    return around(hot.begin("data_load"), call)


def save(call: Call) -> Any:
    """Saving to a file, by a callback such as ModelCheckpoint or by the program."""
    is_inner = "checkpoint" in hot.open_names()
    return around(None if is_inner else hot.begin("checkpoint"), call)


class Run(Training, Callback):  # type: ignore[misc]  # untyped
    """The spans of one call of `fit`, `evaluate` or `predict`."""

    step_name, rest, marks_loss = "batch", "build", True
    async_safe = True  # it only stores values, so Keras may call it from another thread
    fetches_first = keras.backend.backend() == "torch"  # before Keras announces the batch
    logs: Mapping[str, Any] | None = None  # the latest values, as floats
    _loaded_ns = 0  # the hook's `loading_ns` when the epoch began
    _aside: hot.Span | None = None  # an evaluation, a prediction
    _index = 0  # of the current or next batch

    def __init__(self, hook: KerasHook, snapshots: Snapshots) -> None:
        Training.__init__(self, snapshots)
        Callback.__init__(self)
        self._hook = hook
        self._thread = get_ident()

    # -- the callback's own events: values --------------------------------------------------

    def on_epoch_end(self, number: int, logs: Any = None) -> None:
        if get_ident() == self._thread:
            self.logs = logs

    on_train_batch_end = on_test_batch_end = on_epoch_end

    def on_test_end(self, logs: Any = None) -> None:
        self.logs = logs

    # -- the run ----------------------------------------------------------------------------

    def begin(self, method: str, model: Any, *, is_inner: bool) -> None:
        aside = PASSES[method]
        self.is_inner = is_inner
        if aside is not None:
            self._aside = self.begin_aside(aside)
        elif is_inner:  # its epochs are not epochs of the outer training
            self.begin_aside("fit", model=model.name)
        # Keras may read a batch to build the model. The open span keeps the torch hooks from
        # recording that as a batch of their own.
        self.makes_steps = self.is_open or STEPS.isdisjoint(hot.open_names())
        self.await_step(None)

    def end(self, error: BaseException | None = None) -> None:
        if error is not None and self.step is not None and self.step.index is None:
            self.step.name = self.rest
        super().end(error)

    # -- epochs -----------------------------------------------------------------------------

    def epoch_begins(self, _: CallbackList, epoch: int, *__: Any) -> None:
        self.begin_epoch(epoch, self.model)
        self._describe(is_training=True)
        self._index = 0
        self._loaded_ns = self._hook.loading_ns

    def epoch_ends(self, *_: Any) -> None:
        mark_all(self.logs, "summary")
        span = hot.innermost()
        while span.name != "epoch" and span.parent is not span:
            span = span.parent
        if span.name == "epoch" and not self.is_inner:
            if loading_ns := self._hook.loading_ns - self._loaded_ns:
                span.set(loading_ns=loading_ns)
            with guard.quiet("keras hooks"):  # the epoch must end even if this fails
                assert self.snapshots is not None
                self.snapshots.take(span, self.model)
        self.end_epoch()

    # -- evaluations and predictions --------------------------------------------------------

    def aside_begins(self, *_: Any) -> None:
        self.leave_batch()
        if self._aside is None:  # inside a fit
            self._aside = self.begin_aside("evaluation")
        self._describe(is_training=False)
        self.makes_steps = True
        self._index = 0

    def aside_ends(self, *_: Any) -> None:
        aside, self._aside = self._aside, None
        if aside is not None:
            if aside.name == "evaluation":
                mark_all(self.logs, "summary")
            self.end_aside(aside)

    def _describe(self, *, is_training: bool) -> None:
        if self.fetches_first:
            from cirron.hooks.torch import TorchHook

            TorchHook.describe(self.model, is_training=is_training)

    # -- batches ----------------------------------------------------------------------------

    def await_batch(self, *_: Any) -> None:
        """Opens the next batch before its data is fetched."""
        if self.fetches_first:
            self.await_step(self._index)

    def batch_begins(self, _: CallbackList, index: int, *__: Any) -> None:
        self._index = index
        self.await_step(index)

    def batch_ends(self, last: int, logs: Mapping[str, Any] | None = None, *_: Any) -> None:
        batch = self.step
        if self.makes_steps and batch is None:  # no batch has begun
            return
        if self._aside is None or self._aside.name != "prediction":
            mark_all(logs, "point")
        if batch is not None and last > self._index:
            steps = min(last + 1, self._step_count() or last + 1) - self._index
            if steps > 1:
                batch.set(steps=steps)
        self.begin_step(self._index)
        self._index = last + 1
        if self.fetches_first:
            self.finish_step()
            self.await_step(self._index)
        else:
            self.end_step()

    def _step_count(self) -> int | None:
        """The number of steps of the pass, if Keras knows it: the last batch may have fewer."""
        if self.is_in_epoch and self._aside is not None:  # `params` describes the fit
            data = getattr(self.model, "_eval_epoch_iterator", None)
            return getattr(data, "num_batches", None)
        return (self.params or {}).get("steps")

    def leave_batch(self, *_: Any) -> None:
        """Ends a span that did not become a batch: Keras has built the model, or the data ended."""
        self.end_step()
        self.rest = "data_load"


def make_batch_end(flag: str) -> Tell:
    """`flag`: the attribute of a list that says whether its callbacks run in another thread."""

    def before(run: Run, callbacks: CallbackList, last: int, logs: Any = None) -> None:
        if getattr(callbacks, flag, False):  # the values may be on a device: nothing waits for them
            run.batch_ends(last, logs)

    def after(run: Run, callbacks: CallbackList, last: int, *_: Any) -> None:
        if not getattr(callbacks, flag, False):
            run.batch_ends(last, run.logs)

    return Tell(before, after)


def add_run(run: Run, callbacks: Any, model: Any) -> Any:
    """The user's `callbacks` with ours first. The user's own list is not changed."""
    if isinstance(callbacks, CallbackList):
        run.set_model(model)
        run.set_params(callbacks.params)
        callbacks.callbacks.insert(0, run)
        return callbacks
    if callbacks is None:
        return [run]
    if isinstance(callbacks, (list, tuple)):
        return [run, *callbacks]
    # For example, a single callback. Keras checks `async_safe` only for the members of a list.
    return {0: run, 1: callbacks}


def find_run(callbacks: Any) -> Run | None:
    given = callbacks.callbacks if isinstance(callbacks, CallbackList) else callbacks
    if isinstance(given, (list, tuple)):
        for one in given:
            if type(one) is Run:
                return one
    return None


def mark_all(logs: Mapping[str, Any] | None, kind: str) -> None:
    """Marks the scalars among Keras's values."""
    if logs:
        hot.mark_all(hot.innermost(), scalars_of(logs), kind)
        for one in logs.values():
            if isinstance(one, dict):
                mark_all(one, kind)
