"""Everything at once, for ten minutes: `SECONDS=600 python soak.py`.

One process records from threads, asyncio tasks and forked children, with odd attributes, and calls
flush(), trace() and health() all the while; its disk is full now and then, its endpoint misbehaves,
and SIGTERM comes, which it ignores. This program does that to it, reads each file as it appears,
and says at the end whether every record is accounted for: recorded = on disk + counted as lost;
nothing twice, nothing torn, files bounded, memory flat.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import gzip
import http.server
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

CAP_BYTES = 16 * 2**20
DISK_BYTES = 48 * 2**20
MAX_BOXES = 1_200
# The most that a call may take, on a busy machine; trace() makes a tree of all that it keeps.
CALLS_S = {"flush": 70.0, "health": 2.0, "trace": 10.0, "json": 10.0}
OURS = ("span ", "mark ")


# -- the process under attack -----------------------------------------------------------------


class Worker:
    """Records in every way there is, and knows how much."""

    def __init__(self, seconds: float, seed: int, folder: Path) -> None:
        import odd_values  # type: ignore[import-not-found]  # it lies beside this file

        self.stopping = threading.Event()
        self.seconds = seconds
        self.seed = seed
        self.folder = folder
        self.recorded: collections.Counter[str] = collections.Counter()  # by thread: no sharing
        self.slowest: dict[str, float] = {}
        self.faults: list[str] = []
        self.forks = 0
        self.values = [
            value
            for group in ("ordinary", "cyclic", "SystemExit")
            for _, value in odd_values.GROUPS[group]()
        ][::3]

    def attrs(self, dice: random.Random) -> dict[str, Any]:
        chance = dice.random()
        if chance < 0.5:
            return {}
        if chance < 0.9:
            return {"step": dice.randrange(10**6), "text": "x" * dice.randrange(100)}
        return {"odd": dice.choice(self.values), "list": [1, {"two": 2.0}]}

    def record(self, who: str, dice: random.Random, number: int) -> None:
        """An outer span with an inner one and two marks."""
        import cirron as ci

        with ci.scope(f"span {who}", number, **self.attrs(dice)) as span:
            ci.mark(f"mark {who}", number, **self.attrs(dice))
            with ci.scope(f"span {who} inner", number):
                ci.mark(f"mark {who}", dice.choice((0.5, 7, True, "text", float("nan"))))
            span.set(late=number)
        self.recorded[who] += 4

    def thread(self, number: int) -> None:
        dice = random.Random(self.seed * 100 + number)
        count = 0
        while not self.stopping.wait(dice.uniform(0.0, 0.02)):
            for _ in range(dice.randrange(4)):
                self.record(f"thread {number}", dice, count)
                count += 1

    def loop(self) -> None:
        dice = random.Random(self.seed * 100 + 50)

        async def task(number: int) -> None:
            import cirron as ci

            count = 0
            while not self.stopping.is_set():
                with ci.scope(f"span task {number}", count):
                    await asyncio.sleep(dice.uniform(0.0, 0.05))
                    ci.mark(f"mark task {number}", count)
                self.recorded["tasks"] += 2
                count += 1

        async def main() -> None:
            await asyncio.gather(*(task(number) for number in range(5)))

        asyncio.run(main())

    def caller(self) -> None:
        """Asks, at random, and notes how long the answer took."""
        import cirron as ci

        dice = random.Random(self.seed * 100 + 60)
        calls: dict[str, Callable[[], Any]] = {
            "flush": ci.flush,
            "health": ci.health,
            "trace": lambda: ci.trace(format="dict", last=50),
            "json": lambda: ci.trace(format="json", name="span thread 0", last=5),
        }
        while not self.stopping.wait(dice.uniform(0.05, 0.5)):
            name = dice.choice(list(calls))
            began = time.monotonic()
            calls[name]()
            self.slowest[name] = max(self.slowest.get(name, 0), time.monotonic() - began)

    def forker(self) -> None:
        dice = random.Random(self.seed * 100 + 70)
        while not self.stopping.wait(dice.uniform(0.5, 1.5)):
            pid = os.fork()
            if pid == 0:
                self.child(dice)
            self.forks += 1
            deadline = time.monotonic() + 35
            while os.waitpid(pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    self.faults.append(f"the child {pid} hung")
                    break
                time.sleep(0.01)

    def child(self, dice: random.Random) -> None:
        """Records a little, sees that it is on disk, says how much it was, and ends."""
        import cirron as ci

        try:
            self.recorded.clear()
            for number in range(dice.randrange(30)):
                self.record("child", dice, number)
            self.tell(ci)
            ci.shutdown()
        finally:
            os._exit(0)

    def tell(self, ci: Any) -> None:
        """Waits until nothing is held any more; writes what was recorded, and what is lost."""
        deadline = time.monotonic() + 30
        while True:
            outcome = ci.flush()
            health = ci.health()
            if outcome is None or not outcome.held or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        lost = health["record_drop_count"] if outcome is None else outcome.lost
        found = {
            "recorded": sum(self.recorded.values()),
            "lost": lost + health.get("mark_drop_count", 0) * (outcome is None),
            "why": None if outcome is None else outcome.why,
            "errors": health["errors"],
            "slowest": self.slowest,
            "forks": self.forks,
            "faults": self.faults,
        }
        partial = self.folder / "counts" / f"{os.getpid()}.tmp"
        partial.write_text(json.dumps(found))
        partial.rename(partial.with_suffix(".json"))

    def run(self, endpoint: str) -> None:
        import cirron as ci

        terms: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: terms.append(number))
        ci.Cirron(
            api_key="k",
            api_endpoint=endpoint,
            spool_max_bytes=CAP_BYTES,
            output_dir=str(self.folder / "disk" / ".cirron"),
        ).profile(flush_interval=0.1)
        targets: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
            *((self.thread, (number,)) for number in range(3)),
            *((target, ()) for target in (self.loop, self.caller, self.forker)),
        ]
        threads = [threading.Thread(target=target, args=args) for target, args in targets]
        for thread in threads:
            thread.start()
        end = time.monotonic() + self.seconds
        while (left_s := end - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.5))
        self.stopping.set()
        for thread in threads:
            thread.join()
        (self.folder / "quiet").touch()  # whoever attacks may stop now
        self.tell(ci)
        print("ending", flush=True)


# -- the attacker, which is also the auditor --------------------------------------------------


class Endpoint(http.server.BaseHTTPRequestHandler):
    """Takes batches, or does not, by the dice."""

    dice = random.Random(0)
    lock = threading.Lock()
    answers: ClassVar[collections.Counter[str]] = collections.Counter()
    taken: ClassVar[dict[str, str]] = {}  # record id -> the batch that brought it
    faults: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        with self.lock:
            chance = self.dice.random()
        if chance < 0.6:
            self.take(body)
            self.answer(200)
        elif chance < 0.7:  # it took the batch and did not say so: the same one comes again
            self.take(body)
            self.answers["cut off"] += 1
            self.close_connection = True
        elif chance < 0.8:
            time.sleep(0.3)
            self.answer(503)
        elif chance < 0.9:
            self.answer(429)
        else:
            self.answer(500)

    def answer(self, status: int) -> None:
        self.answers[str(status)] += 1
        self.send_response(status)
        self.send_header("Content-Length", "2")
        if status == 429:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(b"{}")

    def take(self, body: bytes) -> None:
        batch = msgspec.json.decode(body)
        with self.lock:
            for record in batch["spans"] + batch["marks"]:
                first = self.taken.setdefault(record["id"], batch["batch_id"])
                if first != batch["batch_id"] and len(self.faults) < 5:
                    self.faults.append(f"{record['id']} came in two batches")

    def log_message(self, *_: Any) -> None:
        pass


class Record(msgspec.Struct):
    id: str
    name: str
    pid: int = 0


class Batch(msgspec.Struct):
    batch_id: str
    session: dict[str, Any]
    spans: list[Record]
    marks: list[Record]
    merged: list[str] = []


class Auditor:
    """Reads each batch once, as it appears, and knows every record that was ever on disk."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.faults: list[str] = []
        self.stored: collections.Counter[int] = collections.Counter()  # records of ours, by pid
        self.most_bytes = self.most_files = 0
        self._names: set[str] = set()
        self._ids: dict[str, set[str]] = {}  # by batch
        self._all: set[str] = set()
        self._decode = msgspec.json.Decoder(Batch).decode

    def look(self) -> None:
        try:
            names = sorted(os.listdir(self.home / "spool"))
        except FileNotFoundError:
            return
        total = 0
        for name in names:
            try:
                total += os.stat(self.home / "spool" / name).st_size
                if name.endswith(".json") and name not in self._names:
                    self._take((self.home / "spool" / name).read_bytes(), name)
                    self._names.add(name)
            except FileNotFoundError:  # merged or evicted just now
                continue
        self.most_bytes = max(self.most_bytes, total)
        self.most_files = max(self.most_files, len(names))

    def _take(self, content: bytes, name: str) -> None:
        try:
            batch = self._decode(content)
        except msgspec.MsgspecError as error:
            self.fault(f"{name} is torn: {error}")
            return
        records = batch.spans + batch.marks
        ids = {record.id for record in records}
        if len(ids) != len(records):
            self.fault(f"{name} has {len(records) - len(ids)} ids twice")
        parts = set().union(*(self._ids.get(part, set()) for part in batch.merged))
        if batch.merged and not parts <= ids:
            self.fault(f"{name} replaces more than it holds: {len(parts - ids)} records are gone")
        if twice := (ids - parts) & self._all:
            self.fault(f"{name} has {len(twice)} records that another file has")
        pid = batch.session["pid"]
        for record in records:
            if record.id not in self._all and record.name.startswith(OURS):
                self.stored[record.pid or pid] += 1
        self._ids[batch.batch_id] = ids
        self._all |= ids

    def fault(self, text: str) -> None:
        if len(self.faults) < 20:
            self.faults.append(text)


