"""What was acknowledged gets into the store once, also after a shortage of disk or of files."""

from __future__ import annotations

import json
import os
import resource
import secrets
from typing import TYPE_CHECKING, Any

import pytest
from duckdb import IOException

from cirron.server.compactor import Compactor
from cirron.server.depot import Depot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.real.hostile.conftest import SmallDisk

NOW_NS = 1_790_000_000_000_000_000
SPANS = 20


def batch() -> tuple[str, bytes]:
    """The id of a batch, and the batch."""
    who = {
        "id": "5" * 32,
        "run_id": "run",
        "attempt": 0,
        "host": "h",
        "pid": 1,
        "rank": 0,
        "local_rank": 0,
        "world_size": 1,
        "clock": {"wall_ns": NOW_NS, "monotonic_ns": 1, "uncertainty_ns": 1},
    }
    empty = dict.fromkeys(("parent_id", "index", "cpu_ns", "gpu_ns", "memory_peak_bytes", "rank"))
    spans: list[dict[str, Any]] = [
        {
            **empty,
            "id": secrets.token_hex(16),
            "name": "step",
            "start_ns": NOW_NS,
            "end_ns": NOW_NS + 1,
            "thread_id": 1,
            "pid": 1,
            "attrs": {},
            "mark_ids": [],
        }
        for _ in range(SPANS)
    ]
    batch_id = secrets.token_hex(16)
    content = {
        "schema_version": 1,
        "sdk_version": "test",
        "batch_id": batch_id,
        "created_ns": NOW_NS,
        "session": who,
        "spans": spans,
        "marks": [],
        "snapshots": [],
    }
    return batch_id, json.dumps(content).encode()


class Keeping:
    """A depot and its compactor, and what was acknowledged."""

    def __init__(self, folder: Path) -> None:
        self.depot = Depot(folder)
        self.compactor = Compactor(self.depot)
        self.acknowledged: set[str] = set()
        self.troubles = 0

    def send(self, batch_id: str, payload: bytes) -> bool:
        """As the server takes it: acknowledged unless it raises, also where it is there already."""
        try:
            self.depot.add(f"inbox/{batch_id}.json", [payload])
        except OSError:
            return False
        self.acknowledged.add(batch_id)
        return True

    def compact(self) -> None:
        try:
            self.compactor.run()
        except Exception:  # noqa: BLE001  the server logs it, and tries again
            self.troubles += 1

    def settled(self) -> dict[str, Any]:
        """What there is in the end."""
        while self.compactor.run():
            pass
        sql = "SELECT count(*), count(DISTINCT id) FROM read_parquet($files)"
        files = {"files": self.compactor.store.files("spans")}
        spans = self.compactor._db.execute(sql, files).fetchone()
        sql = "SELECT DISTINCT batch_id FROM read_parquet($files)"
        files = {"files": self.compactor.store.files("batches")}
        return {
            "stored": {one for (one,) in self.compactor._db.execute(sql, files).fetchall()},
            "spans": spans,
            "left": self.depot.objects.list("inbox/") + self.depot.objects.list("refused/"),
        }

    def expected(self) -> dict[str, Any]:
        spans = len(self.acknowledged) * SPANS
        return {"stored": self.acknowledged, "spans": (spans, spans), "left": []}


@pytest.fixture
def few_files() -> Iterator[Callable[[int], None]]:
    """Lets this process open so many files more."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)

    def allow(more: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))  # to look there
        used = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, most))

    yield allow
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def test_too_many_open_files(tmp_path: Path, few_files: Callable[[int], None]) -> None:
    """A compactor that may open no more files puts nothing aside as bad, and goes on later."""
    keeping = Keeping(tmp_path / "depot")
    for more in range(0, 24, 3):
        assert keeping.send(*batch())
        few_files(more)
        keeping.compact()
        few_files(500)
        keeping.compact()

    assert keeping.troubles
    assert keeping.expected() == keeping.settled()


def no_more_files(path: Any, *_: object) -> int:
    if str(path).endswith(".json") and "manifest" not in str(path):
        raise OSError(24, "Too many open files")
    return int(os.open(path, os.O_RDONLY))


def failing_disk(*_: object) -> None:
    raise IOException("IO Error: Could not write file: No space left on device")


@pytest.mark.parametrize(
    ("name", "fails"),
    [
        ("cirron.system.open_regular", no_more_files),
        ("cirron.runs.ingest.Ingest._read", failing_disk),
    ],
)
def test_a_shortage_while_the_only_batch_is_read(
    name: str, fails: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that cannot be read just now, alone in its round, is not put aside as bad."""
    keeping = Keeping(tmp_path / "depot")
    assert keeping.send(*batch())
    with monkeypatch.context() as short:
        short.setattr(name, fails)
        keeping.compact()

    assert 1 == keeping.troubles
    assert keeping.expected() == keeping.settled()


def test_a_full_disk(small_disk: SmallDisk) -> None:
    """What did not fit is not acknowledged, at a second try either; nothing else is lost, and
    nothing half written stays.
    """
    keeping = Keeping(small_disk.folder / "depot")
    refused = 0
    for _ in range(6):
        assert keeping.send(*batch())
        small_disk.fill()
        late = batch()
        refused += sum(not keeping.send(*late) for _ in range(2))
        keeping.compact()
        keeping.compact()
        small_disk.free()

    assert refused
    assert keeping.troubles
    assert keeping.expected() == keeping.settled()
    assert [] == os.listdir(keeping.depot.scratch)


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that fails half way does not stand for the batch."""

    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    def half(source: Any, target: Any) -> None:
        target.write(source.read(100))
        raise OSError(28, "No space left on device")

    keeping = Keeping(tmp_path / "depot")
    monkeypatch.setattr(os, "link", no_links)
    late = batch()
    with monkeypatch.context() as full:
        full.setattr("shutil.copyfileobj", half)

        assert not keeping.send(*late)
    assert keeping.send(*late)
    monkeypatch.undo()

    assert keeping.expected() == keeping.settled()
