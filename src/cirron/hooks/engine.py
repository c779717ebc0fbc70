"""What every hook needs: a call inside a span, spans that may turn out to be nothing, long spans.

Runs on the user's threads.
"""

from __future__ import annotations

from _thread import get_ident
from typing import TYPE_CHECKING, Any

from cirron import system
from cirron.record import clock, hot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

STEPS = hot.STEPS


def around(
    span: hot.Span | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    end: Callable[[hot.Span], None] = hot.close,
) -> Any:
    """Calls a function, and ends the span with it, in its error if it raises."""
    try:
        result = function(*args, **(kwargs or {}))
    except BaseException as error:  # passes on, with the span closed
        if span is not None:
            hot.fail(span, error)
        raise
    if span is not None:
        end(span)
    return result


class Tentative(hot.OwnSpan):
    """A span that may turn out to be none. What is recorded in it asks for its number."""

    __slots__ = ("_number", "is_used")

    @property
    def sequence(self) -> int:
        if get_ident() == self.thread:  # else it is the background thread that looks
            self.is_used = True
        return self._number

    @sequence.setter
    def sequence(self, number: int) -> None:
        self._number = number
        self.is_used = False


def end_if_used(span: hot.Span, name: str = "") -> None:
    """Leaves no record of a tentative span in which nothing was recorded.

    `name`: what it is if something was, and it did not come to what it was opened for.
    """
    is_used = not isinstance(span, Tentative) or span.is_used
    if is_used or any(one.parent is span for one in hot.opened.copy()):
        if name:
            span.name, span.index = name, None
        hot.close(span)
    else:
        hot.drop(span)


class Long(hot.OwnSpan):
    """An epoch or an evaluation: long enough to ask for processor time and memory."""

    __slots__ = ("cpu_began",)
    cpu_began: int


def begin_long(name: str, index: int | None = None, attrs: dict[str, Any] | None = None) -> Long:
    """As `hot.begin`."""
    span: Any = hot.begin(name, index, attrs, Long)
    return begin_measuring(span)


def begin_measuring(span: Any) -> Long:
    """Begins to measure a long span."""
    span.cpu_began = clock.processor()
    return span  # type: ignore[no-any-return]


def end_measuring(span: hot.Span) -> None:
    """Notes what a long span took: processor time and, where no device counts it, memory."""
    if not span.end and isinstance(span, Long):
        used: dict[str, Any] = {"cpu_ns": clock.processor() - span.cpu_began}
        peak = system.peak_bytes() if hot.device_clock is None else None
        if peak is not None:
            used["memory_peak_bytes"] = peak
        span.set(**used)


def close_long(span: hot.Span, at: int = 0) -> None:
    """Ends a long span."""
    end_measuring(span)
    hot.close(span, at)
