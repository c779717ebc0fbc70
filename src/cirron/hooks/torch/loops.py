"""What a training loop is, inferred from what it calls. `docs/pytorch.md` has the rule on one page.

Each thread has a `Lane`. In it, each iterator of a DataLoader that is asked for items is a `Pass`:

    UNDECIDED   items were fetched; no model has used them, or it is not clear what for
       | a model runs, or something is trained
       +-> JOINED       another pass goes on, and this one fetches more for its steps
       +-> EVALUATION   spans `evaluation` and `batch`
              | a backward, or an optimizer step
              +-> TRAINING   the same spans, called `epoch` and `step`

The first pass of a lane that is decided drives: it has the steps. While nothing is decided the
fetches wait for a parent; nothing is opened that could turn out to be wrong. Steps of a loop that
has no loader are in `free.py`.

Runs on the user's threads.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from _thread import _local
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data.dataloader import _DatasetKind

from cirron import guard
from cirron.hooks import engine
from cirron.hooks.engine import STEPS
from cirron.hooks.torch import callers, describe
from cirron.hooks.torch.free import FreeLoop, versions_of
from cirron.record import hot

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron.hooks import Snapshots

UNDECIDED, JOINED, EVALUATION, TRAINING = "undecided", "joined", "evaluation", "training"

# Scopes that say of a pass what it is: then there is none of its own.
EVALUATIONS = frozenset(("evaluation", "prediction"))
# Fetches that may be ahead of the item that is used.
MAX_AHEAD = 2
# Spans of ours that wait in a pass whose items a model has seen.
MAX_HELD = 64
# Scopes of a framework's own round what it loads.
LOADS = ("data_load", "data_setup")


def nothing() -> None:
    """What a weak reference to something that is gone returns."""


class Pass:
    """One iterator of a DataLoader, from its first item to its last."""

    def __init__(self, lane: Lane, above: hot.Span) -> None:
        self.lane = lane
        self.kind = UNDECIDED
        self.iterator: Callable[[], Any] = nothing  # a weak reference, while the pass goes on
        self.above = above  # what was open when it began
        self.length: int | None = None  # of the loader; None: it may be endless
        self.round: int | None = None  # the items after which a sampler begins again
        self.items = 0  # asked for
        # How it began.
        self.is_for = False  # a `for` asks for the items, not a call of `next`
        self.is_evaluating = False  # gradients were off, or the model was in eval mode
        self.is_inside_step = False  # the driver's step had done some work
        self.makes_span = False  # no one else has opened an epoch or evaluation for it
        self.makes_steps = False
        self.outer_has_epoch = False
        self.ends_epoch = False  # where the program has opened the epoch
        # While it is undecided: spans that wait for a parent.
        self.setup: hot.Span | None = None  # of workers
        self.loads: list[hot.Span] = []  # fetches; of a pass that a model has seen, forwards too
        self.has_evaluated = False  # the model that ran first did
        # Once it is decided.
        self.span: hot.Span | None = None  # the epoch or evaluation, if `makes_span`
        self.step: hot.Span | None = None
        self.index = 0  # of the next step
        self.first_index = 0
        self.references = 0  # to the iterator, when the first item was used
        self.is_fresh = False  # the step was opened for the item that is being loaded
        self.has_stepped = False  # an optimizer has, since the step began
        self.versions: tuple[Any, ...] = ()  # of the weights, at the last fetch without such a step
        self.optimizer_steps = 0
        # Items that are fetched before the last one is used.
        self.at_once = 1  # by a `zip`, one right after the other
        self.may_be_ahead = False  # whoever asks could
        self.is_ahead = False  # and does
        self.is_over = False  # the loader has no more items, but some are still to be used
        self.owed = 0  # those of them that the open step is not for
        self.stepped_ns = 0  # when an optimizer did, since then

    @property
    def may_be_peek(self) -> bool:
        """Whether the one item that was asked for, by hand, may be all that is wanted."""
        return not self.is_for and self.items == 1 and not self.is_over

    @property
    def is_round(self) -> bool:
        """Whether all items of a sampler that repeats were asked for. Program: `loader_repeats`."""
        return self.items == self.round

    @property
    def has_spans(self) -> bool:
        return self.makes_span or self.makes_steps


class Lane:
    """What one thread is doing."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []  # outermost first
        self.driver: Pass | None = None
        # The undecided pass whose items a model has seen: it may be trained with them yet.
        self.peek: Pass | None = None
        self.loading: Pass | None = None  # that is asked for an item now
        self.teardown: hot.Span | None = None  # of workers, at the end of that fetch
        # The open step of the loop that trains. While it is the innermost span, no forward,
        # backward or optimizer step says anything new of the loop.
        self.step: hot.Span | None = None
        self.has_worked = False  # a model has run, since the last fetch
        self.is_inside = False  # a module's forward, or a backward
        self.model: Callable[[], Any] | None = None  # the last one that did
        # Those that step, by id, with what `hot.begin_phase` has returned, or their spans; the one
        # that was called by another is last.
        self.optimizers: list[tuple[int, hot.Span | None]] = []
        self.described: Callable[[], Any] = nothing  # the last model that was
        self.epochs = 0  # made so far
        self.free = FreeLoop(self)


