"""`cirron show`: what the runs in a folder did, are doing, or were doing when they died.

Reads the disk only, so it works beside a running program and long after a dead one.
"""

from __future__ import annotations

import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cirron import errors, settings
from cirron.record import clock
from cirron.runs import reader
from cirron.runs import tree as trees
from cirron.view import text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cirron import wire

ROOT = "cirron.session"
# With more sessions than this in a run, the others get their header lines only.
MAX_TREES = 8
MAX_OTHERS = 5
MAX_PLACES = 8
MAX_STACKS = 8
MAX_FRAMES = 12
MAX_COUNTERS = 12
MAX_PROBLEMS = 20
MAX_PROBLEM = 500  # a file's name may have 255 characters


@click.command()
@click.argument("folder", metavar="[DIR]", required=False)
@click.option("--name", help="Only spans of this name, and what is inside them.")
@click.option("--last", type=click.IntRange(min=1), help="Only the N spans that closed last.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["tree", "json"]),
    default="tree",
    show_default=True,
    help="Text for people, or JSON for programs.",
)
@click.option("--run", "wanted", metavar="ID", help="This run, by its id or the start of it.")
@click.option("--rank", type=int, help="Only this rank of the run.")
@click.option("--all", "is_all", is_flag=True, help="All runs, oldest first.")
def show(
    folder: str | None,
    name: str | None,
    last: int | None,
    form: str,
    wanted: str | None,
    rank: int | None,
    is_all: bool,
) -> None:
    """Shows the latest run in DIR: how it ended or where it is, and the tree of its spans.

    DIR is the folder that the program ran in, or its .cirron folder. By default it is where a
    program started here would write: as CIRRON_OUTPUT_DIR or pyproject.toml says, else here.
    """
    sessions = reader.read(reader.find(default_folder() if folder is None else folder))
    runs = group(run for run in sessions if not is_stray(run))
    if not runs:
        raise no_records([problem for run in sessions for problem in run.problems])
    chosen = choose(runs, wanted, is_all)
    if rank is not None:
        chosen = {run_id: of_rank(run, rank) for run_id, run in chosen.items()}
    shown = {id(run) for members in chosen.values() for run in members}
    problems = [problem for run in sessions if id(run) not in shown for problem in run.problems]
    if form == "json":
        echo(text.to_json(as_dict(chosen, name, last, problems)))
        return
    for number, (run_id, run) in enumerate(chosen.items()):
        if number:
            echo("")
        show_run(run_id, run, name, last)
    show_problems(problems)
    others = {run_id: run for run_id, run in runs.items() if run_id not in chosen}
    if others:
        echo("")
        for line in other_runs(others):
            echo(line)


def echo(line: str) -> None:
    """Prints, with what this terminal's encoding lacks escaped."""
    click.echo(text.encodable(line, sys.stdout))


# -- which runs ---------------------------------------------------------------------------------


def default_folder() -> str:
    """Where a program that is started here would write, or this folder."""
    chosen = settings.resolve({}).output_dir
    return "." if chosen == settings.BY_NAME["output_dir"].default else chosen


def group(sessions: Iterable[reader.SessionRun]) -> dict[str | None, list[reader.SessionRun]]:
    """Sessions by run, the latest run last; each run's by attempt and rank."""
    runs: dict[str | None, list[reader.SessionRun]] = {}
    for run in sessions:
        runs.setdefault(run.run_id, []).append(run)
    for members in runs.values():
        members.sort(key=_place_in_run)
    return dict(sorted(runs.items(), key=lambda pair: max(run.started_ns for run in pair[1])))


def is_stray(run: reader.SessionRun) -> bool:
    """Whether this is only what is wrong with files that do not say whose they are."""
    return run.session is None and not (run.spans or run.marks or run.snapshots)


def no_records(problems: Sequence[str]) -> errors.SettingError:
    """The error for a folder in which nothing was recorded, or nothing that can be read."""
    if problems:
        lines, more = _listed(problems)
        if more:
            lines.append(f"and {more:,} more")
        return errors.SettingError("no file here can be read: " + "\n".join(lines))
    return errors.SettingError(
        "the folder holds no records yet. A run writes its first after one flush interval"
        " (a second by default): try again then, or when the program has ended"
    )


