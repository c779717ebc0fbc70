"""The runs that a server shows, kept up to date by the thread `cirron-served`.

The thread reads the folders, runs the compactor, and tells the hub which runs have changed. Queries
use the `Place` from any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from cirron import errors
from cirron.record import clock
from cirron.runs.place import Place, find_all
from cirron.runs.store import MANIFESTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cirron.server.compactor import Compactor
    from cirron.server.depot import Depot
    from cirron.server.events import Hub

logger = logging.getLogger("cirron.server")

POLL_S = 0.2
BUCKET_POLL_S = 1.0
# Batches that arrive together are stored together: a round has a fixed cost.
GATHER_S = 0.05
FAILED_S = 2.0


class Served:
    """The folders and the depot of a server, as one `Place`."""

    def __init__(
        self, folders: Sequence[str], depot: Depot, compactor: Compactor, hub: Hub
    ) -> None:
        self._folders = list(folders)
        self._depot = depot
        self._compactor = compactor
        self._hub = hub
        self._wake = threading.Event()
        self._is_stopping = False
        self.is_read = threading.Event()  # set when everything has been read once
        self._states: dict[str, object] = {}  # by run; changes when the run does
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
        """Called when a batch arrives."""
        self._wake.set()

    # -- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        is_local = self._depot.folder is not None and not any("://" in one for one in self._folders)
        while not self._is_stopping:
            pause_s = POLL_S if is_local else BUCKET_POLL_S
            try:
                began_ns = clock.now()
                # A client writes its spool before it sends. If its folder is shown, too, the look
                # finds each of these batches there, and the compactor drops the second copy.
                waiting = self._depot.waiting()
                if waiting and self._folders:
                    self._look()
                is_more = self._compactor.run(waiting, self.place.folder_stores)
                self._look()
                self.is_read.set()
                # A place that takes long to read must not use a whole core.
                took_s = (clock.now() - began_ns) / 1e9
                pause_s = 0.0 if is_more else max(pause_s, min(took_s, 5.0))
            except Exception:  # keeps the thread alive: a disk that fails now may recover
                logger.exception("the runs could not be updated")
                pause_s = FAILED_S
            if self._wake.wait(pause_s):
                time.sleep(GATHER_S)
                self._wake.clear()

    def _look(self) -> None:
        where = [found for one in self._folders for found in _there(one)]
        if self._depot.where not in where and self._depot.objects.list(MANIFESTS):
            where.append(self._depot.where)
        if where != self.place.where:
            self.place = Place(where, may_be_empty=True)
        elif not self.place.refresh():
            return
        self._tell()

    def _tell(self) -> None:
        """Publishes which runs have changed, with a new version each."""
        segments: dict[str, list[str]] = {}
        for store in self.place.stores:
            for segment in store.manifest.segments:
                segments.setdefault(segment.run_id, []).append(segment.id)
        events: list[dict[str, Any]] = []
        before = self._states
        self._states = {
            run_id: (
                sorted(segments.get(run_id, ())),
                [(one.key, one.state, one.last_ns) for one in self.place.run(run_id).sessions],
            )
            for run_id in self.place.runs
        }
        if before.keys() != self._states.keys():
            events.append({"kind": "runs"})
        for run_id, state in self._states.items():
            if before.get(run_id) != state:
                version = self.versions.get(run_id, 0) + 1
                self.versions[run_id] = version
                events.append({"kind": "run", "id": run_id, "version": version})
        self._hub.publish(events)


def _there(where: str) -> list[str]:
    """The stores and the folders with records, if they exist by now."""
    try:
        return find_all(where)
    except errors.UnknownRunError:
        return []
