"""The spool: whole files, in order, merged as they age, and never past the cap."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import pytest

from cirron import wire
from cirron.runs import reader
from cirron.ship.sinks import spool as sinks
from cirron.ship.sinks.base import Outcome, Sealed
from cirron.ship.sinks.spool import Spool

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SESSION = wire.Session(
    id="s",
    run_id="r",
    attempt=0,
    host="h",
    pid=1,
    rank=None,
    local_rank=None,
    world_size=None,
    clock=wire.Clock(1, 1, 1),
)


def header(number: int) -> wire.Header:
    return wire.Header(
        schema_version=1,
        sdk_version="0",
        batch_id=f"{number:032x}",
        created_ns=1_700_000_000_000_000_000 + number,
        session=SESSION,
    )


def batch(number: int, padding: int = 0) -> Sealed:
    span = wire.Span(
        f"{number:032x}", "x" * padding, None, number, 1, 2, None, None, None, 1, 1, None, {}, []
    )
    mark = wire.Mark(f"m{number}", span.id, "loss", "float", 0.5, {}, 1, "point")
    sections = wire.Sections([wire.encode_records([span])], [wire.encode_records([mark])])
    return Sealed(header(number), sections, records=2)


def make(root: Path, max_bytes: int = 10**9, first_merged: int = 10**6) -> Spool:
    numbers = iter(range(first_merged, 10**9))
    return Spool(root, max_bytes=max_bytes, header=lambda: header(next(numbers)))


def files(root: Path) -> list[str]:
    return sorted(os.listdir(root / "spool"))


def indices(root: Path) -> list[Any]:
    """What a reader finds, span by span, in the order of the files."""
    return [span.index for run in reader.read(root) for span in run.spans]


def test_a_batch_is_a_file(tmp_path: Path) -> None:
    """A batch is one file, named by time and id, with the batch's own bytes."""
    given = batch(7)

    assert Outcome.DONE is make(tmp_path).emit(given)
    (name,) = files(tmp_path)
    assert re.fullmatch(r"\d{20}-[0-9a-f]{32}\.json", name)
    assert f"01700000000000000007-{7:032x}.json" == name
    assert given.payload == (tmp_path / "spool" / name).read_bytes()


def test_names_sort_by_time(tmp_path: Path) -> None:
    """Files sort by the time of their batches."""
    spool = make(tmp_path)
    for number in (3, 20, 100):
        spool.emit(batch(number))

    assert [3, 20, 100] == indices(tmp_path)


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file has its final name only when all of it is written."""
    seen: list[list[str]] = []
    write_all = sinks.write_all

    def watch(file: int, pieces: list[bytes]) -> None:
        write_all(file, pieces)
        seen.append(files(tmp_path))

    monkeypatch.setattr(sinks, "write_all", watch)
    make(tmp_path).emit(batch(1))

    assert [[batch(1).file_name + ".tmp"]] == seen
    assert [batch(1).file_name] == files(tmp_path)


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails half-way leaves no file; the batch is held and written later."""
    spool = make(tmp_path)
    write_all = sinks.write_all

    def fail(file: int, pieces: list[bytes]) -> None:
        os.write(file, b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sinks, "write_all", fail)
    assert Outcome.HELD is spool.emit(batch(1))
    assert Outcome.HELD is spool.emit(batch(2))
    assert [] == files(tmp_path)
    assert "No space left on device" == spool.health()["spool_problem"]

    monkeypatch.setattr(sinks, "write_all", write_all)
    spool.tick()
    assert [1, 2] == indices(tmp_path)
    assert (None, 0) == (spool.health()["spool_problem"], spool.health()["spool_held_bytes"])


