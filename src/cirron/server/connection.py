"""One connection: uvicorn's protocol, which waits forever for a first or a slow request.

A client that opens connections and sends nothing, sends a byte now and then, or never reads the
response, would use up the connections of the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import asyncio

STALLED_S = 75.0


class Connection(H11Protocol):
    """Closes itself if it waited for its client at two checks, and nothing happened in between."""

    _check: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._check_later()

    def connection_lost(self, exc: Exception | None) -> None:
        self._check.cancel()
        super().connection_lost(exc)

    def _check_later(self, before: tuple[Any, int] | None = None) -> None:
        request, unsent_bytes = now = self.cycle, self.transport.get_write_buffer_size()
        is_waiting = unsent_bytes > 0 or request is None or request.response_complete
        if is_waiting and now == before:
            self.transport.abort()
        else:
            self._check = self.loop.call_later(STALLED_S, self._check_later, now)
