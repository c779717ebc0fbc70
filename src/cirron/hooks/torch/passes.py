"""The state of training loops: what a thread or task is doing (`Lane`), and each pass over a
DataLoader in it (`Pass`). `loops.py` has the transitions; here are the facts that decide them.

Runs on the user's threads.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import weakref
from _thread import _local, get_ident
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data.dataloader import _DatasetKind

from cirron.hooks.engine import EVALUATIONS, MAX_WAITING, STEPS, Waiting
from cirron.hooks.torch import callers
from cirron.hooks.torch.describe import round_of
from cirron.hooks.torch.free import FreeLoop, scopes
from cirron.record import hot

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

UNDECIDED, USED, JOINED = "undecided", "used", "joined"
EVALUATION, TRAINING = "evaluation", "training"

# A loop that reads ahead has fetched at most this many items when it uses the first.
MAX_AHEAD = 2
# Parts of an item that are tried for one that can have a weak reference.
MAX_TRIED = 8

# Set in the context of an asyncio task, and so in those of the tasks that it starts.
lane_of_context: ContextVar[Lane | None] = ContextVar("cirron_lane", default=None)


def nothing() -> None:
    """Stands for a weak reference to an object that is gone."""


class Load(hot.OwnSpan):
    """A fetch, with its item: one that the program lets go before a model runs was skipped.
    Programs: `grouped_items`, `zipped_groups`.
    """

    __slots__ = ("item",)
    item: Callable[[], Any]  # a weak reference


class Items:
    """What a pass reads: an iterator of a DataLoader, and the code that asks it for items."""

    def __init__(self, iterator: Any, gone: Callable[[Items], None]) -> None:
        """`gone`: called when the program has released the iterator."""
        # A weak reference, until the pass ends.
        self.iterator: Callable[[], Any] = weakref.ref(iterator, lambda _: gone(self))
        self.length = length_of(iterator)  # None: unknown, perhaps endless; -1: unknown, but finite
        self.round_length = round_of(iterator)  # of a sampler that repeats another one forever
        asker = callers.outside(sys._getframe(1))
        self.is_for_loop = callers.is_for(asker)  # else a call of `next`
        self.generator = asker.f_code if callers.is_generator(asker) else None
        user = callers.past_generators(asker)
        self.code = user.f_code  # of the function that uses the items
        self.is_called_for = not callers.is_for(user)
        # Neither a call nor a generator that is called.
        self.is_by_for = self.is_for_loop and not self.is_called_for
        self.references = 0  # to the iterator, when its first item was used
        self.fetched = 0
        self.ahead = 0  # items that are fetched before the one before them is used
        self.has_ended = False  # there are no more items, but the last are not used yet

    @property
    def is_exhausted(self) -> bool:
        """Whether there are no more items, but the last ones are not used yet."""
        return self.has_ended or (self.ahead > 0 and self.is_round_over)

    @property
    def is_round_over(self) -> bool:
        """Whether a sampler that repeats begins again. Program: `loader_repeats`."""
        return self.fetched == self.round_length

    @property
    def has_fetched_all(self) -> bool:
        """Whether the last item was fetched, of this round if a sampler repeats."""
        return self.fetched == self.length or self.is_round_over

    @property
    def may_read_ahead(self) -> bool:
        return self.generator is not None or not self.is_for_loop

    def note_ahead(self, items: int) -> None:
        self.ahead = items if self.may_read_ahead else 0

    def count_references(self) -> None:
        self.references = callers.references_to(self.iterator())


class Pass:
    """One pass over the items of a DataLoader, from the first to the last."""

    def __init__(self, lane: Lane, items: Items) -> None:
        self.lane = lane
        self.items = items
        self.state = UNDECIDED
        self.owner: Pass | None = None  # if JOINED, the pass that it fetches for
        # How it began.
        self.above = hot.innermost()  # the span that was open
        self.began_evaluating = False  # gradients were off, or the model was in eval mode
        self.began_in_step = lane.has_worked  # a model had run in the open step of the main pass
        # Which spans it opens: none that the program or a framework opens itself.
        self.opens_span = False  # the epoch or evaluation
        self.opens_steps = False
        # While it is undecided.
        self.waiting = Waiting()  # fetches, and forwards once USED
        # A model has run on the first item alone, in train mode and with gradients. An error may
        # have kept it from training. Program: `batch_size_finder`.
        self.was_to_train = False
        # Once it is an evaluation or a training.
        self.span: hot.Span | None = None
        self.step: hot.Span | None = None
        self.index = 0  # of the next step
        self.is_step_new = False  # opened for the item that is being fetched
        self.stepped_ns = 0  # when an optimizer did, in the open step
        # The last item was fetched in the middle of the step, and no model had used it when the
        # optimizer stepped: it is for the next step. Program: `fetched_between`.
        self.has_spare = False

    @property
    def is_undecided(self) -> bool:
        return self.state is UNDECIDED or self.state is USED

    @property
    def is_training(self) -> bool:
        return self.state is TRAINING

    @property
    def is_done(self) -> bool:
        """Whether the open step has trained, or its batch was evaluated."""
        return self.stepped_ns > 0 if self.is_training else self.lane.has_worked

    @property
    def is_last_due(self) -> bool:
        """Whether an item is left for one more step."""
        return self.items.fetched > self.index

    @property
    def open_above(self) -> hot.Span:
        """The span that was open when it began, or the nearest one around that which still is."""
        return hot._open_ancestor(self.above)

    @property
    def has_own_steps(self) -> bool:
        """Whether the program has opened a step or batch itself, in the body of the loop."""
        above = self.open_above
        body = itertools.takewhile(lambda one: one is not above, scopes())
        return any(one.name in STEPS for one in body)

    @property
    def is_in_own_step(self) -> bool:
        """Whether the program or a framework has opened a step or batch around it."""
        return self.lane.is_in_scope(STEPS, self.above)

    @property
    def has_outer_epoch(self) -> bool:
        """Whether the program or a framework has opened the epoch that its steps belong to."""
        return self.lane.main in (None, self) and self.lane.is_in_scope(("epoch",), self.above)

    @property
    def can_wait(self) -> bool:
        """Whether nothing but the waiting spans was recorded meanwhile. What the program records,
        such as a mark, belongs to its batch, which has to be open for that.
        """
        recorded = hot.given_out() - self.waiting[0].sequence + 1
        return recorded == len(self.waiting) < MAX_WAITING

    @property
    def has_unused_items(self) -> bool:
        """Whether the loader has no more items, but the last ones are not used yet."""
        items = self.items
        if self.is_undecided:  # with more items, they were taken one after the other, as by `list`
            is_first = self.state is UNDECIDED and 0 < items.fetched <= MAX_AHEAD
            return items.may_read_ahead and is_first
        if self.state is JOINED or not items.may_read_ahead:
            return False
        # Without a second step, it has used all of them together, or has read one ahead. The last
        # items may be fewer than those that it uses together. Program: `fairseq`.
        return 0 < items.ahead < max(2, items.fetched - 1) or not self.lane.has_worked

    def goes_on(self, here: hot.Span | None = None) -> bool:
        """Whether the next item belongs to this pass: the scope that it began in is still open, or
        was a step that another one has followed. `here`: the innermost span, if it is known.
        """
        if self.items.is_round_over:
            return False
        if not self.above.end:
            return True
        here = here or hot.innermost()
        if here.name in STEPS and here.parent is self.above.parent:
            self.above = here
            return True
        return False

    def is_left_for(self, new: Pass) -> bool:
        """Whether the loop over it was left, now that another iterator is asked for an item."""
        items = self.items
        if (
            items.is_exhausted
            or (items.is_round_over and self.lane.has_worked)
            or (self.span is not None and self.span.end)  # a fork has closed it
            # The fit of a framework was stopped inside an epoch.
            or (self.above.end and not self.goes_on())
        ):
            return True
        is_evaluated = self.state is EVALUATION and self.lane.has_worked
        if is_evaluated and new.began_evaluating and items.is_called_for:
            return True  # Program: `validations_by_next`
        is_first = self.state is UNDECIDED and items.is_called_for and self.lane.main is None
        is_elsewhere = new.began_evaluating and items.code is not new.items.code
        if is_first and is_elsewhere and not self.began_evaluating:
            return True  # Program: `generators_read_ahead`; but `mixmatch` goes on
        if items.is_for_loop:
            # After a `break`, a variable or a loader with persistent workers may hold the iterator.
            return callers.references_to(items.iterator()) < items.references
        if self.is_training and new.began_evaluating:
            return self.is_over_for(new, is_evaluating=True)
        return new.items.is_for_loop and self.state is not JOINED

    # -- questions to the main pass about another one ----------------------------------------

    def is_over_for(self, other: Pass, *, is_evaluating: bool) -> bool:
        """Whether a loop with `next`, which may not be called after the last item, was left for
        another one.
        """
        items, generator = self.items, self.items.generator
        if items.is_for_loop:
            return False
        if not is_evaluating:  # on the first item, a teacher may run
            return self.state is EVALUATION and items.fetched > 1
        if items.fetched != items.length or not self.is_done or items.ahead:
            return False
        is_asking = other.items.generator is generator
        return generator is None or callers.has_ended(generator, items.iterator(), is_asking)

    def is_evaluated_by(self, inner: Pass, *, is_evaluating: bool) -> bool:
        """Whether a pass inside this one is an evaluation; else it fetches more for the step.

        An item that is fetched by hand, when no model has run in the step, is for that step.
        """
        if self.began_evaluating or not (inner.items.is_for_loop or inner.began_in_step):
            return False
        return inner.began_evaluating or (is_evaluating and self.is_training)

    def was_only_peeked_at(self, other: Pass) -> bool:
        """Whether the program goes on with another iterator. Of two that are asked by hand, the
        main pass is the one that is asked again.
        """
        by_hand = not (self.items.is_for_loop or other.items.is_for_loop)
        return by_hand and self.is_training and self.items.fetched == 1 and self.is_done


class Lane:
    """What one thread, or one asyncio task, is doing."""

    def __init__(self) -> None:
        self.task: Callable[[], Any] = nothing  # a weak reference to the task that has it
        self.passes: list[Pass] = []  # outermost first
        self.main: Pass | None = None  # the pass that owns the epoch and the steps
        self.loading: Pass | None = None  # it is being asked for an item
        # The open step of a training, if nothing but a fetch can change the state of the loop.
        # While it is the innermost span, the hooks take their fast paths.
        self.step: hot.Span | None = None
        self.has_worked = False  # a model has run, or was trained, since the last fetch
        self.has_run = False  # a model has run since the last fetch
        self.is_inside = False  # a forward or a backward is running
        self.model: Callable[[], Any] | None = None  # the last one that ran
        self.told: bool | None = None  # whether it was called to train, if Keras said so
        self.described: Callable[[], Any] = nothing  # the last one whose settings were recorded
        # The optimizers that are stepping, the innermost last: their ids, with what
        # `hot.begin_phase` returned, or their spans.
        self.optimizers: list[tuple[int, hot.Span | None]] = []
        self.epochs = 0  # so far
        self.optimizer_steps = 0  # so far
        self.steps_before = 0  # of those, before the last epoch
        self.versions: tuple[Any, ...] = ()  # of the weights, when they were last compared
        self.free = FreeLoop(self)

    @property
    def is_idle(self) -> bool:
        task = self.task()
        return not (self.passes or self.free.is_open) and (task is None or task.done())

    @property
    def has_item_left(self) -> bool:
        """Whether the main pass has fetched an item for another step than the open one."""
        main = self.main
        return main is not None and (main.items.is_exhausted or main.has_spare)

    @property
    def inner_evaluations(self) -> list[Pass]:
        """The evaluations that are open inside the main pass, the innermost last."""
        return [one for one in self.passes if one.state is EVALUATION and one is not self.main]

    @property
    def has_used_loop(self) -> bool:
        """Whether a `for` loop is USED."""
        return any(one.state is USED and one.items.is_for_loop for one in self.passes)

    @property
    def is_model_in_eval_mode(self) -> bool:
        model = None if self.model is None else self.model()
        is_told = self.told is not None
        return model is not None and not (self.told if is_told else is_in_train_mode(model))

    def is_in_scope(self, names: Collection[str], above: hot.Span | None = None) -> bool:
        """Whether the program or a framework has opened a scope with one of these names.

        `above`: the innermost scope that counts; None: any that is open. Steps around an evaluation
        do not count.
        """
        free = self.free
        inferred = [free.own_epoch, free.step, free.evaluation]
        inferred += [span for one in self.passes for span in (one.span, one.step)]
        for one in scopes(above):
            if not one.end and one not in inferred:
                if one.name in names:
                    return True
                if one.name in EVALUATIONS and names is STEPS:
                    return False
        return False

    def find(self, iterator: Any) -> Pass | None:
        return next((one for one in self.passes if one.items.iterator() is iterator), None)


class Lanes(list[Lane]):
    """The lanes of a thread. When it ends, so do its loops. Program: `threads_without_loader`."""

    def __init__(self, end: Callable[[list[Lane]], None]) -> None:
        self.end = end
        self.thread = get_ident()

    def __del__(self) -> None:
        if get_ident() == self.thread:
            self.end(self)


class ThisThread(_local):
    """Where a thread finds its lane. An asyncio task has its own, unless it was started in a pass
    over a loader: then it works on that loop. Programs: `asyncio_trainings`, `asyncio_steps`.
    """

    def __init__(self, end: Callable[[list[Lane]], None]) -> None:
        """`end`: closes what is open in these lanes, when their thread ends."""
        self.own = Lane()
        self.lane = self.own  # the last one that was used
        self.lanes = Lanes(end)
        self.lanes.append(self.own)

    def find(self) -> Lane:
        """The lane of the task, or of the thread if it runs none."""
        task = None if asyncio._get_running_loop() is None else asyncio.current_task()
        inherited = None if task is None else lane_of_context.get()
        lane = inherited or self.own
        if task is None:
            lane.task = nothing
        elif lane.task() is not task:
            is_inside = lane.passes and (lane is inherited or lane.task() is None)
            if not is_inside:
                lane = next((one for one in self.lanes if one.is_idle), None) or Lane()
                lane.task = weakref.ref(task)
                lane_of_context.set(lane)
                if lane not in self.lanes:
                    self.lanes.append(lane)
        self.lane = lane
        return lane


def end_stale_optimizers(lane: Lane, inner: int = 0) -> None:
    """Closes the spans of optimizer steps that raised: torch calls no hook for them.

    Steps that run are on the stack; `inner` of them have no span yet.
    """
    running = callers.running_optimizers() - inner
    while len(lane.optimizers) > running:
        phase = lane.optimizers.pop()[1]
        if phase is not None:
            span = hot.open_phase(phase)
            span.set(error="the step raised")
            hot.close(span)


def has_optimizers(kind: type[torch.optim.Optimizer] = torch.optim.Optimizer) -> bool:
    """Whether the program has created an optimizer: torch then marks the `step` of its class."""
    return any(
        getattr(one.step, "hooked", False) or has_optimizers(one) for one in kind.__subclasses__()
    )


def is_in_train_mode(model: Any) -> bool:
    """What a wrapper contains decides: Lightning leaves the wrapper of DDP in eval mode after a
    validation. Program: `lightning_ddp`.
    """
    parts = model._modules
    inner = parts.get("module") if isinstance(parts, dict) else None  # a script's is no dict
    return model.training or getattr(inner, "training", False)


def reference_to(item: Any, depth: int = 3) -> Callable[[], Any]:
    """A weak reference to an item, or to the first part of it that can have one."""
    if not isinstance(item, (dict, list, tuple)):
        return weakref.ref(item) if type(item).__weakrefoffset__ else nothing
    parts = item.values() if isinstance(item, dict) else item
    some = itertools.islice(parts, MAX_TRIED if depth else 0)
    found = (reference_to(part, depth - 1) for part in some)
    return next((one for one in found if one is not nothing), nothing)


def length_of(iterator: Any) -> int | None:
    """How many items there are; -1: unknown, but finite; None: unknown, perhaps endless."""
    if iterator._dataset_kind == _DatasetKind.Iterable:  # then the iterator has no length
        return -1 if hasattr(type(iterator._dataset), "__len__") else None
    try:
        return len(iterator)
    except TypeError:
        return None
