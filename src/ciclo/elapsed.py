"""The progress of a loop: `Elapsed`, `Period`, and `elapse`, which counts while it iterates.

An `Elapsed` is a value: the counts at the start of an iteration. It also holds the counts of the
previous iteration and the memory of schedules, such as when they were last due, so that a schedule
is a pure function of it. What a schedule records now is visible in the next iteration. This is the
only module of ciclo that reads a clock.
"""

from __future__ import annotations

import operator
from math import isfinite, nextafter
from time import monotonic, time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ciclo import _seam, _trees
from ciclo.errors import PeriodError, check, refuse_unknown, shown, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from datetime import datetime, timedelta
    from typing import Never, Self, SupportsIndex, TypeAlias
    from weakref import ref

    Anchors: TypeAlias = dict[ref[Any], Any]  # the memory of schedules that still exist
    Counts: TypeAlias = tuple[int, int, float, float]  # samples, tokens, time, date
    Shape: TypeAlias = tuple[int, ...]
    BatchSize: TypeAlias = Callable[[list[Shape]], int | tuple[int, int]]

__all__ = ["Elapsed", "Period", "elapse"]

Batch = TypeVar("Batch")
FIELDS = ("steps", "samples", "tokens", "time", "date")
NO_EPOCHS = dict.fromkeys(
    ("epoch", "epochs"), "; count steps, or write ciclo.fit(state, dataset, epochs=3)"
)
SINGLE = frozenset({int, float, str, type(None)})  # batch types that are one sample


