"""Delivery under attack: planted files, unreadable files, odd servers, proxies, and kill -9."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cirron import guard, system, wire
from cirron.ship.connection import find_proxy
from cirron.ship.outbox import DiskOutbox, MemoryOutbox, Sender

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from tests.real.test_http import (
        KEY,
        A,
        B,
        C,
        Endpoint,
        Exchange,
        FakeClock,
        Sinks,
        answer,
        ids,
        left,
        make_batch,
        make_sink,
        save_blob,
        send,
        soon,
        warnings,
    )

    from cirron.ship.outbox import Item
else:
    from test_http import (
        KEY,
        A,
        B,
        C,
        Endpoint,
        FakeClock,
        answer,
        ids,
        left,
        make_batch,
        make_sink,
        save_blob,
        send,
        soon,
        warnings,
    )

__all__ = ["make_sink"]  # a fixture

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.timeout(30)]

SECRET = b"-----BEGIN PRIVATE KEY-----"
PATIENCE_S = 10.0


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the user's that is nobody's business."""
    path = tmp_path / "home" / "id_rsa"
    path.parent.mkdir()
    path.write_bytes(SECRET)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / ".cirron"


def leave(root: Path, prefix: str, *numbers: int) -> list[Path]:
    """What a process leaves that is killed before it has sent anything."""
    dead = DiskOutbox(root, prefix)
    dead.open()
    dead.after_fork()  # closes its descriptors, as a kill does
    (root / "spool").mkdir(exist_ok=True)
    paths = []
    for number in numbers:
        batch = make_batch(number, prefix=prefix)
        paths.append(root / "spool" / batch.file_name)
        paths[-1].write_bytes(batch.payload)
    return paths


def deliver(make_sink: Sinks, endpoint: Endpoint, root: Path, prefix: str = B) -> dict[str, object]:
    """A run that has nothing of its own to send; returns what it counted."""
    sink = make_sink(endpoint, DiskOutbox(root, prefix))
    sink.tick()
    sink.close(soon())
    return sink.health()


def everything(endpoint: Endpoint) -> bytes:
    """All that an endpoint was told."""
    return repr(endpoint.requests).encode()


# -- planted and unreadable files -------------------------------------------------------------


def be_gone(path: Path, secret: Path) -> None:
    path.unlink()


def be_a_folder(path: Path, secret: Path) -> None:
    path.unlink()
    path.mkdir()


