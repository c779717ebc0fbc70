"""PyTorch: `data_load`, `forward`, `backward`, `optimizer_step`; `step` and `epoch` above them.

What a training loop does is inferred from what it calls. A pass over a DataLoader is a training
epoch once a backward or an optimizer step happens in it; until then, and if none ever does, it is
an evaluation. A step lasts from the first fetch after an optimizer step to the next such fetch, so
that accumulated gradients make one step. Whoever has opened an `epoch`, `step` or `batch` scope
above, by hand or by `ci.epochs` and `ci.batches`, has said what it is, and none is added.

Runs on the user's threads; what it knows of a loop it keeps per thread. Torch is here because the
program imported it: this module is loaded after torch is.
"""

from __future__ import annotations

import weakref
from _thread import _local
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.loss import _Loss
from torch.optim import optimizer as optimizers
from torch.utils.data import dataloader

from cirron import guard
from cirron.hooks.patch import Patches
from cirron.record import hot

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron.settings import Settings

current_graph_task_id = torch._C._current_graph_task_id
STEPS = frozenset(("step", "batch"))


class Pass:
    """One iterator of a DataLoader, from its first item to its last."""

    def __init__(self, iterator: weakref.ref[Any]) -> None:
        self.iterator = iterator
        self.span: hot.Span | None = None  # the epoch or evaluation, where it is ours to make
        self.step: hot.Span | None = None
        self.index = 0  # of the next step
        self.counts_steps = True
        self.is_fresh = False  # the step was opened for the item that is being loaded
        self.outer_has_epoch = False
        self.is_training = False
        self.has_stepped = False  # an optimizer has, since the step began
        self.optimizer_steps = 0
        self.is_sized = True  # the loader knows its length


class Lane(_local):
    """What one thread is doing."""

    def __init__(self) -> None:
        self.is_inside = False  # a module's forward, or a backward
        self.is_loading = False
        self.passes: list[Pass] = []  # innermost last
        self.optimizer_spans: list[hot.Span] = []
        self.epochs = 0  # made so far
        self.free_epoch: hot.Span | None = None  # of a loop that has no loader
        self.free_steps = 0


