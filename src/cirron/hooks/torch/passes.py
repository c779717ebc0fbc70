"""The state of training loops: what a thread or task is doing (`Lane`), its passes over DataLoaders
(`Pass`), and what a pass reads (`Items`). `loops.py` changes the state; the questions that decide
about that are answered here.

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

from torch.utils.data.dataloader import _DatasetKind

from cirron.hooks.engine import EVALUATIONS, MAX_WAITING, STEPS, Fetch, Waiting
from cirron.hooks.torch import callers
from cirron.hooks.torch.describe import round_of
from cirron.hooks.torch.free import FreeLoop, scopes
from cirron.record import hot

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from cirron.hooks.torch.loops import Loops

# A loop that reads ahead has fetched at most this many items when it uses the first one.
MAX_AHEAD = 2
# How many parts of an item are tried until one can have a weak reference.
MAX_TRIED = 8

# Set in the context of an asyncio task, and so in those of the tasks that it starts.
lane_of_context: ContextVar[Lane | None] = ContextVar("cirron_lane", default=None)


def nothing() -> None:
    """A weak reference to nothing."""


class State:
    """The states of a pass. `loops.py` has the transitions."""

    UNDECIDED = "undecided"  # no model has used the items
    USED = "used"  # a model has, but it may still be trained with them
    JOINED = "joined"  # it fetches data for the steps of another pass
    EVALUATION = "evaluation"
    TRAINING = "training"


class Load(Fetch):
    """A fetch. The program has skipped its item if it is gone when a model runs.
    Programs: `grouped_items`, `zipped_groups`.
    """

    __slots__ = ("item",)
    item: Callable[[], Any]  # a weak reference


class Items:
    """What a pass reads: the iterator of a DataLoader, and the code that asks it for items."""

    def __init__(self, iterator: Any, gone: Callable[[Items], None]) -> None:
        """`gone`: called when the program has released the iterator."""
        # A weak reference, until the pass ends.
        self.iterator: Callable[[], Any] = weakref.ref(iterator, lambda _: gone(self))
        self.length = length_of(iterator)  # None: unknown, perhaps endless; -1: unknown, but finite
        self.round_length = round_of(iterator)  # of a sampler that repeats another one forever
        self.asker = callers.find_asker(sys._getframe(1))
        self.references = 0  # to the iterator, when its first item was used
        self.fetched = 0
        self.ahead = 0  # how many items are fetched before they are used
        self.has_ended = False  # there are no more items, but the last ones are not used yet

    @property
    def is_exhausted(self) -> bool:
        """Whether only items that were read ahead are left."""
        return self.has_ended or (self.ahead > 0 and self.is_round_over)

    @property
    def is_round_over(self) -> bool:
        """Whether a sampler that repeats starts again. Program: `loader_repeats`."""
        return self.fetched == self.round_length

    @property
    def has_fetched_all(self) -> bool:
        return self.fetched == self.length or self.is_round_over

    def note_ahead(self, items: int) -> None:
        self.ahead = items if self.asker.may_read_ahead else 0

    def count_references(self) -> None:
        self.references = callers.references_to(self.iterator())


class Pass:
    """One pass over the items of a DataLoader, from the first to the last."""

    def __init__(self, lane: Lane, items: Items) -> None:
        self.lane = lane
        self.items = items
        self.state = State.UNDECIDED
        self.owner: Pass | None = None  # JOINED: the pass that it fetches for
        # How it began.
        self.above = hot.innermost()  # the span that was open
        self.began_evaluating = False  # gradients were off, or the model was in eval mode
        self.began_in_step = lane.has_worked  # a model had run in the open step of the main pass
        # Which spans it opens. See `choose_spans`.
        self.opens_span = False  # the epoch or evaluation
        self.opens_steps = False
        # While it is UNDECIDED or USED.
        self.waiting = Waiting()  # fetches; in USED, forwards as well
        # A model has run on the first item, in train mode and with gradients: if an error ends the
        # loop now, it was a training. Program: `batch_size_finder`.
        self.was_to_train = False
        # Once it is EVALUATION or TRAINING.
        self.span: hot.Span | None = None  # the epoch or evaluation
        self.step: hot.Span | None = None  # the step or batch
        self.index = 0  # of the next step
        self.used_index = 0  # what `index` was when a fetch last followed work: that step is used
        self.is_step_new = False  # it was opened for the item that is being fetched
        self.stepped_ns = 0  # when an optimizer stepped in the open step
        # The last item was fetched in the middle of the step, and is for the next one.
        # Program: `fetched_between`.
        self.has_spare = False

    @property
    def is_waiting(self) -> bool:
        """Whether its spans wait for the decision."""
        return self.state is State.UNDECIDED or self.state is State.USED

    @property
    def is_training(self) -> bool:
        return self.state is State.TRAINING

    @property
    def is_done(self) -> bool:
        """Whether the open step has trained, or its batch was evaluated."""
        return self.stepped_ns > 0 if self.is_training else self.lane.has_worked

    # -- items that are fetched, but not used yet ----------------------------------------------

    @property
    def has_unused_items(self) -> bool:
        """Whether the last items are still to be used, now that the loader has no more."""
        items = self.items
        if self.state in (State.USED, State.JOINED) or not items.asker.may_read_ahead:
            return False
        if self.state is State.UNDECIDED:  # more items were taken one by one, as by `list`
            return 0 < items.fetched <= MAX_AHEAD
        # If there was no second step, all items were used together, or one was read ahead. The last
        # group of items may be smaller. Program: `fairseq`.
        return 0 < items.ahead < max(2, items.fetched - 1) or not self.lane.has_worked

    def may_train_later(self, is_evaluating: bool, is_in_train: bool | None) -> bool:
        """Whether the model that runs may still be trained with the same items.

        Programs: `open_clip_accumulation`, `validation_in_train_mode`, `probe_in_step`.
        """
        main, is_for = self.lane.main, self.items.asker.is_user_for
        if main is not None:
            is_evaluating = main.is_training and main.is_done and self.began_in_step
        elif not is_for and is_in_train is not None:
            return self.items.fetched == 1
        return bool(is_for and is_in_train and is_evaluating)

    @property
    def can_wait(self) -> bool:
        """Whether nothing else was recorded since the spans wait. A mark, for example, needs an
        open span of its batch.
        """
        recorded = hot.given_out() - self.waiting[0].sequence + 1
        return recorded == len(self.waiting) < MAX_WAITING

    def release_skipped(self) -> None:
        """Records the fetches of items that the program no longer holds where they were made: no
        model has used these. Keeps the last one, or two if it reads ahead: it may have copied them.
        """
        kept = MAX_AHEAD if self.items.asker.may_read_ahead else 1
        while sum(one.name == "data_load" for one in self.waiting) > kept:
            item = getattr(self.waiting[0], "item", nothing)
            if len(self.waiting) < MAX_WAITING and item() is not None:
                break
            self.index += 1
            hot.release(self.waiting.pop(0))

    # -- spans that the program or a framework opens -------------------------------------------

    def choose_spans(self, *, is_loop: bool, is_in_evaluation: bool) -> None:
        """It opens no span that the program or a framework has opened already.

        `is_loop`: False if each fetch is in a scope of its own.
        """
        is_batches = hot.is_fetching()  # by `ci.batches`
        is_evaluation = self.began_evaluating and not (is_in_evaluation or is_batches)
        is_loop = is_loop and not self.is_in_own_step
        may_open = is_loop or (is_evaluation and self.items.asker.is_for)
        self.opens_steps = may_open and not is_batches
        is_whole = self.opens_steps or not self.has_outer_epoch
        self.opens_span = may_open and is_whole and not is_in_evaluation

    @property
    def open_above(self) -> hot.Span:
        """The span that was open when it began, or the nearest one around it that is still open."""
        return hot._open_ancestor(self.above)

    @property
    def is_in_own_step(self) -> bool:
        """Whether the program or a framework has opened a step or batch around the loop."""
        return self.lane.is_in_scope(STEPS, self.above)

    @property
    def has_outer_epoch(self) -> bool:
        """Whether the program or a framework has opened the epoch that the steps belong to."""
        return self.lane.main in (None, self) and self.lane.is_in_scope(("epoch",), self.above)

    # -- where it ends, and what other passes are for ------------------------------------------

    @property
    def step_owner(self) -> Pass | None:
        """The pass whose next step or batch a fetch begins. In an evaluation, only its own loader
        begins batches.
        """
        owner = self.owner or self
        is_its = owner.is_training or self.state is State.EVALUATION
        return owner if owner.opens_steps and is_its else None

    def goes_on(self, here: hot.Span | None = None) -> bool:
        """Whether the next item belongs to this pass: the scope that it began in is still open, or
        is a step and another step has followed. `here`: the innermost span, if it is known.
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
        items, asker = self.items, self.items.asker
        if (
            items.is_exhausted
            or (items.is_round_over and self.lane.has_worked)
            or (self.span is not None and self.span.end)  # a fork has closed it
            or (self.above.end and not self.goes_on())  # a framework has stopped in an epoch
        ):
            return True
        if new.began_evaluating and not asker.is_user_for:
            if self.state is State.EVALUATION and self.lane.has_worked:
                return True  # Program: `validations_by_next`
            is_first = self.state is State.UNDECIDED and self.lane.main is None
            is_elsewhere = asker.user is not new.items.asker.user
            if is_first and is_elsewhere and not self.began_evaluating:
                return True  # Program: `generators_read_ahead`; but `mixmatch` goes on
        if asker.is_for:
            # After a `break`, a variable or a loader with persistent workers may hold the iterator.
            return callers.references_to(items.iterator()) < items.references
        if self.is_training and new.began_evaluating:
            return self.is_over_for(new, is_evaluating=True)
        return new.items.asker.is_for and self.state is not State.JOINED

    def is_over_for(self, other: Pass, is_evaluating: bool) -> bool:
        """Whether a loop that calls `next` was left for another pass. The program may not ask for
        an item after the last one, so nothing else shows that it was the last.
        """
        items, generator = self.items, self.items.asker.generator
        if items.asker.is_for:
            return False
        if not is_evaluating:  # on the first item, a teacher may run
            return self.state is State.EVALUATION and items.fetched > 1
        if items.fetched != items.length or not self.is_done or items.ahead:
            return False
        is_asking = other.items.asker.generator is generator
        generators = self.lane.loops.generators
        return generator is None or generators.has_ended(generator, items.iterator(), is_asking)

    def is_evaluated_by(self, inner: Pass, is_evaluating: bool) -> bool:
        """Whether a pass inside this one is an evaluation. Otherwise it fetches more data for the
        step, as does a call of `next` before a model runs in the step.
        """
        if self.began_evaluating or not (inner.items.asker.is_for or inner.began_in_step):
            return False
        return inner.began_evaluating or (is_evaluating and self.is_training)

    def was_only_peeked_at(self, other: Pass) -> bool:
        """Whether the program goes on with another iterator. Of two that are read with `next`, the
        main pass is the one that is asked again.
        """
        by_next = not (self.items.asker.is_for or other.items.asker.is_for)
        return by_next and self.is_training and self.items.fetched == 1 and self.is_done

    # -- the open step ------------------------------------------------------------------------

    def drop_new_step(self) -> None:
        """Drops the step that was opened for an item that did not come."""
        if self.step is not None and self.is_step_new:
            hot.drop(self.step)
            self.step = self.lane.step = None
            self.stepped_ns = hot.now()  # in the step before it
            self.index -= 1

    def skip_unused_step(self) -> None:
        """Renames the open step if its items were fetched for nothing, for example before a `break`
        at the start of the body. Program: `break_at_the_top`.
        """
        is_used = self.lane.has_worked or self.used_index == self.index or self.stepped_ns
        if self.step is not None and not is_used:
            self.step.name, self.step.index = "skipped", None

    def close_step(self, at: int) -> None:
        if self.step is not None:
            if self.state is State.EVALUATION:  # what an attack minimizes is not a loss
                hot.losses.pop(self.step, None)
            hot.close(self.step, at)


