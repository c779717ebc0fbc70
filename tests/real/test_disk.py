"""A disk that is full, read-only, not there, or taken away: training goes on, and says so once."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from tests import spools

import cirron
from cirron import wire

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.real.conftest import Script, Scripts

NOBODY = 65534

# `record(n)` records n spans with a mark of some size each, and waits until they were tried.
DRIVEN = """
import os
import cirron as ci

recorded = 0

def record(count):
    global recorded
    for _ in range(count):
        with ci.scope("step", index=recorded):
            ci.mark("text", "x" * 200, note="y" * 200)
        recorded += 1
    ci.flush()
    return recorded
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that is a disk of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"needs a small disk, and mounting one is refused: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Writes until nothing fits any more."""
    filler = folder / "filler"
    with open(filler, "wb", buffering=0) as file:
        while True:
            try:
                file.write(b"x" * 4096)
            except OSError:
                return filler


def indices(home: Path) -> list[int]:
    """The numbers of the steps on disk, each as often as it is there."""
    spans = spools.read_one(home).spans
    return sorted(span.index or 0 for span in spans if span.name == "step")


def say_how(script: Script) -> list[str]:
    """What was said of the trouble with the disk."""
    return [line for line in script.err.splitlines() if "cannot write" in line]


def test_full_and_free_again(scripts: Scripts, small_disk: Path) -> None:
    """On a full disk batches are held, said once and counted; with space again all are written."""
    script = scripts.start(
        DRIVEN + f'ci.profile(path="{small_disk}/.cirron", flush_interval=0.05)', driven=True
    )
    script.ask("record(10)")
    filler = fill(small_disk)
    for _ in range(5):
        script.ask("record(10)")
    health = script.ask("ci.health()")

    assert "No space left on device" == health["spool_problem"]
    assert 0 == health["spool_drop_count"]
    assert health["spool_held_bytes"] > 5 * 10 * 400
    assert list(range(10)) == indices(small_disk / ".cirron")
    assert 1 == len(say_how(script))
    assert "No space left on device" in script.err

    filler.unlink()
    assert 61 == script.ask("record(1)")
    health = script.ask("ci.health()")
    assert [None, 0, 0] == [
        health[key] for key in ("spool_problem", "spool_held_bytes", "spool_drop_count")
    ]
    assert list(range(61)) == indices(small_disk / ".cirron")
    ended = script.end()
    assert 0 == ended.status
    assert 1 == len(ended.warnings)
    assert "clean" == cirron.open(small_disk).state


def test_full_to_the_end(scripts: Scripts, small_disk: Path) -> None:
    """A disk that stays full costs the records, counted and said, and nothing else."""
    fill(small_disk)
    script = scripts.start(
        DRIVEN + f'ci.profile(path="{small_disk}/.cirron", flush_interval=0.05)', driven=True
    )
    assert 10 == script.ask("record(10)")
    assert 1 == len(script.ask("list(ci.trace(format='dict', last=1)['roots'])"))
    script.ask("profiler = ci.profile()")  # warns, and has the health of the session
    assert None is script.ask("ci.shutdown()")
    ended = script.end()

    assert 0 == ended.status
    assert 1 == len(say_how(script))
    assert 1 == len([line for line in ended.warnings if "records are lost" in line])
    assert 3 == len(ended.warnings)
    assert [] == list(small_disk.rglob("*.tmp"))


def test_no_file_may_grow(scripts: Scripts) -> None:
    """Under a limit on the size of files the run goes on, and recovers when it is lifted."""
    script = scripts.start(DRIVEN + "import resource\nci.profile(flush_interval=0.05)", driven=True)
    script.ask("record(10)")
    script.ask("resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))")
    # A driven script's own output is a file too: the answer must be within the limit.
    assert 20 == script.ask("record(10)")
    assert "File too large" == script.ask("ci.health()['spool_problem']")
    assert list(range(10)) == indices(scripts.home)
    infinity = "resource.RLIM_INFINITY"
    script.ask(f"resource.setrlimit(resource.RLIMIT_FSIZE, ({infinity}, {infinity}))")
    assert 21 == script.ask("record(1)")

    assert list(range(21)) == indices(scripts.home)
    ended = script.end()
    assert (0, 1) == (ended.status, len(ended.warnings))


