"""The runs that a server shows, kept up to date by a thread: "cirron-served".

It brings the inbox into the store, looks at the folders, and tells the hub which runs have changed.
Views ask the `Place`, from any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from cirron import errors
from cirron.record import clock
from cirron.runs import folders
from cirron.runs.place import Place, is_store
from cirron.runs.store import MANIFESTS
from cirron.server.depot import INBOX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cirron.server.compactor import Compactor
    from cirron.server.depot import Depot
    from cirron.server.live import Hub

logger = logging.getLogger("cirron.server")

POLL_S = 0.2
BUCKET_POLL_S = 1.0
# Batches that come together are stored together: a round costs more than what is in it.
GATHER_S = 0.05
FAILED_S = 2.0


class Served:
    """Folders and a depot, as one `Place`."""

    def __init__(
        self, folders: Sequence[str], depot: Depot, compactor: Compactor, hub: Hub
    ) -> None:
        self._folders = list(folders)
        self._depot = depot
        self._compactor = compactor
        self._hub = hub
        self._wake = threading.Event()
        self._is_stopping = False
        self.is_read = threading.Event()  # whether all that was there at the start can be shown
        self._marks: dict[str, object] = {}
        self.boot = clock.random_id()[:8]
        self.versions: dict[str, int] = {}
        self.place = Place([], may_be_empty=True)
        self._thread = threading.Thread(target=self._run, name="cirron-served", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def wake(self) -> None:
        """There is something new."""
        self._wake.set()

    # -- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        is_local = self._depot.folder is not None and not any("://" in one for one in self._folders)
        while not self._is_stopping:
            pause_s = POLL_S if is_local else BUCKET_POLL_S
            try:
                began_ns = clock.now()
                # The inbox first: a program that sends writes its own folder before. When the
                # compactor runs, a watched folder's store lists the same batches.
                waiting = self._depot.objects.sizes(INBOX)
                self._look()
                is_more = self._compactor.run(waiting, self.place.folder_stores)
                self.is_read.set()
                # Not all of a core for a place that takes long to look at.
                took_s = (clock.now() - began_ns) / 1e9
                pause_s = 0.0 if is_more else max(pause_s, min(took_s, 5.0))
            except Exception:  # the thread must live: a disk that fails now may not later
                logger.exception("the runs could not be brought up to date")
                pause_s = FAILED_S
            if self._wake.wait(pause_s):
                time.sleep(GATHER_S)
                self._wake.clear()

    def _look(self) -> None:
        where = [found for one in self._folders for found in _there(one)]
        if self._depot.objects.list(MANIFESTS):
            where.append(self._depot.where)
        if where != self.place.where:
            self.place = Place(where, may_be_empty=True)
        elif not self.place.refresh():
            return
        self._tell()

    def _tell(self) -> None:
        """Counts up the versions of the runs that have changed, and says so."""
        segments: dict[str, list[str]] = {}
        for store in self.place.stores:
            for segment in store.manifest.segments:
                segments.setdefault(segment.run_id, []).append(segment.id)
        events: list[dict[str, Any]] = []
        before = self._marks
        self._marks = {
            run_id: (
                sorted(segments.get(run_id, ())),
                [(one.key, one.state, one.last_ns) for one in self.place.run(run_id).sessions],
            )
            for run_id in self.place.runs
        }
        if before.keys() != self._marks.keys():
            events.append({"kind": "runs"})
        for run_id, mark in self._marks.items():
            if before.get(run_id) != mark:
                version = self.versions.get(run_id, 0) + 1
                self.versions[run_id] = version
                events.append({"kind": "run", "id": run_id, "version": version})
        self._hub.publish(events)


def _there(where: str) -> list[str]:
    """The store, or the folders with records, that are there by now."""
    if is_store(where):
        return [where]
    try:
        return [str(one) for one in folders.find_all(where)]
    except errors.UnknownRunError:
        return []