def _place_in_run(run: reader.SessionRun) -> tuple[int, bool, int, int]:
    if run.session is None:
        return (0, True, 0, run.started_ns)
    rank = run.session.rank
    return (run.session.attempt, rank is None, rank or 0, run.started_ns)


def choose(
    runs: dict[str | None, list[reader.SessionRun]], wanted: str | None, is_all: bool
) -> dict[str | None, list[reader.SessionRun]]:
    """The runs to show: those asked for, or the latest."""
    if wanted is not None:
        matching = [run_id for run_id in runs if run_id is not None and run_id.startswith(wanted)]
        if wanted in runs:
            matching = [wanted]
        if len(matching) != 1:
            what = "is the start of several runs" if matching else "is no run in this folder"
            known = matching or [run_id for run_id in runs if run_id is not None]
            raise errors.SettingError(f"--run {wanted!r} {what}; known: {_names(known)}")
        return {matching[0]: runs[matching[0]]}
    if is_all:
        return runs
    latest = list(runs)[-1]
    return {latest: runs[latest]}


def of_rank(run: list[reader.SessionRun], rank: int) -> list[reader.SessionRun]:
    """The sessions of one rank."""
    kept = [one for one in run if one.session is not None and one.session.rank == rank]
    if not kept:
        known = {one.session.rank for one in run if one.session is not None}
        ranks = ", ".join(str(one) for one in sorted(r for r in known if r is not None))
        raise errors.SettingError(f"--rank {rank} is not in this run; known: {ranks or 'none'}")
    return kept


def other_runs(others: dict[str | None, list[reader.SessionRun]]) -> list[str]:
    """The lines that say what else the folder holds, newest first."""
    count = "1 other run" if len(others) == 1 else f"{len(others)} other runs"
    lines = [f"{count} in this folder: cirron show --all, or --run ID"]
    for run_id, run in [*others.items()][: -MAX_OTHERS - 1 : -1]:
        first = main(run)
        name = "records of other writers" if run_id is None else text.plain(run_id)
        parts = [moment(first.started_ns), *text.program_in_short(first.program)]
        if first.state != "unknown":
            parts.insert(1, first.state)
        lines.append(f"  {name}: {', '.join(parts)}")
    if len(others) > MAX_OTHERS:
        lines.append(f"  and {len(others) - MAX_OTHERS} more")
    return lines


def main(run: Sequence[reader.SessionRun]) -> reader.SessionRun:
    """The session that stands for a run: of rank 0 or without a rank, the one that began first."""
    return min(run, key=lambda one: (one.session.rank or 0 if one.session else 0, one.started_ns))


