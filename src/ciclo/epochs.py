"""Splits a dataset into epochs, and finds the first and last batch of each."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from ciclo.elapsed import Period, as_period, check_dataset, clock, samples_of
from ciclo.errors import CicloError, PeriodError, check

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import SupportsIndex

    from ciclo.elapsed import BatchSize
    from ciclo.loop import LoopState

ONCE = (
    "train can be read only once; give a list, a loader, or a function that returns one for each"
    " epoch: fit(state, lambda: batches(), ...)"
)


class Epochs:
    """A dataset in epochs; knows whether the current batch is the first or last of one."""

    def __init__(self, run: LoopState[Any]) -> None:
        self.run = run
        self.is_first = False
        self.is_last = False
        self.is_open = False  # whether an epoch has started and not ended
        self.count = 0  # batches of this epoch that were yielded
        self._samples, self._seconds = 0, 0.0  # of this epoch, for durations in these
        self._is_resumed = False
        run._epochs = self

    def cut(
        self, dataset: Iterable[Any], duration: Period | None, batch_size_fn: BatchSize | None
    ) -> Iterator[Any]:
        """Splits one stream by a duration; without a duration, it is one epoch."""
        first = self.run.elapsed.steps
        begins = None if self._is_resumed else first  # a resumed run is inside an epoch
        if duration is not None and duration.steps is None:
            yield from self._cut_by_amount(dataset, duration, batch_size_fn)
            return
        for step, batch in enumerate(self._read(dataset, False), first):
            if duration is None or duration.steps is None:
                self.run.epoch, self.is_first, self.is_last = 0, step == begins, False
            else:
                self.run.epoch, place = divmod(step, duration.steps)
                self.is_first = place == 0 or step == begins
                self.is_last = place == duration.steps - 1
            self.is_open = True
            yield batch

    def _cut_by_amount(
        self, dataset: Iterable[Any], duration: Period, batch_size_fn: BatchSize | None
    ) -> Iterator[Any]:
        """Splits by samples, including the current batch, or by seconds."""
        is_new = self.is_last or not self._is_resumed
        began = clock() - self._seconds
        for batch in self._read(dataset, False):
            self.is_first = is_new
            if is_new:
                self.run.epoch = 0 if self.run.epoch is None else self.run.epoch + 1
                self._samples, began = 0, clock()
            self._samples += samples_of(batch, batch_size_fn)
            self._seconds = clock() - began
            self.is_last = is_new = (
                duration.samples is not None and self._samples >= duration.samples
            ) or (duration.time is not None and self._seconds >= duration.time)
            self.is_open = True
            yield batch

    def is_over(self) -> bool:
        """Whether this batch is the last of its epoch; ends the epoch."""
        if self.is_last:
            self.is_open = False
        return self.is_last

    def repeat(self, source: Any, epochs: int | None, length: int | None) -> Iterator[Any]:
        """Reads a dataset once per epoch.

        If the length of an epoch is unknown, one batch is read ahead to find its end.
        """
        epoch, count = 0, 0
        rest: Iterable[Any] | None = None
        if self._is_resumed:
            epoch, count = self.run.epoch or 0, self.count
            if self.is_last and self.run._feed is not None:
                rest = self.run._feed.finish(made(source))
                epoch, count = epoch + 1, 0
        while epochs is None or epoch < epochs:
            if length is None and epoch > 0 and hasattr(source, "__next__"):
                raise CicloError(ONCE)
            self.run.epoch, self.count = epoch, count
            dataset = made(source)
            if rest is None and hasattr(getattr(dataset, "sampler", None), "set_epoch"):
                dataset.sampler.set_epoch(epoch)  # a DistributedSampler shuffles by epoch
            batches = iter(self._read(dataset, callable(source)) if rest is None else rest)
            expected = length if length is not None else length_of(dataset)
            known = (
                self._numbered(batches) if expected is None else _counted(batches, expected, count)
            )
            for batch, self.is_last in known:
                self.is_first = self.count == 0
                self.is_open = True
                self.count += 1
                yield batch
            is_short = expected is not None and self.count < expected
            if self.count == 0 or (is_short and hasattr(source, "__next__")):
                return  # the data has ended
            if is_short:
                raise CicloError(
                    f"an epoch of train should have {expected} batches, but had {self.count};"
                    f" use fit(..., steps_per_epoch={self.count})"
                )
            epoch, count, rest = epoch + 1, 0, None

    def _read(self, dataset: Any, can_repeat: bool) -> Iterable[Any]:
        check_dataset(dataset)
        feed = self.run._feed
        return dataset if feed is None else feed.begin(dataset, can_repeat)

    def _numbered(self, batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
        feed = self.run._feed
        ahead: list[Any] = [] if feed is None else feed.ahead  # the feed saves it
        ahead += itertools.islice(batches, 1 - len(ahead))
        while ahead:
            batch = ahead.pop()
            ahead += itertools.islice(batches, 1)
            yield batch, not ahead

    def end(self) -> bool:
        """Ends an epoch that the end of the loop cut short; whether there was one."""
        is_open, self.is_open = self.is_open, False
        return is_open

    def state_dict(self) -> dict[str, Any]:
        return {
            "is_last": self.is_last,
            "is_open": self.is_open,
            "count": self.count,
            "amount": [self._samples, self._seconds],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.is_last, self.is_open = saved["is_last"], saved["is_open"]
        self.count = saved["count"]
        self._samples, self._seconds = saved.get("amount", (0, 0.0))
        self._is_resumed = True


def as_duration(given: Period | SupportsIndex | None) -> Period | None:
    """The duration of an epoch as a period of steps, samples or seconds."""
    if given is None:
        return None

    def is_duration(given: Any) -> bool:
        ((name, _),) = as_period(given)._given()
        return name in ("steps", "samples", "time")

    allowed = "steps, as in epoch_duration=100, or ciclo.at(samples=50_000) or ciclo.at(time=600)"
    check("epoch_duration", given, is_duration, allowed, PeriodError)
    period = as_period(given)
    check("epoch_duration", given, lambda _: period._given()[0][1], "more than 0", PeriodError)
    return period


def made(source: Any) -> Any:
    return source() if callable(source) else source


def length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None


def _counted(batches: Iterator[Any], length: int, done: int) -> Iterator[tuple[Any, bool]]:
    for count, batch in enumerate(itertools.islice(batches, length - done), done + 1):
        yield batch, count == length