class ThisThread(_local):
    """Where a thread finds its lane."""

    def __init__(self) -> None:
        self.lane = Lane()


class Compiled:
    """What compiled code tells us. Dynamo takes a write of an attribute into what it compiles."""

    def __init__(self) -> None:
        self.has_stepped = False  # an optimizer whose step is compiled


class Loops:
    """The loops of all threads."""

    def __init__(self, steps_per_epoch: int, snapshots: Snapshots) -> None:
        self.this_thread = ThisThread()
        self.compiled = Compiled()
        self.setups: weakref.WeakKeyDictionary[Any, hot.Span] = weakref.WeakKeyDictionary()
        # Of new iterators: the loader, and what it was made with.
        self.loaders: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()
        # Loaders and models: without gradients, and with. An evaluation may come before the epoch.
        self._described: tuple[weakref.WeakSet[Any], ...] = weakref.WeakSet(), weakref.WeakSet()
        self._optimizers_exist = False
        self.steps_per_epoch = steps_per_epoch
        self.on_epoch_end = snapshots.take
        self.keep_gradients = snapshots.keep_gradients

    def end(self) -> None:
        """Closes what this thread has open."""
        lane = self.this_thread.lane
        end_optimizers(lane, 0)
        while lane.passes:
            self.end_pass(lane.passes[-1])
        lane.free.end(self)

    # -- items ------------------------------------------------------------------------------

    def begin_step(self, lane: Lane, iterator: Any) -> hot.Span | None:
        """Begins the next step of the loop that trains; None: this is no fetch for one."""
        step, current = lane.step, lane.driver
        if (
            step is None
            or step is not hot.current()
            or step.phase is not None
            or current is None
            or not current.has_stepped
            or current.iterator() is not iterator
            or current.length is None  # it may be time for another epoch
            or current.above.end
            or self.compiled.has_stepped
        ):
            return None
        lane.loading = current
        lane.has_worked = current.has_stepped = False
        current.is_fresh = True
        current.items += 1
        index = current.index
        current.index = index + 1
        step = lane.step = current.step = hot.follow(step, index)
        return step

    def begin_load(self, lane: Lane, iterator: Any) -> hot.Span | None:
        """None: a framework says itself what it loads."""
        if hot.innermost().name in LOADS:
            return None
        if lane.optimizers:
            end_stale_optimizers(lane)
        passes = lane.passes
        if passes and passes[-1].iterator() is iterator and goes_on(passes[-1]):
            current = passes[-1]
        else:
            current = self._find_pass(lane, iterator)
        driver = lane.driver
        if current.kind is JOINED and driver is not None and is_peek(driver, current):
            self._swap(driver, current)
            current = driver
        if self.compiled.has_stepped:
            self.compiled.has_stepped = False
            self.saw_training(lane)
            self.count_step(lane, 0)
        lane.loading = current
        current.items += 1
        is_held = lane.peek is current
        if is_held and not (current.is_for and can_wait(current.loads)):
            self._decide(lane, current, is_evaluating=current.is_for)  # it was no peek
        if current.kind is UNDECIDED:
            if not is_held:
                self._wait(current)
        elif current.kind is JOINED:
            driver = lane.driver
            if driver is not None and driver.kind is TRAINING and driver.makes_steps:
                self._next_item(lane, driver)
        elif current.makes_steps:
            self._next_item(lane, current)
        lane.has_worked = False
        return hot.begin("data_load")

    def _wait(self, current: Pass) -> None:
        """Another item, with the last one unused: it was, unless this is fetched ahead."""
        kept = max(MAX_AHEAD if current.may_be_ahead else 1, current.at_once)
        loads = current.loads
        while loads and (loads[0].name != "data_load" or fetches(loads) >= kept):
            current.index += loads[0].name == "data_load"
            hot.release(loads.pop(0))

    def _next_item(self, lane: Lane, current: Pass) -> None:
        """A step that has trained is over, and so is a batch that a model has seen."""
        is_done = lane.has_worked
        if current.kind is TRAINING and self._has_optimizers():
            is_done = current.has_stepped or self._is_changed_by_hand(lane, current)
        current.is_fresh = current.step is None or is_done
        if not current.is_fresh and current.items == MAX_AHEAD and not lane.has_worked:
            current.is_ahead = current.may_be_ahead
        if current.is_fresh:
            self._next_step(current)

    def _has_optimizers(self) -> bool:
        """Where there are none, a batch with a backward is a step. Program: `manual_sgd`."""
        self._optimizers_exist = self._optimizers_exist or has_optimizers()
        return self._optimizers_exist

    def _is_changed_by_hand(self, lane: Lane, current: Pass) -> bool:
        """Whether the weights of the model that runs were changed since the last fetch, though no
        optimizer has stepped. Program: `manual_after_optimizer`.
        """
        before, now = current.versions, versions_of(lane)
        current.versions = now
        return lane.has_worked and before[:1] == now[:1] and before != now

    def _next_step(self, current: Pass) -> None:
        """Begins with what other loaders have fetched since the last one did its work."""
        before = current.step
        undecided = [one for one in current.lane.passes if one.kind is UNDECIDED]
        loads = [load for one in undecided for load in one.loads if load.parent is before]
        at = min((load.start for load in loads), default=0)
        close_step(current, at)
        if current.length is None:
            self._split_endless(current)
        name = "step" if current.kind is TRAINING else "batch"
        current.step = hot.begin(name, current.index, None, hot.Step, at)
        for load in loads:
            load.parent = current.step
        current.index += 1
        current.has_stepped = False
        if current.lane.step is not None:
            current.lane.step = current.step

    def end_load(self, lane: Lane, load: hot.Span) -> None:
        current, lane.loading = lane.loading, None
        if current is not None and current.kind is UNDECIDED and current.has_spans:
            hot.suspend(load)
            current.loads.append(load)
        else:
            hot.close(load)
        if current is not None and current.is_round and current.is_ahead:
            current.is_over, current.owed = True, 1  # the last item is still to be used
            lane.step = None

    def fail_load(self, lane: Lane, load: hot.Span, error: BaseException) -> None:
        current, lane.loading = lane.loading, None
        teardown, lane.teardown = lane.teardown, None
        if not isinstance(error, StopIteration):
            hot.fail(load, error)
            if teardown is not None:
                hot.release(teardown)
            # A `for` does not go on; whoever keeps the exception keeps the iterator, too.
            if current is not None and (hot.is_fetching() or callers.is_for(callers.find_asker())):
                self.end_pass(current, error=(load.attrs or {}).get("error"))
            return
        hot.drop(load)
        if current is None:
            return
        span = current.span or current.above
        current.items -= 1
        is_owed = current.is_ahead
        if current.kind is UNDECIDED:  # or taken one after the other, as by `list`
            is_ahead = current.may_be_ahead and lane.peek is not current
            is_owed = is_ahead and current.items <= MAX_AHEAD
        if is_owed and (current.kind is UNDECIDED or current.items >= current.index):
            current.is_over = True  # the last items are still to be used
            if current.kind is UNDECIDED:
                current.owed = current.items - current.index - 1
            lane.step = None
        else:
            self._drop_fresh(lane.driver if current.kind is JOINED else current)
            is_empty = current.makes_steps and not current.index
            if current.span is not None and is_empty and current.kind is TRAINING:
                lane.epochs -= 1  # begun for the item that did not come
                hot.drop(current.span)
        if teardown is not None:
            hot.release(teardown, span if not span.end else None)
        if not current.is_over:
            self.end_pass(current)

    def _drop_fresh(self, current: Pass | None) -> None:
        """The step was opened for an item that did not come."""
        if current is not None and current.step is not None and current.is_fresh:
            hot.drop(current.step)
            current.step = current.lane.step = None
            current.index -= 1

    def end_teardown(self, lane: Lane, iterator: Any, span: hot.Span) -> None:
        """The workers are stopped: that is the last part of their pass."""
        if lane.loading is not None:  # it will say that there are no more items
            lane.teardown = span
            return
        found = next((one for one in lane.passes if one.iterator() is iterator), None)
        parent = None if found is None else found.span
        hot.release(span, None if parent is None or parent.end else parent)

    # -- passes -----------------------------------------------------------------------------

    def _find_pass(self, lane: Lane, iterator: Any) -> Pass:
        """The pass of this iterator; evaluations inside it that were left early end here."""
        passes = lane.passes
        for place, found in enumerate(passes):
            if found.iterator() is iterator:
                for inner in passes[place + 1 :]:
                    if inner.kind is EVALUATION and inner is not lane.driver:
                        self.end_pass(inner)
                if not (found.above.end or found.is_round):
                    return found
                self.end_pass(found)
                # The scope that it began in is over. A scope for one fetch is no loop's, but an
                # epoch is one even if it has a single step.
                may_drive = found.items > 1 or found.is_round or found.above.name == "epoch"
                return self._begin_pass(lane, iterator, may_drive=may_drive)
        return self._begin_pass(lane, iterator)

    def _begin_pass(self, lane: Lane, iterator: Any, *, may_drive: bool = True) -> Pass:
        lane.free.end_evaluation()
        current = Pass(lane, hot.innermost())
        asker = callers.find_asker()
        is_fetching = hot.is_fetching()
        current.is_for = is_fetching or callers.is_for(asker)
        current.may_be_ahead = not current.is_for or callers.is_generator(asker)
        current.at_once = callers.times_in_zip(iterator) if current.is_for else 1
        is_told = is_told_to_evaluate(lane)
        # An item that is asked for by hand may be one more to train with.
        has_grad = torch.is_grad_enabled() and not (current.is_for and is_in_eval_mode(lane))
        current.is_evaluating = is_told or not has_grad
        for old in list(lane.passes):
            if is_left(old, current):
                self.end_pass(old)
        current.above = hot.innermost()
        self._follow(current, iterator)
        current.is_inside_step = lane.has_worked
        names = hot.open_names(but=lane.free.epoch)
        is_in_training = lane.driver is not None and lane.driver.kind is TRAINING
        current.outer_has_epoch = "epoch" in names and not is_in_training
        if lane.driver is not None:
            # Unless whoever evaluates has opened the batch, too.
            current.makes_steps = not (is_told and hot.innermost().name in STEPS)
            current.makes_span = not is_told
        elif may_drive:
            if lane.free.step is not None:  # a loop without a loader goes on: it has the steps
                names -= {lane.free.step.name}
            has_step = not STEPS.isdisjoint(names)
            current.makes_steps = not has_step and not is_fetching
            is_whole = current.makes_steps or not current.outer_has_epoch
            current.makes_span = is_whole and not has_step and not is_told
        current.ends_epoch = current.makes_steps
        setup = self.setups.pop(iterator, None)
        if setup is not None:
            if current.makes_span:
                current.setup = setup
            else:
                hot.release(setup)
        if not current.makes_span and (told := settled_in()) is not None:
            put_settings(told, self._describe(iterator) or {})
        lane.passes.append(current)
        lane.step = None
        # Somebody else has said what it is, or at least what its steps are.
        if (is_told and current.makes_steps) or (not current.has_spans and lane.driver is None):
            current.kind = EVALUATION
            lane.driver = lane.driver or current
        return current

    def _follow(self, current: Pass, iterator: Any) -> None:
        current.iterator = weakref.ref(iterator, lambda _: self.iterator_gone(current))
        current.length = length_of(iterator)
        current.round = describe.round_of(iterator)

    def _swap(self, driver: Pass, current: Pass) -> None:
        """Has a pass drive with the iterator of another one."""
        looked_at, asked = driver.iterator(), current.iterator()
        self._follow(driver, asked)
        self._follow(current, looked_at)
        driver.items, current.items = current.items, driver.items
        driver.references = callers.references_to(asked)

    def end_pass(self, current: Pass, *, error: str | None = None, at: int = 0) -> None:
        """Now, or `at` a time. `error`: that has cut it short."""
        lane = current.lane
        lane.step = None
        if lane.peek is current and current.is_for:
            self._evaluate(lane, current)
        if current.is_over and not lane.has_worked:
            self._drop_fresh(current)  # nothing was fetched ahead after all
        if current in lane.passes:
            lane.passes.remove(current)
        if lane.driver is current:
            lane.driver = None
            lane.passes[:] = [one for one in lane.passes if one.kind is not JOINED]
        current.iterator = nothing
        if lane.peek is current:
            lane.peek = None
        self._release(current)
        ended_ns = current.stepped_ns if current.is_over else at
        span = current.span
        for one in (current.step, span):
            if one is not None and error is not None:
                one.set(error=error)
        close_step(current, ended_ns)
        is_training = current.kind is TRAINING
        if span is not None and not span.end:
            if is_training:
                self.on_epoch_end(span)
            engine.close_long(span, ended_ns)
        elif is_training and current.ends_epoch:
            handmade = hot.find_handmade("epoch")
            if handmade is not None:
                self.on_epoch_end(handmade)

    def _release(self, current: Pass) -> None:
        """Items that were not used: their fetches stay where they were made."""
        for span in (current.setup, *current.loads):
            if span is not None:
                hot.release(span)
        current.setup, current.loads = None, []

    def iterator_gone(self, current: Pass) -> None:
        """Left early, by `break` or an exception; called wherever the last reference went."""
        with guard.quiet("torch loader"):
            lane = current.lane
            is_used = current.has_stepped if current.kind is TRAINING else lane.has_worked
            is_owed = current.is_over and (current.owed > 0 or not is_used)
            if current.kind is UNDECIDED and not current.is_for:
                is_owed = False  # all items at once, as by `list`; who reads ahead keeps it
            if is_owed or current not in lane.passes:
                current.iterator = nothing
                return
            if current.kind is UNDECIDED and not current.is_for:
                # One more item for the step that another loader has begun to fetch for.
                for other in lane.passes:
                    if other.kind is UNDECIDED and other.is_for and other.loads:
                        other.loads += current.loads
                        current.loads = []
                if lane.driver is None and current.items == 1 and lane.peek is not current:
                    lane.free.take(current.loads)
                    current.loads = []
            if lane.optimizers and lane is self.this_thread.lane:
                end_stale_optimizers(lane)
            self.end_pass(
                current, error=callers.error_that_left(sys._getframe(1)) if current.is_for else None
            )

    # -- what a pass turns out to be --------------------------------------------------------

    def saw_work(
        self, lane: Lane, *, is_evaluating: bool, is_forward: bool = False, is_in_train: bool = True
    ) -> None:
        """A model runs, or something is trained, for the first time since a fetch."""
        lane.has_worked = True
        driver = lane.driver
        if driver is not None and driver.is_over and driver.has_stepped:
            if driver.owed and not is_evaluating:
                driver.owed -= 1
                self._next_step(driver)
            elif is_evaluating or driver.iterator() is None:  # else another model of the last step
                self.end_pass(driver)
        waiting = [one for one in lane.passes if one.kind is UNDECIDED and one.loads]
        for current in waiting:
            current.has_evaluated = is_evaluating
        if len(waiting) == 1 and (is_evaluating or is_forward):
            current = waiting[0]
            is_open = current.is_for and is_evaluating
            if driver is not None:
                is_open = is_left_open(driver, current)
            if (is_open and is_in_train) or (current.may_be_peek and driver is None):
                lane.peek = current
                current.references = callers.references_to(current.iterator())
                return
        for current in waiting:
            self._decide(lane, current, is_evaluating=is_evaluating)

    def close(self, span: hot.Span) -> None:
        """Ends a span of ours: while no pass is decided, it may have to wait for a parent."""
        lane = self.this_thread.lane
        is_known = lane.driver is not None or lane.step is span.parent
        for current in lane.passes:
            if is_known and current is not lane.peek:
                continue
            if span.parent is current.above and 0 < len(current.loads) < MAX_HELD:
                hot.suspend(span)
                current.loads.append(span)
                return
        (hot.close if is_known else lane.free.close)(span)

    def _decide(self, lane: Lane, current: Pass, *, is_evaluating: bool) -> None:
        driver = lane.driver
        if lane.peek is current and is_evaluating:
            self._evaluate(lane, current)
            return
        lane.peek = None
        current.references = callers.references_to(current.iterator())
        if driver is not None and is_evaluation_left(driver, is_evaluating=is_evaluating):
            self.end_pass(driver, at=current.loads[0].start)
            driver = None
            current.above = open_above(current)
            for load in current.loads:
                load.parent = current.above
        if driver is None:
            lane.driver = current
            lane.free.forget()
        elif is_evaluation_in(driver, current, is_evaluating=is_evaluating):
            if current.above.end:
                current.above = hot.innermost()
        else:
            self._join(driver, current)
            return
        self._open(current, [current.loads])

    def _evaluate(self, lane: Lane, current: Pass) -> None:
        """It has trained nothing with the items that a model has seen: each was a batch."""
        lane.peek = None
        if lane.driver is None:
            lane.driver = current
            lane.free.forget()
        batches: list[list[hot.Span]] = []
        for span in current.loads:
            if span.name == "data_load" or not batches:
                batches.append([])
            batches[-1].append(span)
        self._open(current, batches)

    def _open(self, current: Pass, batches: list[list[hot.Span]]) -> None:
        """Opens the spans of a pass, from its first fetch on, with what waits of each batch."""
        current.kind = EVALUATION
        current.first_index = current.index
        current.is_ahead = fetches(batches[-1]) >= MAX_AHEAD and current.at_once == 1
        above, start = open_above(current), current.loads[0].start
        if has_own_step(above):
            current.makes_steps = False
            current.makes_span = current.makes_span and not current.outer_has_epoch
        if current.makes_span:
            setup, current.setup = current.setup, None
            began = start if setup is None else setup.start
            iterator = current.iterator()
            attrs = None if iterator is None else self._describe(iterator)
            current.span = hot.insert(above, "evaluation", None, attrs, engine.Long, start=began)
            engine.begin_measuring(current.span)
            if setup is not None:
                hot.release(setup, current.span)
        parent = current.span
        if current.makes_steps:
            above = parent or above
            for batch, following in itertools.pairwise(batches):
                engine.insert_past(above, "batch", current.index, batch, following[0].start)
                current.index += 1
            start = batches[-1][0].start
            parent = hot.insert(above, "batch", current.index, None, hot.Step, start=start)
            current.step = parent
            current.index += 1
        for load in current.loads:
            hot.release(load, None if load.parent.end else parent)
        current.loads.clear()

    def met(self, loader: Any, iterator: Any) -> None:
        """Notes the settings of a loader. A `for` may hold its iterator alone: it is gone then."""
        if loader not in self._described[torch.is_grad_enabled()]:
            self.loaders[iterator] = weakref.ref(loader), describe.of_loader(loader)

    def _describe(self, iterator: Any) -> dict[str, Any] | None:
        """The settings of a loader, once."""
        settings: dict[str, Any] | None
        reference, settings = self.loaders.pop(iterator, (nothing, None))
        loader = reference()
        if loader is not None:
            described = self._described[torch.is_grad_enabled()]
            if loader in described:
                return None
            described.add(loader)
        return settings

    def describe_model(self, lane: Lane, model: Any) -> None:
        """Puts the settings of a model on the first epoch and the first evaluation of it."""
        span = lane.free.epoch if lane.driver is None else lane.driver.span
        span = span or settled_in()
        described = self._described[torch.is_grad_enabled()]
        if span is not None and model not in described:
            described.add(model)
            put_settings(span, describe.of_model(model) | describe.of_mode())

    def _join(self, driver: Pass, current: Pass) -> None:
        if driver.kind is TRAINING and driver.has_stepped and driver.makes_steps:
            self._next_step(driver)
        current.kind = JOINED
        for load in current.loads:
            hot.release(load, None if load.parent.end else driver.step)
        current.loads.clear()

    def saw_training(
        self, lane: Lane, *, by_backward: bool = False, optimizer: int | None = None
    ) -> None:
        """A backward or an optimizer step: the pass that drives is a training epoch."""
        if by_backward and is_in_eval_mode(lane):
            return  # an attack, or a saliency map
        self.saw_work(lane, is_evaluating=False)
        driver = lane.driver
        for inner in [one for one in lane.passes if one.kind is EVALUATION and one is not driver]:
            self.end_pass(inner)  # an evaluation inside the step, left
        if driver is None:
            free = lane.free
            free.saw_training(self, optimizer)
            # Else somebody has said what a step is: Keras, whose optimizers are none of torch's.
            is_its_loop = free.is_holding or free.epoch is not None
            free.is_by_hand = by_backward and is_its_loop and not self._has_optimizers()
            free.versions = versions_of(lane) if free.is_by_hand else ()
            is_known = not (free.is_holding or free.is_by_hand or lane.passes)
            lane.step = free.step if is_known else None
            return
        if driver.kind is not TRAINING:
            self._name_training(lane, driver)
        lane.step = None if driver.is_over or len(lane.passes) > 1 else driver.step

    def _name_training(self, lane: Lane, current: Pass) -> None:
        current.kind = TRAINING
        current.versions = versions_of(lane)
        current.is_evaluating = False  # if a model was in eval mode when it began, it was left so
        span, step = current.span, current.step
        if step is not None:
            step.name = "step"
        if span is None:
            return
        if current.outer_has_epoch:  # made by hand: the steps are directly under that one
            if step is not None:
                step.parent = span.parent
            if current.index > current.first_index + 1:  # the batches before were no training
                engine.close_long(span, 0 if step is None else step.start)
            else:
                hot.drop(span)
            current.span = None
            return
        if lane.free.epoch is not None:  # that loop had no loader; this one has
            span.parent = current.above = lane.free.epoch.parent
            lane.free.end(self)
        self.name_epoch(lane, span)

    def name_epoch(self, lane: Lane, span: hot.Span) -> None:
        span.name = "epoch"
        span.index = lane.epochs
        lane.epochs += 1

    def _split_endless(self, current: Pass) -> None:
        """A loader without a length: an epoch is as many optimizer steps as the settings say."""
        if current.span is None or current.kind is not TRAINING:
            return
        if current.optimizer_steps >= self.steps_per_epoch:
            self.on_epoch_end(current.span)
            current.span.set(inferred="steps")
            engine.close_long(current.span)
            current.span = engine.begin_long("epoch", None, {"inferred": "steps"})
            self.name_epoch(current.lane, current.span)
            current.optimizer_steps = current.index = 0

    def count_step(self, lane: Lane, optimizer: int) -> None:
        """`optimizer`: its id; 0 if that is not known."""
        driver = lane.driver
        if driver is None:
            lane.free.count_step(self, optimizer)
        else:
            driver.has_stepped = True
            driver.versions = ()
            driver.optimizer_steps += 1
            if driver.items == driver.length:  # the loop may clear them before the epoch ends
                self.keep_gradients()
            if driver.is_over:
                driver.stepped_ns = hot.now()

    def skip_step(self, lane: Lane, optimizer: int) -> None:
        """A step all the same, though the scaler found infinity."""
        driver = lane.driver
        step = lane.free.step if driver is None else driver.step
        if driver is not None:
            driver.has_stepped = True
        if step is not None:
            step.set(optimizer_skipped=True)
        if driver is None:
            lane.free.count_step(self, optimizer)


