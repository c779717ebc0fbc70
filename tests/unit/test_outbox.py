"""What still has to be sent: order, caps, counters, and what one process leaves to the next."""

from __future__ import annotations

import os
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from cirron import system, wire
from cirron.record import clock
from cirron.ship import outbox as module
from cirron.ship.outbox import DiskOutbox, MemoryOutbox, blob_keys
from cirron.ship.sinks.base import Outcome, Sealed

if TYPE_CHECKING:
    from pathlib import Path

A, B, C = "a" * 16, "b" * 16, "c" * 16  # processes


def make_batch(number: int, prefix: str = A, **fields: list[str]) -> Sealed:
    header = wire.Header(
        schema_version=1,
        sdk_version="1.2.3",
        batch_id=f"{prefix}{number:016x}",
        created_ns=number,
        session=None,
        **fields,
    )
    return Sealed(header, wire.Sections(), records=3)


def write(root: Path, batch: Sealed) -> Path:
    """What the spool does."""
    path = root / "spool" / batch.file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(batch.payload)
    return path


def spool(root: Path, outbox: DiskOutbox, *numbers: int, prefix: str = A) -> list[Path]:
    """What the spool and the sink do with batches that the disk takes."""
    paths = []
    for number in numbers:
        outbox.open()
        batch = make_batch(number, prefix)
        paths.append(write(root, batch))
        assert Outcome.HELD is outbox.put(batch)
    return paths


def leave(root: Path, prefix: str, *numbers: int) -> None:
    """What a process leaves that dies before it has sent anything."""
    dead = DiskOutbox(root, prefix)
    spool(root, dead, *numbers, prefix=prefix)
    dead.close()


def drain(outbox: MemoryOutbox) -> list[int]:
    """Sends everything, so to speak."""
    sent = []
    while (item := outbox.head()) is not None:
        sent.append(int(item.batch_id[16:], 16))
        outbox.done(item)
    return sent


def senders(root: Path) -> list[str]:
    """The processes that have left something, or live."""
    return sorted(path.name for path in (root / "outbox").iterdir())


class TestMemoryOutbox:
    def test_batches_come_out_as_they_went_in(self) -> None:
        """The head is the oldest batch, whole, until it is done; putting twice is putting once."""
        outbox = MemoryOutbox()
        batch = make_batch(1)
        for number in (1, 1, 2):
            outbox.put(make_batch(number))
        item = outbox.head()

        assert item is not None
        assert item is outbox.head()
        assert batch.payload == outbox.read(item)
        assert (2, 2 * batch.size) == (len(outbox), outbox.pending_bytes)
        assert [1, 2] == drain(outbox)
        assert (0, 0) == (len(outbox), outbox.pending_bytes)

    def test_the_oldest_go_past_the_cap(self) -> None:
        """Past the cap the oldest batches go, and are counted."""
        outbox = MemoryOutbox(max_bytes=2 * make_batch(1).size)
        for number in (1, 2, 3, 4):
            assert Outcome.HELD is outbox.put(make_batch(number))

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
        small, large = make_batch(1), make_batch(2)
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


