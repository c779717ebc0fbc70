"""Schedules: pure functions from `Elapsed` to a bool, which can be combined.

A schedule is immutable and compared by identity, so two `every(1)` are two keys of a dict. For the
same `Elapsed` it always gives the same answer. Its memory (when an `every(samples=...)` was last
due, where an `after(...)` began) belongs to the loop: it is read from the `Elapsed`, and recorded
there for the next iteration.

Steps advance by one, so `every(steps)` counts from the start. Samples, tokens and time jump, so
`every` counts from when it was last due.
"""

from __future__ import annotations

import itertools
from _weakref import ref  # `weakref` takes a millisecond to import
from typing import TYPE_CHECKING, Any, NamedTuple

from ciclo.elapsed import FIELDS, NO_EPOCHS, Elapsed, Period, as_period, check_elapsed
from ciclo.errors import PeriodError, check, refuse_unknown, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from datetime import datetime, timedelta
    from typing import Never, SupportsIndex, TypeAlias

    from ciclo.elapsed import Anchors

    Predicate: TypeAlias = Callable[[Elapsed], Any]

__all__ = ["Schedule", "after", "always", "at", "every", "never", "piecewise"]

# The index of each field in `_before`.
JUMPING = {"samples": 0, "tokens": 1, "time": 2, "date": 3}
EACH_EPOCH = dict.fromkeys(
    ("epoch", "epochs"), "; for each epoch of fit or train_loop, write {ciclo.on_epoch_end: ...}"
)


class Schedule:
    """Combine schedules with `&`, `|` and `~`, also with plain functions of `elapsed`."""

    __slots__ = ("__weakref__",)

    def __call__(self, elapsed: Elapsed) -> bool:
        check_elapsed(elapsed, "the argument of a schedule")
        return self.is_due(elapsed)

    def is_due(self, elapsed: Elapsed) -> bool:
        """What a loop calls, without checks. A class of the user defines `__call__` instead."""
        if type(self).__call__ is Schedule.__call__:
            raise NotImplementedError(f"{type(self).__name__} has no __call__(elapsed)")
        return bool(self(elapsed))

    def parts(self) -> Iterator[Schedule]:
        """The schedule and those inside it that share its time, in a fixed order."""
        yield self

    def __and__(self, other: Predicate) -> Schedule:
        return Both(self, as_schedule(other))

    def __rand__(self, other: Predicate) -> Schedule:
        return Both(as_schedule(other), self)

    def __or__(self, other: Predicate) -> Schedule:
        return Either(self, as_schedule(other))

    def __ror__(self, other: Predicate) -> Schedule:
        return Either(as_schedule(other), self)

    def __invert__(self) -> Schedule:
        return Not(self)

    def then(self, schedule: Predicate) -> Schedule:
        """Continues with another schedule: `after(100).then(every(10))` or `after(100) >> ...`."""
        raise PeriodError(
            f"{self!r} never ends, so nothing can follow it; write"
            " ciclo.after(steps=1000).then(schedule), or"
            " ciclo.piecewise({0: first, 1000: second})"
        )

    def __rshift__(self, schedule: Predicate) -> Schedule:
        return self.then(schedule)

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} is a schedule, not a bool: call schedule(elapsed);"
            " combine schedules with &, | and ~ instead of and, or and not"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__.lower()}()"


class always(Schedule):  # noqa: N801  a name like the functions beside it
    """Due in each iteration."""

    __slots__ = ()

    def is_due(self, elapsed: Elapsed) -> bool:
        return True


class never(Schedule):  # noqa: N801
    """Never due."""

    __slots__ = ()

    def is_due(self, elapsed: Elapsed) -> bool:
        return False


class Function(Schedule):
    """A plain function of `elapsed` as a schedule."""

    __slots__ = ("function",)

    def __init__(self, function: Predicate) -> None:
        import inspect

        try:
            inspect.signature(function).bind(None)
        except ValueError:  # a builtin without a signature
            pass
        except TypeError:
            raise PeriodError(
                f"{function!r} is not a schedule: it must take one argument, as in"
                " lambda elapsed: elapsed.steps > 100. Schedules are the keys of tasks, and"
                " callbacks the values: {ciclo.every(1): train_step}"
            ) from None
        self.function = function

    def is_due(self, elapsed: Elapsed) -> bool:
        return bool(self.function(elapsed))

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


