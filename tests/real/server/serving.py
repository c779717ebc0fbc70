"""Runs a real `cirron serve`, sends requests to it, and makes batches."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

PATIENCE_S = 60.0


def wait_until(is_so: Callable[..., Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Waits until the condition is true, and returns its value."""
    deadline = time.monotonic() + timeout_s
    while not (found := is_so()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g}s in vain for {what}"
        time.sleep(0.02)
    return found


class Reply(NamedTuple):
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Serving:
    """A running server, in a folder."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        port: int = 0,
        before: Sequence[str] = (),  # of the command
        **environ: str,
    ) -> None:
        kept = {name: one for name, one in os.environ.items() if not name.startswith("CIRRON_")}
        command = [sys.executable, "-m", "cirron", "serve", "--no-browser", "--port", str(port)]
        self.folder = folder
        self._err = open(folder / "server-err.txt", "ab")  # noqa: SIM115  closed by `stop`
        self.process = subprocess.Popen(
            [*before, *command, *arguments],
            cwd=folder,
            env=kept | environ,
            stdout=subprocess.PIPE,
            stderr=self._err,
            text=True,
        )
        assert self.process.stdout is not None
        self.link = self.process.stdout.readline().strip()
        assert self.link.startswith("http"), (self.link, self.errors)
        self.said: list[str] = []
        self.key = environ.get("CIRRON_API_KEY", "")
        if not self.key and "page" not in arguments:
            self.said.append(self.process.stdout.readline())
            self.key = re.findall(r"CIRRON_API_KEY=(\S+)", self.said[0])[0]
        self._drainer = threading.Thread(target=self._drain, daemon=True)
        self._drainer.start()
        self.address = self.link.partition("/?")[0]
        self.host = urlsplit(self.address).netloc
        self.port = urlsplit(self.address).port or 0
        self._cookie: str | None = None

    def _drain(self) -> None:
        assert self.process.stdout is not None
        self.said += list(self.process.stdout)
        self.process.stdout.close()

    @property
    def errors(self) -> str:
        """Its standard error."""
        return (self.folder / "server-err.txt").read_text()

    def request(
        self, method: str, path: str, body: bytes | None = None, /, **headers: str
    ) -> Reply:
        """Sends one request on a new connection. A header `a_b` is sent as `a-b`."""
        connection = http.client.HTTPConnection(self.host, timeout=30)
        try:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, given)
            found = connection.getresponse()
            names = {name.lower(): value for name, value in found.getheaders()}
            return Reply(found.status, names, found.read())
        finally:
            connection.close()

    def send(self, batch: dict[str, Any], key: str | None = None, **headers: str) -> Reply:
        """Sends a batch as clients do."""
        body = gzip.compress(json.dumps(batch).encode(), 1)
        headers = {"content_encoding": "gzip", **headers}
        return self.request(
            "POST", "/api/traces", body, authorization=f"Bearer {key or self.key}", **headers
        )

    @property
    def cookie(self) -> str:
        """The cookie of a browser that opened the link."""
        if self._cookie is None:
            found = self.request("GET", self.link.removeprefix(self.address))
            assert 303 == found.status, found
            self._cookie = found.headers["set-cookie"].partition(";")[0]
        return self._cookie

    def get(self, path: str, **headers: str) -> Reply:
        """Sends a request as the page does."""
        return self.request("GET", path, cookie=self.cookie, **headers)

    def events(self, cursor: int | None = None, **headers: str) -> Iterator[dict[str, Any]]:
        """The events of a stream."""
        connection = http.client.HTTPConnection(self.host, timeout=30)
        try:
            asked = "" if cursor is None else f"?cursor={cursor}"
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(
                "GET", f"/api/events{asked}", headers={"cookie": self.cookie, **given}
            )
            found = connection.getresponse()
            assert 200 == found.status
            while line := found.readline():
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))
        finally:
            connection.close()

    def runs(self) -> list[str]:
        """The ids of the runs it shows."""
        return [one["id"] for one in self.get("/api/runs").json["runs"]]

    def inbox(self) -> list[str]:
        """The batches that wait for the compactor."""
        return [one.name for one in self.depot.glob("inbox/*.json")]

    @property
    def depot(self) -> Path:
        return self.folder / ".cirron" / "server"

    def settle(self) -> None:
        """Waits until everything that was sent is stored."""
        wait_until(lambda: not self.inbox(), "an empty inbox")

    def kill(self) -> None:
        """`kill -9`."""
        self.process.kill()
        self.stop()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(30)
        self._drainer.join(30)
        self._err.close()
        return status


def resident_bytes(pid: int) -> int:
    """The resident memory of a process."""
    with open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def session(run_id: str, rank: int = 0, **others: Any) -> dict[str, Any]:
    """The session of a rank."""
    wall_ns = time.time_ns()
    return {
        "id": secrets.token_hex(16),
        "run_id": run_id,
        "attempt": 0,
        "host": f"node{rank // 8}",
        "pid": 1000 + rank,
        "rank": rank,
        "local_rank": rank % 8,
        "world_size": 1000,
        "clock": {"wall_ns": wall_ns, "monotonic_ns": 1, "uncertainty_ns": 100},
        **others,
    }


def batch(who: dict[str, Any] | None, steps: int = 10, first: int = 0) -> dict[str, Any]:
    """A batch of steps, each with a forward inside and a loss."""
    now_ns = time.time_ns()
    spans, marks = [], []
    base = secrets.token_hex(8)
    rank = None if who is None else who["rank"]
    for number in range(steps):
        start_ns = now_ns + number * 1_000_000
        step = span(f"{base}{number * 2:016x}", "step", None, first + number, start_ns, rank)
        inner = span(f"{base}{number * 2 + 1:016x}", "forward", step["id"], None, start_ns, rank)
        mark_id = f"{base}{number + 2**40:016x}"
        marks.append(
            {
                "id": mark_id,
                "span_id": step["id"],
                "name": "loss",
                "value_type": "float",
                "value": 1.0 / (first + number + 1),
                "attrs": {},
                "ts_ns": start_ns,
                "kind": "point",
            }
        )
        spans += [inner, step]
    content = {
        "schema_version": 1,
        "sdk_version": "test",
        "batch_id": secrets.token_hex(16),
        "created_ns": now_ns,
        "session": who,
        "spans": spans,
        "marks": marks,
        "snapshots": [],
    }
    if who is None:
        del content["session"]
    return content


def span(
    id_: str, name: str, parent: str | None, index: int | None, start_ns: int, rank: int | None
) -> dict[str, Any]:
    return {
        "id": id_,
        "name": name,
        "parent_id": parent,
        "index": index,
        "start_ns": start_ns,
        "end_ns": start_ns + 900_000,
        "cpu_ns": None,
        "gpu_ns": None,
        "memory_peak_bytes": None,
        "thread_id": 1,
        "pid": 1,
        "rank": rank,
        "attrs": {},
        "mark_ids": [],
    }
