"""The records in a spool, from its files alone: no store, and none of the code that reads runs.

Each counts once, by its id. A file that is no batch of ours fails the test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cirron import wire

if TYPE_CHECKING:
    from pathlib import Path


class Recorded:
    """What the batches of a session hold."""

    def __init__(self, session: wire.Session) -> None:
        self.session = session
        self._records: dict[str, dict[str, Any]] = {"spans": {}, "marks": {}, "snapshots": {}}

    def add(self, batch: wire.Batch, session: wire.Session) -> None:
        for kind, records in self._records.items():
            for record in getattr(batch, kind):
                records.setdefault(record.id, record)
        if session.clock.wall_ns <= self.session.clock.wall_ns:  # a forked process begins later
            self.session = session  # the last knows the most

    @property
    def spans(self) -> list[wire.Span]:
        return list(self._records["spans"].values())

    @property
    def marks(self) -> list[wire.Mark]:
        return list(self._records["marks"].values())

    @property
    def snapshots(self) -> list[wire.Snapshot]:
        return list(self._records["snapshots"].values())

    @property
    def program(self) -> wire.Program:
        assert isinstance(self.session.program, wire.Program)
        return self.session.program


def read(home: Path) -> list[Recorded]:
    """The sessions in a folder, by start."""
    found: dict[str, Recorded] = {}
    for path in sorted((home / "spool").glob("*.json")):
        try:
            batch = msgspec.json.decode(path.read_bytes(), type=wire.Batch)
        except FileNotFoundError:  # merged meanwhile
            return read(home)
        assert batch.session is not None, path
        found.setdefault(batch.session.id, Recorded(batch.session)).add(batch, batch.session)
    return sorted(found.values(), key=lambda one: one.session.clock.wall_ns)


def read_one(home: Path) -> Recorded:
    """The only session in a folder."""
    (one,) = read(home)
    return one
