"""The spool over a long run: few files, each record once, whatever reads or kills meanwhile."""

from __future__ import annotations

import json
import random
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.real.conftest import Script, Scripts

# A spool without the rest: `put(n)` stores batch number n, with one span and one mark, and has the
# folder kept in order, without a thread.
WRITER = """
import itertools, os, sys
from pathlib import Path
from cirron import files, wire
from cirron.session import identity
from cirron.record import clock
from cirron.ship import keeper
from cirron.ship.sinks.base import Sealed

class Keeper(keeper.Keeper):
    def _wake(self):
        pass

anchor = clock.read_anchor()
session = identity.identify(os.environ, anchor)
created = itertools.count(anchor.wall_ns, 1_000_000_000)  # one a second

def header():
    return wire.Header(schema_version=1, sdk_version="0", batch_id=clock.random_id(),
                       created_ns=next(created), session=session)

def put(number):
    start = anchor.wall_ns + number * 1_000_000_000
    span = wire.Span(f"{number:032x}", "step", None, number, start, start + 1, None, None, None,
                     1, os.getpid(), None, {}, [f"{number + 2**64:032x}"])
    mark = wire.Mark(f"{number + 2**64:032x}", span.id, "loss", "int", number, {}, start, "point")
    batch = Sealed(header(), wire.Sections([wire.encode_records([span])],
                                           [wire.encode_records([mark])]), records=2)
    spool.put(batch.file_name, batch.pieces)
    kept.add(batch)
    kept.tick()
    kept.keep()

def keep(max_bytes):
    return Keeper(spool, boxes, max_bytes=max_bytes, host=session.host, header=header)

spool = files.Folder(Path(".cirron/spool").absolute(), files.BATCH)
boxes = files.Folder(Path(".cirron/blackbox").absolute(), files.BLACK_BOX)
spool.make()
kept = keep(10**9)
"""


def numbers(scripts: Scripts) -> list[int]:
    """The batches that a reader finds, in order; their spans and marks agree."""
    run = scripts.session()
    found = sorted(span.index or 0 for span in run.spans)
    assert found == sorted(mark.value for mark in run.marks)  # type: ignore[type-var]
    return found


def written(script: Script) -> int:
    """The last number that the writer has said it wrote."""
    lines = script.out.split("\n")[:-1]
    return int(lines[-1]) if lines else -1


def test_a_day_leaves_few_files(scripts: Scripts) -> None:
    """20,000 small batches end up in at most a few hundred files, each record in one of them."""
    ended = scripts.run(
        WRITER
        + """
most = 0
for number in range(20_000):
    put(number)
    if number % 500 == 0:
        most = max(most, len(os.listdir(".cirron/spool")))
print(most, kept.bytes, kept.evicted_files)
""",
        timeout_s=60,
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
import time
keeper.MERGE_FILES = 4
for number in range(4_000):
    put(number)
    print(number)
    time.sleep(0.0005)
"""
    )
    scripts.wait_until(lambda: written(script) > 10, "the first batches")
    reads = 0
    while script.process.poll() is None:
        known = written(script)
        found = numbers(scripts)

        assert len(set(found)) == len(found)
        assert set() == set(range(known + 1)) - set(found)
        reads += 1

    assert reads > 5
    assert 0 == script.end().status
    assert list(range(4_000)) == numbers(scripts)


@pytest.mark.parametrize("seed", range(12))
def test_killed_while_merging(scripts: Scripts, seed: int) -> None:
    """After kill -9 at any moment, each record that was written is found exactly once."""
    script = scripts.start(
        WRITER
        + """
keeper.MERGE_FILES = 4
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
        WRITER + f"keeper.MERGE_FILES = 4\nfor n in range({10**6}, {10**6 + 9}): put(n)"
    )
    assert (0, "") == (ended.status, ended.err)
    later = [span.index for run in scripts.sessions()[1:] for span in run.spans]
    assert list(range(10**6, 10**6 + 9)) == sorted(later)  # type: ignore[type-var]


def test_merging_under_a_cap(scripts: Scripts) -> None:
    """While files are merged, the cap still takes the oldest first, and the count is right."""
    ended = scripts.run(
        WRITER
        + """
keeper.MERGE_FILES = 4
kept = keep(40_000)
for number in range(1_000):
    put(number)
print(kept.bytes, kept.evicted_files, kept.evicted_bytes)
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
    assert 1 == len([line for line in ended.warnings if "its oldest files go" in line])


def test_a_file_that_vanishes(scripts: Scripts) -> None:
    """Files that somebody deletes before they are merged cost their own records, and no others."""
    ended = scripts.run(
        WRITER
        + """
keeper.MERGE_FILES = 8
for number in range(7):
    put(number)
names = sorted(name for name in os.listdir(".cirron/spool") if spool.is_name(name))
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
        scripts.start(WRITER + "for number in range(1_500):\n    put(number)\n    print(number)")
        for _ in range(3)
    ]
    for script in writers:
        script.wait_for("10")
    while any(script.process.poll() is None for script in writers):
        known = {script.pid: written(script) for script in writers}
        for run in scripts.sessions():
            found = [span.index or 0 for span in run.spans]
            assert len(set(found)) == len(found)
            assert run.session is not None
            assert set() == set(range(known[run.session.pid] + 1)) - set(found)

    assert [0, 0, 0] == [script.end().status for script in writers]
    assert [1_500] * 3 == [len(run.spans) for run in scripts.sessions()]
