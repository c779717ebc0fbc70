"""The event stream: one for all runs, which a client can resume."""

from __future__ import annotations

import asyncio
import http.client
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import AsyncMock

import pytest

import cirron as ci
from cirron.server import app, events, served
from cirron.server.process import Options, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.real.server.serving import Serving, batch, session, wait_until
else:
    from serving import Serving, batch, session, wait_until

SLOW = """
import time
import cirron as ci
ci.profile()
for number in ci.batches(range(1000)):
    ci.mark("loss", number)
    time.sleep(0.3)
"""
STUCK = """
import time
import cirron as ci
ci.profile(config={"max_steps": 10})
for number in ci.batches(range(10)):
    time.sleep(0.02 if number < 5 else 100)
"""


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started = []

    def start(folder: Path, program: str = SLOW, **environ: str) -> subprocess.Popen[str]:
        folder.mkdir(exist_ok=True, parents=True)
        environ |= {"PYTHONPATH": str(Path(ci.__file__).parents[1])}
        one = subprocess.Popen([sys.executable, "-c", program], cwd=folder, env=environ, text=True)
        started.append(one)
        return one

    yield start
    for one in started:
        one.kill()
        one.wait()


@pytest.mark.parametrize("way", ["http", "folder"])
def test_a_mark_is_there_within_two_seconds(
    server: Serving, training: Callable[..., subprocess.Popen[str]], tmp_path: Path, way: str
) -> None:
    """From `ci.mark` to a response of the server that contains it."""
    sending = {"CIRRON_API_ENDPOINT": server.address, "CIRRON_API_KEY": server.key}
    if way == "http":
        training(tmp_path / "deep" / "elsewhere", **sending)
    else:
        training(tmp_path)
    events = server.events()
    waits: list[float] = []
    seen = 0
    began = time.monotonic()
    while len(waits) < 6 and time.monotonic() < began + 40:
        event = next(events)
        if event["kind"] != "run":
            continue
        newest = server.get("/api/runs").json["runs"][0]
        now = time.time()
        assert event["id"] == newest["id"]
        ended_ns = newest["started_ms"] * 1_000_000 + newest["wall_ns"]
        if ended_ns > seen:
            seen = ended_ns
            waits.append(now - seen / 1e9)

    # What was recorded last waited at most so long; the flush interval of a second is in it.
    # Other programs may share the machine.
    busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert 6 == len(waits)
    assert sorted(waits)[2] < 2.0 * busy


@pytest.mark.parametrize(
    ("ending", "state"),
    [("", "clean"), ("raise ValueError", "exception"), ("os.kill(os.getpid(), 15)", "signal")],
)
def test_how_a_process_elsewhere_ended(
    server: Serving, tmp_path: Path, ending: str, state: str
) -> None:
    """Its black box is on another machine, but its records tell."""
    program = f"""
import os, time
import cirron as ci
ci.profile()
for number in ci.batches(range(3)):
    time.sleep(0.5)
{ending}
"""
    folder = tmp_path / "deep" / "elsewhere"
    folder.mkdir(parents=True)
    environ = {"CIRRON_API_ENDPOINT": server.address, "CIRRON_API_KEY": server.key}
    environ |= {"PYTHONPATH": str(Path(ci.__file__).parents[1])}

    def states() -> list[str]:
        return [one["state"] for one in server.get("/api/runs").json["runs"]]

    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=folder, env=environ, stderr=subprocess.DEVNULL
    ) as one:
        wait_until(lambda: states() == ["running"] or one.poll() is not None, "the run")
    wait_until(lambda: states() == [state], state)


def test_time_left_grows_while_a_run_is_stuck_in_a_step(
    server: Serving, training: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Half of the steps are done: the other half takes at least as long as the run took so far."""
    training(tmp_path, STUCK)
    (run_id,) = wait_until(server.runs, "the run")

    def left_s() -> float:
        return server.get(f"/api/runs/{run_id}").json["progress"]["left_s"] or 0.0

    assert wait_until(lambda: left_s() > 1.0, "a longer time left", 10.0)


def test_a_stream_goes_on_where_it_was(server: Serving) -> None:
    """With a cursor, each run that changed since is sent once; without one, everything is new."""
    first = next(server.events())
    assert "runs" == first["kind"]

    for name in ("one", "two"):
        server.send(batch(session(name)))
    server.send(batch(session("one"), first=10))
    wait_until(lambda: {"one", "two"} == set(server.runs()), "both runs")
    wait_until(lambda: not server.inbox(), "an empty inbox")
    time.sleep(0.5)

    for headers in ({}, {"last_event_id": str(first["cursor"])}):
        events = server.events(first["cursor"], **headers)
        found = [next(events) for _ in range(3)]
        assert sorted(one["cursor"] for one in found) == [one["cursor"] for one in found]
        assert {"one", "two"} == {one["id"] for one in found if one["kind"] == "run"}
        assert 1 == sum(one["kind"] == "runs" for one in found)
    server.send(batch(session("one"), first=20))
    assert "one" == next(server.events(found[-1]["cursor"]))["id"]
    beyond = next(server.events(10**17))
    assert ("runs", True) == (beyond["kind"], beyond["cursor"] < 10**17)


def test_an_answer_that_has_not_changed_is_not_sent_again(server: Serving) -> None:
    """The ETag stays the same until a new batch arrives."""
    server.send(batch(session("tagged")))
    wait_until(server.runs, "the run")
    wait_until(lambda: not server.inbox(), "an empty inbox")
    time.sleep(0.5)

    first = server.get("/api/runs")
    assert 304 == server.get("/api/runs", if_none_match=first.headers["etag"]).status
    server.send(batch(session("other")))
    wait_until(lambda: len(server.runs()) == 2, "another run")

    assert 200 == server.get("/api/runs", if_none_match=first.headers["etag"]).status


def test_a_quiet_stream_says_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page can tell it from a dead stream, as after a laptop's sleep."""
    monkeypatch.setattr(events, "KEEP_ALIVE_S", 0.0)

    async def first_two() -> list[bytes]:
        hub = events.Hub()
        stream = hub.stream(None, AsyncMock(return_value=True))
        return [await anext(stream) for _ in range(2)]

    _, second = asyncio.run(first_two())
    assert second.startswith(b"event: alive\ndata: ")


def test_records_that_are_still_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until everything has been read once, the server says so instead of listing no runs."""
    is_readable = threading.Event()
    look = served.Served._look
    monkeypatch.setattr(app, "READ_S", 0.1)
    monkeypatch.setattr(served.Served, "_look", lambda self: (is_readable.wait(30), look(self))[1])
    server = Server(Options(folders=[str(tmp_path)]))
    thread = threading.Thread(target=server.run)
    thread.start()
    assert server.is_ready.wait(30)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request("GET", server.link().removeprefix(server.address))
        answer = connection.getresponse()
        answer.read()
        cookie = {"Cookie": answer.headers["Set-Cookie"].partition(";")[0]}
        connection.request("GET", "/api/runs", headers=cookie)
        answer = connection.getresponse()
        assert (503, "1") == (answer.status, answer.headers["Retry-After"])
        assert b"being read" in answer.read()

        is_readable.set()
        monkeypatch.setattr(app, "READ_S", 30)
        connection.request("GET", "/api/runs", headers=cookie)
        answer = connection.getresponse()
        assert 200 == answer.status
        assert b'"runs":[]' in answer.read()
    finally:
        connection.close()
        is_readable.set()
        server.should_exit = True
        thread.join(30)
