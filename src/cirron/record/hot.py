"""The hot path: `scope`, `mark`, `epochs`, `batches`. Runs on the user's thread.

The public names are these functions themselves. Each does only what must be done immediately, and
leaves the rest (ids as text, wall time, encoding) to the background thread:

- An open span is an object in `opened`, where the background thread finds it. When it closes, it
  leaves a tuple in the ring: (sequence, parent's sequence, name, index, attrs, start, end, thread).
  A mark leaves (sequence, span's sequence, name, value, kind, attrs, time). The garbage collector
  stops tracking tuples of plain values, so a backlog costs it nothing.
- A span's marks come before it in the ring, because they were made before it closed.
- The innermost open span is in a ContextVar, separately for each thread and asyncio task. A context
  without one starts under `root`, the session's span.

State is in module globals, because reading one is the cheapest operation in Python. `attach`, which
`session/` and `testing.py` call, replaces all of them. Hooks change some through
`use_device_clock`, `keep_names`, `watch_losses` and `tell_epoch_ends`.
"""

from __future__ import annotations

import itertools
import operator
import os
import sys
from _thread import _local, get_ident
from collections import deque
from contextvars import ContextVar, Token

from cirron import errors
from cirron.record import clock, value
from cirron.record.attrs import MAX_FEW, MAX_KEY, describe_error, preview, settle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Iterator
    from types import FrameType, TracebackType
    from typing import Any, Protocol, TypeAlias, TypeVar

    T = TypeVar("T")
    F = TypeVar("F", bound=Callable[..., Any])
    Attrs: TypeAlias = dict[str, Any] | None
    Closed: TypeAlias = tuple[int, int, str, int | None, Attrs, int, int, int]
    Mark: TypeAlias = tuple[int, int, str, Any, str, Attrs, int]
    Record: TypeAlias = Closed | Mark
    Phase: TypeAlias = tuple[int, str, "Settled | None", int]  # number, name, attrs, start

    class Measure(Protocol):
        def note(self, span: Span) -> None:
            """Adds what was used since its creation to the attributes."""

    class DeviceClock(Protocol):
        """Measures what a device does during a span. Its methods never block or raise."""

        def start(self, span: Span) -> None:
            """Starts measuring, unless this span is not measured."""

        def stop(self, span: Span) -> None:
            """Adds the measurements to the attributes, as `value.Deferred` if not known yet."""

        def drop(self, span: Span) -> None:
            """Forgets a span that leaves no record."""

        def settle(self) -> None:
            """Makes sure that all values become known even if nothing else is recorded."""

        def copy(self, scalar: Any) -> value.Deferred | None:
            """The current value of a scalar, if it is on this device."""

        def keep(self, scalar: Any, now_ns: int) -> value.Deferred | None:
            """The same, without a copy, for a scalar that will not change."""


MAX_DEPTH = 64
# Measuring an epoch takes about 20 us, so it is done if it and the one before are this long.
MEASURED_NS = 10_000_000
MAX_NAME = 1_000  # characters; the rest of a longer name is cut off
MAX_MARKED = 1_000  # mark names that a span remembers
LOOPS = {"epoch": "epochs", "batch": "batches"}
STEPS = frozenset(("step", "batch"))
MEASURED = (0, "", None, 0)  # in `within`, of a phase that is a span because a device measures it

# Size of the ring without a session; a session has a larger one. A full ring drops its oldest
# records, and the collector counts them: sequence numbers used, minus records seen.
IDLE_RING = 100_000

_current: ContextVar[Span | None] = ContextVar("cirron_span", default=None)
_get = _current.get
_set = _current.set
_reset = _current.reset
current = _get  # the innermost span of this context, which may have ended; None: the root

ring: deque[Record] = deque(maxlen=IDLE_RING)
append: Callable[[Record], None] = ring.append
opened: set[Span] = set()
sequence = itertools.count(1)
now: Callable[[], int] = clock.now
root: Span  # set below
off = False
too_deep = 0
undone = 0  # spans that used a number and left no record
names_cut = 0  # names that were longer than MAX_NAME
at_epoch_end: Callable[[Span], None] | None = None  # called while the epoch is still open
measure: Callable[[], Measure] | None = None  # starts measuring what an epoch of `epochs` uses
device_clock: DeviceClock | None = None
# Losses seen by hooks in open steps, with their times; None: the program or its framework marks the
# loss of the step itself.
losses: dict[Span, tuple[tuple[Any, int], ...] | None] = {}
watches_losses = False
keeps_names = False  # whether spans remember the names of their marks
hears_marks = False  # watches_losses or keeps_names
span_type: type[Span]  # the class that `scope` creates; set below


