"""What a trainer that tells by callbacks has open: an epoch, a step, and what is done beside them.

Shared by the hooks of frameworks that own the training loop. A step is open before its first batch
is fetched, which is before the framework says that it begins, so that the wait is inside it; one
that comes to nothing leaves no record, or is `skipped` if there are records under it. It stays open
while its values are logged. Evaluations and checkpoints are asides: a step that is done ends before
one. So is a run inside another one, a `fit`, which has steps and no epochs.

Runs on the user's threads.
"""

from __future__ import annotations

from _thread import _local
from typing import TYPE_CHECKING, Any

from cirron import guard
from cirron.hooks.engine import STEPS
from cirron.record import hot, value

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from cirron.hooks import Snapshots


class Runs(_local):
    """The runs that go on in a thread, innermost last."""

    def __init__(self) -> None:
        self.open: list[Training] = []


class Training:
    """The spans of one trainer."""

    def __init__(self, snapshots: Snapshots, *, marks_loss: bool = False) -> None:
        self._snapshots = snapshots
        self.marks_loss = marks_loss  # the framework logs it by itself
        self.epoch: hot.Span | None = None  # None also where the program has opened one itself
        self.step: hot.Span | None = None
        self.is_inner = False  # a part of another run
        self.is_in_epoch = False
        self.is_ending = False  # the epoch has its steps; its last values are still to come
        self.asides: list[tuple[hot.Span, dict[str, Any]]] = []  # that are open
        self._has_begun = False  # the step, not only the wait for its data
        self._is_done = False  # the step, but for what is logged of it
        self._makes_steps = False
        self._undone = 0  # spans that left no record, when the step was opened
        self._latest: dict[str, Any] = {}  # that the epoch has logged

    # -- epochs -----------------------------------------------------------------------------

    def begin_epoch(self, index: int, model: Any) -> None:
        self.end_epoch()
        names = hot.open_names()
        self.is_in_epoch = True
        self._makes_steps = self.is_inner or STEPS.isdisjoint(names)
        if not self.is_inner and "epoch" not in names:
            self.epoch = hot.begin("epoch", index)
            self._snapshots.expect(model)

    def take_snapshot(self, model: Any) -> None:
        """At the epoch's end, or when its last gradients are there. Only the first call counts."""
        if self.epoch is not None and not self.epoch.end:
            self._snapshots.take(self.epoch, model)

    def finish_epoch(self) -> None:
        """The epoch has all its steps."""
        self._end_step()
        self.is_ending = True

    def end_epoch(self) -> None:
        self._end_step()
        epoch, self.epoch = self.epoch, None
        latest, self._latest = self._latest, {}
        self.is_in_epoch = self.is_ending = False
        if epoch is not None and epoch.end:  # it has failed, or a shutdown has closed it
            return
        for name, logged in latest.items():
            hot.mark(name, logged, "summary")
        if epoch is not None:
            hot.close(epoch)

    # -- steps ------------------------------------------------------------------------------

    @property
    def is_stepping(self) -> bool:
        """Whether a step has begun that is not done."""
        return self._has_begun and not self._is_done

    def await_step(self, index: int, **attrs: Any) -> None:
        """Opens the step that comes next, unless it is open."""
        if self._is_done:
            self._end_step()
        if self.step is None and self._makes_steps and self.is_in_epoch and not self.is_ending:
            self._undone = hot.undone
            self.step = hot.begin("step", index, attrs or None)
            if self.marks_loss:
                hot.own_loss(self.step)

    def begin_step(self, index: int, **attrs: Any) -> None:
        """The step begins."""
        if self.step is None or self._is_done:
            self.await_step(index, **attrs)
        self._has_begun = True

    def finish_step(self) -> None:
        """The step has done its work; what is logged from now on is still of it."""
        self._is_done = True

    def skip_step(self) -> None:
        """The step will not come about, whether it has begun or not."""
        self._has_begun = False

    def _end_step(self) -> None:
        step, self.step = self.step, None
        is_step = self._has_begun
        self._has_begun = self._is_done = False
        if step is None:
            return
        # A record must not be under a span that leaves none.
        is_used = is_step or hot.given_out() - step.sequence > hot.undone - self._undone
        if not is_step:
            step.name, step.index, step.attrs = "skipped", None, None
        (hot.close if is_used else hot.drop)(step)

    # -- asides -----------------------------------------------------------------------------

    def begin_aside(self, name: str, **attrs: Any) -> hot.Span | None:
        """Opens an evaluation, say. It is no part of a step that is done, nor of one to come.

        None: the same one is open.
        """
        if any(one.name == name and given == attrs for one, given in self.asides):
            return None
        if self._is_done or not self._has_begun:
            self._end_step()
        span = hot.begin(name, None, dict(attrs) or None)
        self.asides.append((span, attrs))
        return span

    def end_aside(self, span: hot.Span, error: BaseException | None = None) -> None:
        if self.asides:
            self.asides.pop()
        if error is None:
            hot.close(span)
        else:
            hot.fail(span, error)

    # -- values -----------------------------------------------------------------------------

    def log(
        self, values: Mapping[str, Any], *, but: Collection[str] = (), is_point: bool | None = None
    ) -> None:
        """Marks what the framework logs: points of a step, and what an aside comes to.

        What an epoch has logged last is its summary; what comes at its end is nothing else. What is
        named in `but` is no value, and what was logged of it before does not sum up the epoch.
        """
        for name in but:
            self._latest.pop(name, None)
        scalars = {
            name: one
            for name, given in values.items()
            if name not in but and (one := scalar_of(given)) is not None
        }
        if is_point is None:
            is_point = self.is_in_epoch and not self.is_ending and not self.asides
        if self.is_in_epoch and not (self.asides and is_point):
            self._latest.update(scalars)
            if not is_point and not self.asides:
                return
        if is_point:
            for name, one in scalars.items():
                hot.mark(name, one)
            return
        inside = hot.leave_context()
        # Of the aside, not of its last batch, which may be open still.
        hot.enter_context(self.asides[-1][0] if self.asides else inside)
        try:
            for name, one in scalars.items():
                hot.mark(name, one, "summary")
        finally:
            hot.enter_context(inside)

    # -- ends -------------------------------------------------------------------------------

    def end(self, error: BaseException | None = None) -> None:
        """Closes what is open: the run is over, or has failed."""
        if error is not None:
            for span in (self.step, self.epoch):
                if span is not None:
                    hot.fail(span, error)
        self.end_epoch()
        self.asides.clear()


def in_run(
    runs: Runs, training: Training, model: Any, original: Any, *args: Any, **kwargs: Any
) -> Any:
    """Calls what trains, and closes what it leaves open."""
    if training in runs.open:  # a subclass calls its parent's
        return original(*args, **kwargs)
    outer, span, failure = (runs.open[-1] if runs.open else None), None, None
    with guard.quiet("training hooks"):
        if outer is not None:
            span = outer.begin_aside("fit", model=type(model).__name__)
    training.is_inner = outer is not None
    runs.open.append(training)
    try:
        return original(*args, **kwargs)
    except BaseException as error:  # passes on, with the spans closed
        failure = error
        raise
    finally:
        with guard.quiet("training hooks"):
            runs.open.remove(training)
            training.end(failure)
            if outer is not None and span is not None:
                outer.end_aside(span, failure)


def scalar_of(given: Any) -> Any:
    """What `hot.mark` takes for the value, as it is now; None: it is no scalar.

    It may be marked more than once, and is asked of its device but once.
    """
    if given.__class__ is float:
        return given
    try:
        return value.capture(given, hot.device_clock)
    except value.NotAScalarError:
        return None