def test_held_in_memory_within_a_bound(scripts: Scripts, small_disk: Path) -> None:
    """What a full disk makes us hold is bounded: past that the oldest go, and are counted."""
    fill(small_disk)
    script = scripts.start(
        DRIVEN
        + f"""
from cirron.ship.sinks import spool
spool.MAX_HELD_BYTES = 200_000
ci.profile(path="{small_disk}/.cirron", flush_interval=3600)
""",
        driven=True,
    )
    for _ in range(20):
        script.ask("record(50)")
    health = script.ask("ci.health()")
    (small_disk / "filler").unlink()
    script.ask("record(50)")
    lost = script.ask("ci.health()")

    assert 0 < health["spool_held_bytes"] <= 200_000
    assert health["spool_drop_count"] > 0
    kept = indices(small_disk / ".cirron")
    assert list(range(kept[0], 1050)) == kept  # the newest, with no gap
    # The batch that came with the free disk may have pushed out one more before it was tried.
    assert health["spool_drop_count"] <= lost["spool_drop_count"] <= health["spool_drop_count"] + 1
    assert (kept[0], 2 * kept[0]) == (lost["spool_drop_count"] * 50, lost["records_lost"])
    assert 0 == script.end().status


def test_a_read_only_disk(scripts: Scripts, small_disk: Path) -> None:
    """A folder that becomes read-only and writable again loses nothing."""
    script = scripts.start(
        DRIVEN + f'ci.profile(path="{small_disk}/.cirron", flush_interval=0.05)', driven=True
    )
    script.ask("record(10)")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for _ in range(3):
        script.ask("record(10)")
    assert "Read-only file system" == script.ask("ci.health()['spool_problem']")
    assert list(range(10)) == indices(small_disk / ".cirron")
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    script.ask("record(1)")

    assert list(range(41)) == indices(small_disk / ".cirron")
    ended = script.end()
    assert (0, 1) == (ended.status, len(ended.warnings))


def test_a_folder_of_somebody_else(scripts: Scripts) -> None:
    """In a folder that the user may not write, profile() warns and training goes on."""
    if os.getuid():
        pytest.skip("needs root, to become a user that may not write here")
    ended = scripts.run(
        DRIVEN
        + f"""
import logging, cirron.ship.sinks.spool
os.chmod(".", 0o700)
# Whatever Python loads later may not be theirs to read either: all is loaded before.
ci.profile(output="none")
record(1)
ci.trace(format="dict")
ci.shutdown()
recorded = 0
os.setuid({NOBODY})
ci.profile(flush_interval=0.05)
print(record(10), ci.health()["spool_problem"])
print(len(ci.trace(format="dict")["roots"]))
"""
    )

    assert (0, "10 Permission denied\n1\n") == ended[:2]
    assert not scripts.home.exists()
    assert 1 == len([line for line in ended.warnings if "cannot write" in line])
    assert "ci.profile(path=...)" in ended.err  # what to type next


def test_the_folder_is_a_file(scripts: Scripts) -> None:
    """Where `.cirron` is a file, it stays as it is, profile() warns and training goes on."""
    scripts.home.write_text("precious")
    ended = scripts.run(
        DRIVEN
        + """
ci.profile(flush_interval=0.05)
print(record(10), ci.health()["spool_problem"] is not None)
"""
    )

    assert (0, "10 True\n") == ended[:2]
    assert "precious" == scripts.home.read_text()
    assert 1 == len([line for line in ended.warnings if "cannot write" in line])
    assert 1 == len([line for line in ended.warnings if "records are lost" in line])


def test_the_spool_is_a_file(scripts: Scripts) -> None:
    """Where the spool is a file and becomes a folder, what was held is written after all."""
    scripts.home.mkdir()
    (scripts.home / "spool").write_text("precious")
    script = scripts.start(DRIVEN + "ci.profile(flush_interval=0.05)", driven=True)
    script.ask("record(10)")
    (scripts.home / "spool").unlink()
    script.ask("record(10)")

    assert list(range(20)) == indices(scripts.home)
    ended = script.end()
    assert (0, 1) == (ended.status, len(ended.warnings))


