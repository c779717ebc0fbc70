"""Kills and restarts two ingest servers and a page server over one store while ranks send.

python tests/real/server/server_kills.py [--rounds 100] [--ranks 8] [--seed 1]

Each rank sends batch after batch and tries each until it is acknowledged, as clients do. At the end
all that was acknowledged is in the store, once.
"""

from __future__ import annotations

import argparse
import collections
import http.client
import json
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cirron as ci

if TYPE_CHECKING:
    from tests.real.server.serving import Serving, batch, session, wait_until
else:
    from serving import Serving, batch, session, wait_until

KEY = "a-key-of-this-test"


class Fleet:
    """The servers; each keeps its port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.servers: dict[str, Serving] = {}
        for name in ("ingest-a", "ingest-b", "page"):
            (folder / name).mkdir()
            self.start(name)

    def start(self, name: str, port: int = 0) -> None:
        role = name.partition("-")[0]
        store = str(self._folder / "store")
        self.servers[name] = Serving(
            self._folder / name, "--role", role, "--store", store, port=port, CIRRON_API_KEY=KEY
        )

    def kill(self, name: str) -> None:
        server = self.servers[name]
        server.kill()
        self.start(name, server.port)

    def inbox(self) -> list[Path]:
        return list(self._folder.glob("store/inbox/*.json"))


class Rank(threading.Thread):
    """Sends until it is stopped, and counts what was acknowledged."""

    def __init__(self, fleet: Fleet, rank: int) -> None:
        super().__init__(daemon=True)
        self._fleet = fleet
        self._rank = rank
        self._who = session("killed", rank)
        self.acknowledged: list[dict[str, Any]] = []
        self.tries = 0
        self.is_stopping = False

    def run(self) -> None:
        while not self.is_stopping:
            content = batch(self._who, steps=5, first=5 * len(self.acknowledged))
            while not self._is_sent(content):
                time.sleep(0.05)
            self.acknowledged.append(content)

    def _is_sent(self, content: dict[str, Any]) -> bool:
        self.tries += 1
        name = ("ingest-a", "ingest-b")[(self._rank + self.tries) % 2]
        try:
            return self._fleet.servers[name].send(content, KEY).status == 200
        except (OSError, http.client.HTTPException):
            return False


def run(folder: Path, rounds: int, ranks: int, seed: int) -> dict[str, int]:
    """Kills servers, and returns what was sent. Raises if any of it is missing or stored twice."""
    pick = random.Random(seed)
    fleet = Fleet(folder)
    threads = [Rank(fleet, rank) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(rounds):
            time.sleep(pick.random())
            fleet.kill(pick.choice([*fleet.servers, "page"]))
    finally:
        for thread in threads:
            thread.is_stopping = True
    for thread in threads:
        thread.join(60)
    wait_until(lambda: not fleet.inbox(), "an empty inbox", 300)
    for server in fleet.servers.values():
        server.kill()

    sent = [one for thread in threads for one in thread.acknowledged]
    run = ci.open(folder / "store")
    for table in ("spans", "marks"):
        expected = collections.Counter(one["id"] for content in sent for one in content[table])
        found = collections.Counter(one["id"] for one in getattr(run, table).rows())
        assert expected == found, (
            f"{table}: {len(expected - found)} lost, {len(found - expected)} doubled or unknown"
        )
    refused = list(folder.glob("store/refused/*"))
    assert not refused, refused
    return {
        "rounds": rounds,
        "batches": len(sent),
        "tries": sum(thread.tries for thread in threads),
        "spans": sum(len(content["spans"]) for content in sent),
    }


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=100)
    arguments.add_argument("--ranks", type=int, default=8)
    arguments.add_argument("--seed", type=int, default=1)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(run(Path(name), given.rounds, given.ranks, given.seed)))
