"""What still has to be sent: order, caps, counters, and what one process leaves to the next."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from cirron import guard, wire
from cirron.record import clock
from cirron.ship import outbox as module
from cirron.ship.outbox import DiskOutbox, MemoryOutbox
from cirron.ship.sinks.base import Blob, Outcome, Sealed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cirron.ship.outbox import Outbox


@pytest.fixture(autouse=True)
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistakes of ours fail the test."""
    monkeypatch.setattr(guard, "strict", True)


def make_batch(number: int, blobs: Sequence[Blob] = ()) -> Sealed:
    header = wire.Header(
        schema_version=1,
        sdk_version="1.2.3",
        batch_id=f"{number:032x}",
        created_ns=number,
        session=None,
    )
    return Sealed(header, wire.Sections(), records=0, blobs=blobs)


def spool(root: Path, outbox: DiskOutbox, *numbers: int) -> list[Sealed]:
    """What the spool does with batches that the disk takes."""
    batches = [make_batch(number) for number in numbers]
    (root / "spool").mkdir(parents=True, exist_ok=True)
    for batch in batches:
        outbox.mark(batch)
        (root / "spool" / batch.file_name).write_bytes(batch.payload)
        outbox.put(batch)
    return batches


def drain(outbox: Outbox) -> list[int]:
    """Sends everything, so to speak."""
    sent = []
    while (item := outbox.head()) is not None:
        sent.append(int(item.batch_id, 16))
        outbox.done(item)
    return sent


class TestMemoryOutbox:
    def test_batches_come_out_as_they_went_in(self) -> None:
        """The head is the oldest batch, whole, until it is done."""
        outbox = MemoryOutbox()
        batch = make_batch(1)
        outbox.put(batch)
        outbox.put(make_batch(2))
        item = outbox.head()

        assert item is not None
        assert item is outbox.head()
        assert batch.payload == item.read()
        assert (2, 2 * batch.size) == (len(outbox), outbox.pending_bytes)
        assert [1, 2] == drain(outbox)
        assert (0, 0) == (len(outbox), outbox.pending_bytes)

    def test_the_oldest_go_past_the_cap(self) -> None:
        """Past the cap the oldest batches go, and are counted."""
        outbox = MemoryOutbox(max_bytes=2 * make_batch(1).size)
        for number in (1, 2, 3, 4):
            outbox.put(make_batch(number))

        assert 2 == outbox.dropped
        assert [3, 4] == drain(outbox)

    def test_what_is_being_sent_stays(self) -> None:
        """A head that was handed out is not given up: it may be there already."""
        outbox = MemoryOutbox(max_bytes=2 * make_batch(1).size)
        outbox.put(make_batch(1))
        outbox.head()
        outbox.put(make_batch(2))
        outbox.put(make_batch(3))

        assert 1 == outbox.dropped
        assert [1, 3] == drain(outbox)

    def test_a_batch_larger_than_the_cap(self) -> None:
        """One that can never fit is dropped, and costs the others nothing."""
        small = make_batch(1)
        large = make_batch(2, blobs=())
        outbox = MemoryOutbox(max_bytes=small.size)
        outbox.put(small)
        large.size += 1

        assert Outcome.DROPPED is outbox.put(large)
        assert 1 == outbox.dropped
        assert [1] == drain(outbox)

    def test_what_is_left_at_the_end_is_lost(self, caplog: pytest.LogCaptureFixture) -> None:
        """What memory still holds at the end is counted as lost, and said."""
        outbox = MemoryOutbox()
        outbox.put(make_batch(1))
        outbox.put(make_batch(2))
        outbox.close()
        outbox.close()

        assert (0, 2) == (len(outbox), outbox.dropped)
        (record,) = caplog.records
        assert record.getMessage().startswith("cirron: 2 batches could not be sent")


