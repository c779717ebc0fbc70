"""Snapshots of processes that are killed, forked, cut short, or run out of disk."""

from __future__ import annotations

import signal
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors import safe_open
from tests import spools

if TYPE_CHECKING:
    from tests.real.conftest import Scripts

    from cirron import wire

HEAD = """
import os, pathlib, random, resource, signal, sys, threading, time
import torch
import cirron as ci

def make(size):
    model = torch.nn.Linear(size, size, bias=False)
    model.weight.grad = torch.ones(size, size)
    return model

def train(model, count):
    for index in ci.epochs(range(count)):
        with torch.no_grad():
            model.weight.fill_(index)

def wait(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""

# Puts a worker that never gets done in the place of the one that writes.
STUCK = """
from cirron.snapshot import records
is_writing = threading.Event()
def write(folder, key, chunks, access):
    is_writing.set()
    threading.Event().wait()
records.write = write
"""


def whole_files(home: Path) -> list[Path]:
    """The files of raw values under their final names; each is read to its last byte."""
    found = sorted(home.glob("snapshots/*/*.safetensors"))
    for path in found:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no dict
                assert 1 == len(file.get_tensor(name).unique()), path  # all of one epoch
    return found


def by_pid(run: spools.Recorded) -> dict[int, list[wire.Snapshot]]:
    pids = {span.id: span.pid for span in run.spans}
    found: dict[int, list[wire.Snapshot]] = {}
    for record in run.snapshots:
        found.setdefault(pids[record.span_id], []).append(record)
    return found


def test_killed_while_raw_values_are_written(scripts: Scripts) -> None:
    """kill -9 at any moment leaves no half-written file under a final name, and a whole spool."""
    ended = scripts.run(
        HEAD
        + """
chance = random.Random(0)
for number in range(20):
    pid = os.fork()  # one import of torch for all; the child profiles by itself
    if pid == 0:
        ci.profile(snapshots="full", flush_interval=0.02, path=f"{number}")
        model = make(1024)
        ci.watch(model)
        train(model, 1_000_000)
    folder = pathlib.Path(f"{number}/snapshots")
    while not list(folder.glob("*/*.tmp")):
        time.sleep(0.001)
    time.sleep(chance.random() * 0.05)
    os.kill(pid, signal.SIGKILL)
    assert -signal.SIGKILL == wait(pid)
"""
    )

    assert 0 == ended.status, ended.err
    halves = files = 0
    for number in range(20):
        home = scripts.folder / f"{number}"
        found = whole_files(home)
        files += len(found)
        halves += len(list(home.glob("snapshots/*/*.tmp"))) + len(
            list(home.glob("snapshots/*/.tmp*"))
        )
        for record in (record for run in spools.read(home) for record in run.snapshots):
            assert record.blob_uri is not None
            path = urllib.parse.urlsplit(record.blob_uri).path
            assert Path(path) in found  # it was there before the record was
    assert files
    assert halves  # else it was never killed in the middle of a file


def test_a_file_that_may_not_grow(scripts: Scripts) -> None:
    """Raw values that the disk refuses are counted and said once; statistics are stored."""
    ended = scripts.run(
        HEAD
        + """
ci.profile(snapshots="full")
model = make(512)
ci.watch(model)
resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
train(model, 3)
ci.flush()
print(ci.health()["snapshot_count"], ci.health()["snapshot_unsaved_count"], ci.health()["errors"])
"""
    )

    assert 0 == ended.status
    assert "3 6 {}" == ended.out.strip()
    (warning,) = ended.warnings
    assert "raw values of a snapshot could not be written" in warning
    assert "File too large" in warning
    assert [None] * 6 == [record.blob_uri for record in scripts.session().snapshots]
    assert [] == [path for path in (scripts.home / "snapshots").rglob("*") if path.is_file()]


@pytest.mark.parametrize("frameworks", ["None", "[]"])
def test_a_forked_child_that_trains(scripts: Scripts, frameworks: str) -> None:
    """Parent and child each go on taking snapshots of their own model, each stored once."""
    ended = scripts.run(
        HEAD
        + f"""
ci.profile(snapshots="full", frameworks={frameworks})
model = make(8)
ci.watch(model)
train(model, 2)
pid = os.fork()
if pid == 0:
    train(model, 3)
    ci.flush()
    print(ci.health()["snapshot_count"], ci.health()["errors"], flush=True)
    ci.shutdown()
    os._exit(0)
print(wait(pid), pid)
train(model, 4)
ci.flush()
print(ci.health()["snapshot_count"], ci.health()["errors"])
"""
    )

    assert 0 == ended.status
    child, status, parent = ended.out.splitlines()
    assert "3 {}" == child
    assert "6 {}" == parent
    code, pid = map(int, status.split())
    assert 0 == code
    found = by_pid(scripts.session())
    assert [6, 12] == [len(found.pop(pid)), *map(len, found.values())]
    assert 18 == len(whole_files(scripts.home))


def test_flush_is_enough(scripts: Scripts) -> None:
    """After `ci.flush()` all that was taken is on disk, records and files."""
    ended = scripts.run(
        HEAD
        + """
ci.profile(snapshots="full", flush_interval=3600)
model = make(256)
ci.watch(model)
train(model, 5)
ci.flush()
os._exit(0)
"""
    )

    assert 0 == ended.status
    assert 10 == len(scripts.session().snapshots)
    assert 10 == len(whole_files(scripts.home))


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "1 / 0", "ci.shutdown()"])
def test_an_exit_stores_what_is_pending(scripts: Scripts, end: str) -> None:
    """However the program ends by itself, the snapshots it took are stored."""
    scripts.run(
        HEAD
        + f"""
ci.profile(snapshots="full", flush_interval=3600)
model = make(256)
ci.watch(model)
train(model, 5)
{end}
"""
    )

    assert 10 == len(scripts.session().snapshots)
    assert 10 == len(whole_files(scripts.home))


def test_a_signal_stores_what_is_pending(scripts: Scripts) -> None:
    """SIGTERM ends the program as it would without us, with the snapshots that it took stored."""
    script = scripts.start(
        HEAD
        + """
ci.profile(snapshots="full", flush_interval=3600)
model = make(256)
ci.watch(model)
train(model, 5)
print("ready")
while True:
    time.sleep(60)
"""
    )
    script.wait_for("ready")
    script.kill(signal.SIGTERM)

    assert -signal.SIGTERM == script.end().status
    assert 10 == len(scripts.session().snapshots)
    assert 10 == len(whole_files(scripts.home))


@pytest.mark.parametrize("how", ["exit", "signal"])
def test_an_exit_is_bounded(scripts: Scripts, how: str) -> None:
    """A snapshot that is not done by `exit_timeout` is lost, and said; all else is stored."""
    script = scripts.start(
        HEAD
        + STUCK
        + f"""
ci.Cirron(exit_timeout=1.5).profile(snapshots="full")
model = make(8)
ci.watch(model)
train(model, 2)
is_writing.wait()
print("ready")
while {how == "signal"}:
    time.sleep(60)
"""
    )
    script.wait_for("ready")
    if how == "signal":
        script.kill(signal.SIGTERM)
    ended = script.end()

    assert (-signal.SIGTERM if how == "signal" else 0) == ended.status
    assert ["cirron: a snapshot is lost: it was not finished within exit_timeout"] == ended.warnings
    assert [0, 1] == [span.index for span in scripts.spans("epoch")]
    assert [] == scripts.session().snapshots
