"""The spool: whole files, in order, on a thread of its own, and a disk that refuses or hangs."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests import spools

from cirron import files, guard, system, wire
from cirron.record import clock
from cirron.ship.keeper import Keeper
from cirron.ship.sinks import spool as sinks
from cirron.ship.sinks.base import Outcome, Sealed, Sink
from cirron.ship.sinks.spool import Spool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PATIENCE_NS = 10 * 10**9

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


def batch(number: int) -> Sealed:
    span = wire.Span(f"{number:032x}", "", None, number, 1, 2, None, None, None, 1, 1, None, {}, [])
    mark = wire.Mark(f"m{number}", span.id, "loss", "float", 0.5, {}, 1, "point")
    sections = wire.Sections([wire.encode_records([span])], [wire.encode_records([mark])])
    return Sealed(header(number), sections, records=2)


class Rig:
    """A spool with a keeper that has room for everything."""

    def __init__(
        self,
        root: Path,
        sender: Sink | None = None,
        announce: Callable[[], None] = lambda: None,
        has_started: bool = True,
    ) -> None:
        folder = files.Folder(root / "spool", files.BATCH)
        boxes = files.Folder(root / "blackbox", files.BLACK_BOX)
        keeper = Keeper(folder, boxes, max_bytes=10**9, host="h", header=lambda: header(10**6))
        self.spool = Spool(folder, keeper, sender, announce)
        if has_started:
            self.spool.start()
        self.root = root

    def emit(self, *numbers: int) -> None:
        """Hands batches over, and waits until they are written or refused."""
        for number in numbers:
            assert Outcome.HELD is self.spool.emit(batch(number))
        self.spool.settle(clock.now() + PATIENCE_NS)

    def files(self) -> list[str]:
        found = os.listdir(self.root / "spool") if (self.root / "spool").exists() else []
        return sorted(found)

    def indices(self) -> list[Any]:
        """What a reader finds, span by span, in the order of the files."""
        return [span.index for run in spools.read(self.root) for span in run.spans]

    def counts(self) -> tuple[int, int, int]:
        """Records on disk, held, lost."""
        return self.spool.written_records, self.spool.held_records, self.spool.lost_records


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(tmp_path, **options))
        return rigs[-1]

    yield make
    for each in rigs:
        each.spool.close(clock.now() + PATIENCE_NS)


class Disk:
    """Refuses or hangs, as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self.is_hung = False
        self.at_it = threading.Event()
        self.go_on = threading.Event()
        self._write_all = system.write_all
        monkeypatch.setattr(system, "write_all", self.write_all)

    def write_all(self, file: int, pieces: list[bytes]) -> None:
        if self.is_hung:
            self.at_it.set()
            self.go_on.wait(PATIENCE_NS / 1e9)
        if self.is_full:
            os.write(file, b"half")
            raise OSError(28, "No space left on device")
        self._write_all(file, pieces)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    found = Disk(monkeypatch)
    yield found
    found.is_full = False
    found.go_on.set()


def test_a_batch_is_a_file(rig: Any, tmp_path: Path) -> None:
    """A batch is one file, named by time and id, with the batch's own bytes."""
    made = rig()
    made.emit(7)

    (name,) = made.files()
    assert re.fullmatch(r"\d{20}-[0-9a-f]{32}\.json", name)
    assert f"01700000000000000007-{7:032x}.json" == name
    assert batch(7).payload == (tmp_path / "spool" / name).read_bytes()
    assert (2, 0, 0) == made.counts()


def test_names_sort_by_time(rig: Any) -> None:
    """Files sort by the time of their batches."""
    made = rig()
    made.emit(3, 20, 100)

    assert [3, 20, 100] == made.indices()


def test_a_failed_write_leaves_nothing(rig: Any, disk: Disk) -> None:
    """A write that fails half-way leaves no file; the batch is held and written later."""
    made = rig()
    disk.is_full = True
    made.emit(1, 2)
    assert ([], (0, 4, 0)) == (made.files(), made.counts())
    assert "No space left on device" == made.spool.health()["spool_problem"]

    disk.is_full = False
    made.spool.tick()
    made.spool.settle(clock.now() + PATIENCE_NS)
    assert ([1, 2], (4, 0, 0)) == (made.indices(), made.counts())
    assert (None, 0) == (
        made.spool.health()["spool_problem"],
        made.spool.health()["spool_held_bytes"],
    )


