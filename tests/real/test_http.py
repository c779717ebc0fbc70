"""The HTTP sink against a real endpoint on 127.0.0.1 that behaves as badly as endpoints do."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
import threading
import time
from email.utils import formatdate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

import cirron as ci
from cirron import guard, wire
from cirron.errors import SettingError
from cirron.record import clock
from cirron.ship.outbox import DiskOutbox, MemoryOutbox
from cirron.ship.sinks.base import Outcome, Sealed
from cirron.ship.sinks.http import HttpSink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType
    from typing import Self

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.timeout(30)]

KEY = "sk-very-secret-0123456789"
PATIENCE_S = 10.0
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(autouse=True)
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistakes of ours fail the test."""
    monkeypatch.setattr(guard, "strict", True)


# -- an endpoint ------------------------------------------------------------------------------


class Request(NamedTuple):
    """What the endpoint was sent."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def batch_id(self) -> str:
        return self.headers["x-cirron-batch-id"]


class Exchange:
    """One request, as a behaviour sees it: head read, body not yet."""

    def __init__(self, endpoint: Endpoint, connection: socket.socket, head: list[str]) -> None:
        self.endpoint = endpoint
        self.connection = connection
        self.method, self.path, _ = head[0].split(" ")
        self.headers = {
            name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:])
        }

    def receive(self) -> None:
        """Reads the body and records the request."""
        body = b""
        while len(body) < int(self.headers["content-length"]):
            body += self.connection.recv(65536)
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.endpoint.record(Request(self.method, self.path, self.headers, body))


def answer(
    status: int, body: bytes = b"{}", *, announced: int | None = None, **headers: str
) -> Callable[[Exchange], bool]:
    """Takes the request and answers; a body shorter than announced is cut off there."""
    length = len(body) if announced is None else announced
    fields = {"Content-Length": str(length), **headers}

    def behave(exchange: Exchange) -> bool:
        exchange.receive()
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
        exchange.connection.sendall(f"HTTP/1.1 {status} So\r\n{head}\r\n".encode() + body)
        return length == len(body)

    return behave


ACCEPT = answer(200)


def hang(exchange: Exchange) -> bool:
    """Takes the request and never answers."""
    exchange.receive()
    exchange.endpoint.stopping.wait(PATIENCE_S)
    return False


def dribble(text: bytes) -> Callable[[Exchange], bool]:
    """Sends some text, and then a byte every 20 ms without end."""

    def behave(exchange: Exchange) -> bool:
        exchange.receive()
        exchange.connection.sendall(text)
        while not exchange.endpoint.stopping.wait(0.02):
            exchange.connection.sendall(b"x")
        return False

    return behave


def garbage(exchange: Exchange) -> bool:
    """Answers with something that is not HTTP, and repeats the key in it."""
    exchange.receive()
    exchange.connection.sendall(f"SSH-2.0-OpenSSH_9.6 {KEY}\r\n".encode())
    return False


def die_reading(exchange: Exchange) -> bool:
    """Goes away before it has the body."""
    exchange.connection.recv(10)
    return False


class Endpoint:
    """A server with a script: one behaviour a request, then `otherwise`."""

    def __init__(
        self,
        *script: Callable[[Exchange], bool],
        otherwise: Callable[[Exchange], bool] = ACCEPT,
        port: int = 0,
    ) -> None:
        self.requests: list[Request] = []
        self.stopping = threading.Event()
        self._script = list(script)
        self._otherwise = otherwise
        self._changed = threading.Condition()
        self._connections: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def record(self, request: Request) -> None:
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()

    def wait_for(self, count: int) -> list[Request]:
        """The requests, when there are so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.requests) >= count, PATIENCE_S)
            return list(self.requests)

    @property
    def batch_ids(self) -> list[str]:
        return [request.batch_id for request in self.requests]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stopping.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        while not self.stopping.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            while head := self._read_head(connection):
                behave = self._script.pop(0) if self._script else self._otherwise
                if not behave(Exchange(self, connection, head)):
                    break
        except OSError:  # the client went away
            pass
        connection.close()

    def _read_head(self, connection: socket.socket) -> list[str]:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            byte = connection.recv(1)
            if not byte:
                return []
            head += byte
        return head.decode().rstrip("\r\n").split("\r\n")