class TestWatermark:
    def test_it_is_the_name_of_the_last_batch_that_is_done(self, tmp_path: Path) -> None:
        """The only thing on disk is one line, rewritten in place, until all is done."""
        outbox = DiskOutbox(tmp_path, A)
        outbox.open()
        state = tmp_path / "outbox" / A

        assert f"{module.NOTHING_DONE}\n" == state.read_text()
        inode = state.stat().st_ino
        paths = spool(tmp_path, outbox, 1, 2)
        for path in paths:
            item = outbox.head()
            assert item is not None
            assert path.read_bytes() == outbox.read(item)
            assert outbox.is_pending(path.name)
            outbox.done(item)
            assert f"{path.name}\n" == state.read_text()
            assert not outbox.is_pending(path.name)
        assert inode == state.stat().st_ino
        outbox.close()
        outbox.close()
        assert [] == senders(tmp_path)

    def test_nothing_is_made_before_it_is_needed(self, tmp_path: Path) -> None:
        """A session that sends nothing leaves nothing."""
        outbox = DiskOutbox(tmp_path, A)
        outbox.adopt()
        outbox.close()

        assert [] == list(tmp_path.iterdir())

    def test_a_spool_file_is_pending_before_it_is_put_in(self, tmp_path: Path) -> None:
        """Between being written and being put in, a batch is not up for merging."""
        outbox = DiskOutbox(tmp_path, A)
        spool(tmp_path, outbox, 1)
        drain(outbox)

        assert outbox.is_pending(make_batch(2).file_name)

    def test_putting_twice_is_putting_once(self, tmp_path: Path) -> None:
        """A batch that is put in again waits once, and not at all once it was sent."""
        outbox = DiskOutbox(tmp_path, A)
        spool(tmp_path, outbox, 1)

        assert Outcome.HELD is outbox.put(make_batch(1))
        assert [1] == drain(outbox)
        assert Outcome.DONE is outbox.put(make_batch(1))
        assert [] == drain(outbox)

    @pytest.mark.parametrize("end", ["reject", "drop"])
    def test_what_is_given_up_is_never_tried_again(self, tmp_path: Path, end: str) -> None:
        """What a server refused, or cannot be read, is passed over in later runs too, and kept."""
        outbox = DiskOutbox(tmp_path, A)
        first, _ = spool(tmp_path, outbox, 1, 2)
        item = outbox.head()
        assert item is not None
        getattr(outbox, end)(item)
        outbox.close()

        assert (end == "reject", end == "drop") == (outbox.rejected, outbox.unreadable)
        assert not outbox.is_pending(first.name)
        assert first.exists()
        later = DiskOutbox(tmp_path, B)
        assert 1 == later.adopt()
        assert [2] == drain(later)

    def test_the_oldest_go_past_the_cap(self, tmp_path: Path) -> None:
        """Past so many, the oldest are given up and counted, and stay in the spool."""
        outbox = DiskOutbox(tmp_path, A, max_items=2)
        paths = spool(tmp_path, outbox, 1, 2, 3, 4)

        assert (2, 2) == (outbox.dropped, len(outbox))
        assert sum(path.stat().st_size for path in paths[2:]) == outbox.pending_bytes
        assert [3, 4] == drain(outbox)
        assert all(path.exists() for path in paths)

    def test_a_hundred_thousand_batches_wait_in_little_memory(self, tmp_path: Path) -> None:
        """A batch that waits costs some 250 bytes."""
        outbox = DiskOutbox(tmp_path, A)
        batch = make_batch(1)
        batch.pieces = []
        batch.size = 0  # what memory holds is bounded, and measured elsewhere
        tracemalloc.start()
        for number in range(10_000):
            batch.header.created_ns = 10**18 + number
            outbox.put(batch)
        ours = tracemalloc.Filter(True, f"{os.path.dirname(module.__file__)}/*")
        snapshot = tracemalloc.take_snapshot().filter_traces([ours])
        tracemalloc.stop()

        used = sum(trace.size for trace in snapshot.traces)
        assert 100 < used / 10_000 < 300
        assert 10_000 == len(outbox)

    def test_a_file_that_somebody_removed(self, tmp_path: Path) -> None:
        """An outbox whose file is gone makes a new one, which says how far it is."""
        outbox = DiskOutbox(tmp_path, A)
        first, second = spool(tmp_path, outbox, 1, 2)
        item = outbox.head()
        assert item is not None
        outbox.done(item)
        for path in (tmp_path / "outbox").iterdir():
            path.unlink()
        (tmp_path / "outbox").rmdir()
        outbox.open()

        assert f"{first.name}\n" == (tmp_path / "outbox" / A).read_text()
        assert [2] == drain(outbox)
        assert f"{second.name}\n" == (tmp_path / "outbox" / A).read_text()

    def test_files_are_private(self, tmp_path: Path) -> None:
        """Only their owner may read them, unless a setting says otherwise."""
        for prefix, access, mode in ((A, "private", 0o600), (B, "group", 0o640)):
            DiskOutbox(tmp_path / access, prefix, access=access).open()

            assert mode == (tmp_path / access / "outbox" / prefix).stat().st_mode & 0o777

    def test_merged_files_count_as_sent(self, tmp_path: Path) -> None:
        """A file that replaces others is never sent, even when it looks new."""
        outbox = DiskOutbox(tmp_path, A)
        batch = make_batch(2, merged=[make_batch(1).batch_id])
        write(tmp_path, batch)
        outbox.put(batch)
        item = outbox.head()

        assert item is not None
        assert outbox.read(item) is None