def has_optimizers(kind: type[torch.optim.Optimizer] = torch.optim.Optimizer) -> bool:
    """Whether the program has made one: torch then marks the `step` of its class."""
    return any(
        getattr(one.step, "hooked", False) or has_optimizers(one) for one in kind.__subclasses__()
    )


def end_stale_optimizers(lane: Lane, inner: int = 0) -> None:
    """Closes the scopes of steps that raised: torch calls no hook then.

    Those that run are on the stack; `inner` of them have no scope yet.
    """
    end_optimizers(lane, callers.running_optimizers() - inner)


def end_optimizers(lane: Lane, running: int) -> None:
    while len(lane.optimizers) > running:
        phase = lane.optimizers.pop()[1]
        span = None if phase is None else hot.open_phase(phase)
        if span is not None and not span.end:
            span.set(error="the step raised")
            hot.close(span)


def settled_in() -> hot.Span | None:
    """The span that has the settings of a loop whose epochs are somebody else's."""
    span = hot.innermost()
    while span.parent is not span and span.name not in ("epoch", "fit", "evaluation"):
        span = span.parent
    return None if span.parent is span else span


def put_settings(span: hot.Span, settings: dict[str, Any]) -> None:
    """Those of the first loader and model stay."""
    span.set(**(settings | (span.attrs or {})))


