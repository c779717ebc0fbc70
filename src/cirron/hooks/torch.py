"""PyTorch: `data_load`, `forward`, `backward`, `optimizer_step`; `step` and `epoch` above them.

What a training loop does is inferred from what it calls. A pass over a DataLoader is a training
epoch once a backward or an optimizer step happens in it; until then, and if none ever does, it is
an evaluation. A step lasts from the first fetch after an optimizer step to the next such fetch, so
that accumulated gradients make one step. Whoever has opened an `epoch`, `step` or `batch` scope
above, by hand or by `ci.epochs` and `ci.batches`, has said what it is, and none is added.

One pass a thread drives: it has the epoch and the steps. Passes that begin while it goes on are
evaluations of their own, where the program evaluates, or else fetch more for the same step, as
zipped loaders do.

Runs on the user's threads; what it knows of a loop it keeps per thread. Torch is here because the
program imported it: this module is loaded after torch is.
"""

from __future__ import annotations

import sys
import weakref
from _thread import _local
from dis import opmap
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn.modules.loss import _Loss
from torch.optim import optimizer as optimizers
from torch.utils.data import dataloader

from cirron import guard
from cirron.hooks.patch import ImportWatch, Patches
from cirron.record import hot

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from cirron.settings import Settings

current_graph_task_id = torch._C._current_graph_task_id  # -1 outside of a backward
STEPS = frozenset(("step", "batch"))
FOR_ITER = opmap["FOR_ITER"]
# What torch runs every optimizer's step in; all of them share the code.
STEP_CODE = torch.optim.Optimizer.profile_hook_step(len).__code__

# Modules whose kind is remembered; past this the ones that are gone are forgotten.
MAX_MODULES = 1_000


def nothing() -> None:
    """What a weak reference to something that is gone returns."""


class Pass:
    """One iterator of a DataLoader, from its first item to its last."""

    __slots__ = (
        "above",
        "counts_steps",
        "fetches",
        "index",
        "is_ahead",
        "is_driver",
        "is_evaluating",
        "is_fresh",
        "is_loop",
        "is_over",
        "is_sized",
        "is_training",
        "iterator",
        "lane",
        "optimizer_steps",
        "outer_has_epoch",
        "span",
        "step",
        "stepped",
    )

    def __init__(self, lane: Lane, above: hot.Span) -> None:
        self.lane = lane
        self.iterator: Callable[[], Any] = nothing  # a weak reference, while the pass goes on
        self.above = above  # what was open when it began
        self.span: hot.Span | None = None  # the epoch or evaluation, where it is ours to make
        self.step: hot.Span | None = None
        self.index = 0  # of the next step
        self.fetches = 0
        self.optimizer_steps = 0
        self.counts_steps = False
        self.is_driver = False
        self.is_loop = True  # a `for` asks for the items, not a call of `next`
        self.is_evaluating = False  # the program was, when it began
        self.is_sized = True  # the loader knows its length
        self.is_training = False
        self.outer_has_epoch = False
        self.stepped = False  # an optimizer has, since the step began
        self.is_fresh = False  # the step was opened for the item that is being loaded
        self.is_ahead = False  # fetches an item before the one that it has is used
        self.is_over = False  # exhausted, with items fetched ahead still to be used


class Lane:
    """What one thread is doing."""

    __slots__ = (
        "epochs",
        "free_epoch",
        "free_epoch_is_due",
        "free_steps",
        "has_worked",
        "is_inside",
        "is_loading",
        "model",
        "optimizers",
        "passes",
        "uses_loaders",
    )

    def __init__(self) -> None:
        self.is_inside = False  # a module's forward, or a backward
        self.is_loading = False
        self.has_worked = False  # a model has run, since the last fetch
        self.model: weakref.ref[Any] | None = None  # the last one that did
        self.passes: list[Pass] = []  # innermost last
        # Those that step, by id, with their spans; the one that was called by another is last.
        self.optimizers: list[tuple[int, hot.Span | None]] = []
        self.epochs = 0  # made so far
        self.uses_loaders = False  # to train
        self.free_epoch: hot.Span | None = None  # of a loop that has no loader
        self.free_epoch_is_due = False
        self.free_steps = 0


class ThisThread(_local):
    """Where a thread finds its lane."""

    def __init__(self) -> None:
        self.lane = Lane()


