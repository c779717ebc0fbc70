"""Reads the valid part of a batch file, after the first check by `scan.py` or the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cirron import wire

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Cirron never writes larger files: batches have 2 MB, merged ones 4 MB.
MAX_BYTES = 256 * 2**20
# Limit of nested lists and objects: everything that formats or encodes a record recurses.
MAX_NESTING = 64
CUT = "has a number of more than 64 bits, which was cut to 64"

# Errors that decoding the content of a file can raise.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError)

_packer = msgspec.msgpack.Encoder()


def decode(payload: bytes) -> tuple[wire.Batch | None, str | None]:
    """The readable part of a batch, and its problems."""
    problem = None
    head: wire.Header | None
    try:
        head = batch = wire.decode_batch(payload)
        refuse_nesting(attributes(batch))
        if not fits(batch):
            batch = msgspec.convert(wire.mend(wire.builtins(batch)), wire.Batch)
            problem = CUT
    except UNREADABLE as error:
        batch, head = None, _salvage_header(payload)
        problem = (
            f"is not a whole batch and was left out ({str(error) or 'it needs too much memory'})"
        )
    if head is not None and head.schema_version > wire.SCHEMA_VERSION:
        problem = (
            f"is of schema version {head.schema_version}, newer than the"
            f" {wire.SCHEMA_VERSION} that this cirron reads;"
            f" {'it was left out' if batch is None else 'what could be read is shown'}."
            " Update: pip install -U cirron"
        )
    return batch, problem


def _salvage_header(payload: bytes) -> wire.Header | None:
    """The head of a batch whose records cannot be read; cirron writes it first."""
    try:
        head = payload.partition(b',"spans":[')[0] + b"}"
        header = msgspec.json.decode(head, type=wire.Header)
    except UNREADABLE:
        return None
    return header if fits(header) else None


def attributes(batch: wire.Batch) -> Iterator[Any]:
    """All attribute and configuration values, which can have any type."""
    if batch.session is not None and isinstance(batch.session.program, wire.Program):
        yield from batch.session.program.config.values()
    for records in (batch.spans, batch.marks, batch.snapshots):
        for record in records:
            if record.attrs:
                yield from record.attrs.values()


def fits(content: Any) -> bool:
    """Whether all integers have at most 64 bits. Takes a third of the time of decoding."""
    try:
        _packer.encode(content)  # unlike JSON, MessagePack has integers of at most 64 bits
    except OverflowError:
        return False
    return True


def refuse_nesting(values: Iterable[Any]) -> None:
    """Raises if values are nested too deep to be formatted or encoded."""
    if _is_deep(values, MAX_NESTING):
        raise msgspec.ValidationError(
            f"it has lists or objects nested more than {MAX_NESTING} levels deep"
        )


def _is_deep(values: Iterable[Any], levels: int) -> bool:
    """Whether any of these values is nested deeper than this."""
    for value in values:
        if value.__class__ is dict or value.__class__ is list:
            inner = value.values() if value.__class__ is dict else value
            if not levels or _is_deep(inner, levels - 1):
                return True
    return False
