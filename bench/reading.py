"""How fast a large run is opened and read: `python bench/reading.py --spans 10000000 --ranks 64`.

Makes the run in a temporary folder (`spools.py`; or takes one that is there, `--run`) and measures:
spool to store and its peak memory, opening again with nothing new, opening after one more batch a
rank, every query once, opening a run of 1,000 ranks with 100 spans each, and `cirron report`, from
the store and from a small spool. Each opening is a process of its own. CPU time stands beside the
wall's: on a machine that does other work, too, the spans a second of CPU time, times the cores, are
what it would do alone. Prints a table and writes `bench/results/reading.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import spools

RESULTS = Path(__file__).parent / "results" / "reading.json"
MANY_RANKS, THEIR_SPANS = 1_000, 100
SMALL_SPANS = 100_000

# Opens a run and asks; its last line is JSON.
LOOK = """
import json, re, resource, sys, time
import cirron as ci
from cirron.runs import engine

began, cpu = time.perf_counter(), time.process_time()
run = ci.open(sys.argv[1])
found = {"open_s": time.perf_counter() - began, "open_cpu_s": time.process_time() - cpu}
found["open_peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
step = run.sql("SELECT * FROM spans WHERE is_training_step ORDER BY start_ns LIMIT 1").rows()[0]
window = {"from_ns": run.started_ns, "to_ns": run.ended_ns}
known = {
    **window, "session": run.main.key, "most": 500, "width": 1000, "attempt": 0, "first_ns": 0,
    "last_ns": 2**62, "until_ns": run.ended_ns, "zero_ns": run.started_ns, "at_ns": 0,
    "since_ns": run.ended_ns - 10**9,
    "name": "loss", "text": "step", "number": 7, "forward": True, "every": 20, "points": 60,
    "sessions": len(run.sessions), "bins": 40, "own": True, "own_ns": 0, "first": 0, "last": 2**53,
    "axis": "step", "all_ranks": True, "rank": 0, "lines": 16,
    **{key: step[key] for key in ("id", "key", "path", "epoch", "step")},
}
other = {
    "newest_steps": {"most": 20_000},
    "newest_values": {"most": 5_000},
    "mark_lines": {"first": float("-inf"), "last": float("inf")},
}
for name in sys.argv[2:]:
    wanted = re.findall(r"(?<![:\\w]):([a-z_]+)", engine.query(name))
    given = {key: value for key, value in (known | other.get(name, {})).items() if key in wanted}
    if name == "timeline":
        given = {**window, "width": 1200}
    began, cpu = time.perf_counter(), time.process_time()
    # The whole answer of the first three would be the table itself: count, and see the first rows.
    relation = run.query(name, **given)
    if name in ("spans", "marks", "snapshots"):
        relation = relation.head(1000)
    count = relation.arrow().num_rows
    took, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    found[name] = {"s": took, "cpu_s": cpu_s, "rows": count}
found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps(found))
"""


def look(folder: Path, *queries: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(folder), *queries], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def report(folder: Path) -> dict:
    """How long `cirron report` takes, its start included, and the processor time of all threads."""
    before, began = os.times(), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "cirron", "report", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
        check=True,
    )
    took, after = time.perf_counter() - began, os.times()
    cpu_s = after.children_user + after.children_system
    return {"s": took, "cpu_s": cpu_s - before.children_user - before.children_system}


def add_batch(spool: Path, rank: int) -> None:
    """The last batch of a rank once more, with ids that are new."""
    last = max(spool.glob(f"*-{rank + 1:016x}*.json"))
    old = f"{rank + 1:016x}"
    new = f"f{old[1:]}"
    text = last.read_text().replace(f'"{old}', f'"{new}')
    (spool / last.name.replace(f"-{old}", f"-{new}")).write_text(text)


def size(folder: Path) -> int:
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())


def make(spool: Path, run_id: str, ranks: int, spans: int) -> None:
    spool.mkdir(parents=True)
    for rank in range(ranks):
        spools.write_rank(spool, run_id, rank, ranks, spans // ranks, spools.alone(rank, rank == 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--spans", type=int, default=10_000_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--run", type=Path, help="made by spools.py with these spans and ranks")
    parser.add_argument("--save", type=Path, default=RESULTS)
    given = parser.parse_args()

    from cirron.runs import engine

    with tempfile.TemporaryDirectory() as name:
        run, many, small = (
            given.run or Path(name) / "run",
            Path(name) / "many",
            Path(name) / "small",
        )
        spool = run / ".cirron" / "spool"
        if given.run is None:
            make(spool, "generated", given.ranks, given.spans)
        make(many / ".cirron" / "spool", "many", MANY_RANKS, MANY_RANKS * THEIR_SPANS)
        make(small / ".cirron" / "spool", "small", 1, SMALL_SPANS)
        opened = look(many)
        first = look(run)
        again = look(run)
        reports = {"from_store": report(run), "of_100000_from_spool": report(small)}
        for rank in range(given.ranks):
            add_batch(spool, rank)
        more = look(run)
        asked = look(run, *engine.queries())
        store = run / ".cirron" / "store"
        figures = {
            "spans": given.spans,
            "ranks": given.ranks,
            "spool_mb": size(spool) / 2**20,
            "store_mb": size(store) / 2**20,
            "ingest_s": first["open_s"],
            "ingest_spans_per_s": given.spans / first["open_s"],
            "ingest_spans_per_cpu_s": given.spans / first["open_cpu_s"],
            "ingest_peak_mb": first["open_peak_mb"],
            "open_again_s": again["open_s"],
            "open_again_peak_mb": again["open_peak_mb"],
            "open_with_one_more_batch_a_rank_s": more["open_s"],
            "open_with_one_more_batch_a_rank_cpu_s": more["open_cpu_s"],
            "open_with_one_more_batch_a_rank_peak_mb": more["open_peak_mb"],
            "queries_peak_mb": asked["peak_mb"],
            "open_1000_ranks_s": opened["open_s"],
            "open_1000_ranks_peak_mb": opened["open_peak_mb"],
            "reports": reports,
            "queries": {one: asked[one] for one in engine.queries()},
            "machine": f"{os.cpu_count()} cores, Python {platform.python_version()},"
            f" load {os.getloadavg()[1]:.0f}",
            "date": time.strftime("%Y-%m-%d"),
        }
    for label, value in figures.items():
        if isinstance(value, float):
            print(f"{label:40} {value:14,.2f}")
        elif isinstance(value, int):
            print(f"{label:40} {value:14,}")
    for label, one in figures["reports"].items():
        print(f"report {label:33} {one['s']:12,.2f} s  {one['cpu_s']:12,.2f} s of processors")
    for label, query in figures["queries"].items():
        took = f"{query['s']:12,.2f} s  {query['cpu_s']:12,.2f} s of processors"
        print(f"{label:40} {took}  {query['rows']:12,} rows")
    given.save.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
