"""Keys, logins and proxies: who may write, who may read, and until when."""

from __future__ import annotations

import http.client
import signal
import ssl
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from click.testing import CliRunner

from cirron.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.real.server.serving import Serving, batch, session, wait_until
else:
    from serving import Serving, batch, session, wait_until

END_S = 3.0  # as long as uvicorn waits for open requests


def keys(folder: Path, *arguments: str) -> str:
    """What `cirron keys` prints."""
    result = CliRunner().invoke(main, ["keys", *arguments, "--dir", str(folder)])
    assert 0 == result.exit_code, result.output
    return result.output.strip()


def test_key_allows_only_its_scope(server: Serving, tmp_path: Path) -> None:
    """One key writes, the other reads, neither does both; only hashes are stored."""
    writes = keys(tmp_path, "create", "trainer")
    reads = keys(tmp_path, "create", "watcher", "--scope", "read")
    content = batch(session("scoped"))

    assert 200 == server.send(content, writes).status
    assert 403 == server.send(content, reads).status
    assert 200 == server.request("GET", "/api/runs", authorization=f"Bearer {reads}").status
    assert 403 == server.request("GET", "/api/runs", authorization=f"Bearer {writes}").status
    assert 401 == server.request("GET", "/api/runs", authorization=f"Bearer {reads}x").status
    listed = keys(tmp_path, "list")
    assert "trainer" in listed
    assert "watcher" in listed
    kept = "".join(path.read_text() for path in server.depot.glob("keys/*"))
    for key in (writes, reads):
        assert key.rpartition("_")[2] not in kept + listed


def test_sessions_die_with_their_key(server: Serving, tmp_path: Path) -> None:
    """A revoked key is rejected, and so are its cookies; its streams end."""
    key = keys(tmp_path, "create", "guest", "--scope", "read")
    key_id = key.split("_")[1]
    link = keys(tmp_path, "link", key_id, server.address)
    found = server.request("GET", link.removeprefix(server.address))
    assert 303 == found.status
    server._cookie = found.headers["set-cookie"].partition(";")[0]
    assert 200 == server.get("/api/runs").status
    events = server.events()
    next(events)

    keys(tmp_path, "revoke", key_id)

    wait_until(lambda: 401 == server.get("/api/runs").status, "the end of the session", 10)
    assert 401 == server.request("GET", "/api/runs", authorization=f"Bearer {key}").status
    assert [] == list(events)
    assert 403 == server.request("GET", link.removeprefix(server.address)).status


def test_a_key_is_rate_limited(server: Serving, tmp_path: Path) -> None:
    """Too many requests per second get 429 with Retry-After."""
    key = keys(tmp_path, "create", "slow", "--scope", "read", "--rate", "5")

    found = [server.request("GET", "/api/runs", authorization=f"Bearer {key}") for _ in range(30)]

    refused = [one for one in found if one.status == 429]
    assert refused
    assert all("1" == one.headers["retry-after"] for one in refused)
    assert 200 == found[0].status


def test_a_new_key_is_accepted_soon(server: Serving, tmp_path: Path) -> None:
    """The server has just read its keys; a client that gets 401 would pause for minutes."""
    assert 401 == server.send(batch(session("new")), f"ck_{'0' * 12}_{'x' * 43}").status
    key = keys(tmp_path, "create", "trainer")
    time.sleep(0.3)

    assert 200 == server.send(batch(session("new")), key).status


def test_key_of_this_shell_from_another_server(
    tmp_path: Path, serve: Callable[..., Serving]
) -> None:
    """It is accepted, too; but a key of this store is only valid until it is revoked."""
    (tmp_path / "other").mkdir()
    foreign = keys(tmp_path / "other", "create", "trainer")
    own = keys(tmp_path, "create", "trainer")
    with_foreign, with_own = serve(CIRRON_API_KEY=foreign), serve(CIRRON_API_KEY=own)

    assert 200 == with_foreign.send(batch(session("shell")), foreign).status
    assert 401 == with_foreign.send(batch(session("shell")), f"{foreign[:-1]}!").status
    assert 200 == with_own.send(batch(session("shell")), own).status
    keys(tmp_path, "revoke", own.split("_")[1])
    wait_until(lambda: 401 == with_own.send(batch(session("shell")), own).status, "the end", 10)


