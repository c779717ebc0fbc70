"""The only connection from ciclo to cirron. While profiling, a loop records `epoch` and `step`
spans, a span per callback, the wait for data (`data_load`), and logs as marks. Otherwise `watch`
returns None, and a loop has no overhead.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from cirron._version import __version__
from cirron.record import hot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = ["Watch", "__version__", "is_fatal", "launched_rank", "watch"]

# Collections that become marks; outputs stay in the history.
MARKED = ("metrics", "losses", "stateful_metrics")


class Watch:
    """Records one loop."""

    def __init__(self, is_epoch_end: Callable[[], bool] | None, epoch: Callable[[], int]) -> None:
        self._is_epoch_end = is_epoch_end  # None for a loop without epochs
        self._epoch = epoch
        self._open: list[hot.Span] = []
        self._used: Any = None  # by the open epoch

    def steps(self, dataset: Iterable[Any], first: int) -> Iterator[Any]:
        """The batches, each inside a `step` span that starts with the wait for data."""
        items = iter(dataset)
        thread = hot._this_thread
        step = first
        has_epochs = self._is_epoch_end is not None
        is_between = True
        while True:
            if has_epochs and is_between:
                self._open.append(hot.begin("epoch"))
                self._used = None if hot.measure is None else hot.measure()
            self._open.append(hot.begin("step", step))
            wait = hot.begin("data_load")
            thread.is_fetching = True  # the wait is recorded here, not by the hook of a DataLoader
            try:
                batch = next(items)
            except StopIteration:
                hot.drop(wait)
                hot.drop(self._open.pop())
                if has_epochs and is_between:
                    hot.drop(self._open.pop())
                return  # an incomplete epoch stays open: it is evaluated before `end`
            except BaseException as error:  # passes on, with the span closed
                hot.fail(wait, error)
                raise
            finally:
                thread.is_fetching = False
            hot.close(wait)
            if has_epochs and is_between:
                self._open[-2].index = self._epoch()  # known once its first batch is fetched
            yield batch
            self._close()
            is_between = self._is_epoch_end is not None and self._is_epoch_end()
            if is_between:
                self._close()
            step += 1

    def until_left(self, items: Iterator[Any]) -> Iterator[Any]:
        """The items of a hand-written loop; ends the recording when iteration stops."""
        try:
            yield from items
        finally:
            self.end()

    def call(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with a span around each call."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            span = hot.begin(name)
            try:
                result = function(*args, **kwargs)
            except BaseException as error:  # passes on, with the span closed
                hot.fail(span, error)
                raise
            hot.close(span)
            return result

        return recorded

    def mark(self, logs: Mapping[str, Mapping[str, Any]], kept: Callable[[str, str], Any]) -> None:
        """Marks the logged scalars, using the copies in the history."""
        for collection in MARKED:
            for name in logs.get(collection, ()):
                value = kept(collection, name)
                if isinstance(value, (int, float, str)):
                    hot.mark(name, value)
                elif getattr(value, "shape", None) == ():
                    clock = hot.device_clock if type(value).__module__ == "torch" else None
                    own = None if clock is None else clock.keep(value, hot.now())
                    hot.mark(name, value if own is None else own)

    def end(self, error: BaseException | None = None) -> None:
        """Closes spans that a stop or an error left open."""
        while self._open:
            self._close(error)

    def _close(self, error: BaseException | None = None) -> None:
        span = self._open.pop()
        if span.name == "epoch" and not span.end:
            if hot.at_epoch_end is not None:
                hot.at_epoch_end(span)  # takes snapshots before the epoch is closed
            if self._used is not None and hot.now() - span.start >= hot.MEASURED_NS:
                self._used.note(span)
        if error is None:
            hot.close(span)
        else:
            hot.fail(span, error)


def watch(
    is_epoch_end: Callable[[], bool] | None = None, epoch: Callable[[], int] = lambda: 0
) -> Watch | None:
    """A recorder for one loop; None if not profiling."""
    if hot.off or (hot.root is hot.IDLE_ROOT and hot.ring.maxlen == hot.IDLE_RING):
        return None
    return Watch(is_epoch_end, epoch)


def is_fatal(number: int, handler: Any) -> bool:
    """Whether a signal with this handler ends the process: the default, or cirron's over it."""
    process = sys.modules.get("cirron.session.lifecycle")
    owner = getattr(handler, "__self__", None)
    if process is not None and isinstance(owner, process.Process):
        handler = owner._previous.get(number)
    return not callable(handler)


def launched_rank() -> int | None:
    """The rank that the launcher has set, or None."""
    from cirron.session import identity

    return identity.first_number(os.environ, identity.RANK)