def open_above(current: Pass) -> hot.Span:
    """What its spans go under: what was open when it began, or the nearest that still is."""
    span = current.above
    while span.end and span.parent is not span:
        span = span.parent
    return span


def close_step(current: Pass, at: int) -> None:
    if current.step is not None:
        if current.kind is EVALUATION:  # an attack or a saliency map: its backward has no loss
            hot.losses.pop(current.step, None)
        hot.close(current.step, at)


def has_own_step(above: hot.Span) -> bool:
    """Whether the program has opened a step of its own in the body of the loop."""
    span = hot.innermost()
    while span is not above and span.parent is not span:
        if span.name in STEPS:
            return True
        span = span.parent
    return False


def can_wait(held: list[hot.Span]) -> bool:
    """Whether nothing but these was recorded meanwhile. What the program records, such as marks,
    belongs to the batch, which has to be open for that.
    """
    recorded = hot.given_out() - held[0].sequence + 1
    return recorded == len(held) < MAX_HELD


def fetches(spans: list[hot.Span]) -> int:
    return sum(one.name == "data_load" for one in spans)


def is_evaluation_in(driver: Pass, inner: Pass, *, is_evaluating: bool) -> bool:
    """Whether a pass that begins while another goes on evaluates, and does not fetch more for it.

    One more item for a step that has only begun is for that step, if it is fetched by hand.
    """
    if driver.is_evaluating or not (inner.is_for or inner.is_inside_step):
        return False
    return inner.is_evaluating or (is_evaluating and driver.kind is TRAINING)


