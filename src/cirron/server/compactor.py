"""From the inbox into the store: a round of batches at a time, then their objects go.

Any number of these may work on one depot, and be killed at any moment: a batch is in the inbox
until a manifest is committed that names the segment with its records, and one that is in both is
known by its id. Runs on one thread.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from duckdb import Error as DatabaseError
from duckdb import IOException

from cirron.record import clock
from cirron.runs import engine
from cirron.runs import store as stores
from cirron.runs.ingest import Ingest
from cirron.runs.scan import SpoolSource
from cirron.server.depot import INBOX, REFUSED

if TYPE_CHECKING:
    from pathlib import Path

    from cirron.server.depot import Depot

# Of the inbox at once: what a kill makes us do again.
ROUND_BYTES = 64 * 2**20
MEMORY = "1GB"
CLEAN_S = 300.0
# Replaced files stay so long, for readers that are under way.
GRACE_S = 600.0
LINK_DAYS_S = 2 * 86_400.0


class Compactor:
    """Brings what clients sent into the store."""

    def __init__(self, depot: Depot) -> None:
        self._depot = depot
        self._db = engine.duckdb()
        self._db.execute(f"SET memory_limit = '{MEMORY}'; SET temp_directory = '{depot.scratch}'")
        self.store = stores.Store.open(depot.where, depot.scratch)
        self._round_bytes = ROUND_BYTES
        self._cleaned_ns = clock.now()

    def run(self) -> bool:
        """One round. True: the store has changed, and there may be more to do."""
        self._clean()
        waiting = self._depot.objects.sizes(INBOX)
        if not waiting:
            return self.store.tidy(self._db)
        taken: list[str] = []
        size = 0
        for name in sorted(waiting):
            if taken and size + waiting[name] > self._round_bytes:
                break
            taken.append(name)
            size += waiting[name]
        folder = self._depot.scratch / clock.random_id()
        os.mkdir(folder, mode=0o700)
        self.store.scratch = folder  # goes with what a full disk keeps us from finishing
        try:
            return self._run(taken, size, folder)
        finally:
            self.store.scratch = self._depot.scratch  # for what is tidied between rounds
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, taken: list[str], size: int, folder: Path) -> bool:
        for name in taken:
            self._fetch(name, folder / name.removeprefix(INBOX))
        source = SpoolSource(folder, [], whose=INBOX)
        self.store.manifest = stores.newest(self.store.objects)
        try:
            Ingest(self.store, self._db).run([source])
        except IOException:  # the disk, or the store: no batch's fault, and over some time
            raise
        except DatabaseError as error:
            if len(taken) > 1:  # one of them is bad: which?
                self._round_bytes = size // 2
                return True
            source.problems.append(f"{taken[0].removeprefix(INBOX)}: {error}")
        self._round_bytes = min(ROUND_BYTES, max(self._round_bytes, 2**16) * 2)
        stored = self._stored([_batch_id(name) for name in taken])
        bad = {problem.partition(":")[0] for problem in source.problems}
        for name in taken:
            if _batch_id(name) in stored:
                self._depot.objects.remove(name)
            elif name.removeprefix(INBOX) in bad:  # kept, for it was acknowledged
                self._refuse(name)
        self.store.tidy(self._db)
        return True

    def _fetch(self, name: str, path: Path) -> None:
        try:
            if self._depot.folder is not None:
                os.link(self._depot.folder / name, path)
            else:
                path.write_bytes(self._depot.objects.read(name))
        except FileNotFoundError:  # another compactor was first
            pass

    def _stored(self, batch_ids: list[str]) -> set[str]:
        """Which of these the store has. Asked of the store: to the questions on a run, which Spark
        answers, too, there are no batches.
        """
        sql, given = stores.select("batches", self.store.files("batches"))
        rows = self._db.execute(
            f"SELECT DISTINCT batch_id FROM ({sql})"  # noqa: S608  our own; what is sent is bound
            " WHERE batch_id IN (SELECT unnest($ids))",
            {**given, "ids": batch_ids},
        ).fetchall()
        return {batch_id for (batch_id,) in rows}

    def _refuse(self, name: str) -> None:
        content = self._depot.read(name)
        if content is not None:
            self._depot.add(REFUSED + name.removeprefix(INBOX), [content])
            self._depot.objects.remove(name)

    def _clean(self) -> None:
        """Removes what nothing names any more, from time to time."""
        if clock.now() - self._cleaned_ns < CLEAN_S * 1e9:
            return
        self._cleaned_ns = clock.now()
        self.store.clean(GRACE_S)
        self._depot.clean()
        for name in self._depot.objects.list("links/"):
            if self._depot.objects.age_s(name) > LINK_DAYS_S:
                self._depot.objects.remove(name)


def _batch_id(name: str) -> str:
    return name.removeprefix(INBOX).removesuffix(".json")
