"""Is the verdict right, and about the gain too? `python bench/faults.py` says, in 15 minutes.

Runs each script of `faulty/` with its fault and mended, asks for the verdict on the faulty run, and
puts the gain that it predicts beside what mending gave. Then 64 ranks that are generated, and 200
healthy trainings (`--seeds`), on which a finding is a false alarm. With `--peers PYTHON`, a venv
with `requirements-peers.txt`, TraceML and gpuprof watch the same scripts.

Results go to `results/faults.json` after each case (`--resume` keeps those that are there, `--only`
runs some), and as tables into `docs/verdict.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cirron as ci
import faults_table
import spools

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "faults.json"
MAX_LOAD = 3.0
REPEATS = 2  # of each script, faulty and mended by turns; the quickest counts
SEEDS, AT_ONCE = 200, 25  # healthy ones, and how many a process trains
LIMIT_S = 400.0
RANKS, STEPS_OF_RANK = 64, 300


class Case(NamedTuple):
    """A fault: what to run, and what the verdict on it has to be."""

    name: str
    script: str
    expected: str
    says: str = ""  # what the verdict, its evidence or what was not judged has to mention
    has_gain: bool = True  # whether mending it saves time
    ranks: int = 1
    is_jax: bool = False


CASES = (
    Case("slow data set", "slow_dataset.py", "input-bound", "num_workers"),
    Case("busy data set", "busy_dataset.py", "input-bound", "num_workers"),
    Case("too few workers", "few_workers.py", "input-bound", "raise num_workers from 1"),
    Case("slow generator, JAX", "jax_generator.py", "input-bound", "batches at once", is_jax=True),
    Case("a stall every 20 steps", "stalls.py", "input-bound", "every 20 steps"),
    Case("slow start of each epoch", "cold_start.py", "input-bound", "persistent_workers=True"),
    Case(".item() for each sample", "item_each_sample.py", "host-bound", ".item()"),
    Case("loop over parameters", "parameter_loop.py", "host-bound", "loops over parameters"),
    Case("tiny batches", "tiny_batches.py", "host-bound", "larger batches"),
    Case("recompiles, torch", "recompiles.py", "compile-storm", "compile"),
    Case("recompiles, JAX", "jax_recompiles.py", "compile-storm", "compile", is_jax=True),
    Case("evaluates too often", "evaluations.py", "evaluation-heavy", "evaluate"),
    Case("saves too often", "checkpoints.py", "checkpoint-heavy", "save"),
    Case("hiccup every 25 steps", "hiccups.py", "uneven-steps", "one every 25"),
    Case("leak", "leak.py", "memory-growth", "keeps", has_gain=False),
    Case("NaN", "diverges.py", "numerics", "loss is nan", has_gain=False),
    Case("slow rank", "ranks.py slow", "slow-rank", "rank 1 slows", ranks=2),
    Case("ranks slow by turns", "ranks.py rotating", "slow-rank", "in turn", ranks=2),
    Case("slow rank, ci.batches", "ranks.py batches", "slow-rank", "rank 1 slows", ranks=2),
    Case("slow inside backward", "ranks.py backward", "compute-bound", "cannot tell", False, 2),
    Case("killed in backward", "dies.py", "died", "backward", has_gain=False),
    Case("hangs in backward", "hangs.py", "hung", "backward", has_gain=False),
    Case("healthy loop", "diverges.py --fixed", "compute-bound", has_gain=False),
    Case("three steps", "three_steps.py", "not-enough-data", "3 steps", has_gain=False),
)
# Made by `spools.py`: name -> which rank is late, expected, what has to be said, how it is mended.
GENERATED = {
    "64 ranks, one slow": ("slow", "slow-rank", "rank 17 slows", "none"),
    "64 ranks, slow by turns": ("rotating", "slow-rank", "in turn", "shared"),
    "64 ranks, slow inside backward": ("backward", "compute-bound", "cannot tell", None),
    "64 ranks, healthy": ("none", "compute-bound", "", None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="cases whose name has this in it")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="healthy trainings")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--peers", help="python of a venv with traceml-ai and gpuprof")
    parser.add_argument("--resume", action="store_true", help="keep the results that are there")
    parser.add_argument("--wait", type=float, default=60, help="seconds, for a quiet machine")
    given = parser.parse_args()
    found: dict[str, Any] = {"cases": {}, "healthy": []}
    if (given.resume or given.only) and RESULTS.exists():
        found = json.loads(RESULTS.read_text())
    found["machine"] = (
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    )

    def is_due(name: str) -> bool:
        if given.only:
            return any(one in name for one in given.only)
        return name not in found["cases"]

    for case in CASES:
        if is_due(case.name):
            try:
                result = measure(case, given.repeats, given.wait)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                result = {"expected": case.expected, "class": "failed", "is_right": False}
                result |= {"predicted": None, "replay_error": None, "text": str(error)}
            note(found, case.name, result)
    for name, generated in GENERATED.items():
        if is_due(name):
            note(found, name, judge_generated(*generated))
    if not given.only or "healthy" in given.only:
        train_healthy(found, given.seeds, given.wait)
    if given.peers:
        ask_peers(found, given.peers, is_due)
    faults_table.write(found)


def note(found: dict[str, Any], name: str, result: dict[str, Any]) -> None:
    """Keeps a result at once, so that an interrupted run can go on."""
    found["cases"][name] = found["cases"].get(name, {}) | result
    save(found)
    gains = [result.get(one) for one in ("predicted", "measured")]
    said = " ".join("-" if one is None else f"{100 * one:.0f}%" for one in gains)
    print(
        f"{'ok   ' if result['is_right'] else 'WRONG'} {name}: {result['class']}"
        f" (expected {result['expected']}); gain predicted, measured: {said}",
        flush=True,
    )


def save(found: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


# -- real programs ------------------------------------------------------------------------------


def measure(case: Case, repeats: int, wait: float) -> dict[str, Any]:
    """The verdict on the quickest faulty run, and how much quicker the quickest mended one is."""
    if not case.has_gain:
        with tempfile.TemporaryDirectory() as folder:
            wait_for_quiet(wait)
            is_hanging = case.expected == "hung"
            report = watch_hang(case, folder) if is_hanging else run(case, folder, False)[1]
            return verdict_on(report, case.expected, case.says)
    faulty: list[tuple[float, dict[str, Any]]] = []
    mended = []
    as_advised: dict[str, str] = {}
    for _ in range(repeats):
        wait_for_quiet(wait)
        with tempfile.TemporaryDirectory() as folder:
            clock, report = run(case, folder, False, as_advised)
            faulty.append((clock["seconds"], report))
        as_advised = as_advised or advised(report) | {"FAULTS_PACE": str(clock["pace"])}
        with tempfile.TemporaryDirectory() as folder:
            clock, report = run(case, folder, True, as_advised)
            mended.append((clock["seconds"], report["verdict"]["class"]))
    seconds, report = min(faulty, key=lambda one: one[0])
    result = verdict_on(report, case.expected, case.says)
    quickest, kind = min(mended)
    return result | {
        "measured": 1 - quickest / seconds,
        "mended": kind,
        "load": os.getloadavg()[0],
    }


def verdict_on(report: dict[str, Any], expected: str, says: str) -> dict[str, Any]:
    kind = report["verdict"]["class"]
    first = next((one for one in report["findings"] if one["class"] == kind), None)
    text = " ".join(
        [
            report["verdict"]["summary"],
            *(first["evidence"] if first else ()),
            first["advice"] if first else "",
            *(one["why"] for one in report["abstained"]),
        ]
    )
    gain = first["gain"] if first else None
    return {
        "expected": expected,
        "class": kind,
        "summary": report["verdict"]["summary"],
        "others": [one["class"] for one in report["findings"] if one["class"] != kind],
        "is_right": kind == expected and says in text,
        "predicted": None if gain is None else gain["share"],
        "replay_error": None if gain is None else gain["replay_error"],
        "text": text,
    }


def command(case: Case, is_fixed: bool, python: str = sys.executable) -> list[str]:
    script, *arguments = case.script.split()
    launch = [python]
    if case.ranks > 1:
        port = ["--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
        launch += ["-m", "torch.distributed.run", f"--nproc-per-node={case.ranks}", *port]
    return [*launch, str(HERE / "faulty" / script), *arguments, *["--fixed"] * is_fixed]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CIRRON_")}
    ours = {"CIRRON_REPORT": "0", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    return kept | ours | more


def run(
    case: Case, folder: str, is_fixed: bool, more: dict[str, str] | None = None
) -> tuple[dict[str, float], dict[str, Any]]:
    """Runs a script; what its own clock says, and the report."""
    done = subprocess.run(
        command(case, is_fixed),
        cwd=folder,
        env=environment(**(more or {})),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode and case.expected != "died":
        raise RuntimeError(done.stderr[-2000:])
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    return json.loads(lines[-1]) if lines else {}, ci.open(folder).report().as_dict()


def advised(report: dict[str, Any]) -> dict[str, str]:
    """The workers that the verdict advises, for the mended run."""
    text = " ".join(one["advice"] for one in report["findings"][:1])
    found = re.search(r"(?:num_workers(?:=| from \d+ to )|load )(\d+)", text)
    ahead = re.search(r"prefetch_factor=(\d+)", text)
    return {
        "FAULTS_WORKERS": found[1] if found else "2",
        "FAULTS_AHEAD": ahead[1] if ahead else "2",
    }


def watch_hang(case: Case, folder: str) -> dict[str, Any]:
    """Looks at a program until it is said to hang, and ends it."""
    with subprocess.Popen(
        command(case, is_fixed=False),
        cwd=folder,
        env=environment(CIRRON_SILENCE_AFTER="3"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as program:
        end = time.monotonic() + LIMIT_S / 4
        report: dict[str, Any] = {}
        while time.monotonic() < end:
            time.sleep(2)
            if not (Path(folder) / ".cirron" / "spool").exists():
                continue
            report = ci.open(folder).report().as_dict()
            if report["verdict"]["class"] == "hung":
                break
        program.kill()
    return report


def wait_for_quiet(seconds: float) -> None:
    """Waits for other work on the machine to end, so long at most."""
    end = time.monotonic() + seconds
    while os.getloadavg()[0] > MAX_LOAD and time.monotonic() < end:
        time.sleep(2)


# -- generated ranks ----------------------------------------------------------------------------


def judge_generated(how: str, expected: str, says: str, mended: str | None) -> dict[str, Any]:
    table = spools.together(RANKS, STEPS_OF_RANK, how)
    with tempfile.TemporaryDirectory() as folder:
        spool = Path(folder) / ".cirron" / "spool"
        spool.mkdir(parents=True)
        for rank in range(RANKS):
            spans = STEPS_OF_RANK * spools.SPANS_OF_STEP + 2
            times = [step[rank] for step in table]
            spools.write_rank(spool, how, rank, RANKS, spans, times.__getitem__)
        began = time.perf_counter()
        result = verdict_on(ci.open(folder).report().as_dict(), expected, says)
    result["report_s"] = time.perf_counter() - began
    if mended is not None:
        after = spools.together(RANKS, STEPS_OF_RANK, mended)
        result["measured"] = 1 - lasted(after) / lasted(table)
    return result


def lasted(table: list[list[list[int]]]) -> int:
    return sum(max(map(sum, ranks)) for ranks in table)


# -- healthy ones -------------------------------------------------------------------------------


def train_healthy(found: dict[str, Any], seeds: int, wait: float) -> None:
    done = {one["seed"] for one in found["healthy"]}
    for first in range(0, seeds, AT_ONCE):
        due = [one for one in range(first, min(first + AT_ONCE, seeds)) if one not in done]
        if not due:
            continue
        wait_for_quiet(wait)
        with tempfile.TemporaryDirectory() as folder:
            script = [sys.executable, str(HERE / "faulty" / "healthy.py")]
            subprocess.run(
                [*script, str(due[0]), str(due[-1] + 1)],
                cwd=folder,
                env=environment(),
                stdout=subprocess.DEVNULL,
                check=True,
            )
            found["healthy"] += [alarms_of(seed, Path(folder) / str(seed)) for seed in due]
        save(found)
        alarms = [one for one in found["healthy"] if one["alarms"]]
        print(f"healthy: {len(found['healthy'])} trainings, {len(alarms)} false alarms", flush=True)


def alarms_of(seed: int, folder: Path) -> dict[str, Any]:
    report = ci.open(folder).report()
    kinds = [one.kind for one in report.findings]
    alarms = [one for one in kinds if one not in faults_table.QUIET]
    return {
        "seed": seed,
        "class": report.verdict.kind,
        "alarms": alarms,
        "load": os.getloadavg()[0],
    }


# -- peers ----------------------------------------------------------------------------------------


def ask_peers(found: dict[str, Any], python: str, is_due: Callable[[str], bool]) -> None:
    """What TraceML and gpuprof say of the same scripts, as black boxes."""
    site = sysconfig.get_path("purelib")  # torch is there, and need not be installed twice
    for case in CASES:
        known = found["cases"].setdefault(case.name, {})
        is_known = "gpuprof" in known and not is_due(case.name)
        if case.is_jax or case.expected == "hung" or is_known:
            continue
        for tool, ask in (("traceml", traceml), ("gpuprof", gpuprof)):
            with tempfile.TemporaryDirectory() as folder:
                more = {"FAULTS_TOOL": tool, "PYTHONPATH": site, "TQDM_DISABLE": "1"}
                known[tool] = ask(case, folder, python, environment(**more))
                print(f"{tool} on {case.name}: {known[tool]}", flush=True)
        save(found)


def traceml(case: Case, folder: str, python: str, env: dict[str, str]) -> str:
    script, *arguments = case.script.split()
    given = [str(Path(python).parent / "traceml"), "run", str(HERE / "faulty" / script)]
    given += [f"--nproc-per-node={case.ranks}"] if case.ranks > 1 else []
    given += ["--args", *arguments] if arguments else []
    said = output_of(given, folder, env)
    verdict = re.search(r"Verdict:\s*(.+?)\s*(?:\||\n)", said)
    return verdict[1] if verdict else "no verdict"


def gpuprof(case: Case, folder: str, python: str, env: dict[str, str]) -> str:
    said = output_of(command(case, is_fixed=False, python=python), folder, env)
    insights = re.findall(r"\[(HIGH|MED\w*)\]\s*(.{0,60})", said)
    return "; ".join(f"{level}: {text.strip()}" for level, text in insights[:2]) or "no verdict"


def output_of(given: list[str], folder: str, env: dict[str, str]) -> str:
    done = subprocess.run(
        given, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    return done.stdout + done.stderr


if __name__ == "__main__":
    main()