class ThisThread(_local):
    """The thread's ident, as one object that all spans of the thread share."""

    def __init__(self) -> None:
        self.ident = get_ident()
        self.is_fetching = False


_this_thread = ThisThread()


class Span:
    """A named period of time; returned by `ci.scope`."""

    __slots__ = (
        "attrs",
        "depth",
        "device",
        "end",
        "index",
        "marked",
        "name",
        "parent",
        "sequence",
        "start",
        "thread",
        "token",
    )
    name: str
    index: int | None
    attrs: dict[str, Any] | None
    parent: Span  # of the root: itself
    depth: int
    thread: int
    sequence: int
    under: int  # the parent number of records made in it: its own sequence
    start: int  # monotonic ns
    end: int  # monotonic ns; 0 while the span is open, -1 before it is entered
    token: Token[Span | None]
    device: Any  # set by the device clock
    # The names of its marks, each with the logger that it came from, if any; not set before the
    # first mark while `keeps_names`.
    marked: dict[str, str | None]
    has_phases = False  # only steps have them; `begin` sets their fields
    phase: Phase | None = None  # the current phase
    phase_kind: type[OwnSpan] | None = None  # the class of the phase's span
    before: Span | None = None  # of a step: the one that is done, until this one is used
    is_used = True  # False: nothing is recorded in it so far, and it may never happen

    def __enter__(self) -> Span:
        if self.end != -1:
            raise errors.ScopeReusedError(
                f"the scope {self.name!r} was already entered; call ci.scope() again for each use"
            )
        parent = _get()
        if parent is None:
            parent = root
        elif parent.end:
            parent = _open_ancestor(parent)
        self.parent = parent
        depth = self.depth = parent.depth + 1
        if depth > MAX_DEPTH:
            return _drop_deep(self)
        self.thread = _this_thread.ident
        self.sequence = next(sequence)
        # It is open only once it is complete: a signal handler may record at any of these calls.
        self.token = _set(self)
        self.start = now()
        self.end = 0
        opened.add(self)  # last: now other threads can see it
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.end:  # dropped, or recorded by a shutdown
            _leave(self)
            return
        if kind is not None:
            _note_error(self, kind, error)
        if losses and self in losses:
            mark_losses(self)
        self.end = end = now()
        attrs = self.attrs
        if attrs is not None:
            # `settle` for short scalars, inlined: its call would cost as much as an attribute.
            for key in attrs:
                if type(key) is str and len(key) <= MAX_KEY:
                    item = attrs[key]
                    plain = type(item)
                    if plain is str:
                        if len(item) <= MAX_KEY:
                            continue
                    elif plain is int or plain is float or plain is bool or item is None:
                        continue
                attrs = settle(attrs)
                break
            else:
                if len(attrs) > MAX_FEW:
                    attrs = settle(attrs)
        if _get() is self:
            try:
                _reset(self.token)
            except ValueError:  # entered in a context that this one is a copy of
                _leave(self)
        else:
            _leave(self)
        # `record_of`, inlined: the call would double the cost of the tuple.
        append(
            (
                self.sequence,
                self.parent.under,
                self.name,
                self.index,
                attrs,
                self.start,
                end,
                self.thread,
            )
        )
        opened.discard(self)  # last: if interrupted before, the span is recorded twice, not lost

    def __call__(self, function: F) -> F:
        """Uses the scope as a decorator: each call of the function gets its own span."""
        from cirron.record.wrap import in_scope

        if not callable(function):
            raise errors.InputError(f"a scope decorates functions; got {function!r}")
        attrs = self.attrs or {}
        wrapped: F = in_scope(function, lambda: scope(self.name, self.index, **attrs))
        return wrapped

    def set(self, **attrs: Any) -> None:
        """Adds attributes while the scope is open."""
        before = self.attrs
        self.attrs = {**before, **attrs} if isinstance(before, dict) else attrs

    @property
    def id(self) -> str:
        """The id of this span in all records, or "" if it has none."""
        return clock.ids.hex(self.sequence) if self.end != -1 and self.sequence else ""

    def __repr__(self) -> str:
        state = "not entered" if self.end == -1 else "closed" if self.end else "open"
        index = "" if self.index is None else f"[{self.index}]"
        return f"<cirron scope {self.name}{index}, {state}>"


