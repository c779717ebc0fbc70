"""Sends what dead processes left behind, and checks whether the endpoint answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cirron._version import __version__
from cirron.record import clock
from cirron.ship.outbox import DiskOutbox
from cirron.ship.sinks.http import HttpSink, Verdict, judge
from cirron.ship.threads import Worker, sleep

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOOK_S = 0.05
REACH_S = 5.0


def send(
    root: Path,
    endpoint: str,
    api_key: str,
    *,
    wait_s: float,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, object]:
    """Sends what is pending in this folder, until everything is sent, the endpoint refuses, or the
    time is up. `told` is called with the numbers of sent and of all batches.
    """
    outbox = DiskOutbox(root, clock.random_id()[:16])
    sink = HttpSink(endpoint, api_key, outbox, sdk_version=__version__, is_patient=True)
    sink.start()
    deadline_ns = clock.now() + int(wait_s * 1e9)
    closing = Worker(lambda: sink.close(deadline_ns), "cirron-send")
    closing.start()
    while closing.is_alive:
        told(sink.sent, sink.sent + len(outbox))
        sink.tick()  # aborts a request that takes too long
        sleep(LOOK_S)
    found = sink.health()
    return {
        "sent": found["http_sent"],
        "left": len(outbox),
        "rejected": found["http_rejected"],
        "unreadable": found["http_unreadable"],
        "blobs_lost": found["http_blobs_lost"],
        "error": found["http_last_error"],
    }


# What to do about an answer; for any other, check the address.
MENDS = {
    Verdict.BAD_KEY: "export CIRRON_API_KEY=...",
    Verdict.BAD_PROXY: "export HTTPS_PROXY=http://name:password@host:port",
    Verdict.BUSY: "try again later",
    Verdict.FAILING: "try again later",
}


def reach(endpoint: str, api_key: str | None) -> tuple[str, str] | None:
    """Why the endpoint would not accept batches, and what to do about it; None: it would.

    Sends an empty batch: a server that refuses it as invalid is there, and accepts the key.
    """
    from cirron.ship.connection import Connection

    connection = Connection(endpoint, request_s=REACH_S, now=clock.now)
    key = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    headers = {"Content-Type": "application/json", "Content-Length": "2", **key}
    try:
        answer = judge(connection.request("POST", "/api/traces", headers, b"{}"))
    finally:
        connection.close()
    if answer.verdict in (Verdict.ACCEPTED, Verdict.REFUSED):
        return None
    if answer.verdict is Verdict.BAD_KEY and api_key is None:
        return None
    return answer.reason, MENDS.get(answer.verdict, "export CIRRON_API_ENDPOINT=https://...")
