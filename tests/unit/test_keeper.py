"""The keeper: files merged as they age, the cap, and what is removed: ours, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests import spools

from cirron import files, system, wire
from cirron.record import clock
from cirron.ship import keeper as keepers
from cirron.ship.keeper import Keeper
from cirron.ship.sinks.base import Sealed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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


class Rig:
    """A folder, and a keeper that is told of each batch which is put there.

    Its thread is not started: it looks after the folder when the test says so.
    """

    def __init__(
        self,
        root: Path,
        max_bytes: int = 10**9,
        first_merged: int = 10**6,
        **options: Any,
    ) -> None:
        numbers = iter(range(first_merged, 10**9))
        self.root = root
        self.folder = files.Folder(root / "spool", files.BATCH)
        self.boxes = files.Folder(root / "blackbox", files.BLACK_BOX)
        self.folder.make()
        self.keeper = Keeper(
            self.folder,
            self.boxes,
            max_bytes=max_bytes,
            host="h",
            header=lambda: header(next(numbers)),
            **options,
        )

    def put(self, *given: Sealed) -> None:
        for each in given:
            self.folder.put(each.file_name, each.pieces)
            self.keeper.add(each)

    def tick(self) -> None:
        self.keeper.tick()
        self.keeper.keep()

    def files(self) -> list[str]:
        return sorted(os.listdir(self.folder.path))

    def indices(self) -> list[Any]:
        """What a reader finds, span by span, in the order of the files."""
        return [span.index for run in spools.read(self.root) for span in run.spans]

    def size(self) -> int:
        return sum(os.path.getsize(self.folder.path / name) for name in self.files())


class TestCap:
    def test_the_oldest_go_first(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Past the cap the oldest files go, are counted, and are spoken of once."""
        size = batch(1).size
        rig = Rig(tmp_path, max_bytes=3 * size)
        for number in range(1, 8):
            rig.put(batch(number))
            rig.keeper.keep()

        assert [5, 6, 7] == rig.indices()
        assert (4, 4 * size, 3 * size) == (
            rig.keeper.evicted_files,
            rig.keeper.evicted_bytes,
            rig.keeper.bytes,
        )
        assert 1 == caplog.text.count("its oldest files are deleted")

    def test_the_newest_stays(self, tmp_path: Path) -> None:
        """A batch that is larger than the cap is kept until the next one comes."""
        rig = Rig(tmp_path, max_bytes=10)
        rig.put(batch(1))
        rig.keeper.keep()
        assert [1] == rig.indices()

        rig.put(batch(2))
        rig.keeper.keep()
        assert [2] == rig.indices()

    def test_files_of_earlier_runs_count(self, tmp_path: Path) -> None:
        """What an earlier run left is part of what the cap bounds."""
        size = batch(1).size
        Rig(tmp_path).put(batch(1))
        rig = Rig(tmp_path, max_bytes=size)
        rig.keeper.keep()
        assert size == rig.keeper.bytes

        rig.put(batch(2))
        rig.keeper.keep()
        assert [2] == rig.indices()

    def test_what_others_write_counts(self, tmp_path: Path) -> None:
        """The folder is measured again after some flushes: other processes write there too."""
        rig = Rig(tmp_path, max_bytes=40 * batch(10).size)
        rig.tick()
        Rig(tmp_path).put(*(batch(number) for number in range(10, 100)))
        for _ in range(keepers.MEASURE_EVERY):
            rig.tick()

        assert list(range(60, 100)) == rig.indices()

    def test_many_processes_at_once(self, tmp_path: Path) -> None:
        """Eight processes that write at once stay near the cap together."""
        rigs = [Rig(tmp_path, max_bytes=100_000) for _ in range(8)]
        most = 0
        for number in range(100):
            for each, rig in enumerate(rigs):
                rig.put(batch(8 * number + each, padding=1_000))
                rig.keeper.keep()
            most = max(most, rigs[0].size())

        assert 50_000 < most < 150_000

    def test_a_file_that_is_counted_while_others_go(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A file that the spool's thread counts only after it was measured costs no other file."""
        size = batch(1).size
        rig = Rig(tmp_path, max_bytes=3 * size)
        rig.put(*(batch(number) for number in range(1, 7)))
        rig.folder.put(batch(7).file_name, batch(7).pieces)
        remove = rig.folder.remove

        def remove_first(name: str) -> bool:
            monkeypatch.undo()
            rig.keeper.add(batch(7))
            return remove(name)

        monkeypatch.setattr(rig.folder, "remove", remove_first)
        rig.keeper.keep()

        assert [5, 6, 7] == rig.indices()

    def test_a_burst_during_a_measurement(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Files that are written while the folder is listed need no further flush to be counted."""
        rig = Rig(tmp_path, max_bytes=3 * batch(1).size)
        rig.put(*(batch(number) for number in range(1, 5)))
        entries = rig.folder.entries

        def list_slowly() -> Any:
            found = list(entries())
            monkeypatch.undo()
            rig.put(*(batch(number) for number in range(5, 8)))
            return found

        monkeypatch.setattr(rig.folder, "entries", list_slowly)
        monkeypatch.setattr(keepers, "remove_stale", lambda folder: None)
        rig.keeper.start()
        try:
            wait_until(lambda: rig.indices() == [5, 6, 7])
        finally:
            rig.keeper.close(clock.now() + 10**10)

    def test_the_thread_is_woken_by_size(self, tmp_path: Path) -> None:
        """A burst that passes the cap between two flushes is dealt with at once."""
        size = batch(1).size
        rig = Rig(tmp_path, max_bytes=3 * size)
        rig.keeper.start()
        try:
            rig.put(*(batch(number) for number in range(1, 8)))
            wait_until(lambda: rig.indices() == [5, 6, 7])
        finally:
            rig.keeper.close(clock.now() + 10**10)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class TestOnlyOurs:
    """Only regular files of our own form go, and only from a folder that we made."""

    def test_what_is_not_ours_stays(self, tmp_path: Path) -> None:
        """Files of other names, links, folders and FIFOs stay, however far past the cap."""
        rig = Rig(tmp_path, max_bytes=1)
        (tmp_path / "precious.json").write_text("mine")
        planted: dict[str, Callable[[Path], object]] = {
            "notes.json": lambda path: path.write_text("x" * 10_000),
            "model.safetensors": lambda path: path.write_text("x" * 10_000),
            "1.json.tmp": lambda path: path.write_text("{"),
            f"x{batch(1).file_name}": lambda path: path.write_text("{}"),
            f"{batch(1).file_name}.bak": lambda path: path.write_text("{}"),
            f"{batch(2).file_name}": lambda path: path.symlink_to(tmp_path / "precious.json"),
            f"{batch(3).file_name}": lambda path: path.mkdir(),
            f"{batch(4).file_name}": os.mkfifo,
        }
        for name, plant in planted.items():
            plant(rig.folder.path / name)
            os.utime(rig.folder.path / name, (0, 0), follow_symlinks=False)
        rig.put(batch(5), batch(6))
        for _ in range(keepers.MEASURE_EVERY + 1):
            rig.tick()
        rig.keeper.keep(is_last=True)

        assert {*planted, batch(6).file_name} == set(rig.files())
        assert "mine" == (tmp_path / "precious.json").read_text()

    def test_a_folder_of_somebody_else(self, tmp_path: Path) -> None:
        """From a folder that we did not make, only what this process wrote is removed."""
        folder = tmp_path / "spool"
        folder.mkdir()
        stale = self.fill(folder)
        own = {batch(number).file_name for number in (4, 5, 6)}
        rig = Rig(tmp_path, max_bytes=1, is_own=own.__contains__)
        rig.put(batch(4), batch(5), batch(6))
        rig.tick()

        assert [1, 2, 6] == rig.indices()
        assert (stale.exists(), 2) == (True, rig.keeper.evicted_files)

    def test_a_link_put_in_its_place(self, tmp_path: Path) -> None:
        """From behind a link nothing is removed, whatever it looks like."""
        rig = Rig(tmp_path, max_bytes=1)
        rig.folder.path.rmdir()
        precious = tmp_path / "precious"
        precious.mkdir()
        self.fill(precious)
        rig.folder.path.symlink_to(precious)
        found = sorted(os.listdir(precious))
        for _ in range(keepers.MEASURE_EVERY):
            rig.tick()
        rig.keeper.keep(is_last=True)

        assert (found, 0) == (sorted(os.listdir(precious)), rig.keeper.evicted_files)

    def fill(self, folder: Path) -> Path:
        """Puts files there that have names of our form; the last one is old and half-written."""
        for number in (1, 2):
            (folder / batch(number).file_name).write_bytes(batch(number).payload)
        stale = folder / f"{batch(3).file_name}.tmp"
        stale.write_text("{")
        os.utime(stale, (0, 0))
        return stale

    def test_leftovers_of_dead_writers(self, tmp_path: Path) -> None:
        """Half-written files of ours that are old are removed; young ones belong to somebody."""
        rig = Rig(tmp_path)
        old = rig.folder.path / f"{batch(1).file_name}.tmp"
        young = rig.folder.path / f"{batch(2).file_name}.tmp"
        for path in (old, young):
            path.write_text("{")
        os.utime(old, (0, 0))
        rig.keeper.keep()

        assert [young.name] == rig.files()


class TestMerge:
    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Four files make one, so that tests are short."""
        monkeypatch.setattr(keepers, "MERGE_FILES", 4)

    def test_a_long_run_leaves_few_files(self, tmp_path: Path) -> None:
        """Files are merged as they age, on several levels, and every record is there once."""
        rig = Rig(tmp_path)
        for number in range(100):
            rig.put(batch(number))
            rig.tick()

        assert list(range(100)) == sorted(rig.indices())
        assert len(rig.files()) < 12
        assert rig.size() == rig.keeper.bytes

    def test_a_merged_file_names_what_it_replaces(self, tmp_path: Path) -> None:
        """The merged file has the time of the oldest and the ids of all of its parts."""
        rig = Rig(tmp_path, first_merged=999)
        rig.put(*(batch(number) for number in range(1, 5)))
        rig.tick()
        (name,) = rig.files()
        merged = wire.decode_batch(rig.folder.read(name))

        assert f"01700000000000000001-{999:032x}.json" == name
        assert [f"{number:032x}" for number in range(1, 5)] == merged.merged
        assert [1, 2, 3, 4] == [span.index for span in merged.spans]
        assert ["m1", "m2", "m3", "m4"] == [mark.id for mark in merged.marks]

    @pytest.mark.parametrize("crash_at", range(5))
    def test_a_crash_half_way(
        self, crash_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Wherever a merge is cut short, a reader finds every record once."""
        rig = Rig(tmp_path)
        rig.put(*(batch(number) for number in range(1, 5)))
        left = iter(range(crash_at))
        remove = files.Folder.remove

        def crash(self: files.Folder, name: str) -> bool:
            if next(left, None) is None:
                raise OSError("killed")
            return remove(self, name)

        monkeypatch.setattr(files.Folder, "remove", crash)
        rig.tick()

        assert [1, 2, 3, 4] == sorted(rig.indices())
        assert 5 - min(crash_at, 4) == len(rig.files())

    def test_the_merged_file_is_on_the_disk_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No part is removed before the file that replaces it is on the disk itself."""
        rig = Rig(tmp_path)
        rig.put(*(batch(number) for number in range(1, 5)))
        order: list[str] = []
        monkeypatch.setattr(os, "fsync", lambda _: order.append("sync"))
        monkeypatch.setattr(files.Folder, "remove", lambda *_: order.append("remove"))
        rig.tick()

        assert ["sync", *["remove"] * 4] == order

    def test_large_files_are_left_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A file that is large already is not written again."""
        monkeypatch.setattr(keepers, "SMALL_BYTES", 1_000)
        rig = Rig(tmp_path)
        rig.put(*(batch(number, padding=2_000) for number in range(8)))
        rig.tick()

        assert 8 == len(rig.files())

    def test_bytes_make_a_merge_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Fewer files than usual are merged when they are large together."""
        monkeypatch.setattr(keepers, "MERGE_BYTES", 2 * batch(1).size)
        rig = Rig(tmp_path)
        rig.put(*(batch(number) for number in range(1, 4)))
        rig.tick()

        assert 2 == len(rig.files())
        assert [1, 2, 3] == sorted(rig.indices())

    def test_parts_that_are_gone(self, tmp_path: Path) -> None:
        """Parts that the cap or somebody else took are not missed."""
        rig = Rig(tmp_path)
        rig.put(*(batch(number) for number in range(1, 5)))
        (rig.folder.path / batch(2).file_name).unlink()
        rig.tick()

        assert [1, 3, 4] == sorted(rig.indices())
        assert 1 == len(rig.files())

    @pytest.mark.parametrize("what", ["cut", "link", "fifo", "folder"])
    def test_parts_that_somebody_replaced(self, what: str, tmp_path: Path) -> None:
        """What is not the file that we wrote is neither merged nor removed."""
        rig = Rig(tmp_path)
        rig.put(*(batch(number) for number in range(1, 5)))
        path = rig.folder.path / batch(2).file_name
        path.unlink()
        if what == "cut":
            path.write_bytes(batch(2).payload[:-5])
        elif what == "link":
            (tmp_path / "mine").write_bytes(batch(2).payload)
            path.symlink_to(tmp_path / "mine")
        elif what == "fifo":
            os.mkfifo(path)
        else:
            path.mkdir()
        rig.tick()

        assert 2 == len(rig.files())
        assert os.path.lexists(path)
        assert [1, 3, 4] == [
            span.index
            for name in rig.files()
            if name != path.name
            for span in wire.decode_batch(rig.folder.read(name)).spans
        ]

    def test_what_waits_to_be_sent_is_not_merged(self, tmp_path: Path) -> None:
        """A batch that a server has not got yet stays under its own id."""
        pending = {batch(3).file_name}
        rig = Rig(tmp_path, is_pending=pending.__contains__)
        rig.put(*(batch(number) for number in range(1, 5)))
        rig.tick()
        assert 4 == len(rig.files())

        pending.clear()
        rig.tick()
        assert 1 == len(rig.files())

    def test_a_full_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A merge that the disk refuses leaves the parts, and its reason; later all is well."""
        rig = Rig(tmp_path)
        rig.put(*(batch(number) for number in range(1, 5)))

        def fail(file: int, pieces: list[bytes]) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(system, "write_all", fail)
            rig.tick()
        assert ([1, 2, 3, 4], 4) == (rig.indices(), len(rig.files()))
        assert "No space left on device" == rig.keeper.problem

        rig.tick()
        assert rig.keeper.problem is None


class TestBoxes:
    """Black boxes of dead processes go, down to a number; those of living ones stay."""

    @pytest.fixture(autouse=True)
    def few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(keepers, "MAX_BOXES", 2)

    @pytest.fixture
    def dead(self) -> int:
        """The id of a process that has ended."""
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        return process.pid

    def name(self, number: int) -> str:
        return f"{number:032x}-1.json"

    def plant(self, rig: Rig, number: int, age_s: float = 0, **content: Any) -> None:
        rig.boxes.make()
        path = rig.boxes.path / self.name(number)
        host = content.pop("host", "h")
        session = json.loads(wire.encode(wire.changed(SESSION, host=host)))
        path.write_text(json.dumps({"session": session, "pid": os.getpid(), **content}))
        modified_ns = clock.wall() - int(age_s * 1e9) + number
        os.utime(path, ns=(modified_ns, modified_ns))

    def left(self, rig: Rig) -> list[int]:
        found = set(os.listdir(rig.boxes.path))
        return sorted(int(name.partition("-")[0], 16) for name in found)

    def test_the_oldest_of_the_dead(self, tmp_path: Path, dead: int) -> None:
        """The newest stay whatever they are; of the others those whose process is gone go."""
        rig = Rig(tmp_path)
        self.plant(rig, 1, 90, ended={"how": "clean"})
        self.plant(rig, 2, 80, pid=dead)
        self.plant(rig, 3, 70, process_start=system.process_start(os.getpid()))
        self.plant(rig, 4, 60, process_start="1")  # its id is this process's now
        self.plant(rig, 5, 50, host="another")
        self.plant(rig, 6, 40, ended={"how": "signal"})
        self.plant(rig, 7, 30, pid=dead)
        rig.keeper.keep()

        assert [3, 5, 6, 7] == self.left(rig)

    @pytest.mark.parametrize(
        ("age_s", "interval_s", "is_gone"),
        [(500, 1.0, False), (700, 1.0, True), (700, 100.0, False), (1_100, 100.0, True)],
    )
    def test_of_another_host(
        self, age_s: float, interval_s: float, is_gone: bool, tmp_path: Path
    ) -> None:
        """A process on another host counts as gone once its box is silent for long."""
        rig = Rig(tmp_path)
        self.plant(rig, 1, age_s, host="another", interval_s=interval_s)
        self.plant(rig, 2)
        self.plant(rig, 3)
        rig.keeper.keep()

        assert ([2, 3] if is_gone else [1, 2, 3]) == self.left(rig)

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"[" * 10_000, b'{"pid":"x"}', b"\xff", b'{"pid":1e400}']
    )
    def test_not_a_black_box(self, content: bytes, tmp_path: Path) -> None:
        """A file that cannot be read goes once it is old, and is nobody's error."""
        rig = Rig(tmp_path)
        for number in (1, 2, 3, 4):
            self.plant(rig, number, 900 if number == 1 else 0)
        for number in (1, 2):
            path = rig.boxes.path / self.name(number)
            modified_ns = path.stat().st_mtime_ns
            path.write_bytes(content)
            os.utime(path, ns=(modified_ns, modified_ns))
        rig.keeper.keep()

        assert [2, 3, 4] == self.left(rig)

    def test_what_is_not_ours_stays(self, tmp_path: Path) -> None:
        """Other names, links and FIFOs stay."""
        rig = Rig(tmp_path)
        for number in (1, 2, 3, 4):
            self.plant(rig, number, 900, ended={"how": "clean"})
        (tmp_path / "mine").write_text("{}")
        planted = {"notes.json", "notes.json.tmp", self.name(7), self.name(8)}
        (rig.boxes.path / "notes.json").write_text("mine")
        (rig.boxes.path / "notes.json.tmp").write_text("mine")
        os.utime(rig.boxes.path / "notes.json.tmp", (0, 0))
        (rig.boxes.path / self.name(7)).symlink_to(tmp_path / "mine")
        os.mkfifo(rig.boxes.path / self.name(8))
        rig.keeper.keep()

        assert {*planted, self.name(3), self.name(4)} == set(os.listdir(rig.boxes.path))

    def test_a_very_large_file(self, tmp_path: Path) -> None:
        """A file that is larger than a black box can be is not read, and goes once it is old."""
        rig = Rig(tmp_path)
        for number in (1, 2, 3, 4):
            self.plant(rig, number)
            if number < 3:
                os.truncate(rig.boxes.path / self.name(number), 2**40)
        os.utime(rig.boxes.path / self.name(1), (0, 0))
        os.utime(rig.boxes.path / self.name(2), ns=(clock.wall(), clock.wall() - 10**9))
        rig.keeper.keep()

        assert [2, 3, 4] == self.left(rig)

    def test_leftovers_of_dead_writers(self, tmp_path: Path) -> None:
        """Half-written black boxes that are old are removed; young ones belong to somebody."""
        rig = Rig(tmp_path)
        rig.boxes.make()
        for number in (1, 2):
            (rig.boxes.path / f"{self.name(number)}.tmp").write_text("{")
        os.utime(rig.boxes.path / f"{self.name(1)}.tmp", (0, 0))
        rig.keeper.keep()

        assert {f"{self.name(2)}.tmp"} == set(os.listdir(rig.boxes.path))

    def test_a_folder_of_somebody_else(self, tmp_path: Path) -> None:
        """From a folder that we did not make nothing is removed."""
        rig = Rig(tmp_path)
        rig.boxes.path.mkdir()
        (rig.boxes.path / f"{self.name(9)}.tmp").write_text("{")
        os.utime(rig.boxes.path / f"{self.name(9)}.tmp", (0, 0))
        for number in (1, 2, 3, 4):
            self.plant(rig, number, 900, ended={"how": "clean"})
        rig.keeper.keep()

        assert 5 == len(os.listdir(rig.boxes.path))

    def test_they_are_looked_at_now_and_then(self, tmp_path: Path) -> None:
        """Black boxes are looked at in the beginning, after many flushes, and at the end."""
        rig = Rig(tmp_path)

        def dies(*numbers: int) -> list[int]:
            for number in numbers:
                self.plant(rig, number, ended={"how": "clean"})
            rig.tick()
            return self.left(rig)

        assert [2, 3] == dies(1, 2, 3)
        assert [2, 3, 4] == dies(4)
        for _ in range(keepers.BOXES_EVERY):
            rig.tick()
        assert [3, 4] == self.left(rig)
        self.plant(rig, 5, ended={"how": "clean"})
        rig.keeper.keep(is_last=True)
        assert [4, 5] == self.left(rig)


def test_no_folder_is_no_problem(tmp_path: Path) -> None:
    """A folder that is not there, or was removed, is no problem."""
    rig = Rig(tmp_path)
    (rig.folder.path.parent / files.MADE).unlink()
    rig.folder.path.rmdir()
    rig.tick()

    assert rig.keeper.problem is None


def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    """What keeps the folder from being looked at is said."""
    rig = Rig(tmp_path)
    (rig.folder.path.parent / files.MADE).unlink()
    rig.folder.path.rmdir()
    rig.folder.path.write_text("a file")
    rig.tick()

    assert "Not a directory" == rig.keeper.problem


class TestThread:
    def test_the_end_has_a_last_look(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is ripe at the end is merged, and the thread ends."""
        monkeypatch.setattr(keepers, "MERGE_FILES", 4)
        rig = Rig(tmp_path)
        rig.keeper.start()
        rig.put(*(batch(number) for number in range(1, 5)))
        rig.keeper.close(clock.now() + 10**10)

        assert (1, [1, 2, 3, 4]) == (len(rig.files()), rig.indices())
        assert [] == [each.name for each in threading.enumerate() if "keeper" in each.name]

    def test_a_disk_that_hangs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Neither a note of a file, nor a tick, nor the end waits for a folder that hangs."""
        release = threading.Event()
        entries = files.Folder.entries

        def hang(self: files.Folder, suffix: str = "") -> Iterator[files.Entry]:
            release.wait(10)
            return entries(self, suffix)

        rig = Rig(tmp_path, max_bytes=1)
        monkeypatch.setattr(files.Folder, "entries", hang)
        rig.keeper.start()
        began = time.monotonic()
        for number in range(50):
            rig.put(batch(number))
            rig.keeper.tick()
        rig.keeper.close(clock.now() + 10**11)
        took_s = time.monotonic() - began
        release.set()

        assert took_s < 3