class Elapsed:
    """The progress of a loop.

    steps: number of completed iterations, so 0 in the first
    samples, tokens: number of samples and tokens in the completed iterations
    time: seconds since the loop started, including earlier parts of a resumed run
    date: now, in seconds since 1970
    batch_samples, batch_tokens: the number in the current batch

    `elapsed >= period` is true if any field of the period is reached, `elapsed > period` if any is
    exceeded, `elapsed == period` if any is equal; `<`, `<=` and `!=` are their opposites.
    """

    __slots__ = (
        "_anchors",
        "_before",
        "_noted",
        "batch_samples",
        "batch_tokens",
        "date",
        "samples",
        "steps",
        "time",
        "tokens",
    )

    def __init__(
        self,
        steps: int = 0,
        samples: int = 0,
        tokens: int = 0,
        time: float = 0.0,
        date: float | None = None,
    ) -> None:
        if not (type(steps) is type(samples) is type(tokens) is int):
            given = {"steps": steps, "samples": samples, "tokens": tokens}
            steps, samples, tokens = (_integer(name, one) for name, one in given.items())
        self.steps = steps
        self.samples = samples
        self.tokens = tokens
        self.time = time
        self.date = now() if date is None else date
        self.batch_samples = 0
        self.batch_tokens = 0
        # Just below the counts, so that a period that equals them is reached now. In a jitted
        # function, the time is not a number yet.
        earlier = nextafter(time, -1.0) if isinstance(time, (int, float)) else time
        self._before: Counts = (samples - 1, tokens - 1, earlier, self.date)
        self._anchors: Anchors = {}  # the memory of schedules before this iteration
        self._noted: Anchors | None = None  # what they record for the next

    @classmethod
    def create(cls, steps: int = 0, samples: int = 0) -> Elapsed:
        """The start of a loop that continues from these counts."""
        return cls(whole("steps", steps) or 0, whole("samples", samples) or 0)

    @property
    def date_start(self) -> float:
        """The date minus the time: when the loop started, without pauses."""
        return self.date - self.time

    def update(self, batch_size: int) -> Elapsed:
        """The counts after a batch of this size, for hand-written loops."""
        samples = self.samples + _integer("batch_size", batch_size)
        return self.update_time().replace(steps=self.steps + 1, samples=samples)

    def update_time(self) -> Elapsed:
        """The same counts with the current time."""
        date = now()
        return self.replace(date=date, time=self.time + date - self.date)

    def replace(self, *, date_start: float | None = None, **fields: Any) -> Elapsed:
        """A copy with some fields changed."""
        refuse_unknown("replace", fields, FIELDS)
        changed = Elapsed(**{name: getattr(self, name) for name in FIELDS} | fields)
        if date_start is not None:
            changed.time = changed.date - date_start
        changed._before, changed._anchors = self._before, self._anchors
        return changed

    def to_dict(self) -> dict[str, float]:
        """The counts by name."""
        tokens = {"tokens": self.tokens} if self.tokens else {}
        names = ("steps", "samples", "date", "date_start", "time")
        return {name: getattr(self, name) for name in names} | tokens

    def done(self, time: float | None = None, date: float | None = None) -> Elapsed:
        """The counts after this iteration, from which another loop can continue."""
        after = Elapsed(
            self.steps + 1,
            self.samples + self.batch_samples,
            self.tokens + self.batch_tokens,
            self.time if time is None else time,
            self.date if date is None else date,
        )
        after._before = (self.samples, self.tokens, self.time, self.date)
        after._anchors = self._anchors_after()
        return after

    def _anchors_after(self) -> Anchors:
        """The memory of schedules after this iteration."""
        if self._noted is None:
            return self._anchors
        both = {**self._anchors, **self._noted}
        return {key: anchor for key, anchor in both.items() if key() is not None}

    def __sub__(self, earlier: Elapsed) -> Elapsed:
        """The difference to `earlier`, with the date of this one."""
        check_elapsed(earlier, "the right side of elapsed - earlier")
        return Elapsed(
            self.steps - earlier.steps,
            self.samples - earlier.samples,
            self.tokens - earlier.tokens,
            self.time - earlier.time,
            self.date,
        )

    def __ge__(self, period: Period | SupportsIndex) -> bool:
        return as_period(period).is_reached_by(self)

    def __lt__(self, period: Period | SupportsIndex) -> bool:
        return not as_period(period).is_reached_by(self)

    def __gt__(self, period: Period | SupportsIndex) -> bool:
        given = as_period(period)._given()
        return any(getattr(self, name) > value for name, value in given)

    def __le__(self, period: Period | SupportsIndex) -> bool:
        return not self > period

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Period):
            return self is other
        return any(getattr(self, name) == value for name, value in other._given())

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        counts = f"steps={self.steps}, samples={self.samples}"
        tokens = f", tokens={self.tokens}" if self.tokens else ""
        return f"Elapsed({counts}{tokens}, time={self.time:.3f})"

    def state_dict(self) -> dict[str, Any]:
        """Plain values for `Elapsed.from_state_dict`."""
        counts = {name: getattr(self, name) for name in FIELDS}
        return {**counts, "before": list(self._before)}

    @classmethod
    def from_state_dict(cls, saved: dict[str, Any]) -> Elapsed:
        """The inverse of `state_dict`."""
        elapsed = cls(**{name: saved[name] for name in FIELDS})
        samples, tokens, time, date = saved["before"]
        elapsed._before = (samples, tokens, time, date)
        return elapsed

    def __reduce__(self) -> tuple[Any, ...]:
        return Elapsed.from_state_dict, (self.state_dict(),)


