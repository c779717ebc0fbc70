"""Shared by all tests: our own mistakes are raised, and no session outlives its test."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

import cirron as ci
from cirron import guard, session, wire
from cirron.record import hot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import TypeAlias

    Made: TypeAlias = Callable[..., "MadeSession"]

# On a busy machine, generated examples take long, which is not a failure.
hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy")

# What settings and identity are read from.
MACHINE = (
    "CIRRON_",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "SLURM_",
    "TORCHELASTIC_",
    "OMPI_",
    "PMI_",
)


def pytest_sessionstart() -> None:
    """Ctrl-C is what it is in a terminal: pytest-xdist ignores it, and so would our children."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    """Each test starts in an empty folder with no session and no settings of the machine's."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(MACHINE):
            monkeypatch.delenv(name)
    monkeypatch.setattr(guard, "strict", True)
    monkeypatch.setattr(guard, "relay", None)  # warnings of background threads are said at once
    guard.errors.clear()
    yield
    ci.shutdown()
    hot.leave_context()
    hot.ring.clear()
    hot.opened.clear()
    session._memory.clear()
    session._recorded = None


class MadeSession:
    """A session made by hand: records at given times, in ns after `START_NS`."""

    START_NS = 1_790_000_000_000_000_000

    def __init__(
        self,
        folder: Path,
        number: int,
        *,
        run_id: str = "made",
        attempt: int = 0,
        rank: int | None = 0,
        start: int = 0,
        uncertainty_ns: int = 5,
    ) -> None:
        self._folder = folder
        self._number = number
        self._ids = 0
        self.info = wire.Session(
            id=f"{number:032x}",
            run_id=run_id,
            attempt=attempt,
            host="node",
            pid=100 + number,
            rank=rank,
            local_rank=rank,
            world_size=None,
            clock=wire.Clock(self.START_NS + start, 0, uncertainty_ns),
        )
        self.spans: list[wire.Span] = []
        self.marks: list[wire.Mark] = []
        self.snapshots: list[wire.Snapshot] = []

    def _id(self) -> str:
        self._ids += 1
        return f"{self._number:016x}{self._ids:016x}"

    def span(
        self,
        name: str,
        start: int,
        end: int | None,
        parent: wire.Span | None = None,
        index: int | None = None,
        *,
        thread: int = 1,
        cpu_ns: int | None = None,
        gpu_ns: int | None = None,
        memory: int | None = None,
        **attrs: Any,
    ) -> wire.Span:
        one = wire.Span(
            self._id(),
            name,
            None if parent is None else parent.id,
            index,
            self.START_NS + start,
            None if end is None else self.START_NS + end,
            cpu_ns,
            gpu_ns,
            memory,
            thread,
            self.info.pid,
            self.info.rank,
            attrs,
            [],
        )
        self.spans.append(one)
        return one

    def mark(
        self, span: wire.Span, name: str, value: float | str, at: int, kind: str = "point"
    ) -> None:
        nonfinite = None
        type_ = {bool: "bool", int: "int", float: "float", str: "string"}[type(value)]
        kept: float | str | None = value
        if isinstance(value, float) and not abs(value) < float("inf"):
            nonfinite, kept = str(value), None
        self.marks.append(
            wire.Mark(
                self._id(), span.id, name, type_, kept, {}, self.START_NS + at, kind, nonfinite
            )
        )

    def snapshot(self, span: wire.Span, tensor: str, norm: float | None, at: int) -> None:
        histogram = wire.Histogram([0.0] * 17, [0] * 16)
        stats = wire.Stats(0.5, 0.1, -1.0, 1.0, norm, histogram)
        self.snapshots.append(
            wire.Snapshot(
                self._id(),
                span.id,
                tensor,
                [2, 3],
                "float32",
                "stats",
                stats,
                None,
                self.START_NS + at,
                {},
            )
        )

    def write(self) -> MadeSession:
        """Writes all of it as one batch into the spool of the folder."""
        spool = self._folder / ".cirron" / "spool"
        spool.mkdir(parents=True, exist_ok=True)
        batch = wire.Batch(
            schema_version=1,
            sdk_version="made",
            batch_id=f"{self._number:032x}",
            created_ns=self.info.clock.wall_ns,
            session=self.info,
            spans=self.spans,
            marks=self.marks,
            snapshots=self.snapshots,
        )
        path = spool / f"{batch.created_ns:020d}-{batch.batch_id}.json"
        path.write_bytes(wire.encode(batch))
        return self


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Makes sessions, whose records `write` puts into the test's folder."""
    count = 0

    def make(folder: Path = tmp_path, **given: Any) -> MadeSession:
        nonlocal count
        count += 1
        return MadeSession(folder, count, **given)

    return make
