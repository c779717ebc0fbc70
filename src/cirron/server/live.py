"""What is new, as one stream of server-sent events: `GET /api/events?cursor=N`.

Of each run only the newest event is kept, under a cursor that grows. A stream is told what has a
greater cursor than it has seen, so a slow one misses nothing that still matters, and nobody keeps a
queue for it. A browser that reconnects says how far it was (`Last-Event-ID`).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec

from cirron.record import clock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

KEEP_ALIVE_S = 15.0
# How often a stream looks whether its key is still good.
CHECK_S = 2.0
MAX_STREAMS = 500


class Hub:
    """The newest event of each run, and who waits for the next."""

    def __init__(self) -> None:
        # Beyond the cursors of any process before this one.
        self.cursor = clock.wall() // 1_000_000
        self.streams = 0
        self._newest: dict[str | None, dict[str, Any]] = {}  # by run; None: the list of runs
        self._changed = asyncio.Event()
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Called in the loop that serves."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Ends all streams, in the loop that serves: uvicorn waits for them when it shuts down."""
        self._is_closed = True
        self._changed.set()

    def publish(self, events: list[dict[str, Any]]) -> None:
        """From any thread."""
        loop = self._loop
        if events and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._publish, events)

    def _publish(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            self.cursor += 1
            self._newest[event.get("id")] = {"cursor": self.cursor, **event}
        self._changed.set()
        self._changed = asyncio.Event()

    def after(self, cursor: int) -> list[dict[str, Any]]:
        """What has happened since, oldest first."""
        found = [one for one in self._newest.values() if one["cursor"] > cursor]
        return sorted(found, key=lambda one: int(one["cursor"]))

    async def stream(
        self, cursor: int | None, is_allowed: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[bytes]:
        """The bytes of one stream, until its reader goes or may not read any more."""
        self.streams += 1
        try:
            if cursor is None or cursor > self.cursor:
                cursor = self.cursor
                yield line({"cursor": cursor, "kind": "runs"})
            said_ns = clock.now()
            while not self._is_closed and await is_allowed():
                changed = self._changed
                for event in self.after(cursor):
                    cursor = int(event["cursor"])
                    said_ns = clock.now()
                    yield line(event)
                if clock.now() - said_ns > KEEP_ALIVE_S * 1e9:
                    said_ns = clock.now()
                    # An event, since pages are not told of comments: after a laptop's sleep a
                    # stream looks open and says nothing, and its page has to notice.
                    yield b"event: alive\ndata: {}\n\n"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), CHECK_S)
        finally:
            self.streams -= 1


def line(event: dict[str, Any]) -> bytes:
    """An event as the format has it."""
    return b"id: %d\ndata: %s\n\n" % (event["cursor"], msgspec.json.encode(event))
