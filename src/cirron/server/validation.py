"""Checks a batch when it arrives: like the file reader, and with numbers that fit the columns.

The file reader repairs numbers of more than 63 bits, slowly. A client could keep the compactor busy
with that, so such batches are rejected here.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from cirron import wire
from cirron.runs import batches
from cirron.server.responses import Refusal

Int64: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Time: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=1_000)]


class Clock(wire.Clock, frozen=True):
    """`wire.Clock` with limits; the same holds for the classes below."""

    wall_ns: Time
    monotonic_ns: Int64
    uncertainty_ns: Int64


class Session(wire.Session, frozen=True, kw_only=True):
    """See `wire.Session`."""

    id: Name
    # Browsers cannot request an address with "", "." or ".." in it.
    run_id: Annotated[Name, msgspec.Meta(pattern=r"^(?!\.{0,2}\Z)")]
    attempt: Int64
    pid: Int64
    rank: Int64 | None
    local_rank: Int64 | None
    world_size: Int64 | None
    clock: Clock


class Span(wire.Span, gc=False, kw_only=True):
    """See `wire.Span`."""

    index: Int64 | None
    start_ns: Int64
    end_ns: Int64 | None
    cpu_ns: Int64 | None
    gpu_ns: Int64 | None
    memory_peak_bytes: Int64 | None
    thread_id: Int64
    pid: Int64
    rank: Int64 | None


class Mark(wire.Mark, gc=False, kw_only=True):
    """See `wire.Mark`."""

    ts_ns: Int64


class Histogram(wire.Histogram):
    """See `wire.Histogram`."""

    counts: list[Int64]


class Stats(wire.Stats, kw_only=True):
    """See `wire.Stats`."""

    histogram: Histogram


class Snapshot(wire.Snapshot, kw_only=True):
    """See `wire.Snapshot`."""

    shape: list[Int64]
    stats: Stats
    ts_ns: Int64


class Batch(wire.Batch, kw_only=True):
    """See `wire.Batch`."""

    batch_id: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    created_ns: Time
    session: Session | None = None
    # Only files are merged. Here it would mark the batch's own records as already known.
    merged: Annotated[list[str], msgspec.Meta(max_length=0)] = msgspec.field(default_factory=list)
    spans: list[Span] = msgspec.field(default_factory=list)  # type: ignore[assignment]
    marks: list[Mark] = msgspec.field(default_factory=list)  # type: ignore[assignment]
    snapshots: list[Snapshot] = msgspec.field(default_factory=list)  # type: ignore[assignment]


_decoder = msgspec.json.Decoder(Batch)


def batch_id(payload: bytes) -> str:
    """The id of a batch. Raises if the batch cannot be stored."""
    try:
        batch = _decoder.decode(payload)
        batches.refuse_nesting(batches.attributes(batch))
    except batches.UNREADABLE as error:
        raise Refusal(422, f"the batch cannot be read: {error}") from None
    return batch.batch_id
