"""The event stream: whole lines of strict JSON, on a stream that may break or that nobody reads."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from cirron import guard, system, wire
from cirron.record import clock
from cirron.ship.collect import Line
from cirron.ship.lane import Lane
from cirron.ship.sinks import console
from cirron.ship.sinks import stream as streams
from cirron.ship.sinks.base import Blob, Outcome, Sealed
from cirron.ship.sinks.event_stream import EventStream
from cirron.ship.sinks.stream import ForkLock, Stream
from cirron.ship.threads import speaker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from cirron.ship.sinks.base import Sink

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
        header,
        wire.Sections(marks=[wire.encode_records([mark])]),
        records=1,
        lines=[Line("step", number, 142_000_000, {"loss": 0.5})],
        blobs=blobs,
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
    outcome = EventStream(Stream(stream)).emit(batch)

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
    EventStream(Stream(stream)).emit(make_batch(blobs=[Blob(tmp_path / "weights", "run/weights")]))
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
    EventStream(Stream(stream)).emit(make_batch())

    assert raw.getvalue().endswith(b"}\n")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_any_encoding_will_do(encoding: str) -> None:
    """A stream that cannot say a character gets it escaped, and reads the same."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    sink = EventStream(Stream(stream))

    assert Outcome.DONE is sink.emit(make_batch(text="größe 模型 🚂"))
    (line,) = raw.getvalue().decode(encoding).splitlines()
    assert "größe 模型 🚂" == json.loads(line)["payload"]["marks"][0]["value"]


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns far more often than they do by themselves."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
def test_lines_of_threads_do_not_mix() -> None:
    """What other threads print is before or after a line, never inside.

    `print` writes a text and its newline one after the other, so a line of ours may come in
    between: a reader finds it anywhere in a line, and it ends with that line.
    """
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="utf-8")
    sink = EventStream(Stream(stream))
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
    written = raw.getvalue().decode()
    events = re.findall(r'\{"__cirron_event__".*\n', written)

    assert list(range(200)) == [json.loads(event)["payload"]["created_ns"] for event in events]
    assert "step\n" * 2000 == re.sub(r'\{"__cirron_event__".*\n', "", written)


class Broken(io.StringIO):
    """A stream of the user's that fails in its own way."""

    def write(self, text: str) -> int:
        raise RuntimeError("the notebook is gone")


@pytest.mark.parametrize("kind", [EventStream, console.to_stream])
@pytest.mark.parametrize("stream", [io.StringIO, Broken])
def test_a_stream_that_breaks(
    stream: type[io.StringIO], kind: Callable[[Stream], Sink], caplog: pytest.LogCaptureFixture
) -> None:
    """A stream that is closed or broken loses batches, counted, with one warning and no error."""
    file = stream()
    if not isinstance(file, Broken):
        file.close()
    lane = Lane(kind(Stream(file)), "stdout")
    for number in (1, 2, 3):
        lane.emit(make_batch(number))
    assert lane.settle(clock.now() + 10**10)
    lane.close(clock.now() + 10**10)
    speaker.settle(10.0)

    assert 3 == lane.health()["stdout_dropped"]
    (warning,) = caplog.messages
    assert re.search(
        "'stdout' raised (RuntimeError: the notebook is gone|ValueError: I/O)", warning
    )


def test_the_stream_stays_open() -> None:
    """The stream is not ours to close."""
    stream = io.StringIO()
    sink = EventStream(Stream(stream))
    sink.emit(make_batch())
    sink.close(0)

    assert not stream.closed
    assert {"event_stream_sent": 1} == sink.health()


class TestConsole:
    def test_a_line_a_span(self) -> None:
        """Each span is a line for people, flushed."""
        raw = io.BytesIO()
        stream = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8")
        sink = console.to_stream(Stream(stream))

        assert Outcome.DONE is sink.emit(make_batch(3))
        assert b"[cirron] step[3] - 142.00ms {loss=0.5}\n" == raw.getvalue()
        assert {} == sink.health()

    def test_a_logger(self, caplog: pytest.LogCaptureFixture) -> None:
        """The `log` output is INFO on the logger `cirron.trace`."""
        with caplog.at_level("INFO", "cirron.trace"):
            console.to_logger().emit(make_batch(3))

        assert [("cirron.trace", 20, "[cirron] step[3] - 142.00ms {loss=0.5}")] == (
            caplog.record_tuples
        )


