"""Changes as a stream of server-sent events: `GET /api/events?cursor=N`.

Only the newest event of each run is kept, with an increasing cursor. A stream gets the events with
a greater cursor than its last one. So a slow stream misses nothing that still matters and needs no
queue. A browser that reconnects sends its last cursor (`Last-Event-ID`).
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
CHECK_S = 2.0  # how often a stream checks that its key is still valid
MAX_STREAMS = 500


class Hub:
    """The newest event of each run, and the streams that wait for the next one."""

    def __init__(self) -> None:
        # Greater than the cursors of earlier processes.
        self.cursor = clock.wall() // 1_000_000
        self.streams = 0
        self._newest: dict[str | None, dict[str, Any]] = {}  # by run; None: the list of runs
        self._changed = asyncio.Event()
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Called in the server's event loop."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Ends all streams: uvicorn would wait for them at shutdown."""
        self._is_closed = True
        self._changed.set()

    def publish(self, events: list[dict[str, Any]]) -> None:
        """Sends events to all streams; from any thread."""
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
        """The events after a cursor, oldest first."""
        found = [one for one in self._newest.values() if one["cursor"] > cursor]
        return sorted(found, key=lambda one: int(one["cursor"]))

    async def stream(
        self, cursor: int | None, is_allowed: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[bytes]:
        """The bytes of one stream, until the browser leaves or its key is revoked."""
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
                    # An event, because pages cannot see comments: after a laptop's sleep a
                    # stream looks open but is dead, and the page has to notice.
                    yield b"event: alive\ndata: {}\n\n"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), CHECK_S)
        finally:
            self.streams -= 1


def line(event: dict[str, Any]) -> bytes:
    """An event in the format of server-sent events."""
    return b"id: %d\ndata: %s\n\n" % (event["cursor"], msgspec.json.encode(event))
