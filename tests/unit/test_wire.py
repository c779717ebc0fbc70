"""The batch format: a golden file pins it, readers are lenient, and JSON is strict."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cirron import wire

GOLDEN = Path(__file__).parent / "golden" / "batch-v1.json"

SESSION = wire.Session(
    id="5" * 32,
    run_id="slurm-7",
    attempt=2,
    host="node0",
    pid=4242,
    rank=3,
    local_rank=1,
    world_size=8,
    clock=wire.Clock(1_700_000_000_000_000_000, 12_345, 160),
    pipeline_id="p",
    deployment_id=None,
    workspace_id="w",
)
HEADER = wire.Header(
    schema_version=wire.SCHEMA_VERSION,
    sdk_version="1.2.3",
    batch_id="b" * 32,
    created_ns=1_700_000_001_000_000_000,
    session=SESSION,
)
EPOCH = wire.Span(
    id="e" * 32,
    name="epoch",
    parent_id=None,
    index=0,
    start_ns=1_700_000_000_000_001_000,
    end_ns=1_700_000_000_000_143_000,
    cpu_ns=90_000,
    gpu_ns=None,
    memory_peak_bytes=1_048_576,
    thread_id=7,
    pid=4242,
    rank=3,
    attrs={"mode": "train", "sizes": [1, 2], "note": 'quoted "ü"'},
    mark_ids=["a" * 32, "c" * 32],
)
STEP = wire.Span(
    id="f" * 32,
    name="step",
    parent_id="e" * 32,
    index=None,
    start_ns=1_700_000_000_000_002_000,
    end_ns=1_700_000_000_000_003_000,
    cpu_ns=None,
    gpu_ns=None,
    memory_peak_bytes=None,
    thread_id=7,
    pid=4242,
    rank=None,
    attrs={},
    mark_ids=[],
)
LOSS = wire.Mark(
    id="a" * 32,
    span_id="e" * 32,
    name="epoch_loss",
    value_type="float",
    value=0.5234,
    attrs={"split": "train"},
    ts_ns=1_700_000_000_000_100_000,
    kind="summary",
)
BAD_LOSS = wire.Mark(
    id="c" * 32,
    span_id="root",
    name="loss",
    value_type="float",
    value=None,
    attrs={},
    ts_ns=1_700_000_000_000_100_001,
    kind="point",
    value_nonfinite="nan",
)
SNAPSHOT = wire.Snapshot(
    id="d" * 32,
    span_id="e" * 32,
    tensor_name="layer.weight.grad",
    shape=[2, 3],
    dtype="float32",
    mode="stats",
    stats=wire.Stats(
        0.5, 0.25, 0.0, 1.0, 1.5, wire.Histogram([n / 16 for n in range(17)], [0] * 15 + [6])
    ),
    blob_uri=None,
    ts_ns=1_700_000_000_000_120_000,
    attrs={"nonfinite": 0},
)


def sections() -> wire.Sections:
    return wire.Sections(
        [wire.encode_records([EPOCH]), b"", wire.encode_records([STEP])],
        [wire.encode_records([LOSS, BAD_LOSS])],
        [wire.encode_records([SNAPSHOT])],
    )


def test_the_format_is_pinned() -> None:
    """A batch is encoded to exactly the bytes of the golden file."""
    pieces, _ = wire.encode_batch(HEADER, sections())

    assert GOLDEN.read_bytes() == b"".join(pieces)


def test_the_golden_file_is_read_back() -> None:
    """What was written in version 1 is read as what it was."""
    batch = wire.decode_batch(GOLDEN.read_bytes())

    assert (1, "1.2.3", "b" * 32, HEADER.created_ns) == (
        batch.schema_version,
        batch.sdk_version,
        batch.batch_id,
        batch.created_ns,
    )
    assert (SESSION, [EPOCH, STEP], [LOSS, BAD_LOSS], [SNAPSHOT]) == (
        batch.session,
        batch.spans,
        batch.marks,
        batch.snapshots,
    )


def test_what_runs_is_read_back() -> None:
    """What is known of the program is on the session, without what is not known."""
    program = wire.Program(script="train.py", config={"lr": 0.1}, dirty=False)
    header = msgspec.structs.replace(HEADER, session=wire.changed(SESSION, program=program))
    payload = b"".join(wire.encode_batch(header, wire.Sections())[0])
    batch = wire.decode_batch(payload)

    assert batch.session is not None
    assert program == batch.session.program
    assert {"script": "train.py", "dirty": False, "config": {"lr": 0.1}} == json.loads(payload)[
        "session"
    ]["program"]


def test_the_keys_are_those_of_the_format() -> None:
    """Batch, span, mark and snapshot have the keys that the public format names."""
    batch = json.loads(GOLDEN.read_bytes())

    assert [
        "schema_version",
        "sdk_version",
        "batch_id",
        "created_ns",
        "session",
        "spans",
        "marks",
        "snapshots",
    ] == list(batch)
    assert [
        "id",
        "name",
        "parent_id",
        "index",
        "start_ns",
        "end_ns",
        "cpu_ns",
        "gpu_ns",
        "memory_peak_bytes",
        "thread_id",
        "pid",
        "rank",
        "attrs",
        "mark_ids",
    ] == list(batch["spans"][0])
    mark = ["id", "span_id", "name", "value_type", "value", "attrs", "ts_ns", "kind"]
    assert mark == list(batch["marks"][0])
    assert [*mark, "value_nonfinite"] == list(batch["marks"][1])
    assert [
        "id",
        "span_id",
        "tensor_name",
        "shape",
        "dtype",
        "mode",
        "stats",
        "blob_uri",
        "ts_ns",
        "attrs",
    ] == list(batch["snapshots"][0])
    assert (17, 16) == (
        len(batch["snapshots"][0]["stats"]["histogram"]["bins"]),
        len(batch["snapshots"][0]["stats"]["histogram"]["counts"]),
    )


def test_unknown_keys_are_ignored() -> None:
    """A reader passes over keys that a later version adds, at every level."""
    batch = json.loads(GOLDEN.read_bytes())
    for thing in (batch, batch["session"], batch["session"]["clock"], *batch["spans"]):
        thing["from_the_future"] = {"a": [1]}
    for thing in (*batch["marks"], *batch["snapshots"], batch["snapshots"][0]["stats"]):
        thing["from_the_future"] = 1

    assert wire.decode_batch(GOLDEN.read_bytes()) == wire.decode_batch(json.dumps(batch).encode())


def test_batches_of_other_writers() -> None:
    """A batch as the format was before `session` is read."""
    batch = json.loads(GOLDEN.read_bytes())
    del batch["session"]

    assert wire.decode_batch(json.dumps(batch).encode()).session is None


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_half_a_batch_is_an_error(cut: int) -> None:
    """Half a file is no batch."""
    with pytest.raises(msgspec.DecodeError):
        wire.decode_batch(GOLDEN.read_bytes()[:cut])


def test_the_json_is_strict() -> None:
    """No NaN or Infinity token is ever written, whatever a record holds."""
    text = wire.encode({"a": math.nan, "b": [math.inf, -math.inf]})

    assert b'{"a":null,"b":[null,null]}' == text


def test_a_layout_cuts_without_decoding() -> None:
    """The sections of a batch can be cut out of its bytes and joined into another."""
    pieces, layout = wire.encode_batch(HEADER, sections())
    found = wire.split_batch(b"".join(pieces), layout)
    twice = wire.Sections(found.spans * 2, found.marks * 2, found.snapshots * 2)
    batch = wire.decode_batch(b"".join(wire.encode_batch(HEADER, twice)[0]))

    assert [EPOCH, STEP, EPOCH, STEP] == batch.spans
    assert ([LOSS, BAD_LOSS] * 2, [SNAPSHOT] * 2) == (batch.marks, batch.snapshots)


def test_an_empty_batch() -> None:
    """A batch of nothing is a batch."""
    pieces, layout = wire.encode_batch(HEADER, wire.Sections())
    payload = b"".join(pieces)

    assert [] == wire.decode_batch(payload).spans
    assert [[b""]] * 3 == list(wire.split_batch(payload, layout))


def test_a_merged_batch_names_its_parts() -> None:
    """Only a batch that replaces others says which."""
    header: Any = msgspec.structs.replace(HEADER, merged=["x", "y"])
    payload = b"".join(wire.encode_batch(header, wire.Sections())[0])

    assert ["x", "y"] == wire.decode_batch(payload).merged
    assert b"merged" not in GOLDEN.read_bytes()


class Odd:
    def __str__(self) -> str:
        return "odd"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a\ud800b", "a?b"),
        ({"\udcff": ["\ud800", {"x": "\udfff"}]}, {"?": ["?", {"x": "?"}]}),
        (
            ["\ud800", 10**5000, -(10**5000), True, None, 1.5],
            ["?", 2**64 - 1, -(2**63), True, None, 1.5],
        ),
        ([Odd()], ["odd"]),
    ],
    ids=["text", "nested", "numbers", "objects"],
)
def test_what_cannot_be_encoded_is_mended(given: Any, expected: Any) -> None:
    """Bad text, absurd integers and foreign objects cost nothing but themselves."""
    assert expected == json.loads(wire.encode(given))
