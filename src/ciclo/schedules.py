"""When something is due: pure functions from `Elapsed` to a bool, with an algebra.

A schedule never changes and is compared by identity, so that two `every(1)` are two keys of a dict.
Asked twice about the same `Elapsed`, it answers the same. What has to be remembered, when an
`every(samples=...)` was last due and where an `after(...)` began, belongs to the loop: it is read
from the `Elapsed`, and noted there for the iteration that follows.

Steps go by one at a time, and `every` counts them from the start. Samples, tokens and time jump:
there it counts from where it was last due.
"""

from __future__ import annotations

import itertools
from _weakref import ref  # `weakref` takes a millisecond to import
from typing import TYPE_CHECKING, Any, NamedTuple

from ciclo.elapsed import FIELDS, Elapsed, Period, as_period
from ciclo.errors import PeriodError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from datetime import datetime, timedelta
    from typing import SupportsIndex, TypeAlias

    from ciclo.elapsed import Anchors

    Predicate: TypeAlias = Callable[[Elapsed], Any]

# Where `_before` has which field.
JUMPING = {"samples": 0, "tokens": 1, "time": 2, "date": 3}


class Schedule:
    """Something that is due or not. Combine with `&`, `|` and `~`, also with plain functions."""

    __slots__ = ("__weakref__",)

    def __call__(self, elapsed: Elapsed) -> bool:
        raise NotImplementedError

    def parts(self) -> Iterator[Schedule]:
        """The schedule itself and those inside it on the same time, always in the same order."""
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
        """Another schedule from a point on: `after(100).then(every(10))` or `after(100) >> ...`."""
        raise PeriodError(
            f"{self!r} has no end that another schedule could follow; write"
            " ciclo.after(steps=1000).then(schedule), or"
            " ciclo.piecewise({0: first, 1000: second})"
        )

    def __rshift__(self, schedule: Predicate) -> Schedule:
        return self.then(schedule)

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} is a schedule, not true or false: ask it with schedule(elapsed);"
            " combine schedules with &, | and ~ instead of and, or and not"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__.lower()}()"


class always(Schedule):  # noqa: N801  a name like the functions beside it
    """Due in each iteration."""

    __slots__ = ()

    def __call__(self, elapsed: Elapsed) -> bool:
        return True


class never(Schedule):  # noqa: N801
    """Due in none."""

    __slots__ = ()

    def __call__(self, elapsed: Elapsed) -> bool:
        return False


class Function(Schedule):
    """A plain function of `elapsed`, as a schedule."""

    __slots__ = ("function",)

    def __init__(self, function: Predicate) -> None:
        import inspect

        try:
            inspect.signature(function).bind(None)
        except ValueError:  # a builtin, which does not say what it takes
            pass
        except TypeError:
            raise PeriodError(
                f"{function!r} is not a schedule: it must take one argument, as in"
                " lambda elapsed: elapsed.steps > 100"
            ) from None
        self.function = function

    def __call__(self, elapsed: Elapsed) -> bool:
        return bool(self.function(elapsed))

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


class Both(Schedule):
    __slots__ = ("left", "right")

    def __init__(self, left: Schedule, right: Schedule) -> None:
        self.left = left
        self.right = right

    def __call__(self, elapsed: Elapsed) -> bool:
        # Both are asked, so that each sees every iteration.
        left, right = self.left(elapsed), self.right(elapsed)
        return left and right

    def parts(self) -> Iterator[Schedule]:
        yield self
        yield from self.left.parts()
        yield from self.right.parts()

    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"


class Either(Both):
    __slots__ = ()

    def __call__(self, elapsed: Elapsed) -> bool:
        left, right = self.left(elapsed), self.right(elapsed)
        return left or right

    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"


class Not(Schedule):
    __slots__ = ("inner",)

    def __init__(self, inner: Schedule) -> None:
        self.inner = inner

    def __call__(self, elapsed: Elapsed) -> bool:
        return not self.inner(elapsed)

    def parts(self) -> Iterator[Schedule]:
        yield self
        yield from self.inner.parts()

    def __repr__(self) -> str:
        return f"~{self.inner!r}"