@pytest.mark.parametrize("removed", ["spool", "."])
def test_a_folder_that_is_deleted(scripts: Scripts, removed: str) -> None:
    """When the spool or all of `.cirron` is deleted mid-run, later batches are there again."""
    script = scripts.start(DRIVEN + "ci.profile(flush_interval=0.05)", driven=True)
    script.ask("record(10)")
    assert list(range(10)) == indices(scripts.home)
    shutil.rmtree(scripts.home / removed)
    script.ask("record(10)")

    assert list(range(10, 20)) == indices(scripts.home)
    ended = script.end()
    assert (0, "") == (ended.status, ended.err)
    assert "clean" == scripts.state()


def test_a_working_directory_that_changes(scripts: Scripts) -> None:
    """A program that changes its working directory still writes to where it began."""
    (scripts.folder / "elsewhere").mkdir()
    ended = scripts.run(
        DRIVEN
        + """
ci.profile(flush_interval=0.05)
record(5)
os.chdir("elsewhere")
record(5)
"""
    )

    assert 0 == ended.status
    assert list(range(10)) == indices(scripts.home)
    assert [] == list((scripts.folder / "elsewhere").iterdir())


def test_a_working_directory_that_is_gone(scripts: Scripts) -> None:
    """In a working directory that was deleted, profile() warns and training goes on."""
    ended = scripts.run(
        DRIVEN
        + """
os.mkdir("gone")
os.chdir("gone")
os.rmdir("../gone")
ci.profile(flush_interval=0.05)
print(record(5))
"""
    )

    assert (0, "5\n") == ended[:2]
    assert 1 == len([line for line in ended.warnings if "cannot write" in line])


def test_the_cap(scripts: Scripts) -> None:
    """Past spool_max_bytes the oldest batches go first, said once and counted."""
    script = scripts.start(
        DRIVEN + "ci.Cirron(spool_max_bytes=60_000).profile(flush_interval=3600)", driven=True
    )
    for _ in range(30):
        script.ask("record(20)")
    health = script.ask("ci.health()")

    kept = indices(scripts.home)
    assert kept[0] > 0
    assert list(range(kept[0], 600)) == kept
    assert health["spool_drop_count"] * 20 == kept[0]
    on_disk = sum(path.stat().st_size for path in scripts.batch_files())
    assert on_disk == health["spool_bytes"] <= 60_000
    assert health["spool_dropped_bytes"] > 0
    ended = script.end()
    assert 0 == ended.status
    assert 1 == len(ended.warnings)
    assert "spool_max_bytes=60000" in ended.err


def test_the_cap_counts_what_others_left(scripts: Scripts) -> None:
    """Files of earlier runs count for the cap, and are the first to go."""
    body = DRIVEN + "ci.Cirron(spool_max_bytes=60_000).profile(flush_interval=3600)\nrecord(25)\n"
    scripts.run(body)
    first = scripts.batch_files()
    scripts.run(body)
    assert set(first) < set(scripts.batch_files())
    scripts.run(body)

    assert first[0] not in scripts.batch_files()
    assert sum(path.stat().st_size for path in scripts.batch_files()) <= 60_000


def test_a_clock_that_is_set_back(scripts: Scripts) -> None:
    """With the clock set back mid-run, children stay in parents and file names sorted by time."""
    ended = scripts.run(
        """
import time
shift = 0
real = time.time_ns
time.time_ns = lambda: real() + shift
import cirron as ci

ci.profile(flush_interval=3600)
for epoch in ci.epochs(range(4)):
    for batch in ci.batches(range(5)):
        with ci.scope("inner"):
            ci.mark("epoch", epoch)
    ci.flush()
    shift -= 3600 * 10**9
print(ci.health()["clock_drift_ns"] < -3 * 3600 * 10**9)
"""
    )

    assert (0, "True\n", "") == ended
    run = scripts.session()
    spans = {span.id: span for span in run.spans}
    assert 1 + 4 + 20 + 20 == len(spans)
    for span in spans.values():
        if span.parent_id is not None:
            parent = spans[span.parent_id]
            assert parent.start_ns <= span.start_ns <= (span.end_ns or 0) <= (parent.end_ns or 0)
    for mark in run.marks:
        assert spans[mark.span_id].start_ns <= mark.ts_ns <= (spans[mark.span_id].end_ns or 0)
    # By name, the files hold the epochs in the order in which they were.
    order = [
        mark.value
        for path in scripts.batch_files()
        for mark in wire.decode_batch(path.read_bytes()).marks
    ]
    assert sorted(order) == order  # type: ignore[type-var]
    assert 5 == len(scripts.batch_files())