class Pipe:
    """A pipe that is read when the test says so, and a stream at its other end."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        os.set_blocking(self._read, False)
        self.file = os.fdopen(write, "w", encoding="utf-8")
        self.stream = Stream(self.file)
        self.errors: list[OSError] = []

    @property
    def capacity(self) -> int:
        level = system.pipe_level(self.file.fileno())
        assert level is not None
        return level[1]

    def write(self, *texts: str) -> threading.Thread:
        """Writes texts on a thread of its own, one after the other."""

        def write() -> None:
            try:
                for text in texts:
                    self.stream.write(text)
            except OSError as error:
                self.errors.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        return thread

    def read(self) -> str:
        """All that is in the pipe now."""
        found = b""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._read, 2**20):
                found += piece
        return found.decode()

    def read_until(self, thread: threading.Thread) -> str:
        """What is read until the thread has ended."""
        found = ""
        deadline = time.monotonic() + 10
        while thread.is_alive() and time.monotonic() < deadline:
            found += self.read()
            thread.join(0.001)
        assert not thread.is_alive()
        return found + self.read()

    def close(self) -> None:
        self.read()
        self.file.close()
        os.close(self._read)


class TestPipe:
    """A pipe that nobody reads must not make the program hang at its next print."""

    @pytest.fixture
    def pipe(self) -> Iterator[Pipe]:
        made = Pipe()
        yield made
        made.close()

    def waits(self, thread: threading.Thread) -> bool:
        """Whether the thread is still at it after some time."""
        thread.join(0.2)
        return thread.is_alive()

    def test_whole_lines_to_a_reader(self, pipe: Pipe) -> None:
        """Whoever reads gets all lines, in order, however many."""
        lines = [f"{number:06}" + "x" * 50_000 + "\n" for number in range(100)]

        assert "".join(lines) == pipe.read_until(pipe.write(*lines))
        assert [] == pipe.errors

    def test_it_waits_for_a_reader(self, pipe: Pipe) -> None:
        """A line that the pipe has no room for waits; what was written before it is whole."""
        lines = [f"{number:06}" + "x" * (pipe.capacity // 8) + "\n" for number in range(20)]
        thread = pipe.write(*lines)
        assert self.waits(thread)
        found = pipe.read()

        assert found.endswith("\n")
        assert lines == (found + pipe.read_until(thread)).splitlines(keepends=True)

    def test_closing_ends_the_wait(self, pipe: Pipe) -> None:
        """What waits at the end is not written, and is an error that says why."""
        lines = ["x" * (pipe.capacity // 8) + "\n"] * 20
        thread = pipe.write(*lines)
        assert self.waits(thread)
        pipe.stream.close()
        thread.join(10)

        assert not thread.is_alive()
        assert ["the pipe is not being read"] == [str(error) for error in pipe.errors]
        assert len(lines) > pipe.read().count("\n")

    def test_the_program_prints_meanwhile(self, pipe: Pipe) -> None:
        """While a line of ours waits, a print of the program's does not."""
        thread = pipe.write(*["x" * (pipe.capacity // 8) + "\n"] * 20)
        assert self.waits(thread)
        printing = threading.Thread(target=lambda: print("epoch 1", file=pipe.file, flush=True))
        printing.start()
        printing.join(5)

        assert not printing.is_alive()
        assert "epoch 1\n" in pipe.read_until(thread)

    def test_a_long_line_needs_a_reader(self, pipe: Pipe) -> None:
        """A line that is longer than the pipe is written once somebody has shown to read it."""
        line = "x" * (2 * pipe.capacity) + "\n"
        thread = pipe.write(line)
        assert self.waits(thread)
        assert "\n" == pipe.read()  # an empty line, to find out

        assert line == pipe.read_until(thread)

    def test_a_long_line_that_nobody_reads(self, pipe: Pipe) -> None:
        """Such a line is given up at the end; the stream's lock is free all the time."""
        thread = pipe.write("x" * (2 * pipe.capacity) + "\n")
        assert self.waits(thread)
        print("epoch 1", file=pipe.file, flush=True)
        pipe.stream.close()
        thread.join(10)

        assert (False, 1) == (thread.is_alive(), len(pipe.errors))
        assert "\nepoch 1\n" == pipe.read()

    def test_a_reader_that_is_gone(self) -> None:
        """A pipe whose reader has closed it is an error of the stream, as any."""
        pipe = Pipe()
        os.close(pipe._read)
        with pytest.raises(BrokenPipeError):
            EventStream(pipe.stream).emit(make_batch())
        with contextlib.suppress(BrokenPipeError):
            pipe.file.close()

    def test_files_are_written_immediately(self, tmp_path: Path) -> None:
        """A file is written at once, however long the line."""
        with open(tmp_path / "out", "w", encoding="utf-8") as file:
            Stream(file).write("x" * 2**22)

        assert 2**22 == (tmp_path / "out").stat().st_size


class TestForkLock:
    def test_a_fork_waits_for_a_write(self) -> None:
        """A fork waits a moment for a write, and no longer."""
        lock = ForkLock()
        with lock:
            began = time.monotonic()
            lock.before_fork()
            waited_s = time.monotonic() - began
            lock.after_fork()

        assert streams.FORK_WAIT_S <= waited_s < 1
        with lock:
            pass

    def test_a_write_waits_for_a_fork(self) -> None:
        """No write begins while the process forks."""
        lock = ForkLock()
        wrote = threading.Event()

        def write() -> None:
            with lock:
                wrote.set()

        lock.before_fork()
        thread = threading.Thread(target=write)
        thread.start()
        early = wrote.wait(0.05)
        lock.after_fork()

        assert (False, True) == (early, wrote.wait(10))
        thread.join()

    def test_the_child_has_a_lock_of_its_own(self) -> None:
        """In the child the lock is free, whoever had it in the parent."""
        lock = ForkLock()
        lock.__enter__()
        lock.after_fork_in_child()
        with lock:
            pass
