"""Sends batches over HTTP: `POST <endpoint>/api/traces`, then the batch's blobs.

`emit` and `tick` never wait for the network; `close` does, until its deadline. The thread
"cirron-http" takes the oldest batch from the outbox and retries until the server accepts or refuses
it, so batches are sent in order.

This module decides what an answer means, when to retry and when to warn.
"""

from __future__ import annotations

import contextlib
import enum
import os
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from cirron import guard, system
from cirron.record import clock
from cirron.ship.outbox import blob_keys
from cirron.ship.sinks.base import Outcome, Sink
from cirron.ship.threads import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

    from cirron.ship.connection import Body, Connection, Reply
    from cirron.ship.outbox import Item, MemoryOutbox
    from cirron.ship.sinks.base import Sealed

# Compressing less than this does not save a packet.
GZIP_BYTES = 1024
# 1 MB of spans: level 1 takes 3.7 ms for a ratio of 7.7, level 6 takes 7.2 ms for 8.7.
GZIP_LEVEL = 1
BLOCK_BYTES = 64 * 1024

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0
LONGEST_RETRY_AFTER_S = 120.0
SETTING_PAUSE_S = 300.0  # for a wrong key or address, which only a person can correct
MISTAKE_PAUSE_S = 5.0  # after an internal error
PAUSE_LOOK_S = 0.05  # how often a pause during `close` checks the deadline

# After this many failures of a blob (two minutes), its batch is sent again, to find out whether the
# blob or the server is the problem. If the server accepts the batch, the blob is given up. Until a
# blob is accepted, later ones get one try each, so that they do not delay batches.
BLOB_TRIES = 10

# Tries during `close`: an endpoint that is down delays the exit by 1.5 s.
LAST_TRIES = 3


class Verdict(enum.Enum):
    """What an answer means for the batch. The value is the warning, which is logged once."""

    ACCEPTED = "sending to %s works again (%d batches to go)"
    REFUSED = (
        "%s refused a batch (%s): it stays in the spool and is not sent again."
        " A newer cirron may help: pip install -U cirron"
    )
    UNREADABLE = "a batch for %s cannot be read from the spool (%s): it is skipped"
    BLOB_LOST = "raw values of a snapshot were not sent to %s (%s), and will not be"
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
    BAD_PROXY = (
        "the proxy for %s does not let us through (%s); batches are kept. Set HTTPS_PROXY (for an"
        " http:// endpoint HTTP_PROXY) to http://name:password@host:port, or name the endpoint's"
        " host in NO_PROXY"
    )


# A person has to act. A blob is given up instead: its batch was accepted with the same settings.
SETTING = (Verdict.BAD_KEY, Verdict.WRONG_ADDRESS, Verdict.MOVED, Verdict.BAD_PROXY)

# Exceptions from the general rule (see `judge`). Any other 4xx is about this batch, and final: 400,
# 406, 413, 415, 422, ...
MEANINGS = {
    401: Verdict.BAD_KEY,
    402: Verdict.BAD_KEY,  # payment required
    403: Verdict.BAD_KEY,
    404: Verdict.WRONG_ADDRESS,
    405: Verdict.WRONG_ADDRESS,
    407: Verdict.BAD_PROXY,
    408: Verdict.BUSY,  # the server waited too long for the request
    409: Verdict.ACCEPTED,  # the server already has this batch, but maybe not its blobs
    410: Verdict.WRONG_ADDRESS,  # gone
    421: Verdict.BUSY,  # misdirected: the next connection may reach another server
    423: Verdict.BUSY,  # locked for now
    424: Verdict.BUSY,  # something behind the server failed
    425: Verdict.BUSY,  # too early
    426: Verdict.WRONG_ADDRESS,  # another protocol is required, such as https
    429: Verdict.BUSY,
    499: Verdict.BUSY,  # nginx: the connection was lost
    501: Verdict.WRONG_ADDRESS,  # no POST: not a cirron server
    505: Verdict.WRONG_ADDRESS,  # another version of HTTP is required
}


