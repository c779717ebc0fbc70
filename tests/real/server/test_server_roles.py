"""Several processes over one store: in a folder, and in object storage."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cirron as ci

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.real.server.serving import batch, session, wait_until
else:
    from serving import batch, session, wait_until

SCRIPT = Path(__file__).parents[3] / "examples" / "three_servers.sh"
PORT = 20_000 + os.getpid() % 3_000 * 4


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket on an S3-compatible server."""
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")
    port = PORT + 3
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    for name, value in {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_ENDPOINT_URL": address,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)

    def made() -> bool:
        try:
            request = urllib.request.Request(f"{address}/runs", method="PUT")
            urllib.request.urlopen(request, timeout=5).close()
        except OSError:
            return False
        return True

    try:
        wait_until(made, "the bucket")
        yield "s3://runs/served"
    finally:
        server.kill()
        server.wait()


class Three:
    """The running script of the docs."""

    def __init__(self, store: str, port: int, folder: Path) -> None:
        self._out = folder / "out.txt"
        with open(self._out, "wb") as out:
            self.process = subprocess.Popen(
                ["sh", str(SCRIPT), store, str(port)],
                cwd=folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | {"CIRRON": f"{sys.executable} -m cirron"},
                start_new_session=True,
            )
        found = wait_until(self._ready, "three servers")
        self.endpoints, self.link = found

    def _ready(self) -> Any:
        text = self._out.read_text()
        assert self.process.poll() is None, text
        endpoints = re.findall(r"^CIRRON_API_ENDPOINT=(\S+) CIRRON_API_KEY=(\S+)", text, re.M)
        links = re.findall(r"^(http://\S+\?token=\S+)", text, re.M)
        plain = re.findall(r"^(http://[\d.:]+)$", text, re.M)
        return (endpoints, links[0]) if len(endpoints) == 2 and links and len(plain) == 2 else None

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def post(endpoint: tuple[str, str], content: dict[str, Any]) -> int:
    """Sends a batch."""
    import json

    address, key = endpoint
    request = urllib.request.Request(
        f"{address}/api/traces",
        json.dumps(content).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as found:
        return int(found.status)


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_three_servers_over_one_store(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The script of docs/server.md: batches to either server are one run on the third."""
    store = str(tmp_path / "store") if kind == "folder" else request.getfixturevalue("bucket")
    three = Three(store, PORT, tmp_path)
    try:
        ranks = [session("shared", rank) for rank in range(4)]
        for number in range(3):
            for who in ranks:
                content = batch(who, steps=3, first=3 * number)
                # Sent to both, as a client does whose first server died before it answered.
                assert 200 == post(three.endpoints[who["rank"] % 2], content)
                assert 200 == post(three.endpoints[1 - who["rank"] % 2], content)

        def spans() -> int:
            try:
                return len(ci.open(store).spans)
            except ci.UnknownRunError:
                return 0

        wait_until(lambda: spans() == 72, "all spans")
        run = ci.open(store)
        assert [0, 1, 2, 3] == run.ranks
        assert 36 == len(run.marks)
        jar = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with contextlib.suppress(urllib.error.HTTPError):  # where the page was not built
            jar.open(three.link, timeout=30).close()
        address = three.link.partition("/?")[0]
        with jar.open(f"{address}/api/runs", timeout=30) as found:
            assert b'"shared"' in found.read()
    finally:
        three.stop()
