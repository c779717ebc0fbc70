"""The batch: what is written, sent and read back. Spool format, version 1.

The format is public and stable: writer and reader share these types, and golden files pin them.
Readers ignore keys that they do not know. Strict JSON: no NaN or Infinity tokens.

A batch file has a fixed layout, the header and then three arrays, so that batches can be merged by
joining the bytes of their arrays, without decoding (see `ship/keeper.py`).

There are hundreds of thousands of spans and marks, without cycles, so the garbage collector does
not track them (`gc=False`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA_VERSION = 1
INTEGERS = range(-(2**63), 2**64)  # what the encoder can write


class Clock(msgspec.Struct, frozen=True):
    """The session's clock anchor: wall and monotonic time read together, and the uncertainty."""

    wall_ns: int
    monotonic_ns: int
    uncertainty_ns: int


class Program(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The program, as far as it is known: later batches of a session may know more."""

    script: str | None = None
    arguments: list[str] = []  # without secrets
    folder: str | None = None
    python: str | None = None
    versions: dict[str, str] = {}  # of the packages that the program has imported
    gpus: list[str] = []
    commit: str | None = None
    branch: str | None = None
    dirty: bool | None = None  # tracked files were changed since the commit
    tags: dict[str, str] = {}
    config: dict[str, Any] = {}  # without secrets


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """Who wrote a batch: enough to identify, order and align the batches of many ranks."""

    id: str
    run_id: str
    attempt: int
    host: str
    pid: int
    rank: int | None
    local_rank: int | None
    world_size: int | None
    clock: Clock
    pipeline_id: str | None = None
    deployment_id: str | None = None
    workspace_id: str | None = None
    program: Program | msgspec.UnsetType = msgspec.UNSET


class Span(msgspec.Struct, gc=False):
    """One span. `end_ns` is null only in the black box, for spans that are still open."""

    id: str
    name: str
    parent_id: str | None
    index: int | None
    start_ns: int
    end_ns: int | None
    cpu_ns: int | None
    gpu_ns: int | None
    memory_peak_bytes: int | None
    thread_id: int
    pid: int
    rank: int | None
    attrs: dict[str, Any]
    mark_ids: list[str]


class Mark(msgspec.Struct, omit_defaults=True, gc=False):
    """One value. NaN and infinities are null, named in `value_nonfinite` ("nan", "inf", "-inf")."""

    id: str
    span_id: str
    name: str
    value_type: str
    value: float | int | str | bool | None
    attrs: dict[str, Any]
    ts_ns: int
    kind: str
    value_nonfinite: str | None = None


class Histogram(msgspec.Struct):
    """16 equal bins: 17 edges and 16 counts."""

    bins: list[float]
    counts: list[int]


class Stats(msgspec.Struct):
    """Statistics over the finite values of a tensor; null where there are none."""

    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    norm: float | None
    histogram: Histogram


class Snapshot(msgspec.Struct):
    """Statistics of one tensor at an epoch boundary, and the location of raw values, if kept."""

    id: str
    span_id: str
    tensor_name: str
    shape: list[int]
    dtype: str
    mode: str
    stats: Stats
    blob_uri: str | None
    ts_ns: int
    attrs: dict[str, Any]


class Header(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A batch without its records. Batches of other writers may have no `session`."""

    schema_version: int
    sdk_version: str
    batch_id: str
    created_ns: int
    session: Session | None = None
    merged: list[str] = []  # ids of the batches that this one replaces


class Batch(Header, kw_only=True, omit_defaults=False):
    """A batch as a reader sees it."""

    spans: list[Span] = []
    marks: list[Mark] = []
    snapshots: list[Snapshot] = []


class Sections(msgspec.Struct):
    """The encoded records of a batch: for each array, chunks of records without brackets."""

    spans: list[bytes] = []
    marks: list[bytes] = []
    snapshots: list[bytes] = []

    def __iter__(self) -> Iterator[list[bytes]]:
        return iter((self.spans, self.marks, self.snapshots))


_KEYS = (b',"spans":[', b'],"marks":[', b'],"snapshots":[')
_encoder = msgspec.json.Encoder(enc_hook=str)  # unknown types become text, so no batch is lost
_spans_decoder = msgspec.json.Decoder(list[Span])
_marks_decoder = msgspec.json.Decoder(list[Mark])
_batch_decoder = msgspec.json.Decoder(Batch)


# Start and end of each array of a batch, without its brackets.
Layout: TypeAlias = list[tuple[int, int]]


def encode(value: Any) -> bytes:
    """One JSON value. Parts that cannot be encoded are replaced, so that the rest is not lost."""
    try:
        return _encoder.encode(value)
    except (ValueError, OverflowError):
        return _encoder.encode(mend(builtins(value), INTEGERS[-1]))


def mend(value: Any, most: int = 2**63 - 1) -> Any:
    """The value without lone surrogates, and with integers cut to what readers can hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, int) and not isinstance(value, bool):
        return max(-(2**63), min(value, most))
    if isinstance(value, list):
        return [mend(item, most) for item in value]
    if isinstance(value, dict):
        return {mend(key): mend(item, most) for key, item in value.items()}
    return value


def builtins(value: Any) -> Any:
    """A record as plain dicts and lists."""
    return msgspec.to_builtins(value, enc_hook=str)


def changed(session: Session, **fields: Any) -> Session:
    return msgspec.structs.replace(session, **fields)


# Encodes a list of records; raises for lone surrogates and large integers.
encode_list = _encoder.encode


def encode_records(records: list[Any]) -> bytes:
    """The inside of a JSON array: records joined by commas."""
    return encode(records)[1:-1]


def decode_spans(joined: bytes) -> list[Span]:
    """Spans from the inside of a JSON array."""
    return _spans_decoder.decode(b"[" + joined + b"]")


def decode_marks(joined: bytes) -> list[Mark]:
    """Marks from the inside of a JSON array."""
    return _marks_decoder.decode(b"[" + joined + b"]")


def encode_batch(header: Header, sections: Sections) -> tuple[list[bytes], Layout]:
    """A whole batch, in pieces to be written in order, and the positions of its arrays."""
    head = encode(header)[:-1]
    pieces = [head]
    layout = []
    start = len(head)
    for key, runs in zip(_KEYS, sections, strict=True):
        pieces.append(key)
        start += len(key)
        first = start
        for number, run in enumerate(run for run in runs if run):
            if number:
                pieces.append(b",")
                start += 1
            pieces.append(run)
            start += len(run)
        layout.append((first, start))
    pieces.append(b"]}")
    return pieces, layout


def split_batch(payload: bytes, layout: Layout) -> Sections:
    """The sections of a batch from `encode_batch`, without decoding."""
    return Sections(*([payload[first:last]] for first, last in layout))


def cut_batch(payload: bytes) -> tuple[bytes, list[memoryview]] | None:
    """The header and the arrays of a batch from `encode_batch`, without decoding.

    None: it has another layout. A file that only looks similar fails when the pieces are decoded.
    """
    starts = [payload.find(_KEYS[0]), *(payload.rfind(key) for key in _KEYS[1:])]
    if starts[0] < 0 or starts != sorted(starts) or not payload.endswith(b"]}"):
        return None
    ends = (starts[1] + 1, starts[2] + 1, len(payload) - 1)
    bounds = zip(starts, _KEYS, ends, strict=True)
    view = memoryview(payload)  # copying would take half as long as decoding
    arrays = [view[start + len(key) - 1 : end] for start, key, end in bounds]
    return payload[: starts[0]] + b"}", arrays


def decode_batch(payload: bytes) -> Batch:
    """The content of a batch file, validated."""
    return _batch_decoder.decode(payload)
