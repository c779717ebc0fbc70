"""Puts a scope round each call of a function, whatever kind of function it is."""

from __future__ import annotations

import contextlib
import functools
import inspect

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator
    from typing import Any

    from cirron.record.hot import Span


def in_scope(function: Any, open_scope: Callable[[], Span]) -> Any:
    """The function, each call of it inside the scope that `open_scope` makes.

    The scope of a coroutine lasts until it returns, that of a generator until it is exhausted,
    closed or dropped.
    """
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def stream_async(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            # What `yield from` does below, which Python does not have for these.
            with open_scope():
                async with contextlib.aclosing(function(*args, **kwargs)) as items:
                    step = items.asend(None)
                    while True:
                        try:
                            item = await step
                        except StopAsyncIteration:
                            return
                        try:
                            step = items.asend((yield item))
                        except GeneratorExit:
                            raise
                        except BaseException as error:  # noqa: BLE001  thrown in: it goes on inward
                            step = items.athrow(error)

        return stream_async
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            with open_scope():
                return await function(*args, **kwargs)

        return call_async
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def stream(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            with open_scope():
                return (yield from function(*args, **kwargs))

        return stream

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with open_scope():
            return function(*args, **kwargs)

    return call