def test_a_problem_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that refuses makes one warning, with the folder and a way out."""

    def fail(file: int, pieces: list[bytes]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sinks, "write_all", fail)
    spool = make(tmp_path)
    for number in range(5):
        spool.emit(batch(number))
        spool.tick()

    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"cannot write to {tmp_path / 'spool'} (No space left on device)" in warning
    assert "ci.profile(path=...)" in warning


def test_what_is_held_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that refuses for long costs bounded memory: the oldest go, counted."""

    def fail(file: int, pieces: list[bytes]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sinks, "write_all", fail)
    monkeypatch.setattr(sinks, "MAX_HELD_BYTES", 3 * batch(1).size)
    spool = make(tmp_path)
    outcomes = [spool.emit(batch(number)) for number in range(1, 6)]

    assert [Outcome.HELD] * 3 + [Outcome.DROPPED] * 2 == outcomes
    assert (2, 3 * batch(1).size) == (
        spool.health()["spool_drop_count"],
        spool.health()["spool_held_bytes"],
    )


def test_what_is_held_at_the_end_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be written by the end is counted as dropped."""

    def fail(file: int, pieces: list[bytes]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sinks, "write_all", fail)
    spool = make(tmp_path)
    spool.emit(batch(1))
    spool.close(0)

    assert 1 == spool.health()["spool_drop_count"]


def test_a_folder_that_is_removed(tmp_path: Path) -> None:
    """A spool folder that somebody deletes is made anew."""
    spool = make(tmp_path)
    spool.emit(batch(1))
    for name in files(tmp_path):
        (tmp_path / "spool" / name).unlink()
    (tmp_path / "spool").rmdir()
    spool.tick()

    assert Outcome.DONE is spool.emit(batch(2))
    assert [2] == indices(tmp_path)


class TestCap:
    def test_the_oldest_go_first(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Past the cap the oldest files go, are counted, and are spoken of once."""
        size = batch(1).size
        spool = make(tmp_path, max_bytes=3 * size)
        for number in range(1, 8):
            spool.emit(batch(number))

        assert [5, 6, 7] == indices(tmp_path)
        assert (4, 4 * size, 3 * size) == (
            spool.health()["spool_drop_count"],
            spool.health()["spool_dropped_bytes"],
            spool.health()["spool_bytes"],
        )
        assert 1 == caplog.text.count("its oldest files go")

    def test_the_newest_stays(self, tmp_path: Path) -> None:
        """A batch that is larger than the cap is kept until the next one comes."""
        spool = make(tmp_path, max_bytes=10)
        spool.emit(batch(1))
        assert [1] == indices(tmp_path)

        spool.emit(batch(2))
        assert [2] == indices(tmp_path)

    def test_files_of_earlier_runs_count(self, tmp_path: Path) -> None:
        """What an earlier run left is part of what the cap bounds."""
        size = batch(1).size
        make(tmp_path).emit(batch(1))
        spool = make(tmp_path, max_bytes=size)
        assert size == spool.health()["spool_bytes"]

        spool.emit(batch(2))
        assert [2] == indices(tmp_path)