class Answer(NamedTuple):
    """The result of a try."""

    verdict: Verdict
    reason: str = ""
    retry_after: str | None = None


ACCEPTED = Answer(Verdict.ACCEPTED)


class HttpSink(Sink):
    """Sends batches from an outbox, which has the limit and the policy when it is full."""

    def __init__(
        self,
        endpoint: str,
        api_key: str,
        outbox: MemoryOutbox,
        *,
        sdk_version: str,
        request_s: float = 30.0,
        is_patient: bool = False,
        now: Callable[[], int] = clock.now,
        random: Callable[[], float] | None = None,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self.sent = 0  # batches that the server has
        self.sent_records = 0  # of this process, in batches that the server has
        self.blobs_lost = 0  # refused, missing, or not cirron's files
        self.last_error: str | None = None
        self._endpoint, self._host = endpoint, urlsplit(endpoint).hostname
        self._headers = {
            "Authorization": f"Bearer {api_key}",
            "User-Agent": f"cirron/{sdk_version}",
            "X-Cirron-SDK-Version": sdk_version,
        }
        self._outbox = outbox
        self._request_s = request_s
        self._is_patient = is_patient  # during `close`, waits as the server asks
        self._now = now
        self._random = fraction if random is None else random
        self._sleep = sleep
        self._said: set[Verdict] = set()
        self._is_in_trouble = False  # and there was a warning
        self._failures = 0  # in a row
        self._blob_failures = 0  # in a row
        self._reset()

    def _reset(self) -> None:
        self._worker = Worker(self._run, "cirron-http")
        self._is_stopped = False  # the deadline of `close` has passed
        self._deadline_ns = 0
        self._connection: Connection | None = None

    # -- other threads ----------------------------------------------------------------------

    def start(self) -> None:
        self._worker.start()

    def emit(self, batch: Sealed) -> Outcome:
        outcome = self._outbox.put(batch)
        self._worker.start()
        self._worker.wake()
        return outcome

    def tick(self) -> None:
        """Aborts a request that takes too long."""
        self._worker.start()
        if self._connection is not None:
            self._connection.cut_if_late()

    def close(self, deadline_ns: int) -> None:
        """Sends what is left, until the deadline; the rest stays in the outbox."""
        self._deadline_ns = deadline_ns
        self._worker.stop()
        self._worker.wait_for_end(clock.now() + deadline_ns - self._now())
        self._is_stopped = True
        if self._connection is not None:
            self._connection.stop()
        self._outbox.close()

    def health(self) -> dict[str, object]:
        return {
            "http_sent": self.sent,
            "http_sent_records": self.sent_records,
            "http_pending": len(self._outbox),
            "http_pending_bytes": self._outbox.pending_bytes,
            "http_rejected": self._outbox.rejected,
            "http_dropped": self._outbox.dropped,
            "http_unreadable": self._outbox.unreadable,
            "http_blobs_lost": self.blobs_lost,
            "http_last_error": self.last_error,
        }

    def after_fork(self) -> None:
        """In a forked child: the thread, the connection and the outbox belong to the parent."""
        self._reset()
        self._outbox.after_fork()

    # -- the sender's thread ----------------------------------------------------------------

    def _run(self) -> None:
        with guard.contained("taking over unsent batches"):
            self._outbox.adopt()
        is_going_on = True
        while is_going_on and not self._is_stopped:
            is_going_on = not self._worker.is_stopping  # if the next line fails
            is_mistaken = True
            with guard.contained("sending a batch"):
                is_going_on = self._take_turn()
                is_mistaken = False
            if is_mistaken:
                self._pause(MISTAKE_PAUSE_S)
        if self._connection is not None:
            self._connection.close()
        self._outbox.close()  # again, in case `close` could not wait: releases the locks

    def _take_turn(self) -> bool:
        """Tries to send the oldest batch, or waits for one. False: there is nothing left to do."""
        item = self._outbox.head()
        if item is None:
            if self._worker.is_stopping:
                return False
            self._worker.rest(3600.0)
            return True
        answer = self._send(item)
        if answer.verdict is Verdict.ACCEPTED:
            self._failures = 0
            return True
        self._failures += 1
        return self._rest(answer)

    def _pause(self, pause_s: float) -> None:
        """Waits this long, or until the end; new batches do not shorten it."""
        if self._sleep is not None:
            self._sleep(pause_s)
            return
        was_stopping = self._worker.is_stopping
        until_ns = self._now() + int(pause_s * 1e9)
        while not self._is_stopped and self._worker.is_stopping == was_stopping:
            left_s = (until_ns - self._now()) / 1e9
            if left_s <= 0:
                return
            self._worker.rest(min(left_s, PAUSE_LOOK_S) if was_stopping else left_s)

    def _send(self, item: Item) -> Answer:
        """Sends what the server does not have yet. ACCEPTED: the item is finished."""
        takes_batches = not item.is_taken  # the server has just accepted it, below
        if not item.is_taken:
            answer = self._send_batch(item)
            if answer.verdict is not Verdict.ACCEPTED:
                self._note(answer)
                if answer.verdict is Verdict.REFUSED:
                    self._outbox.reject(item)
                elif answer.verdict is Verdict.UNREADABLE:
                    self._outbox.drop(item)
                else:
                    return answer
                return ACCEPTED
        while item.blobs:
            answer = self._send_blob(item, item.blobs[0])
            if answer.verdict in (Verdict.BUSY, Verdict.FAILING, Verdict.UNREACHABLE):
                is_asked_to_wait = answer.verdict is Verdict.BUSY
                self._blob_failures += not is_asked_to_wait
                if is_asked_to_wait or not takes_batches or self._blob_failures <= BLOB_TRIES:
                    self._note(answer)
                    item.is_taken = self._blob_failures < BLOB_TRIES
                    return answer
            elif answer.verdict is Verdict.ACCEPTED:
                self._blob_failures = 0
            if answer.verdict is not Verdict.ACCEPTED:
                self._note(answer._replace(verdict=Verdict.BLOB_LOST))
                self.blobs_lost += 1
            del item.blobs[0]
        self._outbox.done(item)
        if self._is_in_trouble:
            self._is_in_trouble = False
            guard.warn(Verdict.ACCEPTED.value, self._host, len(self._outbox))
        return ACCEPTED

    def _send_batch(self, item: Item) -> Answer:
        import gzip

        try:
            payload = self._outbox.read(item)
        except OSError as error:
            return unreadable(error)
        if payload is None:
            item.is_taken, item.blobs = True, []
            return ACCEPTED
        body, headers = payload, {"Content-Type": "application/json"}
        if len(payload) >= GZIP_BYTES:
            body = gzip.compress(payload, GZIP_LEVEL, mtime=0)
            headers["Content-Encoding"] = "gzip"
        answer = self._request("POST", "/api/traces", item, headers, body, len(body))
        if answer.verdict is Verdict.ACCEPTED:
            item.is_taken = True
            if item.blobs is None:
                self.sent += 1
                self.sent_records += item.records
                item.blobs, strange = blob_keys(payload)
                self.blobs_lost += strange
        return answer

    def _send_blob(self, item: Item, key: str) -> Answer:
        try:
            file = open(self._outbox.open_blob(key), "rb")  # noqa: SIM115  closed past the request
        except OSError as error:
            return unreadable(error)
        with file:
            size = os.fstat(file.fileno()).st_size
            headers = {"Content-Type": "application/octet-stream"}
            path = f"/api/traces/blobs/{key}"
            return self._request("PUT", path, item, headers, blocks(file, size), size)

    def _request(
        self, method: str, path: str, item: Item, headers: dict[str, str], body: Body, size: int
    ) -> Answer:
        if self._connection is None:
            from cirron.ship.connection import Connection

            self._connection = Connection(self._endpoint, request_s=self._request_s, now=self._now)
        if self._is_stopped:  # `close` came before the connection existed
            self._connection.stop()
        its_own = {"X-Cirron-Batch-Id": item.batch_id, "Content-Length": str(size)}
        reply = self._connection.request(method, path, self._headers | its_own | headers, body)
        if method == "PUT" and reply.status == 409:  # the key exists with other content
            return Answer(Verdict.REFUSED, reply.reason)
        return judge(reply)

    def _rest(self, answer: Answer) -> bool:
        """Waits before the next try. False: there will be none."""
        pause_s = self._pause_s(answer)
        is_busy = answer.verdict is Verdict.BUSY
        # Within the seconds of an exit, a busy server is as hopeless as a wrong setting.
        is_hopeless = answer.verdict in SETTING or (is_busy and not self._is_patient)
        if not self._worker.is_stopping:
            self._pause(pause_s)
            return not is_hopeless or not self._worker.is_stopping
        if is_hopeless or (self._failures >= LAST_TRIES and not is_busy):
            return False
        if self._now() + pause_s * 1e9 > self._deadline_ns:
            return False
        self._pause(pause_s)
        return not self._is_stopped

    def _pause_s(self, answer: Answer) -> float:
        from urllib3.exceptions import HTTPError
        from urllib3.util.retry import RequestHistory, Retry

        if answer.verdict in SETTING:
            return SETTING_PAUSE_S
        # Without its jitter, which uses `random`: that state belongs to the user's training. The
        # history is limited, because above 1,023 failures the pause would overflow a float.
        past = (RequestHistory(None, None, None, None, None),) * min(self._failures + 1, 16)
        retry = Retry(backoff_factor=FIRST_PAUSE_S / 2, backoff_max=LONGEST_PAUSE_S, history=past)
        if answer.retry_after is not None:
            with contextlib.suppress(HTTPError, ValueError, OverflowError):  # invalid
                # A little later, so that a thousand ranks do not retry at the same moment.
                asked_s = retry.parse_retry_after(answer.retry_after) * (1 + self._random() / 10)
                return min(max(asked_s, FIRST_PAUSE_S), LONGEST_RETRY_AFTER_S)
        return retry.get_backoff_time() * (1 + self._random()) / 2

    def _note(self, answer: Answer) -> None:
        """Keeps the error for `health()`, and warns once per kind."""
        self.last_error = answer.reason
        if answer.verdict not in self._said:
            self._said.add(answer.verdict)
            is_past = answer.verdict in (Verdict.REFUSED, Verdict.UNREADABLE, Verdict.BLOB_LOST)
            self._is_in_trouble |= not is_past
            guard.warn(answer.verdict.value, self._host, answer.reason)


def judge(reply: Reply) -> Answer:
    by_hundred = {2: Verdict.ACCEPTED, 3: Verdict.MOVED, 4: Verdict.REFUSED}
    verdict = MEANINGS.get(reply.status) or by_hundred.get(reply.status // 100, Verdict.FAILING)
    if not reply.status:
        verdict = Verdict.UNREACHABLE
    return Answer(verdict, reply.reason, reply.retry_after)


def unreadable(error: OSError) -> Answer:
    verdict = Verdict.UNREACHABLE if error.errno in system.SHORTAGE else Verdict.UNREADABLE
    return Answer(verdict, error.strerror or type(error).__name__)


def blocks(file: BinaryIO, size: int) -> Iterator[bytes]:
    """The file in blocks, up to the announced size."""
    while size > 0 and (block := file.read(min(size, BLOCK_BYTES))):
        size -= len(block)
        yield block


def fraction() -> float:
    """A number from 0 to 1, without `random`, whose state belongs to the user's training."""
    return int(clock.random_id()[:8], 16) / 2**32