class Period:
    """An amount of steps, samples, tokens or time, or a date; the first one reached counts."""

    __slots__ = FIELDS

    def __init__(
        self,
        steps: SupportsIndex | None = None,
        *,
        samples: SupportsIndex | None = None,
        tokens: SupportsIndex | None = None,
        time: float | timedelta | None = None,
        date: float | datetime | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown(type(self).__name__, unknown, FIELDS, NO_EPOCHS)
        self.steps = whole("steps", steps)
        self.samples = whole("samples", samples)
        self.tokens = whole("tokens", tokens)
        self.time = _seconds("time", time, "total_seconds", "seconds or a timedelta")
        self.date = _seconds("date", date, "timestamp", "a datetime or seconds since 1970")
        if all(getattr(self, name) is None for name in FIELDS):
            raise PeriodError("a period needs at least one of " + ", ".join(FIELDS))

    @classmethod
    def create(cls, *args: Any, **fields: Any) -> Self:
        """The same as calling the class."""
        return cls(*args, **fields)

    def is_reached_by(self, elapsed: Elapsed) -> bool:
        """Whether any of the fields is reached."""
        return (
            (self.steps is not None and elapsed.steps >= self.steps)
            or (self.samples is not None and elapsed.samples >= self.samples)
            or (self.tokens is not None and elapsed.tokens >= self.tokens)
            or (self.time is not None and elapsed.time >= self.time)
            or (self.date is not None and elapsed.date >= self.date)
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__.lower()}({', '.join(f'{k}={v}' for k, v in self._given())})"

    def _given(self) -> list[tuple[str, float]]:
        pairs = [(name, getattr(self, name)) for name in FIELDS]
        return [(name, value) for name, value in pairs if value is not None]


def as_period(given: Period | SupportsIndex) -> Period:
    """A period; an integer is a number of steps."""
    if isinstance(given, Period):
        return given
    if (
        isinstance(given, Elapsed)
        or callable(given)
        or hasattr(given, "total_seconds")
        or hasattr(given, "timestamp")
    ):
        raise PeriodError(
            f"{shown(given)} is not a period; write 1000 for steps, or"
            " ciclo.at(samples=50_000, time=3600). To stop for another reason, set"
            " loop_state.stop_iteration = True in a callback"
        )
    return Period(given)


def whole(name: str, given: Any) -> int | None:
    """A non-negative integer, or None."""
    if given is None:
        return None
    number = _integer(name, given)
    if number < 0:
        raise PeriodError(f"{name}={number} is negative; use 0 or more")
    return number


def _integer(name: str, given: Any) -> int:
    try:
        if not isinstance(given, bool):
            return operator.index(given)
    except (TypeError, ValueError):  # torch and TensorFlow raise either
        if "Tracer" in type(given).__name__:  # of JAX, inside a jitted function
            return given  # type: ignore[no-any-return]
    kind = type(given).__name__
    raise PeriodError(f"{name}={given!r} is not a whole number ({kind}); write {name}=1000")


def _seconds(name: str, given: Any, method: str, allowed: str) -> float | None:
    if given is None:
        return None
    if hasattr(given, method):
        given = getattr(given, method)()

    def is_amount(one: Any) -> bool:
        return isfinite(one) and one >= 0 and not isinstance(one, bool)

    check(name, given, is_amount, f"{allowed}, not negative", PeriodError)
    return float(given)


def check_elapsed(given: Any, what: str) -> None:
    """Refuses anything but an Elapsed, such as a number of steps."""
    if not isinstance(given, Elapsed):
        raise TypeError(
            f"{what} is {shown(given)}, not an Elapsed; give the elapsed of a callback, of"
            " ciclo.elapse(dataset) or of an earlier loop, or ciclo.Elapsed(steps=1000)"
        )


def now() -> float:
    """Seconds since 1970."""
    return time()


def clock() -> float:
    """The monotonic clock, for durations."""
    return monotonic()


class Timeline(Generic[Batch]):
    """Yields `(elapsed, batch)` until the period `stop` is reached.

    If `stop` is already reached, it fetches nothing.
    """

    def __init__(
        self,
        dataset: Iterable[Batch],
        initial: Elapsed | None = None,
        stop: Period | None = None,
        batch_size_fn: BatchSize | None = None,
        watch: _seam.Watch | None = None,
    ) -> None:
        check_dataset(dataset)
        if initial is not None:
            check_elapsed(initial, "initial")
        if batch_size_fn is not None:
            _check_batch_size_fn(batch_size_fn)
        self.initial = Elapsed() if initial is None else initial
        self._dataset = dataset
        self._stop = stop
        self._batch_size_fn = batch_size_fn
        self._watch = watch
        ticks = monotonic()
        # Both use the monotonic clock, so changes of the system time do not affect durations.
        self._date_offset = now() - ticks
        self._time_offset = self.initial.time - ticks

    def done(self, elapsed: Elapsed) -> Elapsed:
        """The counts after the iteration of `elapsed`."""
        ticks = monotonic()
        return elapsed.done(ticks + self._time_offset, ticks + self._date_offset)

    def __iter__(self) -> Iterator[tuple[Elapsed, Batch]]:
        start, stop, batch_size_fn = self.initial, self._stop, self._batch_size_fn
        steps, samples, tokens = start.steps, start.samples, start.tokens
        before = start._before
        anchors = start._anchors
        time_offset, date_offset = self._time_offset, self._date_offset
        if stop is not None and self._is_over(stop, steps, samples, tokens):
            return
        last = None if stop is None or stop.steps is None else stop.steps - 1
        stops_otherwise = stop is not None and any(name != "steps" for name, _ in stop._given())
        new = Elapsed.__new__
        batches = self._dataset if self._watch is None else self._watch.steps(self._dataset, steps)
        for batch in batches:
            ticks = monotonic()
            elapsed = new(Elapsed)  # __init__ takes twice as long
            elapsed.steps = steps
            elapsed.samples = samples
            elapsed.tokens = tokens
            elapsed.time = seconds = ticks + time_offset
            elapsed.date = date = ticks + date_offset
            elapsed._before = before
            elapsed._anchors = anchors
            elapsed._noted = None
            if batch_size_fn is not None:
                batch_samples, batch_tokens = _told(batch_size_fn, batch)
            elif type(batch) in SINGLE:
                batch_samples, batch_tokens = 1, 0
            else:
                batch_samples, batch_tokens = samples_in(batch), tokens_in(batch)
            elapsed.batch_samples = batch_samples
            elapsed.batch_tokens = batch_tokens
            yield elapsed, batch
            if steps == last:
                return
            before = (samples, tokens, seconds, date)
            if elapsed._noted is not None:
                anchors = elapsed._anchors_after()  # type: ignore[unreachable]  # it was noted
            steps += 1
            samples += batch_samples
            tokens += batch_tokens
            if stops_otherwise and self._is_over(stop, steps, samples, tokens):
                return

    def _is_over(self, stop: Period | None, steps: int, samples: int, tokens: int) -> bool:
        ticks = monotonic()
        here = Elapsed(steps, samples, tokens, ticks + self._time_offset, ticks + self._date_offset)
        return stop is not None and stop.is_reached_by(here)


def elapse(
    dataset: Iterable[Batch],
    initial: Elapsed | None = None,
    stop: Period | SupportsIndex | None = None,
    batch_size_fn: BatchSize | None = None,
) -> Iterator[tuple[Elapsed, Batch]]:
    """Iterates over a dataset and counts steps, samples and time.

    >>> for elapsed, batch in ciclo.elapse(dataset, stop=ciclo.at(samples=50_000)):
    ...     print(elapsed.steps, elapsed.samples, elapsed.time)
    """
    _trees.register()
    period = None if stop is None else as_period(stop)
    watch = _seam.watch()
    items = iter(Timeline(dataset, initial, period, batch_size_fn, watch))
    return items if watch is None else watch.until_left(items)


def check_dataset(dataset: Any) -> None:
    """Refuses a dataset that is not iterable, or does not yield batches."""
    can_iterate = hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")
    if not can_iterate or getattr(dataset, "shape", None) == ():
        name = getattr(dataset, "__name__", None)
        what = "a list, a loader or a generator" if name is None else f"what it returns: {name}()"
        raise TypeError(f"the dataset {shown(dataset)} is not iterable; give {what}")
    if isinstance(dataset, str):
        warn(f"the dataset is the string {dataset!r}, so each character is a batch")
    is_torch = "torch.utils.data.dataset" in (one.__module__ for one in type(dataset).__mro__)
    if is_torch and not hasattr(dataset, "__iter__"):
        warn(
            "the dataset is a torch Dataset without a loader, so each sample is a batch; give"
            " torch.utils.data.DataLoader(dataset, batch_size=32)"
        )
    if hasattr(dataset, "keys") and hasattr(dataset, "values"):
        raise TypeError(
            f"the dataset is a {type(dataset).__name__}, so a loop would read its keys; give a"
            " list of batches, as [dataset] for a single batch"
        )
    shapes = [getattr(one, "shape", ()) for one in dataset] if type(dataset) is tuple else []
    rows, rests = {shape[:1] for shape in shapes}, {tuple(shape[1:]) for shape in shapes}
    if 2 <= len(shapes) <= 3 and all(shapes) and len(rows) == 1 < len(rests):
        raise TypeError(
            "the dataset is a tuple of arrays with equal numbers of rows, so each array would be a"
            " batch; give a list of batches, as [(x, y)] for a single batch"
        )


def samples_in(batch: Any) -> int:
    """The number of samples in a batch: the largest first axis of its arrays.

    A list without arrays is a list of samples. Anything without a size is one sample.
    """
    size = _size(batch)
    return 1 if size is None else size


def samples_of(batch: Any, batch_size_fn: BatchSize | None) -> int:
    """The number of samples in a batch, as a loop with this function counts them."""
    return samples_in(batch) if batch_size_fn is None else _told(batch_size_fn, batch)[0]


def _size(batch: Any) -> int | None:
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    if isinstance(batch, list) and (not batch or not getattr(batch[0], "shape", None)):
        return len(batch)
    items = _items(batch)
    if items is None:
        return None
    sizes = [size for item in items if (size := _size(item)) is not None]
    return max(sizes) if sizes else None


def _items(batch: Any) -> Iterable[Any] | None:
    """The items of a container; None for a leaf."""
    if isinstance(batch, (tuple, list)):
        return batch
    if hasattr(batch, "keys") and hasattr(batch, "values"):
        return batch.values()  # type: ignore[no-any-return]
    if hasattr(batch, "__dataclass_fields__"):
        return [getattr(batch, name) for name in batch.__dataclass_fields__]
    return None


def _shapes(batch: Any) -> list[Shape]:
    """The shapes of all leaves of a batch; () for leaves without a shape."""
    items = None if hasattr(batch, "shape") else _items(batch)
    if items is None:
        return [tuple(getattr(batch, "shape", ()))]
    return [shape for item in items for shape in _shapes(item)]


def _check_batch_size_fn(batch_size_fn: BatchSize) -> None:
    """Refuses a function of a batch, which would count something else."""
    code = getattr(batch_size_fn, "__code__", None)
    is_of_batches = code is not None and code.co_varnames[:1] == ("batch",)
    if is_of_batches or batch_size_fn is len or not callable(batch_size_fn):
        raise PeriodError(
            "batch_size_fn gets the shapes of the arrays in a batch, not the batch; write"
            " batch_size_fn=lambda shapes: shapes[0][0]"
        )


def _told(batch_size_fn: BatchSize, batch: Any) -> tuple[int, int]:
    """The samples and tokens of a batch according to the user's function."""
    shapes = _shapes(batch)
    try:
        size = batch_size_fn(shapes)
    except Exception as error:  # any error of the user's function; raised again with a note
        error.add_note(
            f"ciclo: batch_size_fn gets the shapes of the arrays in a batch, here {shapes}; write"
            " batch_size_fn=lambda shapes: shapes[0][0]"
        )
        raise
    both = size if isinstance(size, tuple) else (size, tokens_in(batch))
    try:
        samples, tokens = map(operator.index, both)
    except (TypeError, ValueError):
        raise TypeError(
            f"batch_size_fn returned {size!r}; it must return the number of samples, or"
            " (samples, tokens)"
        ) from None
    return samples, tokens


def tokens_in(batch: Any) -> int:
    """The number of tokens by `num_tokens`, `input_ids` or `tokens` of a batch; else 0."""
    if type(batch) in (tuple, list):  # most batches; they have no names
        return 0
    if hasattr(batch, "keys"):
        number = batch["num_tokens"] if "num_tokens" in batch else None  # noqa: SIM401  may have no get
        ids = next((batch[name] for name in ("input_ids", "tokens") if name in batch), None)
    else:
        number = getattr(batch, "num_tokens", None)
        ids = getattr(batch, "input_ids", None)
    if isinstance(number, int):
        return number
    shape = getattr(ids, "shape", None)
    if shape is None:
        return 0
    count = 1
    for length in shape:
        count *= int(length)
    return count