Span.under = Span.sequence  # type: ignore[misc]  # an alias of the slot


class DeviceSpan(Span):
    """A scope while there is a device clock; other programs do not pay for the check."""

    __slots__ = ()

    def __enter__(self) -> Span:
        Span.__enter__(self)
        if device_clock is not None and not self.end:
            device_clock.start(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if device_clock is not None and not self.end:
            device_clock.stop(self)
        Span.__exit__(self, kind, error, trace)


span_type = Span


class OwnSpan(Span):
    """A span that a hook or one of cirron's loops opened, not `ci.scope`."""

    __slots__ = ()


class Step(OwnSpan):
    """A step of a loop, which can be in a phase (`within`).

    A phase becomes a span object only when needed: between calls of native code the caches are
    cold, and making a span current and `opened` was most of the cost of a phase.
    """

    __slots__ = ("before", "last_ns", "noted", "phase", "phase_kind")
    last_ns: int  # the end of a span in it that may follow its last work; not always set
    noted: int  # the number of its last phase in which something was recorded; not always set
    has_phases = True

    @property
    def under(self) -> int:  # type: ignore[override]
        """The number of the phase, for records of the step's own thread."""
        phase = self.phase
        if phase is None or self.thread != get_ident():
            return self.sequence
        self.noted = phase[0]
        return phase[0]


DEPTH: Any = vars(Span)["depth"]  # the slot


def _read_depth(step: Any) -> Any:
    step.__class__ = step.when_held  # it has the same slots
    return DEPTH.__get__(step)


class Lone(Step):
    """A step that no other span refers to: `follow` reuses the object for the next step.

    A span that is opened in it reads its depth, which turns it into a plain step.
    """

    __slots__ = ()
    when_held: type[Step] = Step
    depth: int = property(_read_depth, DEPTH.__set__)  # type: ignore[assignment]


class Settled(dict[str, "Any"]):
    """Attributes from a hook: plain values that never change, so spans may share the dict."""

    __slots__ = ()


class NullSpan:
    """What `ci.scope` returns while profiling is off: accepts everything, records nothing."""

    __slots__ = ()
    id = ""
    name = ""
    index = None
    attrs = None

    __enter__: Callable[[], NullSpan]

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        pass

    def __call__(self, function: F) -> F:
        return function

    def set(self, **attrs: Any) -> None:
        pass

    def __repr__(self) -> str:
        return "<cirron scope, profiling is off>"


NULL_SPAN = NullSpan()
# Entering returns the instance through a C function, 40 ns faster than a Python method: "off" may
# cost at most half as much as a bare context manager.
NullSpan.__enter__ = itertools.repeat(NULL_SPAN).__next__


def scope(name: str, index: int | None = None, **attrs: Any) -> Span:
    """Opens a span around a block, or around each call of a decorated function.

    >>> with ci.scope("postprocess", variant="beam-search"):
    ...     output = beam_search(logits)
    """
    if off:
        return NULL_SPAN  # type: ignore[return-value]  # same methods, no records
    if name.__class__ is not str or len(name) > MAX_NAME:
        name = _as_name("ci.scope", name)
    if index is not None and index.__class__ is not int:
        index = _as_index(index)
    span = span_type()
    span.name = name
    span.index = index
    span.attrs = attrs or None
    span.end = -1
    return span


def mark(name: str, value: Any, kind: str = "point", **attrs: Any) -> None:
    """Attaches a value to the innermost open scope.

    `value` is a float, int, bool or str, or a scalar with `.item()`; a value on a device is not
    waited for. `kind` is "point" for a value of a series, "summary" for a final value of the scope.

    >>> ci.mark("loss", loss.item())
    """
    if off:
        return
    if name.__class__ is not str or len(name) > MAX_NAME:
        name = _as_name("ci.mark", name)
    if kind != "point" and kind != "summary":
        raise errors.one_of("kind", kind, ("point", "summary"))
    plain = type(value)
    if plain is not float and plain is not int:
        value = _capture(name, value)
    span = _get()
    if span is None:
        span = root
    elif span.end:
        span = _open_ancestor(span)
    if hears_marks:
        span = _hear(span, (name,), kind)
    append((next(sequence), span.under, name, value, kind, settle(attrs) if attrs else None, now()))


def mark_all(span: Span, scalars: dict[str, Any], kind: str) -> None:
    """`mark` for hooks: scalars that were captured before, on a span or the nearest open one."""
    if off or not scalars:
        return
    if span.end:
        span = _open_ancestor(span)
    if hears_marks:
        span = _hear(span, scalars, kind)
    under = span.under
    for name, scalar in scalars.items():
        if name.__class__ is not str or len(name) > MAX_NAME:
            name = _as_name("ci.mark", name)
        append((next(sequence), under, name, scalar, kind, None, now()))


def epochs(iterable: Iterable[T]) -> Iterator[T]:
    """Yields the items, each inside an `epoch` scope numbered from 0.

    >>> for epoch in ci.epochs(range(20)):
    ...     train_one_epoch(epoch)
    """
    return Loop("epoch", iterable)


def batches(iterable: Iterable[T]) -> Iterator[T]:
    """Yields the items, each inside a `batch` scope numbered from 0.

    With a torch DataLoader, the attribute `data_load_ns` is the time spent waiting for the batch.

    >>> for batch in ci.batches(loader):
    ...     loss = train_step(batch)
    """
    return Loop("batch", iterable, timed=_is_data_loader(iterable))


class Loop:
    """The iterator behind `epochs` and `batches`; has a length if its iterable has one.

    A `for` loop gets a generator, which is faster than a `__next__` in Python. Only the loop holds
    it, so leaving the loop early closes it and its scope immediately, even if this object lives on,
    for example in a progress bar. The remaining items go to the next loop.
    """

    __slots__ = ("_items", "_iterable", "_name", "_stepped", "_timed")

    def __init__(self, name: str, iterable: Iterable[Any], *, timed: bool = False) -> None:
        self._name = name
        self._iterable = iterable
        try:
            items = iter(iterable)
        except TypeError:
            if hasattr(type(iterable), "__iter__"):
                raise  # an error inside its `__iter__`
            raise errors.not_iterable(f"ci.{LOOPS[name]}", iterable) from None
        self._items = enumerate(_fetch(items) if timed else items)
        self._timed = timed
        self._stepped: Generator[Any, None, None] | None = None  # used by `next()`

    def __iter__(self) -> Iterator[Any]:
        if self._stepped is not None:
            self._stepped.close()
            self._stepped = None
        return _spans(self._name, self._items, self._timed)

    def __next__(self) -> Any:
        if self._stepped is None:
            self._stepped = _spans(self._name, self._items, self._timed)
        return next(self._stepped)

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]  # raises TypeError if it has none

    def __bool__(self) -> bool:
        return True  # like any iterator, even without a length