class at(Period, Schedule):  # noqa: N801
    """A point in a loop: for `stop=`, for `elapsed >= period`, and a schedule that is due once.

    >>> ciclo.at(steps=10_000)
    """

    __slots__ = ()

    def __call__(self, elapsed: Elapsed) -> bool:
        if elapsed.steps == self.steps:
            return True
        before = elapsed._before
        return any(
            before[JUMPING[name]] < value <= getattr(elapsed, name)
            for name, value in self._given()
            if name != "steps"
        )


class After(Schedule):
    """Due in each iteration from the one that reaches the period on."""

    __slots__ = ("period",)

    def __init__(self, period: Period) -> None:
        self.period = period

    def __call__(self, elapsed: Elapsed) -> bool:
        return self.period.is_reached_by(elapsed)

    def every(self, *steps: Any, **amounts: Any) -> Schedule:
        """As `ciclo.every`, counted from where this begins."""
        return self.then(every(*steps, **amounts))

    def then(self, schedule: Predicate) -> Schedule:
        """Another schedule, counted from where this begins."""
        return From(self.period, as_schedule(schedule))

    def __repr__(self) -> str:
        return f"after{repr(self.period).removeprefix('at').removeprefix('period')}"


class Every(Schedule):
    """Due each time an amount has gone by: of steps from the start, of others from when it was due.

    Remembers the counts at which it was last due.
    """

    __slots__ = ("_jumps", "amount", "at_end")

    def __init__(self, amount: Period, *, at_end: bool = False) -> None:
        for name, value in amount._given():
            if value <= 0:
                raise PeriodError(f"every({name}={value}) would never end; use more than 0")
        if amount.date is not None:
            raise PeriodError("a date comes once: use ciclo.at(date=...) or ciclo.after(date=...)")
        self.amount = amount
        self.at_end = at_end
        self._jumps = [(n, JUMPING[n], value) for n, value in amount._given() if n != "steps"]

    def __call__(self, elapsed: Elapsed) -> bool:
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
            else:  # never due, or not asked until now: the next multiple. The start is none.
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
    """What a `From` remembers: where its time began, and what schedules on that time remember."""

    at: Elapsed
    anchors: Anchors


class From(Schedule):
    """Another schedule, on a time of its own that begins where a period is reached."""

    __slots__ = ("inner", "period")

    def __init__(self, period: Period, inner: Schedule) -> None:
        self.period = period
        self.inner = inner

    def __call__(self, elapsed: Elapsed) -> bool:
        if not self.period.is_reached_by(elapsed):
            return False
        found: Begun | None = elapsed._anchors.get(ref(self))
        begun = Begun(self._began(elapsed), {}) if found is None else found
        since = _since(elapsed, begun)
        is_due = self.inner(since)
        if found is None or since._noted is not None:
            _note(elapsed, self, Begun(begun.at, since._anchors_after()))
        return is_due

    def _began(self, elapsed: Elapsed) -> Elapsed:
        """Where time begins: at the period itself in its own unit, in others at this iteration."""
        anchor = Elapsed(*(getattr(elapsed, name) for name in FIELDS))
        given = self.period._given()
        if len(given) == 1 and given[0][0] != "date":
            name, value = given[0]
            setattr(anchor, name, value)
        return anchor

    def __repr__(self) -> str:
        return f"{After(self.period)!r}.{self.inner!r}"