# -- the sink ---------------------------------------------------------------------------------


class Pauses:
    """A sleep that takes no time, unless it is held."""

    def __init__(self) -> None:
        self.taken: list[float] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self._taken = threading.Semaphore(0)

    def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)
        self._taken.release()
        self.go_on.wait(PATIENCE_S)

    def wait_for_one(self) -> None:
        assert self._taken.acquire(timeout=PATIENCE_S)


A, B, C = "a" * 16, "b" * 16, "c" * 16  # processes


def make_batch(
    number: int, padding: str = "", prefix: str = A, blobs: Sequence[Path] = ()
) -> Sealed:
    header = wire.Header(
        schema_version=1,
        sdk_version="1.2.3",
        batch_id=f"{prefix}{number:016x}",
        created_ns=number,
        session=None,
    )
    mark = wire.Mark(f"{number:032x}", "root", "note", "string", padding, {}, number, "point")
    stats = wire.Stats(None, None, None, None, None, wire.Histogram([], []))
    snapshots = [
        wire.Snapshot("1", "2", "w", [1], "float32", "full", stats, path.as_uri(), 1, {})
        for path in blobs
    ]
    sections = wire.Sections(
        marks=[wire.encode_records([mark])], snapshots=[wire.encode_records(snapshots)]
    )
    return Sealed(header, sections, records=1)


def ids(*numbers: int, prefix: str = A) -> list[str]:
    return [f"{prefix}{number:016x}" for number in numbers]


def soon(seconds: float = PATIENCE_S) -> int:
    return clock.now() + int(seconds * 1e9)


def send(sink: HttpSink, root: Path, outbox: DiskOutbox, batch: Sealed) -> Outcome:
    """What the spool and the sink do with a batch."""
    outbox.open()
    (root / "spool").mkdir(parents=True, exist_ok=True)
    (root / "spool" / batch.file_name).write_bytes(batch.payload)
    return sink.emit(batch)


def left(root: Path) -> list[str]:
    """The processes that left something to send; a half-written file of a killed one is nothing."""
    return sorted(path.name for path in root.glob("outbox/[!.]*") if path.suffix != ".tmp")


def save_blob(root: Path, span: int, name: str, content: bytes = b"raw") -> Path:
    path = root / "snapshots" / f"{span:032x}" / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


class Sinks:
    """Makes sinks, with no time between tries, and sees to it that their threads end."""

    def __init__(self) -> None:
        self.pauses = Pauses()
        self._made: list[HttpSink] = []

    def __call__(
        self,
        endpoint: Endpoint | str,
        outbox: MemoryOutbox | None = None,
        *,
        request_s: float = PATIENCE_S,
        random: float = 0.0,
        now: Callable[[], int] = clock.now,
        sleep: Callable[[float], object] | None = None,
    ) -> HttpSink:
        sink = HttpSink(
            endpoint if isinstance(endpoint, str) else endpoint.url,
            KEY,
            MemoryOutbox() if outbox is None else outbox,
            sdk_version="1.2.3",
            request_s=request_s,
            random=lambda: random,
            now=now,
            sleep=self.pauses if sleep is None else sleep,
        )
        self._made.append(sink)
        return sink

    def close(self) -> None:
        self.pauses.go_on.set()
        for sink in self._made:
            sink.close(0)
        for thread in threading.enumerate():
            if thread.name == "cirron-http":
                thread.join(PATIENCE_S)
                assert not thread.is_alive()


@pytest.fixture
def make_sink() -> Iterator[Sinks]:
    sinks = Sinks()
    yield sinks
    sinks.close()


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "cirron"]


