"""The spool over a long run: few files, each record once, whatever reads or kills meanwhile."""

from __future__ import annotations

import json
import random
import signal
from typing import TYPE_CHECKING

import pytest

import cirron

if TYPE_CHECKING:
    from tests.real.conftest import Script, Scripts

# A spool and its keeper without the rest, each with its thread: `put(n)` hands over batch number n,
# with one span and one mark, and waits until it is on disk. Files are merged meanwhile.
WRITER = """
import itertools, os, sys
from pathlib import Path
from cirron import files, wire
from cirron.session import identity
from cirron.record import clock
from cirron.ship import keeper as keepers
from cirron.ship.sinks.base import Sealed
from cirron.ship.sinks.spool import Spool

anchor = clock.read_anchor()
session = identity.identify(os.environ, anchor)
created = itertools.count(anchor.wall_ns, 1_000_000_000)  # one a second

def header():
    return wire.Header(schema_version=1, sdk_version="0", batch_id=clock.random_id(),
                       created_ns=next(created), session=session)

def make(number):
    start = anchor.wall_ns + number * 1_000_000_000
    span = wire.Span(f"{number:032x}", "step", None, number, start, start + 1, None, None, None,
                     1, os.getpid(), None, {}, [f"{number + 2**64:032x}"])
    mark = wire.Mark(f"{number + 2**64:032x}", span.id, "loss", "int", number, {}, start, "point")
    return Sealed(header(), wire.Sections([wire.encode_records([span])],
                                          [wire.encode_records([mark])]), records=2)

def put(number):
    spool.emit(make(number))
    assert spool.settle(clock.now() + 30 * 10**9)

def close():
    spool.close(clock.now() + 30 * 10**9)

folder = files.Folder(Path(".cirron/spool"), files.BATCH)
boxes = files.Folder(Path(".cirron/blackbox"), files.BLACK_BOX)

def make_keeper(max_bytes=10**9):
    return keepers.Keeper(folder, boxes, max_bytes=max_bytes, host="h", header=header)

keeper = make_keeper()
spool = Spool(folder, keeper)
"""

# The same in one thread: each batch is written, and then the folder is looked after once.
BY_HAND = (
    WRITER
    + """
def put(number):
    batch = make(number)
    folder.put(batch.file_name, batch.pieces)
    keeper.add(batch)
    keeper.tick()
    keeper.keep()
"""
)


def numbers(scripts: Scripts) -> list[int]:
    """The batches in the spool, in order; their spans and marks agree."""
    run = scripts.session()
    found = sorted(span.index or 0 for span in run.spans)
    assert found == sorted(mark.value for mark in run.marks)  # type: ignore[type-var]
    return found


def opened(scripts: Scripts) -> dict[int, list[int]]:
    """The batches that `ci.open` finds, by process; every file can be read."""
    runs = cirron.open(scripts.folder).runs
    assert [] == runs.latest.problems
    found: dict[int, list[int]] = {}
    for run in runs.values():
        for pid, index in run.sql('SELECT pid, "index" FROM spans').fetch().rows:
            found.setdefault(pid, []).append(index)
    return found


def written(script: Script) -> int:
    """The last number that the writer has said it wrote."""
    lines = script.out.split("\n")[:-1]
    return int(lines[-1]) if lines else -1


def test_a_day_leaves_few_files(scripts: Scripts) -> None:
    """20,000 small batches end up in at most a few hundred files, each record in one of them."""
    ended = scripts.run(
        BY_HAND
        + """
most = 0
for number in range(20_000):
    put(number)
    if number % 500 == 0:
        most = max(most, len(os.listdir(".cirron/spool")))
print(most, keeper.bytes, keeper.evicted_files)
""",
        timeout_s=300,
    )

    most_files, counted_bytes, dropped = map(int, ended.out.split())
    assert (0, "", 0) == (ended.status, ended.err, dropped)
    assert most_files <= 200
    assert len(scripts.batch_files()) <= 200
    assert counted_bytes == sum(path.stat().st_size for path in scripts.batch_files())
    ids = [
        record["id"]
        for path in scripts.batch_files()
        for kind in ("spans", "marks")
        for record in json.loads(path.read_bytes())[kind]
    ]
    assert 40_000 == len(ids) == len(set(ids))
    assert list(range(20_000)) == numbers(scripts)
    # A merged file stands where its oldest part stood, so the names still sort by time.
    first = [json.loads(path.read_bytes())["spans"][0]["index"] for path in scripts.batch_files()]
    assert sorted(first) == first


