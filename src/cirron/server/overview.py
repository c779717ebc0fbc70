"""The list of runs; one run, its progress, verdict and goodput; the diff."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from cirron.server import charts, query
from cirron.verdict import report as report_on
from cirron.verdict.diff import diff as compare
from cirron.verdict.endings import silent_s
from cirron.verdict.why import why as explain
from cirron.view import report as view
from cirron.view.html import colour_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cirron.runs.opened import Run, Session
    from cirron.runs.place import Place
    from cirron.verdict.findings import Report

MAX_RUNS = 500
MAX_SESSIONS = 4_000
MAX_PROBLEMS = 50
SPARK_WIDTH = 48
# Common names for the planned number of epochs and steps.
EPOCHS = ("epochs", "num_epochs", "max_epochs", "n_epochs", "num_train_epochs", "nb_epochs")
STEPS = ("max_steps", "total_steps", "num_steps", "train_steps", "max_iters", "steps")


def runs(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """The runs that match all words of `search`, newest first."""
    words = params.get("search", "").lower().split()
    shown: list[dict[str, Any]] = []
    matching = 0
    everything = place.runs
    for run_id in reversed(list(everything)):
        line = describe(everything[run_id])
        if words and not all(word in _searched(line) for word in words):
            continue
        matching += 1
        if len(shown) < MAX_RUNS:
            shown.append(line)
    return {"runs": shown, "matching": matching, "total": len(everything)}


def describe(run: Run) -> dict[str, Any]:
    """A run as the list shows it, without reading its records."""
    program = run.program
    hosts = sorted({one.info.host for one in run.sessions if one.info is not None})
    silent = [
        long_s
        for one in run.sessions
        if one.attempt == run.attempts[-1] and one.state == "running"
        if (long_s := silent_s(one)) is not None
    ]
    return {
        "id": run.id,
        "state": run.state,
        "silent_s": max(silent, default=None),
        "ranks": len(run.ranks) or 1,
        "attempts": len(run.attempts),
        "started_ms": run.started_ns // 1_000_000,
        "wall_ns": run.ended_ns - run.started_ns,
        "script": program.script,
        "arguments": program.arguments,
        "tags": program.tags,
        "config": program.config,
        "commit": program.commit,
        "branch": program.branch,
        "is_dirty": program.dirty,
        "gpus": program.gpus,
        "hosts": hosts[:8],
        "host_count": len(hosts),
    }


def _searched(line: dict[str, Any]) -> str:
    parts = [line["id"], line["state"], line["script"], line["branch"], *line["arguments"]]
    parts += [f"{key}={value}" for kind in ("tags", "config") for key, value in line[kind].items()]
    return " ".join(str(part) for part in parts if part is not None).lower()


def run(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """One run: its program, processes, problems and progress."""
    found = query.run_of(place, params)
    program = found.program
    return {
        **describe(found),
        "python": program.python,
        "versions": program.versions,
        "main": str(found.main.key),
        "sessions": [_session(found, one) for one in found.sessions[:MAX_SESSIONS]],
        "problems": found.problems[:MAX_PROBLEMS],
        "progress": progress(found),
    }


def _session(run: Run, one: Session) -> dict[str, Any]:
    content = {} if one.box is None else one.box.content
    counters = content.get("counters") or {}
    return {
        "session": str(one.key),
        "rank": one.rank,
        "attempt": one.attempt,
        "host": None if one.info is None else one.info.host,
        "pid": one.pid,
        "state": one.state,
        "start": one.first_ns - run.started_ns,
        "end": one.last_ns - run.started_ns,
        "detail": (content.get("ended") or {}).get("detail"),
        "lost": {name: count for name, count in counters.items() if "drop" in name and count},
    }


def brief(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """For the list of runs: the verdict, the step time as a line, and the progress."""
    found = query.run_of(place, params)

    def ask() -> dict[str, Any]:
        verdict = judged(found).verdict
        steps = charts.of_session(found, found.main.key, SPARK_WIDTH)["buckets"]
        return {
            "verdict": verdict.kind,
            "summary": verdict.summary,
            "gain": None if verdict.gain is None else verdict.gain.share,
            "steps": [step["wall"] for step in steps],
            "progress": progress(found),
        }

    return query.kept(found, ("brief",), ask)


def report(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """The verdict, the account of the time, and the command that tells more."""
    found = judged(query.run_of(place, params))
    return {
        **found.as_dict(),
        "colours": {part: colour_of(part) for part, _, _ in found.account},
        "command": view.following(found),
        "primary": {**found.verdict.as_dict(), "blames": found.verdict.blames},
    }


def judged(run: Run) -> Report:
    """The report of a run, cached until the run changes."""
    return query.kept(run, ("report",), lambda: report_on(run))


def goodput(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """Which share of the newest attempt was training, and what took the rest."""
    found = query.run_of(place, params)

    def ask() -> dict[str, Any]:
        one = found.main
        times = found.query("spent", session=one.key).rows()[0]
        wall = max(one.last_ns - one.first_ns, 1)
        times["rest_ns"] = max(wall - sum(ns or 0 for ns in times.values()), 0)
        again = 0
        if len(found.attempts) > 1:  # steps that a later attempt repeats
            attempts = found.query("goodput").rows()
            again = sum(attempt["steps_done_again"] for attempt in attempts)
        return {
            "wall_ns": wall,
            "goodput": max(times["step_ns"] or 0, 0) / wall,
            "steps_done_again": again,
            "times": times,
        }

    return query.kept(found, ("goodput",), ask)


def why(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """Where each process is, or was last; unusual ones first."""
    return explain(query.run_of(place, params)).as_dict()


def diff(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """What changed between the runs `before` and the runs `after`."""
    before = query.runs_of(place, params, "before")
    after = query.runs_of(place, params, "after")
    key = ("diff", *((one.id, one.ended_ns) for one in (*before, *after)))
    return query.kept(after[0], key, lambda: compare(before, after).as_dict())


# -- progress -----------------------------------------------------------------------------------


def progress(run: Run) -> dict[str, Any]:
    """The progress of a run, and the time left if its configuration gives its length."""
    done = run.query("progress", session=run.main.key).rows()[0]
    steps, epoch, step = done["steps"], done["epoch"], done["step"]
    planned = _planned(run)
    found = {"steps": steps, "epoch": epoch, "step": step, **planned, "share": None, "left_s": None}
    share = None
    if steps and planned["max_steps"]:
        share = steps / planned["max_steps"]
    elif steps and planned["epochs"] and epoch is not None and step is not None:
        in_epoch = done["steps_of_epoch_before"]
        share = (epoch + (min(1.0, (step + 1) / in_epoch) if in_epoch else 0.0)) / planned["epochs"]
    if share is not None and 0 < share <= 1:
        # A run that waits in its current step falls behind.
        until_ns = max(done["last_ns"], run.main.last_ns if run.state == "running" else 0)
        taken_s = (until_ns - done["first_ns"]) / 1e9
        found |= {"share": share, "left_s": taken_s * (1 - share) / share}
    return found


def _planned(run: Run) -> dict[str, int | None]:
    """The planned number of epochs and steps, from the configuration or the arguments."""
    said: dict[str, Any] = {}
    for key, value in run.program.config.items():
        said.setdefault(key.rpartition(".")[2].lower(), value)
    arguments = run.program.arguments
    for at, argument in enumerate(arguments):
        match = re.fullmatch(r"--?([\w-]+)(?:=(.*))?", argument)
        if match:
            value = match[2] if match[2] is not None else "".join(arguments[at + 1 : at + 2])
            said.setdefault(match[1].replace("-", "_").lower(), value)
    return {"epochs": _first(said, EPOCHS), "max_steps": _first(said, STEPS)}


def _first(said: dict[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        try:
            value = int(said[name])
        except (KeyError, TypeError, ValueError):
            continue
        if value > 0:
            return value
    return None