def _spans(name: str, items: Iterator[tuple[int, T]], timed: bool) -> Generator[T, None, None]:
    # `Span.__enter__` and `Span.__exit__`, inlined: each call is a tenth of an iteration.
    waiting_since = now()
    is_epoch = is_long = name == "epoch"
    for index, item in items:
        if off:
            yield item
            continue
        span = OwnSpan()
        span.name = name
        span.index = index
        span.attrs = {"data_load_ns": now() - waiting_since} if timed else None
        parent = _get()
        if parent is None:
            parent = root
        elif parent.end:
            parent = _open_ancestor(parent)
        span.parent = parent
        depth = span.depth = parent.depth + 1
        if depth > MAX_DEPTH:
            _drop_deep(span)
            yield item
            continue
        span.thread = _this_thread.ident
        span.sequence = number = next(sequence)
        span.end = -1
        span.token = _set(span)
        start = span.start = now()
        span.end = 0
        opened.add(span)
        if device_clock is not None:
            device_clock.start(span)
        used = measure() if is_long and measure is not None else None
        try:
            yield item
        finally:
            if is_epoch and at_epoch_end is not None and not span.end:
                at_epoch_end(span)
            if used is not None and now() - start >= MEASURED_NS and not span.end:
                used.note(span)
            if losses and span in losses:
                mark_losses(span)
            if device_clock is not None and not span.end:
                device_clock.stop(span)
            end = now()
            if _get() is span:
                try:
                    _reset(span.token)
                except ValueError:
                    _leave(span)
            else:
                _leave(span)
            if not span.end:  # else a shutdown has recorded it
                span.end = end
                above, thread = span.parent.under, span.thread
                append((number, above, name, index, span.attrs, start, end, thread))
                opened.discard(span)
        waiting_since = end
        is_long = is_epoch and end - start >= MEASURED_NS