class Both(Schedule):
    __slots__ = ("left", "right")

    def __init__(self, left: Schedule, right: Schedule) -> None:
        self.left = left
        self.right = right

    def is_due(self, elapsed: Elapsed) -> bool:
        # Calls both, so that each sees every iteration.
        left, right = self.left.is_due(elapsed), self.right.is_due(elapsed)
        return left and right

    def parts(self) -> Iterator[Schedule]:
        yield self
        yield from self.left.parts()
        yield from self.right.parts()

    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"


class Either(Both):
    __slots__ = ()

    def is_due(self, elapsed: Elapsed) -> bool:
        left, right = self.left.is_due(elapsed), self.right.is_due(elapsed)
        return left or right

    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"


class Not(Schedule):
    __slots__ = ("inner",)

    def __init__(self, inner: Schedule) -> None:
        self.inner = inner

    def is_due(self, elapsed: Elapsed) -> bool:
        return not self.inner.is_due(elapsed)

    def parts(self) -> Iterator[Schedule]:
        yield self
        yield from self.inner.parts()

    def __repr__(self) -> str:
        return f"~{self.inner!r}"


class at(Period, Schedule):  # noqa: N801
    """A point in a loop: for `stop=` and `elapsed >= period`. As a schedule, it is due once.

    >>> ciclo.at(steps=10_000)
    """

    __slots__ = ()

    def is_due(self, elapsed: Elapsed) -> bool:
        if elapsed.steps == self.steps:
            return True
        before = elapsed._before
        return any(
            before[JUMPING[name]] < value <= getattr(elapsed, name)
            for name, value in self._given()
            if name != "steps"
        )


class After(Schedule):
    """Due in each iteration once the period is reached."""

    __slots__ = ("period",)

    def __init__(self, period: Period) -> None:
        self.period = period

    def is_due(self, elapsed: Elapsed) -> bool:
        return self.period.is_reached_by(elapsed)

    def every(self, *steps: Any, **amounts: Any) -> Schedule:
        """Like `ciclo.every`, counted from this point."""
        return self.then(every(*steps, **amounts))

    def then(self, schedule: Predicate) -> Schedule:
        """Another schedule, counted from this point."""
        return From(self.period, as_schedule(schedule))

    def __repr__(self) -> str:
        return f"after{repr(self.period).removeprefix('at').removeprefix('period')}"


class Every(Schedule):
    """Due every n steps from the start; by samples, tokens or time, since it was last due.

    Its memory is the counts when it was last due.
    """

    __slots__ = ("_jumps", "amount", "at_end")

    def __init__(self, amount: Period, *, at_end: bool = False) -> None:
        for name, value in amount._given():
            if value <= 0:
                raise PeriodError(f"every({name}={value}) is not valid; use more than 0")
        if amount.date is not None:
            raise PeriodError("a date comes once: use ciclo.at(date=...) or ciclo.after(date=...)")
        self.amount = amount
        self.at_end = at_end
        self._jumps = [(n, JUMPING[n], value) for n, value in amount._given() if n != "steps"]

    def is_due(self, elapsed: Elapsed) -> bool:
        steps = self.amount.steps
        is_due = steps is not None and (elapsed.steps + self.at_end) % steps == 0
        if not self._jumps:
            return is_due
        lasts = elapsed._anchors.get(ref(self), {})
        passed = {}
        for name, index, amount in self._jumps:
            count = getattr(elapsed, name)
            if name in lasts:
                has_passed = count - lasts[name] >= amount
            else:  # not due yet: due at the next multiple, but not at 0
                has_passed = count // amount > max(elapsed._before[index], 0) // amount
            if has_passed:
                passed[name] = count
        if passed:
            _note(elapsed, self, {**lasts, **passed})
        return is_due or bool(passed)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in self.amount._given())
        end = ', at="end"' if self.at_end else ""
        return f"every({given}{end})"


