"""What a training loop is, inferred from what it calls: passes over loaders, epochs, steps.

A pass over a DataLoader is a training epoch once a backward or an optimizer step happens in it;
until then, and if none ever does, it is an evaluation. One pass a thread drives: it has the epoch
and the steps. Passes that begin while it goes on are evaluations of their own, where the program
evaluates, or else fetch more for the same step, as zipped loaders do.

Runs on the user's threads; what it knows of a loop it keeps per thread, in a `Lane`.
"""

from __future__ import annotations

import os
import sys
import weakref
from _thread import _local
from dis import get_instructions, opmap
from functools import lru_cache
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR, CO_ITERABLE_COROUTINE
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data.dataloader import _DatasetKind

from cirron import guard
from cirron.record import hot

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

current_graph_task_id = torch._C._current_graph_task_id  # -1 outside of a backward
STEPS = frozenset(("step", "batch"))
# Scopes that say of a pass what it is: then there is none of its own.
EVALUATIONS = frozenset(("evaluation", "prediction"))
FOR_ITER = opmap["FOR_ITER"]
# Functions that stop in the middle, and are then in no stack.
RESUMABLE = CO_GENERATOR | CO_COROUTINE | CO_ITERABLE_COROUTINE | CO_ASYNC_GENERATOR
# Optimizer steps past a loader's last item from which on the loop is taken for one without.
LOOSE_STEPS = 3
# What torch runs every optimizer's step in; all of them share the code.
STEP_CODE = torch.optim.Optimizer.profile_hook_step(len).__code__
HERE = os.path.dirname(__file__) + os.sep


def nothing() -> None:
    """What a weak reference to something that is gone returns."""