def test_a_problem_is_said_once(
    rig: Any, disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that refuses makes one warning, with the folder and a way out."""
    made = rig()
    disk.is_full = True
    for number in range(5):
        made.emit(number)

    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"cannot write to {tmp_path / 'spool'} (No space left on device)" in warning
    assert "ci.profile(path=...)" in warning


def test_settling_does_not_wait_for_the_interval(rig: Any, disk: Disk) -> None:
    """A disk that refuses is tried again and then not waited for, whoever else wakes the thread."""
    made = rig()
    disk.is_full = True
    made.emit(1)
    began = time.monotonic()
    for _ in range(5):
        made.spool.settle(clock.now() + PATIENCE_NS)

    assert time.monotonic() - began < 2


def test_what_is_held_is_bounded(rig: Any, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that refuses for long costs bounded memory: the oldest go, counted."""
    size = batch(1).size
    monkeypatch.setattr(sinks, "MAX_HELD_BYTES", 3 * size)
    made = rig()
    disk.is_full = True
    made.emit(1, 2, 3, 4, 5)
    health = made.spool.health()

    assert (2, 2 * size, 3 * size) == (
        health["spool_drop_count"],
        health["spool_dropped_bytes"],
        health["spool_held_bytes"],
    )
    assert (0, 6, 4) == made.counts()

    disk.is_full = False
    made.emit()
    assert [3, 4, 5] == made.indices()


def test_a_disk_that_is_too_slow_is_said_once(
    rig: Any, disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Records that a slow disk loses are said once, although no write has failed."""
    monkeypatch.setattr(sinks, "MAX_HELD_BYTES", batch(1).size)
    made = rig()
    disk.is_hung = True
    for number in (1, 2, 3, 4):
        made.spool.emit(batch(number))
    disk.go_on.set()
    made.emit()

    assert 1 == sum("more slowly than records arrive" in one for one in caplog.messages)


def test_what_is_held_at_the_end_is_counted(
    rig: Any, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    """What could not be written by the end is counted as dropped, and said."""
    made = rig()
    disk.is_full = True
    made.emit(1)
    made.spool.close(clock.now() + PATIENCE_NS)
    health = made.spool.health()

    assert (1, 0, (0, 0, 2)) == (
        health["spool_drop_count"],
        health["spool_held_bytes"],
        made.counts(),
    )
    assert "2 records are lost: " in caplog.text


def test_one_more_try_at_the_end(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system that fails once at the very end costs nothing."""
    made = rig()
    write_all, last_tries = system.write_all, []

    def stale(file: int, pieces: list[bytes]) -> None:
        last_tries.extend([1] * made.spool._worker.is_stopping)
        if len(last_tries) < 2:
            raise OSError(116, "Stale file handle")
        write_all(file, pieces)

    monkeypatch.setattr(system, "write_all", stale)
    made.emit(1)
    made.spool.close(clock.now() + PATIENCE_NS)

    assert ((2, 0, 0), [1]) == (made.counts(), made.indices())


def test_a_disk_that_hangs(rig: Any, disk: Disk) -> None:
    """Neither handing over, nor a settling, nor the end waits for a disk that hangs.

    What it has is held, and written if it goes on while there is a process.
    """
    made = rig()
    disk.is_hung = True
    began = time.monotonic()
    made.spool.emit(batch(1))
    assert disk.at_it.wait(PATIENCE_NS / 1e9)
    for number in range(2, 50):
        made.spool.emit(batch(number))
        made.spool.tick()
    made.spool.settle(clock.now() + 10**8)
    assert (0, 98, 0) == made.counts()

    made.spool.close(clock.now() + 10**8)
    assert ((0, 98, 0), True) == (made.counts(), time.monotonic() - began < 5)

    disk.go_on.set()
    wait_until(lambda: made.counts() == (98, 0, 0))
    assert list(range(1, 50)) == made.indices()


def test_what_is_written_after_all_is_not_lost(
    rig: Any, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that was given up while a slow disk wrote it counts as written, not as lost."""
    monkeypatch.setattr(sinks, "MAX_HELD_BYTES", batch(1).size)
    made = rig()
    made.emit(0)
    disk.is_hung = True
    made.spool.emit(batch(1))
    assert disk.at_it.wait(PATIENCE_NS / 1e9)
    made.spool.emit(batch(2))  # pushes the first one out
    assert (2, 2, 2) == made.counts()

    disk.go_on.set()
    made.emit()
    assert ([0, 1, 2], (6, 0, 0)) == (made.indices(), made.counts())
    assert (0, 0) == (
        made.spool.health()["spool_drop_count"],
        made.spool.health()["spool_dropped_bytes"],
    )


def test_announced_before_each_file(rig: Any) -> None:
    """A batch is announced before it is there: a process that dies in between leaves word of it."""
    seen: list[list[str]] = []
    made: Rig = rig(announce=lambda: seen.append(made.files()))
    for number in (1, 2, 3):
        made.emit(number)

    names = [batch(number).file_name for number in (1, 2, 3)]
    assert [names[:0], names[:1], names[:2]] == seen
    assert [1, 2, 3] == made.indices()


def test_an_announcement_that_fails(rig: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Where it cannot be announced, a batch is written all the same, and each is tried."""
    tried: list[None] = []

    def announce() -> None:
        tried.append(None)
        raise OSError(13, "Permission denied")

    made = rig(announce=announce)
    made.emit(1)
    made.emit(2)

    assert ([1, 2], 2) == (made.indices(), len(tried))
    assert ("", None) == (caplog.text, made.spool.health()["spool_problem"])


def test_the_folder_is_made_without_a_batch(rig: Any, tmp_path: Path) -> None:
    """A spool that is given nothing makes its folder all the same, and lists it as ours."""
    rig()
    wait_until(lambda: (tmp_path / files.MADE).exists())

    assert (tmp_path / "spool").is_dir()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_NS / 1e9
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_folder_that_is_removed(rig: Any, tmp_path: Path) -> None:
    """A spool folder that somebody deletes is made anew."""
    made = rig()
    made.emit(1)
    shutil.rmtree(tmp_path / "spool")
    made.emit(2)

    assert [2] == made.indices()


def test_a_mistake_does_not_end_it(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is raised on its thread, the batches are written later."""
    monkeypatch.setattr(guard, "strict", False)
    failing = iter([RuntimeError(), SystemExit()])

    def announce() -> None:
        if (error := next(failing, None)) is not None:
            raise error

    made = rig(announce=announce)
    made.emit(1, 2)
    made.emit(3)

    assert [1, 2, 3] == made.indices()
    assert {"spool: RuntimeError": 1, "spool: SystemExit": 1} == guard.errors


@pytest.mark.parametrize("has_started", [True, False])
def test_one_that_was_given_nothing(has_started: bool, tmp_path: Path) -> None:
    """A spool that was given nothing settles and closes at once, started or not."""
    made = Rig(tmp_path, has_started=has_started)
    began = time.monotonic()
    is_settled = made.spool.settle(clock.now() + PATIENCE_NS)
    made.spool.close(clock.now() + PATIENCE_NS)

    assert (True, [], True) == (is_settled, made.files(), time.monotonic() - began < 2)
    assert has_started is (tmp_path / "spool").exists()


class Sender(Sink):
    """Keeps what it is told, and what was on disk then."""

    def __init__(self, root: Path) -> None:
        self.got: list[tuple[int, bool]] = []
        self.calls: list[str] = []
        self._folder = root / "spool"

    def start(self) -> None:
        self.calls.append("start")

    def emit(self, batch: Sealed) -> Outcome:
        number = int(batch.batch_id, 16)
        self.got.append((number, (self._folder / batch.file_name).exists()))
        return Outcome.HELD

    def tick(self) -> None:
        self.calls.append("tick")

    def close(self, deadline_ns: int) -> None:
        self.calls.append("close")
        self.closed_by_ns = deadline_ns

    def after_fork(self) -> None:
        self.calls.append("after_fork")

    def health(self) -> dict[str, object]:
        return {"sent": len(self.got)}


class TestSender:
    """What sends batches on gets each of them from the spool."""

    def test_once_on_disk(self, tmp_path: Path, rig: Any) -> None:
        """The sender gets each batch once, in order, when it is on disk."""
        sender = Sender(tmp_path)
        made = rig(sender=sender)
        made.emit(1, 2)
        made.emit(3)

        assert [(1, True), (2, True), (3, True)] == sender.got

    def test_a_disk_that_refuses(self, tmp_path: Path, rig: Any, disk: Disk) -> None:
        """It gets a batch that the disk has refused too, and not again when it is on disk."""
        sender = Sender(tmp_path)
        made = rig(sender=sender)
        disk.is_full = True
        made.emit(1, 2)
        made.emit(3)
        refused = list(sender.got)
        disk.is_full = False
        made.emit(4)

        assert [(1, False), (2, False), (3, False)] == refused
        assert [*refused, (4, True)] == sender.got
        assert [1, 2, 3, 4] == made.indices()

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path, rig: Any) -> None:
        """Where there is no folder at all, it gets them as well."""
        (tmp_path / "spool").write_text("a file")
        sender = Sender(tmp_path)
        made = rig(sender=sender)
        made.emit(1, 2)

        assert [(1, False), (2, False)] == sender.got
        assert "Not a directory" == made.spool.health()["spool_problem"]
        (tmp_path / "spool").unlink()

    def test_what_was_given_up(
        self, tmp_path: Path, rig: Any, disk: Disk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What memory had no room for while the disk hung is lost for the sender too."""
        monkeypatch.setattr(sinks, "MAX_HELD_BYTES", batch(1).size)
        sender = Sender(tmp_path)
        made = rig(sender=sender)
        disk.is_hung = True
        made.spool.emit(batch(1))
        assert disk.at_it.wait(PATIENCE_NS / 1e9)
        made.spool.emit(batch(2))
        made.spool.emit(batch(3))
        disk.go_on.set()
        made.emit()

        assert [(1, True), (3, True)] == sender.got
        assert 2 == made.spool.lost_records

    def test_what_else_it_is_told(self, tmp_path: Path, rig: Any) -> None:
        """It starts, ticks and closes with the spool, and its counters are the spool's."""
        sender = Sender(tmp_path)
        made = rig(sender=sender)
        made.emit(1)
        made.spool.tick()
        made.spool.after_fork()
        latest_ns = clock.now() + PATIENCE_NS
        made.spool.close(latest_ns)

        assert ["start", "tick", "after_fork", "close"] == sender.calls
        assert sender.closed_by_ns <= clock.now() + sinks.SEND_NS < latest_ns
        assert 1 == made.spool.health()["sent"]
