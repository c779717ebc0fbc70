"""The state machine by which training loops are understood. `docs/pytorch.md` has the rule on one
page; `passes.py` has the state, and the questions that transitions ask of it.

Each thread, and each asyncio task that trains, has a lane. In it, each iterator of a DataLoader
that is asked for items is a pass:

    UNDECIDED    no model has used the items. Fetches wait for a parent
    USED         a model has, but it may still be trained with them. Its spans wait as well
    JOINED       another pass, its owner, has the steps, and this one fetches more data for them
    EVALUATION   spans `evaluation` and `batch` are open
    TRAINING     the same spans, now called `epoch` and `step`

    state      | fetch             | forward            | backward, optimizer  | end
    UNDECIDED  | wait              | USED, JOINED or    | JOINED or TRAINING   | waiting spans
               |                   | EVALUATION         |                      | stay where they are
    USED       | wait, or          | EVALUATION, if     | JOINED or TRAINING   | EVALUATION, if it
               | EVALUATION        | gradients are on   |                      | is a `for`
    JOINED     | next step of an   |                    | main pass: TRAINING  |
               | owner that trains |                    |                      |
    EVALUATION | next batch, if a  |                    | main pass: TRAINING; | close the spans
               | model has run     |                    | inner pass: ends     |
    TRAINING   | next step, if an  |                    |                      | take the snapshot,
               | optimizer stepped |                    |                      | close the spans

The first pass of a lane that is decided is the main pass: it owns the epoch and the steps. Spans
are opened only once the state is known. Loops without a loader are in `free.py`.

Runs on the user's threads.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch

from cirron import guard
from cirron.hooks import engine
from cirron.hooks.engine import EVALUATIONS, MAX_WAITING, STEPS
from cirron.hooks.torch import callers, describe
from cirron.hooks.torch.free import scopes, versions_of
from cirron.hooks.torch.passes import (
    EVALUATION,
    JOINED,
    MAX_AHEAD,
    TRAINING,
    UNDECIDED,
    USED,
    Items,
    Lane,
    Load,
    Pass,
    ThisThread,
    end_stale_optimizers,
    has_optimizers,
    nothing,
)
from cirron.record import hot

if TYPE_CHECKING:
    from cirron.hooks import Snapshots

# Spans that frameworks open around a fetch.
LOADS = ("data_load", "data_setup")


class Loops:
    """The loops of all threads."""

    def __init__(self, steps_per_epoch: int, snapshots: Snapshots) -> None:
        self.this_thread = ThisThread(self.end)
        # An optimizer has stepped in compiled code: Dynamo compiles the write, but not our hooks.
        self.has_stepped_compiled = False
        self.descriptions = describe.Descriptions()
        self.setups: weakref.WeakKeyDictionary[Any, hot.Span] = weakref.WeakKeyDictionary()
        self._optimizers_exist = False
        self.steps_per_epoch = steps_per_epoch
        self.on_epoch_end = snapshots.take
        self.keep_gradients = snapshots.keep_gradients

    def end(self, lanes: list[Lane]) -> None:
        """Closes what a thread has open."""
        with guard.quiet("torch hooks"):
            for lane in lanes:
                end_stale_optimizers(lane)
                while lane.passes:
                    self.end_pass(lane.passes[-1])
                lane.free.end(self)

    # -- event: a fetch ---------------------------------------------------------------------

    def begin_step(self, lane: Lane, iterator: Any) -> hot.Span | None:
        """The fast path: begins the next step of a training. None: `begin_load` has to decide."""
        step, main = lane.step, lane.main
        if (
            step is None
            or step is not hot.current()
            or step.phase is not None
            or main is None
            or not main.stepped_ns
            or not main.opens_steps
            or main.items.iterator() is not iterator
            or main.items.length is None  # another epoch may be due
            or self.has_stepped_compiled
        ):
            return None
        lane.loading = main
        main.stepped_ns = 0
        main.is_step_new = True
        main.items.fetched += 1
        index = main.index
        main.index = index + 1
        step = lane.step = main.step = hot.follow(step, index)
        return step

    def begin_load(self, lane: Lane, iterator: Any) -> hot.Span | None:
        """Begins a `data_load`. None: a framework has opened the span of this fetch."""
        if hot.innermost().name in LOADS:
            return None
        if lane.optimizers:
            end_stale_optimizers(lane)
        current = self._find_pass(lane, iterator)
        if self.has_stepped_compiled:
            self.has_stepped_compiled = False
            self.saw_training(lane)
            self.count_step(lane, 0)
        lane.loading = current
        current.items.fetched += 1
        may_train = current.items.is_by_for or current.was_to_train
        if current.state is USED and not (may_train and current.can_wait):
            # A second item: a `for` has evaluated the first one, and a call was not for a peek.
            self._decide(lane, current, is_evaluating=current.items.is_by_for)
        owner = find_stepped(current)
        if current.state is UNDECIDED:
            release_unused(current)
        elif owner is not None:
            self._next_item(lane, owner)
        elif current.is_training and len(lane.passes) == 1:
            span = hot.innermost()  # a framework may run the loop
            lane.step = span if isinstance(span, hot.Step) and span.name in STEPS else None
        return hot.begin("data_load", None, None, Load)

    def _next_item(self, lane: Lane, current: Pass) -> None:
        """Begins the next step, if the open one has trained, or its batch was evaluated."""
        is_done = current.is_done or (current.is_training and self._is_changed_by_hand(lane))
        current.is_step_new = current.step is None or is_done
        if current.is_step_new:
            self._next_step(current)
        elif lane.loading is current and not lane.has_worked:
            # Of the first two items, one is read ahead; of later ones, both are used together.
            current.items.note_ahead(1 if current.items.fetched == 2 else 0)

    def _is_changed_by_hand(self, lane: Lane) -> bool:
        """Whether the program has trained since the last fetch, without an optimizer: it has
        changed the weights, or has no optimizers. Programs: `manual_after_optimizer`, `manual_sgd`.
        """
        before, now = lane.versions, versions_of(lane)
        lane.versions = now
        is_changed = (before[:1] == now[:1] and before != now) or not self._has_optimizers()
        return lane.has_worked and is_changed

    def _has_optimizers(self) -> bool:
        self._optimizers_exist = self._optimizers_exist or has_optimizers()
        return self._optimizers_exist

    def _next_step(self, current: Pass) -> None:
        """The step begins with what other loaders have fetched since the last one was done."""
        before = current.step
        undecided = [one for one in current.lane.passes if one.is_undecided]
        loads = [
            load
            for one in undecided
            for load in one.waiting
            # None: a loader that was used up has dropped the step that it was asked for.
            if load.parent is before or (before is None and load.start >= current.stepped_ns)
        ]
        at = min((load.start for load in loads), default=0)
        close_step(current, at)
        if self._is_full(current):
            self._split_endless(current)
        span = current.span
        if span is not None and span is not hot.current() and span not in scopes():
            hot.enter_context(span)  # an asyncio task has opened it, in its own context
        name = "step" if current.is_training else "batch"
        current.step = hot.begin(name, current.index, None, hot.Step, at)
        for load in loads:
            load.parent = current.step
        current.index += 1
        current.stepped_ns = 0
        current.has_spare = current.was_to_train = False
        if current.lane.step is not None:
            current.lane.step = current.step

    def _split_endless(self, current: Pass) -> None:
        """Begins the next epoch of a loader without a length if it is due."""
        span, lane = current.span, current.lane
        if span is not None and current.is_training:
            span.set(inferred="steps")
            self.on_epoch_end(span)
            engine.close_long(span)
            current.span = engine.begin_long("epoch", None, {"inferred": "steps"})
            self.name_epoch(lane, current.span)
            current.index = 0

    def _is_full(self, current: Pass) -> bool:
        """Whether an epoch of a loader without a length has all its steps."""
        lane = current.lane
        made = lane.optimizer_steps - lane.steps_before
        return current.items.length is None and made >= self.steps_per_epoch

    def end_load(self, lane: Lane, load: hot.Span) -> None:
        current, lane.loading = lane.loading, None
        lane.has_worked = lane.has_run = False
        if current is not None and current.is_undecided:
            current.waiting.add(load)
        else:
            hot.close(load)
        if current is not None and current.items.is_exhausted:
            lane.step = None

    def fail_load(self, lane: Lane, load: hot.Span, error: BaseException) -> None:
        current, lane.loading = lane.loading, None
        if isinstance(error, StopIteration):
            hot.drop(load)
            if current is not None:
                self._exhaust(lane, current)
            return
        hot.fail(load, error)
        # The error ends a `for`, although whoever keeps the exception keeps the iterator as well.
        if current is not None and current.items.is_for_loop:
            self.end_pass(current, error=(load.attrs or {}).get("error"))

    def _exhaust(self, lane: Lane, current: Pass) -> None:
        """The loader has no more items. The pass ends, unless the last ones are still unused."""
        items = current.items
        items.fetched -= 1
        if current.has_unused_items and current.index <= items.fetched:
            if not (items.has_ended or current.is_undecided):  # a step for one of them has begun
                current.index = items.fetched - max(items.ahead - 1, 0)
            items.has_ended = True
            lane.has_worked = False  # with the last item
            lane.step = None
            return
        drop_new_step(find_stepped(current))
        if current.span is not None and current.opens_steps and not current.index:
            lane.epochs -= 1  # it was opened for the item that did not come
            hot.drop(current.span)
        joined = [one for one in lane.passes if one.owner is current and one.items.is_for_loop]
        if items.is_for_loop and joined:
            swap(current, joined[0])  # which is longer. Program: `zipped_cycle`
            current = joined[0]
        self.end_pass(current)

    def end_teardown(self, lane: Lane, iterator: Any, span: hot.Span) -> None:
        """The workers have stopped, which is the last part of their pass."""
        found = lane.find(iterator)
        if found is not None:
            self._open_used(found)
            if lane.loading is None:  # else its last fetch is still running
                close_step(found, span.start)
        above = None if found is None else hot._open_ancestor(found.span or found.above)
        hot.release(span, above)

    # -- passes begin and end ---------------------------------------------------------------

    def _find_pass(self, lane: Lane, iterator: Any) -> Pass:
        """The pass of this iterator. Evaluations inside it were left early, and end here."""
        passes, main, current = lane.passes, lane.main, lane.find(iterator)
        if current is None:
            return self._begin_pass(lane, iterator)
        for inner in passes[passes.index(current) + 1 :]:
            if inner.state is EVALUATION and inner is not main:
                self.end_pass(inner)
        if not current.goes_on():
            self.end_pass(current)
            # A scope around one fetch is not a loop, but an epoch may have a single step.
            is_loop = (
                current.items.fetched > 1
                or current.items.is_round_over
                or current.above.name == "epoch"
            )
            return self._begin_pass(lane, iterator, is_loop=is_loop)
        owner = current.owner
        if owner is not None and owner.was_only_peeked_at(current):
            swap(owner, current)
            return owner
        return current

    def _begin_pass(self, lane: Lane, iterator: Any, *, is_loop: bool = True) -> Pass:
        lane.free.end_evaluation()
        items = Items(iterator, functools.partial(self.iterator_gone, lane))
        current = Pass(lane, items)
        is_told = lane.is_in_scope(EVALUATIONS)
        # After a model in eval mode, an item that is fetched by hand may still be trained with.
        is_eval_loop = items.is_for_loop and lane.is_model_in_eval_mode
        current.began_evaluating = is_told or is_eval_loop or not torch.is_grad_enabled()
        for old in list(lane.passes):
            if old.is_left_for(current):
                self.end_pass(old)
        current.above = hot.innermost()
        # The program or a framework may have opened these spans itself.
        is_batches = hot.is_fetching()  # `ci.batches` asks
        is_evaluation = items.is_for_loop and current.began_evaluating and not is_told
        is_step = current.is_in_own_step or not is_loop
        is_allowed = (is_evaluation and not is_batches) or not is_step
        current.opens_steps = is_allowed and not is_batches
        is_whole = current.opens_steps or not current.has_outer_epoch
        current.opens_span = is_allowed and is_whole and not is_told
        lane.passes.append(current)
        lane.step = None
        if (current.has_outer_epoch or not current.opens_span) and iterator in self.setups:
            hot.release(self.setups.pop(iterator))
        if not current.opens_span:  # the program or a framework says what it is
            self.descriptions.put_loader(iterator, describe.find_described())
            current.state = EVALUATION
            lane.main = lane.main or current
        return current

    def end_pass(self, current: Pass, *, error: str | None = None, at: int = 0) -> None:
        """Ends a pass, now or `at` a time. `error`: the exception that has left its loop."""
        lane = current.lane
        lane.step = None
        self._open_used(current)
        if current.items.is_exhausted and not lane.has_worked:
            drop_new_step(current)  # nothing was read ahead after all
        if lane.main is current:
            if error is not None and current.state is EVALUATION and current.was_to_train:
                self._name_training(lane, current)
            lane.main = None
        lane.passes[:] = [one for one in lane.passes if current not in (one, one.owner)]
        current.items.iterator = nothing
        current.waiting.release()
        ended_ns = current.stepped_ns if current.items.is_exhausted else at
        if ended_ns:
            ended_ns = max(ended_ns, getattr(current.step, "last_ns", 0))
        ended_ns = current.above.end or ended_ns  # the program's scope may have ended before
        span = current.span
        for one in (current.step, span):
            if one is not None and error is not None:
                one.set(error=error)
        close_step(current, ended_ns)
        if span is not None and not span.end:
            if current.is_training:
                self.on_epoch_end(span)
            engine.close_long(span, ended_ns)
        elif current.is_training and not (current.is_in_own_step or current.above.end):
            handmade = hot.find_handmade("epoch")
            if handmade is not None:
                self.on_epoch_end(handmade)

    def end_evaluations(self, lane: Lane) -> None:
        """The program saves: evaluations whose loops may be over are over. A `for` would say so.
        Program: `saved_after_evaluation`.
        """
        lane.free.end_evaluation()
        for one in list(lane.passes):
            may_be_over = one is not lane.main or one.items.has_fetched_all
            goes_on = one.items.is_by_for and not one.items.is_exhausted
            if one.state is EVALUATION and lane.has_worked and may_be_over and not goes_on:
                self.end_pass(one)

    def iterator_gone(self, lane: Lane, items: Items) -> None:
        """Left early, by `break` or an exception; called wherever the last reference is dropped."""
        with guard.quiet("torch loader"):
            current = next((one for one in lane.passes if one.items is items), None)
            if current is None:
                return
            if current.is_undecided and not items.is_for_loop:
                self._hand_over(lane, current)
            elif items.is_exhausted and (current.is_last_due or not current.is_done):
                return  # the last items are still to be used
            if lane.optimizers and lane is self.this_thread.find():
                end_stale_optimizers(lane)
            error = callers.error_that_left(sys._getframe(1)) if items.is_for_loop else None
            self.end_pass(current, error=error)

    def _hand_over(self, lane: Lane, current: Pass) -> None:
        """Gives items that were fetched by hand to the step that they are for: one that another
        loader has begun to fetch for, or one of a loop that has no other loader.
        """
        for other in lane.passes:
            if other.is_undecided and other.items.is_for_loop:
                other.waiting += current.waiting
                current.waiting.clear()
        if lane.main is None and current.items.fetched == 1 and current.state is UNDECIDED:
            lane.free.take(current.waiting)
            current.waiting.clear()

    # -- events: a forward, a backward, an optimizer step -------------------------------------

    def saw_work(self, lane: Lane, *, is_evaluating: bool, is_in_train: bool | None = None) -> None:
        """A model runs, or is trained, for the first time since a fetch.

        `is_in_train`: the mode of the model that runs; None: something is trained.
        """
        main = lane.main
        if main is None:
            pass
        elif main.has_spare and is_in_train and not is_evaluating:
            main.items.note_ahead(1)
            self._next_step(main)
        elif main.items.is_exhausted:
            is_used = main.is_done or not (main.items.ahead or lane.has_worked)
            if main.is_done and main.is_last_due:
                self._next_step(main)
            elif main.is_training and is_evaluating and is_used:
                self.end_pass(main)  # else another model of the last step
        lane.has_worked = True
        undecided = [one for one in lane.passes if one.is_undecided and one.waiting]
        for current in undecided:
            current.was_to_train = not is_evaluating
            if current.state is UNDECIDED:
                release_unused(current)
        if len(undecided) == 1 and is_in_train is not None:
            current, items = undecided[0], undecided[0].items
            if main is not None:  # Programs: `probe_in_step`, `validation_in_train_mode`
                may_train = current.began_in_step and main.is_training and main.is_done
            else:
                may_train = is_evaluating
            is_peek = main is None and not items.is_by_for and items.fetched == 1
            if (may_train and is_in_train and items.is_by_for) or is_peek:
                current.state = USED
                items.count_references()
                return
        for current in undecided:
            self._decide(lane, current, is_evaluating=is_evaluating)

    def saw_training(
        self, lane: Lane, *, by_backward: bool = False, optimizer: int | None = None
    ) -> None:
        """A backward or an optimizer step: the main pass is a training."""
        if by_backward and lane.is_model_in_eval_mode:
            return  # an attack, or a saliency map
        self.saw_work(lane, is_evaluating=False)
        main = lane.main
        for inner in lane.inner_evaluations:
            self.end_pass(inner)  # it was left early
        if main is None:
            self._train_freely(lane, by_backward, optimizer)
            return
        if not main.is_training:
            self._name_training(lane, main)
        lane.step = None if main.items.is_exhausted or len(lane.passes) > 1 else main.step

    def _train_freely(self, lane: Lane, by_backward: bool, optimizer: int | None) -> None:
        """Training without a loader."""
        free = lane.free
        free.saw_training(self, optimizer)
        # Else the steps are a framework's: Keras's optimizers, for one, are not torch's.
        is_by_hand = by_backward and free.is_open and not self._has_optimizers()
        free.versions = versions_of(lane) if is_by_hand else None
        is_known = not (free.held_under or is_by_hand or lane.passes)
        lane.step = free.step if is_known else None

    def close(self, span: hot.Span) -> None:
        """Closes a span of a hook. If it is not known yet what it belongs to, it waits."""
        lane = self.this_thread.lane
        is_known = lane.main is not None or lane.step is span.parent
        for current in lane.passes:
            if is_known and current.state is not USED:
                continue
            if span.parent is current.above and 0 < len(current.waiting) < MAX_WAITING:
                current.waiting.add(span)
                return
        (hot.close if is_known else lane.free.close)(span)

    def fail(self, span: hot.Span, error: BaseException) -> None:
        """Closes it in an exception."""
        hot.fail(span, error, self.close)

    def count_step(self, lane: Lane, optimizer: int) -> None:
        """An optimizer has stepped: `optimizer` is its id, 0 if unknown."""
        main = lane.main
        lane.optimizer_steps += 1
        if main is None:
            lane.free.count_step(self, optimizer)
            return
        self._end_work(main)
        lane.versions = ()
        self.keep_gradients(is_last=main.items.has_fetched_all or self._is_full(main))

    def skip_step(self, lane: Lane, optimizer: int) -> None:
        """The scaler has found infinity: this ends a step, too."""
        step = lane.free.step if lane.main is None else lane.main.step
        if step is not None:
            step.set(optimizer_skipped=True)
        self.count_step(lane, optimizer)

    def _end_work(self, main: Pass) -> None:
        """An optimizer has stepped, or the scaler has skipped that."""
        main.stepped_ns = hot.now()
        main.has_spare = main.opens_steps and not (main.is_step_new or main.lane.has_run)
        if main.has_spare:
            main.lane.step = None

    # -- transitions ------------------------------------------------------------------------

    def _decide(self, lane: Lane, current: Pass, *, is_evaluating: bool) -> None:
        """From UNDECIDED or USED to JOINED or EVALUATION, which a training goes through, too."""
        if current.state is USED and is_evaluating:
            self._open(current, is_each_a_batch=True)
            return
        current.items.count_references()
        if current.is_in_own_step and not is_evaluating:
            current.opens_span = current.opens_steps = False
        main, inner = lane.main, lane.inner_evaluations
        if main is not None and main.is_over_for(current, is_evaluating=is_evaluating):
            self.end_pass(main, at=current.waiting[0].start)
            main = None
            current.above = current.open_above
            for load in current.waiting:
                load.parent = current.above
        if main is not None:
            if inner and is_evaluating and not current.began_in_step:
                self._join(inner[-1], current)
                return
            if not main.is_evaluated_by(current, is_evaluating=is_evaluating):
                self._join(main, current)
                return
            if main.step is not None and main.step not in scopes(current.above):
                current.above = main.step  # opened just now, for an item that was fetched before
        self._open(current)

    def _open_used(self, current: Pass) -> None:
        """A `for` has ended, and nothing was trained with its items: they were evaluated."""
        if current.state is USED and current.items.is_for_loop:
            self._open(current, is_each_a_batch=True)

    def _join(self, owner: Pass, current: Pass) -> None:
        if owner.is_training and owner.is_done and owner.opens_steps:
            self._next_step(owner)
        current.state = JOINED
        current.owner = owner
        current.waiting.release(owner.step)

    def _open(self, current: Pass, *, is_each_a_batch: bool = False) -> None:
        """Opens the spans of a pass, from its first fetch on. `is_each_a_batch`: the items that
        wait are those of batches, and not of one step.
        """
        lane, items, waiting = current.lane, current.items, current.waiting
        if lane.main is None:
            lane.main = current
            lane.free.forget()
        current.state = EVALUATION
        if current.has_own_steps:
            current.opens_steps = False
            current.opens_span = current.opens_span and not current.has_outer_epoch
        above = current.open_above
        if current.opens_span:
            iterator = items.iterator()
            setup = self.setups.pop(iterator) if iterator in self.setups else None
            start, attrs = (setup or waiting[0]).start, self.descriptions.of_loader(iterator)
            above = hot.insert(above, "evaluation", None, attrs, engine.Long, start=start)
            current.span = engine.begin_measuring(above)
            if setup is not None:
                hot.release(setup, above)
        fetches = [place for place, one in enumerate(waiting) if one.name == "data_load"]
        starts = [0, *fetches[1:]] if is_each_a_batch else [0]
        items.note_ahead(len(fetches) - len(starts))
        if current.opens_steps:
            for place, following in itertools.pairwise(starts):
                batch, end = waiting[place:following], waiting[following].start
                engine.insert_past(above, "batch", current.index, batch, end)
                current.index += 1
            start = waiting[starts[-1]].start
            above = hot.insert(above, "batch", current.index, None, hot.Step, start=start)
            current.step = above
            current.index += 1
        waiting.release(current.step or current.span)

    def _name_training(self, lane: Lane, current: Pass) -> None:
        """From EVALUATION to TRAINING."""
        current.state = TRAINING
        lane.versions = versions_of(lane)
        current.began_evaluating = False  # the model was left in eval mode
        span, step = current.span, current.step
        if step is not None:
            step.name = "step"
        if span is None:
            return
        if lane.free.epoch is not None:  # that loop had no loader; this one has
            span.parent = current.above = lane.free.above_epoch or current.above
            lane.free.end(self)
        if step is None or not current.has_outer_epoch:
            self.name_epoch(lane, span)
            return
        step.parent = span.parent  # the steps belong directly into the outer epoch
        if span.start < step.start:  # the batches before were evaluated
            engine.close_long(span, step.start)
        else:
            hot.drop(span)
        current.span = None

    def name_epoch(self, lane: Lane, span: hot.Span) -> None:
        span.name = "epoch"
        span.index = lane.epochs
        lane.epochs += 1
        lane.steps_before = lane.optimizer_steps


def release_unused(current: Pass) -> None:
    """Leaves fetches where they were made if the program has let go of their items: it has used
    these without a model. Of the last one, or two if it reads ahead, it may have made copies.
    """
    waiting = current.waiting
    kept = MAX_AHEAD if current.items.may_read_ahead else 1
    while sum(one.name == "data_load" for one in waiting) > kept:
        item = getattr(waiting[0], "item", nothing)
        if len(waiting) < MAX_WAITING and item() is not None:
            break
        current.index += 1
        hot.release(waiting.pop(0))


def find_stepped(current: Pass) -> Pass | None:
    """The pass whose next step a fetch begins. An evaluation has as many batches as its own loader,
    whatever else is fetched in it.
    """
    owner = current.owner or current
    is_its = owner.is_training or current.state is EVALUATION
    return owner if owner.opens_steps and is_its else None


def drop_new_step(current: Pass | None) -> None:
    """Drops the step that was opened for an item that did not come."""
    if current is not None and current.step is not None and current.is_step_new:
        hot.drop(current.step)
        current.step = current.lane.step = None
        current.stepped_ns = hot.now()  # in the step before it
        current.index -= 1


def swap(main: Pass, other: Pass) -> None:
    """Lets the main pass go on with the items of another one."""
    main.items, other.items = other.items, main.items
    main.items.count_references()


def close_step(current: Pass, at: int) -> None:
    if current.step is not None:
        if current.state is EVALUATION:  # what an attack or a saliency map minimises is no loss
            hot.losses.pop(current.step, None)
        hot.close(current.step, at)
