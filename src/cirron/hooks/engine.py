"""What all hooks share: calls inside spans, and the open spans of a training.

`around` calls a function inside a span. A `Tentative` span leaves no record if nothing is recorded
in it. `Wrapper` replaces functions of a framework.

`Training` holds the open spans of a framework that owns the loop: an epoch, a step, and asides
(evaluations, predictions, checkpoints, and a `fit` inside another one). A step opens before its
data is fetched, so that it includes the wait, and stays open while its values are logged. A step
that never runs leaves no record, or gets another name if something was recorded in it. An aside
ends the step before it.

Runs on the user's threads.
"""

from __future__ import annotations

import inspect
from _thread import _local, get_ident
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

from cirron import guard
from cirron.hooks.patch import ImportWatch, Patches
from cirron.record import hot, value
from cirron.scheduling import Used

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import TypeAlias

    from cirron.hooks import Snapshots

    Call: TypeAlias = partial[Any]  # of a function of a framework, with its arguments

STEPS = hot.STEPS
# Scopes that say that the program or a framework evaluates.
EVALUATIONS = frozenset(("evaluation", "prediction"))
# At most this many spans wait for a parent; further ones stay where they were made.
MAX_WAITING = 64
# What a long span has used is still measured after its end if that was late by less than 1/LATE.
LATE = 20
# Functions that end the loops which hooks have inferred on this thread. Called when a framework
# starts a training: the program has left those loops.
END_INFERRED: list[Callable[[], None]] = []


def around(
    span: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    end: Callable[[Any], None] = hot.close,
    fail: Callable[[Any, BaseException], None] = hot.fail,
) -> Any:
    """Calls a function, then ends the span, with the error if the function raises.

    `span`: the argument of `end` and `fail`; None: only the function is called.
    """
    try:
        result = function(*args, **(kwargs or {}))
    except BaseException as error:  # passes on, with the span closed
        if span is not None:
            fail(span, error)
        raise
    if span is not None:
        end(span)
    return result


class Tell(NamedTuple):
    """Functions to call before and after a method, or if it raises `StopIteration`. Their arguments
    are the result of `find` and the positional arguments. Faster than an `instead` that calls it.
    """

    before: Callable[..., Any] | None = None
    after: Callable[..., Any] | None = None
    stopped: Callable[..., Any] | None = None


