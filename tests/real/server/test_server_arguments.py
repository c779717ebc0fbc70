"""`cirron serve` with wrong arguments: the error says what to do, in a line or two."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from cirron.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.real.server.serving import Serving, batch, session, wait_until
else:
    from serving import Serving, batch, session, wait_until


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "99999"], "99999 is not in the range 0<=x<=65535"),
        (["--max-inbox-mb", "-5"], "-5 is not in the range x>=1"),
        (["nowhere"], "'nowhere' is not a folder: name a folder that programs run in"),
        (["a-file"], "'a-file' is not a folder"),
        (["--host", "0.0.0.0"], "create one: cirron keys create NAME --store .cirron/server"),
        (["--store", "there", "."], "give folders or --store, not both"),
        (["--store", "foo://x"], "the store at 'foo://x' cannot be used"),
        (["--store", "http://127.0.0.1:1"], "the store at 'http://127.0.0.1:1' cannot be used"),
        (["--certificate", "a-file"], "--certificate a-file, --private-key a-file: "),
        (["--certificate", "none.pem"], "none.pem: No such file or directory"),
        (["--private-key", "a-file"], "give both"),
        (["--role", "pages"], "'pages' is not one of 'all', 'ingest', 'page'"),
        (["--trust-proxy", "10.0.0.7"], "--trust-proxy and --user-header go together"),
        (["--trust-proxy", "home", "--user-header", "X-User"], "'home' is not an address or a net"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else "",
)
def test_wrong_arguments(tmp_path: Path, arguments: list[str], said: str) -> None:
    """It exits at once with an error and no traceback, and creates no folder."""
    (tmp_path / "a-file").write_text("no certificate")
    given = ["--no-browser", *([] if "--port" in arguments else ["--port", "0"]), *arguments]

    found = serve_in(tmp_path, *given)

    assert found.returncode in (1, 2)
    assert said in " ".join(found.stderr.split())
    assert "Traceback" not in found.stderr
    assert "" == found.stdout
    assert not (tmp_path / "nowhere").exists()


def test_received_runs_are_listed_in_their_folder(server: Serving) -> None:
    """`cirron ls` finds what a server has received in this folder, and nothing else is needed."""
    assert 200 == server.send(batch(session("received"))).status
    wait_until(lambda: ["received"] == server.runs(), "the run")

    for folder in (server.folder, server.folder / ".cirron", server.depot):
        listed = CliRunner().invoke(main, ["ls", str(folder), "--json"])
        assert ["received"] == [one["run_id"] for one in json.loads(listed.output)["runs"]]


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    """The error says so, and how to choose another one."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = serve_in(tmp_path, "--no-browser", "--port", str(port))

    assert 1 == found.returncode
    assert (
        f"cannot listen on 127.0.0.1:{port}; choose a free port: cirron serve --port 0"
        in found.stderr
    )
    assert "Traceback" not in found.stderr


def read_only(folder: Path) -> list[str]:
    """Starts a command in this folder, mounted read-only; other processes may write it."""
    script = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && cd "$0" && exec "$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, str(folder)]
    if 0 != subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs to mount a folder read-only")
    return command


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
@pytest.mark.parametrize("arguments", [[], ["--role", "page"]], ids=["all", "page"])
def test_a_read_only_folder_is_shown(tmp_path: Path, arguments: list[str]) -> None:
    """Its runs are shown, those that a server received there too, and nothing is received."""
    before = read_only(tmp_path)
    writing = Serving(tmp_path)
    assert 200 == writing.send(batch(session("received"))).status
    wait_until(lambda: ["received"] == writing.runs(), "the run")
    writing.stop()
    reading = Serving(tmp_path, *arguments, before=before, CIRRON_API_KEY="key")
    try:
        wait_until(lambda: ["received"] == reading.runs(), "the run")

        assert 405 == reading.send(batch(session("more"))).status
        assert "" == reading.errors
    finally:
        reading.stop()
    assert ["Nothing is received: .cirron is read-only\n"] == reading.said


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
@pytest.mark.parametrize("arguments", [["--role", "ingest"], ["--host", "0.0.0.0"]])
def test_a_read_only_folder_keeps_neither_batches_nor_keys(
    tmp_path: Path, arguments: list[str]
) -> None:
    """A server that needs either is refused, and the error says where they could be."""
    found = serve_in(tmp_path, "--port", "0", *arguments, before=read_only(tmp_path))

    assert (1, "") == (found.returncode, found.stdout)
    assert "'.cirron' cannot be written (Read-only file system)" in found.stderr
    assert "That store is then served instead of the folder" in found.stderr
    assert "Traceback" not in found.stderr


def serve_in(
    folder: Path, *arguments: str, before: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-m", "cirron", "serve", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_folder_below_that_only_a_server_has_used(serve: Callable[..., Serving]) -> None:
    """It has no records, so the folders below it are shown."""
    one = serve()
    for name in ("recorded", "served"):
        (one.folder / name).mkdir()
    program = "import cirron as ci; ci.profile(); list(ci.batches(range(3)))"
    environ = {name: text for name, text in os.environ.items() if not name.startswith("CIRRON_")}
    subprocess.run(
        [sys.executable, "-c", program], cwd=one.folder / "recorded", env=environ, check=True
    )
    inside = Serving(one.folder / "served")
    assert 200 == inside.send(batch(session("sent"))).status
    inside.kill()

    wait_until(lambda: 1 == len(one.runs()), "the run")
    assert "" == one.errors
