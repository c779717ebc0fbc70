"""10,000 hostile requests from one seed: nothing changes, leaks or crashes."""

from __future__ import annotations

import collections
import concurrent.futures
import copy
import gzip
import json
import random
import re
import socket
from typing import TYPE_CHECKING, Any

import pytest

import cirron as ci

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.real.server.serving import Serving, batch, resident_bytes, session, wait_until
else:
    from serving import Serving, batch, resident_bytes, session, wait_until

SEED = 17
REQUESTS = 10_000
THREADS = 8

ODD: list[Any] = [
    *(None, True, False, 0, -1, 2**31, 2**63, 2**64, 2**70, -(2**63), 1e308, 0.1, "", "a", "\x00"),
    *("\ud7ff", "\u202e", "\x1b[31m", "a" * 70_000, "../../x", "<svg onload=1>", "' OR 1=1 --"),
    *([], {}, [[]], {"": {}}, [None] * 50, {"a": [1, {"b": 2}]}, "NaN", "9" * 400, "root"),
]
TEXT = [
    *(
        "..",
        "%2e%2e",
        "%00",
        "%",
        "%zz",
        "\\",
        "//",
        "'",
        '"',
        ";",
        "|",
        "`",
        "$(x)",
        "<b>",
        "\u00e9",
    ),
    *("runs", "traces", "blobs", "events", "api", "steps", "spans", "login", "..%252f", "a" * 300),
]
METHODS = [
    "GET",
    "POST",
    "PUT",
    "HEAD",
    "DELETE",
    "PATCH",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "get",
    "X",
]
HEADERS = [
    *("Host: evil.example", "Host: localhost", "Origin: null", "Origin: http://evil.example"),
    *(
        "Cookie: cirron=x",
        "Cookie: " + "a=b; " * 500,
        "Authorization: Bearer",
        "Authorization: Basic eA==",
    ),
    *(
        "Authorization: Bearer " + "ck_000000000000_" + "A" * 43,
        "Content-Encoding: gzip",
        "Expect: 100-continue",
    ),
    *(
        "Content-Length: 99999999",
        "Content-Length: -1",
        "Transfer-Encoding: chunked",
        "Upgrade: h2c",
    ),
    *(
        "X-Forwarded-For: 127.0.0.1",
        "X-Forwarded-User: root",
        "X-Forwarded-Host: evil",
        "Range: bytes=0-",
    ),
    *(
        "If-None-Match: *",
        "Last-Event-ID: -1",
        "Last-Event-ID: " + "9" * 40,
        "Sec-Fetch-Site: cross-site",
    ),
    *(
        "Accept-Encoding: gzip",
        "X-Cirron-Batch-Id: ../x",
        "X: \x0b",
        "Bad header",
        ": empty",
        "A" * 9_000 + ": b",
    ),
]


class Maker:
    """Makes requests; the same ones for the same seed, except for keys and cookies."""

    def __init__(self, server: Serving) -> None:
        self._random = random.Random(SEED)
        self._server = server
        self._good = batch(session("hostile"), steps=2)

    def requests(self) -> Iterator[bytes]:
        kinds = [self.anything, self.anything, self.changed, self.changed, self.garbage]
        kinds += [self.question, self.blob]
        for number in range(REQUESTS):
            yield kinds[number % len(kinds)]()

    def anything(self) -> bytes:
        """Any method, path and headers, without a key."""
        pick = self._random
        path = "/" + "/".join(pick.choice(TEXT) for _ in range(pick.randrange(5)))
        if pick.random() < 0.5:
            path = "/api" + path
        if pick.random() < 0.3:
            path += f"?{pick.choice(TEXT)}={pick.choice(TEXT)}&token={pick.choice(TEXT)}"
        headers = pick.sample(HEADERS, pick.randrange(4))
        if pick.random() < 0.9:
            headers.append("Host: 127.0.0.1")
        return self._request(pick.choice(METHODS), path, headers, bytes(pick.randrange(50)))

    def changed(self) -> bytes:
        """A batch with a valid key and something wrong in it."""
        pick = self._random
        content = copy.deepcopy(self._good)
        content["batch_id"] = f"{pick.getrandbits(128):032x}"
        if pick.random() < 0.7:
            for _ in range(pick.randrange(1, 4)):
                _change(content, pick)
        body = json.dumps(content).encode()
        if pick.random() < 0.5:
            changed = bytearray(body)
            for _ in range(pick.randrange(1, 6)):
                at = pick.randrange(len(changed))
                changed[at : at + pick.randrange(3)] = pick.randbytes(pick.randrange(3))
            body = bytes(changed)
        headers = ["Host: 127.0.0.1", f"Authorization: Bearer {self._server.key}"]
        if pick.random() < 0.5:
            body = gzip.compress(body, 1)
            headers.append("Content-Encoding: gzip")
            if pick.random() < 0.1:
                body = body[: pick.randrange(len(body))]
        return self._request("POST", "/api/traces", headers, body)

    def garbage(self) -> bytes:
        """Bytes that are not HTTP, or almost HTTP."""
        pick = self._random
        start = pick.choice(
            [b"", b"GET ", b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b"PRI * HTTP/2.0\r\n"]
        )
        return start + pick.randbytes(pick.randrange(1, 300)) + pick.choice([b"", b"\r\n\r\n"])

    def question(self) -> bytes:
        """A query with a valid session."""
        pick = self._random
        path = "/api/runs" + pick.choice(["", "/", f"/{pick.choice(TEXT)}", "/hostile/steps"])
        path += f"?{pick.choice(['from', 'to', 'rank', 'px', 'run'])}={pick.choice(TEXT)}"
        if pick.random() < 0.1:
            path = f"/api/events?cursor={pick.choice(['-1', 'x', '1e9', '9' * 30, '%00'])}"
        headers = ["Host: 127.0.0.1", f"Cookie: {self._server.cookie}"]
        return self._request("GET", path, headers + pick.sample(HEADERS[14:], 1), b"")

    def blob(self) -> bytes:
        """A blob with an invalid key."""
        pick = self._random
        key = "/".join(pick.choice(TEXT) for _ in range(pick.randrange(1, 6)))
        headers = ["Host: 127.0.0.1", f"Authorization: Bearer {self._server.key}"]
        return self._request("PUT", f"/api/traces/blobs/{key}", headers, b"same")

    @staticmethod
    def _request(method: str, path: str, headers: list[str], body: bytes) -> bytes:
        length = (
            []
            if any("ength" in one or "chunked" in one for one in headers)
            else [f"Content-Length: {len(body)}"]
        )
        lines = [f"{method} {path} HTTP/1.1", *headers, *length, "Connection: close", "", ""]
        return "\r\n".join(lines).encode() + body