def _names(run_ids: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(text.plain(run_id) for run_id in run_ids[:limit])
    return f"{shown} and {len(run_ids) - limit} more" if len(run_ids) > limit else shown or "none"


# -- as text ------------------------------------------------------------------------------------


def show_run(
    run_id: str | None, sessions: Sequence[reader.SessionRun], name: str | None, last: int | None
) -> None:
    """Prints a run: each of its sessions with what is known of it, and its tree."""
    echo(f"run {text.plain(run_id)}" if run_id is not None else "records of other writers")
    first = main(sessions).program
    common = text.program(first)
    for line in common:
        echo(line)
    for number, run in enumerate(sessions):
        tree = run.tree()
        # One process of a run asks git for changes.
        program = msgspec.structs.replace(run.program, dirty=run.program.dirty or first.dirty)
        own = [line for line in text.program(program) if line not in common]
        echo("")
        for line in header(run, tree) + own + story(run):
            echo(line)
        if number < MAX_TREES:
            echo(text.render(trees.select(tree, name, last)))
        elif number == MAX_TREES:
            echo(f"(trees of the first {MAX_TREES} sessions only; others: --rank N)")
        show_problems(run.problems)


def show_problems(problems: Sequence[str]) -> None:
    """Prints what could not be read."""
    lines, more = _listed(problems)
    for line in lines:
        echo(f"problem: {line}")
    if more:
        echo(f"and {more:,} more problems: --format json lists all")


def _listed(problems: Sequence[str]) -> tuple[list[str], int]:
    lines = [text.plain(problem, MAX_PROBLEM) for problem in problems[:MAX_PROBLEMS]]
    return lines, len(problems) - len(lines)


def header(run: reader.SessionRun, tree: trees.Tree) -> list[str]:
    """Who the session was, how it stands, and how much there is of it."""
    who = []
    if run.session is not None:
        session = run.session
        if session.rank is not None:
            size = "" if session.world_size is None else f" of {session.world_size}"
            who.append(f"rank {session.rank}{size}")
        if session.attempt:
            who.append(f"attempt {session.attempt}")
        who += [f"host {text.plain(session.host)}", f"pid {session.pid}"]
    if run.forked:
        who.append(f"{len(run.forked)} forked")
    who.append(run.state if run.state != "unknown" else "how it ended is unknown")

    until_ns = tree.now_ns if run.state == "running" else run.last_ns
    what = [
        f"started {moment(run.started_ns)}",
        f"{text.duration(until_ns - run.started_ns)} long",
        _count(tree.span_count, "span"),
        _count(len(run.marks), "mark"),
    ]
    if run.snapshots:
        what.append(_count(len(run.snapshots), "snapshot"))
    lines = [", ".join(who), ", ".join(what)]
    if lost := losses(run):
        lines.append(f"lost: {lost}")
    return lines


def losses(run: reader.SessionRun) -> str:
    """The counters of what was dropped, where there are any."""
    counters = (run.blackbox or {}).get("counters", {})
    lost = [(key, count) for key, count in counters.items() if "drop" in key and count]
    return ", ".join(f"{text.plain(key)}={text.value(count)}" for key, count in lost[:MAX_COUNTERS])


def story(run: reader.SessionRun) -> list[str]:
    """What the black box tells of a process that runs or that did not end by itself."""
    box = run.blackbox
    if box is None or run.state in ("clean", "unknown"):
        return []
    places, more = where(run)
    parts = fate(run, box)
    if places:
        parts.append(f"it {'is' if run.state == 'running' else 'was'} in {places[0]}")
    step = box.get("last_step")
    if step and step.get("end_ns") is not None:  # one that is open is in the places already
        parts.append(f"last step: {text.label(step.get('name', '?'), step.get('index'))}")
    if resident_bytes := box.get("memory_rss_bytes"):
        parts.append(f"memory {resident_bytes / 2**30:.2f} GiB")
    lines = [f"{run.state}: {'; '.join(parts)}"] if parts else []
    lines += [f"  also in {place}" for place in places[1:]]
    if more:
        lines.append(f"  and in {more} more")
    return lines + silence(run, box)


def fate(run: reader.SessionRun, box: dict[str, Any]) -> list[str]:
    """How the process ended, or from what it is known that it did."""
    beat = moment(box.get("heartbeat_ns"), run.started_ns)
    host = "" if run.session is None else text.plain(run.session.host)
    if run.state == "killed":
        judged = [f"judged by that alone, for it ran on {host}"] if run.is_judged_by_silence else []
        return [f"no sign of life since {beat}", *judged]
    if run.state == "running":
        if run.is_judged_by_silence:
            return [f"last sign of life from {host} {beat}"]
        age_ns = max(0, clock.wall() - box.get("heartbeat_ns", 0))
        return [f"as of {text.duration(age_ns)} ago"]
    ended = box["ended"]
    detail = text.plain(ended.get("detail") or "no more is known", 200)
    return [f"{detail} at {moment(ended.get('at_ns'), run.started_ns)}"]


def silence(run: reader.SessionRun, box: dict[str, Any]) -> list[str]:
    """For how long nothing was recorded inside a scope; the stacks of then, or of the end."""
    since_ns, heartbeat_ns = box.get("silent_since_ns"), box.get("heartbeat_ns")
    taken = box.get("stacks") or []
    if since_ns is None or heartbeat_ns is None:
        return ["where the threads were:", *stacks(taken)] if taken else []
    lasted = text.duration(heartbeat_ns - since_ns)
    beat = moment(heartbeat_ns, run.started_ns)
    return [
        f"silent: nothing was recorded for {lasted} up to {beat}",
        *stacks(taken),
    ]


def where(run: reader.SessionRun) -> tuple[list[str], int]:
    """The innermost open spans, each with the path to it, and how many more there are.

    The deepest of the main thread comes first.
    """
    spans = {span.id: span for span in run.open_spans()}
    closed = {s.id for s in run.spans if s.id in spans and not s.attrs.get("truncated")}
    for span_id in closed:  # it ended by itself, after the black box was written
        del spans[span_id]
    parents = {span.parent_id for span in spans.values()}
    innermost = [span for span in spans.values() if span.id not in parents]
    if len(innermost) > 1:
        innermost = [span for span in innermost if span.name != ROOT]
    first = next((span.thread_id for span in spans.values() if span.name == ROOT), None)
    innermost.sort(key=lambda span: (span.thread_id != first, span.start_ns))
    now_ns = run.now_ns or run.last_ns
    places = [
        f"{_path(span, spans)}, {text.duration(now_ns - span.start_ns)} in"
        for span in innermost[:MAX_PLACES]
    ]
    return places, len(innermost) - len(places)


def _path(span: wire.Span, spans: dict[str, wire.Span]) -> str:
    path = [span]
    while (above := spans.get(path[-1].parent_id or "")) and len(path) < trees.MAX_DEPTH:
        path.append(above)
    if len(path) > 1 and path[-1].name == ROOT:
        path.pop()  # all of them are inside it
    return " > ".join(text.label(one.name, one.index) for one in path[::-1])


def stacks(threads: Sequence[reader.Stack]) -> list[str]:
    """The stacks that were taken during a long silence, innermost call last."""
    lines: list[str] = []
    for thread in threads[:MAX_STACKS]:
        frames = thread.get("frames", [])
        lines.append(f"  thread {text.plain(thread.get('name', '?'))}:")
        if len(frames) > MAX_FRAMES:
            lines.append(f"    ... {len(frames) - MAX_FRAMES} outer calls")
        lines += [f"    {text.plain(frame, 200)}" for frame in frames[-MAX_FRAMES:]]
    if len(threads) > MAX_STACKS:
        lines.append(f"  ... and {len(threads) - MAX_STACKS} more threads")
    return lines


def moment(ns: int | None, same_day_as_ns: int | None = None) -> str:
    """A moment in local time; without the date when that is the day of the other one."""
    if ns is None:
        return "an unknown time"
    try:
        local = datetime.fromtimestamp(ns / 1e9).astimezone()
        if same_day_as_ns is not None:
            other = datetime.fromtimestamp(same_day_as_ns / 1e9).astimezone()
            if local.date() == other.date():
                return f"{local:%H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # what a broken file may hold
        return "an unknown time"
    return f"{local:%Y-%m-%d %H:%M:%S}"


def _count(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number:,} {noun}s"


# -- as JSON ------------------------------------------------------------------------------------


def as_dict(
    runs: dict[str | None, list[reader.SessionRun]],
    name: str | None,
    last: int | None,
    problems: Sequence[str],
) -> dict[str, Any]:
    """The runs with everything that is known of them, and what is wrong with the other files."""
    return {
        "runs": [
            {
                "run_id": run_id,
                "sessions": [
                    {
                        "session": run.session,
                        "state": run.state,
                        "is_judged_by_silence": run.is_judged_by_silence,
                        "problems": run.problems,
                        "blackbox": run.blackbox,
                        **trees.to_dict(trees.select(run.tree(), name, last)),
                    }
                    for run in sessions
                ],
            }
            for run_id, sessions in runs.items()
        ],
        "problems": problems,
    }
