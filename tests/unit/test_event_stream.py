"""The event stream: whole lines of strict JSON on a stream that may break."""

from __future__ import annotations

import io
import json
import threading
from typing import TYPE_CHECKING

import pytest

from cirron import guard, wire
from cirron.ship.sinks.base import Blob, Outcome, Sealed
from cirron.ship.sinks.event_stream import EventStream

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistakes of ours fail the test."""
    monkeypatch.setattr(guard, "strict", True)


def make_batch(number: int = 1, text: str = "", blobs: Sequence[Blob] = ()) -> Sealed:
    header = wire.Header(
        schema_version=1,
        sdk_version="1.2.3",
        batch_id=f"{number:032x}",
        created_ns=number,
        session=None,
    )
    mark = wire.Mark(f"{number:032x}", "root", "note", "string", text, {}, number, "point")
    return Sealed(
        header, wire.Sections(marks=[wire.encode_records([mark])]), records=1, blobs=blobs
    )


class Writes(io.StringIO):
    """Keeps what each call wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def write(self, text: str) -> int:
        self.calls.append(text)
        return super().write(text)


def test_a_batch_is_one_line() -> None:
    """A batch is one event on one line, its payload as the spool has it, in one write."""
    stream = Writes()
    batch = make_batch(text='two\nlines, "quoted"')
    outcome = EventStream(stream).emit(batch)

    assert Outcome.DONE is outcome
    (line,) = stream.calls
    assert "\n" == line[-1]
    assert 1 == line.count("\n")
    assert {
        "__cirron_event__": "trace_batch",
        "schema_version": 1,
        "sdk_version": "1.2.3",
        "payload": json.loads(batch.payload),
    } == json.loads(line)
    assert batch.payload.decode() in line


def test_blobs_are_announced(tmp_path: Path) -> None:
    """Each blob gets a line with its local path and remote key, after its batch."""
    stream = Writes()
    EventStream(stream).emit(make_batch(blobs=[Blob(tmp_path / "weights", "run/weights")]))
    _, blob = stream.getvalue().splitlines()

    assert 1 == len(stream.calls)
    assert {
        "__cirron_event__": "trace_blob",
        "schema_version": 1,
        "sdk_version": "1.2.3",
        "path": str(tmp_path / "weights"),
        "key": "run/weights",
    } == json.loads(blob)


def test_it_is_flushed() -> None:
    """A line does not wait in a buffer."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8")
    EventStream(stream).emit(make_batch())

    assert raw.getvalue().endswith(b"}\n")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_any_encoding_will_do(encoding: str) -> None:
    """A stream that cannot say a character gets it escaped, and reads the same."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    sink = EventStream(stream)

    assert Outcome.DONE is sink.emit(make_batch(text="größe 模型 🚂"))
    (line,) = raw.getvalue().decode(encoding).splitlines()
    assert "größe 模型 🚂" == json.loads(line)["payload"]["marks"][0]["value"]


def test_lines_of_threads_do_not_mix() -> None:
    """What other threads print is before or after a line, never inside."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="utf-8")
    sink = EventStream(stream)
    start = threading.Barrier(2)

    def chatter() -> None:
        start.wait(10)
        for _ in range(2000):
            print("step", file=stream)

    other = threading.Thread(target=chatter)
    other.start()
    start.wait(10)
    for number in range(200):
        sink.emit(make_batch(number, "x" * 20_000))
    other.join(10)
    stream.flush()
    lines = raw.getvalue().decode().splitlines()

    assert 2000 == lines.count("step")
    assert list(range(200)) == [
        json.loads(line)["payload"]["created_ns"] for line in lines if line != "step"
    ]


class Broken(io.StringIO):
    """A stream of the user's that fails in its own way."""

    def write(self, text: str) -> int:
        raise RuntimeError("the notebook is gone")


@pytest.mark.parametrize("stream", [io.StringIO(), Broken()], ids=["closed", "broken"])
def test_a_stream_that_breaks(stream: io.StringIO, caplog: pytest.LogCaptureFixture) -> None:
    """A stream that is closed or broken loses batches, counted, with one warning and no error."""
    if not isinstance(stream, Broken):
        stream.close()
    sink = EventStream(stream)
    outcomes = [sink.emit(make_batch(number)) for number in (1, 2, 3)]
    sink.tick()
    sink.close(0)

    assert [Outcome.DROPPED] * 3 == outcomes
    assert {"event_stream_sent": 0, "event_stream_dropped": 3} == sink.health()
    assert 1 == len(caplog.records)
    assert "cannot write to standard output" in caplog.text


def test_the_stream_stays_open() -> None:
    """The stream is not ours to close."""
    stream = io.StringIO()
    sink = EventStream(stream)
    sink.emit(make_batch())
    sink.close(0)

    assert not stream.closed
    assert {"event_stream_sent": 1, "event_stream_dropped": 0} == sink.health()