class Begun(NamedTuple):
    """The memory of a `From`: when its time began, and the memory of its inner schedule."""

    at: Elapsed
    anchors: Anchors


class From(Schedule):
    """A schedule with its own time, which begins when a period is reached."""

    __slots__ = ("inner", "period")

    def __init__(self, period: Period, inner: Schedule) -> None:
        self.period = period
        self.inner = inner

    def is_due(self, elapsed: Elapsed) -> bool:
        if not self.period.is_reached_by(elapsed):
            return False
        found: Begun | None = elapsed._anchors.get(ref(self))
        begun = Begun(self._began(elapsed), {}) if found is None else found
        since = _since(elapsed, begun)
        is_due = self.inner.is_due(since)
        if found is None or since._noted is not None:
            _note(elapsed, self, Begun(begun.at, since._anchors_after()))
        return is_due

    def _began(self, elapsed: Elapsed) -> Elapsed:
        """The start: the period in its own unit, and this iteration in the others."""
        anchor = Elapsed(*(getattr(elapsed, name) for name in FIELDS))
        given = self.period._given()
        if len(given) == 1 and given[0][0] != "date":
            name, value = given[0]
            setattr(anchor, name, value)
        return anchor

    def __repr__(self) -> str:
        return f"{After(self.period)!r}.{self.inner!r}"


