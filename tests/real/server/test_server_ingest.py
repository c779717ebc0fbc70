"""Batches of cirron's client, of the published SDK and of a thousand ranks are stored once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gzip
import http.client
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from starlette.requests import Request

import cirron as ci
from cirron.server import ingest
from cirron.server.responses import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.server.server_kills import KEY, Fleet
    from tests.real.server.serving import Serving, batch, resident_bytes, session, wait_until

    from cirron.runs.opened import Run
else:
    from server_kills import KEY, Fleet
    from serving import Serving, batch, resident_bytes, session, wait_until

PEER = Path(__file__).parents[3] / "bench" / ".venv" / "bin" / "python"

TRAINING = """
import cirron as ci
ci.profile()
for epoch in ci.epochs(range(2)):
    for number in ci.batches(range(20)):
        ci.mark("loss", number)
ci.shutdown()
"""


def run_elsewhere(python: str, program: str, folder: Path, server: Serving) -> None:
    """Runs a program that knows only the server's address and a key."""
    folder.mkdir()
    environ = {"CIRRON_API_ENDPOINT": server.address, "CIRRON_API_KEY": server.key, "PATH": ""}
    if python == sys.executable:
        environ["PYTHONPATH"] = str(Path(ci.__file__).parents[1])
        environ["CIRRON_EXIT_TIMEOUT"] = "60"  # on a busy machine all is sent, too
    subprocess.run([python, "-c", program], cwd=folder, env=environ, check=True, timeout=60)


def test_our_client_is_ingested_whole(server: Serving, tmp_path: Path) -> None:
    """Each span and mark of a training is in the store, with its tree."""
    folder = tmp_path / "deep" / "elsewhere"
    folder.parent.mkdir()
    assert 401 == server.send(batch(session("early")), "no key").status  # it is awake

    run_elsewhere(sys.executable, TRAINING, folder, server)
    server.settle()

    there = ci.open(server.depot)
    here = ci.open(folder)
    assert here.id == there.id
    assert sorted(map(str, here.spans.rows())) == sorted(map(str, there.spans.rows()))
    assert 40 == len(there.steps)
    assert [here.id] == wait_until(server.runs, "the run on the page")


def test_program_that_sends_from_a_watched_folder_is_counted_once(server: Serving) -> None:
    """The server sees each batch twice: as a file of the folder, and as a request."""
    folder = server.folder / "project"

    run_elsewhere(sys.executable, TRAINING, folder, server)
    server.settle()
    wait_until(server.runs, "the run on the page")

    (run_id,) = server.runs()
    found = wait_until(
        lambda: (one := server.get(f"/api/runs/{run_id}").json)["state"] == "clean" and one,
        "the end of the run",
    )
    assert 40 == found["progress"]["steps"]
    assert [40] == [one["points"] for one in server.get(f"/api/runs/{run_id}/marks").json["names"]]


def test_the_published_sdk_is_ingested_whole(server: Serving, tmp_path: Path) -> None:
    """Everything that version 0.3.0 sends is stored. (It never sends its last batch.)"""
    if not PEER.exists():
        pytest.skip("the published SDK is not installed: make bench installs it")
    waiting = TRAINING.replace("profile()", "profile(flush_interval=0.2)")
    waiting = waiting.replace("ci.shutdown()", "import time; time.sleep(1.5); ci.shutdown()")
    folder = tmp_path / "deep" / "elsewhere"  # deeper than the server looks for folders
    folder.parent.mkdir()

    run_elsewhere(str(PEER), waiting, folder, server)
    server.settle()

    here, there = ci.open(folder), ci.open(server.depot)

    def records(run: Run) -> set[tuple[object, ...]]:
        names = ("id", "name", "parent_id", "index", "start_ns", "end_ns", "attrs")
        spans = {tuple(one[name] for name in names) for one in run.spans.rows()}
        return {one for one in spans if one[1] != "cirron.session"}

    assert 42 == len(records(here))
    assert records(here) == records(there)
    assert 40 == len(there.marks)
    assert {one["id"] for one in here.marks.rows()} == {one["id"] for one in there.marks.rows()}


def test_a_batch_that_is_sent_again_counts_once(server: Serving) -> None:
    """While it waits to be stored, and afterwards."""
    content = batch(session("again"), steps=5)

    first = server.send(content)
    assert (200, True) == (first.status, first.json["is_new"])
    assert 200 == server.send(content).status
    server.settle()
    assert 200 == server.send(content).status
    server.settle()

    assert 10 == len(ci.open(server.depot).spans)


def test_what_cannot_be_a_batch_is_refused(server: Serving) -> None:
    """With a status that makes the client keep it and go on; nothing is stored."""
    good = batch(session("good"))
    given = {"authorization": f"Bearer {server.key}"}

    def post(body: bytes, **headers: str) -> int:
        return server.request("POST", "/api/traces", body, **given, **headers).status

    assert 422 == post(b"{}")
    assert 422 == post(b"\xff\xfe")
    assert 422 == post(json.dumps({**good, "batch_id": "../../etc/passwd"}).encode())
    assert 422 == post(json.dumps({**good, "spans": [{"id": 3}]}).encode())
    assert 400 == post(b"no gzip", content_encoding="gzip")
    assert 400 == post(gzip.compress(b"{}") + b"more", content_encoding="gzip")
    assert 400 == post(json.dumps(good).encode(), x_cirron_batch_id="0" * 32)
    assert 415 == post(b"{}", content_encoding="br")
    assert [] == server.inbox()