def test_reading_while_files_are_merged(scripts: Scripts) -> None:
    """A reader beside a writer that merges all the time finds each record exactly once."""
    script = scripts.start(
        WRITER
        + """
keepers.MERGE_FILES = 4
spool.start()
for number in itertools.count():
    put(number)
    print(number)
    if number >= 2_000 and os.path.exists("enough"):
        break
close()
"""
    )
    scripts.wait_until(lambda: written(script) > 10, "the first batches")
    for _ in range(8):  # whichever of the two the machine is slow to run
        known = written(script)
        (found,) = opened(scripts).values()

        assert len(set(found)) == len(found)
        assert set() == set(range(known + 1)) - set(found)

    (scripts.folder / "enough").touch()
    assert 0 == script.end().status
    every = list(range(written(script) + 1))
    assert every == numbers(scripts) == sorted(*opened(scripts).values())
    assert len(scripts.batch_files()) < len(every) / 2


@pytest.mark.parametrize("seed", range(12))
def test_killed_while_merging(scripts: Scripts, seed: int) -> None:
    """After kill -9 at any moment, each record that was written is found exactly once."""
    script = scripts.start(
        WRITER
        + """
keepers.MERGE_FILES = 4
spool.start()
for number in itertools.count():
    put(number)
    os.write(1, f"{number}\\n".encode())
"""
    )
    until = random.Random(seed).randrange(60, 400)
    scripts.wait_until(lambda: written(script) >= until, f"batch {until}")
    script.kill(signal.SIGKILL)
    script.end()

    found = numbers(scripts)
    assert len(set(found)) == len(found)
    # The one that was under way may be there or not.
    assert list(range(written(script) + 1)) == found[: written(script) + 1]
    assert len(found) <= written(script) + 2
    # What the kill left behind does not get in the way of a next run.
    ended = scripts.run(
        WRITER
        + f"""
keepers.MERGE_FILES = 4
spool.start()
for number in range({10**6}, {10**6 + 9}):
    put(number)
close()
"""
    )
    assert (0, "") == (ended.status, ended.err)
    later = [span.index for run in scripts.sessions()[1:] for span in run.spans]
    assert list(range(10**6, 10**6 + 9)) == sorted(later)  # type: ignore[type-var]


def test_merging_under_a_cap(scripts: Scripts) -> None:
    """While files are merged, the cap still takes the oldest first, and the count is right."""
    ended = scripts.run(
        BY_HAND
        + """
keepers.MERGE_FILES = 4
keeper = make_keeper(max_bytes=40_000)
for number in range(1_000):
    put(number)
print(keeper.bytes, keeper.evicted_files, keeper.evicted_bytes)
"""
    )

    size, dropped_files, dropped_bytes = map(int, ended.out.split())
    found = numbers(scripts)
    assert 0 == ended.status
    assert size == sum(path.stat().st_size for path in scripts.batch_files()) <= 40_000
    assert dropped_files > 0
    assert dropped_bytes > 0
    assert 0 < found[0]
    assert list(range(found[0], 1_000)) == found
    assert 1 == len([line for line in ended.warnings if "its oldest files are deleted" in line])


def test_a_file_that_vanishes(scripts: Scripts) -> None:
    """Files that somebody deletes before they are merged cost their own records, and no others."""
    ended = scripts.run(
        BY_HAND
        + """
keepers.MERGE_FILES = 8
for number in range(7):
    put(number)
names = sorted(os.listdir(".cirron/spool"))
os.unlink(f".cirron/spool/{names[2]}")
for number in range(7, 30):
    put(number)
"""
    )

    assert (0, "") == (ended.status, ended.err)
    assert [0, 1, *range(3, 30)] == numbers(scripts)


def test_real_runs_are_merged(scripts: Scripts) -> None:
    """A run of many flushes leaves merged files that `ci` wrote and a reader reads as one."""
    ended = scripts.run(
        """
        import cirron as ci

        ci.profile(flush_interval=3600)
        for epoch in ci.epochs(range(2)):
            for batch in ci.batches(range(200)):
                ci.mark("loss", epoch * 200 + batch)
                ci.flush()
        """
    )

    assert (0, "") == (ended.status, ended.err)
    assert len(scripts.batch_files()) <= 64 + 7
    assert 400 == len(scripts.spans("batch"))
    assert list(range(400)) == sorted(mark.value for mark in scripts.session().marks)  # type: ignore[type-var]
    assert 2 == len(scripts.spans("epoch"))


def test_reading_beside_many_writers(scripts: Scripts) -> None:
    """A reader gets done, with every record once, though many processes add files all the time."""
    writers = [
        scripts.start(
            WRITER
            + """
spool.start()
for number in range(1_000):
    put(number)
    print(number)
close()
"""
        )
        for _ in range(3)
    ]
    for script in writers:
        script.wait_for("10")
    while any(script.process.poll() is None for script in writers):
        known = {script.pid: written(script) for script in writers}
        for pid, found in opened(scripts).items():
            assert len(set(found)) == len(found)
            assert set() == set(range(known[pid] + 1)) - set(found)

    assert [0, 0, 0] == [script.end().status for script in writers]
    assert [1_000] * 3 == [len(found) for found in opened(scripts).values()]