class TestMarkers:
    def test_the_marker_is_there_before_the_batch(self, tmp_path: Path) -> None:
        """From before a batch is in the spool until it is sent, a marker of its name says so."""
        outbox = DiskOutbox(tmp_path, "abc")
        batch = make_batch(1, [Blob(tmp_path / "weights", "run/weights")])
        outbox.mark(batch)
        marker = tmp_path / "outbox" / f"abc-{os.getpid()}" / batch.file_name

        assert {"blobs": [[str(tmp_path / "weights"), "run/weights"]]} == json.loads(
            marker.read_bytes()
        )
        assert outbox.is_pending(batch.file_name)
        assert outbox.head() is None

        spool(tmp_path, outbox, 1)
        item = outbox.head()
        assert item is not None
        assert batch.payload == item.read()
        assert [1] == drain(outbox)
        assert not marker.exists()
        assert not outbox.is_pending(batch.file_name)

    def test_nothing_is_made_before_it_is_needed(self, tmp_path: Path) -> None:
        """A session that sends nothing leaves nothing."""
        outbox = DiskOutbox(tmp_path, "abc")
        outbox.adopt()
        outbox.close()

        assert [] == list(tmp_path.iterdir())

    def test_a_finished_outbox_is_removed(self, tmp_path: Path) -> None:
        """When all is sent, closing leaves no folder behind."""
        outbox = DiskOutbox(tmp_path, "abc")
        spool(tmp_path, outbox, 1)
        drain(outbox)
        outbox.close()
        outbox.close()

        assert [] == list((tmp_path / "outbox").iterdir())

    def test_putting_twice_is_putting_once(self, tmp_path: Path) -> None:
        """The spool and the sink both put a batch in, even when it was sent in between."""
        outbox = DiskOutbox(tmp_path, "abc")
        (batch,) = spool(tmp_path, outbox, 1)

        assert Outcome.HELD is outbox.put(batch)
        assert [1] == drain(outbox)
        assert Outcome.DONE is outbox.put(batch)
        assert [] == drain(outbox)

    def test_a_rejected_batch_keeps_its_file(self, tmp_path: Path) -> None:
        """What a server refused is never tried again, by anybody, and stays in the spool."""
        outbox = DiskOutbox(tmp_path, "abc")
        rejected, _ = spool(tmp_path, outbox, 1, 2)
        item = outbox.head()
        assert item is not None
        outbox.reject(item)

        assert 1 == outbox.rejected
        assert [2] == drain(outbox)
        assert (tmp_path / "spool" / rejected.file_name).exists()
        outbox.close()
        later = DiskOutbox(tmp_path, "later")
        assert 0 == later.adopt()
        assert [rejected.file_name + ".rejected"] == [
            path.name for path in tmp_path.glob("outbox/*/*.rejected")
        ]

        (tmp_path / "spool" / rejected.file_name).unlink()
        assert 0 == later.adopt()
        assert [] == list((tmp_path / "outbox").iterdir())

    def test_an_evicted_batch_is_dropped(self, tmp_path: Path) -> None:
        """A batch whose file is gone has nothing to read."""
        outbox = DiskOutbox(tmp_path, "abc")
        (batch,) = spool(tmp_path, outbox, 1)
        (tmp_path / "spool" / batch.file_name).unlink()
        item = outbox.head()
        assert item is not None

        assert item.read() is None
        outbox.drop(item)
        assert (0, 1) == (len(outbox), outbox.dropped)
        assert [] == list(tmp_path.glob("outbox/*/*.json"))

    def test_the_oldest_go_past_the_cap(self, tmp_path: Path) -> None:
        """Past so many, the oldest are given up and counted, and stay in the spool."""
        outbox = DiskOutbox(tmp_path, "abc", max_items=2)
        spool(tmp_path, outbox, 1, 2, 3, 4)

        assert 2 == outbox.dropped
        assert 2 == len(list(tmp_path.glob("outbox/*/*.json")))
        assert 4 == len(list(tmp_path.glob("spool/*.json")))
        assert [3, 4] == drain(outbox)

    def test_a_folder_that_somebody_removed(self, tmp_path: Path) -> None:
        """An outbox whose folder is gone makes a new one."""
        outbox = DiskOutbox(tmp_path, "abc")
        spool(tmp_path, outbox, 1)
        (own,) = (tmp_path / "outbox").iterdir()
        for path in own.iterdir():
            path.unlink()
        own.rmdir()
        spool(tmp_path, outbox, 2)

        assert 1 == len(list(tmp_path.glob("outbox/*/*.json")))
        assert [1, 2] == drain(outbox)


class TestDiskThatRefuses:
    def test_what_the_disk_refuses_is_sent_from_memory(self, tmp_path: Path) -> None:
        """A batch that is not in the spool goes from memory, once, spooled later or not."""
        outbox = DiskOutbox(tmp_path, "abc")
        batch = make_batch(1)
        outbox.mark(batch)

        assert Outcome.HELD is outbox.put(batch)
        item = outbox.head()
        assert item is not None
        assert batch.payload == item.read()
        assert [1] == drain(outbox)
        spool(tmp_path, outbox, 1)
        assert [] == drain(outbox)
        assert [] == list(tmp_path.glob("outbox/*/*.json"))

    def test_memory_is_given_back_when_the_disk_takes_it(self, tmp_path: Path) -> None:
        """Once a batch is in the spool, its copy in memory goes."""
        outbox = DiskOutbox(tmp_path, "abc")
        outbox.put(make_batch(1))
        (batch,) = spool(tmp_path, outbox, 1)
        item = outbox.head()
        assert item is not None

        assert item.payload is None
        assert batch.payload == item.read()
        assert [1] == drain(outbox)
        assert not outbox.is_pending(batch.file_name)

    def test_memory_is_bounded(self, tmp_path: Path) -> None:
        """Past the cap, what the disk refuses is dropped and counted."""
        outbox = DiskOutbox(tmp_path, "abc", max_held_bytes=make_batch(1).size)

        assert Outcome.HELD is outbox.put(make_batch(1))
        assert Outcome.DROPPED is outbox.put(make_batch(2))
        assert 1 == outbox.dropped
        assert [1] == drain(outbox)

    def test_a_marker_that_cannot_be_written(self, tmp_path: Path) -> None:
        """This process sends the batch all the same, and counts that no other could."""
        (tmp_path / "outbox").write_text("a file in the way")
        outbox = DiskOutbox(tmp_path, "abc")
        spool(tmp_path, outbox, 1)

        assert outbox.unmarked > 0
        assert [1] == drain(outbox)