def _fetch(items: Iterator[T]) -> Iterator[T]:
    """The items of a DataLoader; `is_fetching` is set while `ci.batches` waits for one."""
    thread = _this_thread
    while True:
        thread.is_fetching = True
        try:
            item = next(items)
        except StopIteration:
            return
        finally:
            thread.is_fetching = False
        yield item


def _is_data_loader(iterable: object) -> bool:
    # A program with a DataLoader has imported this module; others should not have to.
    module = sys.modules.get("torch.utils.data")
    loader = getattr(module, "DataLoader", None)
    return loader is not None and isinstance(iterable, loader)


def _as_name(where: str, name: Any) -> str:
    global names_cut
    if not issubclass(type(name), str):
        raise errors.not_a_name(where, name)
    plain = str.__str__(name)  # the encoder does not know subclasses (numpy.str_, an enum)
    if len(plain) > MAX_NAME:
        names_cut += 1
        plain = plain[:MAX_NAME]
    return plain


def _as_index(index: Any) -> int:
    try:
        return operator.index(index)
    except TypeError:
        raise errors.not_an_index(index) from None


def _capture(name: str, given: Any) -> Any:
    try:
        return value.capture(given, device_clock)
    except value.NotAScalarError:
        raise errors.not_a_value(name, given) from None


def _hear(span: Span, names: Collection[str], kind: str) -> Span:
    """Notes the names of marks; returns the span that they belong to.

    Between two steps of a loop without a loader, a point is of the step that is done, and a summary
    of what is around the steps.
    """
    before = span.before
    if before is not None and not span.is_used:
        span = before if kind == "point" else before.parent
    if watches_losses and "loss" in names and losses.get(span, ()) is not None:
        own_loss(span)
    if keeps_names:
        try:
            marked = span.marked
        except AttributeError:
            marked = span.marked = {}
        for name in names:
            if len(marked) < MAX_MARKED:
                marked[name] = None
    return span


def _open_ancestor(span: Span) -> Span:
    """The nearest open ancestor: a child never begins after the end of its parent."""
    while span.end and span.parent is not span:
        span = span.parent
    return root if span.end or span is IDLE_ROOT else span


def _leave(span: Span) -> None:
    """Closes out of order: if `span` is an ancestor of the current one, its parent becomes current.

    Otherwise this context never entered the span, for example because a generator is closed
    elsewhere, and its current span does not change.
    """
    current = _get()
    while current is not None and current is not span:
        current = None if current.parent is current else current.parent
    if current is span:
        _set(span.parent)


def _note_error(span: Span, kind: type[BaseException], error: BaseException | None) -> None:
    if kind is GeneratorExit:  # how a generator is closed, not a failure
        return
    span.set(error=describe_error(kind, error, value.MAX_TEXT_BYTES))


def _drop_deep(span: Span) -> Span:
    """Drops a span that is too deep: it never becomes current, and closing it does nothing."""
    global too_deep
    too_deep += 1
    span.sequence = 0
    span.end = 1
    if too_deep == 1:
        from cirron import guard

        guard.warn(
            "scope %r is nested deeper than %d levels: it was dropped, as all deeper ones will be",
            span.name,
            MAX_DEPTH,
        )
    return span


class State:
    """Where records go and where time comes from: everything that `attach` replaces."""

    def __init__(
        self,
        ring: deque[Record],
        *,
        opened: set[Span] | None = None,
        root: Span | None = None,
        off: bool = False,
        now: Callable[[], int] = clock.now,
        sequence: itertools.count[int] | None = None,
        at_epoch_end: Callable[[Span], None] | None = None,
        measure: Callable[[], Measure] | None = None,
    ) -> None:
        self.ring = ring
        self.append: Callable[[Record], None] = ring.append
        self.opened = set() if opened is None else opened
        self.root = IDLE_ROOT if root is None else root
        self.off = off
        self.now = now
        self.sequence = globals()["sequence"] if sequence is None else sequence
        self.undone = undone if sequence is None else 0  # belongs to the sequence
        self.at_epoch_end = at_epoch_end
        self.measure = measure

    def replaced(self, **changes: Any) -> State:
        other = State(self.ring)
        vars(other).update(vars(self), **changes)
        return other


def attach(state: State) -> State:
    """Replaces the state of the hot path in one step; returns the previous one."""
    module = globals()
    old = State(ring)
    vars(old).update((name, module[name]) for name in vars(state))
    module.update(vars(state))
    return old


def tell_epoch_ends(call: Callable[[Span], None]) -> None:
    """From now on, calls `call` before the end of each epoch of `ci.epochs`."""
    global at_epoch_end
    at_epoch_end = call