class TorchHook:
    """Installs and removes the hooks."""

    name = "torch"

    def __init__(self, settings: Settings, on_epoch_end: Callable[[hot.Span], None]) -> None:
        self._steps_per_epoch = settings.steps_per_epoch
        self._on_epoch_end = on_epoch_end
        self._patches = Patches()
        self._handles: list[Any] = []
        self._lane = Lane()
        self._models: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        self.uninstall()
        module, iterator = torch.nn.Module, dataloader._BaseDataLoaderIter
        self._patches.set(module, "__call__", self._make_call(module.__call__))
        self._patches.set(iterator, "__next__", self._make_next(iterator.__next__))
        self._patches.set(torch.autograd, "backward", self._make_backward(torch.autograd.backward))
        self._handles = [
            optimizers.register_optimizer_step_pre_hook(self._before_step),
            optimizers.register_optimizer_step_post_hook(self._after_step),
        ]

    def uninstall(self) -> None:
        """Takes everything off, and closes what this thread has open."""
        self._patches.undo()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        with guard.quiet("torch hooks"):
            self._end_optimizers()
            while self._lane.passes:
                self._end_pass(self._lane.passes[-1])
            self._end_free_epoch()

    # -- forward ----------------------------------------------------------------------------

    def _make_call(self, original: Any) -> Any:
        lane, outermost = self._lane, self._outermost

        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  nn.Module's own
            # First: inside a compiled graph this is all that remains of us.
            if is_dynamo_compiling() or lane.is_inside:
                return original(self, *args, **kwargs)
            return outermost(original, self, args, kwargs)

        return __call__

    def _outermost(self, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
        lane, span = self._lane, None
        try:
            is_model = self._models.get(module)
            if is_model is None:
                is_model = self._models[module] = is_a_model(module)
            # A task id: a checkpointed part runs again, in a backward.
            if is_model and current_graph_task_id() == -1:
                span = hot.begin("forward", None, {"mode": "train" if module.training else "eval"})
        except Exception as error:  # noqa: BLE001  protects the forward from a model that objects
            guard.caught("torch forward", error)
        lane.is_inside = True
        try:
            result = original(module, *args, **kwargs)
        except BaseException as error:  # passes on, with the span closed
            lane.is_inside = False
            if span is not None:
                hot.fail(span, error)
            raise
        lane.is_inside = False
        if span is not None:
            hot.close(span)
        return result

    # -- backward ---------------------------------------------------------------------------

    def _make_backward(self, original: Any) -> Any:
        lane, saw_training = self._lane, self._saw_training

        def backward(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or lane.is_inside:
                return original(*args, **kwargs)
            span = None
            try:
                if not (lane.passes and lane.passes[-1].is_training):
                    saw_training()
                span = hot.begin("backward")
            except Exception as error:  # noqa: BLE001  protects the backward
                guard.caught("torch backward", error)
            lane.is_inside = True
            try:
                result = original(*args, **kwargs)
            except BaseException as error:  # passes on, with the span closed
                lane.is_inside = False
                if span is not None:
                    hot.fail(span, error)
                raise
            lane.is_inside = False
            if span is not None:
                hot.close(span)
            return result

        return backward

    # -- optimizer --------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_dynamo_compiling():
            return
        try:
            lane = self._lane
            if not lane.passes:
                self._free_step()
            elif not lane.passes[-1].is_training:
                self._saw_training()
            lane.optimizer_spans.append(hot.begin("optimizer_step"))
        except Exception as error:  # noqa: BLE001  protects the optimizer
            guard.caught("torch optimizer", error)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_dynamo_compiling():
            return
        try:
            lane = self._lane
            spans = lane.optimizer_spans
            if spans:
                hot.close(spans.pop())
            if lane.passes and not spans:  # else an optimizer inside another one
                current = lane.passes[-1]
                current.has_stepped = True
                current.optimizer_steps += 1
        except Exception as error:  # noqa: BLE001  protects the optimizer
            guard.caught("torch optimizer", error)

    def _end_optimizers(self) -> None:
        """Closes the scope of a step that raised: torch calls no hook then."""
        while self._lane.optimizer_spans:
            span = self._lane.optimizer_spans.pop()
            span.set(error="the step raised")
            hot.close(span)

    # -- loading ----------------------------------------------------------------------------

    def _make_next(self, original: Any) -> Any:
        lane, begin = self._lane, self._begin_load

        def __next__(iterator: Any) -> Any:  # noqa: N807  the iterator's own
            if lane.is_loading or hot.is_fetching():  # inside a dataset; or for `ci.batches`
                return original(iterator)
            load = None
            try:
                load = begin(iterator)
            except Exception as error:  # noqa: BLE001  protects the loader
                guard.caught("torch loader", error)
            lane.is_loading = True
            try:
                item = original(iterator)
            except BaseException as error:  # passes on; a StopIteration ends the pass
                lane.is_loading = False
                if load is not None:
                    with guard.quiet("torch loader"):
                        self._fail_load(iterator, load, error)
                raise
            lane.is_loading = False
            if load is not None:
                hot.close(load)
            return item

        return __next__

    def _begin_load(self, iterator: Any) -> hot.Span:
        lane = self._lane
        if lane.optimizer_spans:
            self._end_optimizers()
        passes = lane.passes
        if passes and passes[-1].iterator() is iterator:
            current = passes[-1]
        else:
            current = self._find_pass(iterator) or self._begin_pass(iterator)
        is_done = current.has_stepped or not current.is_training
        current.is_fresh = current.counts_steps and (current.step is None or is_done)
        if current.is_fresh:
            if current.step is not None:
                hot.close(current.step)
            self._split_endless(current)
            current.step = hot.begin("step" if current.is_training else "batch", current.index)
            current.has_stepped = False
            current.index += 1
        return hot.begin("data_load")

    def _fail_load(self, iterator: Any, load: hot.Span, error: BaseException) -> None:
        if not isinstance(error, StopIteration):
            hot.fail(load, error)
            return
        hot.drop(load)
        current = self._find_pass(iterator)
        if current is None:
            return
        if current.step is not None and current.is_fresh:
            hot.drop(current.step)
            current.step = None
        self._end_pass(current)

    def _find_pass(self, iterator: Any) -> Pass | None:
        """The pass of this iterator; those inside it that were left early end here."""
        passes = self._lane.passes
        for place, found in enumerate(passes):
            if found.iterator() is iterator:
                while len(passes) > place + 1:
                    self._end_pass(passes[-1])
                return found
        return None

    def _begin_pass(self, iterator: Any) -> Pass:
        lane = self._lane
        for old in [old for old in lane.passes if old.iterator() is None]:
            self._end_pass(old)
        names = hot.open_names()
        current = Pass(weakref.ref(iterator, self._iterator_gone))
        has_step = not STEPS.isdisjoint(names)
        current.outer_has_epoch = "epoch" in names
        current.counts_steps = not has_step and not hot.is_fetching()
        current.is_sized = has_length(iterator)
        if not has_step and (current.counts_steps or not current.outer_has_epoch):
            current.span = hot.begin("evaluation")
        lane.passes.append(current)
        return current

    def _end_pass(self, current: Pass) -> None:
        self._lane.passes.remove(current)
        if current.step is not None:
            hot.close(current.step)
        if current.span is not None:
            if current.is_training:
                self._on_epoch_end(current.span)
            hot.close(current.span)

    def _iterator_gone(self, gone: weakref.ref[Any]) -> None:
        """Left early, by `break` or an exception; called wherever the last reference went."""
        with guard.quiet("torch loader"):
            for current in list(self._lane.passes):
                if current.iterator is gone:
                    self._end_pass(current)

    # -- what a pass turns out to be --------------------------------------------------------

    def _saw_training(self) -> None:
        """A backward or an optimizer step: the innermost pass is a training epoch."""
        passes = self._lane.passes
        if not passes or passes[-1].is_training:
            return
        current = passes[-1]
        current.is_training = True
        if current.step is not None:
            current.step.name = "step"
        if current.span is None:
            return
        if current.outer_has_epoch:  # made by hand: the steps are directly under that one
            if current.step is not None:
                current.step.parent = current.span.parent
            hot.drop(current.span)
            current.span = None
        else:
            self._name_epoch(current.span)

    def _name_epoch(self, span: hot.Span) -> None:
        span.name = "epoch"
        span.index = self._lane.epochs
        self._lane.epochs += 1

    def _split_endless(self, current: Pass) -> None:
        """A loader without an end: an epoch is as many optimizer steps as the settings say."""
        if current.is_sized or current.span is None or not current.is_training:
            return
        if current.optimizer_steps >= self._steps_per_epoch:
            self._on_epoch_end(current.span)
            hot.close(current.span)
            current.span = hot.begin("epoch")
            self._name_epoch(current.span)
            current.optimizer_steps = current.index = 0

    def _free_step(self) -> None:
        """The same for a loop without a loader."""
        lane = self._lane
        if lane.free_epoch is not None and (
            lane.free_epoch.end or lane.free_steps >= self._steps_per_epoch
        ):
            self._end_free_epoch()
        if lane.free_epoch is None and "epoch" not in hot.open_names():
            lane.free_epoch = hot.begin("epoch")
            self._name_epoch(lane.free_epoch)
            lane.free_steps = 0
        lane.free_steps += 1

    def _end_free_epoch(self) -> None:
        span, self._lane.free_epoch = self._lane.free_epoch, None
        if span is not None and not span.end:
            self._on_epoch_end(span)
            hot.close(span)


def is_a_model(module: Any) -> bool:
    """Whether a call of it is a forward: it has parameters, and is no loss and no metric."""
    if isinstance(module, _Loss) or type(module).__module__.partition(".")[0] == "torchmetrics":
        return False
    return next(module.parameters(), None) is not None


def has_length(iterator: Any) -> bool:
    try:
        return len(iterator) >= 0
    except TypeError:
        return False
