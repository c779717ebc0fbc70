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
from cirron.hooks.engine import MAX_WAITING, STEPS
from cirron.hooks.torch import callers, describe
from cirron.hooks.torch.free import is_under, versions_of
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
    count_fetches,
    end_optimizers,
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
        self.this_thread = ThisThread()
        # An optimizer has stepped in compiled code: Dynamo compiles the write, but not our hooks.
        self.has_stepped_compiled = False
        self.descriptions = describe.Descriptions()
        self.setups: weakref.WeakKeyDictionary[Any, hot.Span] = weakref.WeakKeyDictionary()
        self._optimizers_exist = False
        self.steps_per_epoch = steps_per_epoch
        self.on_epoch_end = snapshots.take
        self.keep_gradients = snapshots.keep_gradients

    def end(self) -> None:
        """Closes what this thread has open."""
        for lane in self.this_thread.lanes:
            end_optimizers(lane, 0)
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
            or main.above.end
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
        if current.state is USED and not (current.items.is_for_loop and current.can_wait):
            # A second item: a `for` has evaluated the first one, and a call was not for a peek.
            self._decide(lane, current, is_evaluating=current.items.is_for_loop)
        owner = find_stepped(current)
        if current.state is UNDECIDED:
            release_unused(current, is_fetching=True)
        elif owner is not None:
            self._next_item(lane, owner)
        elif current.is_training and len(lane.passes) == 1:
            lane.step = find_open_step()
        return hot.begin("data_load", None, None, Load)

    def _next_item(self, lane: Lane, current: Pass) -> None:
        """Begins the next step, if the open one has trained, or its batch was evaluated."""
        is_done = current.is_done
        if current.is_training and not is_done:
            is_done = self._is_changed_by_hand(lane, current)
        current.is_step_new = current.step is None or is_done
        if current.is_step_new:
            self._next_step(current)
        elif current.items.fetched == MAX_AHEAD and not lane.has_worked:
            current.items.reads_ahead = current.items.may_read_ahead

    def _is_changed_by_hand(self, lane: Lane, current: Pass) -> bool:
        """Whether the program has trained since the last fetch, without an optimizer: it has
        changed the weights, or has no optimizers. Programs: `manual_after_optimizer`, `manual_sgd`.
        """
        before, now = current.versions, versions_of(lane)
        current.versions = now
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
        if current.items.length is None:
            self._split_endless(current)
        if current.span is not None and not is_under(hot.innermost(), current.span):
            hot.enter_context(current.span)  # an asyncio task has opened it, in its own context
        name = "step" if current.is_training else "batch"
        current.step = hot.begin(name, current.index, None, hot.Step, at)
        for load in loads:
            load.parent = current.step
        current.index += 1
        current.stepped_ns = 0
        if current.lane.step is not None:
            current.lane.step = current.step

    def _split_endless(self, current: Pass) -> None:
        """Without a length, an epoch is as many optimizer steps as the settings say."""
        span, attrs = current.span, {"inferred": "steps"}
        is_due = current.is_training and current.optimizer_steps >= self.steps_per_epoch
        if span is not None and is_due:
            self.on_epoch_end(span)
            span.set(**attrs)
            engine.close_long(span)
            current.span = engine.begin_long("epoch", None, attrs)
            self.name_epoch(current.lane, current.span)
            current.optimizer_steps = current.index = 0

    def end_load(self, lane: Lane, load: hot.Span) -> None:
        current, lane.loading = lane.loading, None
        lane.has_worked = False
        if current is not None and current.is_undecided and current.opens_anything:
            current.waiting.add(load)
        else:
            hot.close(load)
        if current is not None and current.items.is_exhausted:
            lane.step = None

    def fail_load(self, lane: Lane, load: hot.Span, error: BaseException) -> None:
        current, lane.loading = lane.loading, None
        teardown, lane.teardown = lane.teardown, None
        if isinstance(error, StopIteration):
            hot.drop(load)
            if current is not None:
                self._exhaust(lane, current, teardown)
            return
        hot.fail(load, error)
        if teardown is not None:
            hot.release(teardown)
        # The error ends a `for`, although whoever keeps the exception keeps the iterator as well.
        if current is not None and (hot.is_fetching() or callers.is_for(callers.find_asker())):
            self.end_pass(current, error=(load.attrs or {}).get("error"))

    def _exhaust(self, lane: Lane, current: Pass, teardown: hot.Span | None) -> None:
        """The loader has no more items. The pass ends, unless the last ones are still unused."""
        span = current.span or current.above
        current.items.fetched -= 1
        if current.has_unused_items:
            current.items.has_ended = True
            current.has_last_step = not current.is_undecided
            lane.has_worked = False  # with the last item
            lane.step = None
        else:
            drop_new_step(find_stepped(current))
            is_empty = current.opens_steps and not current.index
            if current.span is not None and is_empty and current.is_training:
                lane.epochs -= 1  # it was opened for the item that did not come
                hot.drop(current.span)
        if teardown is not None:
            hot.release(teardown, span if not span.end else None)
        if current.items.is_exhausted:
            return
        joined = [one for one in lane.passes if one.owner is current]
        other = next((one for one in joined if one.items.is_for_loop), None)
        if current.items.is_for_loop and other is not None:
            swap(current, other)  # which is longer. Program: `zipped_cycle`
            current = other
        self.end_pass(current)

    def end_teardown(self, lane: Lane, iterator: Any, span: hot.Span) -> None:
        """The workers have stopped, which is the last part of their pass."""
        if lane.loading is not None:  # the fetch will end with StopIteration
            lane.teardown = span
            return
        found = next((one for one in lane.passes if one.items.iterator() is iterator), None)
        if found is not None:
            close_step(found, span.start)
        parent = None if found is None else found.span
        hot.release(span, None if parent is None or parent.end else parent)

    # -- passes begin and end ---------------------------------------------------------------

    def _find_pass(self, lane: Lane, iterator: Any) -> Pass:
        """The pass of this iterator. Evaluations inside it were left early, and end here."""
        passes, main = lane.passes, lane.main
        current = next((one for one in passes if one.items.iterator() is iterator), None)
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
        current = Pass(lane, Items(iterator, functools.partial(self.iterator_gone, lane)))
        is_told = lane.is_told_to_evaluate
        # After a model in eval mode, an item that is fetched by hand may still be trained with.
        is_eval_loop = current.items.is_for_loop and lane.is_model_in_eval_mode
        current.began_evaluating = is_told or is_eval_loop or not torch.is_grad_enabled()
        for old in list(lane.passes):
            if old.is_left_for(current):
                self.end_pass(old)
        current.above = hot.innermost()
        current.began_in_step = lane.has_worked
        self._choose_spans(current, is_told, is_loop)
        setup = self.setups.pop(iterator, None)
        if setup is not None and current.opens_span:
            current.setup = setup
        elif setup is not None:
            hot.release(setup)
        if not current.opens_span:
            self.descriptions.put_loader(iterator, describe.find_described())
        lane.passes.append(current)
        lane.step = None
        # The program or a framework says what it is, or at least what its steps are.
        is_main_told = lane.main is None and not current.opens_anything
        if is_main_told or (is_told and current.opens_steps):
            current.state = EVALUATION
            lane.main = lane.main or current
        return current

    def _choose_spans(self, current: Pass, is_told: bool, is_loop: bool) -> None:
        """Leaves out the spans that the program or a framework has opened itself."""
        lane = current.lane
        main, free = lane.main, lane.free
        names = hot.open_names(but=free.own_epoch)
        current.has_outer_epoch = "epoch" in names and not (main is not None and main.is_training)
        if main is not None:
            current.opens_steps = not (is_told and hot.innermost().name in STEPS)
            current.opens_span = not is_told
        else:
            if free.step is not None:  # the steps of a loop without a loader may hold this one
                names -= {free.step.name}
            current.is_in_own_step = not (is_loop and STEPS.isdisjoint(names))
            is_batches = hot.is_fetching()  # `ci.batches` asks
            may_evaluate = current.items.is_for_loop and current.began_evaluating
            is_evaluation = may_evaluate and not (is_told or is_batches)
            is_allowed = is_evaluation or not current.is_in_own_step
            current.opens_steps = is_allowed and not is_batches
            is_whole = current.opens_steps or not current.has_outer_epoch
            current.opens_span = is_allowed and is_whole and not is_told

    def end_pass(self, current: Pass, *, error: str | None = None, at: int = 0) -> None:
        """Ends a pass, now or `at` a time. `error`: the exception that has left its loop."""
        lane = current.lane
        lane.step = None
        if current.state is USED and current.items.is_for_loop:
            self._evaluate(lane, current)
        if current.items.is_exhausted and not lane.has_worked:
            drop_new_step(current)  # nothing was read ahead after all
        if lane.main is current:
            lane.main = None
        lane.passes[:] = [one for one in lane.passes if current not in (one, one.owner)]
        current.items.iterator = nothing
        if current.setup is not None:
            hot.release(current.setup)
        current.waiting.release()
        ended_ns = current.stepped_ns if current.items.is_exhausted else at
        if ended_ns:
            ended_ns = max(ended_ns, getattr(current.step, "last_ns", 0))
        span = current.span
        for one in (current.step, span):
            if one is not None and error is not None:
                one.set(error=error)
        close_step(current, ended_ns)
        if span is not None and not span.end:
            if current.is_training:
                self.on_epoch_end(span)
            engine.close_long(span, ended_ns)
        elif current.is_training and not current.is_in_own_step:
            handmade = hot.find_handmade("epoch")
            if handmade is not None:
                self.on_epoch_end(handmade)

    def iterator_gone(self, lane: Lane, items: Items) -> None:
        """Left early, by `break` or an exception; called wherever the last reference is dropped."""
        with guard.quiet("torch loader"):
            current = next((one for one in lane.passes if one.items is items), None)
            if current is None:
                return
            has_more = current.items.is_exhausted and (current.is_last_due or not current.is_done)
            by_hand = current.is_undecided and not current.items.is_for_loop
            if has_more and not by_hand:
                return
            if by_hand:
                self._hand_over(lane, current)
            if lane.optimizers and lane is self.this_thread.find():
                end_stale_optimizers(lane)
            self.end_pass(
                current,
                error=callers.error_that_left(sys._getframe(1))
                if current.items.is_for_loop
                else None,
            )

    def _hand_over(self, lane: Lane, current: Pass) -> None:
        """Gives items that were fetched by hand to the step that they are for: one that another
        loader has begun to fetch for, or one of a loop that has no other loader.
        """
        for other in lane.passes:
            if other.is_undecided and other.items.is_for_loop and other.waiting:
                other.waiting += current.waiting
                current.waiting.clear()
        if lane.main is None and current.items.fetched == 1 and current.state is UNDECIDED:
            lane.free.take(current.waiting)
            current.waiting.clear()

    # -- events: a forward, a backward, an optimizer step -------------------------------------

    def saw_work(
        self, lane: Lane, *, is_evaluating: bool, is_forward: bool = False, is_in_train: bool = True
    ) -> None:
        """A model runs, or is trained, for the first time since a fetch."""
        main = lane.main
        if main is not None and main.items.is_exhausted and main.is_done:
            if main.is_last_due and is_evaluating is not main.is_training:
                main.has_last_step = True
                self._next_step(main)
            elif main.is_training and (is_evaluating or main.items.iterator() is None):
                self.end_pass(main)  # else another model of the last step
        lane.has_worked = True
        undecided = [one for one in lane.passes if one.is_undecided and one.waiting]
        for current in undecided:
            current.first_model_evaluated = is_evaluating
            if current.state is UNDECIDED:
                release_unused(current)
        if len(undecided) == 1 and (is_evaluating or is_forward):
            current = undecided[0]
            if main is None:
                may_train = current.items.is_for_loop and is_evaluating
            else:
                may_train = main.may_train_more_in(current)
            if (may_train and is_in_train) or (current.items.may_be_peek and main is None):
                current.state = USED
                current.items.count_references()
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
        free.is_by_hand = by_backward and free.is_open and not self._has_optimizers()
        free.versions = versions_of(lane) if free.is_by_hand else ()
        is_known = not (free.is_holding or free.is_by_hand or lane.passes)
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
        if main is None:
            lane.free.count_step(self, optimizer)
            return
        main.stepped_ns = hot.now()
        main.versions = ()
        main.optimizer_steps += 1
        if main.items.fetched == main.items.length:  # the loop may clear them before the epoch ends
            self.keep_gradients()

    def skip_step(self, lane: Lane, optimizer: int) -> None:
        """The scaler has found infinity: this ends a step, too."""
        main = lane.main
        step = lane.free.step if main is None else main.step
        if step is not None:
            step.set(optimizer_skipped=True)
        if main is None:
            lane.free.count_step(self, optimizer)
        else:
            main.stepped_ns = hot.now()

    # -- transitions ------------------------------------------------------------------------

    def _decide(self, lane: Lane, current: Pass, *, is_evaluating: bool) -> None:
        """From UNDECIDED or USED to JOINED or EVALUATION, which a training goes through, too."""
        if current.state is USED and is_evaluating:
            self._evaluate(lane, current)
            return
        current.items.count_references()
        if current.is_in_own_step and not is_evaluating:
            current.opens_span = current.opens_steps = False
        main, inner = lane.main, lane.inner_evaluations[-1:]
        if main is not None and (
            main.is_over_for(current) if is_evaluating else main.is_finished_evaluation
        ):
            self.end_pass(main, at=current.waiting[0].start)
            main = None
            current.above = current.open_above
            for load in current.waiting:
                load.parent = current.above
        if main is None:
            self._make_main(lane, current)
        elif inner and is_evaluating and not current.began_in_step:
            self._join(inner[0], current)
            return
        elif not main.is_evaluated_by(current, is_evaluating=is_evaluating):
            self._join(main, current)
            return
        elif main.step is not None and not is_under(current.above, main.step):
            current.above = main.step  # opened just now, for an item that was fetched before
        self._open(current, [current.waiting])

    def _evaluate(self, lane: Lane, current: Pass) -> None:
        """From USED to EVALUATION: nothing was trained, so each item was a batch."""
        if lane.main is None:
            self._make_main(lane, current)
        batches: list[list[hot.Span]] = []
        for span in current.waiting:
            if span.name == "data_load" or not batches:
                batches.append([])
            batches[-1].append(span)
        self._open(current, batches)

    def _make_main(self, lane: Lane, current: Pass) -> None:
        lane.main = current
        lane.free.forget()

    def _join(self, owner: Pass, current: Pass) -> None:
        if owner.is_training and owner.is_done and owner.opens_steps:
            self._next_step(owner)
        current.state = JOINED
        current.owner = owner
        current.waiting.release(owner.step)

    def _open(self, current: Pass, batches: list[list[hot.Span]]) -> None:
        """Opens the spans of a pass, from its first fetch on, with what waits of each batch."""
        current.state = EVALUATION
        current.first_index = current.index
        current.items.reads_ahead = (
            current.items.may_read_ahead and count_fetches(batches[-1]) == MAX_AHEAD
        )
        if current.has_own_steps:
            current.opens_steps = False
            current.opens_span = current.opens_span and not current.has_outer_epoch
        above, start = current.open_above, current.waiting[0].start
        if current.opens_span:
            self._open_evaluation(current, above, start)
        parent = current.span
        if current.opens_steps:
            above = parent or above
            for batch, following in itertools.pairwise(batches):
                engine.insert_past(above, "batch", current.index, batch, following[0].start)
                current.index += 1
            start = batches[-1][0].start
            parent = hot.insert(above, "batch", current.index, None, hot.Step, start=start)
            current.step = parent
            current.index += 1
        current.waiting.release(parent)

    def _open_evaluation(self, current: Pass, above: hot.Span, start: int) -> None:
        setup, current.setup = current.setup, None
        start = start if setup is None else setup.start
        attrs = self.descriptions.of_loader(current.items.iterator())
        current.span = hot.insert(above, "evaluation", None, attrs, engine.Long, start=start)
        engine.begin_measuring(current.span)
        if setup is not None:
            hot.release(setup, current.span)

    def _name_training(self, lane: Lane, current: Pass) -> None:
        """From EVALUATION to TRAINING."""
        current.state = TRAINING
        current.versions = versions_of(lane)
        current.began_evaluating = False  # the model was left in eval mode
        span, step = current.span, current.step
        if step is not None:
            step.name = "step"
        if span is None:
            return
        if lane.free.epoch is not None:  # that loop had no loader; this one has
            span.parent = current.above = lane.free.above_epoch or current.above
            lane.free.end(self)
        if current.has_outer_epoch:  # the steps belong directly into that
            if step is not None:
                step.parent = span.parent
            if current.index > current.first_index + 1:  # the batches before were evaluated
                engine.close_long(span, 0 if step is None else step.start)
            else:
                hot.drop(span)
            current.span = None
            return
        self.name_epoch(lane, span)

    def name_epoch(self, lane: Lane, span: hot.Span) -> None:
        span.name = "epoch"
        span.index = lane.epochs
        lane.epochs += 1

    def describe_model(self, lane: Lane, model: Any) -> None:
        """Puts the settings of a model on the first epoch and the first evaluation of it."""
        span = lane.free.own_epoch if lane.main is None else lane.main.span
        self.descriptions.put_model(
            model,
            span or describe.find_described(),
            is_training=torch.is_grad_enabled(),
            is_running=True,
        )


def release_unused(current: Pass, *, is_fetching: bool = False) -> None:
    """Leaves fetches where they were made if the program has let go of their items: it has used
    these without a model. Of the last one, or two if it reads ahead, it may have made copies.
    """
    waiting = current.waiting
    kept = (MAX_AHEAD if current.items.may_read_ahead else 1) - is_fetching
    while (fetches := count_fetches(waiting)) > kept:
        item = getattr(waiting[0], "item", nothing)
        if fetches < MAX_WAITING and item() is not None:
            break
        current.index += 1
        hot.release(waiting.pop(0))
        while waiting and waiting[0].name != "data_load":
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


def find_open_step() -> hot.Span | None:
    """The step of a framework that runs the loop, if it is the innermost span."""
    span = hot.innermost()
    return span if isinstance(span, hot.Step) and span.name in STEPS else None


def close_step(current: Pass, at: int) -> None:
    if current.step is not None:
        if current.state is EVALUATION:  # what an attack or a saliency map minimises is no loss
            hot.losses.pop(current.step, None)
        hot.close(current.step, at)
