"""Moves batches from the inbox into the store, a round at a time.

Any number of compactors may work on one depot, and be killed at any moment: a batch stays in the
inbox until a manifest names the segment with its records, and a batch that is in both is recognised
by its id. A compactor runs on one thread.
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
    from collections.abc import Sequence
    from pathlib import Path

    from cirron.server.depot import Depot

ROUND_BYTES = 64 * 2**20  # work that a kill can waste
MEMORY = "1GB"
CLEAN_S = 300.0
GRACE_S = 600.0  # replaced files stay for running queries
LINK_DAYS_S = 2 * 86_400.0


class Compactor:
    """Moves received batches into the store."""

    def __init__(self, depot: Depot) -> None:
        self._depot = depot
        self._db = engine.duckdb()
        self._db.execute(f"SET memory_limit = '{MEMORY}'; SET temp_directory = '{depot.scratch}'")
        self.store = stores.Store.open(depot.where, depot.scratch)
        self._round_bytes = ROUND_BYTES
        self._cleaned_ns = clock.now()

    def run(
        self, waiting: dict[str, int] | None = None, others: Sequence[stores.Store] = ()
    ) -> bool:
        """One round: these batches of the inbox, by name and size, or all of them.

        Batches that one of the `others` lists are shown from there, and are only removed. Returns
        True if the store has changed, and there may be more to do.
        """
        self._clean()
        if waiting is None:
            waiting = self._depot.waiting()
        for name in self._stored(list(waiting), others) if waiting else ():
            self._depot.objects.remove(name)
            del waiting[name]
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
        self.store.scratch = folder  # deleted below, even if the disk is full
        try:
            return self._run(taken, size, folder)
        finally:
            self.store.scratch = self._depot.scratch  # for merges between rounds
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, taken: list[str], size: int, folder: Path) -> bool:
        for name in taken:
            content = self._depot.read(name)
            if content is not None:  # else another compactor has stored it
                (folder / name.removeprefix(INBOX)).write_bytes(content)
        source = SpoolSource(folder, [], whose=INBOX)
        self.store.manifest = stores.newest(self.store.objects)
        try:
            Ingest(self.store, self._db).run([source])
        except IOException:  # the disk or the store fails; the batches are fine
            raise
        except DatabaseError as error:
            if len(taken) > 1:  # find the bad batch with smaller rounds
                self._round_bytes = size // 2
                return True
            source.problems.append(f"{taken[0].removeprefix(INBOX)}: {error}")
        self._round_bytes = min(ROUND_BYTES, max(self._round_bytes, 2**16) * 2)
        stored = self._stored(taken, [self.store])
        bad = {problem.partition(":")[0] for problem in source.problems}
        refused = {name for name in taken if name.removeprefix(INBOX) in bad} - stored
        for name in stored:
            self._depot.objects.remove(name)
        for name in refused:  # was acknowledged, so it is kept
            self._refuse(name)
        return self.store.tidy(self._db) or bool(stored or refused)

    def _stored(self, names: list[str], where: Sequence[stores.Store]) -> set[str]:
        """The names of the batches that these stores have."""
        ids = [name.removeprefix(INBOX).removesuffix(".json") for name in names]
        return {f"{INBOX}{one}.json" for store in where for one in store.seen(self._db, among=ids)}

    def _refuse(self, name: str) -> None:
        content = self._depot.read(name)
        if content is not None:
            self._depot.add(REFUSED + name.removeprefix(INBOX), [content])
            self._depot.objects.remove(name)

    def _clean(self) -> None:
        """Deletes unused files and old links, every few minutes."""
        if clock.now() - self._cleaned_ns < CLEAN_S * 1e9:
            return
        self._cleaned_ns = clock.now()
        self.store.clean(GRACE_S)
        self._depot.clean()
        for name in self._depot.objects.list("links/"):
            if self._depot.objects.age_s(name) > LINK_DAYS_S:
                self._depot.objects.remove(name)