class Piecewise(Schedule):
    """Several schedules in sequence, each counted from its start."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: list[From]) -> None:
        self.pieces = pieces

    def is_due(self, elapsed: Elapsed) -> bool:
        # The last piece that has begun; a jump may skip several pieces.
        current = None
        for piece in self.pieces:
            if not piece.period.is_reached_by(elapsed):
                break
            current = piece
        return current is not None and current.is_due(elapsed)

    def parts(self) -> Iterator[Schedule]:
        yield self
        for piece in self.pieces:
            yield from piece.parts()

    def __repr__(self) -> str:
        inner = ", ".join(f"{piece.period!r}: {piece.inner!r}" for piece in self.pieces)
        return f"piecewise({{{inner}}})"


def _since(elapsed: Elapsed, begun: Begun) -> Elapsed:
    """The elapsed time since `begun`."""
    since = elapsed - begun.at
    samples, tokens, time, date = elapsed._before
    since._before = (
        samples - begun.at.samples,
        tokens - begun.at.tokens,
        time - begun.at.time,
        date,
    )
    since._anchors = begun.anchors
    return since


def _note(elapsed: Elapsed, schedule: Schedule, anchor: Any) -> None:
    """Sets the memory of a schedule for the next iteration."""
    if elapsed._noted is None:
        elapsed._noted = {}
    elapsed._noted[ref(schedule)] = anchor


def every(
    steps: SupportsIndex | None = None,
    *,
    samples: SupportsIndex | None = None,
    tokens: SupportsIndex | None = None,
    time: float | timedelta | None = None,
    at: str = "start",
    **unknown: Never,
) -> Schedule:
    """Due every n steps, samples, tokens or seconds.

    By steps, it is due at 0, n, 2n, ...; with `at="end"`, in the last step of each n: n - 1,
    2n - 1, ... By samples, tokens and time, it is due when at least n have passed since it was last
    due, so never at the start: `every(samples=100)` with batches of 32 is due in steps 4, 8, 12.

    >>> ciclo.every(steps=1000) | ciclo.every(time=600)
    """
    refuse_unknown("every", unknown, (*FIELDS[:-1], "at"), EACH_EPOCH)
    check("at", at, lambda one: one in ("start", "end"), '"start" or "end"', PeriodError)
    amount = Period(steps, samples=samples, tokens=tokens, time=time)
    if at == "end" and amount.steps is None:
        raise PeriodError(
            'at="end" is for steps; samples, tokens and time are due at the end anyway'
        )
    return Every(amount, at_end=at == "end")


def after(
    steps: SupportsIndex | Period | None = None,
    *,
    samples: SupportsIndex | None = None,
    tokens: SupportsIndex | None = None,
    time: float | timedelta | None = None,
    date: float | datetime | None = None,
    **unknown: Never,
) -> After:
    """Due from a point onwards; `after(...).every(...)` counts from there.

    >>> ciclo.after(steps=1000).every(steps=100)
    """
    refuse_unknown("after", unknown, FIELDS, NO_EPOCHS)
    if isinstance(steps, Period):
        return After(steps)
    return After(at(steps, samples=samples, tokens=tokens, time=time, date=date))


def piecewise(
    pieces: Mapping[Any, Predicate] | Iterable[tuple[Any, Predicate]] | Predicate,
    rest: Mapping[Any, Predicate] | None = None,
) -> Schedule:
    """Several schedules in sequence: each key is the start of a schedule, which counts from there.

    The first schedule can also be a separate argument, as in Ciclo 0.1.9.

    >>> ciclo.piecewise({0: ciclo.every(10), 1_000: ciclo.every(100)})
    >>> ciclo.piecewise(ciclo.every(10), {ciclo.at(1_000): ciclo.every(100)})
    """
    first = [(0, pieces)] if callable(pieces) else []
    given: Any = ({} if rest is None else rest) if first else pieces
    given = given.items() if hasattr(given, "items") else given
    pairs = [*first, *(given if hasattr(given, "__iter__") else [given])]
    if not pairs:
        raise PeriodError("piecewise() needs at least one piece, as in {0: ciclo.every(10)}")
    if any(not isinstance(one, (tuple, list)) or len(one) != 2 for one in pairs):
        raise PeriodError(
            "each piece of piecewise() needs a start and a schedule, as in {0: ciclo.every(10)}"
        )
    found = [From(as_period(point), as_schedule(schedule)) for point, schedule in pairs]
    for earlier, later in itertools.pairwise(found):
        for name, value in earlier.period._given():
            bound = getattr(later.period, name)
            if bound is not None and bound <= value:
                raise PeriodError(
                    f"the pieces of piecewise() must be in order:"
                    f" {name}={bound} comes after {name}={value}"
                )
    return Piecewise(found)


def as_schedule(given: Any) -> Schedule:
    """Converts a function of `elapsed` or a period to a schedule."""
    if isinstance(given, Schedule):
        return given
    if isinstance(given, Period):
        return at(*[given.steps], **{n: getattr(given, n) for n in FIELDS[1:]})
    if any(given is one for one in (every, at, after, always, never, piecewise)):
        raise PeriodError(f"{given.__name__} is not called: write ciclo.{given.__name__}(...)")
    if callable(given):
        return Function(given)
    example = given if isinstance(given, int) else 100
    raise PeriodError(
        f"{shown(given)} is not a schedule or a function of elapsed: write ciclo.every({example})"
    )


def anchors_of(schedules: Iterable[tuple[str, Schedule]], elapsed: Elapsed) -> list[list[Any]]:
    """The memory of schedules after this iteration, as plain values with their names."""
    anchors = elapsed._anchors_after()
    return [[name, _saved(schedule, anchors)] for name, schedule in schedules]


def restore_anchors(
    schedules: Iterable[tuple[str, Schedule]], elapsed: Elapsed, saved: list[list[Any]]
) -> None:
    """Restores what `anchors_of` returned; schedules with equal names match in order."""
    left = list(saved)
    for name, schedule in schedules:
        found = next((one for one in left if one[0] == name), None)
        if found is not None:
            left.remove(found)
            elapsed._anchors = {**elapsed._anchors, **_restored(schedule, found[1])}


def _saved(schedule: Schedule, anchors: Anchors) -> list[Any]:
    found: list[Any] = []
    for part in schedule.parts():
        anchor = anchors.get(ref(part))
        if isinstance(part, From) and anchor is not None:
            anchor = [anchor.at.state_dict(), _saved(part.inner, anchor.anchors)]
        found.append(anchor)
    return found


def _restored(schedule: Schedule, saved: list[Any]) -> Anchors:
    anchors: Anchors = {}
    for part, anchor in zip(schedule.parts(), saved, strict=True):
        if isinstance(part, From) and anchor is not None:
            at, inner = anchor
            anchor = Begun(Elapsed.from_state_dict(at), _restored(part.inner, inner))
        if anchor is not None:
            anchors[ref(part)] = anchor
    return anchors