def use_device_clock(clock: DeviceClock | None) -> None:
    """From now on, measures spans with this clock too."""
    global device_clock, span_type
    device_clock = clock
    span_type = Span if clock is None else DeviceSpan


def keep_names(is_on: bool) -> None:
    """Sets whether spans remember the names of their marks."""
    global keeps_names, hears_marks
    keeps_names = is_on
    hears_marks = is_on or watches_losses


def begin(
    name: str,
    index: int | None = None,
    attrs: Attrs = None,
    kind: type[OwnSpan] = OwnSpan,
    at: int = 0,
) -> Span:
    """`scope(...).__enter__()` in one call, for loops and hooks, now or at time `at`.

    A call is a tenth of an iteration, and several times as much between calls of native code, when
    the CPU caches are cold.
    """
    span = kind()
    if kind.has_phases:  # not in an `__init__`, whose call would take as long as all of this
        span.phase = span.phase_kind = span.before = span.device = None  # type: ignore[misc]
    span.name = name
    span.index = index
    span.attrs = attrs
    parent = _get()
    if parent is None:
        parent = root
    elif parent.end:
        parent = _open_ancestor(parent)
    span.parent = parent
    depth = span.depth = parent.depth + 1
    if depth > MAX_DEPTH:
        return _drop_deep(span)
    span.thread = _this_thread.ident
    span.sequence = next(sequence)
    span.end = -1
    span.token = _set(span)
    span.start = at or now()
    span.end = 0
    opened.add(span)
    # The phases of a step are measured only if the step is.
    if device_clock is not None and (parent.name not in STEPS or getattr(parent, "device", None)):
        device_clock.start(span)
    return span


def close(span: Span, at: int = 0) -> None:
    """Ends a span that `begin` opened, now or at time `at`, or when its parent ended."""
    if span.end:  # dropped, or recorded by a shutdown
        _leave(span)
        return
    if span in losses:  # `mark_losses`, inlined
        for loss, made_at in losses.pop(span) or ():
            append((next(sequence), span.sequence, "loss", loss, "point", None, made_at))
    if device_clock is not None and getattr(span, "device", None) is not None:
        device_clock.stop(span)
    parent = span.parent
    span.end = end = parent.end or at or now()
    attrs = span.attrs
    if attrs.__class__ is dict:
        attrs = settle(attrs)
    if span.phase is not None:
        _leave_phase(span)
    if _get() is span:
        try:
            _reset(span.token)
        except ValueError:
            _leave(span)
    else:
        _leave(span)
    append(
        (span.sequence, parent.under, span.name, span.index, attrs, span.start, end, span.thread)
    )
    opened.discard(span)


def fail(span: Span, error: BaseException, end: Callable[[Span], None] = close) -> None:
    if not span.end:
        _note_error(span, type(error), error)
        end(span)


def within(
    step: Span,
    name: str,
    attrs: Settled | None,
    kind: type[OwnSpan],
    at: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fail: Callable[[Span, BaseException], None] = fail,
) -> Any:
    """Calls a function in a phase of a step: `begin_phase` and `end_phase`, inlined."""
    if step.device is None:
        inside = step
        number = next(sequence)
        start = at or now()
        step.phase_kind = kind  # type: ignore[misc]  # of a step it is a slot
        step.phase = phase = (number, name, attrs, start)  # type: ignore[misc]
    else:
        inside = begin_phase(step, name, attrs, kind, at)
        phase = MEASURED
    try:
        result = function(*args, **kwargs)
    except BaseException as error:  # raised again, after closing the span
        fail(open_phase(inside), error)
        raise
    if step.phase is phase and not step.end and _get() is step:
        append((number, step.sequence, name, None, attrs, start, now(), step.thread))
        step.phase = step.phase_kind = None  # type: ignore[misc]
    else:
        end_phase(inside)
    return result


def begin_phase(
    step: Span, name: str, attrs: Settled | None = None, kind: type[OwnSpan] = OwnSpan, at: int = 0
) -> Span:
    """Begins a phase, now or at time `at`, of a step that is current and not in a phase.

    Returns what `end_phase` takes: the step, or a span if a device measures it.
    """
    step.phase_kind = kind  # type: ignore[misc]  # of a step it is a slot
    step.phase = (next(sequence), name, attrs, at or now())  # type: ignore[misc]
    if step.device is None or device_clock is None:
        return step
    span = open_phase(step)
    device_clock.start(span)
    return span