class Piecewise(Schedule):
    """One schedule after the other, each counted from where it begins."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: list[From]) -> None:
        self.pieces = pieces

    def __call__(self, elapsed: Elapsed) -> bool:
        # The last piece that has begun counts; those after it may be passed over at once.
        current = None
        for piece in self.pieces:
            if not piece.period.is_reached_by(elapsed):
                break
            current = piece
        return current is not None and current(elapsed)

    def parts(self) -> Iterator[Schedule]:
        yield self
        for piece in self.pieces:
            yield from piece.parts()

    def __repr__(self) -> str:
        inner = ", ".join(f"{piece.period!r}: {piece.inner!r}" for piece in self.pieces)
        return f"piecewise({{{inner}}})"


def _since(elapsed: Elapsed, begun: Begun) -> Elapsed:
    """The time of a loop that would have begun there."""
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
    """Has a schedule remember something from the next iteration on."""
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
) -> Schedule:
    """Due every so many steps, samples, tokens or seconds.

    By steps it is due at 0, n, 2n, ...; with `at="end"` in the last step of each n: n - 1,
    2n - 1, ... By samples, tokens and time it is due once so many have gone by since it was last
    due, so never at the start: `every(samples=100)` with batches of 32 in steps 4, 8, 12, ...

    >>> ciclo.every(steps=1000) | ciclo.every(time=600)
    """
    if at not in ("start", "end"):
        raise PeriodError(f'at={at!r} is not valid; use "start" or "end"')
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
) -> After:
    """Due from a point on; `after(...).every(...)` counts from there.

    >>> ciclo.after(steps=1000).every(steps=100)
    """
    if isinstance(steps, Period):
        return After(steps)
    return After(at(steps, samples=samples, tokens=tokens, time=time, date=date))


def piecewise(
    pieces: Mapping[Any, Predicate] | Iterable[tuple[Any, Predicate]] | Predicate,
    rest: Mapping[Any, Predicate] | None = None,
) -> Schedule:
    """One schedule after the other: from each point on the schedule beside it, counted from there.

    The first may stand alone, with the rest behind it, as in Ciclo 0.1.9.

    >>> ciclo.piecewise({0: ciclo.every(10), 1_000: ciclo.every(100)})
    >>> ciclo.piecewise(ciclo.every(10), {ciclo.at(1_000): ciclo.every(100)})
    """
    if callable(pieces):
        pieces = [(0, pieces), *(rest or {}).items()]
    if hasattr(pieces, "items"):
        pieces = pieces.items()
    pairs = list(pieces) if hasattr(pieces, "__iter__") else []
    if not pairs:
        raise PeriodError("piecewise() needs at least one piece, as in {0: ciclo.every(10)}")
    found = [From(as_period(point), as_schedule(schedule)) for point, schedule in pairs]
    for earlier, later in itertools.pairwise(found):
        for name, value in earlier.period._given():
            bound = getattr(later.period, name)
            if bound is not None and bound <= value:
                raise PeriodError(
                    f"the pieces of piecewise() must follow each other:"
                    f" {name}={bound} comes after {name}={value}"
                )
    return Piecewise(found)


def as_schedule(given: Any) -> Schedule:
    """A schedule, or a function of `elapsed` as one."""
    if isinstance(given, Schedule):
        return given
    if isinstance(given, Period):
        return at(*[given.steps], **{n: getattr(given, n) for n in FIELDS[1:]})
    if given in (every, at, after, always, never, piecewise):
        raise PeriodError(
            f"{given.__name__} makes a schedule and is none: write ciclo.{given.__name__}(...)"
        )
    if callable(given):
        return Function(given)
    hint = f": write ciclo.every({given})" if isinstance(given, int) else ""
    raise PeriodError(
        f"{given!r} ({type(given).__name__}) is not a schedule or a function of elapsed{hint}"
    )


def anchors_of(schedules: Iterable[tuple[str, Schedule]], elapsed: Elapsed) -> list[list[Any]]:
    """What these schedules remember after this iteration, each under its name, as plain values."""
    anchors = elapsed._anchors_after()
    return [[name, _saved(schedule, anchors)] for name, schedule in schedules]


def restore_anchors(
    schedules: Iterable[tuple[str, Schedule]], elapsed: Elapsed, saved: list[list[Any]]
) -> None:
    """Puts back what `anchors_of` gave; of several of one name, to each its own."""
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