class Compiled:
    """What compiled code tells us. Dynamo takes a write of an attribute into what it compiles."""

    def __init__(self) -> None:
        self.has_stepped = False  # an optimizer whose step is compiled


class TorchHook:
    """Installs and removes the hooks."""

    name = "torch"

    def __init__(self, settings: Settings, on_epoch_end: Callable[[hot.Span], None]) -> None:
        self._steps_per_epoch = settings.steps_per_epoch
        self._on_epoch_end = on_epoch_end
        self._patches = Patches()
        self._handles: list[Any] = []
        self._watch = ImportWatch()
        self._this_thread = ThisThread()
        self._models: dict[weakref.ref[Any], bool] = {}
        self._loaders: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = (
            weakref.WeakKeyDictionary()  # of iterators that their loaders keep for the next epoch
        )
        self._compiling: list[hot.Span] = []
        self._compiled = Compiled()
        self._is_on = False  # somebody may hold our functions after they are taken off

    def install(self) -> None:
        self.uninstall()
        self._is_on = True
        put, module, call = self._patches.set, torch.nn.Module, torch.nn.Module.__call__
        loader, iterator = dataloader.DataLoader, dataloader._BaseDataLoaderIter
        put(module, "__call__", self._make_call(call))
        put(loader, "__iter__", self._make_iter(loader.__iter__))
        put(iterator, "__next__", self._make_next(iterator.__next__))
        put(torch.autograd, "backward", self._make_backward(torch.autograd.backward))
        put(GradScaler, "step", self._make_scaler_step(GradScaler.step))
        self._handles = [
            optimizers.register_optimizer_step_pre_hook(self._before_step),
            optimizers.register_optimizer_step_post_hook(self._after_step),
        ]
        self._stay_out_of_graphs()
        when_imported = self._watch.when_imported
        when_imported("torch._dynamo.callback", self._see_compiles)
        when_imported("torch._dynamo.variables.nn_module", lambda: self._be_transparent(call))

    def uninstall(self) -> None:
        """Takes everything off, and closes what this thread has open."""
        self._is_on = False
        self._watch.undo()
        self._patches.undo()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._ignore_compiles()
        with guard.quiet("torch hooks"):
            lane = self._this_thread.lane
            self._end_optimizers(lane, 0)
            while lane.passes:
                self._end_pass(lane.passes[-1])
            self._end_free_epoch(lane)

    # -- forward ----------------------------------------------------------------------------

    def _make_call(self, original: Any) -> Any:
        this_thread, outermost = self._this_thread, self._outermost
        # torch's own only chooses between two functions. Choosing here, in its place, takes a
        # third off what a call of a submodule costs more.
        code = getattr(original, "__code__", None)
        is_choice = code is not None and code.co_names == ("_compiled_call_impl", "_call_impl")

        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  nn.Module's own
            # First: inside a compiled graph this is all that remains of us.
            if is_dynamo_compiling():
                return original(self, *args, **kwargs)
            if this_thread.lane.is_inside:
                if is_choice and self._compiled_call_impl is None:
                    return self._call_impl(*args, **kwargs)
                return original(self, *args, **kwargs)
            return outermost(original, self, args, kwargs)

        return __call__

    def _outermost(self, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
        lane, span = self._this_thread.lane, None
        try:
            reference = weakref.ref(module)
            is_model = self._models.get(reference)
            if is_model is None:
                is_model = self._is_model(reference, module)
            # A task id: a checkpointed part runs again, in a backward.
            if is_model and self._is_on and current_graph_task_id() == -1 and not is_compiling():
                mode = "train" if module.training else "eval"
                lane.model = reference
                if not lane.has_worked or lane.optimizers:
                    self._begin_work(lane, mode)
                span = hot.begin("forward", None, {"mode": mode})
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

    def _is_model(self, reference: weakref.ref[Any], module: Any) -> bool:
        models = self._models
        if len(models) >= MAX_MODULES:
            for gone in [known for known in list(models) if known() is None]:
                models.pop(gone, None)
        models[reference] = False  # also if it objects to being asked: it is asked once
        models[reference] = answer = is_a_model(module)
        return answer

    def _begin_work(self, lane: Lane, mode: str) -> None:
        """The first forward since a fetch, or one inside of an optimizer's step."""
        lane.has_worked = True
        if lane.optimizers:
            self._end_stale_optimizers(lane)
        if lane.free_epoch_is_due and mode == "train":
            self._begin_free_epoch(lane)

    # -- backward ---------------------------------------------------------------------------

    def _make_backward(self, original: Any) -> Any:
        this_thread, saw_training = self._this_thread, self._saw_training

        def backward(*args: Any, **kwargs: Any) -> Any:
            # A task id: a checkpoint's backward inside another one, on a thread of torch's own.
            if (
                is_dynamo_compiling()
                or (lane := this_thread.lane).is_inside
                or current_graph_task_id() != -1
                or not self._is_on
            ):
                return original(*args, **kwargs)
            span = None
            try:
                if lane.optimizers:
                    self._end_stale_optimizers(lane)
                if not (lane.passes and lane.passes[-1].is_training):
                    saw_training(lane, by_backward=True)
                lane.has_worked = True
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
            lane = self._this_thread.lane
            optimizers, passes = lane.optimizers, lane.passes
            if optimizers:
                self._end_stale_optimizers(lane, inner=1)
            if not (passes and passes[-1].is_training):
                self._saw_training(lane)
            lane.has_worked = True
            if optimizers and optimizers[-1][0] == id(optimizer):
                optimizers.append((id(optimizer), None))  # a subclass calls its parent's step
            else:
                optimizers.append((id(optimizer), hot.begin("optimizer_step")))
        except Exception as error:  # noqa: BLE001  protects the optimizer
            guard.caught("torch optimizer", error)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_dynamo_compiling():
            self._compiled.has_stepped = True  # the compiled code will do that
            return
        try:
            lane = self._this_thread.lane
            span = lane.optimizers.pop()[1] if lane.optimizers else None
            if span is not None:
                hot.close(span)
            if not lane.optimizers:  # else an optimizer inside another one
                self._count_step(lane)
        except Exception as error:  # noqa: BLE001  protects the optimizer
            guard.caught("torch optimizer", error)

    def _count_step(self, lane: Lane) -> None:
        if lane.passes:
            for current in lane.passes:
                current.stepped = True
                current.optimizer_steps += 1
            return
        lane.free_steps += 1
        if lane.free_epoch is not None and (
            lane.free_steps >= self._steps_per_epoch or lane.free_epoch.parent.end
        ):
            self._end_free_epoch(lane)
        # A loop without a loader shows at the second step. An optimizer inside a backward, on a
        # thread of torch's own, is none; nor is a step after a loader's last item.
        if lane.free_epoch is None and not lane.uses_loaders and current_graph_task_id() == -1:
            lane.free_epoch_is_due = True
            lane.has_worked = False  # so that the next forward is noticed

    def _make_scaler_step(self, original: Any) -> Any:
        this_thread = self._this_thread

        def step(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            passes = this_thread.lane.passes
            before = passes[-1].optimizer_steps if passes else 0
            result = original(scaler, *args, **kwargs)
            with guard.quiet("torch scaler"):
                if passes and passes[-1].optimizer_steps == before and self._is_on:
                    for current in passes:  # a step all the same, though it found infinity
                        current.stepped = True
                        if current.step is not None:
                            current.step.set(optimizer_skipped=True)
            return result

        return step

    def _end_stale_optimizers(self, lane: Lane, inner: int = 0) -> None:
        """Closes the scopes of steps that raised: torch calls no hook then.

        Those that run are on the stack; `inner` of them have no scope yet.
        """
        running = -inner
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            running += frame.f_code is STEP_CODE
            frame = frame.f_back
        self._end_optimizers(lane, running)

    def _end_optimizers(self, lane: Lane, running: int) -> None:
        while len(lane.optimizers) > running:
            span = lane.optimizers.pop()[1]
            if span is not None and not span.end:
                span.set(error="the step raised")
                hot.close(span)

    # -- loading ----------------------------------------------------------------------------

    def _make_iter(self, original: Any) -> Any:
        this_thread = self._this_thread

        def __iter__(loader: Any) -> Any:  # noqa: N807  the loader's own
            iterator = original(loader)
            with guard.quiet("torch loader"):
                # Workers that persist: an iterator begins again that may have been left early.
                for old in [old for old in this_thread.lane.passes if old.iterator() is iterator]:
                    self._end_pass(old)
                if loader.persistent_workers:
                    self._loaders[iterator] = weakref.ref(loader)
            return iterator

        return __iter__

    def _make_next(self, original: Any) -> Any:
        this_thread, begin = self._this_thread, self._begin_load

        def __next__(iterator: Any) -> Any:  # noqa: N807  the iterator's own
            lane = this_thread.lane
            if lane.is_loading or not self._is_on:  # a loader inside a dataset
                return original(iterator)
            load = None
            try:
                load = begin(lane, iterator)
            except Exception as error:  # noqa: BLE001  protects the loader
                guard.caught("torch loader", error)
            lane.is_loading = True
            try:
                item = original(iterator)
            except BaseException as error:  # passes on; a StopIteration ends the pass
                lane.is_loading = False
                if load is not None:
                    with guard.quiet("torch loader"):
                        self._fail_load(lane, iterator, load, error)
                raise
            lane.is_loading = False
            if load is not None:
                hot.close(load)
            return item

        return __next__

    def _begin_load(self, lane: Lane, iterator: Any) -> hot.Span:
        if lane.optimizers:
            self._end_stale_optimizers(lane)
        passes = lane.passes
        if passes and passes[-1].iterator() is iterator and not passes[-1].above.end:
            current = passes[-1]
        else:
            current = self._find_pass(lane, iterator)
        current.fetches += 1
        if self._compiled.has_stepped:
            self._compiled.has_stepped = False
            self._saw_training(lane)
            self._count_step(lane)
        if not current.counts_steps:
            self._fetch_for_driver(lane, current)
        elif current.step is None:
            self._next_step(current)
        elif current.is_training:
            current.is_fresh = current.stepped
            if current.stepped:
                self._next_step(current)
        elif current.is_loop or lane.has_worked:
            self._next_step(current)
        else:
            current.is_ahead = True
            current.is_fresh = False
        lane.has_worked = False
        return hot.begin("data_load")

    def _next_step(self, current: Pass) -> None:
        if current.step is not None:
            hot.close(current.step)
        if not current.is_sized:
            self._split_endless(current)
        current.step = hot.begin("step" if current.is_training else "batch", current.index)
        current.index += 1
        current.is_fresh = True
        current.stepped = False

    def _fetch_for_driver(self, lane: Lane, current: Pass) -> None:
        """Another loader is asked, for the step that the driving one has."""
        driver = find_driver(lane)
        if driver is None or driver is current:
            return
        # Asked again before the driver was: the driver's iterator is held, and not used any more.
        if current.fetches > 1 and not driver.is_loop and not current.is_loop:
            take_over(current, driver)
            driver = current
        if driver.counts_steps and driver.is_training and driver.stepped:
            self._next_step(driver)

    def _fail_load(self, lane: Lane, iterator: Any, load: hot.Span, error: BaseException) -> None:
        if not isinstance(error, StopIteration):
            hot.fail(load, error)
            return
        hot.drop(load)
        current = next((one for one in lane.passes if one.iterator() is iterator), None)
        if current is None:
            return
        if current.is_ahead:  # the last items are still to be used
            current.is_over = True
            return
        if current.step is not None and current.is_fresh:
            hot.drop(current.step)
            current.step = None
        if current.span is not None and current.fetches == 1:  # there was nothing to pass over
            hot.drop(current.span)
        self._end_pass(current)

    # -- passes -----------------------------------------------------------------------------

    def _find_pass(self, lane: Lane, iterator: Any) -> Pass:
        """The pass of this iterator; those inside it that were left early end here."""
        passes = lane.passes
        for place, found in enumerate(passes):
            if found.iterator() is iterator:
                while len(passes) > place + 1:
                    self._end_pass(passes[-1])
                if not found.above.end:
                    return found
                self._end_pass(found)
                # The scope that it began in is over. A scope for one fetch is no loop's.
                return self._begin_pass(lane, iterator, may_drive=found.fetches > 1)
        return self._begin_pass(lane, iterator)

    def _begin_pass(self, lane: Lane, iterator: Any, *, may_drive: bool = True) -> Pass:
        for old in list(lane.passes):
            # Left early; or used up; or its spans were ended for us, by a fork.
            if self._is_left(old) or old.is_over or (old.span is not None and old.span.end):
                self._end_pass(old)
        current = Pass(lane, hot.innermost())
        current.iterator = weakref.ref(iterator, lambda _: self._iterator_gone(current))
        is_fetching = hot.is_fetching()
        current.is_loop = is_fetching or is_asked_by_for()
        current.is_evaluating = is_evaluating(lane)
        driver = find_driver(lane)
        if driver is not None and self._is_abandoned(driver, current):
            self._end_pass(driver)
            current.above = hot.innermost()
            driver = None
        if driver is not None:
            if current.is_evaluating and not any(old.is_evaluating for old in lane.passes):
                current.counts_steps = True
                current.span = hot.begin("evaluation")
        elif may_drive:
            lane.free_epoch_is_due = False
            if lane.free_epoch is not None and not current.is_evaluating:
                self._end_free_epoch(lane)
                current.above = hot.innermost()
            current.is_driver = True
            current.is_sized = has_length(iterator)
            names = hot.open_names(but=lane.free_epoch)
            has_step = not STEPS.isdisjoint(names)
            current.outer_has_epoch = "epoch" in names
            current.counts_steps = not has_step and not is_fetching
            if not has_step and (current.counts_steps or not current.outer_has_epoch):
                current.span = hot.begin("evaluation")
        lane.passes.append(current)
        return current

    def _is_left(self, old: Pass) -> bool:
        """Whether nobody goes on with it: its iterator is gone, or only its loader has it."""
        if old.iterator() is None:
            return True
        loader = self._loaders.get(old.iterator(), nothing)()
        if loader is None or loader._iterator is not old.iterator():
            return False
        return sys.getrefcount(old.iterator()) <= 2  # the loader, and this call

    def _is_abandoned(self, driver: Pass, other: Pass) -> bool:
        """Whether an iterator that was stepped by hand is held, and another loop has begun."""
        if driver.is_loop or not other.is_loop:
            return False
        return not (driver.is_training and other.is_evaluating)

    def _end_pass(self, current: Pass) -> None:
        passes = current.lane.passes
        if current in passes:
            passes.remove(current)
        current.iterator = nothing
        if current.step is not None:
            hot.close(current.step)
        span = current.span
        if span is not None and not span.end:
            if current.is_training:
                self._on_epoch_end(span)
            hot.close(span)

    def _iterator_gone(self, current: Pass) -> None:
        """Left early, by `break` or an exception; called wherever the last reference went."""
        with guard.quiet("torch loader"):
            lane = current.lane
            if lane.optimizers and lane is self._this_thread.lane:
                self._end_stale_optimizers(lane)
            self._end_pass(current)

    # -- what a pass turns out to be --------------------------------------------------------

    def _saw_training(self, lane: Lane, *, by_backward: bool = False) -> None:
        """A backward or an optimizer step: the pass that drives is a training epoch."""
        if by_backward and is_in_eval_mode(lane):
            return  # an attack, or a saliency map
        passes = lane.passes
        while passes and passes[-1].counts_steps and not passes[-1].is_driver:
            self._end_pass(passes[-1])  # an evaluation inside the step, left
        if not passes:
            if lane.free_epoch_is_due:
                self._begin_free_epoch(lane)
            return
        lane.uses_loaders = True
        for current in passes:
            if not current.is_training:
                current.is_training = True
                self._name_training(lane, current)

    def _name_training(self, lane: Lane, current: Pass) -> None:
        span, step = current.span, current.step
        if step is not None:
            step.name = "step"
        if span is None:
            return
        if current.outer_has_epoch:  # made by hand: the steps are directly under that one
            if step is not None:
                step.parent = span.parent
            hot.drop(span)
            current.span = None
            return
        if lane.free_epoch is not None:  # it had no loader; this one has
            if span.parent is lane.free_epoch:
                span.parent = current.above = lane.free_epoch.parent
            self._end_free_epoch(lane)
        self._name_epoch(lane, span)

    def _name_epoch(self, lane: Lane, span: hot.Span) -> None:
        span.name = "epoch"
        span.index = lane.epochs
        lane.epochs += 1

    def _split_endless(self, current: Pass) -> None:
        """A loader without an end: an epoch is as many optimizer steps as the settings say."""
        if current.span is None or not current.is_training:
            return
        if current.optimizer_steps >= self._steps_per_epoch:
            self._on_epoch_end(current.span)
            hot.close(current.span)
            current.span = hot.begin("epoch")
            self._name_epoch(current.lane, current.span)
            current.optimizer_steps = current.index = 0

    def _begin_free_epoch(self, lane: Lane) -> None:
        """The same for a loop without a loader."""
        lane.free_epoch_is_due = False
        lane.free_steps = 0
        if "epoch" not in hot.open_names():
            lane.free_epoch = hot.begin("epoch")
            self._name_epoch(lane, lane.free_epoch)

    def _end_free_epoch(self, lane: Lane) -> None:
        span, lane.free_epoch = lane.free_epoch, None
        if span is not None and not span.end:
            self._on_epoch_end(span)
            hot.close(span)

    # -- compiling --------------------------------------------------------------------------

    def _stay_out_of_graphs(self) -> None:
        """Has Dynamo run what is ours as it is, where compiled code comes back to Python."""
        ours: tuple[Any, ...] = (self._begin_load, self._fail_load, self._iterator_gone)
        for function in (*ours, hot.begin, hot.close, hot.fail, hot.drop, torch.autograd.backward):
            run_uncompiled(function, with_callees=True)
        # What a module or a dataset does inside of these is not ours.
        loader, iterator = dataloader.DataLoader, dataloader._BaseDataLoaderIter
        outer: tuple[Any, ...] = (torch.nn.Module.__call__, self._outermost)
        for function in (*outer, loader.__iter__, iterator.__next__):
            run_uncompiled(function, with_callees=False)

    def _be_transparent(self, original: Any) -> None:
        """Has Dynamo go straight to a module's forward, as it does when `__call__` is torch's own.

        It would trace through ours otherwise, with the same result, and compile anew once ours is
        taken off.
        """
        module, name = sys.modules["torch._dynamo.variables.nn_module"], "unpatched_nn_module_call"
        ours = torch.nn.Module.__call__
        if getattr(module, name, None) is ours:  # imported since: it takes ours for torch's own
            setattr(module, name, original)
        if getattr(module, name, None) is original:
            self._patches.set(module, name, ours)

    def _see_compiles(self) -> None:
        handler = sys.modules["torch._dynamo.callback"].callback_handler
        handler.register_start_callback(self._before_compile)
        handler.register_end_callback(self._after_compile)

    def _ignore_compiles(self) -> None:
        module = sys.modules.get("torch._dynamo.callback")
        if module is None:
            return
        handler = module.callback_handler
        if self._before_compile in handler.start_callbacks:
            handler.remove_start_callback(self._before_compile)
        if self._after_compile in handler.end_callbacks:
            handler.remove_end_callback(self._after_compile)

    def _before_compile(self, *_: Any) -> None:
        with guard.quiet("torch compile"):
            self._compiling.append(hot.begin("compile"))

    def _after_compile(self, *_: Any) -> None:
        with guard.quiet("torch compile"):
            if self._compiling:
                hot.close(self._compiling.pop())


def run_uncompiled(function: Any, *, with_callees: bool) -> None:
    try:
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:  # an older torch: what it makes of our functions costs time once
        return
    callees = _FrameAction.SKIP if with_callees else _FrameAction.DEFAULT
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, callees))