def end_phase(span: Span) -> None:
    phase = span.phase
    # Else it is a span, a shutdown has recorded it, or a scope inside it is still open.
    if phase is not None and not span.end and _get() is span:
        number, name, attrs, start = phase
        append((number, span.sequence, name, None, attrs, start, now(), span.thread))
        span.phase = span.phase_kind = None  # type: ignore[misc]  # it is a step
    else:
        close(open_phase(span))


def open_phase(span: Span) -> Span:
    """Turns the current phase of a step into a span; returns other spans unchanged."""
    phase = phase_of(span)
    if phase is None:
        return span
    _set(span)  # leaves scopes that were opened in it and not closed
    phase.token = _set(phase)
    if not phase.end:
        opened.add(phase)
    span.phase = span.phase_kind = None  # type: ignore[misc]  # it is a step
    return phase


def _leave_phase(span: Span) -> None:
    """Records the phase that a step is in when it ends: an optimizer has raised, or a shutdown."""
    phase = phase_of(span)
    span.phase = span.phase_kind = None  # type: ignore[misc]  # it is a step
    if phase is not None:
        if "error" in (span.attrs or ()):
            phase.set(error=span.attrs["error"])  # type: ignore[index]
        phase.end = max(phase.start, span.end)
        append(record_of(phase))


def phase_of(span: Span) -> Span | None:
    """The current phase of a step as a span, for readers of open spans."""
    phase, kind = span.phase, span.phase_kind
    if phase is None or kind is None:
        return None
    number, name, attrs, start = phase
    inner: Span = kind()
    inner.name = name
    inner.index = None
    inner.attrs = attrs
    inner.parent = span
    inner.depth = span.depth + 1
    inner.thread = span.thread
    inner.sequence = number
    inner.end = span.end
    inner.start = start
    return inner


def follow(
    span: Span, index: int | None, attrs: Settled | None = None, kind: type[Lone] = Lone
) -> Span:
    """Ends a step and begins the next one, at the same time."""
    parent, own = span.parent, span.attrs
    if (
        span.__class__ is not Lone
        or (own is not None and own.__class__ is not Settled)
        or span.device is not None
        or span.phase is not None
        or span.end
        or parent.end
    ):
        at = now()
        close(span, at)
        return begin(span.name, index, attrs, kind, at)
    if span in losses:  # `mark_losses`, inlined
        for loss, made_at in losses.pop(span) or ():
            append((next(sequence), span.sequence, "loss", loss, "point", None, made_at))
    if keeps_names:
        span.marked = {}
    # Nothing interrupts between `now` and `append`, so a signal handler sees one of the two steps.
    number = next(sequence)
    at = now()
    done = (
        span.sequence,
        parent.sequence,
        span.name,
        span.index,
        own,
        span.start,
        at,
        span.thread,
    )
    span.start = at
    span.index = index
    span.attrs = attrs
    span.sequence = number
    if kind is not Lone:
        span.__class__ = kind
    append(done)
    if device_clock is not None:
        device_clock.start(span)
    return span


def held(span: Span) -> Span:
    """The span, for code that keeps a reference to it: `follow` will not reuse its object."""
    span.depth  # noqa: B018  a `Lone` step notices this
    return span


def drop(span: Span) -> None:
    """Ends a span without a record, because what it stands for did not happen."""
    global undone
    if not span.end:
        if device_clock is not None:
            device_clock.drop(span)
        undone += 1
        losses.pop(span, None)
        span.end = now()
        _leave(span)
        opened.discard(span)


def watch_losses(is_on: bool) -> None:
    """Sets whether steps get the losses that hooks see, unless the program marks its own."""
    global watches_losses, hears_marks
    watches_losses = is_on
    hears_marks = is_on or keeps_names
    losses.clear()


def own_loss(span: Span) -> None:
    """Notes that the program marks the loss of the step around this span itself, or of a first step
    that is not known yet.
    """
    step = span
    while step.name not in STEPS and step.parent is not step:
        step = step.parent
    if watches_losses:
        losses[step if step.name in STEPS else span] = None


def mark_losses(span: Span) -> None:
    """Marks the losses of a span that is about to end."""
    for loss, at in losses.pop(span, None) or ():
        append((next(sequence), span.sequence, "loss", loss, "point", None, at))