def _change(content: Any, pick: random.Random) -> None:
    """Puts an odd value somewhere into a batch."""
    while True:
        keys = list(content) if isinstance(content, dict) else list(range(len(content)))
        if not keys:
            return
        key = pick.choice(keys)
        inner = content[key]
        if isinstance(inner, (dict, list)) and inner and pick.random() < 0.8:
            content = inner
            continue
        if key in ("session", "spans") and pick.random() < 0.9:
            continue
        content[key] = pick.choice(ODD)
        return


def exchange(port: int, request: bytes) -> bytes:
    """The response; empty if the server waits for more or hangs up."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout=0.3) as connection:
        try:
            connection.sendall(request)
            while len(found) < 100_000 and (more := connection.recv(65_536)):
                found += more
        except (TimeoutError, ConnectionError):
            pass
    return found


@pytest.mark.timeout(300)
def test_ten_thousand_hostile_requests(shared: Serving) -> None:
    """The server survives, its memory does not grow, stored data does not change, nothing leaks."""
    innocent = batch(session("innocent"), steps=50)
    assert 200 == shared.send(innocent).status
    shared.settle()
    expected = ci.open(shared.depot, run="innocent").spans.rows()
    secret = (shared.depot / "secret").read_bytes()
    outside = sorted(one.name for one in shared.folder.iterdir())
    before = resident_bytes(shared.process.pid)
    requests = list(Maker(shared).requests())

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(lambda one: exchange(shared.port, one), requests))

    assert REQUESTS == len(requests)
    statuses = collections.Counter(
        re.findall(rb"HTTP/1\.1 (\d+)", b"\n".join(one[:20] for one in answers))
    )
    allowed = {*b"200 303 304 400 401 403 404 405 408 413 414 415 421 422 429 431 501 503".split()}
    assert set(statuses) <= allowed, statuses
    assert statuses[b"200"] > 300
    assert statuses[b"422"] > 300
    said = b"".join(answers)
    for leak in (
        b"root:",
        b"Traceback",
        b"site-packages",
        secret,
        b"/.cirron/",
        shared.key.encode(),
    ):
        assert leak not in said
    assert shared.process.poll() is None
    assert "" == shared.errors
    assert resident_bytes(shared.process.pid) - before < 300e6
    assert outside == sorted(one.name for one in shared.folder.iterdir())

    # What was accepted is stored, or kept aside; none of it keeps others out.
    last = batch(session("innocent"), steps=1)
    assert 200 == shared.send(last).status
    wait_until(lambda: not shared.inbox(), "an empty inbox", 120)
    accepted = {
        match[1].decode()
        for one in answers
        for match in re.finditer(rb'"batch_id":"([0-9a-f]{32})"', one)
    }
    refused = {one.stem for one in shared.depot.glob("refused/*.json")}
    place = ci.open(shared.depot).runs
    from cirron.runs import engine
    from cirron.runs.store import Store

    assert accepted <= Store.open(shared.depot).seen(engine.duckdb()) | refused
    assert len(refused) < len(accepted) / 10
    assert expected == [
        one
        for one in place["innocent"].spans.rows()
        if one["session_id"] == innocent["session"]["id"]
    ]
    assert "hostile" in place