class Lane:
    """What one thread, or one asyncio task, is doing."""

    def __init__(self, loops: Loops) -> None:
        self.loops = loops
        self.task: Callable[[], Any] = nothing  # a weak reference to the task that has it
        self.passes: list[Pass] = []  # outermost first
        self.main: Pass | None = None  # the pass that owns the epoch and the steps
        self.loading: Pass | None = None  # it is being asked for an item
        # The open step of a training if only a fetch can change the state of the loop. While it is
        # the innermost span, the hooks take their fast paths.
        self.step: hot.Span | None = None
        self.has_worked = False  # a model has run, or was trained, since the last fetch
        self.has_run = False  # a model has run since the last fetch
        self.is_inside = False  # a forward or a backward is running
        self.model: Callable[[], Any] | None = None  # the last one that ran
        self.told: bool | None = None  # its argument `training`, if it is one of Keras's
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
        inner = [one for one in self.passes if one is not self.main]
        return [one for one in inner if one.state is State.EVALUATION]

    @property
    def has_used_pass(self) -> bool:
        return any(one.state is State.USED for one in self.passes)

    @property
    def is_model_in_eval_mode(self) -> bool:
        model = None if self.model is None else self.model()
        is_told = self.told is not None
        return model is not None and not (self.told if is_told else is_in_train_mode(model))

    @property
    def inferred(self) -> list[hot.Span | None]:
        """The spans that were opened for its loops."""
        free = self.free
        of_passes = [span for one in self.passes for span in (one.span, one.step)]
        return [free.own_epoch, free.step, free.evaluation, *of_passes]

    def is_in_scope(self, names: Collection[str], above: hot.Span | None = None) -> bool:
        """Whether the program or a framework has opened a scope with one of these names.

        `above`: the innermost scope that counts; None: any that is open. Steps around an evaluation
        do not count.
        """
        inferred = self.inferred
        for one in scopes(above):
            if not one.end and one not in inferred:
                if one.name in names:
                    return True
                if one.name in EVALUATIONS and names is STEPS:
                    return False
        return False

    def end_stale_optimizers(self, inner: int = 0) -> None:
        """Closes the spans of optimizer steps that raised: torch calls no hook for them.

        Steps that run are on the stack; `inner` of them have no span yet.
        """
        running = callers.running_optimizers() - inner
        while len(self.optimizers) > running:
            phase = self.optimizers.pop()[1]
            if phase is not None:
                span = hot.open_phase(phase)
                if not span.has_phases:  # else it has ended: Lightning calls more than the step
                    span.set(error="the step raised")
                    hot.close(span)

    def find(self, iterator: Any) -> Pass | None:
        return next((one for one in self.passes if one.items.iterator() is iterator), None)


class Lanes(list[Lane]):
    """The lanes of a thread. When it ends, so do its loops. Program: `threads_without_loader`."""

    def __init__(self, loops: Loops) -> None:
        super().__init__([Lane(loops)])
        self.loops = loops
        self.thread = get_ident()

    def __del__(self) -> None:
        if get_ident() == self.thread:
            self.loops.end(self)


class ThisThread(_local):
    """Where a thread finds its lane. An asyncio task has its own, unless it was started in a pass
    over a loader: then it works on that loop. Programs: `asyncio_trainings`, `asyncio_steps`.
    """

    def __init__(self, loops: Loops) -> None:
        self.lanes = Lanes(loops)
        self.own = self.lane = self.lanes[0]  # `lane`: the last one that was used

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
                idle = next((one for one in self.lanes if one.is_idle), None)
                if idle is None:
                    idle = Lane(self.lanes.loops)
                    self.lanes.append(idle)
                lane = idle
                lane.task = weakref.ref(task)
                lane_of_context.set(lane)
        self.lane = lane
        return lane


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