def be_a_fifo(path: Path, secret: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def be_a_link(path: Path, secret: Path) -> None:
    path.unlink()
    path.symlink_to(secret)


def be_a_second_name(path: Path, secret: Path) -> None:
    path.unlink()
    os.link(secret, path)


def be_a_dangling_link(path: Path, secret: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def be_a_device(path: Path, secret: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def be_a_socket(path: Path, secret: Path) -> None:
    path.unlink()
    folder = os.open(path.parent, os.O_RDONLY)  # the name of a socket may have 108 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def be_empty(path: Path, secret: Path) -> None:
    path.write_bytes(b"")


def be_zeros(path: Path, secret: Path) -> None:
    """What a power failure leaves."""
    path.write_bytes(bytes(path.stat().st_size))


def be_a_copy(path: Path, secret: Path) -> None:
    path.write_bytes(secret.read_bytes())


def be_another_batch(path: Path, secret: Path) -> None:
    path.write_bytes(make_batch(99).payload)


def be_huge(path: Path, secret: Path) -> None:
    os.truncate(path, 50 * 2**30)


UNREADABLE = [
    be_gone,
    be_a_folder,
    be_a_fifo,
    be_a_link,
    be_a_second_name,
    be_a_dangling_link,
    be_a_device,
    be_a_socket,
    be_empty,
    be_zeros,
    be_a_copy,
    be_another_batch,
    be_huge,
]


class TestUnreadableSpoolFiles:
    @pytest.mark.parametrize("damage", UNREADABLE)
    def test_those_behind_it_are_sent(
        self,
        damage: Callable[[Path, Path], None],
        make_sink: Sinks,
        root: Path,
        secret: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """One spool file that is not what it was is skipped and counted; the rest goes."""
        with Endpoint() as endpoint:
            outbox = DiskOutbox(root, A)
            sink = make_sink(endpoint, outbox)
            outbox.open()
            batches = [make_batch(number) for number in (1, 2, 3)]
            (root / "spool").mkdir()
            for batch in batches:
                (root / "spool" / batch.file_name).write_bytes(batch.payload)
                outbox.put(batch)
            damage(root / "spool" / batches[1].file_name, secret)
            sink.tick()
            sink.close(soon())

            assert ids(1, 3) == endpoint.batch_ids
            assert SECRET not in everything(endpoint)
            assert 1 == sink.health()["http_unreadable"]
        assert [] == left(root)
        (warning,) = warnings(caplog)
        assert "a batch for 127.0.0.1 cannot be read from the spool" in warning

    @pytest.mark.parametrize("damage", UNREADABLE)
    def test_in_a_later_run_too(
        self,
        damage: Callable[[Path, Path], None],
        make_sink: Sinks,
        root: Path,
        secret: Path,
    ) -> None:
        """A run that takes over skips it, and the one after that finds nothing left to do."""
        paths = leave(root, A, 1, 2, 3)
        damage(paths[1], secret)
        with Endpoint() as endpoint:
            counted = deliver(make_sink, endpoint, root)
            again = deliver(make_sink, endpoint, root, C)

            assert ids(1, 3) == endpoint.batch_ids
            assert SECRET not in everything(endpoint)
        assert (damage is not be_gone) == counted["http_unreadable"]
        assert 0 == again["http_unreadable"]
        assert [] == left(root)

    @pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
    def test_one_without_permission(self, make_sink: Sinks, root: Path) -> None:
        """A file that we may not read is skipped too."""
        paths = leave(root, A, 1, 2)
        paths[0].chmod(0)
        with Endpoint() as endpoint:
            counted = deliver(make_sink, endpoint, root)

            assert ids(2) == endpoint.batch_ids
        assert 1 == counted["http_unreadable"]

    @pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
    def test_a_disk_with_errors(
        self, number: int, make_sink: Sinks, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A file that the disk cannot give is skipped."""
        bad, _ = leave(root, A, 1, 2)

        def fail(path: Path, limit: int) -> bytes:
            if path == bad:
                raise OSError(number, os.strerror(number))
            return read_regular(path, limit)

        read_regular = system.read_regular
        monkeypatch.setattr(system, "read_regular", fail)
        with Endpoint() as endpoint:
            counted = deliver(make_sink, endpoint, root)

            assert ids(2) == endpoint.batch_ids
        assert (1, os.strerror(number)) == (counted["http_unreadable"], counted["http_last_error"])

    def test_a_program_with_too_many_open_files(
        self, make_sink: Sinks, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A shortage of descriptors is no fault of the file: it is tried again."""
        tries = iter([True, True, False])

        def fail(path: Path, limit: int) -> bytes:
            if path.parent.name == "spool" and next(tries, False):
                raise OSError(errno.EMFILE, "Too many open files")
            return read_regular(path, limit)

        read_regular = system.read_regular
        leave(root, A, 1, 2)
        monkeypatch.setattr(system, "read_regular", fail)
        with Endpoint() as endpoint:
            sink = make_sink(endpoint, DiskOutbox(root, B))
            sink.tick()
            endpoint.wait_for(2)
            sink.close(soon())

            assert ids(1, 2) == endpoint.batch_ids
        assert [] == list(tries)
        assert 0 == sink.health()["http_unreadable"]


class TestPlantedState:
    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"\n",
            b"garbage",
            b"\xff" * 59,
            b"00000000000000000002-",
            b"99999999999999999999-" + B.encode() + b"f" * 16 + b".json\n",  # of another process
            b"../" * 30,
            b"0" * 2**20,
        ],
        ids=range(8),
    )
    def test_a_damaged_watermark(self, content: bytes, make_sink: Sinks, root: Path) -> None:
        """What says nothing counts as nothing done: all is sent, and the server drops copies."""
        leave(root, A, 1, 2)
        (root / "outbox" / A).write_bytes(content)
        with Endpoint() as endpoint:
            deliver(make_sink, endpoint, root, C)

            assert ids(1, 2) == endpoint.batch_ids
        assert [] == left(root)

    def test_a_huge_watermark(self, make_sink: Sinks, root: Path) -> None:
        """Of a file of 50 GB, one line is read."""
        leave(root, A, 1)
        os.truncate(root / "outbox" / A, 50 * 2**30)
        with Endpoint() as endpoint:
            deliver(make_sink, endpoint, root)

            assert ids(1) == endpoint.batch_ids

    @pytest.mark.parametrize("damage", [be_a_folder, be_a_fifo, be_a_link, be_a_device])
    def test_what_is_no_file_is_left_alone(
        self, damage: Callable[[Path, Path], None], make_sink: Sinks, root: Path, secret: Path
    ) -> None:
        """A link, a folder or a FIFO in the outbox is not followed, waited for or removed."""
        leave(root, A, 1)
        leave(root, C, 2)
        damage(root / "outbox" / A, secret)
        with Endpoint() as endpoint:
            deliver(make_sink, endpoint, root)

            assert ids(2, prefix=C) == endpoint.batch_ids
        assert [A] == left(root)
        assert SECRET == secret.read_bytes()

    def test_a_link_that_is_put_there_while_we_run(
        self, make_sink: Sinks, root: Path, secret: Path
    ) -> None:
        """A live process writes its watermark to its own file, never through a link."""
        with Endpoint() as endpoint:
            outbox = DiskOutbox(root, A)
            sink = make_sink(endpoint, outbox)
            send(sink, root, outbox, make_batch(1))
            endpoint.wait_for(1)
            (root / "outbox" / A).unlink()
            (root / "outbox" / A).symlink_to(secret)
            (root / "outbox" / f"{A}.tmp").symlink_to(secret)
            send(sink, root, outbox, make_batch(2))
            sink.close(soon())

            assert ids(1, 2) == endpoint.batch_ids
        assert SECRET == secret.read_bytes()
        assert [] == left(root)

    def test_an_old_marker_with_a_file_of_the_users(
        self, make_sink: Sinks, root: Path, secret: Path
    ) -> None:
        """Nothing in the outbox names a file to send."""
        (name,) = [path.name for path in leave(root, A, 1)]
        folder = root / "outbox" / f"{1:032x}-1"
        folder.mkdir()
        (folder / "lock").touch()
        marker = json.dumps({"blobs": [[str(secret), "anything"]]})
        (folder / name).write_text(marker)
        (root / "outbox" / A).write_text(marker)
        with Endpoint() as endpoint:
            deliver(make_sink, endpoint, root)

            assert [("POST", "/api/traces")] == [(r.method, r.path) for r in endpoint.requests]


class TestPlantedBlobs:
    def upload(
        self, make_sink: Sinks, root: Path, *blobs: Path
    ) -> tuple[list[tuple[str, bytes]], object]:
        """What goes besides the batch, and how many are counted as lost."""
        with Endpoint() as endpoint:
            outbox = DiskOutbox(root, A)
            sink = make_sink(endpoint, outbox)
            send(sink, root, outbox, make_batch(1, blobs=blobs))
            sink.close(soon())

            found = [(request.path, request.body) for request in endpoint.requests]
            assert "/api/traces" == found[0][0]
            return found[1:], sink.health()["http_blobs_lost"]

    def test_a_file_of_the_users(self, make_sink: Sinks, root: Path, secret: Path) -> None:
        """An address outside of our folder is no address of ours."""
        assert ([], 1) == self.upload(make_sink, root, secret)

    def test_another_folder_of_the_right_form(
        self, make_sink: Sinks, root: Path, tmp_path: Path
    ) -> None:
        """The file is looked for in our folder, wherever the address points."""
        theirs = save_blob(tmp_path / "theirs", 1, "weights", SECRET)
        ours = save_blob(root, 2, "weights", b"ours")
        elsewhere = save_blob(tmp_path / "theirs", 2, "weights", SECRET)

        assert (
            [(f"/api/traces/blobs/snapshots/{2:032x}/weights.safetensors", ours.read_bytes())],
            1,
        ) == self.upload(make_sink, root, theirs, elsewhere)

    @pytest.mark.parametrize(
        "damage", [be_gone, be_a_folder, be_a_fifo, be_a_link, be_a_second_name, be_a_device]
    )
    def test_what_is_no_file_of_ours(
        self, damage: Callable[[Path, Path], None], make_sink: Sinks, root: Path, secret: Path
    ) -> None:
        """A link, or a second name of another file, is not opened to be sent."""
        blob = save_blob(root, 1, "weights")
        damage(blob, secret)

        assert ([], 1) == self.upload(make_sink, root, blob)

    @pytest.mark.parametrize("depth", [0, 1])
    def test_folders_that_are_links(
        self, depth: int, make_sink: Sinks, root: Path, tmp_path: Path
    ) -> None:
        """No folder on the way may be a link."""
        theirs = save_blob(tmp_path / "theirs", 1, "weights", SECRET)
        blob = save_blob(root, 1, "weights")
        folder = blob.parents[depth]
        shutil.rmtree(folder)
        folder.symlink_to(theirs.parents[depth])
        assert blob.exists()

        assert ([], 1) == self.upload(make_sink, root, blob)

    def test_a_root_that_is_a_link(self, make_sink: Sinks, root: Path, tmp_path: Path) -> None:
        """Where the user has put the whole folder is the user's choice."""
        (tmp_path / "scratch").mkdir()
        root.symlink_to(tmp_path / "scratch")
        blob = save_blob(root, 1, "weights", b"ours")

        sent, lost = self.upload(make_sink, root, blob)
        assert ([b"ours"], 0) == ([body for _, body in sent], lost)

    def test_a_planted_batch_of_a_dead_process(
        self, make_sink: Sinks, root: Path, secret: Path
    ) -> None:
        """A whole planted batch is sent as a batch, at most, and no file with it."""
        leave(root, A)
        batch = make_batch(1, blobs=[secret, Path("/etc/passwd")])
        (root / "spool" / batch.file_name).write_bytes(batch.payload)
        with Endpoint() as endpoint:
            counted = deliver(make_sink, endpoint, root)

            assert [("POST", batch.payload)] == [(r.method, r.body) for r in endpoint.requests]
        assert 2 == counted["http_blobs_lost"]


class TestFullDisk:
    def test_sending_goes_on(self, make_sink: Sinks, root: Path, tmp_path: Path) -> None:
        """On a full disk the watermark still moves, and what cannot be stored is sent."""
        root.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(root)],
            capture_output=True,
            check=False,
        )
        if mounted.returncode:
            pytest.skip("needs a small disk, and mounting one is refused")
        try:
            with Endpoint() as endpoint:
                outbox = DiskOutbox(root, A)
                sink = make_sink(endpoint, outbox)
                send(sink, root, outbox, make_batch(1))
                with pytest.raises(OSError, match="No space left"):
                    (root / "filler").write_bytes(bytes(2**21))
                outbox.open()
                sink.emit(make_batch(2))  # which the disk refused
                endpoint.wait_for(2)
                name = make_batch(2).file_name
                until = time.monotonic() + PATIENCE_S
                while outbox.is_pending(name) and time.monotonic() < until:
                    time.sleep(0.005)

                assert f"{name}\n" == (root / "outbox" / A).read_text()
                sink.close(soon())
                assert ids(1, 2) == endpoint.batch_ids
            assert [] == left(root)
        finally:
            subprocess.run(["umount", "--lazy", str(root)], check=True)

    def test_a_watermark_that_cannot_be_written(
        self, make_sink: Sinks, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Sending goes on, and when all is done nothing is left to be sent again."""
        leave(root, A, 1, 2)

        def refuse(sender: Sender) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Sender, "_write", refuse)
        with Endpoint() as endpoint:
            deliver(make_sink, endpoint, root)

            assert ids(1, 2) == endpoint.batch_ids
        assert [] == left(root)


# -- servers ----------------------------------------------------------------------------------

FINAL = [400, 406, 411, 412, 413, 414, 415, 416, 417, 418, 422, 428, 431, 451, 470]
AGAIN = [101, 408, 421, 423, 424, 425, 429, 499, 500, 502, 503, 504, 507, 508, 511, 599, 600]
PERSON = [300, 301, 302, 303, 304, 307, 308, 401, 402, 403, 404, 405, 407, 410, 426, 501, 505]


class TestStatuses:
    @pytest.mark.parametrize("status", FINAL)
    def test_what_is_about_this_batch_is_final(
        self, status: int, make_sink: Sinks, root: Path
    ) -> None:
        """A batch that would be refused again is not sent again; the next one goes."""
        with Endpoint(answer(status)) as endpoint:
            outbox = DiskOutbox(root, A)
            sink = make_sink(endpoint, outbox)
            for number in (1, 2):
                send(sink, root, outbox, make_batch(number))
            sink.close(soon())

            assert ids(1, 2) == endpoint.batch_ids
        assert (1, 1) == (sink.health()["http_sent"], sink.health()["http_rejected"])
        assert [] == left(root)

    @pytest.mark.parametrize("status", AGAIN + PERSON)
    def test_what_may_change_is_tried_again(self, status: int, make_sink: Sinks) -> None:
        """Nothing is lost to a status that time or a person can put right."""
        behaviour = answer(status)
        with Endpoint(behaviour, behaviour) as endpoint:
            sink = make_sink(endpoint)
            sink.emit(make_batch(1))
            endpoint.wait_for(3)
            sink.close(soon())

            assert ids(1) * 3 == endpoint.batch_ids
        assert (1, 0) == (sink.health()["http_sent"], sink.health()["http_rejected"])
        assert [300.0 if status in PERSON else 0.25] == make_sink.pauses.taken[:1]

    @pytest.mark.parametrize("status", [100, 102, 103, 199])
    def test_interim_answers_are_skipped(self, status: int, make_sink: Sinks) -> None:
        """What a server says before its answer, such as Early Hints, is no failure."""
        interim = f"HTTP/1.1 {status} Early\r\nLink: </style.css>\r\n\r\n".encode()

        def behave(exchange: Exchange) -> bool:
            exchange.receive()
            ok = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
            exchange.connection.sendall(interim * 3 + ok)
            return True

        with Endpoint(behave, behave) as endpoint:
            sink = make_sink(endpoint)
            for number in (1, 2):
                sink.emit(make_batch(number))
            endpoint.wait_for(2)
            sink.close(soon())

            assert ids(1, 2) == endpoint.batch_ids
        assert (2, None) == (sink.health()["http_sent"], sink.health()["http_last_error"])

    def test_a_server_that_has_it_already(self, make_sink: Sinks, root: Path) -> None:
        """409 is what a second copy may get: the batch is there, and its blobs follow."""
        blob = save_blob(root, 1, "weights")
        with Endpoint(answer(409)) as endpoint:
            outbox = DiskOutbox(root, A)
            sink = make_sink(endpoint, outbox)
            send(sink, root, outbox, make_batch(1, blobs=[blob]))
            sink.close(soon())

            assert ["POST", "PUT"] == [request.method for request in endpoint.requests]
        assert (1, 0) == (sink.health()["http_sent"], sink.health()["http_rejected"])

    def test_a_server_with_other_values(
        self, make_sink: Sinks, root: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """409 for a blob says that the server keeps other content: the values count as lost."""
        blob = save_blob(root, 1, "weights")
        with Endpoint(answer(200), answer(409)) as endpoint:
            outbox = DiskOutbox(root, A)
            sink = make_sink(endpoint, outbox)
            send(sink, root, outbox, make_batch(1, blobs=[blob]))
            sink.close(soon())

            assert ["POST", "PUT"] == [request.method for request in endpoint.requests]
        assert (1, 1) == (sink.health()["http_sent"], sink.health()["http_blobs_lost"])
        assert any("raw values of a snapshot were not sent" in text for text in warnings(caplog))
        assert [] == left(root)


def raw(text: bytes) -> Callable[[Exchange], bool]:
    """Takes the request, sends this, and keeps the connection."""

    def behave(exchange: Exchange) -> bool:
        exchange.receive()
        exchange.connection.sendall(text)
        exchange.endpoint.stopping.wait(PATIENCE_S)
        return False

    return behave


class TestOddServers:
    def test_an_acceptance_without_a_length(self, make_sink: Sinks) -> None:
        """A body that ends with the connection is not waited for."""
        with Endpoint(raw(b"HTTP/1.1 200 OK\r\n\r\n{}")) as endpoint:
            sink = make_sink(endpoint)
            sink.emit(make_batch(1))
            sink.emit(make_batch(2))
            endpoint.wait_for(2)
            sink.close(soon())

            assert ids(1, 2) == endpoint.batch_ids

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (b"", "it hung up without an answer"),
            (b"hello there", "its answer is not HTTP"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "its answer was cut short"),
        ],
    )
    def test_what_is_wrong_with_an_answer_is_said(
        self, text: bytes, said: str, make_sink: Sinks
    ) -> None:
        """Not by the name of an exception of Python's, which says nothing to who runs a server."""

        def behave(exchange: Exchange) -> bool:
            exchange.receive()
            exchange.connection.sendall(text)
            return False

        with Endpoint(behave) as endpoint:
            sink = make_sink(endpoint)
            sink.emit(make_batch(1))
            endpoint.wait_for(2)

            assert said == sink.health()["http_last_error"]

    def test_headers_that_make_no_sense_are_not_logged(
        self, make_sink: Sinks, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What a server sends is in no log, of ours or of a library's: it may be the key."""
        text = f"HTTP/1.1 500 {KEY}\r\n bad {KEY}\r\n: {KEY}\r\n{KEY}\r\nX-{KEY}: 1\r\n\r\n"
        caplog.set_level("DEBUG")
        with Endpoint(answer(500, KEY.encode()), raw(text.encode())) as endpoint:
            sink = make_sink(endpoint)
            sink.emit(make_batch(1))
            endpoint.wait_for(3)
            sink.close(soon())

        assert KEY not in caplog.text + str(sink.health())

    @pytest.mark.parametrize("size", [b"-1", b"ffffffffffffffff", b"7fffffff", b"zz", b""])
    def test_chunks_of_no_size(self, size: bytes, make_sink: Sinks) -> None:
        """A body that says it is endless costs no more memory than any other."""

        def behave(exchange: Exchange) -> bool:
            exchange.receive()
            head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            exchange.connection.sendall(head + size + b"\r\n")
            for _ in range(1000):  # 64 MB, unless we hang up
                exchange.connection.sendall(bytes(65536))
                sent.append(65536)
            return False

        sent: list[int] = []
        with Endpoint(behave) as endpoint:
            sink = make_sink(endpoint)
            sink.emit(make_batch(1))
            sink.close(soon())

        assert 1 == sink.sent
        assert sum(sent) < 32 * 2**20

    def test_a_handshake_that_dribbles(self, make_sink: Sinks) -> None:
        """A TLS server that sends a byte now and then does not hold a request past its deadline."""
        now = FakeClock()
        connected = threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def dribble() -> None:
                connection, _ = listener.accept()
                connection.recv(1)
                # A record of 16 KB, a byte at a time.
                connection.sendall(b"\x16\x03\x03\x40\x00")
                connected.set()
                try:
                    while True:
                        connection.sendall(b"\x02")
                        time.sleep(0.02)
                except OSError:
                    connection.close()

            threading.Thread(target=dribble, daemon=True).start()
            make_sink.pauses.go_on.clear()
            sink = make_sink(f"https://127.0.0.1:{listener.getsockname()[1]}", now=now)
            sink.emit(make_batch(1))
            assert connected.wait(PATIENCE_S)
            until = time.monotonic() + PATIENCE_S
            while not make_sink.pauses.taken and time.monotonic() < until:
                now.advance(100.0)
                sink.tick()
                time.sleep(0.01)

        assert "no answer within 10 s" == sink.last_error

    @pytest.mark.parametrize("error", [SystemExit, GeneratorExit, KeyboardInterrupt, KeyError])
    def test_an_exception_in_our_own_code(
        self,
        error: type[BaseException],
        make_sink: Sinks,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """The sender survives mistakes, and what libraries raise into threads, and sends on."""
        monkeypatch.setattr(guard, "strict", False)
        with Endpoint() as endpoint:
            sink = make_sink(endpoint, Mistaken(error))
            sink.emit(make_batch(1))
            sink.emit(make_batch(2))
            endpoint.wait_for(2)
            sink.close(soon())

            assert ids(1, 2) == endpoint.batch_ids
        assert [5.0, 5.0] == make_sink.pauses.taken
        assert 2 == guard.errors[f"sending a batch: {error.__name__}"]

    def test_a_long_outage(self, make_sink: Sinks) -> None:
        """After any number of failures the pause is a minute."""
        with Endpoint(answer(500)) as endpoint:
            sink = make_sink(endpoint, random=1.0)
            sink._failures = 10**6
            sink.emit(make_batch(1))
            endpoint.wait_for(2)
            sink.close(soon())

        assert [60.0] == make_sink.pauses.taken


class TestBlobsThatAreNotTaken:
    @pytest.mark.parametrize("status", [500, 503])
    def test_batches_go_on(
        self, status: int, make_sink: Sinks, root: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A blob that a server does not take, though it takes batches, is given up and counted; the
        next has one try, until one is taken.
        """
        blobs = [save_blob(root, number, "weights") for number in (1, 2, 3, 4)]
        refusals = [answer(status)] * 10
        script = [
            answer(200),
            *refusals,
            answer(200),
            answer(status),
        ]  # the batch again, and given up
        script += [answer(200), answer(status)]  # the next
        script += [answer(200), answer(200)]  # one that is taken
        script += [answer(200), answer(status)]  # so this is tried again
        with Endpoint(*script) as endpoint:
            outbox = DiskOutbox(root, A)
            sink = make_sink(endpoint, outbox)
            for number, blob in enumerate(blobs, 1):
                send(sink, root, outbox, make_batch(number, blobs=[blob]))
            send(sink, root, outbox, make_batch(5))
            endpoint.wait_for(len(script) + 2)
            sink.close(soon())

            posts = [one for one in endpoint.requests if one.method == "POST"]
            assert ids(1, 1, 2, 3, 4, 5) == [one.headers["x-cirron-batch-id"] for one in posts]
        health = sink.health()
        assert (5, 0, 2) == (health["http_sent"], health["http_pending"], health["http_blobs_lost"])
        assert 1 == sum("raw values of a snapshot were not sent" in one for one in warnings(caplog))

    def test_a_server_that_asks_to_wait(self, make_sink: Sinks, root: Path) -> None:
        """429 is no refusal, however often it comes: the blob is sent."""
        blob = save_blob(root, 1, "weights")
        with Endpoint(answer(200), *[answer(429)] * 50) as endpoint:
            outbox = DiskOutbox(root, A)
            sink = make_sink(endpoint, outbox)
            send(sink, root, outbox, make_batch(1, blobs=[blob]))
            endpoint.wait_for(52)
            sink.close(soon())

            assert ["POST"] + ["PUT"] * 51 == [one.method for one in endpoint.requests]
        assert (1, 0) == (sink.health()["http_sent"], sink.health()["http_blobs_lost"])

    def test_a_server_that_is_down(self, make_sink: Sinks, root: Path) -> None:
        """A blob is not given up while the server takes nothing else either."""
        blob = save_blob(root, 1, "weights")
        with Endpoint(answer(200), *[answer(502)] * 50) as endpoint:
            outbox = DiskOutbox(root, A)
            sink = make_sink(endpoint, outbox)
            send(sink, root, outbox, make_batch(1, blobs=[blob]))
            endpoint.wait_for(53)
            sink.close(soon())

            assert ["POST", "PUT"] == [one.method for one in endpoint.requests[-2:]]
        assert (1, 0) == (sink.health()["http_sent"], sink.health()["http_blobs_lost"])


def test_what_is_left_at_the_end_is_not_said_to_be_lost(
    make_sink: Sinks, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches that wait for a later run, in files that could be written, are no cause for alarm."""
    with Endpoint(answer(500), answer(500), answer(500), answer(500)) as endpoint:
        outbox = DiskOutbox(root, A)
        sink = make_sink(endpoint, outbox)
        send(sink, root, outbox, make_batch(1))
        sink.close(soon())

    assert 1 == sink.health()["http_pending"]
    assert [] == [one for one in warnings(caplog) if "no later run" in one]


class Mistaken(MemoryOutbox):
    """Raises, twice."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self._errors = [error, error]

    def read(self, item: Item) -> bytes | None:
        if self._errors:
            raise self._errors.pop()
        return super().read(item)


# -- proxies ----------------------------------------------------------------------------------


class Proxy:
    """A real proxy: forwards absolute-form requests, and tunnels. Every name is 127.0.0.1."""

    def __init__(self, refuse: int | None = None, context: ssl.SSLContext | None = None) -> None:
        self.heads: list[str] = []
        self.seen = b""  # all that passed through it, from the client
        self._refuse = refuse
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            if self._context is not None:
                client = self._context.wrap_socket(client, server_side=True)
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += client.recv(1) or b"\r\n\r\n"
            self.heads.append(head.decode())
            self.seen += head
            method, target, _ = head.decode().split("\r\n")[0].split(" ")
            if self._refuse is not None:
                client.sendall(f"HTTP/1.1 {self._refuse} {KEY}\r\nX: {KEY}\r\n\r\n".encode())
                client.close()
                return
            port = int(target.removeprefix("http://").partition("/")[0].rpartition(":")[2])
            server = socket.create_connection(("127.0.0.1", port))
            if method == "CONNECT":
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                server.sendall(head.replace(target.encode(), b"/api/traces", 1))
            threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()
            self._pump(client, server, True)
        except OSError:
            pass

    def _pump(self, source: socket.socket, target: socket.socket, is_client: bool) -> None:
        try:
            while block := source.recv(65536):
                if is_client:
                    self.seen += block
                target.sendall(block)
        except OSError:
            pass
        for one in (source, target):
            one.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The certificate and key of api.test and proxy.test, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    names = "subjectAltName=DNS:api.test,DNS:localhost,IP:127.0.0.1"
    command = (
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=api.test -addext {names}"
    )
    subprocess.run(
        [*command.split(), "-keyout", str(path), "-out", f"{path}.crt"],
        check=True,
        capture_output=True,
    )
    path.write_bytes(path.read_bytes() + Path(f"{path}.crt").read_bytes())
    return path


def server_context(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


class TlsEndpoint(Endpoint):
    """An endpoint that speaks TLS."""

    def __init__(self, certificate: Path, *script: Callable[[Exchange], bool]) -> None:
        self._context = server_context(certificate)
        super().__init__(*script)

    def _serve(self, connection: socket.socket) -> None:
        try:
            wrapped = self._context.wrap_socket(connection, server_side=True)
        except OSError:  # the client did not like the certificate
            connection.close()
            return
        self._connections.append(wrapped)
        super()._serve(wrapped)


class TestProxies:
    @pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
    def test_http_goes_through_in_absolute_form(
        self, variable: str, make_sink: Sinks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The proxy gets the whole address, and the login that its own address holds."""
        with Proxy() as proxy, Endpoint() as endpoint:
            monkeypatch.setenv(variable, f"http://me:p%40ss@127.0.0.1:{proxy.port}")
            sink = make_sink(f"http://api.test:{endpoint.port}")
            sink.emit(make_batch(1))
            sink.emit(make_batch(2))
            sink.close(soon())

            assert ids(1, 2) == endpoint.batch_ids
            target = f"http://api.test:{endpoint.port}/api/traces"
            assert proxy.heads[0].startswith(f"POST {target} HTTP/1.1\r\n")
            login = b64encode(b"me:p@ss").decode()
            assert f"proxy-authorization: Basic {login}\r\n" in proxy.heads[0]
            assert f"Host: api.test:{endpoint.port}\r\n" in proxy.heads[0]

    @pytest.mark.parametrize("scheme", ["http", "https"])
    def test_https_goes_through_a_tunnel(
        self,
        scheme: str,
        make_sink: Sinks,
        certificate: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The proxy sees a host, a port and its own login; the key is for the endpoint alone."""
        context = server_context(certificate) if scheme == "https" else None
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with Proxy(context=context) as proxy, TlsEndpoint(certificate) as endpoint:
            monkeypatch.setenv("HTTPS_PROXY", f"{scheme}://me:pass@127.0.0.1:{proxy.port}")
            sink = make_sink(f"https://api.test:{endpoint.port}")
            sink.emit(make_batch(1))
            sink.emit(make_batch(2))
            sink.close(soon())

            assert ids(1, 2) == endpoint.batch_ids
            assert f"Bearer {KEY}" == endpoint.requests[0].headers["authorization"]
            assert "proxy-authorization" not in endpoint.requests[0].headers
            (head,) = proxy.heads
            assert head.startswith(f"CONNECT api.test:{endpoint.port} HTTP/1.")
            assert f"Basic {b64encode(b'me:pass').decode()}\r\n" in head
            assert KEY.encode() not in proxy.seen

    def test_a_certificate_that_nobody_vouches_for(
        self, make_sink: Sinks, certificate: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A server that cannot prove who it is gets nothing."""
        make_sink.pauses.go_on.clear()
        with TlsEndpoint(certificate) as endpoint:
            sink = make_sink(f"https://localhost:{endpoint.port}")
            sink.emit(make_batch(1))
            make_sink.pauses.wait_for_one()

            assert [] == endpoint.requests
        assert "CERTIFICATE_VERIFY_FAILED" in warnings(caplog)[0]

    @pytest.mark.parametrize("scheme", ["http", "https"])
    def test_a_proxy_that_wants_a_login(
        self,
        scheme: str,
        make_sink: Sinks,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """407 is a person's turn, and says which proxy and what to set, and no password."""
        make_sink.pauses.go_on.clear()
        with Proxy(refuse=407) as proxy:
            monkeypatch.setenv("ALL_PROXY", f"http://me:hunter2@127.0.0.1:{proxy.port}")
            sink = make_sink(f"{scheme}://api.test")
            sink.emit(make_batch(1))
            make_sink.pauses.wait_for_one()

            assert [300.0] == make_sink.pauses.taken
            (warning,) = warnings(caplog)
            assert f"HTTP 407 via the proxy 127.0.0.1:{proxy.port}" in warning
            assert "HTTPS_PROXY" in warning
            assert (1, 0) == (sink.health()["http_pending"], sink.health()["http_rejected"])
        assert "hunter2" not in caplog.text
        assert KEY not in caplog.text

    @pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 502])
    def test_a_proxy_that_refuses_to_connect(
        self,
        status: int,
        make_sink: Sinks,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """What a proxy says of a tunnel is nothing that the endpoint says of a batch."""
        make_sink.pauses.go_on.clear()
        with Proxy(refuse=status) as proxy:
            monkeypatch.setenv("HTTPS_PROXY", f"127.0.0.1:{proxy.port}")  # as curl allows
            sink = make_sink("https://api.test")
            sink.emit(make_batch(1))
            make_sink.pauses.wait_for_one()

            assert f"HTTP {status} via the proxy 127.0.0.1:{proxy.port}" == sink.last_error
            assert "cannot reach api.test" in warnings(caplog)[0]
            assert (1, 0) == (sink.health()["http_pending"], sink.health()["http_rejected"])
            assert KEY.encode() not in proxy.seen

    @pytest.mark.parametrize(
        "given", ["socks5://127.0.0.1:1080", "http://", "http://:::", "http://x:99999", "ftp://x"]
    )
    def test_an_address_that_is_none(
        self,
        given: str,
        make_sink: Sinks,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Nothing goes around a proxy that cannot be used; the warning shows a usable address."""
        make_sink.pauses.go_on.clear()
        monkeypatch.setenv("HTTPS_PROXY", given)
        sink = make_sink("https://api.test")
        sink.emit(make_batch(1))
        make_sink.pauses.wait_for_one()

        assert 1 == sink.health()["http_pending"]
        assert "http://proxy.example.com:3128" in warnings(caplog)[0]

    def test_this_machine_needs_none(
        self, make_sink: Sinks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An endpoint on a loopback address is reached directly."""
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
        with Endpoint() as endpoint:
            sink = make_sink(endpoint)
            sink.emit(make_batch(1))
            sink.close(soon())

            assert ids(1) == endpoint.batch_ids

    @pytest.mark.parametrize(
        ("no_proxy", "host", "is_used"),
        [
            ("", "api.test", True),
            ("*", "api.test", False),
            ("api.test", "api.test", False),
            ("API.TEST", "api.test", False),
            ("test", "api.test", False),
            (".test", "api.test", False),
            ("*.test", "api.test", False),
            ("api.test:443", "api.test", False),
            ("api.test:80", "api.test", True),
            ("other, api.test", "api.test", False),
            ("pi.test", "api.test", True),
            ("10.1.2.3", "10.1.2.3", False),
            ("10.0.0.0/8", "10.1.2.3", False),
            ("10.0.0.0/16", "10.1.2.3", True),
            ("10.0.0.0/99", "10.1.2.3", True),
            ("fd00::1", "fd00::1", False),
            ("[fd00::1]", "fd00::1", False),
            ("fd00::/8", "fd00::1", False),
            ("", "localhost", False),
            ("", "x.localhost", False),
            ("", "127.9.9.9", False),
            ("", "::1", False),
        ],
    )
    def test_no_proxy(
        self, no_proxy: str, host: str, is_used: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Hosts, domains, addresses and networks in NO_PROXY are reached directly."""
        monkeypatch.setenv("https_proxy", "http://proxy.test")
        monkeypatch.setenv("NO_PROXY", no_proxy)
        found = find_proxy("https", host, 443)

        assert is_used == (found is not None)
        assert found is None or ("proxy.test", 80) == (found.host, found.port)

    def test_a_cgi_script(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """There, HTTP_PROXY comes from whoever asks for a page."""
        monkeypatch.setenv("HTTP_PROXY", "http://proxy.test")
        assert find_proxy("http", "api.test", 80) is not None
        monkeypatch.setenv("REQUEST_METHOD", "GET")

        assert find_proxy("http", "api.test", 80) is None


# -- kills and races --------------------------------------------------------------------------

# A session that records and flushes without a pause, until it is killed.
RUN = """
import itertools, sys
import cirron as ci

url, folder, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
cirron = ci.Cirron(api_endpoint=url, api_key="key", output_dir=folder, flush_interval=0.02)
cirron.profile()
print("ready", flush=True)
for number in itertools.count() if rounds < 0 else range(rounds):
    with ci.scope("step", index=number):
        ci.mark("loss", 1.0)
    ci.flush()
"""

# Takes over what others left, when it is told to.
ADOPT = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from test_http import DiskOutbox, HttpSink, KEY, soon

sink = HttpSink(sys.argv[2], KEY, DiskOutbox(Path(sys.argv[1]), sys.argv[3]), sdk_version="1")
print("ready", flush=True)
sys.stdin.readline()
sink.tick()
sink.close(soon())
print(sink.sent, flush=True)
"""


def run(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def go(process: subprocess.Popen[str]) -> None:
    """Waits until the process is ready, and tells it to go on."""
    assert process.stdout is not None
    assert process.stdin is not None
    assert "ready\n" == process.stdout.readline()
    process.stdin.write("go\n")
    process.stdin.flush()


class TestKills:
    def test_nothing_is_lost_or_doubled(self, tmp_path: Path) -> None:
        """Wherever it is killed, each batch on disk arrives, and no record under two ids."""
        chance = random.Random(12)
        acknowledged: list[str] = []
        delays_s = [0, 0, 0.005, 0.02]

        def slow(exchange: Exchange) -> bool:
            """Any of the moments between a request and its answer may be the last."""
            time.sleep(chance.choice(delays_s))
            exchange.receive()
            time.sleep(chance.choice(delays_s))
            exchange.connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            acknowledged.append(exchange.headers["x-cirron-batch-id"])
            return True

        root = tmp_path / "runs"
        with Endpoint(otherwise=slow) as endpoint:
            runs = 10
            for _ in range(runs // 2):
                pair = [run(RUN, endpoint.url, str(root), "-1") for _ in range(2)]
                for process in pair:
                    go(process)
                    time.sleep(chance.uniform(0.0, 0.2))  # the moment of a kill is what is tested
                    process.kill()
                    process.communicate()
            delays_s[:] = [0]
            while left(root) and runs < 20:  # each sends what an exit has time for
                runs += 1
                run(RUN, endpoint.url, str(root), "3").communicate(timeout=PATIENCE_S)
            requests = list(endpoint.requests)

        assert [] == left(root)
        received = {request.batch_id: wire.decode_batch(request.body) for request in requests}
        spans = Counter(span.id for batch in received.values() for span in batch.spans)
        assert spans
        assert {1} == set(spans.values())
        assert set(spans) == {
            span.id
            for path in (root / "spool").glob("*.json")
            for span in wire.decode_batch(path.read_bytes()).spans
        }
        # A second copy is of a batch whose answer its sender did not live to see, or write down.
        again = Counter(request.batch_id for request in requests)
        assert sum(times - 1 for times in again.values()) <= runs
        assert set(acknowledged) == set(received)

    def test_two_processes_adopt_at_once(self, tmp_path: Path) -> None:
        """What many dead processes left goes to one or the other, once."""
        prefixes = [f"{number:016x}" for number in range(1, 21)]
        for number, prefix in enumerate(prefixes, start=1):
            leave(tmp_path, prefix, 2 * number, 2 * number + 1)
        code = ADOPT.format(tests=str(Path(__file__).parents[1]))
        with Endpoint() as endpoint:
            others = [run(code, str(tmp_path), endpoint.url, prefix) for prefix in (A, B)]
            for other in others:
                go(other)
            sent = [int(other.communicate(timeout=PATIENCE_S)[0]) for other in others]

            assert 40 == sum(sent)
            assert sorted(endpoint.batch_ids) == sorted(
                batch_id
                for number, prefix in enumerate(prefixes, start=1)
                for batch_id in ids(2 * number, 2 * number + 1, prefix=prefix)
            )
        assert [] == left(tmp_path)

    def test_one_that_adopts_and_dies(self, make_sink: Sinks, tmp_path: Path) -> None:
        """What it had taken over goes to the next, from where it was."""
        leave(tmp_path, A, 1, 2, 3)
        code = ADOPT.format(tests=str(Path(__file__).parents[1]))
        stuck = threading.Event()

        def hang(exchange: Exchange) -> bool:
            exchange.receive()
            stuck.set()
            return bool(exchange.endpoint.stopping.wait(PATIENCE_S))

        with Endpoint(answer(200), hang) as endpoint:
            other = run(code, str(tmp_path), endpoint.url, B)
            go(other)
            assert stuck.wait(PATIENCE_S)
            other.kill()
            other.communicate()
            deliver(make_sink, endpoint, tmp_path, C)

            assert ids(1, 2, 2, 3) == endpoint.batch_ids
        assert [] == left(tmp_path)
