"""The contract between the flusher and a destination. All of it runs on background threads.

A destination of your own needs one method, `emit(batch) -> Outcome`; see `ci.profile(sinks=[...])`.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cirron import wire

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cirron.ship.collect import Line


class Outcome(enum.Enum):
    """What became of a batch."""

    DONE = "done"  # it is where it should be
    HELD = "held"  # not yet; the sink keeps it and tries again
    DROPPED = "dropped"  # it is lost, and counted


class Blob(NamedTuple):
    """A file that belongs to a batch: where it lies, and the key a server knows it by."""

    path: Path
    key: str


class Sealed:
    """A finished batch, encoded once for all sinks."""

    __slots__ = ("blobs", "header", "layout", "lines", "pieces", "records", "size")

    def __init__(
        self,
        header: wire.Header,
        sections: wire.Sections,
        *,
        records: int,
        lines: Sequence[Line] = (),
        blobs: Sequence[Blob] = (),
    ) -> None:
        self.header = header
        self.pieces, self.layout = wire.encode_batch(header, sections)
        self.size = sum(map(len, self.pieces))
        self.records = records  # spans, marks and snapshots in it
        self.lines = lines  # its spans, for sinks that print them
        self.blobs = blobs

    @property
    def payload(self) -> bytes:
        """The whole batch as one JSON text; a file is written from the pieces, without it."""
        return b"".join(self.pieces)

    @property
    def batch_id(self) -> str:
        """The id that a server drops a second copy by."""
        return self.header.batch_id

    @property
    def file_name(self) -> str:
        """Its name in the spool; names sort by time."""
        return f"{self.header.created_ns:020d}-{self.batch_id}.json"

    def decode(self) -> wire.Batch:
        """The batch as a reader sees it."""
        return wire.decode_batch(self.payload)


class Emitter(Protocol):
    """What a sink must have."""

    def emit(self, batch: Sealed) -> Outcome:
        """Takes a batch. What can go wrong outside is an outcome, not an exception."""


class Sink:
    """A destination of ours; what it does not need it inherits.

    The flusher calls `emit` and `tick`, so neither may wait for anything: what blocks has a thread
    of its own, or is put into a `Lane`.
    """

    is_patient = False  # at the end it may take all the time that there is

    def start(self) -> None:
        """Starts its thread, if it has one: at the end of the process it is too late for that."""

    def emit(self, batch: Sealed) -> Outcome:
        """Takes a batch."""
        raise NotImplementedError

    def tick(self) -> None:
        """Called at every flush interval, batch or no batch: try again, tidy up."""

    def settle(self, deadline_ns: int) -> bool:
        """Waits until what it was given is out. False: it is not, by the deadline, or nothing
        moves.
        """
        return True

    def close(self, deadline_ns: int) -> None:
        """Finishes by the deadline (on the monotonic clock) and lets go of everything."""

    def after_fork(self) -> None:
        """In a forked child: lets go of what is the parent's; nothing else is called after it."""

    def health(self) -> dict[str, object]:
        """Its counters, for `ci.health()`."""
        return {}
