"""Sends batches over HTTP: `POST <endpoint>/api/traces`, then the batch's blobs.

`emit`, `tick` and `close` run on the flusher's thread and never wait for the network (`close` waits
until its deadline). A thread of its own, "cirron-http", started on first need, takes the oldest
batch from the outbox and tries until the server has it or refuses it; nothing overtakes it. A
request has a deadline as a whole, which `tick` enforces by cutting the connection, so an endpoint
that sends a byte a second holds up no more than that thread, and not for long.

urllib3 makes connections and reads answers; it is imported with the first request. What an answer
means, when to try again and what to say is decided here, in one place. Our messages quote nothing
that a server sent: it may be the key.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import threading
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from cirron import guard
from cirron.record import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import BinaryIO

    from urllib3.connection import HTTPConnection

    from cirron.ship.outbox import Item, Outbox
    from cirron.ship.sinks.base import Blob, Outcome, Sealed

# Below this, gzip saves less than one packet.
GZIP_BYTES = 1024
# 1 MB of spans: level 1 takes 3.7 ms for a ratio of 7.7, level 6 takes 7.2 ms for 8.7.
GZIP_LEVEL = 1

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0
LONGEST_RETRY_AFTER_S = 120.0
SETTING_PAUSE_S = 300.0  # a wrong key or address is put right by a person, if at all

# While closing: with the pauses above, an endpoint that is down holds up the exit for 1.5 s.
LAST_TRIES = 3

# An answer's body says nothing that we use; this much is read so that the connection can be kept.
BODY_BYTES = 64 * 1024
BLOCK_BYTES = 64 * 1024
# On top of `request_s`, a request may take as long as its body does at half a megabit a second.
SLOWEST_BYTES_PER_S = 64 * 1024


class Verdict(enum.Enum):
    """What an answer means for the batch; the value is the one warning that it is worth."""

    ACCEPTED = "sending to %s works again (%d batches to go)"
    REFUSED = (
        "%s refused a batch (%s), and would again: it is not sent any more, and stays in the spool."
        " A newer cirron may help: pip install -U cirron"
    )
    BLOB_LOST = "raw values of a snapshot were not sent to %s (%s), and are not tried again"
    BUSY = "%s asks to wait (%s); batches are kept and sent later"
    FAILING = "%s has a problem (%s); batches are kept and sent later"
    UNREACHABLE = (
        "cannot reach %s (%s); batches are kept and sent later, training goes on."
        " Another address: CIRRON_API_ENDPOINT, or ci.Cirron(api_endpoint=...)"
    )
    BAD_KEY = (
        "%s does not accept the API key (%s); batches are kept."
        " Set CIRRON_API_KEY, or ci.Cirron(api_key=...), to a valid one"
    )
    WRONG_ADDRESS = (
        "%s has no such page (%s); batches are kept. Set CIRRON_API_ENDPOINT, or"
        " ci.Cirron(api_endpoint=...), to the address that /api/traces comes after"
    )
    MOVED = (
        "%s answered with a redirect (%s), which is not followed, since it would carry the API key"
        " along; batches are kept. Set CIRRON_API_ENDPOINT, or ci.Cirron(api_endpoint=...), to the"
        " final address"
    )


# The server's wish, or a person's turn: no use in one more try at exit.
WAITING = (Verdict.BUSY, Verdict.BAD_KEY, Verdict.WRONG_ADDRESS, Verdict.MOVED)


class Answer(NamedTuple):
    """How a request ended."""

    verdict: Verdict
    reason: str
    retry_after: str | None = None


class HttpSink:
    """Hands batches to the sender. Cap and policy when full are the outbox's."""

    def __init__(
        self,
        endpoint: str,
        api_key: str,
        outbox: Outbox,
        *,
        sdk_version: str,
        connect_s: float = 5.0,
        request_s: float = 30.0,
        now: Callable[[], int] = clock.now,
        wall: Callable[[], int] = clock.wall,
        random: Callable[[], float] | None = None,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self.sent = 0  # batches
        self.blobs_lost = 0  # refused, or gone from the disk
        self.last_error: str | None = None
        parts = urlsplit(endpoint)  # which the settings have checked, as they have the key
        self._is_https, self._path = parts.scheme == "https", parts.path.rstrip("/")
        self._host, self._port = parts.hostname or "", parts.port
        self._headers = {
            "Authorization": f"Bearer {api_key}",
            "User-Agent": f"cirron/{sdk_version}",
            "X-Cirron-SDK-Version": sdk_version,
        }
        self._outbox = outbox
        self._connect_s = connect_s
        self._request_s = request_s
        self._now = now
        self._wall = wall
        self._random = fraction if random is None else random
        self._sleep = sleep
        self._said: set[Verdict] = set()
        self._is_in_trouble = False  # and said so
        self._failures = 0  # in a row
        self._reset()

    def _reset(self) -> None:
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._stopped = threading.Event()  # the deadline of `close` has passed
        self._deadline_ns = 0
        self._connection: HTTPConnection | None = None
        self._socket: socket.socket | None = None
        self._cut_at_ns: int | None = None
        self._is_cut = False

    # -- the flusher's thread ---------------------------------------------------------------

    def emit(self, batch: Sealed) -> Outcome:
        """Notes that a batch has to be sent."""
        outcome = self._outbox.put(batch)
        self._start()
        self._wake.set()
        return outcome

    def tick(self) -> None:
        """Sees to it that the sender runs, and that no request takes for ever."""
        self._start()
        cut_at_ns = self._cut_at_ns
        if cut_at_ns is not None and self._now() > cut_at_ns:
            self._cut()

    def close(self, deadline_ns: int) -> None:
        """Sends what is left, until the deadline; the rest stays in the outbox."""
        self._deadline_ns = deadline_ns
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(max(0.0, (deadline_ns - self._now()) / 1e9))
            self._stopped.set()
            self._cut()
        self._outbox.close()

    def health(self) -> dict[str, object]:
        """Counters, and the last thing that went wrong."""
        return {
            "http_sent": self.sent,
            "http_pending": len(self._outbox),
            "http_pending_bytes": self._outbox.pending_bytes,
            "http_rejected": self._outbox.rejected,
            "http_dropped": self._outbox.dropped,
            "http_blobs_lost": self.blobs_lost,
            "http_last_error": self.last_error,
        }

    def after_fork(self) -> None:
        """In a forked child: threads, locks, the connection and the outbox are the parent's."""
        self._reset()
        self._outbox.after_fork()

    def _start(self) -> None:
        if self._thread is None and not self._closing.is_set():
            thread = threading.Thread(target=self._run, name="cirron-http", daemon=True)
            # Python 3.12 starts no thread once the interpreter ends: a later run sends the batch.
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread

    def _cut(self) -> None:
        """Ends the request that is under way: its thread wakes up with an error."""
        self._is_cut = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # Not `SSLSocket.shutdown`, which pulls the TLS state away from under the reader.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    # -- the sender's thread ----------------------------------------------------------------

    def _run(self) -> None:
        with guard.quiet("taking over unsent batches"):
            self._outbox.adopt()
        while not self._stopped.is_set():
            self._wake.clear()
            item = self._outbox.head()
            if item is None:
                if self._closing.is_set():
                    break
                self._wake.wait()
                continue
            answer = Answer(Verdict.FAILING, "internal error")  # unless the next line gets past it
            with guard.quiet("sending a batch"):
                answer = self._send(item)
            if answer.verdict is not Verdict.ACCEPTED:
                self._failures += 1
                if not self._rest(answer):
                    break
        self._disconnect()

    def _send(self, item: Item) -> Answer:
        """Sends what the server does not have yet. ACCEPTED: there is nothing more to do for it."""
        accepted = Answer(Verdict.ACCEPTED, "")
        while item.sent <= len(item.blobs):
            if item.sent == 0:
                payload = item.read()
                if payload is None:
                    self._outbox.drop(item)
                    return accepted
                answer = self._send_batch(item, payload)
            else:
                answer = self._send_blob(item, item.blobs[item.sent - 1])
            if answer.verdict is Verdict.REFUSED:
                if item.sent == 0:
                    self._note(answer)
                    self._outbox.reject(item)
                    return accepted
                self._note(answer._replace(verdict=Verdict.BLOB_LOST))
                self.blobs_lost += 1
            elif answer.verdict is not Verdict.ACCEPTED:
                self._note(answer)
                return answer
            item.sent += 1
        self._outbox.done(item)
        self.sent += 1
        self._failures = 0
        if self._is_in_trouble:
            self._is_in_trouble = False
            guard.warn(Verdict.ACCEPTED.value, self._host, len(self._outbox))
        return accepted

    def _send_batch(self, item: Item, payload: bytes) -> Answer:
        import gzip

        headers = {"Content-Type": "application/json"}
        if len(payload) >= GZIP_BYTES:
            payload = gzip.compress(payload, GZIP_LEVEL, mtime=0)
            headers["Content-Encoding"] = "gzip"
        return self._request("POST", "/api/traces", item, headers, payload, len(payload))

    def _send_blob(self, item: Item, blob: Blob) -> Answer:
        from urllib.parse import quote

        try:
            file = open(blob.path, "rb")  # noqa: SIM115  closed below, past the request
            size = blob.path.stat().st_size
        except (FileNotFoundError, PermissionError):
            return Answer(Verdict.REFUSED, "the file is gone")
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        with file:
            path = f"/api/traces/blobs/{quote(blob.key, safe='/')}"
            return self._request("PUT", path, item, headers, blocks(file, size), size)

    def _request(
        self,
        method: str,
        path: str,
        item: Item,
        headers: dict[str, str],
        body: bytes | Iterable[bytes],
        size: int,
    ) -> Answer:
        """One request. Whatever an endpoint can do wrong ends as an answer."""
        from http.client import HTTPException

        from urllib3.exceptions import HTTPError

        headers = {**self._headers, "X-Cirron-Batch-Id": item.batch_id, **headers}
        allowed_s = self._request_s + size / SLOWEST_BYTES_PER_S
        self._is_cut = self._stopped.is_set()
        self._cut_at_ns = self._now() + int(allowed_s * 1e9)
        try:
            connection = self._connect()
            # A server that refuses a body may answer and hang up before it has all of it.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, self._path + path, body, headers, preload_content=False)
            response = connection.getresponse()
            verdict = judge(response.status)
            left = BODY_BYTES
            try:
                while left > 0 and (block := response.read(left, decode_content=False)):
                    left -= len(block)
            except (OSError, HTTPException, HTTPError):
                # Too slow is still what it said; cut short is trouble, and the same batch again
                # does no harm.
                if verdict is Verdict.ACCEPTED and not self._is_cut:
                    raise
                left = 0
            if left <= 0:
                self._disconnect()
            return Answer(verdict, f"HTTP {response.status}", response.headers.get("Retry-After"))
        except (OSError, HTTPException, HTTPError, ValueError) as error:
            self._disconnect()
            reason = describe(error)
            if self._stopped.is_set():
                reason = "no answer before the session ended"
            elif self._is_cut:
                reason = f"no answer within {allowed_s:.0f} s"
            return Answer(Verdict.UNREACHABLE, reason)
        finally:
            self._cut_at_ns = None

    def _connect(self) -> HTTPConnection:
        """The connection that is open, or a new one."""
        from urllib3.connection import HTTPConnection, HTTPSConnection

        if self._connection is not None and self._connection.is_connected:
            return self._connection
        self._disconnect()
        kind = HTTPSConnection if self._is_https else HTTPConnection
        connection = kind(self._host, self._port, timeout=self._connect_s)
        self._connection = connection
        connection.connect()
        connection.timeout = self._request_s
        # Kept apart: the connection forgets its socket when the answer says `Connection: close`.
        self._socket = connection.sock
        if self._is_cut:  # while it was connecting
            raise TimeoutError
        return connection

    def _disconnect(self) -> None:
        connection, self._connection, self._socket = self._connection, None, None
        if connection is not None:
            connection.close()

    def _rest(self, answer: Answer) -> bool:
        """Waits before the next try; False when there will be none."""
        pause_s = self._pause_s(answer)
        if not self._closing.is_set():
            (self._closing.wait if self._sleep is None else self._sleep)(pause_s)
            return not (self._closing.is_set() and answer.verdict in WAITING)
        if answer.verdict in WAITING or self._failures >= LAST_TRIES:
            return False
        if self._now() + pause_s * 1e9 > self._deadline_ns:
            return False
        return not self._stopped.wait(pause_s)

    def _pause_s(self, answer: Answer) -> float:
        if answer.verdict in (Verdict.BAD_KEY, Verdict.WRONG_ADDRESS, Verdict.MOVED):
            return SETTING_PAUSE_S
        asked_s = retry_after_s(answer.retry_after, self._wall())
        if asked_s is not None:  # a little later, so that a thousand ranks do not come at once
            asked_s *= 1 + self._random() / 10
            return min(max(asked_s, FIRST_PAUSE_S), LONGEST_RETRY_AFTER_S)
        doublings = min(max(self._failures - 1, 0), 16)
        longest_s = min(FIRST_PAUSE_S * 2.0**doublings, LONGEST_PAUSE_S)
        return longest_s * (1 + self._random()) / 2

    def _note(self, answer: Answer) -> None:
        """Keeps what went wrong for `health()`, and says it once of each kind."""
        self.last_error = answer.reason
        if answer.verdict not in self._said:
            self._said.add(answer.verdict)
            self._is_in_trouble |= answer.verdict not in (Verdict.REFUSED, Verdict.BLOB_LOST)
            guard.warn(answer.verdict.value, self._host, answer.reason)


def judge(status: int) -> Verdict:
    """What a status means."""
    if 200 <= status < 300:
        return Verdict.ACCEPTED
    if 300 <= status < 400:
        return Verdict.MOVED
    if status in (401, 403):
        return Verdict.BAD_KEY
    if status in (404, 405):
        return Verdict.WRONG_ADDRESS
    if status in (408, 429):
        return Verdict.BUSY
    return Verdict.REFUSED if 400 <= status < 500 else Verdict.FAILING


def retry_after_s(value: str | None, wall_ns: int) -> float | None:
    """The seconds that a `Retry-After` asks for, as a number or a date; None when it is neither."""
    from email.utils import parsedate_to_datetime

    if value is None:
        return None
    try:
        return float(int(value))
    except (ValueError, OverflowError):
        pass
    try:
        return parsedate_to_datetime(value).timestamp() - wall_ns / 1e9
    except (ValueError, OverflowError):
        return None


def blocks(file: BinaryIO, size: int) -> Iterator[bytes]:
    """The file in blocks, and no more of it than was announced."""
    while size > 0 and (block := file.read(min(size, BLOCK_BYTES))):
        size -= len(block)
        yield block


def describe(error: BaseException) -> str:
    """The kind of an error and the system's words for it, with nothing that came from a server."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, TimeoutError):
        return "timed out"
    words = error.strerror if isinstance(error, OSError) else None
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def fraction() -> float:
    """A number from 0 to 1. Not from `random`, whose state belongs to the user's training."""
    return int(clock.random_id()[:8], 16) / 2**32
