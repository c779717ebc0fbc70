"""What `ci.trace()` reads: the newest records of this process, as encoded bytes.

They are bytes because every full garbage collection would visit a hundred thousand span objects.
"""

from __future__ import annotations

from collections import deque

from cirron.ship.threads import new_lock

# About 100,000 spans, or 60,000 with a mark each.
MAX_BYTES = 32 * 2**20
# With more records than this in the ring, which also take memory, the limit is a quarter of that.
BACKLOG = 250_000


class Memory:
    """A bounded store of encoded spans and marks; the oldest are dropped first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.evicted_bytes = 0
        self._chunks: deque[tuple[bytes, bytes]] = deque()
        self._lock = new_lock()

    def add(self, spans: bytes, marks: bytes, backlog: int = 0) -> None:
        """Adds the records of a chunk, and drops the oldest above the limit."""
        limit = self.max_bytes if backlog < BACKLOG else self.max_bytes // 4
        with self._lock:
            self._chunks.append((spans, marks))
            self.bytes += len(spans) + len(marks)
            while self.bytes > limit:
                oldest = self._chunks.popleft()
                size = len(oldest[0]) + len(oldest[1])
                self.bytes -= size
                self.evicted_bytes += size

    def chunks(self) -> list[tuple[bytes, bytes]]:
        """All chunks, oldest first."""
        with self._lock:
            return list(self._chunks)

    def clear(self) -> None:
        with self._lock:
            self._chunks.clear()
            self.bytes = self.evicted_bytes = 0
