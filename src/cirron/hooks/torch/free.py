"""A training loop without a loader: its steps go from one optimizer step to the next.

    state          | field        | next
    nothing seen   |              | a forward with gradients, or a fetch by `next(iter(loader))`,
                   |              | begins the first step. Directly inside an epoch of the program,
                   |              | it opens step 0
    FIRST STEP     | `held_under` | spans wait until an optimizer has stepped
    ONE STEP DONE  | `_ended_ns`  | the second training shows that this is a loop: it opens the
                   |              | epoch, step 0 and step 1
    IN A STEP      | `epoch`      | an optimizer step ends the step, and the next one begins
    EPOCH DUE      | `_is_due`    | after `steps_per_epoch` steps, the next training opens an epoch

The spans in a step wait until something is trained in it, because what comes after the last
optimizer step is not part of a step. If the program itself has recorded something there, that step
is renamed to `rest`; otherwise it leaves no record. Marks between two steps belong to the step that
has ended, so that step is recorded only when the next one trains.

Runs on the user's threads.
"""

from __future__ import annotations

import ctypes
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from cirron.hooks import engine
from cirron.hooks.engine import EVALUATIONS, MAX_WAITING, STEPS
from cirron.record import hot

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterator

    from cirron.hooks.torch.passes import Lane

current_graph_task_id = torch._C._current_graph_task_id  # -1 outside of a backward