def is_peek(driver: Pass, current: Pass) -> bool:
    """Whether the one item of a pass was only looked at, though it was the first to be fetched.

    Of two iterators that are asked by hand, the one that is asked on and on drives.
    """
    by_hand = not (driver.is_for or current.is_for) and driver.iterator() is not None
    return by_hand and driver.kind is TRAINING and driver.items == 1 and driver.has_stepped


def is_left_open(driver: Pass, inner: Pass) -> bool:
    """Whether a `for` inside a step that has trained may train more, or evaluate with a model that
    was left in train mode. Programs: `validation_in_train_mode`, `probe_in_step`.
    """
    is_inside = inner.is_for and inner.is_inside_step
    return is_inside and driver.kind is TRAINING and driver.has_stepped


def is_evaluation_left(driver: Pass, *, is_evaluating: bool) -> bool:
    """Whether an evaluation by hand is over, now that an item of another loader is trained with.

    Its second item shows that it is one: a teacher may run, for the training, on the first.
    """
    is_one = driver.kind is EVALUATION and driver.has_evaluated and driver.items > 1
    return is_one and not driver.is_for and not is_evaluating


def is_left(old: Pass, new: Pass) -> bool:
    """Whether nobody goes on with a pass, now that another iterator is asked for the first time."""
    if old.iterator() is None or old.is_over or (old.span is not None and old.span.end):
        return True  # also where its spans were ended for us, by a fork
    if old.is_round and not old.is_ahead and old.lane.has_worked:
        return True
    if old.is_evaluating and old.above.end:
        return True  # the scope that said so is over
    if old.is_for:
        # A `for` that was left by `break` has let go of its iterator, which others may hold: a
        # variable, or a loader that keeps its workers.
        return callers.references_to(old.iterator()) < old.references
    if old.kind is TRAINING and new.is_evaluating:
        return False
    return new.is_for and old.kind is not JOINED  # it was only looked at, by `next`


def is_in_eval_mode(lane: Lane) -> bool:
    model = None if lane.model is None else lane.model()
    return model is not None and not model.training


def is_told_to_evaluate(lane: Lane) -> bool:
    """Whether somebody else has opened a scope for it: a framework's hook, or the program."""
    own = [one.span for one in lane.passes]
    span = hot.innermost()
    while span.parent is not span:
        if span.name in EVALUATIONS and span not in own and not span.end:
            return span is not lane.free.evaluation
        span = span.parent
    return False


def goes_on(current: Pass) -> bool:
    """Whether the scope that it began in is open, or is a step that the next one has followed."""
    if current.is_round:
        return False
    above = current.above
    if not above.end:
        return True
    here = hot.innermost()
    if above.name in STEPS and here.name in STEPS and here.parent is above.parent:
        current.above = here
        return True
    return False


def length_of(iterator: Any) -> int | None:
    """How many items there are; -1: nobody knows, but there is an end to them."""
    if iterator._dataset_kind == _DatasetKind.Iterable:  # of which the iterator knows no length
        return -1 if hasattr(type(iterator._dataset), "__len__") else None
    try:
        return len(iterator)
    except TypeError:
        return None