class TestDiskThatRefuses:
    def test_what_the_disk_refuses_is_sent_from_memory(self, tmp_path: Path) -> None:
        """A batch that is not in the spool goes from memory, once, spooled later or not."""
        outbox = DiskOutbox(tmp_path, A)
        batch = make_batch(1)

        assert Outcome.HELD is outbox.put(batch)
        item = outbox.head()
        assert item is not None
        assert batch.payload == outbox.read(item)
        assert [1] == drain(outbox)
        outbox.open()
        write(tmp_path, batch)
        assert not outbox.is_pending(batch.file_name)
        outbox.close()
        assert 0 == DiskOutbox(tmp_path, B).adopt()

    def test_memory_is_bounded(self, tmp_path: Path) -> None:
        """Past the cap, what the disk refuses is dropped and counted."""
        outbox = DiskOutbox(tmp_path, A, max_held_bytes=make_batch(1).size)

        assert Outcome.HELD is outbox.put(make_batch(1))
        assert Outcome.DROPPED is outbox.put(make_batch(2))
        assert 1 == outbox.dropped
        assert [1] == drain(outbox)
        assert Outcome.HELD is outbox.put(make_batch(3))

    def test_a_file_that_cannot_be_made(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """This process sends its batches all the same; what it leaves is said to be left."""
        (tmp_path / "outbox").write_text("a file in the way")
        outbox = DiskOutbox(tmp_path, A)
        for number in (1, 2):
            with pytest.raises(OSError, match="Not a directory"):
                outbox.open()
            write(tmp_path, make_batch(number))
            outbox.put(make_batch(number))
        item = outbox.head()
        assert item is not None
        outbox.done(item)
        outbox.close()

        assert 1 == len(outbox)
        (record,) = caplog.records
        assert "1 batches were not sent" in record.getMessage()


class TestAdoption:
    def test_dead_processes_are_taken_over(self, tmp_path: Path) -> None:
        """What several dead processes left comes out by age, before what is new."""
        leave(tmp_path, A, 1, 4)
        leave(tmp_path, B, 2, 3)
        outbox = DiskOutbox(tmp_path, C)
        spool(tmp_path, outbox, 5, prefix=C)

        assert 4 == outbox.adopt()
        assert sum(path.stat().st_size for path in tmp_path.glob("spool/*")) == outbox.pending_bytes
        assert [1, 2, 3, 4, 5] == drain(outbox)
        assert (0, [C]) == (outbox.pending_bytes, senders(tmp_path))
        outbox.close()
        assert [] == senders(tmp_path)

    def test_a_live_process_is_left_alone(self, tmp_path: Path) -> None:
        """What a process has that lives cannot be had."""
        alive = DiskOutbox(tmp_path, A)
        spool(tmp_path, alive, 1)
        outbox = DiskOutbox(tmp_path, B)

        assert 0 == outbox.adopt()
        alive.close()
        assert 1 == outbox.adopt()

    def test_one_process_takes_it(self, tmp_path: Path) -> None:
        """What is left goes to one process, and to the next one from where that one died."""
        leave(tmp_path, A, 1, 2)
        first, second = DiskOutbox(tmp_path, B), DiskOutbox(tmp_path, C)

        assert (2, 0) == (first.adopt(), second.adopt())
        item = first.head()
        assert item is not None
        first.done(item)
        first.close()
        assert 1 == second.adopt()
        assert [2] == drain(second)
        assert [] == senders(tmp_path)

    def test_what_is_gone_is_not_missed(self, tmp_path: Path) -> None:
        """A process whose spool files are all gone leaves nothing."""
        leave(tmp_path, A, 1)
        for path in (tmp_path / "spool").iterdir():
            path.unlink()

        assert 0 == DiskOutbox(tmp_path, B).adopt()
        assert [] == senders(tmp_path)

    def test_a_spool_that_cannot_be_listed(self, tmp_path: Path) -> None:
        """What cannot be listed now is left for a later process."""
        leave(tmp_path, A, 1)
        (tmp_path / "spool").rename(tmp_path / "moved")
        (tmp_path / "spool").write_text("a file in the way")
        outbox = DiskOutbox(tmp_path, B)

        assert 0 == outbox.adopt()
        (tmp_path / "spool").unlink()
        (tmp_path / "moved").rename(tmp_path / "spool")
        assert 1 == outbox.adopt()

    def test_a_spool_that_cannot_be_listed_any_more(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Taking over stops there; what is new goes on."""
        monkeypatch.setattr(module, "MAX_ADOPTED", 1)
        leave(tmp_path, A, 1)
        leave(tmp_path, B, 1)
        outbox = DiskOutbox(tmp_path, C)
        assert 1 == outbox.adopt()
        (tmp_path / "spool").rename(tmp_path / "moved")
        (tmp_path / "spool").write_text("a file in the way")
        outbox.put(make_batch(2, C))

        assert [1, 2] == drain(outbox)
        assert 1 == len(senders(tmp_path))

    def test_descriptors_are_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Many dead processes are taken over a few at a time, until all are through."""
        monkeypatch.setattr(module, "MAX_ADOPTED", 3)
        for number in range(10):
            prefix = f"{number:016x}"
            if number % 2:
                leave(tmp_path, prefix, number)
            else:
                killed = DiskOutbox(tmp_path, prefix)
                killed.open()
                killed.after_fork()  # its descriptors are closed, and that is all
        before = len(os.listdir("/proc/self/fd"))
        outbox = DiskOutbox(tmp_path, A)
        outbox.adopt()

        assert len(os.listdir("/proc/self/fd")) - before <= 3
        assert [1, 3, 5, 7, 9] == sorted(drain(outbox))
        assert [] == senders(tmp_path)
        assert before == len(os.listdir("/proc/self/fd"))

    def test_a_folder_that_is_not_ours(self, tmp_path: Path) -> None:
        """Where the mark of our folders is missing, nothing is taken over or removed."""
        theirs = tmp_path / "outbox" / A
        theirs.parent.mkdir()
        theirs.write_text("theirs")
        write(tmp_path, make_batch(1))
        outbox = DiskOutbox(tmp_path, B)
        spool(tmp_path, outbox, 2, prefix=B)

        assert 0 == outbox.adopt()
        assert [2] == drain(outbox)
        outbox.close()
        assert "theirs" == theirs.read_text()

    def test_half_made_files_go_after_a_day(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A process that was killed while making its file leaves nothing for long."""
        outbox = DiskOutbox(tmp_path, A)
        outbox.open()
        (tmp_path / "outbox" / f"{B}.tmp").touch()
        outbox.adopt()
        assert [A, f"{B}.tmp"] == senders(tmp_path)

        later = clock.wall() + 25 * 3600 * 10**9
        monkeypatch.setattr(clock, "wall", lambda: later)
        outbox.adopt()
        assert [A] == senders(tmp_path)

    def test_without_locks_age_tells(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where nothing can be locked, a process counts as dead after a day of silence."""
        monkeypatch.setattr(system, "HAS_FCNTL", False)
        other, outbox = DiskOutbox(tmp_path, A), DiskOutbox(tmp_path, B)
        spool(tmp_path, other, 1)
        spool(tmp_path, outbox, 2, prefix=B)
        os.utime(tmp_path / "outbox" / A, (0, 0))
        other.open()  # which says that it lives

        assert 0 == outbox.adopt()
        os.utime(tmp_path / "outbox" / A, (0, 0))
        assert 1 == outbox.adopt()
        assert 0 == outbox.adopt()
        assert [1, 2] == drain(outbox)
        outbox.close()
        assert [] == senders(tmp_path)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
    def test_a_forked_child_starts_empty(self, tmp_path: Path) -> None:
        """A child sends nothing of its parent's, and does not keep the parent's locks alive."""
        leave(tmp_path, A, 1)
        outbox = DiskOutbox(tmp_path, B)
        spool(tmp_path, outbox, 2, prefix=B)
        outbox.adopt()
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
            later = DiskOutbox(tmp_path, C)
            assert 0 == later.adopt()  # the child's letting go is not the parent's
            outbox.close()
            assert 2 == later.adopt()
        finally:
            os.close(end)
            os.waitpid(child, 0)
            for pipe in (ready, tell, ended):
                os.close(pipe)


class TestBlobs:
    def snapshot(self, uri: str | None) -> wire.Snapshot:
        histogram = wire.Histogram([0.0] * 17, [0] * 16)
        stats = wire.Stats(None, None, None, None, None, histogram)
        return wire.Snapshot("1", "2", "w", [1], "float32", "full", stats, uri, 1, {})

    def payload(self, *uris: str | None) -> bytes:
        header = make_batch(1).header
        snapshots = wire.encode_records([self.snapshot(uri) for uri in uris])
        return Sealed(header, wire.Sections(snapshots=[snapshots]), records=1).payload

    def test_they_are_found_in_the_batch(self) -> None:
        """Each file that the snapshots of a batch name is found once, by its key."""
        key = f"snapshots/{1:032x}/"
        uris = [f"file:///a%20b/{key}weights.safetensors"] * 2
        uris.append(f"file:///a%20b/{key}gradients-12.safetensors")

        assert (
            [f"{key}gradients-12.safetensors", f"{key}weights.safetensors"],
            0,
        ) == blob_keys(self.payload(*uris, None))
        assert ([], 0) == blob_keys(self.payload(None, "s3://bucket/weights"))

    @pytest.mark.parametrize(
        "end",
        [
            "etc/passwd",
            "snapshots/../weights.safetensors",
            f"snapshots/{1:032x}/../../weights.safetensors",
            f"snapshots/{1:032x}/weights.safetensors/x",
            f"snapshots/{1:032x}/weights.safetensors\n",
            f"snapshots/{1:032x}/weights.safetensors?x=y",
            f"snapshots/{1:032x}/weights-12345.safetensors",
            f"snapshots/{1:031x}/weights.safetensors",
            f"snapshots/{1:032x}/biases.safetensors",
            f"snapshots/{'A' * 32}/weights.safetensors",
            f"snapshots%2f{1:032x}%2fweights.safetensors",
        ],
    )
    def test_other_addresses_are_not_ours(self, end: str) -> None:
        """An address of any other form is no file to send, and is counted."""
        assert ([], 1) == blob_keys(self.payload(f"file:///{end}"))

    @pytest.mark.parametrize(
        "payload", [b"", b"{", b"\xff", b"[" * 100_000, b'{"snapshots":[{}]}'], ids=range(5)
    )
    def test_what_is_no_batch_names_no_files(self, payload: bytes) -> None:
        """Nonsense in a planted file is counted, and ends nothing."""
        assert ([], 1) == blob_keys(payload + b'"blob_uri":"file')
