"""How much `cirron serve` takes in, and how soon it is told: `python bench/server.py`.

A server on one core is sent a run (`spools.py` makes it) by clients on the others. A span counts
when its batch is acknowledged, and again when it is in the store. Its rate is by the CPU time of
the server, since a shared machine says little by the clock; that is printed too. Then a program
records and sends, with the flush interval that it has by default, and each mark is timed from
`ci.mark` to the answer of the server that has it. Writes `bench/results/server.json`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gzip
import http.client
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import spools

RESULTS = Path(__file__).parent / "results" / "server.json"
SENDERS = 4
RANKS = 8
MARKS = 20

RECORDING = """
import time
import cirron as ci
ci.profile()
for number in ci.batches(range(100_000)):
    ci.mark("loss", number)
    time.sleep(0.1)
"""


class Server:
    def __init__(self, folder: Path, role: str = "all", cores: set[int] | None = None) -> None:
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "cirron", "serve", "--port", "0", "--no-browser"]
        command += ["--role", role]
        self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
        if cores:
            os.sched_setaffinity(self.process.pid, cores)
        self.link = self.process.stdout.readline().strip()
        self.key = re.search(r"CIRRON_API_KEY=(\S+)", self.process.stdout.readline())[1]
        self.address = self.link.partition("/?")[0]
        self.host = self.address.removeprefix("http://")
        self.depot = folder / ".cirron" / "server"

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024

    def inbox(self) -> int:
        return len(list(self.depot.glob("inbox/*.json")))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def send(server: Server, bodies: list[bytes]) -> None:
    connection = http.client.HTTPConnection(server.host, timeout=120)
    headers = {"Authorization": f"Bearer {server.key}", "Content-Encoding": "gzip"}
    for body in bodies:
        while True:
            connection.request("POST", "/api/traces", body, headers)
            answer = connection.getresponse()
            answer.read()
            if answer.status == 200:
                break
            assert answer.status == 429, answer.status
            time.sleep(float(answer.headers["Retry-After"]))


def ingest(folder: Path, role: str, spans: int, bodies: list[bytes]) -> dict:
    """`role` "ingest": with nobody who stores, what a process at the door takes."""
    server = Server(folder / role, role, {max(os.sched_getaffinity(0))})
    try:
        before, began = server.cpu_s(), time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(SENDERS) as pool:
            list(pool.map(lambda at: send(server, bodies[at::SENDERS]), range(SENDERS)))
        acknowledged_s = time.perf_counter() - began
        while role == "all" and server.inbox():
            time.sleep(0.05)
        cpu_s, took_s = server.cpu_s() - before, time.perf_counter() - began
        return {
            "acknowledged_s": acknowledged_s,
            "took_s": took_s,
            "cpu_s": cpu_s,
            "spans_per_cpu_s": spans / cpu_s,
            "spans_per_s": spans / took_s,
            "peak_mb": server.memory_mb(),
        }
    finally:
        server.stop()


def live(folder: Path) -> dict:
    """From `ci.mark` to the event that says that it is there, and to an answer that has it."""
    server = Server(folder / "live")
    (folder / "live" / "elsewhere" / "deep").mkdir(parents=True)
    connection = http.client.HTTPConnection(server.host, timeout=60)
    connection.request("GET", server.link.removeprefix(server.address))
    answer = connection.getresponse()
    answer.read()
    headers = {"Cookie": answer.headers["Set-Cookie"].partition(";")[0]}
    program = subprocess.Popen(
        [sys.executable, "-c", RECORDING],
        cwd=folder / "live" / "elsewhere" / "deep",
        env=os.environ | {"CIRRON_API_ENDPOINT": server.address, "CIRRON_API_KEY": server.key},
    )
    asking = http.client.HTTPConnection(server.host, timeout=60)
    events = []
    try:
        connection.request("GET", "/api/events", headers=headers)
        stream = connection.getresponse()
        seen = 0
        while len(events) < MARKS:
            line = stream.readline()
            if b'"kind":"run"' not in line:
                continue
            told = time.time()
            asking.request("GET", "/api/runs", headers=headers)
            found = json.loads(asking.getresponse().read())["runs"][0]
            newest = found["started_ms"] * 1_000_000 + found["wall_ns"]
            answered = time.time()
            if newest > seen:
                # The first mark of the flush waited longest: an interval longer than the last.
                seen = newest
                events.append((told - newest / 1e9, answered - newest / 1e9))
    finally:
        program.kill()
        program.wait()
        server.stop()
    told, answered = (sorted(one) for one in zip(*events, strict=True))
    return {
        "flush_interval_s": 1.0,
        "last_mark_told_median_s": told[len(told) // 2],
        "last_mark_answered_median_s": answered[len(answered) // 2],
        "last_mark_answered_worst_s": answered[-1],
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--spans", type=int, default=1_000_000)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spool = folder / "sent"
        spool.mkdir()
        for rank in range(RANKS):
            times = spools.alone(rank, slow=False)
            spools.write_rank(spool, "sent", rank, RANKS, given.spans // RANKS, times)
        bodies = [gzip.compress(one.read_bytes(), 1) for one in sorted(spool.glob("*.json"))]
        figures = {
            "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
            "load": os.getloadavg()[0],
            "spans": given.spans,
            "batches": len(bodies),
            "sent_mb": sum(map(len, bodies)) / 2**20,
            "live": live(folder),
            "stored": ingest(folder, "all", given.spans, bodies),
            "acknowledged": ingest(folder, "ingest", given.spans, bodies),
        }
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