class TestAccepted:
    def test_batches_arrive_in_order_with_the_headers_of_the_protocol(
        self, make_sink: Sinks
    ) -> None:
        """A batch is the body of one POST that says who sends it, what it is and which it is."""
        with Endpoint() as endpoint:
            sink = make_sink(endpoint.url + "/base/")
            batches = [make_batch(number) for number in (1, 2, 3)]
            outcomes = [sink.emit(batch) for batch in batches]
            sink.close(soon())

            assert [Outcome.HELD] * 3 == outcomes
            assert [batch.payload for batch in batches] == [r.body for r in endpoint.requests]
            assert ids(1, 2, 3) == endpoint.batch_ids
            request = endpoint.requests[0]
            assert ("POST", "/base/api/traces") == (request.method, request.path)
            assert f"Bearer {KEY}" == request.headers["authorization"]
            assert "1.2.3" == request.headers["x-cirron-sdk-version"]
            assert "application/json" == request.headers["content-type"]
            assert 3 == sink.health()["http_sent"]
            assert 0 == sink.health()["http_pending"]

    def test_bodies_are_compressed_from_one_kibibyte(self, make_sink: Sinks) -> None:
        """A small body goes as it is, a larger one with gzip, and both read the same."""
        bare = len(make_batch(1).payload)
        small = make_batch(1, "x" * (1023 - bare))
        large = make_batch(2, "x" * (1024 - bare))
        with Endpoint() as endpoint:
            sink = make_sink(endpoint)
            sink.emit(small)
            sink.emit(large)
            sink.close(soon())

            assert [None, "gzip"] == [r.headers.get("content-encoding") for r in endpoint.requests]
            assert [small.payload, large.payload] == [r.body for r in endpoint.requests]

    def test_whatever_the_body_of_an_acceptance_says(self, make_sink: Sinks) -> None:
        """2xx is final, and no more of a body is read than it takes to see that it is long."""
        long = answer(202, b"{nonsense" * 100_000)
        with Endpoint(long, answer(204, b"")) as endpoint:
            sink = make_sink(endpoint)
            sink.emit(make_batch(1))
            sink.emit(make_batch(2))
            sink.close(soon())

            assert ids(1, 2) == endpoint.batch_ids
            assert 2 == sink.sent

    def test_blobs_follow_their_batch(
        self, make_sink: Sinks, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The files that a batch names are put under their keys before the next batch goes."""
        weights = save_blob(tmp_path, 1, "weights", b"w" * 300_000)
        gone = weights.with_name("gradients.safetensors")
        with Endpoint() as endpoint:
            outbox = DiskOutbox(tmp_path, A)
            sink = make_sink(endpoint, outbox)
            send(sink, tmp_path, outbox, make_batch(1, blobs=[gone, weights, weights]))
            send(sink, tmp_path, outbox, make_batch(2))
            sink.close(soon())

            assert [
                ("POST", "/api/traces"),
                ("PUT", f"/api/traces/blobs/snapshots/{1:032x}/weights.safetensors"),
                ("POST", "/api/traces"),
            ] == [(request.method, request.path) for request in endpoint.requests]
            assert weights.read_bytes() == endpoint.requests[1].body
            assert "application/octet-stream" == endpoint.requests[1].headers["content-type"]
            assert 1 == sink.health()["http_blobs_lost"]
        (warning,) = warnings(caplog)
        assert "raw values of a snapshot were not sent to 127.0.0.1 (No such file" in warning

    def test_only_what_is_missing_is_sent_again(self, make_sink: Sinks, tmp_path: Path) -> None:
        """A blob that fails is tried again without its batch; one that is refused is left."""
        blobs = [save_blob(tmp_path, 1, name) for name in ("gradients", "weights", "weights-1")]
        script = [answer(200), answer(503), answer(200), answer(413), answer(404)]
        with Endpoint(*script) as endpoint:
            outbox = DiskOutbox(tmp_path, A)
            sink = make_sink(endpoint, outbox)
            send(sink, tmp_path, outbox, make_batch(1, blobs=blobs))
            sink.close(soon())

            assert ["traces", "gradients", "gradients", "weights-1", "weights"] == [
                Path(request.path).stem for request in endpoint.requests
            ]
            assert (1, 2) == (sink.sent, sink.blobs_lost)

    def test_there_is_one_sender(self, make_sink: Sinks) -> None:
        """Of many calls at once, one starts the thread that sends."""
        for _ in range(20):
            with Endpoint() as endpoint:
                sink = make_sink(endpoint)
                before = set(threading.enumerate())
                ticks = [threading.Thread(target=sink.tick) for _ in range(8)]
                for tick in ticks:
                    tick.start()
                for tick in ticks:
                    tick.join()

                started = set(threading.enumerate()) - before
                assert ["cirron-http"] == [
                    thread.name for thread in started if "cirron" in thread.name
                ]
                sink.close(soon())

    def test_records_are_counted(self, make_sink: Sinks) -> None:
        """`sent_records` counts the records that the server has said it has."""
        with Endpoint(answer(200), answer(400)) as endpoint:
            sink = make_sink(endpoint)
            for number in (1, 2, 3):
                sink.emit(make_batch(number))
            sink.close(soon())

            assert (2, 2) == (sink.sent_records, sink.health()["http_sent_records"])


class TestTrouble:
    def test_an_endpoint_that_comes_up_later(
        self, make_sink: Sinks, free_port: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A refused connection is tried again until somebody answers, and both are said once."""
        make_sink.pauses.go_on.clear()
        sink = make_sink(f"http://127.0.0.1:{free_port}")
        sink.emit(make_batch(1))
        sink.emit(make_batch(2))
        make_sink.pauses.wait_for_one()
        with Endpoint(port=free_port) as endpoint:
            make_sink.pauses.go_on.set()
            sink.close(soon())

            assert ids(1, 2) == endpoint.batch_ids
        assert "ConnectionRefusedError: Connection refused" == sink.last_error
        trouble, recovery = warnings(caplog)
        assert trouble.startswith("cirron: cannot reach 127.0.0.1 (ConnectionRefusedError")
        assert "CIRRON_API_ENDPOINT" in trouble
        assert "cirron: sending to 127.0.0.1 works again (1 batches to go)" == recovery

    @pytest.mark.parametrize(
        "behaviour",
        [
            answer(500),
            answer(503),
            answer(408),
            answer(429),
            garbage,
            die_reading,
            answer(200, b"{", announced=100),
            answer(200, b"5\r\nabc", announced=7, Transfer_Encoding="chunked"),
            lambda exchange: False,
        ],
        ids=[
            "500",
            "503",
            "408",
            "429",
            "garbage",
            "half-request",
            "half-body",
            "half-chunk",
            "silence",
        ],
    )
    def test_what_may_pass_is_tried_again_and_nothing_overtakes_it(
        self,
        behaviour: Callable[[Exchange], bool],
        make_sink: Sinks,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """The head of the queue is tried again, with one warning however often it fails."""
        with Endpoint(behaviour, behaviour, behaviour) as endpoint:
            sink = make_sink(endpoint)
            sink.emit(make_batch(1, os.urandom(2**20).hex()))  # more than the socket's buffers
            sink.emit(make_batch(2))
            make_sink.pauses.wait_for_one()
            make_sink.pauses.wait_for_one()
            make_sink.pauses.wait_for_one()
            sink.close(soon())

            taken = endpoint.batch_ids
            assert ids(1, 2) == taken[-2:]
            assert set(ids(1)) >= set(taken[:-1])
        assert 3 == len(make_sink.pauses.taken)
        assert 2 == len(warnings(caplog))
        assert KEY not in caplog.text
        assert KEY not in str(sink.health())

    def test_an_endpoint_that_never_answers(self, make_sink: Sinks) -> None:
        """Emitting costs nothing while a request hangs, and the request ends at its deadline."""
        with Endpoint(hang) as endpoint:
            sink = make_sink(endpoint, request_s=0.2)
            sink.emit(make_batch(1))
            endpoint.wait_for(1)
            began = time.perf_counter()
            for number in range(2, 102):
                sink.emit(make_batch(number))
                sink.tick()
            assert time.perf_counter() - began < 0.2
            sink.close(soon())

            assert ids(1, *range(1, 102)) == endpoint.batch_ids
        assert "timed out" == sink.last_error

    def test_an_endpoint_that_dribbles_its_answer(self, make_sink: Sinks) -> None:
        """A byte now and then does not keep a request alive past its deadline."""
        now = FakeClock()
        with Endpoint(dribble(b"HTTP/1.1 2")) as endpoint:
            sink = make_sink(endpoint, request_s=30.0, now=now)
            sink.emit(make_batch(1))
            endpoint.wait_for(1)
            now.advance(29.0)
            sink.tick()
            assert [] == make_sink.pauses.taken
            now.advance(2.0)
            sink.tick()
            endpoint.wait_for(2)
            sink.close(now() + int(PATIENCE_S * 1e9))

            assert ids(1, 1) == endpoint.batch_ids
        assert "no answer within 30 s" == sink.last_error

    def test_an_acceptance_that_dribbles_its_body(self, make_sink: Sinks) -> None:
        """A server that said 200 has the batch, however long it takes over the rest."""
        now = FakeClock()
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 100000\r\n\r\n"
        with Endpoint(dribble(head)) as endpoint:
            sink = make_sink(endpoint, request_s=30.0, now=now)
            sink.emit(make_batch(1))
            sink.emit(make_batch(2))
            endpoint.wait_for(1)
            until = time.monotonic() + PATIENCE_S
            while len(endpoint.requests) < 2 and time.monotonic() < until:
                now.advance(31.0)  # again and again: the answer's head may still be under way
                sink.tick()
                endpoint.stopping.wait(0.05)
            sink.close(now() + int(PATIENCE_S * 1e9))

        assert 2 == sink.sent
        assert ids(2) == endpoint.batch_ids[-1:]

    def test_the_pauses_double_up_to_a_minute(self, make_sink: Sinks) -> None:
        """Tries get rarer, from half a second to a minute."""
        with Endpoint(*[answer(500)] * 9) as endpoint:
            sink = make_sink(endpoint, random=1.0)
            sink.emit(make_batch(1))
            endpoint.wait_for(10)
            sink.close(soon())

        assert [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0] == make_sink.pauses.taken

    def test_the_pauses_are_jittered(self, make_sink: Sinks) -> None:
        """Chance takes up to half of a pause away, so that ranks do not come back together."""
        with Endpoint(answer(500), answer(500)) as endpoint:
            sink = make_sink(endpoint, random=0.0)
            sink.emit(make_batch(1))
            endpoint.wait_for(3)
            sink.close(soon())

        assert [0.25, 0.5] == make_sink.pauses.taken

    @pytest.mark.parametrize(
        ("asked", "expected"),
        [
            ("7", 7.0),
            (formatdate(time.time() + 3000, usegmt=True), 120.0),
            ("86400", 120.0),
            ("0", 0.5),
            (formatdate(1, usegmt=True), 0.5),
            ("soon", 0.25),
            ("9" * 5000, 0.25),
        ],
        ids=["seconds", "date", "capped", "zero", "past", "nonsense", "huge"],
    )
    @pytest.mark.parametrize("status", [429, 503])
    def test_retry_after_is_honoured(
        self, status: int, asked: str, expected: float, make_sink: Sinks
    ) -> None:
        """A server may ask for a pause, in seconds or by date, of two minutes at most."""
        with Endpoint(answer(status, Retry_After=asked)) as endpoint:
            sink = make_sink(endpoint)
            sink.emit(make_batch(1))
            endpoint.wait_for(2)
            sink.close(soon())

        assert [expected] == make_sink.pauses.taken

    @pytest.mark.parametrize("status", [401, 403])
    def test_a_bad_key_is_said_once(
        self, status: int, make_sink: Sinks, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A refused key makes one warning, with the setting and not the key, and long waits."""
        with Endpoint(answer(status), answer(status)) as endpoint:
            sink = make_sink(endpoint)
            sink.emit(make_batch(1))
            endpoint.wait_for(3)
            sink.close(soon())

            assert ids(1, 1, 1) == endpoint.batch_ids
        assert [300.0, 300.0] == make_sink.pauses.taken
        warning, _ = warnings(caplog)
        assert f"does not accept the API key (HTTP {status})" in warning
        assert "CIRRON_API_KEY" in warning
        assert KEY not in caplog.text + repr(sink) + str(sink.health())

    @pytest.mark.parametrize("status", [400, 413, 422])
    def test_a_refused_batch_is_left_behind(
        self, status: int, make_sink: Sinks, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A refusal is final for that batch, said once, and the next one goes."""
        with Endpoint(answer(status), answer(status)) as endpoint:
            outbox = DiskOutbox(tmp_path, A)
            sink = make_sink(endpoint, outbox)
            for number in (1, 2, 3):
                send(sink, tmp_path, outbox, make_batch(number))
            sink.close(soon())

            assert ids(1, 2, 3) == endpoint.batch_ids
        assert (1, 2) == (sink.health()["http_sent"], sink.health()["http_rejected"])
        assert 1 == len(warnings(caplog))
        assert f"refused a batch (HTTP {status})" in warnings(caplog)[0]
        assert 3 == len(list(tmp_path.glob("spool/*.json")))

    @pytest.mark.parametrize("status", [404, 405])
    def test_a_wrong_address_loses_no_batch(
        self, status: int, make_sink: Sinks, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A page that is not there is an address to put right: batches wait, and go later."""
        with Endpoint(answer(status)) as endpoint:
            sink = make_sink(endpoint)
            sink.emit(make_batch(1))
            endpoint.wait_for(2)
            sink.close(soon())

            assert ids(1, 1) == endpoint.batch_ids
        assert [300.0] == make_sink.pauses.taken
        assert (1, 0) == (sink.health()["http_sent"], sink.health()["http_rejected"])
        assert "CIRRON_API_ENDPOINT" in warnings(caplog)[0]

    def test_a_redirect_is_not_followed(
        self, make_sink: Sinks, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The key goes to the address that was set and to no other."""
        with Endpoint() as other, Endpoint(answer(302, Location=other.url)) as endpoint:
            sink = make_sink(endpoint)
            sink.emit(make_batch(1))
            endpoint.wait_for(2)
            sink.close(soon())

            assert [] == other.requests
        assert [300.0] == make_sink.pauses.taken
        assert "CIRRON_API_ENDPOINT" in warnings(caplog)[0]


class FakeClock:
    """A monotonic clock that is set by hand."""

    def __init__(self) -> None:
        self._now_ns = 0

    def __call__(self) -> int:
        return self._now_ns

    def advance(self, seconds: float) -> None:
        self._now_ns += int(seconds * 1e9)


class TestClose:
    def test_it_is_on_time_with_an_endpoint_that_hangs(
        self, make_sink: Sinks, tmp_path: Path
    ) -> None:
        """Closing takes until its deadline at most, and what was not sent stays."""
        with Endpoint(otherwise=hang) as endpoint:
            outbox = DiskOutbox(tmp_path, A)
            sink = make_sink(endpoint, outbox)
            send(sink, tmp_path, outbox, make_batch(1))
            endpoint.wait_for(1)
            began = time.perf_counter()
            sink.close(soon(0.3))

            assert 0.25 < time.perf_counter() - began < 0.8
        assert 1 == sink.health()["http_pending"]
        assert [A] == left(tmp_path)

    def test_an_endpoint_that_is_down_is_given_up_early(
        self, make_sink: Sinks, free_port: int
    ) -> None:
        """With nobody there, closing does not wait for its whole deadline."""
        sink = make_sink(f"http://127.0.0.1:{free_port}", sleep=threading.Event().wait)
        sink.emit(make_batch(1))
        began = time.perf_counter()
        sink.close(soon())

        assert time.perf_counter() - began < 3
        assert 1 == sink.health()["http_dropped"]

    def test_it_cuts_a_long_pause_short(self, free_port: int) -> None:
        """A sender that waits for its next try tries once more at once."""
        outbox = MemoryOutbox()
        sink = HttpSink(
            f"http://127.0.0.1:{free_port}", KEY, outbox, sdk_version="1", random=lambda: 1.0
        )
        sink._failures = 8  # the next pause is a minute
        sink.emit(make_batch(1))
        until = time.monotonic() + PATIENCE_S
        while sink.last_error is None and time.monotonic() < until:
            time.sleep(0.01)
        with Endpoint(port=free_port) as endpoint:
            sink.close(soon())

            assert ids(1) == endpoint.batch_ids

    def test_a_sender_that_is_late_keeps_nothing(self, tmp_path: Path) -> None:
        """What it takes over after its session has ended is free again when it ends."""
        taking, go_on = threading.Event(), threading.Event()

        class Late(DiskOutbox):
            def adopt(self) -> int:
                taking.set()
                go_on.wait(PATIENCE_S)
                return super().adopt()

        dead = DiskOutbox(tmp_path, A)
        dead.open()
        (tmp_path / "spool").mkdir()
        (tmp_path / "spool" / make_batch(1).file_name).touch()
        dead.after_fork()  # which closes its files, as a kill does
        sink = HttpSink("http://127.0.0.1:9", KEY, Late(tmp_path, B), sdk_version="1")
        sink.tick()
        assert taking.wait(PATIENCE_S)
        sink.close(0)
        go_on.set()
        assert sink._worker.wait_for_end(clock.now() + int(PATIENCE_S * 1e9))

        assert 1 == DiskOutbox(tmp_path, C).adopt()

    def test_twice_is_harmless_and_so_is_nothing(self, make_sink: Sinks) -> None:
        """A sink that never sent anything closes, and closes again."""
        with Endpoint() as endpoint:
            sink = make_sink(endpoint)
            sink.close(soon())
            sink.close(soon())

            assert [] == endpoint.requests


class TestSetUp:
    @pytest.mark.parametrize("endpoint", ["api.cirron.com", "ftp://x", "http://", "http://x:y"])
    def test_a_bad_endpoint_is_said_at_once(self, endpoint: str) -> None:
        """An address that cannot work is an error that shows one that can."""
        with pytest.raises(SettingError, match=r"such as https://api\.cirron\.com"):
            ci.Cirron(api_endpoint=endpoint)

    @pytest.mark.parametrize("key", ["", " ", f"{KEY}\r\nX: y", f"{KEY}…"])
    def test_a_bad_key_is_not_shown(self, key: str) -> None:
        """A key that no header can hold is an error that does not show it."""
        with pytest.raises(SettingError, match="copy the key again") as caught:
            ci.Cirron(api_key=key)

        assert KEY not in str(caught.value)

    def test_urllib3_is_not_imported_before_it_is_used(self) -> None:
        """Making a sink imports no HTTP library."""
        script = (
            "import sys; from cirron.ship.sinks.http import HttpSink;"
            "from cirron.ship.outbox import MemoryOutbox;"
            "HttpSink('http://x', 'k', MemoryOutbox(), sdk_version='1').close(0);"
            "print([name for name in ('urllib3', 'http.client', 'ssl') if name in sys.modules])"
        )
        found = subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONPATH": str(SOURCE)},
            capture_output=True,
            text=True,
            check=True,
        )

        assert "[]" == found.stdout.strip()


# Sends the numbered batches, says so, and lives until it is told to end or is killed.
OTHER_PROCESS = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from test_http import DiskOutbox, HttpSink, make_batch, send, KEY

root, url, prefix, numbers = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]
outbox = DiskOutbox(root, prefix)
sink = HttpSink(url, KEY, outbox, sdk_version="1.2.3")
for number in numbers:
    send(sink, root, outbox, make_batch(int(number), prefix=prefix))
print("ready", flush=True)
sys.stdin.read()
"""


class OtherProcess:
    """A real process with a sink of its own."""

    def __init__(self, root: Path, url: str, prefix: str, *numbers: int) -> None:
        script = OTHER_PROCESS.format(tests=str(Path(__file__).parent))
        self._process = subprocess.Popen(
            [sys.executable, "-c", script, str(root), url, prefix, *map(str, numbers)],
            env={"PYTHONPATH": str(SOURCE)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert "ready\n" == self._process.stdout.readline()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class TestOtherProcesses:
    def test_a_later_run_sends_what_a_killed_one_left(
        self, make_sink: Sinks, tmp_path: Path
    ) -> None:
        """What a killed process had not sent goes first, in order, and only once."""
        with Endpoint(answer(200), hang) as endpoint:
            with OtherProcess(tmp_path, endpoint.url, A, 1, 2, 3) as other:
                endpoint.wait_for(2)  # it has an answer for the first and waits for the second
                other.kill()
            for number, prefix in ((4, B), (5, C)):
                outbox = DiskOutbox(tmp_path, prefix)
                sink = make_sink(endpoint, outbox)
                send(sink, tmp_path, outbox, make_batch(number, prefix=prefix))
                sink.close(soon())

            expected = [*ids(1, 2, 2, 3), *ids(4, prefix=B), *ids(5, prefix=C)]
            assert expected == endpoint.batch_ids  # the first 2 had no answer
            sent = [json.loads(request.body)["batch_id"] for request in endpoint.requests]
            assert endpoint.batch_ids == sent
        assert [] == left(tmp_path)

    def test_live_processes_leave_each_other_alone(
        self, make_sink: Sinks, tmp_path: Path, free_port: int
    ) -> None:
        """Two processes that share a folder send their own batches and never the other's."""
        with (
            Endpoint() as endpoint,
            OtherProcess(tmp_path, f"http://127.0.0.1:{free_port}", A, 1, 2),
        ):
            outbox = DiskOutbox(tmp_path, B)
            sink = make_sink(endpoint, outbox)
            send(sink, tmp_path, outbox, make_batch(3, prefix=B))
            sink.close(soon())

            assert ids(3, prefix=B) == endpoint.batch_ids
            assert [A] == left(tmp_path)

    def test_a_dead_outbox_goes_to_one_process(
        self, make_sink: Sinks, tmp_path: Path, free_port: int
    ) -> None:
        """Of two runs that start after a crash, one sends all that was left."""
        with OtherProcess(tmp_path, f"http://127.0.0.1:{free_port}", A, 1, 2, 3):
            pass
        with Endpoint() as endpoint:
            outboxes = [DiskOutbox(tmp_path, prefix) for prefix in (B, C)]
            sinks = [make_sink(endpoint, outbox) for outbox in outboxes]
            for sink in sinks:
                sink.tick()
            endpoint.wait_for(3)
            for sink in sinks:
                sink.close(soon())

            assert ids(1, 2, 3) == endpoint.batch_ids


class TestMemory:
    def test_the_oldest_go_past_the_cap(self, make_sink: Sinks) -> None:
        """Without a spool, a dead endpoint costs bounded memory, and the loss is counted."""
        size = len(make_batch(1).payload)
        with Endpoint(hang) as endpoint:
            sink = make_sink(endpoint, MemoryOutbox(3 * size), request_s=0.5)
            sink.emit(make_batch(1))
            endpoint.wait_for(1)
            outcomes = [sink.emit(make_batch(number)) for number in (2, 3, 4, 5)]
            health = sink.health()
            sink.close(soon())

            assert [Outcome.HELD] * 4 == outcomes
            assert (3, 3 * size) == (health["http_pending"], health["http_pending_bytes"])
            assert 2 == health["http_dropped"]
            assert ids(1, 1, 4, 5) == endpoint.batch_ids  # 1 was under way: it is not given up