class Disk:
    """A disk of its own that can be full; without the right to mount, an ordinary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
        self.is_mounted = not subprocess.run(
            ["mount", *options], capture_output=True, check=False
        ).returncode

    def fill(self) -> None:
        if self.is_mounted:
            with open(self.folder / "filler", "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(b"x" * 2**16)
                except OSError:
                    return

    def free(self) -> None:
        (self.folder / "filler").unlink(missing_ok=True)

    def unmount(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


def attack(disk: Disk, worker: subprocess.Popen[str], quiet: Path, seed: int) -> dict[str, int]:
    """Fills the disk now and then, and sends signals that the worker ignores, until it is quiet."""
    dice = random.Random(seed)
    done = {"full disks": 0, "SIGTERM": 0}
    while not quiet.exists() and worker.poll() is None:
        time.sleep(dice.uniform(0.5, 2.5))
        if dice.random() < 0.5:
            disk.fill()
            time.sleep(dice.uniform(0.2, 1.0))
            disk.free()
            done["full disks"] += disk.is_mounted
        elif not quiet.exists():  # a program that ends has no handlers any more
            worker.send_signal(signal.SIGTERM)
            done["SIGTERM"] += 1
    return done


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def soak(folder: Path, seconds: float, seed: int) -> list[str]:
    """Runs the worker under attack; returns what was wrong."""
    Endpoint.dice = random.Random(seed)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
    disk = Disk(folder / "disk")
    (folder / "counts").mkdir()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CIRRON_")}
    arguments = ["work", str(seconds), str(seed), f"http://127.0.0.1:{server.server_port}"]
    began = time.monotonic()
    with open(folder / "err.txt", "w") as err:
        worker = subprocess.Popen(
            [sys.executable, "-u", __file__, *arguments],
            cwd=folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        )
    auditor = Auditor(folder / "disk" / ".cirron")
    done: dict[str, int] = {}
    attacker = threading.Thread(
        target=lambda: done.update(attack(disk, worker, folder / "quiet", seed))
    )
    attacker.start()
    memory: list[tuple[float, int]] = []
    try:
        while worker.poll() is None:
            auditor.look()
            memory.append((time.monotonic() - began, resident_bytes(worker.pid)))
            time.sleep(0.1)
            if time.monotonic() - began > seconds + 45:
                auditor.fault("the worker does not end")
                worker.kill()
                worker.wait()
        attacker.join()
        auditor.look()
        return judge(folder, auditor, memory, worker.pid, worker.returncode, seconds, done)
    finally:
        worker.kill()
        worker.wait()
        attacker.join()
        server.shutdown()
        server.server_close()
        disk.unmount()


def judge(
    folder: Path,
    auditor: Auditor,
    memory: list[tuple[float, int]],
    pid: int,
    status: int,
    seconds: float,
    done: dict[str, int],
) -> list[str]:
    """Compares what was recorded with what was ever on disk, process by process."""
    faults = auditor.faults + Endpoint.faults
    if status:
        faults.append(f"the worker ended with {status}")
    counts = {
        int(path.stem): json.loads(path.read_text()) for path in (folder / "counts").glob("*.json")
    }
    recorded = lost = 0
    for process, found in counts.items():
        recorded, lost = recorded + found["recorded"], lost + found["lost"]
        stored = auditor.stored[process]
        missing = found["recorded"] - stored - found["lost"]
        if missing:
            faults.append(
                f"process {process} recorded {found['recorded']:,}, {stored:,} came to the disk and"
                f" {found['lost']:,} are counted as lost: {missing:+,} ({found['why']})"
            )
        faults += found["faults"]
        if found["errors"]:
            faults.append(f"mistakes of ours: {found['errors']}")
    main = counts.get(pid)
    forks, slowest = (main["forks"], main["slowest"]) if main else (0, {})
    if len(counts) != forks + 1:
        faults.append(f"{forks} children, and {len(counts) - 1} of them told how they were")
    for name, took_s in slowest.items():
        if took_s > CALLS_S[name]:
            faults.append(f"{name} took {took_s:.1f} s")
    if auditor.most_bytes > CAP_BYTES * 1.5:
        faults.append(f"the spool reached {auditor.most_bytes / 2**20:.1f} MB")
    boxes = len(list((auditor.home / "blackbox").glob("*.json")))
    if boxes > MAX_BOXES:
        faults.append(f"{boxes} black boxes")
    left = [path.name for path in auditor.home.rglob("*") if path.name.endswith((".tmp", "~"))]
    if left:
        faults.append(f"left over: {left[:5]}")
    err = (folder / "err.txt").read_text()
    if "internal error" in err or "Traceback" in err:
        faults.append(f"it said {err[-600:]!r}")
    grown = growth(memory, seconds)
    allowed = 24 * 2**20 if seconds >= 300 else 80 * 2**20  # until what trace() keeps is full
    if grown > allowed:
        faults.append(f"memory grew by {grown / 2**20:.0f} MB in the second half")
    print(
        f"recorded {recorded:,}, lost and counted {lost:,}, processes {len(counts)}"
        f"\nspool at most {auditor.most_bytes / 2**20:.1f} MB in {auditor.most_files} files,"
        f" {boxes} black boxes; {done}; endpoint {dict(Endpoint.answers)}"
        f"\nmemory: at most {max(size for _, size in memory) / 2**20:.0f} MB,"
        f" {grown / 2**20:+.1f} MB in the second half"
        f"\nslowest calls: { {name: round(took_s, 3) for name, took_s in slowest.items()} }"
    )
    return faults


def growth(memory: list[tuple[float, int]], seconds: float) -> float:
    """How much memory grew in the second half: the slope of a line through the least of each of 20
    stretches, since a call of trace() takes much for a moment, times its length.
    """
    least: dict[int, int] = {}
    for at_s, size in memory:
        if seconds / 2 < at_s < seconds and size:
            stretch = int((at_s - seconds / 2) / (seconds / 40))
            least[stretch] = min(size, least.get(stretch, size))
    if len(least) < 10:
        return 0.0
    mean_at, mean = sum(least) / len(least), sum(least.values()) / len(least)
    spread = sum((at - mean_at) ** 2 for at in least)
    return sum((at - mean_at) * (size - mean) for at, size in least.items()) / spread * 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    seconds = float(os.environ.get("SECONDS", "600"))
    folder = Path(tempfile.mkdtemp(prefix="cirron-soak-"))
    try:
        faults = soak(folder, seconds, given.seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for fault in faults:
        print("FAULT", fault)
    print(f"{len(faults)} faults in {seconds:g} s")
    return 1 if faults else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        Worker(float(sys.argv[2]), int(sys.argv[3]), Path.cwd()).run(sys.argv[4])
    else:
        sys.exit(main())