def suspend(span: Span, at: int = 0) -> None:
    """Ends a span from `begin` whose parent is not known yet; `release` records it.

    It stays in `opened`, where `ci.trace()`, the black box and a shutdown find it.
    """
    if not span.end:
        if device_clock is not None:
            device_clock.stop(span)
        span.end = span.parent.end or at or now()
        _leave(span)


def release(span: Span, parent: Span | None = None) -> None:
    """Records a suspended span, under another parent if that is given, but not in its phase: that
    may be a fetch which finds no item, and leaves no record.
    """
    if span in opened:  # else a shutdown has recorded it
        if parent is None:
            append(record_of(span))
        else:
            span.parent = parent
            number, _, *rest = record_of(span)
            append((number, parent.sequence, *rest))  # type: ignore[arg-type]
        opened.discard(span)


def insert(
    above: Span,
    name: str,
    index: int | None,
    attrs: Attrs = None,
    kind: type[OwnSpan] = OwnSpan,
    *,
    start: int,
) -> Span:
    """Opens a span under `above` that began at `start`, and moves its open children into it."""
    inside = innermost()
    _set(above)
    span = begin(name, index, attrs, kind)
    span.start = start
    below = inside
    while below.parent is not above and below.parent is not below:
        below = below.parent
    if inside is not above and below.parent is above:
        below.parent = span
        below.token = _set(below)  # when it ends, the new span is current
    if inside is not above:
        _set(inside)
    return span


def innermost() -> Span:
    """The scope that would be the parent of a new one."""
    span = _get()
    if span is None:
        return root
    return _open_ancestor(span) if span.end else span


def find_handmade(name: str) -> Span | None:
    """The innermost open scope of this name, if the user opened it with `ci.scope`."""
    span = _get()
    while span is not None and span.parent is not span:
        if not span.end and span.name == name:
            return None if isinstance(span, OwnSpan) else span
        span = span.parent
    return None


def open_names(but: Span | None = None) -> set[str]:
    """The names of the open scopes of the calling context, except `but`."""
    names = set()
    span = _get()
    while span is not None and span.parent is not span:
        if not span.end and span is not but:
            names.add(span.name)
        span = span.parent
    return names


def is_fetching() -> bool:
    """Whether `ci.batches` is waiting for the next batch in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while not _this_thread.is_fetching and frame is not None:
        if frame.f_code is _spans.__code__ and frame.f_locals["name"] == "batch":
            return True  # from a wrapper of a loader: a progress bar, a generator
        frame = frame.f_back
    return _this_thread.is_fetching


def record_of(span: Span) -> Closed:
    parent = span.parent
    above, phase = parent.sequence, parent.phase
    if phase is not None and phase[0] < span.sequence and span.thread == parent.thread:
        above = phase[0]
    attrs = span.attrs
    if attrs is not None and attrs.__class__ is not Settled:  # a program may assign anything
        attrs = (settle if span.end else preview)(attrs)
    return (
        span.sequence,
        0 if parent is span else above,
        span.name,
        span.index,
        attrs,
        span.start,
        span.end,
        span.thread,
    )


def new_root(name: str, attrs: Attrs, depth: int, number: int) -> Span:
    """An open span without a parent, which is not current in any context."""
    span = Span()
    span.name = name
    span.index = None
    span.attrs = attrs
    span.parent = span
    span.depth = depth
    span.thread = _this_thread.ident
    span.sequence = number
    span.end = 0
    span.start = now()
    return span


# The parent of spans without a session: number 0, which no record has.
IDLE_ROOT = root = new_root("", None, depth=0, number=0)


def leave_context() -> Span | None:
    """Makes the root current in this context; returns what was current."""
    span = _get()
    _set(None)
    return span


def enter_context(span: Span | None) -> None:
    """Makes a span from `leave_context` current again."""
    _set(span)


def _forked() -> None:
    """In a forked child: earlier numbers and open scopes belong to the parent."""
    clock.use_ids(clock.ids.forked(given_out()))
    use_device_clock(None)  # the child cannot use the parent's device
    for span in opened - {root}:
        span.end = now()
    opened.clear()
    if root is IDLE_ROOT:  # a session has its own ring
        ring.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_forked)


def depth() -> int:
    """How many scopes are open in the calling context, the session included."""
    span = _get()
    return (root if span is None else _open_ancestor(span)).depth


def expected() -> int:
    """How many records the sequence numbers used so far should leave."""
    return given_out() - undone


def given_out() -> int:
    """How many sequence numbers have been used so far."""
    return int(repr(sequence)[6:-1]) - 1  # "count(42)"; Python 3.14 cannot pickle it