class Pass:
    """One iterator of a DataLoader, from its first item to its last."""

    __slots__ = (
        "above",
        "asked_by",
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
        "is_undecided",
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
        self.asked_by: Asker | None = None  # the `for` of it, where it has one that can be found
        self.span: hot.Span | None = None  # the epoch or evaluation, where it is ours to make
        self.step: hot.Span | None = None
        self.index = 0  # of the next step
        self.fetches = 0
        self.optimizer_steps = 0
        self.counts_steps = False
        self.is_driver = False
        self.is_loop = True  # a `for` asks for the items, not a call of `next`
        self.is_evaluating = False  # the program was, when it began
        self.is_undecided = False  # it began inside a training epoch, and no model has run yet
        self.is_sized = True  # the loader knows its length
        self.is_training = False
        self.outer_has_epoch = False
        self.stepped = False  # an optimizer has, since the step began
        self.is_fresh = False  # the step was opened for the item that is being loaded
        self.is_ahead = False  # fetches an item before the one that it has is used
        self.is_over = False  # exhausted, with items fetched ahead still to be used


class Asker(NamedTuple):
    """A `for` of a function: the frame, by its number, and where in the code it is."""

    frame: int
    code: CodeType
    offset: int


class Lane:
    """What one thread is doing."""

    __slots__ = (
        "epochs",
        "free_epoch",
        "free_epoch_is_due",
        "free_steps",
        "has_worked",
        "is_loading",
        "model",
        "optimizers",
        "passes",
        "uses_loaders",
    )

    def __init__(self) -> None:
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
    """Where a thread finds its lane, and what every call of a submodule asks."""

    def __init__(self) -> None:
        self.lane = Lane()
        self.is_inside = False  # a module's forward, or a backward


class Compiled:
    """What compiled code tells us. Dynamo takes a write of an attribute into what it compiles."""

    def __init__(self) -> None:
        self.has_stepped = False  # an optimizer whose step is compiled


class Loops:
    """The loops of all threads."""

    def __init__(self, steps_per_epoch: int, on_epoch_end: Callable[[hot.Span], None]) -> None:
        self.this_thread = ThisThread()
        self.loaders: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = (
            weakref.WeakKeyDictionary()  # of iterators that their loaders keep for the next epoch
        )
        self.compiled = Compiled()
        self._steps_per_epoch = steps_per_epoch
        self._on_epoch_end = on_epoch_end

    def end(self) -> None:
        """Closes what this thread has open."""
        lane = self.this_thread.lane
        end_optimizers(lane, 0)
        while lane.passes:
            self.end_pass(lane.passes[-1])
        self._end_free_epoch(lane)

    # -- items ------------------------------------------------------------------------------

    def begin_load(self, lane: Lane, iterator: Any) -> hot.Span:
        if lane.optimizers:
            end_stale_optimizers(lane)
        passes = lane.passes
        if passes and passes[-1].iterator() is iterator and goes_on(passes[-1]):
            current = passes[-1]
        else:
            current = self._find_pass(lane, iterator)
        current.fetches += 1
        if self.compiled.has_stepped:
            self.compiled.has_stepped = False
            self.saw_training(lane)
            self.count_step(lane)
        if not current.counts_steps:
            if len(passes) > 1:  # else it drives, or a framework does
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
        if driver.is_training and current.is_loop and current.fetches == 1:
            current.is_undecided = not current.is_evaluating
            if current.is_undecided:
                return
        # Asked again before the driver was: the driver's iterator is held, and not used any more.
        if current.fetches > 1 and not driver.is_loop and not current.is_loop:
            take_over(current, driver)
            driver = current
        if driver.counts_steps and driver.is_training and driver.stepped:
            self._next_step(driver)

    def decide(self, lane: Lane, *, is_evaluating: bool) -> None:
        """A model has run, in a loop inside the driving one: that trains as well, or evaluates."""
        current = lane.passes[-1]
        current.is_undecided = False
        if is_evaluating:
            current.is_evaluating = current.counts_steps = True
            current.span = hot.begin("evaluation")
            self._next_step(current)
        else:
            self._fetch_for_driver(lane, current)

    def fail_load(self, lane: Lane, iterator: Any, load: hot.Span, error: BaseException) -> None:
        current = next((one for one in lane.passes if one.iterator() is iterator), None)
        if not isinstance(error, StopIteration):
            hot.fail(load, error)
            # A `for` does not go on; whoever keeps the exception keeps the iterator, too.
            if current is not None and (hot.is_fetching() or is_for(find_asker())):
                self.end_pass(current)
            return
        hot.drop(load)
        if current is None:
            return
        if current.is_ahead:  # the last items are still to be used
            current.is_over = True
            return
        is_empty = current.fetches == 1
        if current.step is not None and current.is_fresh:
            hot.drop(current.step)
            current.step = None
            is_empty = current.index == 1  # it would have been the first of an epoch, too
        if current.span is not None and is_empty:
            if current.is_training:
                lane.epochs -= 1
            hot.drop(current.span)
        self.end_pass(current)

    # -- passes -----------------------------------------------------------------------------

    def _find_pass(self, lane: Lane, iterator: Any) -> Pass:
        """The pass of this iterator; those inside it that were left early end here."""
        passes = lane.passes
        for place, found in enumerate(passes):
            if found.iterator() is iterator:
                while len(passes) > place + 1:
                    self.end_pass(passes[-1])
                if not found.above.end:
                    return found
                self.end_pass(found)
                # The scope that it began in is over. A scope for one fetch is no loop's, but an
                # epoch is one even if it has a single step.
                is_loop = found.fetches > 1 or found.above.name == "epoch"
                return self._begin_pass(lane, iterator, may_drive=is_loop)
        return self._begin_pass(lane, iterator)

    def _begin_pass(self, lane: Lane, iterator: Any, *, may_drive: bool = True) -> Pass:
        for old in list(lane.passes):
            # Left early; or used up; or its spans were ended for us, by a fork; or it was an
            # evaluation, and the scope that said so is over.
            is_ended = old.span is not None and old.span.end
            if self._is_left(old) or old.is_over or is_ended or is_evaluated(old):
                self.end_pass(old)
        current = Pass(lane, hot.innermost())
        current.iterator = weakref.ref(iterator, lambda _: self.iterator_gone(current))
        is_fetching = hot.is_fetching()
        asker = find_asker()
        current.is_loop = is_fetching or is_for(asker)
        if current.is_loop and not asker.f_code.co_flags & RESUMABLE:
            current.asked_by = Asker(id(asker), asker.f_code, asker.f_lasti)
        is_told = is_told_to_evaluate(lane)
        # An item that is asked for by hand may be one more to train with.
        has_grad = torch.is_grad_enabled() and not (current.is_loop and is_in_eval_mode(lane))
        current.is_evaluating = is_told or not has_grad
        driver = find_driver(lane)
        if driver is not None and self._is_abandoned(driver, current):
            self.end_pass(driver)
            current.above = hot.innermost()
            driver = None
        if driver is not None:
            if current.is_evaluating and not any(old.is_evaluating for old in lane.passes):
                # Unless whoever evaluates has opened the batch, too.
                current.counts_steps = not (is_told and hot.innermost().name in STEPS)
                current.span = None if is_told else hot.begin("evaluation")
        elif may_drive:
            lane.free_epoch_is_due = False
            if lane.free_epoch is None:
                lane.free_steps = 0
            if lane.free_epoch is not None and not current.is_evaluating:
                self._end_free_epoch(lane)
                current.above = hot.innermost()
            current.is_driver = True
            current.is_sized = has_length(iterator)
            names = hot.open_names(but=lane.free_epoch)
            has_step = not STEPS.isdisjoint(names)
            current.outer_has_epoch = "epoch" in names
            current.counts_steps = not has_step and not is_fetching
            is_whole = current.counts_steps or not current.outer_has_epoch
            if is_whole and not has_step and not is_told:
                current.span = hot.begin("evaluation")
        lane.passes.append(current)
        return current

    def _is_left(self, old: Pass) -> bool:
        """Whether nobody goes on with it: its iterator is gone, or only its loader has it."""
        if old.iterator() is None:
            return True
        loader = self.loaders.get(old.iterator(), nothing)()
        if loader is None or loader._iterator is not old.iterator():
            return False
        return sys.getrefcount(old.iterator()) <= 2  # the loader, and this call

    def _is_abandoned(self, driver: Pass, other: Pass) -> bool:
        """Whether another loop has begun, and the iterator that drives is held, and not used."""
        if not other.is_loop or (driver.is_training and other.is_evaluating):
            return False
        return not driver.is_loop or has_left(driver.asked_by)

    def end_pass(self, current: Pass) -> None:
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
        elif current.is_driver and current.is_training:
            handmade = hot.find_handmade("epoch")
            if handmade is not None:
                self._on_epoch_end(handmade)

    def iterator_gone(self, current: Pass) -> None:
        """Left early, by `break` or an exception; called wherever the last reference went."""
        with guard.quiet("torch loader"):
            lane = current.lane
            if lane.optimizers and lane is self.this_thread.lane:
                end_stale_optimizers(lane)
            self.end_pass(current)

    # -- what a pass turns out to be --------------------------------------------------------

    def saw_training(self, lane: Lane, *, by_backward: bool = False) -> None:
        """A backward or an optimizer step: the pass that drives is a training epoch."""
        if by_backward and is_in_eval_mode(lane):
            return  # an attack, or a saliency map
        passes = lane.passes
        while passes and passes[-1].counts_steps and not passes[-1].is_driver:
            self.end_pass(passes[-1])  # an evaluation inside the step, left
        if not passes:
            if lane.free_epoch_is_due:
                self.begin_free_epoch(lane)
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
            if current.index > 1:  # it has batches: the program went past these without training
                span.name = "skipped"
                hot.close(span, at=0 if step is None else step.start)
            else:
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

    def begin_free_epoch(self, lane: Lane) -> None:
        """The same for a loop without a loader."""
        lane.free_epoch_is_due = False
        lane.free_steps = 0
        if not hot.open_names() & {"epoch", *STEPS}:
            lane.free_epoch = hot.begin("epoch")
            self._name_epoch(lane, lane.free_epoch)

    def _end_free_epoch(self, lane: Lane) -> None:
        span, lane.free_epoch = lane.free_epoch, None
        if span is not None and not span.end:
            self._on_epoch_end(span)
            hot.close(span)

    def count_step(self, lane: Lane) -> None:
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
        # thread of torch's own, is none; nor is a step after a loader's last item, but many are:
        # of `itertools.cycle(loader)`, which keeps the items.
        is_free = not lane.uses_loaders or lane.free_steps >= LOOSE_STEPS
        if lane.free_epoch is None and is_free and current_graph_task_id() == -1:
            lane.free_epoch_is_due = True
            lane.has_worked = False  # so that the next forward is noticed


def end_stale_optimizers(lane: Lane, inner: int = 0) -> None:
    """Closes the scopes of steps that raised: torch calls no hook then.

    Those that run are on the stack; `inner` of them have no scope yet.
    """
    running = -inner
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        running += frame.f_code is STEP_CODE
        frame = frame.f_back
    end_optimizers(lane, running)


def end_optimizers(lane: Lane, running: int) -> None:
    while len(lane.optimizers) > running:
        span = lane.optimizers.pop()[1]
        if span is not None and not span.end:
            span.set(error="the step raised")
            hot.close(span)


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


def is_told_to_evaluate(lane: Lane) -> bool:
    """Whether somebody else has opened a scope for it: a framework's hook, or the program."""
    own = [one.span for one in lane.passes]
    span = hot.innermost()
    while span.parent is not span:
        if span.name in EVALUATIONS and span not in own and not span.end:
            return True
        span = span.parent
    return False


def goes_on(current: Pass) -> bool:
    """Whether the scope that it began in is open, or is a step that the next one has followed."""
    above = current.above
    if not above.end:
        return True
    here = hot.innermost()
    if above.name in STEPS and here.name in STEPS and here.parent is above.parent:
        current.above = here
        return True
    return False


def is_evaluated(old: Pass) -> bool:
    return old.is_evaluating and bool(old.above.end)


def find_asker() -> FrameType:
    """The code that asks for an item."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(HERE) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def is_for(asker: FrameType) -> bool:
    """Whether it is a `for` and not a call, of `next`, say.

    An item that was asked for by hand may be all that is ever wanted of its iterator.
    """
    return asker.f_lasti >= 0 and asker.f_code.co_code[asker.f_lasti] == FOR_ITER


def has_left(asker: Asker | None) -> bool:
    """Whether that loop is over: its function has returned, or goes on behind it."""
    if asker is None:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if id(frame) == asker.frame and frame.f_code is asker.code:
            return not asker.offset <= frame.f_lasti < end_of_loop(asker.code, asker.offset)
        frame = frame.f_back
    return True


@lru_cache(maxsize=64)
def end_of_loop(code: CodeType, offset: int) -> int:
    """Where the code goes on after the `for` at this place."""
    ends = (one.argval for one in get_instructions(code) if one.offset == offset)
    return int(next(ends, len(code.co_code)))


def has_length(iterator: Any) -> bool:
    if iterator._dataset_kind == _DatasetKind.Iterable:  # of which the iterator knows no length
        return hasattr(type(iterator._dataset), "__len__")
    try:
        return len(iterator) >= 0
    except TypeError:
        return False