def test_blobs_are_kept_by_their_content(server: Serving) -> None:
    """A blob key is a name, never a path: blobs are named by their hash."""
    key = f"snapshots/{'ab' * 16}/weights.safetensors"
    content = b"\x00raw" * 500_000
    given = {"authorization": f"Bearer {server.key}"}

    assert 200 == server.request("PUT", f"/api/traces/blobs/{key}", content, **given).status
    assert 200 == server.request("PUT", f"/api/traces/blobs/{key}", content, **given).status

    found = server.get(f"/api/traces/blobs/{key}")
    assert content == found.body
    assert "attachment" == found.headers["content-disposition"]
    assert 1 == len(list(server.depot.glob("blobs/*")))
    assert 404 == server.get("/api/traces/blobs/snapshots/other").status


def test_a_blob_is_never_replaced(server: Serving) -> None:
    """Other content for the same key gets 409 and changes nothing."""
    path = "/api/traces/blobs/snapshots/weights.safetensors"
    given = {"authorization": f"Bearer {server.key}"}
    assert 200 == server.request("PUT", path, b"first", **given).status

    second = server.request("PUT", path, b"second", **given)

    assert 409 == second.status
    assert "other content" in second.json["error"]
    assert b"first" == server.get(path).body
    assert 1 == len(list(server.depot.glob("blobs/*")))


def test_blobs_wait_for_a_place(server: Serving) -> None:
    """Four blobs are read at once; the fifth waits, unread, until one of them is done. Batches and
    the page do not wait for blobs.
    """
    head = (
        f"PUT /api/traces/blobs/%s HTTP/1.1\r\nHost: {server.host}\r\n"
        f"Authorization: Bearer {server.key}\r\nContent-Length: 6\r\n\r\n%s"
    )
    with contextlib.ExitStack() as stack:
        held = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            for _ in range(5)
        ]
        for number, one in enumerate(held[:4]):
            one.sendall((head % (number, "abc")).encode())
        wait_until(lambda: 4 == len(list(server.depot.glob("tmp/*.tmp"))), "four blobs")
        held[4].sendall((head % (4, "abcdef")).encode())
        assert 200 == server.send(batch(session("beside"))).status
        assert 200 == server.get("/api/runs").status
        assert 404 == server.get("/api/traces/blobs/4").status

        held[0].sendall(b"def")

        assert held[4].recv(65_536).startswith(b"HTTP/1.1 200 ")
    assert b"abcdef" == server.get("/api/traces/blobs/4").body


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for a block of a body, nor for a free place, whatever its announced length."""
    monkeypatch.setattr(ingest, "BLOCK_S", 0.01)
    monkeypatch.setattr(ingest, "MAX_WAIT_S", 0.01)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def read() -> None:
        length = str(ingest.MAX_BLOB_BYTES).encode()
        scope = {"type": "http", "headers": [(b"content-length", length)]}
        async for _ in ingest.blocks(Request(scope, receive), ingest.MAX_BLOB_BYTES):
            pass

    async def wait() -> None:
        async with ingest.turn(asyncio.Semaphore(0)):
            pass

    for never, status, retry in ((read, 408, {}), (wait, 429, {"Retry-After": "2"})):
        with pytest.raises(Refusal) as refused:
            asyncio.run(never())
        assert (status, retry) == (refused.value.status_code, refused.value.headers)


def test_a_thousand_ranks(tmp_path: Path) -> None:
    """A thousand ranks of a run send to two servers, and one of them is killed meanwhile."""
    fleet = Fleet(tmp_path)

    def send(rank: int) -> None:
        who = session("large", rank)
        for number in range(2):
            content = batch(who, steps=2, first=2 * number)
            wait_until(lambda one=content: is_sent(one, rank), "an answer")

    def is_sent(content: dict[str, Any], rank: int) -> bool:
        try:
            name = ("ingest-a", "ingest-b")[rank % 2]
            return fleet.servers[name].send(content, KEY).status == 200
        except (OSError, http.client.HTTPException):
            return False

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        sent = [pool.submit(send, rank) for rank in range(1_000)]
        wait_until(lambda: sum(one.done() for one in sent) > 300, "some ranks")
        fleet.kill("ingest-b")
        for one in sent:
            one.result()
    wait_until(lambda: not fleet.inbox(), "an empty inbox")
    for server in fleet.servers.values():
        server.kill()

    run = ci.open(tmp_path / "store")
    assert list(range(1_000)) == run.ranks
    assert 8_000 == len(run.spans)
    assert 4_000 == len(run.marks)


def test_a_flood_is_held_back_and_nothing_is_lost(serve: Callable[..., Serving]) -> None:
    """Too many batches get 429 with Retry-After, in bounded memory, and are accepted later."""
    ingest = serve("--role", "ingest", "--max-inbox-mb", "4")
    before = resident_bytes(ingest.process.pid)
    batches = [batch(session("flood", rank), steps=300) for rank in range(60)]
    refused = []

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(ingest.send, batches))
    for content, reply in zip(batches, replies, strict=True):
        if reply.status == 429:
            assert int(reply.headers["retry-after"]) >= 1
            refused.append(content)
        else:
            assert 200 == reply.status

    assert refused
    assert resident_bytes(ingest.process.pid) - before < 150e6
    serve("--role", "page")
    for content in refused:
        wait_until(lambda one=content: ingest.send(one).status == 200, "room")
    ingest.settle()
    assert 60 * 600 == len(ci.open(ingest.depot).spans)
