"""What `ci.trace()` reads: the newest records, as encoded bytes, in this process.

Bytes rather than objects: a hundred thousand spans kept as objects would be walked by every full
garbage collection of the user's program.
"""

from __future__ import annotations

from collections import deque

from cirron.ship.threads import new_lock

# About 100,000 spans, or 60,000 with a mark each.
MAX_BYTES = 32 * 2**20
# While more records than this wait in the ring, which are memory too, this store takes a quarter.
BACKLOG = 250_000


class Memory:
    """A bounded store of encoded spans and marks; the oldest go first, and are counted in bytes."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.evicted_bytes = 0
        self._chunks: deque[tuple[bytes, bytes]] = deque()
        self._lock = new_lock()

    def add(self, spans: bytes, marks: bytes, backlog: int = 0) -> None:
        """Keeps the records of a chunk, at the cost of the oldest ones."""
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
        """All that is kept, oldest first."""
        with self._lock:
            return list(self._chunks)

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._chunks.clear()
            self.bytes = self.evicted_bytes = 0
