"""The state machine of torch loops. `docs/pytorch.md` has the rule; `passes.py` has the state, and
the questions that decide.

Each thread, and each asyncio task that trains, has a lane. In it, each iterator of a DataLoader
that is asked for items is a pass. Its spans wait until it is known what the pass is.

    state      | fetch                | a model runs           | it is trained     | end
    UNDECIDED  | wait                 | USED, JOINED           | JOINED, TRAINING  | release what
               |                      | or EVALUATION          |                   | waits
    USED       | wait, or EVALUATION  | wait; with gradients,  | JOINED, TRAINING  | EVALUATION if
               |                      | EVALUATION             |                   | it is a `for`
    JOINED     | next step if the     |                        |                   |
               | owner has trained    |                        |                   |
    EVALUATION | next batch if a      |                        | main: TRAINING    | close the spans
               | model has run        |                        | inner: end        |
    TRAINING   | next step if an      | next step if its item  |                   | snapshot, close
               | optimizer stepped    | was fetched before     |                   | the spans

The transitions are `_join`, `_evaluate`, `_train` and `end_pass`. `_decide` chooses between the
first two; a training, too, starts with `_evaluate`. The first pass of a lane that is decided is the
main pass: it owns the epoch and the steps. Loops without a loader are in `free.py`.

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
from cirron.hooks.torch.free import scopes, version_and_value, versions_of
from cirron.hooks.torch.passes import Items, Lane, Load, Pass, State, ThisThread, nothing
from cirron.record import hot

if TYPE_CHECKING:
    from cirron.hooks import Snapshots

# Spans that frameworks open around a fetch.
LOADS = ("data_load", "data_setup")


class Loops:
    """The loops of all threads."""

    def __init__(self, steps_per_epoch: int, snapshots: Snapshots) -> None:
        self.this_thread = ThisThread(self)
        self.is_on = False  # the program may keep our functions after they are uninstalled
        # An optimizer has stepped in compiled code. Dynamo compiles this write, but not our hooks.
        self.has_stepped_compiled = False
        self.descriptions = describe.Descriptions()
        self.generators = callers.Generators()
        self.setups: weakref.WeakKeyDictionary[Any, hot.Span] = weakref.WeakKeyDictionary()
        self._optimizers_exist = False
        self.steps_per_epoch = steps_per_epoch
        self.snapshots = snapshots

    def end(self, lanes: list[Lane], at: int = 0) -> None:
        """Closes what a thread has open, now or at time `at`."""
        with guard.quiet("torch hooks"):
            for lane in lanes:
                lane.end_stale_optimizers()
                while lane.passes:
                    self.end_pass(lane.passes[-1], at=at)
                lane.free.end(at)

    def end_here(self) -> None:
        """A framework starts a training: the program has left its own loops."""
        self.end_left(self.this_thread.find(), is_left=True)

    def end_left(self, lane: Lane, *, is_left: bool = False) -> bool:
        """Ends the loops that the program has left: it has opened an epoch in their spans."""
        path, inferred = list(scopes()), lane.inferred
        ours = [one for one in path if one in inferred]
        inside = path[: path.index(ours[0])] if ours else []
        if not (is_left or any(one.name == "epoch" for one in inside)):
            return False
        at = 0
        if inside:  # the program's outermost scope, which it opened after the loops
            inside[-1].parent = ours[-1].parent
            at = inside[-1].start
        self.end([lane], at)
        return True

    # -- event: a fetch ---------------------------------------------------------------------

    def begin_step(self, lane: Lane, iterator: Any) -> tuple[hot.Span | None, int]:
        """The fast path: begins the next step of a training, or joins the step of a framework.

        Returns the step and when the fetch begins, 0 for now. None: `begin_load` has to decide.
        """
        main, step = lane.main, hot.current()
        if (
            step is None
            or step.phase is not None
            or main is None
            or main.items.iterator() is not iterator
            or self.has_stepped_compiled
        ):
            return None, 0
        if main.opens_steps:
            # Without a length, another epoch may be due.
            if step is not lane.step or not main.stepped_ns or main.items.length is None:
                return None, 0
            lane.loading = main
            main.stepped_ns = 0
            main.is_step_new = True
            main.items.fetched += 1
            index = main.index
            main.index = index + 1
            step = lane.step = main.step = hot.follow(step, index)
            return step, step.start
        items = main.items
        if (
            main.state is not State.TRAINING
            or not isinstance(step, hot.Step)
            or step.name not in STEPS
            or step.end
            or items.ahead
            or items.has_ended
            or items.fetched == items.round_length
            or len(lane.passes) > 1
            or lane.optimizers
            or (main.above.end and not main.goes_on(step))
        ):
            return None, 0
        lane.loading, lane.step = main, step
        items.fetched += 1
        return step, 0

    def begin_load(self, lane: Lane, iterator: Any) -> hot.Span | None:
        """Begins a `data_load`. None: a framework has opened the span of this fetch."""
        if hot.innermost().name in LOADS:
            return None
        if lane.optimizers:
            lane.end_stale_optimizers()
        if lane.has_worked and lane.main is not None:  # something has run in its open step
            lane.main.used_index = lane.main.index
        current = self._find_pass(lane, iterator)
        if self.has_stepped_compiled:
            self.has_stepped_compiled = False
            self.saw_training(lane)
            self.count_step(lane, 0)
        lane.loading = current
        current.items.fetched += 1
        is_for = current.items.asker.is_user_for
        may_train = is_for or current.was_to_train
        if current.state is State.USED and not (may_train and current.can_wait):
            # A `for` has evaluated the items before. After `next`, this is the second item.
            self._decide(current, is_for)
        if current.state is State.UNDECIDED:
            current.release_skipped()
        elif current.step_owner is not None:
            self._next_item(lane, current.step_owner)
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
        """Whether the program has trained without an optimizer since the last fetch: it has changed
        the weights, or has no optimizers. Programs: `manual_after_optimizer`, `manual_sgd`.
        """
        before, now = lane.versions, versions_of(lane)
        lane.versions = now
        is_changed = (before[:1] == now[:1] and before != now) or not self._has_optimizers()
        return lane.has_worked and is_changed

    def _has_optimizers(self) -> bool:
        self._optimizers_exist = self._optimizers_exist or any_is_hooked(torch.optim.Optimizer)
        return self._optimizers_exist

    def _next_step(self, current: Pass) -> None:
        """Begins a step, with what other loaders have fetched since the one before was done."""
        before = current.step
        loads = [
            load
            for one in current.lane.passes
            for load in one.waiting
            # None: a loader that was used up has dropped the step that it was asked for.
            if load.parent is before or (before is None and load.start >= current.stepped_ns)
        ]
        at = min((load.start for load in loads), default=0)
        current.close_step(at)
        if self._is_full(current):
            self._split_endless(current)
        span = current.span
        if span is not None and span not in scopes():
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
        """Begins the next epoch of a loader without a length."""
        span, lane = current.span, current.lane
        if span is not None and current.is_training:
            span.set(inferred="steps")
            self.snapshots.take(span)
            engine.close_long(span)
            current.span = hot.begin("epoch", None, {"inferred": "steps"}, engine.Long)
            self.name_epoch(lane, current.span)
            current.index = 0

    def _is_full(self, current: Pass) -> bool:
        """Whether an epoch of a loader without a length has all its steps."""
        lane = current.lane
        made = lane.optimizer_steps - lane.steps_before
        return current.items.length is None and made >= self.steps_per_epoch

    def end_load(self, load: hot.Span) -> None:
        lane = self.this_thread.find()
        current, lane.loading = lane.loading, None
        lane.has_worked = lane.has_run = False
        if current is not None and current.is_waiting:
            current.waiting.add(load)
        else:
            hot.close(load)
        if current is not None and current.items.is_exhausted:
            lane.step = None

    def fail_load(self, load: hot.Span, error: BaseException) -> None:
        lane = self.this_thread.find()
        current, lane.loading = lane.loading, None
        with guard.quiet("torch loader"):
            if isinstance(error, StopIteration):
                if engine.is_noted(load):  # the step that it was made for does not come about
                    above = load.parent if current is None else current.open_above
                    load.parent = above if above.is_used else above.parent
                    hot.close(load)
                else:
                    hot.drop(load)
                if current is not None:
                    self._exhaust(current)
                return
            hot.fail(load, error)
            # The error ends a `for`, even if the exception is kept, and the iterator with it.
            if current is not None and current.items.asker.is_for:
                self.end_pass(current, error=(load.attrs or {}).get("error"))

    def _exhaust(self, current: Pass) -> None:
        """The loader has no more items. The pass ends, unless the last ones are still unused."""
        lane, items = current.lane, current.items
        items.fetched -= 1
        if current.has_unused_items and current.index <= items.fetched:
            if not (items.has_ended or current.is_waiting):  # a step for one of them has begun
                current.index = items.fetched - max(items.ahead - 1, 0)
            items.has_ended = True
            lane.has_worked = False  # with the last item
            lane.step = None
            return
        if current.step_owner is not None:
            current.step_owner.drop_new_step()
        if current.span is not None and current.opens_steps and not current.index:
            lane.epochs -= 1  # it was opened for the item that did not come
            hot.drop(current.span)
        joined = [one for one in lane.passes if one.owner is current and one.items.asker.is_for]
        if items.asker.is_for and joined:
            swap(current, joined[0])  # which is longer. Program: `zipped_cycle`
            current = joined[0]
        self.end_pass(current)

    def end_teardown(self, lane: Lane, iterator: Any, span: hot.Span) -> None:
        """The workers of a pass have stopped."""
        found = lane.find(iterator)
        if found is not None:
            self._evaluate_rest(found)
            if lane.loading is None:  # else its last fetch is still running
                found.close_step(span.start)
        above = None if found is None else hot._open_ancestor(found.span or found.above)
        hot.release(span, above)

    # -- passes begin and end ---------------------------------------------------------------

    def _find_pass(self, lane: Lane, iterator: Any) -> Pass:
        """The pass of this iterator. Evaluations inside it were left early, and end here."""
        passes, main, current = lane.passes, lane.main, lane.find(iterator)
        if current is None:
            return self._begin_pass(lane, iterator)
        for inner in passes[passes.index(current) + 1 :]:
            if inner.state is State.EVALUATION and inner is not main:
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
        self.end_left(lane)
        lane.free.end_evaluation()
        items = Items(iterator, functools.partial(self.iterator_gone, lane))
        current = Pass(lane, items)
        is_in_evaluation = lane.is_in_scope(EVALUATIONS)
        # After a model in eval mode, an item that is fetched with `next` may be one to train with.
        is_eval_loop = items.asker.is_for and lane.is_model_in_eval_mode
        is_evaluating = is_in_evaluation or is_eval_loop or not torch.is_grad_enabled()
        current.began_evaluating = is_evaluating
        for old in list(lane.passes):
            if old.is_left_for(current):
                self.end_pass(old)
        current.above = hot.held(hot.innermost())
        current.choose_spans(is_loop=is_loop, is_in_evaluation=is_in_evaluation)
        lane.passes.append(current)
        lane.step = None
        if (current.has_outer_epoch or not current.opens_span) and iterator in self.setups:
            hot.release(self.setups.pop(iterator))
        if not current.opens_span:  # the program or a framework says what it is
            self.descriptions.put_loader(iterator)
            current.state = State.EVALUATION
            lane.main = lane.main or current
        return current

    def end_pass(self, current: Pass, *, error: str | None = None, at: int = 0) -> None:
        """Ends a pass, now or at time `at`. `error`: the exception that ended its loop."""
        lane = current.lane
        lane.step = None
        self._evaluate_rest(current)
        if current.items.is_exhausted and not lane.has_worked:
            current.drop_new_step()  # nothing was read ahead after all
        elif error is None and "error" not in (current.above.attrs or ()):
            current.skip_unused_step()
        if lane.main is current:
            if error is not None and current.state is State.EVALUATION and current.was_to_train:
                self._train(current)
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
        current.close_step(ended_ns)
        if span is not None and not span.end:
            if current.is_training:
                self.snapshots.take(span)
            engine.close_long(span, ended_ns)
        elif current.is_training and not (current.is_in_own_step or current.above.end):
            handmade = hot.find_handmade("epoch")
            if handmade is not None:
                self.snapshots.take(handmade)

    def end_evaluations(self, lane: Lane) -> None:
        """Ends evaluations that may be over, because the program saves a checkpoint. The end of a
        `for` would be known. Program: `saved_after_evaluation`.
        """
        lane.free.end_evaluation()
        for one in list(lane.passes):
            may_be_over = one is not lane.main or one.items.has_fetched_all
            is_for = one.items.asker.is_for and one.items.asker.is_user_for
            goes_on = is_for and not one.items.is_exhausted
            if one.state is State.EVALUATION and lane.has_worked and may_be_over and not goes_on:
                self.end_pass(one)

    def iterator_gone(self, lane: Lane, items: Items) -> None:
        """An iterator was released, by `break`, by an exception, or at any later time."""
        with guard.quiet("torch loader"):
            current = next((one for one in lane.passes if one.items is items), None)
            if current is None:
                return
            if current.is_waiting and not items.asker.is_for:
                self._hand_over(lane, current)
            elif items.is_exhausted and (items.fetched > current.index or not current.is_done):
                return  # the last items are still to be used
            if lane.optimizers and lane is self.this_thread.find():
                lane.end_stale_optimizers()
            error = callers.error_that_left(sys._getframe(1)) if items.asker.is_for else None
            self.end_pass(current, error=error)

    def _hand_over(self, lane: Lane, current: Pass) -> None:
        """Gives what was fetched with `next` to the step that it is for: that of another loader, or
        of a loop that has no other loader.
        """
        for other in lane.passes:
            if other.is_waiting and other.items.asker.is_for:
                other.waiting += current.waiting
                current.waiting.clear()
        if lane.main is None and current.items.fetched == 1 and current.state is State.UNDECIDED:
            lane.free.take(current.waiting)
            current.waiting.clear()

    # -- events: a forward, a backward, an optimizer step -------------------------------------

    def saw_work(self, lane: Lane, *, is_evaluating: bool, is_in_train: bool | None = None) -> None:
        """A model runs, or is trained, for the first time since a fetch.

        `is_in_train`: the mode of the model that runs; None: something is trained.
        """
        main = lane.main
        if main is not None:
            self._use_fetched(main, is_evaluating=is_evaluating, is_in_train=is_in_train)
        lane.has_worked = True
        undecided = [one for one in lane.passes if one.waiting]
        for current in undecided:
            current.was_to_train = not is_evaluating
            if current.state is State.UNDECIDED:
                current.release_skipped()
        for current in undecided:
            may_train = current.may_train_later(is_evaluating, is_in_train)
            if may_train and len(undecided) == 1:
                current.state = State.USED
                current.items.count_references()
            else:
                self._decide(current, is_evaluating)

    def _use_fetched(self, main: Pass, *, is_evaluating: bool, is_in_train: bool | None) -> None:
        """Begins the next step if its item was fetched before the last optimizer step, or ends the
        pass if all its items have been used.
        """
        lane = main.lane
        if main.has_spare and is_in_train and not is_evaluating:
            main.items.note_ahead(1)
            self._next_step(main)
        elif main.items.is_exhausted:
            is_used = main.is_done or not (main.items.ahead or lane.has_worked)
            if main.is_done and main.items.fetched > main.index:
                self._next_step(main)
            elif main.is_training and is_evaluating and is_used:
                self.end_pass(main)  # else another model of the last step

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
            self._train(main)
        lane.step = None if main.items.is_exhausted or len(lane.passes) > 1 else main.step

    def _train_freely(self, lane: Lane, by_backward: bool, optimizer: int | None) -> None:
        """Training without a loader."""
        free = lane.free
        free.saw_training(optimizer)
        # Else the steps are a framework's: Keras's optimizers, for one, are not torch's.
        is_by_hand = by_backward and free.is_open and not self._has_optimizers()
        free.versions = versions_of(lane, version_and_value) if is_by_hand else None
        is_known = not (free.held_under or is_by_hand or lane.passes)
        lane.step = free.step if is_known else None

    def close(self, span: hot.Span) -> None:
        """Closes a span of a hook, or lets it wait for its parent."""
        lane = self.this_thread.lane
        is_known = lane.main is not None or lane.step is span.parent
        for current in lane.passes:
            if is_known and current.state is not State.USED:
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
            lane.free.count_step(optimizer)
            return
        main.stepped_ns = hot.now()
        lane.versions = ()
        main.has_spare = main.opens_steps and not (main.is_step_new or lane.has_run)
        if main.has_spare:
            lane.step = None
        if self.snapshots.is_watching:
            is_last = main.items.has_fetched_all or self._is_full(main)
            self.snapshots.keep_gradients(is_last=is_last)

    def skip_step(self, lane: Lane, optimizer: int) -> None:
        """The scaler has found infinite gradients. This ends a step, too."""
        step = lane.free.step if lane.main is None else lane.main.step
        if step is not None:
            step.set(optimizer_skipped=True)
        self.count_step(lane, optimizer)

    # -- transitions ------------------------------------------------------------------------

    def _decide(self, current: Pass, is_evaluating: bool) -> None:
        """From UNDECIDED or USED to JOINED or EVALUATION, from which a training goes on."""
        owner = None
        if current.state is State.UNDECIDED or not is_evaluating:
            current.items.count_references()
            owner = self._find_owner(current, is_evaluating)
        if owner is None:
            self._evaluate(current, is_evaluating=is_evaluating)
        else:
            self._join(owner, current)

    def _find_owner(self, current: Pass, is_evaluating: bool) -> Pass | None:
        """The pass for whose step or batch it fetches more data. None: it has its own."""
        lane, main = current.lane, current.lane.main
        if main is not None and main.is_over_for(current, is_evaluating):
            self.end_pass(main, at=current.waiting[0].start)
            main = None
            current.above = current.open_above
            for load in current.waiting:
                load.parent = current.above
        if main is None:
            return None
        if is_evaluating and lane.inner_evaluations and not current.began_in_step:
            return lane.inner_evaluations[-1]
        if not main.is_evaluated_by(current, is_evaluating):
            return main
        if main.step is not None and main.step not in scopes(current.above):
            current.above = main.step  # opened just now, for an item that was fetched before
        return None

    def _evaluate_rest(self, current: Pass) -> None:
        """A `for` has ended and nothing was trained with its items: it was an evaluation."""
        if current.state is State.USED and current.items.asker.is_for:
            self._evaluate(current, is_evaluating=True)

    def _join(self, owner: Pass, current: Pass) -> None:
        if owner.is_training and owner.is_done and owner.opens_steps:
            self._next_step(owner)
        current.state = State.JOINED
        current.owner = owner
        current.waiting.release(owner.step)

    def _evaluate(self, current: Pass, *, is_evaluating: bool) -> None:
        """Opens the spans of a pass, from its first fetch on. The items of an evaluation that was
        USED are one batch each; otherwise all items so far are for one step.
        """
        lane, items, waiting = current.lane, current.items, current.waiting
        if lane.main is None:
            lane.main = current
            lane.free.forget()
        is_each_a_batch = current.state is State.USED and is_evaluating
        current.state = State.EVALUATION
        if current.is_in_own_step and not is_evaluating:
            current.opens_span = current.opens_steps = False
        above = current.open_above
        body = itertools.takewhile(lambda one: one is not above, scopes())
        if any(one.name in STEPS for one in body):  # the program has opened it, in the loop
            current.opens_steps = False
            current.opens_span = current.opens_span and not current.has_outer_epoch
        if current.opens_span:
            iterator = items.iterator()
            setup = self.setups.pop(iterator) if iterator in self.setups else None
            start, attrs = (setup or waiting[0]).start, self.descriptions.of_loader(iterator)
            above = hot.insert(above, "evaluation", None, attrs, engine.Long, start=start)
            current.span = above
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

    def _train(self, current: Pass) -> None:
        """From EVALUATION to TRAINING."""
        lane = current.lane
        current.state = State.TRAINING
        lane.versions = versions_of(lane)
        current.began_evaluating = False  # the model was left in eval mode
        span, step = current.span, current.step
        if step is not None:
            step.name = "step"
        if span is None:
            return
        above = lane.free.above_epoch
        if above is not None:  # that loop had no loader; this one has
            if not above.end:
                span.parent = current.above = above
            lane.free.end()
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


def any_is_hooked(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether an optimizer has been created: torch then marks the `step` of its class."""
    return any(
        getattr(one.step, "hooked", False) or any_is_hooked(one) for one in kind.__subclasses__()
    )


def swap(main: Pass, other: Pass) -> None:
    """The main pass goes on with the items of another pass."""
    main.items, other.items = other.items, main.items
    main.items.count_references()