def find_driver(lane: Lane) -> Pass | None:
    return next((one for one in lane.passes if one.is_driver), None)


def take_over(current: Pass, driver: Pass) -> None:
    """Hands the epoch and the steps of one pass to another."""
    for name in ("above", "counts_steps", "index", "is_training", "optimizer_steps"):
        setattr(current, name, getattr(driver, name))
    for name in ("outer_has_epoch", "span", "step", "stepped", "is_driver"):
        setattr(current, name, getattr(driver, name))
    driver.span = driver.step = None
    driver.counts_steps = driver.is_driver = False
    driver.lane.passes.remove(driver)
    driver.iterator = nothing


def is_in_eval_mode(lane: Lane) -> bool:
    model = None if lane.model is None else lane.model()
    return model is not None and not model.training


def is_evaluating(lane: Lane) -> bool:
    return not torch.is_grad_enabled() or is_in_eval_mode(lane)


def is_asked_by_for() -> bool:
    """Whether the code that asks for an item is a `for` and not a call, of `next`, say.

    An item that was asked for by hand may be all that is ever wanted of its iterator.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == FOR_ITER


def is_a_model(module: Any) -> bool:
    """Whether a call of it is a forward: it has parameters, and is no loss and no metric."""
    if isinstance(module, _Loss) or type(module).__module__.partition(".")[0] == "torchmetrics":
        return False
    if getattr(module, "_is_replica", False):  # DataParallel's, one a device and call
        return False
    return next(module.parameters(), None) is not None


def has_length(iterator: Any) -> bool:
    try:
        return len(iterator) >= 0
    except TypeError:
        return False