def test_changed_cookie_is_rejected(server: Serving) -> None:
    """A cookie with another key, expiry or signature is rejected."""
    name, _, value = server.cookie.partition("=")
    key_id, expires, signature = value.split(".")
    assert 200 == server.get("/api/runs").status

    for changed in (
        f"own-000000000000.{expires}.{signature}",
        f"{key_id}.{int(expires) + 1}.{signature}",
        f"{key_id}.{expires}.{signature[:-1]}{'0' if signature[-1] != '0' else '1'}",
        f"{key_id}.{expires}.",
        "",
    ):
        assert 401 == server.request("GET", "/api/runs", cookie=f"{name}={changed}").status


def test_logging_out(server: Serving) -> None:
    """Logging out deletes the cookie."""
    found = server.request("POST", "/api/logout", cookie=server.cookie)

    assert 200 == found.status
    assert "max-age=0" in found.headers["set-cookie"].lower()


def test_only_a_listed_proxy_logs_in(serve: Callable[..., Serving]) -> None:
    """The header has no effect from any other address."""
    listed = serve("--trust-proxy", "127.0.0.0/8", "--user-header", "X-Remote-User")
    others = serve("--trust-proxy", "10.0.0.1", "--user-header", "X-Remote-User")

    assert 200 == listed.request("GET", "/api/runs", x_remote_user="ada").status
    assert 401 == listed.request("GET", "/api/runs", x_forwarded_user="ada").status
    assert 401 == listed.request("GET", "/api/runs").status
    assert 401 == listed.request("POST", "/api/traces", b"{}", x_remote_user="ada").status
    assert 401 == others.request("GET", "/api/runs", x_remote_user="ada").status


def test_another_address_needs_keys(tmp_path: Path, serve: Callable[..., Serving]) -> None:
    """Needs a key first, and does not accept the key of this machine."""
    command = [sys.executable, "-m", "cirron", "serve", "--no-browser", "--port", "0"]
    refused = subprocess.run(
        [*command, "--host", "0.0.0.0"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert 1 == refused.returncode
    assert "cirron keys create" in refused.stderr
    assert "" == refused.stdout

    key = keys(tmp_path, "create", "trainer")
    server = serve("--host", "0.0.0.0", CIRRON_API_KEY="of-this-machine-alone")
    server.host = f"127.0.0.1:{server.port}"
    assert 401 == server.send(batch(session("remote"))).status
    assert 200 == server.send(batch(session("remote")), key).status
    assert 421 == server.request("GET", "/api/runs", host="cluster.example").status


def test_a_name_that_was_allowed(serve: Callable[..., Serving]) -> None:
    """A host name from `--allow-host` is accepted."""
    server = serve("--allow-host", "cluster.example")

    assert 401 == server.request("GET", "/api/runs", host="cluster.example:8321").status
    assert 421 == server.request("GET", "/api/runs", host="other.example").status


def test_the_first_line_is_the_address(serve: Callable[..., Serving]) -> None:
    """With its token. The key from the environment is used and not printed."""
    server = serve(CIRRON_API_KEY="a-key-of-the-shell")

    assert server.link.startswith(f"http://127.0.0.1:{server.port}/?token=")
    assert 200 == server.send(batch(session("local"))).status
    assert 401 == server.send(batch(session("local")), "another-key").status
    server.stop()
    assert "a-key-of-the-shell" not in "".join(server.said) + server.errors


def test_ctrl_c_ends_the_server_while_a_page_is_open(serve: Callable[..., Serving]) -> None:
    """It exits with status 0, at once, and prints nothing."""
    server = serve()
    events = server.events()
    next(events)
    began = time.monotonic()
    server.process.send_signal(signal.SIGINT)

    server.process.wait(60)

    assert time.monotonic() - began < END_S
    assert [] == list(events)
    assert (0, "") == (server.stop(), server.errors)


def test_a_port_that_is_taken(serve: Callable[..., Serving], tmp_path: Path) -> None:
    """The error says what to type instead."""
    server = serve()
    command = [sys.executable, "-m", "cirron", "serve", "--port", str(server.port)]

    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert 1 == found.returncode
    assert "--port 0" in found.stderr


def test_https(serve: Callable[..., Serving], tmp_path: Path) -> None:
    """With a certificate, the address is https, and the link logs in."""
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)

    server = serve("--certificate", certificate, "--private-key", key)
    trusting = ssl.create_default_context(cafile=certificate)
    connection = http.client.HTTPSConnection(server.host, timeout=30, context=trusting)
    connection.request("GET", server.link.removeprefix(server.address))
    answer = connection.getresponse()
    connection.close()

    assert server.address.startswith("https://")
    assert 303 == answer.status
    assert "secure" in answer.headers["set-cookie"].lower()
