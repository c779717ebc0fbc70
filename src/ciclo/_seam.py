"""All that ciclo knows of cirron. While somebody profiles, a loop is recorded: `epoch` and `step`
spans, what each callback took, what was waited for (`data_load`), and logs as marks. While nobody
does, `watch` returns None and a loop pays nothing.
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

# What a mark holds; arrays of outputs and the like stay in the history.
MARKED = ("metrics", "losses", "stateful_metrics")


class Watch:
    """Records one loop."""

    def __init__(self, is_epoch_end: Callable[[], bool] | None, epoch: Callable[[], int]) -> None:
        self._is_epoch_end = is_epoch_end  # None: the loop knows no epochs
        self._epoch = epoch
        self._open: list[hot.Span] = []

    def steps(self, dataset: Iterable[Any], first: int) -> Iterator[Any]:
        """The batches, each inside a `step` span that begins with the wait for it."""
        items = iter(dataset)
        thread = hot._this_thread
        step = first
        has_epochs = self._is_epoch_end is not None
        is_between = True
        while True:
            if has_epochs and is_between:
                self._open.append(hot.begin("epoch"))
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
                return  # an epoch that was cut is open: it is evaluated before `end`
            except BaseException as error:  # passes on, with the span closed
                hot.fail(wait, error)
                raise
            finally:
                thread.is_fetching = False
            hot.close(wait)
            if has_epochs and is_between:
                self._open[-2].index = self._epoch()  # known now that its first batch is here
            yield batch
            self._close()
            is_between = self._is_epoch_end is not None and self._is_epoch_end()
            if is_between:
                self._close()
            step += 1

    def until_left(self, items: Iterator[Any]) -> Iterator[Any]:
        """The items of a loop written by hand, which nobody else tells us the end of."""
        try:
            yield from items
        finally:
            self.end()

    def call(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, each call of it inside a span."""

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
        """Marks the scalars among the logs, as the history has kept them: that is a copy."""
        for collection in MARKED:
            for name in logs.get(collection, ()):
                value = kept(collection, name)
                if isinstance(value, (int, float, str)):
                    hot.mark(name, value)
                elif getattr(value, "shape", None) == ():
                    clock = hot.device_clock if type(value).__module__ == "torch" else None
                    own = None if clock is None else clock.keep(value)
                    hot.mark(name, value if own is None else own)

    def end(self, error: BaseException | None = None) -> None:
        """Closes what a stop or an error has left open."""
        while self._open:
            self._close(error)

    def _close(self, error: BaseException | None = None) -> None:
        span = self._open.pop()
        if span.name == "epoch" and not span.end and hot.at_epoch_end is not None:
            hot.at_epoch_end(span)  # takes snapshots, while the epoch is open
        if error is None:
            hot.close(span)
        else:
            hot.fail(span, error)


def watch(
    is_epoch_end: Callable[[], bool] | None = None, epoch: Callable[[], int] = lambda: 0
) -> Watch | None:
    """A recorder for one loop, or None while nobody profiles."""
    if hot.off or (hot.root is hot.IDLE_ROOT and hot.ring.maxlen == hot.IDLE_RING):
        return None
    return Watch(is_epoch_end, epoch)


def is_fatal(number: int, handler: Any) -> bool:
    """Whether a handler of this signal ends the process: the system's, or cirron's before it."""
    process = sys.modules.get("cirron.session.lifecycle")
    owner = getattr(handler, "__self__", None)
    if process is not None and isinstance(owner, process.Process):
        handler = owner._previous.get(number)
    return not callable(handler)


def launched_rank() -> int | None:
    """Which process of a job this is, as its launcher says; None if nobody has told it."""
    from cirron.session import identity

    return identity.first_number(os.environ, identity.RANK)