class Wrapper:
    """A hook that replaces functions of a framework, until it is uninstalled."""

    name = ""
    what = ""  # the name under which the guard counts errors

    def __init__(self, settings: Any, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._patches = Patches()
        self._watch = ImportWatch()
        self._runs = Runs()
        self._is_on = False  # the program may keep our functions after they are uninstalled

    def install(self) -> None:
        self.uninstall()
        self._is_on = True
        self._replace()

    def uninstall(self) -> None:
        """Restores everything, and closes what this thread has open."""
        self._is_on = False
        self._watch.undo()
        self._patches.undo()
        with guard.quiet(self.what):
            for training in reversed(self._runs.open):
                training.end()

    def _replace(self) -> None:
        """Replaces the functions."""
        raise NotImplementedError

    def _wrap(
        self,
        owner: Any,
        name: str,
        instead: Any,
        find: Callable[[Any], Any] | None = None,
        original: Any = None,
    ) -> None:
        """Replaces a function: each call goes to `instead`, or runs between the two of a `Tell`.

        `find`: gets the first argument of the call; its result becomes the first argument of
        `instead`. If it is None, only the original function is called.
        """
        original = original or getattr(owner, name)

        @wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if not self._is_on:
                return original(*args, **kwargs)
            call = partial(original, *args, **kwargs)
            if find is None:
                return instead(call)
            found = self._tell(find, args[0])
            return call() if found is None else instead(found, call)

        @wraps(original)
        def told(*args: Any, **kwargs: Any) -> Any:
            # `_tell`, inlined: a call costs more than a microsecond between calls of native code.
            found = None
            if self._is_on:
                try:
                    found = find(args[0])  # type: ignore[misc]  # a `Tell` has one
                    if found is not None and instead.before is not None:
                        instead.before(found, *args)
                except Exception as error:  # noqa: BLE001  protects the training
                    guard.caught(self.what, error)
            try:
                result = original(*args, **kwargs)
            except StopIteration:
                if found is not None:
                    self._tell(instead.stopped, found, *args)
                raise
            if found is not None and instead.after is not None:
                self._tell(instead.after, found, *args)
            return result

        made: Any = told if isinstance(instead, Tell) else replaced
        made.cirron_original = original  # for cirron's own calls
        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        self._patches.set(owner, name, staticmethod(made) if is_static else made)

    def _tell(self, event: Callable[..., Any] | None, *args: Any) -> Any:
        """Calls code of a hook, unless the hooks were uninstalled."""
        if event is not None and self._is_on:
            try:
                return event(*args)
            except Exception as error:  # noqa: BLE001  protects the training
                guard.caught(self.what, error)
        return None


# -- spans that may be dropped -----------------------------------------------------------------


NUMBER: Any = vars(hot.Span)["sequence"]  # the slot
STEP_UNDER: Any = vars(hot.Step)["under"].fget


def read_number(step: Any) -> Any:
    if get_ident() == step.thread:  # the background thread reads it for the black box
        step.__class__ = step.when_used  # it has the same slots
    return NUMBER.__get__(step)


def read_under(step: Any) -> Any:
    if get_ident() != step.thread:  # its context is a copy; this step may never happen
        return step.parent.under
    return STEP_UNDER(step)


NOTICED: Any = property(read_number, NUMBER.__set__)
UNUSED: Any = property(read_under)


class Tentative(hot.Step):
    """A step in which nothing is recorded yet. The first record in it reads its number, which turns
    it into a plain step.
    """

    __slots__ = ()
    is_used = False
    when_used = hot.Step
    sequence, under = NOTICED, UNUSED


class Next(hot.Lone):
    """The same, and `hot.follow` reuses the object if no other span refers to it."""

    __slots__ = ()
    is_used = False
    when_used = hot.Lone
    when_held = Tentative
    sequence, under = NOTICED, UNUSED


def end_if_used(span: hot.Span, name: str = "", at: int = 0) -> bool:
    """Closes a span, with a new name if one is given. Drops it if nothing was recorded in it."""
    is_used = span.is_used or span.phase is not None
    is_used = is_used or any(one.parent is span for one in hot.opened.copy())
    if is_used:
        if name:
            span.name, span.index, span.attrs = name, None, None
        hot.close(span, at)
    else:
        hot.drop(span)
    return is_used


class Fetch(hot.OwnSpan):
    """The wait for an item. If none comes, it leaves a record only if something was recorded in it,
    such as a mark that a data set makes at its end.
    """

    __slots__ = ("noted",)
    noted: int  # its own number, once something is recorded in it

    @property
    def under(self) -> int:  # type: ignore[override]
        self.noted = self.sequence
        return self.sequence


def is_noted(fetch: hot.Span) -> bool:
    """Whether something was recorded in it. `fetch`: also a phase that has become a span."""
    places = (fetch, fetch.parent)
    is_open = any(one.parent is fetch for one in hot.opened.copy())
    return is_open or any(fetch.sequence == getattr(one, "noted", 0) for one in places)


class Waiting(list[hot.Span]):
    """Spans that have ended and wait for their parent."""

    def add(self, span: hot.Span) -> None:
        hot.suspend(span)
        self.append(span)

    def release(self, parent: hot.Span | None = None) -> None:
        """Records them under this parent, or where they were made if that place has ended."""
        for span in self:
            hot.release(span, None if span.parent.end else parent)
        self.clear()


def insert_past(
    above: hot.Span,
    name: str,
    index: int,
    inside: list[hot.Span],
    at: int,
    losses: tuple[tuple[Any, int], ...] = (),
) -> None:
    """Records a span that ended at time `at`, with the suspended spans inside it."""
    current = hot.leave_context()
    hot.enter_context(above)
    span = hot.begin(name, index, None, hot.Step, inside[0].start)
    if hot.device_clock is not None:
        hot.device_clock.drop(span)  # it began long ago
    for one in inside:
        hot.release(one, span)
    if losses:
        hot.losses[span] = losses
    hot.close(span, at)
    hot.enter_context(current)


def extend_step(span: hot.Span) -> None:
    """Lets a step last until the end of this span, even if its last work was earlier."""
    if isinstance(span.parent, hot.Step):
        span.parent.last_ns = span.end


# -- long spans ------------------------------------------------------------------------------


class Long(hot.OwnSpan):
    """An epoch or an evaluation: long enough to measure CPU time and memory."""

    __slots__ = ("used",)

    def __init__(self) -> None:
        self.used = Used()


def end_measuring(span: hot.Span) -> None:
    if not span.end and isinstance(span, Long):
        span.used.note(span)


def close_long(span: hot.Span, at: int = 0) -> None:
    """Closes it, now or at time `at`; then what was used until now is not measured if that is more
    than a few percent late.
    """
    if not at or (hot.now() - at) * LATE < at - span.start:
        end_measuring(span)
    hot.close(span, at)


def end_inferred() -> None:
    with guard.quiet("training hooks"):
        for end in END_INFERRED:
            end()


# -- a training ------------------------------------------------------------------------------


class Training:
    """The spans of one trainer."""

    step_name = "step"
    rest = "skipped"  # the name of a step that never ran, if something was recorded in it
    marks_loss = False  # whether the framework logs it by itself

    def __init__(self, snapshots: Snapshots | None = None) -> None:
        self.snapshots = snapshots
        self.epoch: hot.Span | None = None  # None also if the program has opened one itself
        self.step: hot.Span | None = None
        self.asides: list[hot.Span] = []
        self.is_inner = False  # inside another run
        self.is_in_epoch = False
        self.is_ending = False  # the epoch has all its steps, and its last values are logged
        self.makes_steps = False
        self._has_begun = False  # the step, not only the wait for its data
        self._is_done = False  # the step has done its work; its values may still be logged
        self._step_end_ns = 0  # the end of a step that is done, if a checkpoint follows
        self._latest: dict[str, Any] = {}  # values that were logged in the epoch

    @property
    def is_open(self) -> bool:
        return bool(self.epoch or self.step or self.asides)

    # -- epochs -----------------------------------------------------------------------------

    def begin_epoch(self, index: int, model: Any) -> None:
        self.end_epoch()
        names = hot.open_names()
        self.is_in_epoch = True
        self.makes_steps = self.is_inner or STEPS.isdisjoint(names)
        if self.makes_steps and not self.is_inner and "epoch" not in names:
            self.epoch = hot.begin("epoch", index, None, Long)
            if self.snapshots is not None:
                self.snapshots.expect(model)

    def take_snapshot(self, model: Any) -> None:
        """At the end of the epoch, or while it still has gradients. Only the first call counts."""
        if self.snapshots is not None and self.epoch is not None and not self.epoch.end:
            self.snapshots.take(self.epoch, model)

    def finish_epoch(self) -> None:
        """The epoch's last step has ended. Its last values may still be logged."""
        self.end_step()
        self.is_ending = True
        self.makes_steps = False

    def end_epoch(self) -> None:
        self.end_step()
        epoch, self.epoch = self.epoch, None
        latest, self._latest = self._latest, {}
        self.is_in_epoch = self.is_ending = self.makes_steps = False
        if epoch is not None and epoch.end:  # it failed, or a shutdown has closed it
            return
        hot.mark_all(epoch or hot.innermost(), latest, "summary")
        if epoch is not None:
            close_long(epoch)

    # -- steps ------------------------------------------------------------------------------

    @property
    def is_stepping(self) -> bool:
        """Whether a step has begun that is not done."""
        return self._has_begun and not self._is_done

    def await_step(self, index: int | None, **attrs: Any) -> None:
        """Opens the step that comes next, unless it is open. Ends a step that is done."""
        step, is_done = self.step, self._has_begun and self._is_done
        known = hot.Settled(attrs) if attrs else None
        if is_done and step is not None and step is hot.current() and not self._step_end_ns:
            self._has_begun = self._is_done = False
            step = self.step = hot.follow(step, index, known, Next)
        else:
            if self._is_done:
                self.end_step()
            if self.step is not None or not self.makes_steps:
                return
            step = self.step = hot.begin(self.step_name, index, known, Next)
        if self.marks_loss and hot.watches_losses:
            hot.losses[step] = None

    def begin_step(self, index: int, **attrs: Any) -> None:
        """The step begins."""
        if self.step is None or self._is_done:
            self.await_step(index, **attrs)
        self._has_begun = True

    def finish_step(self, **attrs: Any) -> None:
        """The step has done its work. What is logged from now on still belongs to it."""
        self._is_done = True
        if attrs and self.step is not None and self.step.attrs != attrs:
            self.step.set(**attrs)

    def skip_step(self) -> None:
        """The step is skipped, whether it has begun or not, unless it is done."""
        self._has_begun = self._is_done

    def end_step(self) -> None:
        step, self.step = self.step, None
        is_step = self._has_begun
        self._has_begun = self._is_done = False
        if step is not None:
            if is_step:
                hot.close(step, self._step_end_ns)
            else:
                end_if_used(step, self.rest)
        self._step_end_ns = 0

    # -- asides -----------------------------------------------------------------------------

    def begin_aside(self, name: str, **attrs: Any) -> hot.Span | None:
        """Opens an aside. Ends a step that is done or has not begun.

        Returns None if the same aside is already open.
        """
        for one in self.asides:
            if one.name == name and attrs.items() <= (one.attrs or {}).items():
                return None
        if name == "checkpoint" and self._is_done and self.step is not None:
            # The step ends here, but closes later: its values may be logged after the checkpoint.
            self._step_end_ns = self._step_end_ns or hot.now()
            hot.enter_context(self.step.parent)
        elif not self.is_stepping:
            self.end_step()
        span = hot.begin(name, None, attrs or None, Long)
        self.asides.append(span)
        return span

    def end_aside(self, span: hot.Span, error: BaseException | None = None) -> None:
        if span in self.asides:
            self.asides.remove(span)
        end_measuring(span)
        if error is not None:
            hot.fail(span, error)
        hot.close(span)
        if self._step_end_ns and not self.asides:
            hot.enter_context(self.step)

    def call_aside(self, call: Callable[[], Any], name: str, **attrs: Any) -> Any:
        """Calls a function inside an aside, unless the same aside is already open."""
        span = None
        with guard.quiet("training hooks"):
            span = self.begin_aside(name, **attrs)
        return around(span, call, end=self.end_aside, fail=self.end_aside)

    # -- values -----------------------------------------------------------------------------

    def log(
        self, values: Mapping[str, Any], but: Collection[str] = (), is_point: bool | None = None
    ) -> None:
        """Marks what the framework logs: points in a step, a summary in an aside.

        The last values of an epoch are its summary; those logged at its end are only that. Names in
        `but` are left out, also of the summary.
        """
        for name in but:
            self._latest.pop(name, None)
        scalars = scalars_of(values, but)
        if is_point is None:
            is_point = self.is_in_epoch and not self.is_ending and not self.asides
        if self.is_in_epoch and not (self.asides and is_point):
            self._latest.update(scalars)
            if not is_point and not self.asides:
                return
        # A summary is of the aside, not of its last batch, which may still be open.
        span = hot.innermost() if is_point or not self.asides else self.asides[-1]
        if span.name == "evaluation" and isinstance(span, Long) and span not in self.asides:
            span = span.parent  # the program has run the model by hand; torch's hook ends it late
        hot.mark_all(span, scalars, "point" if is_point else "summary")

    # -- ends -------------------------------------------------------------------------------

    def end(self, error: BaseException | None = None) -> None:
        """Closes what is open: the run is over, or has failed."""
        if error is not None and self.step is not None:
            hot.fail(self.step, error)
        self.end_step()
        while self.asides:
            self.end_aside(self.asides[-1], error)
        if error is not None and self.epoch is not None:
            end_measuring(self.epoch)
            hot.fail(self.epoch, error)
        self.end_epoch()


class Runs(_local):
    """The runs of a thread, innermost last."""

    def __init__(self) -> None:
        self.open: list[Any] = []  # trainings

    def call(self, training: Training, model: Any, call: Callable[[], Any]) -> Any:
        """Calls a function that trains, and closes what it leaves open."""
        if training in self.open:  # a subclass calls its parent's method
            return call()

        def end(training: Training, error: BaseException | None = None) -> None:
            with guard.quiet("training hooks"):
                self.open.remove(training)
                training.end(error)

        outer = self.open[-1] if self.open else None
        if outer is None:
            end_inferred()
        training.is_inner = outer is not None
        self.open.append(training)
        run = partial(around, training, call, end=end, fail=end)
        return run() if outer is None else outer.call_aside(run, "fit", model=type(model).__name__)


def scalars_of(values: Mapping[str, Any], but: Collection[str] = ()) -> dict[str, Any]:
    """The scalars among these values, except those named in `but`."""
    found = {}
    for name, given in values.items():
        if isinstance(name, str) and name not in but:
            try:  # not `scalar_of`: a framework traces nothing while it logs
                found[name] = value.capture(given, hot.device_clock, value.LOGGED)
            except value.NotAScalarError:
                continue
    return found


def scalar_of(given: Any) -> Any:
    """The present value, for `hot.mark`; None: not a scalar.

    It may be marked several times, but is read from its device once.
    """
    try:
        return value.capture(given, hot.device_clock)
    except value.NotAScalarError:
        return None