class TestMerge:
    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Four files make one, so that tests are short."""
        monkeypatch.setattr(sinks, "MERGE_FILES", 4)

    def test_a_long_run_leaves_few_files(self, tmp_path: Path) -> None:
        """Files are merged as they age, on several levels, and every record is there once."""
        spool = make(tmp_path)
        for number in range(100):
            spool.emit(batch(number))
            spool.tick()

        assert list(range(100)) == sorted(indices(tmp_path))
        assert len(files(tmp_path)) < 12
        assert sum(p.stat().st_size for p in tmp_path.glob("spool/*")) == spool.bytes

    def test_a_merged_file_names_what_it_replaces(self, tmp_path: Path) -> None:
        """The merged file has the time of the oldest and the ids of all of its parts."""
        spool = make(tmp_path, first_merged=999)
        for number in range(1, 5):
            spool.emit(batch(number))
        spool.tick()
        (name,) = files(tmp_path)
        merged = wire.decode_batch((tmp_path / "spool" / name).read_bytes())

        assert f"01700000000000000001-{999:032x}.json" == name
        assert [f"{number:032x}" for number in range(1, 5)] == merged.merged
        assert [1, 2, 3, 4] == [span.index for span in merged.spans]
        assert ["m1", "m2", "m3", "m4"] == [mark.id for mark in merged.marks]

    @pytest.mark.parametrize("crash_at", range(5))
    def test_a_crash_half_way(
        self, crash_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Wherever a merge is cut short, a reader finds every record once."""
        spool = make(tmp_path)
        for number in range(1, 5):
            spool.emit(batch(number))
        left = iter(range(crash_at))
        remove = Spool._remove

        def crash(self: Spool, name: str, size: int) -> None:
            if next(left, None) is None:
                raise OSError("killed")
            remove(self, name, size)

        monkeypatch.setattr(Spool, "_remove", crash)
        spool.tick()

        assert [1, 2, 3, 4] == sorted(indices(tmp_path))

    def test_large_files_are_left_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A file that is large already is not written again."""
        monkeypatch.setattr(sinks, "SMALL_BYTES", 1_000)
        spool = make(tmp_path)
        for number in range(8):
            spool.emit(batch(number, padding=2_000))
        spool.tick()

        assert 8 == len(files(tmp_path))

    def test_bytes_make_a_merge_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Fewer files than usual are merged when they are large together."""
        monkeypatch.setattr(sinks, "MERGE_BYTES", 2 * batch(1).size)
        spool = make(tmp_path)
        for number in range(1, 4):
            spool.emit(batch(number))
        spool.tick()

        assert 2 == len(files(tmp_path))
        assert [1, 2, 3] == sorted(indices(tmp_path))

    def test_parts_that_are_gone(self, tmp_path: Path) -> None:
        """Parts that the cap or somebody else took are not missed."""
        spool = make(tmp_path)
        for number in range(1, 5):
            spool.emit(batch(number))
        (tmp_path / "spool" / batch(2).file_name).unlink()
        spool.tick()

        assert [1, 3, 4] == sorted(indices(tmp_path))

    def test_what_waits_to_be_sent_is_not_merged(self, tmp_path: Path) -> None:
        """A batch that a server has not got yet stays under its own id."""

        class Outbox:
            pending = True

            def open(self) -> None: ...
            def is_pending(self, name: str) -> bool:
                return self.pending

        outbox: Any = Outbox()
        spool = Spool(tmp_path, max_bytes=10**9, header=lambda: header(99), outbox=outbox)
        for number in range(1, 5):
            spool.emit(batch(number))
        spool.tick()
        assert 4 == len(files(tmp_path))

        outbox.pending = False
        spool.tick()
        assert 1 == len(files(tmp_path))


def test_leftovers_of_dead_writers(tmp_path: Path) -> None:
    """Half-written files that are old are removed; young ones belong to somebody."""
    folder = tmp_path / "spool"
    folder.mkdir()
    old, young = folder / "1.json.tmp", folder / "2.json.tmp"
    for path in (old, young):
        path.write_text("{")
    os.utime(old, (0, 0))
    make(tmp_path)

    assert ["2.json.tmp"] == files(tmp_path)


def test_many_pieces(tmp_path: Path) -> None:
    """A batch of more pieces than one system call takes is written whole."""
    path = tmp_path / "file"
    pieces = [str(n).encode() for n in range(5_000)]
    with open(path, "wb", buffering=0) as file:
        sinks.write_all(file.fileno(), pieces)

    assert b"".join(pieces) == path.read_bytes()


@pytest.mark.parametrize("step", [1, 3, 7])
def test_short_writes(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that writes a few bytes at a time loses none."""
    path = tmp_path / "file"
    write: Callable[[int, bytes], int] = os.write

    def few(file: int, pieces: list[memoryview]) -> int:
        return write(file, b"".join(pieces)[:step])

    monkeypatch.setattr(os, "writev", few)
    with open(path, "wb", buffering=0) as file:
        sinks.write_all(file.fileno(), [b"hello", b"", b",", b"world"])

    assert b"hello,world" == path.read_bytes()
