"""A training loop that has no loader: its steps go from one optimizer step to the next.

The first step is known for one when the second begins: until then our spans wait for a parent. From
then on a step is open all the time, and they wait until something trains in it: what comes after
the last optimizer step is in none. If the program itself has recorded something there, that is in
the `rest`. Epochs are so many steps, and say so.

Runs on the user's threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from cirron.hooks import engine
from cirron.hooks.engine import STEPS
from cirron.record import hot

if TYPE_CHECKING:
    import weakref

    from cirron.hooks.torch.loops import Lane, Loops

current_graph_task_id = torch._C._current_graph_task_id  # -1 outside of a backward

# Spans of the first step that wait; with more, they stay where they were made.
MAX_HELD = 64


class FreeLoop:
    """What is open of it in one thread."""

    def __init__(self, lane: Lane) -> None:
        self.epoch: hot.Span | None = None
        self.step: hot.Span | None = None
        self.evaluation: hot.Span | None = None
        self.is_holding = False
        self.is_by_hand = False  # a backward was made, and there is no optimizer to use it
        self.versions: tuple[int, ...] = ()  # of the weights, then
        self.losses: list[tuple[Any, int]] = []  # of the first step, with their times
        self._lane = lane
        self._above: hot.Span = hot.IDLE_ROOT  # what the first step was under
        self._held: list[hot.Span] = []
        self.steps = 0  # of optimizers
        self._stepped: set[int] = set()  # those that have, since something was trained
        self._together = 1  # how many do, one right after the other
        self._index = 0  # of the next step
        self._ended_ns = 0  # when the last optimizer step was over
        self._is_due = False  # an epoch, with the next training
        self._is_step_over = False  # but something that the program opened in it is still open
        self._last_forward_ns = 0  # when the last one of the evaluation was over
        self._trained: set[weakref.ref[Any]] = set()

    def before_forward(self, loops: Loops, model: weakref.ref[Any], *, is_in_train: bool) -> None:
        """A model runs, with no loader in use."""
        self._end_by_hand(loops)
        has_grad = torch.is_grad_enabled()
        if is_in_train and has_grad:
            self.saw_training(loops)
            self._trained.add(model)
            return
        is_trained = not is_in_train and not has_grad and model in self._trained
        has_begun = self._goes_on(loops) or self._ended_ns or self._is_due
        if has_begun and is_trained and self.evaluation is None:
            self.evaluation = engine.begin_long("evaluation")

    def saw_training(self, loops: Loops, optimizer: int | None = None) -> None:
        """A forward with gradients, a backward, or the step of an optimizer."""
        if self._stepped:
            if optimizer is not None and optimizer not in self._stepped:
                return  # one more for the same step
            self._is_step_over = self._is_step_over or self._is_waiting
            self._together = len(self._stepped)
            self._stepped.clear()
        goes_on = self._goes_on(loops)
        self.end_evaluation()
        if goes_on:
            self._release()
        elif hot.open_names() & {"epoch", *STEPS} or current_graph_task_id() != -1:
            self._release()  # somebody else has said what a step is
        elif self._is_due:
            self._begin(loops)
        elif self._ended_ns:
            self._begin_with_held(loops)
        elif not self.is_holding:
            self._hold(hot.innermost())
        elif self._above is not hot.innermost() and self._has_loads_only:
            self._release()  # the loop is in a scope that began after the fetch
            self._hold(hot.innermost())

    def close(self, span: hot.Span) -> None:
        """Ends a span of ours, which may have to wait until it is known what it is under."""
        if not self.is_holding or span.parent is not self._above or len(self._held) >= MAX_HELD:
            hot.close(span)
            if self.evaluation is not None:
                self._last_forward_ns = span.end
        else:
            hot.suspend(span)
            self._held.append(span)

    def take(self, loads: list[hot.Span]) -> None:
        """Fetches by `next(iter(loader))`: each is the next step's. Program: `next_iter`."""
        if loads and not self.is_holding and self.epoch is None:
            self._hold(loads[0].parent)
        for load in loads:
            if self.is_holding and load.parent is self._above and len(self._held) < MAX_HELD:
                self._held.append(load)
            else:
                hot.release(load)

    def count_step(self, loops: Loops, optimizer: int) -> None:
        """An optimizer has stepped. One inside a backward, on a thread of torch's, is none."""
        if current_graph_task_id() != -1:
            return
        self.steps += 1
        self.is_by_hand = False
        self._lane.step = None
        self._stepped.add(optimizer)
        if not self._goes_on(loops):
            self._ended_ns = hot.now()
        elif not self._is_waiting:
            if self._index >= loops.steps_per_epoch:
                loops.keep_gradients()
            self._is_step_over = True
            self._goes_on(loops)

    def end_evaluation(self) -> None:
        """The run of forwards is over, since the last of them."""
        span, self.evaluation = self.evaluation, None
        if span is not None:
            engine.end_measuring(span)
            if self.is_holding and span.parent is self._above:
                hot.suspend(span, self._last_forward_ns)
                self._held.append(span)
            else:
                hot.close(span, self._last_forward_ns)

    def end(self, loops: Loops) -> None:
        self._end_by_hand(loops)
        self.end_evaluation()
        step, self.step = self.step, None
        self._lane.step = None
        is_over = self._is_step_over or self._is_waiting
        self._release(None if self.epoch is None or is_over else self.epoch.parent)
        if step is not None:
            engine.end_if_used(step, "" if is_over else "rest")
        self._end_epoch(loops)
        self._ended_ns = 0
        self._is_due = self._is_step_over = False
        self._stepped.clear()
        self._trained.clear()

    def forget(self) -> None:
        """A loader is used: an optimizer step before it was none of a loop without."""
        if self.epoch is None:
            self.end_evaluation()
            self._release()
            self._ended_ns = 0
            self._stepped.clear()
            self.is_by_hand = False

    # -- inside -----------------------------------------------------------------------------

    def _end_by_hand(self, loops: Loops) -> None:
        """Without an optimizer, what follows a backward is the next step, if the weights were
        changed. Program: `full_batch`.
        """
        if self.is_by_hand:
            self.is_by_hand = False
            if versions_of(self._lane) != self.versions:
                self.count_step(loops, 0)

    @property
    def _has_loads_only(self) -> bool:
        return bool(self._held) and all(one.name == "data_load" for one in self._held)

    @property
    def _is_waiting(self) -> bool:
        """Whether some optimizers have stepped, and others of the same step are still to."""
        return 0 < len(self._stepped) < self._together

    def _goes_on(self, loops: Loops) -> bool:
        """Whether a step is open; the next one begins here if the last is over."""
        if self.epoch is None:
            return False
        if self.epoch.end or self.epoch.parent.end:  # by a fork, or with the scope around it
            self.end(loops)
            return False
        if self._is_step_over and hot.innermost() is self.step:
            self._is_step_over = False
            self._release()
            if self._index >= loops.steps_per_epoch:
                hot.close(self.step)
                self.step = None
                self._end_epoch(loops)
                self._is_due = True
                return False
            self._next_step(hot.follow(self.step, self._index))
        return True

    def _next_step(self, step: hot.Span) -> None:
        self.step = step
        self._index += 1
        self._hold(step)

    def _begin(self, loops: Loops) -> None:
        self._release()
        self.epoch = engine.begin_long("epoch", None, {"inferred": "steps"})
        loops.name_epoch(self._lane, self.epoch)
        self._is_due = False
        self._index = 0
        self._next_step(hot.begin("step", 0, None, engine.Tentative))

    def _begin_with_held(self, loops: Loops) -> None:
        """The second step shows that there is a loop, of which the first has been seen."""
        above, held, ended_ns = self._above, self._held, self._ended_ns
        self._ended_ns = 0
        if above.end:  # the program has a scope of its own for each step
            self._release()
            self._hold(hot.innermost())
            return
        if not held or not is_under(hot.innermost(), above):
            self._begin(loops)
            return
        self._held = []
        start = held[0].start
        attrs = {"inferred": "steps"}
        epoch = self.epoch = hot.insert(above, "epoch", None, attrs, engine.Long, start=start)
        engine.begin_measuring(epoch)
        loops.name_epoch(self._lane, epoch)
        first = [span for span in held if span.start < ended_ns]
        engine.insert_past(epoch, "step", 0, first, ended_ns, tuple(self.losses))
        self.losses.clear()
        self.step = hot.insert(epoch, "step", 1, None, engine.Tentative, start=ended_ns)
        for span in held:
            hot.release(span, self.step)  # the others
        self._index = 2

    def _hold(self, above: hot.Span) -> None:
        """Has spans that are made under this one wait."""
        self.is_holding = True
        self._above = above

    def _release(self, parent: hot.Span | None = None) -> None:
        """What waits stays where it was made, or goes under another span."""
        self.is_holding = False
        for span in self._held:
            hot.release(span, parent)
        self._held = []
        self.losses.clear()

    def _end_epoch(self, loops: Loops) -> None:
        span, self.epoch = self.epoch, None
        if span is not None and not span.end:
            loops.on_epoch_end(span)
            engine.close_long(span)


def is_under(span: hot.Span, above: hot.Span) -> bool:
    while span is not above and span.parent is not span:
        span = span.parent
    return span is above


def versions_of(lane: Lane) -> tuple[int, ...]:
    """What differs once the weights of the last model were changed; not by way of `.data`."""
    model = None if lane.model is None else lane.model()
    return () if model is None else (id(model), *(one._version for one in model.parameters()))
