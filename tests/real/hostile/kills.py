"""kill -9 under load: `python kills.py --kills 200` kills 200 processes, and counts the losers.

Promise: a record that closed longer ago than the flush interval plus 0.25 s is on disk, at up to
100,000 spans a second in total. The truth comes from outside of cirron: every thread of the worker
notes in a shared memory map how many spans it has closed, and when; the map survives the kill. The
killer reads the same system-wide clock right before it sends the signal.

Shapes: `one` (1 thread, sleeps between bursts), `tight` (1 thread that spins between its spans),
`busy` (4 threads that spin), `waiting` (16 threads that mostly sleep). `spin` (16 threads, no pace)
is past what is promised: there only memory, `flush_lag_s`, whole files and single copies count.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

SLACK_S = 0.25
EARLIEST_S = 1.5
THREADS = {"one": 1, "tight": 1, "busy": 4, "waiting": 16, "spin": 16}
PACED = ("one", "tight", "busy", "waiting")
INTERVALS = (0.2, 1.0)

# A thread that was held up makes up for at most this much; a longer pause moves its schedule.
# Otherwise a machine that stops for a second would be followed by a burst past the promised rate.
CATCH_UP_NS = 50_000_000

# The memory map: when recording began, then for each thread a table of (spans closed, when).
NOTE_EVERY = 100
NOTE = struct.Struct("=QQ")
NOTES = 40_000  # of a thread; past it nothing is noted
NOTES_BYTES = NOTES * NOTE.size

# Past the promise the ring is small, so that it is soon full and memory is about the rest.
SPIN_PENDING = 200_000
SPIN_RSS_BYTES = 300 * 2**20
HEALTH_EVERY_S = 0.2


# -- the worker -------------------------------------------------------------------------------


class Thread:
    """One recording thread: numbers its spans from 0, and notes how far it is."""

    def __init__(self, number: int, notes: mmap.mmap) -> None:
        self.name = f"thread-{number}"
        self._notes = notes
        self._at = NOTE.size + number * NOTES_BYTES
        self._end = self._at + NOTES_BYTES

    def note(self, closed: int) -> None:
        if self._at < self._end:
            NOTE.pack_into(self._notes, self._at, closed, time.monotonic_ns())
            self._at += NOTE.size

    def record_by_clock(
        self, rate: float, pauses_s: tuple[float, float], dice: random.Random
    ) -> None:
        """Sleeps, records what is due by now, and sleeps again."""
        import cirron as ci

        scope, name, closed = ci.scope, self.name, 0
        start_ns, rate_ns = time.monotonic_ns(), rate / 1e9
        while True:
            time.sleep(dice.uniform(*pauses_s))
            start_ns = max(start_ns, time.monotonic_ns() - CATCH_UP_NS - int(closed / rate_ns))
            due = int((time.monotonic_ns() - start_ns) * rate_ns)
            for closed in range(closed + 1, due + 1):  # noqa: B020  goes on from where it was
                with scope(name, closed - 1):
                    pass
                if closed % NOTE_EVERY == 0:
                    self.note(closed)

    def record_by_turns(self, turns: Turns) -> None:
        """Takes the next turn of all threads, and spins until it is due."""
        import cirron as ci

        scope, name, now = ci.scope, self.name, time.monotonic_ns
        for closed in itertools.count(1):
            due = turns.next_due()
            while now() < due:
                pass
            with scope(name, closed - 1):
                pass
            if closed % NOTE_EVERY == 0:
                self.note(closed)

    def record_without_pace(self) -> None:
        import cirron as ci

        scope, name = ci.scope, self.name
        for closed in itertools.count(1):
            with scope(name, closed - 1):
                pass
            if closed % NOTE_EVERY == 0:
                self.note(closed)


class Turns:
    """The schedule that busy threads share: one span each `1 / rate` seconds, whoever is there."""

    def __init__(self, rate: float) -> None:
        self._period_ns = 1e9 / rate
        self._turns = itertools.count()
        self._start_ns: float = time.monotonic_ns()

    def next_due(self) -> float:
        turn = next(self._turns)
        due = self._start_ns + turn * self._period_ns
        late_ns = time.monotonic_ns() - due
        if late_ns > CATCH_UP_NS:  # the same from any thread: a schedule never jumps twice
            self._start_ns = max(self._start_ns, self._start_ns + late_ns - CATCH_UP_NS)
        return due


def work(shape: str, rate: float, interval_s: float, seed: int) -> None:
    """Records in this shape until it is killed; `notes` in the working directory has the truth."""
    import cirron as ci

    with open("notes", "r+b") as file:
        notes = mmap.mmap(file.fileno(), 0)
    if shape == "spin":
        ci.Cirron(max_pending_records=SPIN_PENDING).profile(flush_interval=interval_s)
    else:
        ci.profile(flush_interval=interval_s)
    turns = Turns(rate)
    threads = []
    together = threading.Event()  # else the first ones keep the others from starting

    def start(target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        together.wait()
        target(*arguments)

    for number in range(THREADS[shape]):
        thread = Thread(number, notes)
        dice = random.Random(seed * 100 + number)
        shapes: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
            "one": (thread.record_by_clock, (rate, (0.001, 0.001), dice)),
            "tight": (thread.record_by_turns, (turns,)),
            "busy": (thread.record_by_turns, (turns,)),
            "waiting": (thread.record_by_clock, (rate / THREADS[shape], (0.005, 0.02), dice)),
            "spin": (thread.record_without_pace, ()),
        }
        threads.append(threading.Thread(target=start, args=shapes[shape], daemon=True))
    for one in threads:
        one.start()
    with open("health.jsonl", "a", buffering=1) as health:
        NOTE.pack_into(notes, 0, 1, time.monotonic_ns())
        together.set()
        while True:
            if shape == "spin":
                health.write(json.dumps([time.monotonic_ns(), ci.health()], default=str) + "\n")
            time.sleep(HEALTH_EVERY_S)


# -- the killer -------------------------------------------------------------------------------


class Record(msgspec.Struct):
    """What counts of a span: who it is."""

    id: str
    name: str
    index: int | None


class Batch(msgspec.Struct):
    """What counts of a batch."""

    batch_id: str
    spans: list[Record]
    merged: list[str] = []


_decode_batch = msgspec.json.Decoder(Batch).decode


@dataclass
class Kill:
    """What one kill showed."""

    shape: str
    interval_s: float
    ran_s: float
    rate: float  # spans a second, as achieved
    lost_age_s: float  # at the kill, of the oldest span that is not on disk
    rss_bytes: int
    # How busy the machine was: the most that a thread of the worker waited for a processor, of the
    # time that counts. What this is, others took.
    starved_s: float
    faults: list[str] = field(default_factory=list)

    def line(self) -> str:
        how = "; ".join(self.faults) or "fine"
        return (
            f"{self.shape:8} interval {self.interval_s:g} s, ran {self.ran_s:.2f} s,"
            f" {self.rate:,.0f} spans/s, oldest lost {self.lost_age_s:.3f} s,"
            f" {self.rss_bytes / 2**20:.0f} MB, starved for {self.starved_s * 1e3:.0f} ms: {how}"
        )


def kill_one(
    folder: Path, shape: str, interval_s: float, rate: float, seed: int, latest_s: float
) -> Kill:
    """Starts a worker, kills it at a random moment, and compares the disk with the truth."""
    with open(folder / "notes", "wb") as file:
        file.truncate(NOTE.size + THREADS[shape] * NOTES_BYTES)
    with open(folder / "notes", "r+b") as file:
        notes = mmap.mmap(file.fileno(), 0)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CIRRON_")}
    arguments = [sys.executable, __file__, "work", shape, str(rate), str(interval_s), str(seed)]
    with open(folder / "err.txt", "wb") as err:
        process = subprocess.Popen(arguments, cwd=folder, env=environ, stderr=err)
    ran_s = random.Random(seed).uniform(EARLIEST_S, latest_s)
    rss_bytes = 0
    waits: deque[tuple[float, dict[str, int]]] = deque()
    try:
        deadline = time.monotonic() + 30
        while not NOTE.unpack_from(notes, 0)[0]:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the worker did not start:\n{(folder / 'err.txt').read_text()}")
            time.sleep(0.002)
        began_ns = NOTE.unpack_from(notes, 0)[1]
        while (left_s := ran_s - (time.monotonic_ns() - began_ns) / 1e9) > 0:
            waits.append((time.monotonic(), run_delays_ns(process.pid)))
            if waits[0][0] < time.monotonic() - interval_s - SLACK_S - 0.1:
                waits.popleft()
            rss_bytes = max(rss_bytes, resident_bytes(process.pid))
            time.sleep(min(left_s, 0.05))
        killed_ns = time.monotonic_ns()
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        status = process.wait()
    (_, first), (_, last) = waits[0], waits[-1]
    starved_s = max((last[thread] - first.get(thread, 0) for thread in last), default=0) / 1e9
    kill = Kill(shape, interval_s, (killed_ns - began_ns) / 1e9, 0.0, 0.0, rss_bytes, starved_s)
    if status != -signal.SIGKILL:
        kill.faults.append(f"the worker ended by itself with {status}")
    judge(kill, folder, notes, began_ns, killed_ns)
    if shape == "spin":
        judge_spin(kill, folder, killed_ns)
    err_text = (folder / "err.txt").read_text()
    if err_text:
        kill.faults.append(f"it said {err_text.strip()[:300]!r}")
    return kill


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError):
        return 0


def run_delays_ns(pid: int) -> dict[str, int]:
    """How long each thread has waited for a processor so far."""
    found = {}
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            text = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text()
        except OSError:
            continue
        found[thread] = int(text.split()[1])
    return found


def judge(kill: Kill, folder: Path, notes: mmap.mmap, began_ns: int, killed_ns: int) -> None:
    """Compares the spool with the truth, thread by thread."""
    stored = read_spool(kill, folder / ".cirron" / "spool")
    promised_ns = killed_ns - int((kill.interval_s + SLACK_S) * 1e9)
    closed_total, last_ns = 0, began_ns
    short: dict[str, int] = {}
    for number in range(THREADS[kill.shape]):
        name = f"thread-{number}"
        truth = read_notes(notes, number)
        have = sorted(stored.get(name, ()))
        whole = have == list(range(len(have)))
        if not whole and kill.shape != "spin":  # where a full ring drops, and counts, the oldest
            missing = set(range(have[-1])) - set(have)
            first = min(missing, default="an index that is there twice")
            kill.faults.append(f"{name} has {len(missing)} gaps, the first at {first}")
        if not truth:
            continue
        closed_total += truth[-1][0]
        last_ns = max(last_ns, truth[-1][1])
        first_lost = len(have) if whole else (have[-1] + 1)
        lost_ns = next((at_ns for closed, at_ns in truth if closed > first_lost), killed_ns)
        kill.lost_age_s = max(kill.lost_age_s, (killed_ns - lost_ns) / 1e9)
        promised = max((closed for closed, at_ns in truth if at_ns < promised_ns), default=0)
        if promised > first_lost and kill.shape in PACED:
            short[name] = promised - first_lost
    if short:
        kill.faults.append(
            f"lost {sum(short.values()):,} spans of {len(short)} threads older than"
            f" {kill.interval_s + SLACK_S:g} s"
        )
    kill.rate = closed_total / max((last_ns - began_ns) / 1e9, 1e-9)
    boxes = list((folder / ".cirron" / "blackbox").glob("*.json"))
    try:
        if [None] != [json.loads(box.read_bytes())["ended"] for box in boxes]:
            kill.faults.append(f"{len(boxes)} black boxes, or one that is closed")
    except (ValueError, KeyError, OSError) as error:
        kill.faults.append(f"the black box is torn: {error!r}")


def judge_spin(kill: Kill, folder: Path, killed_ns: int) -> None:
    """Past the promise: memory is bounded, and `health()` says how far behind the worker is."""
    if kill.rss_bytes > SPIN_RSS_BYTES:
        kill.faults.append(
            f"{kill.rss_bytes / 2**20:.0f} MB of memory, {SPIN_RSS_BYTES / 2**20:.0f} are allowed"
        )
    lines = (folder / "health.jsonl").read_text().split("\n")[:-1]
    if len(lines) < 2:
        kill.faults.append(f"health() returned {len(lines)} times in {kill.ran_s:.1f} s")
        return
    lags = [(at_ns, found.get("flush_lag_s")) for at_ns, found in map(json.loads, lines)]
    if any(not isinstance(lag, (int, float)) or lag < 0 for _, lag in lags):
        kill.faults.append(f"health()['flush_lag_s'] is {lags[-1][1]!r}")
        return
    # What is missing at the kill was recorded since the last flush; the rest is the lag.
    asked_s = (killed_ns - lags[-1][0]) / 1e9
    behind_s = kill.lost_age_s - kill.interval_s - asked_s
    # But a full ring pushes out what may be older, of a thread that got no turn since: it is told.
    is_told = json.loads(lines[-1])[1]["record_drop_count"] > 0
    if behind_s > 1 and not is_told and max(lag for _, lag in lags[-3:]) < behind_s / 2:
        kill.faults.append(
            f"health() says {lags[-1][1]:.2f} s behind, and {kill.lost_age_s:.2f} s are lost"
        )


def read_notes(notes: mmap.mmap, number: int) -> list[tuple[int, int]]:
    start = NOTE.size + number * NOTES_BYTES
    table = NOTE.iter_unpack(notes[start : start + NOTES_BYTES])
    return [(closed, at_ns) for closed, at_ns in itertools.takewhile(lambda one: one[1], table)]


def read_spool(kill: Kill, spool: Path) -> dict[str, list[int]]:
    """The indices on disk, by span name; files that are torn and ids that are there twice."""
    batches = []
    for path in sorted(spool.glob("*.json")):
        try:
            batches.append(_decode_batch(path.read_bytes()))
        except (msgspec.MsgspecError, ValueError) as error:
            kill.faults.append(f"{path.name} is torn: {error}")
    if not batches:
        kill.faults.append("nothing is on disk")
    # A kill in the middle of a merge leaves both copies, and the merged one says which it replaces.
    replaced = {batch_id for batch in batches for batch_id in batch.merged}
    stored: dict[str, list[int]] = {}
    ids: set[str] = set()
    count = 0
    for batch in batches:
        if batch.batch_id not in replaced:
            count += len(batch.spans)
            for span in batch.spans:
                ids.add(span.id)
                stored.setdefault(span.name, []).append(-1 if span.index is None else span.index)
    if len(ids) != count:
        kill.faults.append(f"{count - len(ids)} ids are there twice")
    return stored


def report(kills: list[Kill]) -> None:
    print("\nshape     interval  kills  losers  oldest lost   spans/s (least)  MB (most)")
    for shape, interval_s in itertools.product(THREADS, INTERVALS):
        some = [kill for kill in kills if (kill.shape, kill.interval_s) == (shape, interval_s)]
        if some:
            least = min(kill.rate for kill in some)
            print(
                f"{shape:9} {interval_s:6g} s {len(some):6} {sum(bool(k.faults) for k in some):7}"
                f" {max(kill.lost_age_s for kill in some):10.3f} s {least:17,.0f}"
                f" {max(kill.rss_bytes for kill in some) / 2**20:10.0f}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=100_000, help="spans a second in total")
    parser.add_argument("--shapes", default=",".join(PACED), help=",".join(THREADS))
    parser.add_argument("--intervals", default="0.2,1.0")
    parser.add_argument("--latest", type=float, default=4.0, help="the last moment to kill, in s")
    given = parser.parse_args()
    cases = list(itertools.product(given.shapes.split(","), map(float, given.intervals.split(","))))
    kills = []
    for number, (shape, interval_s) in zip(range(given.kills), itertools.cycle(cases)):
        folder = Path(tempfile.mkdtemp(prefix="cirron-kill-"))
        seed = given.seed * 1_000_000 + number
        kill = kill_one(folder, shape, interval_s, given.rate, seed, given.latest)
        if shape in PACED and kill.rate < 0.9 * given.rate:
            print(f"note: this machine reached {kill.rate:,.0f} of {given.rate:,.0f} spans/s")
        kills.append(kill)
        print(f"{number:4} {kill.line()}", flush=True)
        shutil.rmtree(folder)
    report(kills)
    losers = sum(bool(kill.faults) for kill in kills)
    print(f"{losers} of {len(kills)} kills broke the promise")
    return 1 if losers else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
    else:
        sys.exit(main())
