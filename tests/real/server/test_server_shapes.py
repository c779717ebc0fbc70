"""Unusual requests and batches that no normal client sends."""

from __future__ import annotations

import contextlib
import re
import resource
import secrets
import shutil
import socket
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import pytest

from cirron.server import assets, connection
from cirron.server.process import Options, Server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.real.server.serving import Serving, batch, resident_bytes, session, span, wait_until
else:
    from serving import Serving, batch, resident_bytes, session, span, wait_until

GROWTH_BYTES = 400 * 2**20


def raw(server: Serving, request: bytes) -> bytes:
    """Everything that the server sends until it hangs up."""
    found = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(request)
        while block := connection.recv(65_536):
            found += block
    return found


def test_a_body_with_two_lengths(shared: Serving) -> None:
    """A body whose end two servers may see at different places is refused, and what follows it is
    not taken for a request.
    """
    smuggled = b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    head = (
        b"POST /api/traces HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %s\r\n"
        b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    answered = raw(
        shared, head % (shared.key.encode(), 5 + len(smuggled)) + b"0\r\n\r\n" + smuggled
    )

    assert answered.startswith(b"HTTP/1.1 400 ")
    assert 1 == answered.count(b"HTTP/1.1")


def test_a_batch_that_says_it_holds_others(shared: Serving) -> None:
    """Records that are sent are new, whatever the batch says about other batches."""
    first = batch(session("merging"), 2)
    assert 200 == shared.send(first).status
    second = {**batch(session("merging"), 2), "merged": [first["batch_id"]]}

    assert 422 == shared.send(second).status


def test_batch_id_with_a_line_break_is_refused(shared: Serving) -> None:
    """A batch id is 32 hex digits and nothing after them: it becomes the name of a file."""
    sent = batch(session("line break"), 2)
    sent["batch_id"] += "\n"

    assert 422 == shared.send(sent).status


def test_a_thousand_connections_under_the_usual_limit_of_open_files(
    serve: Callable[..., Serving],
) -> None:
    """A shell allows 1,024 open files by default. A thousand ranks that keep their connections
    open, and the server's own files, need more: the server raises its limit by itself.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4_096:
        pytest.skip(f"only {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1_024, hard))
    try:
        server = serve()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2_048), hard))
    ranks = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(1_100)]

    assert 200 == server.send(batch(session("crowd"))).status

    for one in ranks:
        one.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_store_that_cannot_be_written(server: Serving) -> None:
    """Batches, blobs and logins get 503 with Retry-After, and work again afterwards."""
    path, aside = server.depot / "tmp", server.depot / "aside"
    key = {"authorization": f"Bearer {server.key}"}
    path.rename(aside)
    path.write_text("")  # where files are written is no folder: as on a disk that is read-only

    answers = [
        server.send(batch(session("unwritable"))),
        server.request("PUT", "/api/traces/blobs/a", b"raw", **key),
        server.request("GET", server.link.removeprefix(server.address)),
    ]
    assert [503] * 3 == [one.status for one in answers]
    assert all("retry-after" in one.headers for one in answers)

    path.unlink()
    aside.rename(path)
    assert 200 == server.send(batch(session("unwritable"))).status
    assert 200 == server.request("PUT", "/api/traces/blobs/a", b"raw", **key).status
    wait_until(lambda: "unwritable" in server.runs(), "the run")  # the link was not used up


def test_records_folder_is_deleted_while_the_server_runs(server: Serving) -> None:
    """`rm -r .cirron` deletes what was recorded; the server goes on with an empty folder."""
    assert 200 == server.send(batch(session("before"))).status
    wait_until(lambda: "before" in server.runs(), "the run")
    server.settle()
    shutil.rmtree(server.depot.parent)

    assert 200 == server.send(batch(session("after"))).status

    wait_until(lambda: ["after"] == server.runs(), "the new run, without the old one")
    assert {0o700} == {one.stat().st_mode & 0o777 for one in (server.depot.parent, server.depot)}
    assert "" == server.errors


@pytest.mark.parametrize("name", ["", "n" * 1_000, "é" * 1_000], ids=["empty", "long", "encoded"])
def test_every_mark_name_can_be_charted(shared: Serving, name: str) -> None:
    """Programs choose the names of marks: at most 1,000 characters, or none at all."""
    run_id = f"named-{len(name.encode())}"
    content = batch(session(run_id), 3)
    content["marks"] = [{**one, "name": name} for one in content["marks"]]
    assert 200 == shared.send(content).status
    wait_until(lambda: run_id in shared.runs(), "the run")

    found = shared.get(f"/api/runs/{run_id}/mark?{urlencode({'name': name})}")

    assert [3] == [sum(line["points"]) for line in found.json["lines"]]


RUN_IDS = [
    "a/b",
    "a\nb",
    "a\0b",
    "x,y",
    "...",
    "a%2Fb",
    "a?b#c&d=e",
    " ",
    "\u00e9",
    "e\u0301",
    "\u2028",
    "i" * 999,
]


def test_every_run_id_can_be_shown(shared: Serving) -> None:
    """Programs and schedulers choose the ids of runs: each run has its own views and diffs."""
    for one in RUN_IDS:
        assert 200 == shared.send(batch(session(one), 3)).status
    wait_until(lambda: set(RUN_IDS) <= set(shared.runs()), "the runs")

    for one in RUN_IDS:
        name = quote(one, safe="")
        assert one == shared.get(f"/api/runs/{name}").json["id"]
        assert 200 == shared.get(f"/api/runs/{name}/report").status
        listed = quote(name, safe="")
        found = shared.get(f"/api/diff?before={listed}&after={listed},{listed}").json["runs"]
        assert {"before": [one], "after": [one, one]} == found


@pytest.mark.parametrize("run_id", ["", ".", ".."])
def test_run_id_that_no_address_can_have_is_refused(shared: Serving, run_id: str) -> None:
    """A browser removes it from the address of a query, so the run could not be shown."""
    assert 422 == shared.send(batch(session(run_id), 3)).status


def test_stalled_connections_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection is closed if its client sends no request, sends it byte by byte, or does not
    read the response; streams and connections in use stay open.
    """
    server = Server(Options(folders=[str(tmp_path)], store=str(tmp_path / "store")))
    monkeypatch.setattr(connection, "STALLED_S", 0.3)
    thread = threading.Thread(target=server.run)
    thread.start()
    assert server.is_ready.wait(30)
    opened: list[socket.socket] = []

    def connect(request: bytes = b"", **options: int) -> socket.socket:
        one = socket.socket()
        one.settimeout(30)
        for name, value in options.items():
            one.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        one.connect(("127.0.0.1", server.port))
        one.sendall(request)
        opened.append(one)
        return one

    try:
        head = f"Host: {server.address.removeprefix('http://')}\r\n".encode()
        path = server.link().removeprefix(server.address).encode()
        login = connect(b"GET %s HTTP/1.1\r\n%sConnection: close\r\n\r\n" % (path, head))
        said = b"".join(iter(lambda: login.recv(65_536), b""))
        cookie = re.findall(rb"set-cookie: ([^;]+)", said)[0]
        stream = connect(b"GET /api/events HTTP/1.1\r\n%sCookie: %s\r\n\r\n" % (head, cookie))
        script = next(name for name in assets.files() if name.endswith(".js"))
        asked = b"GET /%s HTTP/1.1\r\n%s\r\n" % (script.encode(), head)
        connect(20 * asked, SO_RCVBUF=1_024)  # and never reads
        in_use, silent, slow = connect(), connect(), connect(b"GET / HTTP/1.1\r\nHos")

        def are_closed() -> bool:
            in_use.sendall(b"HEAD / HTTP/1.1\r\n%s\r\n" % head)
            assert in_use.recv(65_536).startswith(b"HTTP/1.1 200 ")
            with contextlib.suppress(OSError):
                slow.sendall(b"t")
            return len(server.server_state.connections) == 2

        wait_until(are_closed, "three connections to close")
        assert b"" == silent.recv(1)
        assert b"text/event-stream" in stream.recv(65_536)
    finally:
        for one in opened:
            one.close()
        server.should_exit = True
        thread.join(30)


def test_a_blob_that_was_removed(shared: Serving) -> None:
    """A blob whose file was deleted gives 404."""
    path = "/api/traces/blobs/a/removed"
    put = shared.request("PUT", path, b"raw", authorization=f"Bearer {shared.key}")
    (shared.depot / "blobs" / put.json["sha256"]).unlink()

    assert 404 == shared.get(path).status
    assert "" == shared.errors


def test_long_names_inside_each_other(server: Serving) -> None:
    """A path has all names on the way: of a chain of long ones the server keeps the beginnings,
    and needs no more memory than for other batches of that size.
    """
    now_ns = time.time_ns()
    spans: list[dict[str, Any]] = []
    for level in range(100):
        parent = spans[-1]["id"] if spans else None
        name = chr(ord("a") + level % 26) * 200_000
        made = span(secrets.token_hex(16), name, parent, None, now_ns + level, 0)
        spans.append(made | {"end_ns": now_ns + 1_000_000 - level})
    assert 200 == server.send(batch(session("before"), 2)).status
    server.settle()
    before = resident_bytes(server.process.pid)
    long = {**batch(session("long"), 1), "spans": spans[::-1], "marks": []}
    assert 200 == server.send(long).status
    server.settle()
    wait_until(lambda: "long" in server.runs(), "the run")

    assert [] == list(server.depot.glob("refused/*"))
    assert resident_bytes(server.process.pid) - before < GROWTH_BYTES
    assert 1_000 == len(server.get("/api/runs/long/find?text=aaa").json["found"]["name"])


def test_times_that_no_clock_has_shown(server: Serving) -> None:
    """Whatever times a batch has, every query about its run works."""
    odd = (-(2**63), -1, 0, 2**62, 2**63 - 1)
    content = batch(session("odd"), 10)
    for number, one in enumerate(content["spans"]):
        one["start_ns"], one["end_ns"] = odd[number % 5], odd[number // 4]
        one["cpu_ns"] = one["gpu_ns"] = odd[number % 3]
    for number, one in enumerate(content["marks"]):
        one["ts_ns"] = odd[number % 5]
    assert 200 == server.send(content).status
    assert 200 == server.send(batch(session("odd", rank=1), 10)).status
    server.settle()
    wait_until(lambda: "odd" in server.runs(), "the run")
    kinds = "brief report goodput why steps marks timeline flame ranks tensors"
    asked = ["runs", "runs/odd", "diff?before=odd&after=odd", "runs/odd/mark?name=loss"]
    asked += [f"runs/odd/{kind}" for kind in kinds.split()]
    answers = {one: server.get(f"/api/{one}").status for one in asked}

    assert dict.fromkeys(asked, 200) == answers
    assert "" == server.errors