class FreeLoop:
    """The loop of one thread."""

    def __init__(self, lane: Lane) -> None:
        self.epoch: hot.Span | None = None  # the parent of the steps
        self._owns_epoch = False  # otherwise the program has opened it, or an epoch around it
        self.step: hot.Span | None = None
        self.evaluation: hot.Span | None = None
        self.held_under: hot.Span | None = None  # spans under this one wait
        # Versions of the weights at the last backward, in a program without optimizers.
        self.versions: tuple[Any, ...] | None = None
        self.losses: list[tuple[Any, int]] = []  # with their times, until the loop is known
        self._lane = lane
        self._loops = lane.loops
        self._waiting = engine.Waiting()
        self._stepped: set[int] = set()  # optimizers that have stepped since the last backward
        self._together = 1  # how many optimizers step right after one another
        self._index = 0  # of the next step
        self._ended_ns = 0  # ONE STEP DONE: when the optimizer step ended
        self._is_due = False  # EPOCH DUE
        self._is_step_over = False  # the next one begins once the program's scopes in it end
        self._last_forward_ns = 0  # when the last forward of the evaluation ended
        self._trained: set[weakref.ref[Any]] = set()  # models that the loop trains

    @property
    def is_open(self) -> bool:
        return bool(self.held_under or self.epoch)

    @property
    def own_epoch(self) -> hot.Span | None:
        return self.epoch if self._owns_epoch else None

    def before_forward(self, model: weakref.ref[Any], *, is_in_train: bool) -> None:
        """A model runs while no loader is in use."""
        self._end_by_hand()
        self._record_before()
        has_grad = torch.is_grad_enabled()
        if is_in_train:
            self.end_evaluation()
        if is_in_train and has_grad:
            self.saw_training(is_forward=True)
            self._trained.add(model)
            return
        is_evaluating = not (is_in_train or has_grad) and model in self._trained
        if is_evaluating:
            self._end_group()
        has_begun = self._advance() or self._ended_ns or self._is_due
        is_new = self.evaluation is None and not self._lane.is_in_scope(EVALUATIONS)
        if has_begun and is_evaluating and is_new:
            self.evaluation = hot.begin("evaluation", None, None, engine.Long)

    def saw_training(self, optimizer: int | None = None, *, is_forward: bool = False) -> None:
        """A forward with gradients, a backward, or the start of an optimizer step."""
        if self._stepped and optimizer is not None and optimizer not in self._stepped:
            return  # another optimizer ends the same step
        self._end_group()
        goes_on = self._advance()
        self._record_before()
        self.end_evaluation()
        if goes_on:
            if not is_forward:  # which may come after the last step
                self._release()
            return
        around = next((one for one in scopes() if one.name == "epoch"), None)
        is_others = isinstance(around, engine.Long) or (around and self._lane.passes)
        if is_others or not STEPS.isdisjoint(hot.open_names()) or current_graph_task_id() != -1:
            self._release()  # the steps are the program's, a framework's or those of a loader
        elif self._is_due or (around is not None and around is hot.innermost()):
            self._begin(around)
        elif self._ended_ns:
            self._begin_with_held(around)
        elif self.held_under is None:
            self._hold(hot.innermost())

    def close(self, span: hot.Span) -> None:
        """Closes a span of a hook, or lets it wait for its parent."""
        if self._can_wait(span):
            self._waiting.add(span)
            return
        hot.close(span)
        if self.evaluation is not None:
            self._last_forward_ns = span.end

    def take(self, loads: list[hot.Span]) -> None:
        """A fetch by `next(iter(loader))` belongs to the next step. Program: `next_iter`."""
        self._record_before()
        if loads and not self.is_open:
            self._hold(loads[0].parent)
        for load in loads:
            if self._can_wait(load):
                self._waiting.append(load)
            else:
                hot.release(load)

    def count_step(self, optimizer: int) -> None:
        """An optimizer has stepped."""
        if current_graph_task_id() != -1:  # inside a backward, on a thread of torch
            return
        self.versions = None
        self._lane.step = None
        self._stepped.add(optimizer)
        goes_on = self._advance()
        if self._loops.snapshots.is_watching:
            self._loops.snapshots.keep_gradients(is_last=goes_on and self._is_full())
        step: Any = self.step
        if not goes_on:
            self._ended_ns = hot.now()
        elif len(self._stepped) > self._together and step.before is not None:
            # It belongs to the step before. Program: `optimizers_at_times`.
            self._waiting.release(step.before)
            step.before.end = step.start = hot.now()
        elif not self._awaits_optimizers:
            self._is_step_over = True
            self._advance()

    def end_evaluation(self) -> None:
        """The evaluation has ended with its last forward."""
        span, self.evaluation = self.evaluation, None
        if span is not None:
            engine.end_measuring(span)
            if span.parent is self.held_under:
                hot.suspend(span, self._last_forward_ns)
                self._waiting.append(span)
            else:
                hot.close(span, self._last_forward_ns)

    def end(self, at: int = 0) -> None:
        """The loop is over: its epoch ends with the last step, or what follows that."""
        self._end_by_hand()
        self.end_evaluation()
        is_over = self._is_step_over or self._awaits_optimizers
        self._release(None if is_over else self.above_epoch)
        self._record_before()
        step = self.step
        if step is not None and not engine.end_if_used(step, "" if is_over else "rest", at):
            at = step.start
        self.step = self._lane.step = None
        self._end_epoch(at)
        self._ended_ns = 0
        self._is_due = self._is_step_over = False
        self._stepped.clear()
        if self._owns_epoch:
            self._trained.clear()

    @property
    def above_epoch(self) -> hot.Span | None:
        """The parent of the spans that are in no step."""
        return self.epoch.parent if self._owns_epoch and self.epoch is not None else self.epoch

    def forget(self) -> None:
        """A pass over a loader begins: a single step before it was not a loop."""
        if self.epoch is None:
            self.end_evaluation()
            self._release()
            self._ended_ns = 0
            self._stepped.clear()
            self.versions = None

    # -- inside -----------------------------------------------------------------------------

    def _end_by_hand(self) -> None:
        """Without an optimizer, a step ends if the weights changed after the backward.
        Programs: `full_batch`, `weights_through_data`.
        """
        before, self.versions = self.versions, None
        if before is not None and before != versions_of(self._lane, version_and_value):
            self.count_step(0)

    def _can_wait(self, span: hot.Span) -> bool:
        return span.parent is self.held_under and len(self._waiting) < MAX_WAITING

    def _end_group(self) -> None:
        """The optimizers that have stepped since the last backward end a step together."""
        if self._stepped:
            self._is_step_over = self._is_step_over or self._awaits_optimizers
            self._together = len(self._stepped)
            self._stepped.clear()

    @property
    def _awaits_optimizers(self) -> bool:
        """Whether more optimizers of the group are still to step."""
        return 0 < len(self._stepped) < self._together

    def _advance(self) -> bool:
        """Begins the next step if the open one is over. Returns whether a step is open."""
        if self.epoch is None:
            return False
        if self.epoch.end or self.epoch.parent.end:  # a fork has closed it, or its scope has ended
            self.end()
            return False
        if hot.innermost() is not self.step and self._loops.end_left(self._lane):
            return False
        if self._is_step_over and hot.innermost() is self.step:
            self._is_step_over = False
            self._release()
            if self._is_full():
                hot.close(self.step)
                self.step = None
                self._end_epoch()
                self._is_due = True
                return False
            step: Any = self.step
            hot.suspend(step)
            following: Any = hot.begin("step", self._index, None, engine.Tentative, step.end)
            following.before = step
            self._next_step(following)
        return True

    def _is_full(self) -> bool:
        return self._owns_epoch and self._index >= self._loops.steps_per_epoch

    def _record_before(self) -> None:
        """Records the step before the open one, which gets the marks from now on."""
        step: Any = self.step
        if step is not None:
            before, step.before = step.before, None
            if before in hot.opened:  # else a shutdown has recorded it
                hot.mark_losses(before)
                hot.release(before)

    def _next_step(self, step: hot.Span) -> None:
        self.step = step
        self._index += 1
        self._hold(step)

    def _begin(self, epoch: hot.Span | None) -> None:
        """Opens step 0, in an epoch of the program if one is given."""
        held = self._waiting if epoch is not None and self.held_under is epoch else None
        start = held[0].start if held else 0
        if not held:
            self._release()
        self._owns_epoch = epoch is None
        self.epoch = epoch or hot.begin("epoch", None, {"inferred": "steps"}, engine.Long)
        if self._owns_epoch:
            self._loops.name_epoch(self._lane, self.epoch)
        self._is_due = False
        self._index = 0
        step = hot.begin("step", 0, None, engine.Tentative, start)
        self._release(step)
        self._next_step(step)

    def _begin_with_held(self, around: hot.Span | None) -> None:
        """Opens the epoch and step 1, and records step 0, whose spans have waited."""
        above, held, ended_ns = self.held_under, self._waiting, self._ended_ns
        self._ended_ns = 0
        if above is not None and above.end:  # the program has a scope around each step
            self._release()
            self._hold(hot.innermost())
            return
        if above is None or not held or above not in scopes():
            self._begin(around)
            return
        epoch, attrs = above, {"inferred": "steps"}
        self._owns_epoch = around is None
        if self._owns_epoch:
            start = held[0].start
            epoch = hot.insert(above, "epoch", None, attrs, engine.Long, start=start)
            self._loops.name_epoch(self._lane, epoch)
        self.epoch = epoch
        first = [span for span in held if span.start < ended_ns]
        is_marked = hot.losses.get(above, ()) is None  # by the program
        losses: list[Any] = [] if is_marked else self.losses
        of_first = tuple(one for one in losses if one[1] < ended_ns)
        engine.insert_past(epoch, "step", 0, first, ended_ns, of_first)
        self.step = hot.insert(epoch, "step", 1, None, engine.Tentative, start=ended_ns)
        if len(of_first) < len(losses):
            hot.losses[self.step] = tuple(losses[len(of_first) :])
        self._release(self.step)  # those that are not part of the first step
        self._index = 2

    def _hold(self, above: hot.Span) -> None:
        """Lets spans under this one wait."""
        self.held_under = above
        if above.name not in STEPS:
            hot.losses.pop(above, None)  # the program's mark of another loss

    def _release(self, parent: hot.Span | None = None) -> None:
        """Records the waiting spans where they were made, or under another span."""
        self.held_under = None
        self._waiting.release(parent)
        self.losses.clear()

    def _end_epoch(self, at: int = 0) -> None:
        span, self.epoch = self.epoch, None
        if self._owns_epoch and span is not None and not span.end:
            self._loops.snapshots.take(span)
            engine.close_long(span, at)


def scopes(span: hot.Span | None = None) -> Iterator[hot.Span]:
    """A scope and those around it, innermost first; None: the innermost that is open."""
    span = span or hot.innermost()
    while span.parent is not span:
        yield span
        span = span.parent
    yield span  # the root


def versions_of(
    lane: Lane, version: Callable[[Any], Any] = attrgetter("_version")
) -> tuple[Any, ...]:
    """The versions of the last model's weights. Changes through `.data` do not count."""
    model = None if lane.model is None else lane.model()
    return () if model is None else (id(model), *map(version, model.parameters()))


def version_and_value(weight: Any) -> tuple[int, bytes]:
    """Also the first value, unless it is on a device, which would have to be waited for."""
    is_plain = weight.__class__ is torch.nn.Parameter and weight.layout is torch.strided
    if not (is_plain and weight.is_cpu) or weight.storage_offset():
        return weight._version, b""
    size = min(weight.untyped_storage().nbytes(), 4)  # 0: FSDP has freed it for now
    return weight._version, ctypes.string_at(weight.data_ptr(), size) if size else b""
