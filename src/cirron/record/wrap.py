"""Puts a span around each call of a function, coroutine or generator.

The span of a coroutine lasts until it returns, that of a generator until it is exhausted, closed or
dropped. It is current only while the function's own code runs: what the consumer of a stream does
between two items is not inside it, and interleaved streams, or streams resumed by several threads,
do not mix.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from contextvars import Token
from types import AsyncGeneratorType, CoroutineType, GeneratorType

from cirron.record import hot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator
    from typing import Any, TypeAlias

    Begin: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], "Call | None"]


def in_scope(function: Any, open_scope: Callable[[], hot.Span]) -> Any:
    """Wraps a function so that each call is inside a scope from `open_scope`."""

    def begin(args: object, kwargs: object) -> Call | None:
        return None if hot.off else Call(open_scope().__enter__())

    return in_call(function, begin)


class Call:
    """One call and its span. Subclasses override methods to see the result."""

    __slots__ = ("_inner", "_outer", "span")

    def __init__(self, span: hot.Span) -> None:
        self.span = span
        self._inner: hot.Span | None = span  # current while the function runs
        self._outer: hot.Span | None = None  # current in the caller

    def returned(self, value: Any) -> Any:
        """Ends the call of a plain or async function; returns what the caller gets."""
        self.close()
        return value

    def yielded(self, item: Any) -> None:
        """Called for each item of a stream."""

    def exhausted(self, value: Any) -> None:
        """Ends a stream that is exhausted; `value` is what a generator returned."""
        self.close()

    def failed(self, error: BaseException) -> None:
        """Ends the call with an exception; `GeneratorExit` if a stream was not exhausted."""
        if self.span.parent.end:
            self._rise()
        hot.fail(self.span, error)

    def close(self) -> None:
        if self.span.parent.end:
            self._rise()
        hot.close(self.span)

    def _rise(self) -> None:
        """Moves the span of a stream that outlives its parent under the next open ancestor."""
        parent = self.span.parent
        while parent.end and parent.parent is not parent:
            parent = parent.parent
        self.span.parent = parent

    # -- pausing and resuming ---------------------------------------------------------------

    def set_aside(self) -> None:
        """Makes the span before the call current again."""
        if not self.span.end:  # else it was too deep, and never current
            before = self.span.token.old_value
            hot.enter_context(None if before is Token.MISSING else before)

    def __enter__(self) -> None:
        self._outer = hot.leave_context()
        hot.enter_context(self._inner)

    def __exit__(self, *_: object) -> None:
        self._inner = hot.leave_context()
        hot.enter_context(self._outer)


class Unseen(Call):
    """Stands in for a call while profiling is off."""

    __slots__ = ()

    def __init__(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def close(self) -> None: ...
    def failed(self, error: BaseException) -> None: ...


UNSEEN = Unseen()


def in_call(function: Any, begin: Begin) -> Any:
    """Wraps a function so that `begin` is called for each call; None: do not record the call."""
    if isinstance(function, (classmethod, staticmethod)):
        return type(function)(in_call(function.__func__, begin))

    def begin_aside(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        call = begin(args, kwargs)
        if call is not None:
            call.set_aside()
        return call

    for is_kind, wrapped in KINDS.items():
        if is_kind(function) or is_kind(function.__call__):  # an instance with `__call__`
            return wrapped(function, begin_aside)
    return _plain(function, begin)


def follow(value: Any, call: Call) -> Any:
    """Replaces a generator or coroutine that a call has returned; the call lasts as long as it.

    The replacement has the same type. The call is paused until it runs.
    """

    def begin(args: object, kwargs: object) -> Call:
        never_begun.detach()
        return call

    stand_in = RETURNED[type(value)](lambda: value, begin)()
    # Python runs no code of a generator that is dropped before it was started.
    never_begun = weakref.finalize(stand_in, call.failed, GeneratorExit())
    never_begun.atexit = False
    call.set_aside()
    return stand_in


def _plain(function: Any, begin: Begin) -> Any:
    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        call = begin(args, kwargs)
        if call is None:
            return function(*args, **kwargs)
        try:
            value = function(*args, **kwargs)
        except BaseException as error:  # noted on the span, and raised again
            call.failed(error)
            raise
        return call.returned(value)

    return plain


def _coroutine(function: Any, begin: Begin) -> Any:
    @functools.wraps(function)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        call = begin(args, kwargs)
        if call is None:
            return await function(*args, **kwargs)
        try:
            with call:
                value = await function(*args, **kwargs)
        except BaseException as error:  # noted on the span, and raised again
            call.failed(error)
            raise
        return call.returned(value)

    return coroutine


def _stream(function: Any, begin: Begin) -> Any:
    @functools.wraps(function)
    def stream(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        call = begin(args, kwargs)
        if call is None:
            return (yield from function(*args, **kwargs))
        try:
            items = function(*args, **kwargs)
            resume, given = items.send, None
            while True:
                try:
                    with call:
                        item = resume(given)
                except StopIteration as end:
                    call.exhausted(end.value)
                    return end.value
                call.yielded(item)
                try:
                    given = yield item
                    resume = items.send
                except GeneratorExit:
                    with call:
                        items.close()
                    raise
                except BaseException as error:  # noqa: BLE001  thrown in: it goes on inward
                    resume, given = items.throw, error
        except BaseException as error:  # noted on the span, and raised again
            call.failed(error)
            raise

    return stream


def _stream_async(function: Any, begin: Begin) -> Any:
    # As above; also used while profiling is off, because there is no async `yield from`.
    @functools.wraps(function)
    async def stream_async(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        call = begin(args, kwargs) or UNSEEN
        try:
            items = function(*args, **kwargs)
            resume, given = items.asend, None
            while True:
                try:
                    with call:
                        item = await resume(given)
                except StopAsyncIteration:
                    call.exhausted(None)
                    return
                call.yielded(item)
                try:
                    given = yield item
                    resume = items.asend
                except GeneratorExit:
                    with call:
                        await items.aclose()
                    raise
                except BaseException as error:  # noqa: BLE001  thrown in: it goes on inward
                    resume, given = items.athrow, error
        except BaseException as error:  # noted on the span, and raised again
            call.failed(error)
            raise

    return stream_async


KINDS: dict[Callable[[Any], bool], Callable[[Any, Begin], Any]] = {
    inspect.isasyncgenfunction: _stream_async,
    inspect.iscoroutinefunction: _coroutine,
    inspect.isgeneratorfunction: _stream,
}
RETURNED: dict[type, Callable[[Any, Begin], Any]] = {
    AsyncGeneratorType: _stream_async,
    CoroutineType: _coroutine,
    GeneratorType: _stream,
}