class TestAdoption:
    def test_a_dead_process_is_taken_over(self, tmp_path: Path) -> None:
        """What several dead processes left comes out by age, before what is new."""
        for session, numbers in (("b", (1, 4)), ("a", (2, 3))):
            dead = DiskOutbox(tmp_path, session)
            spool(tmp_path, dead, *numbers)
            dead.close()
        outbox = DiskOutbox(tmp_path, "c")
        spool(tmp_path, outbox, 5)

        assert 4 == outbox.adopt()
        assert outbox.is_pending(make_batch(1).file_name)
        assert [1, 2, 3, 4, 5] == drain(outbox)
        outbox.close()
        assert [] == list((tmp_path / "outbox").iterdir())

    def test_a_live_process_is_left_alone(self, tmp_path: Path) -> None:
        """An outbox whose owner lives cannot be had."""
        alive = DiskOutbox(tmp_path, "a")
        spool(tmp_path, alive, 1)
        outbox = DiskOutbox(tmp_path, "b")

        assert 0 == outbox.adopt()
        alive.close()
        assert 1 == outbox.adopt()

    def test_one_process_takes_it(self, tmp_path: Path) -> None:
        """A dead outbox goes to one process, and to the next one if that dies too."""
        dead = DiskOutbox(tmp_path, "a")
        spool(tmp_path, dead, 1, 2)
        dead.close()
        first, second = DiskOutbox(tmp_path, "b"), DiskOutbox(tmp_path, "c")

        assert (2, 0) == (first.adopt(), second.adopt())
        item = first.head()
        assert item is not None
        first.done(item)
        first.close()
        assert 1 == second.adopt()
        assert [2] == drain(second)

    def test_blobs_are_remembered(self, tmp_path: Path) -> None:
        """The one who takes over knows which blobs belong to a batch."""
        blobs = [Blob(tmp_path / "weights", "run/weights")]
        dead = DiskOutbox(tmp_path, "a")
        batch = make_batch(1, blobs)
        (tmp_path / "spool").mkdir()
        (tmp_path / "spool" / batch.file_name).write_bytes(batch.payload)
        dead.put(batch)
        dead.close()
        outbox = DiskOutbox(tmp_path, "b")
        outbox.adopt()
        item = outbox.head()

        assert item is not None
        assert blobs == item.blobs

    def test_what_was_evicted_since_is_counted(self, tmp_path: Path) -> None:
        """A marker whose spool file is gone is dropped, and its outbox goes with the last one."""
        dead = DiskOutbox(tmp_path, "a")
        (batch,) = spool(tmp_path, dead, 1)
        dead.close()
        (tmp_path / "spool" / batch.file_name).unlink()
        outbox = DiskOutbox(tmp_path, "b")

        assert 0 == outbox.adopt()
        assert 1 == outbox.dropped
        assert [] == list((tmp_path / "outbox").iterdir())

    def test_a_marker_that_cannot_be_read(self, tmp_path: Path) -> None:
        """A damaged marker still names its batch."""
        dead = DiskOutbox(tmp_path, "a")
        spool(tmp_path, dead, 1)
        dead.close()
        (marker,) = tmp_path.glob("outbox/*/*.json")
        marker.write_bytes(b"")
        outbox = DiskOutbox(tmp_path, "b")

        assert 1 == outbox.adopt()
        assert [1] == drain(outbox)

    def test_without_locks_age_tells(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where nothing can be locked, an outbox counts as dead after a day of silence."""
        monkeypatch.setattr(module, "HAS_LOCKS", False)
        other = DiskOutbox(tmp_path, "a")
        spool(tmp_path, other, 1)
        outbox = DiskOutbox(tmp_path, "b")
        spool(tmp_path, outbox, 2)

        assert 0 == outbox.adopt()
        later = clock.wall() + 25 * 3600 * 10**9
        monkeypatch.setattr(clock, "wall", lambda: later)
        assert 1 == outbox.adopt()
        assert 0 == outbox.adopt()
        assert [1, 2] == drain(outbox)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
    def test_a_forked_child_starts_empty(self, tmp_path: Path) -> None:
        """A child sends nothing of its parent's, and does not keep the parent's lock alive."""
        outbox = DiskOutbox(tmp_path, "a")
        spool(tmp_path, outbox, 1)
        ready, tell = os.pipe()
        ended, end = os.pipe()
        child = os.fork()
        if not child:
            os.close(end)
            outbox.after_fork()
            os.write(tell, bytes([len(outbox)]))
            os.read(ended, 1)  # until the parent is through
            os._exit(0)
        try:
            assert b"\0" == os.read(ready, 1)
            later = DiskOutbox(tmp_path, "b")
            assert 0 == later.adopt()  # the child's letting go is not the parent's
            outbox.close()
            assert 1 == later.adopt()
        finally:
            os.close(end)
            os.waitpid(child, 0)
            for pipe in (ready, tell, ended):
                os.close(pipe)
