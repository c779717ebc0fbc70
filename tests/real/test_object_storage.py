"""A store in object storage: an S3-compatible server, and the stores of obstore itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

import cirron as ci
from cirron import errors
from cirron.runs import objects, opened

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket on a server of its own."""
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")
    port = 5_000 + os.getpid() % 10_000
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    given = {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_ENDPOINT_URL": address,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        for _ in range(300):
            try:
                made = urllib.request.Request(f"{address}/runs", method="PUT")
                urllib.request.urlopen(made, timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield "s3://runs/here"
    finally:
        server.kill()
        server.wait()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run of three steps."""
    monkeypatch.chdir(tmp_path)
    ci.profile()
    for _ in ci.epochs(range(1)):
        for number in ci.batches(range(3)):
            ci.mark("loss", number)
    ci.shutdown()
    return tmp_path


def test_a_store_in_a_bucket(recorded: Path, bucket: str) -> None:
    """Runs are put there once, however often; and are read from there, with no folder left."""
    expected = ci.open(recorded).spans.rows()
    for _ in range(2):
        opened.compact(recorded, store=bucket)
    shutil.rmtree(recorded / ".cirron")

    run = ci.open(bucket)

    assert expected == run.spans.rows()
    assert 3 == len(run.steps)


@pytest.mark.parametrize("kind", ["s3", "file", "folder"])
def test_who_is_second_is_told(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A name is taken once: that is what commits rest on."""
    pytest.importorskip("obstore")
    (tmp_path / "store").mkdir()
    where = {"file": f"file://{tmp_path}/store", "folder": str(tmp_path / "store")}.get(kind)
    files = objects.at(request.getfixturevalue("bucket") if where is None else where)
    name = f"manifest/{9:020d}.json"
    added = []
    for content in (b"first", b"second"):
        (tmp_path / "new").write_bytes(content)
        added.append(files.add(name, tmp_path / "new"))

    assert [True, False] == added
    assert b"first" == files.read(name)
    assert files.age_s(name) < 60
    files.remove(name)
    assert name not in files.list("manifest/")


def test_a_bucket_that_is_not_there(bucket: str) -> None:
    with pytest.raises(errors.SettingError, match=r"the store at 's3://nobody/x' cannot be used"):
        ci.open("s3://nobody/x")


def test_two_threads_want_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both get a whole copy, though both fetch it at once."""
    pytest.importorskip("obstore")
    bucket = objects.RemoteObjects("memory:///")
    name = f"run-x/{0:032x}-spans.parquet"
    (tmp_path / "file").write_bytes(b"x" * 1_000)
    assert bucket.add(name, tmp_path / "file")
    both, replace = threading.Barrier(2, timeout=60), os.replace

    def replace_together(*given: Path) -> None:
        both.wait()
        replace(*given)

    monkeypatch.setattr(os, "replace", replace_together)
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(bucket.local, [name] * 2))

    assert 1 == len(set(paths))
    with open(paths[0], "rb") as file:
        assert b"x" * 1_000 == file.read()
