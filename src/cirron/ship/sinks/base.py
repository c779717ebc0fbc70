"""The interface between the flusher and a destination. Everything runs on background threads.

Your own sink needs one method, `emit(batch) -> Outcome`; see `ci.profile(sinks=[...])`.
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

    DONE = "done"  # delivered
    HELD = "held"  # not yet delivered; the sink keeps it and tries again
    DROPPED = "dropped"  # lost, and counted


class Blob(NamedTuple):
    """A file that belongs to a batch: its path, and its key on the server."""

    path: Path
    key: str


class Sealed:
    """A finished batch, encoded once for all sinks."""

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
        self.lines = lines  # its spans, if a sink prints them
        self.blobs = blobs

    @property
    def payload(self) -> bytes:
        """The whole batch as one JSON text. Files are written from `pieces` instead."""
        return b"".join(self.pieces)

    @property
    def batch_id(self) -> str:
        """The id by which a server recognises a second copy."""
        return self.header.batch_id

    @property
    def file_name(self) -> str:
        """Its name in the spool; names sort by time."""
        return f"{self.header.created_ns:020d}-{self.batch_id}.json"

    def decode(self) -> wire.Batch:
        """The batch as a reader sees it."""
        return wire.decode_batch(self.payload)


class Emitter(Protocol):
    """What a sink has to implement."""

    def emit(self, batch: Sealed) -> Outcome:
        """Takes a batch. A failure of the destination is an outcome, not an exception."""


class Sink:
    """Base class of cirron's own sinks.

    The flusher calls `emit` and `tick`, which must not block. A sink that may block has its own
    thread, or is put into a `Lane`.
    """

    is_patient = False  # closing it may take until the exit deadline

    def start(self) -> None:
        """Starts its thread, if it has one. At the end of the process, that would be too late."""

    def emit(self, batch: Sealed) -> Outcome:
        """Takes a batch."""
        raise NotImplementedError

    def tick(self) -> None:
        """Called at every flush interval, with or without a batch: retry, clean up."""

    def settle(self, deadline_ns: int) -> bool:
        """Waits until its batches are delivered. False: not by the deadline, or no progress."""
        return True

    def close(self, deadline_ns: int) -> None:
        """Finishes by the deadline (on the monotonic clock) and releases its resources."""

    def after_fork(self) -> None:
        """In a forked child: releases what belongs to the parent. No other call follows."""

    def health(self) -> dict[str, object]:
        """Its counters, for `ci.health()`."""
        return {}
