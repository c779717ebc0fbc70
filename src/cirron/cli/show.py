"""`cirron show`: shows what runs did, are doing, or were doing when they died.

It reads only the disk, so it works while a program runs and long after it died.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from cirron import errors
from cirron.cli import output
from cirron.cli.output import echo
from cirron.record import clock
from cirron.runs import tree as trees
from cirron.view import tables, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cirron import wire
    from cirron.runs import blackboxes
    from cirron.runs.opened import Run, Runs, Session

ROOT = "cirron.session"
MAX_TREES = 4  # if a run has more sessions, only its main one has a tree
MAX_STORIES = 4  # of the others: how they died
MAX_SESSIONS = 20
MAX_OTHERS = 5
MAX_NAMES = 20
MAX_PLACES = 8
MAX_STACKS = 8
MAX_FRAMES = 12
MAX_COUNTERS = 12
MAX_PROBLEMS = 20
MAX_PROBLEM = 500  # a file's name may have 255 characters


@click.command()
@click.argument("given", metavar="[RUN|DIR]", required=False)
@click.option("--name", help="Only spans with this name, and what is inside them.")
@click.option("--last", type=click.IntRange(min=1), help="Only the N spans that closed last.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["tree", "json"]),
    default="tree",
    show_default=True,
    help="Text, or the same JSON as --json.",
)
@click.option("--run", "wanted", metavar="ID", help="Show this run: its id, or the start of it.")
@click.option("--rank", type=int, help="Only this rank of the run.")
@click.option("--all", "is_all", is_flag=True, help="All runs, oldest first.")
@output.in_folder
@output.as_json
def show(
    given: str | None,
    name: str | None,
    last: int | None,
    form: str,
    wanted: str | None,
    rank: int | None,
    is_all: bool,
    folder: str | None,
    is_json: bool,
) -> None:
    """Show a run: how it ended or where it is now, and the tree of its spans.

    RUN is the start of a run's id, by default the newest run. DIR is the folder that the program
    ran in, or its .cirron folder. By default it is the folder that CIRRON_OUTPUT_DIR or
    pyproject.toml names, else the current one.
    """
    if given is not None and (wanted is not None or os.path.lexists(given)):
        folder, given = given, None
    with output.naming(given):
        place = output.open_place(folder)
        chosen = choose(place.runs, wanted or given, is_all)
    shown = [Selection(run, sessions_of(run, rank)) for run in chosen]
    if name is not None:
        check_name(chosen, name)
    if is_json or form == "json":
        output.echo(as_dict(shown, name, last, place.problems))
        return
    for number, one in enumerate(shown):
        if number:
            echo("")
        show_run(one, name, last)
    show_problems(place.problems)
    others = [run_id for run_id in place.runs if run_id not in {run.id for run in chosen}]
    if others:
        echo("\n".join(["", *other_runs(place.runs, others)]))


class Selection(NamedTuple):
    """A run, and those of its sessions to show."""

    run: Run
    sessions: list[Session]

    @property
    def main(self) -> Session:
        return self.run.main if self.run.main in self.sessions else self.sessions[-1]

    def count_of(self, table: str, session: Session) -> int:
        query = f"SELECT count(*) AS count FROM {table} WHERE session = :session"  # noqa: S608
        return int(self.run.sql(query, session=session.key).rows()[0]["count"])

    def step_times(self) -> dict[int, str]:
        """The median duration of a step of each session, by key."""
        return {
            row["session"]: text.duration(row["median"])
            for attempt in {one.attempt for one in self.sessions}
            for row in self.run.query("step_times", attempt=attempt)
        }

    def closed(self, session: Session, ids: list[str]) -> set[str]:
        """Those of these spans that ended normally."""
        query = (
            "SELECT id FROM spans WHERE session = :session AND end_ns IS NOT NULL"
            " AND (attrs->>'truncated') IS NULL AND id IN (SELECT unnest(:ids))"
        )
        rows = self.run.sql(query, session=session.key, ids=ids) if ids else ()
        return {row["id"] for row in rows}


# -- which runs ---------------------------------------------------------------------------------


def choose(runs: Runs, wanted: str | None, is_all: bool) -> list[Run]:
    if wanted is not None:
        return [runs[wanted]]
    return [runs[run_id] for run_id in runs] if is_all else [runs.latest]


def check_name(runs: Sequence[Run], name: str) -> None:
    """Raises an error that lists the known names if no span has this name."""
    query = "SELECT name FROM spans GROUP BY name ORDER BY count(*), name"
    known = list(dict.fromkeys(row["name"] for run in runs for row in run.sql(query).rows()))
    if name not in known:
        names = ", ".join(text.plain(one) for one in known[:MAX_NAMES])
        raise errors.UnknownRunError(
            f"no span is called {text.plain(name)!r}; choose one of: {names}"
        )


def sessions_of(run: Run, rank: int | None) -> list[Session]:
    """The sessions of a run, or those of one rank."""
    kept = [one for one in run.sessions if rank is None or one.rank == rank]
    if not kept:
        ranks = ", ".join(map(str, run.ranks[:MAX_NAMES])) + ", ..." * (len(run.ranks) > MAX_NAMES)
        known = f"choose one of: {ranks}" if ranks else "leave out --rank, since no rank is known"
        raise errors.UnknownRunError(f"this run has no rank {rank}; {known}")
    return kept


def other_runs(runs: Runs, others: Sequence[str]) -> list[str]:
    """Lines that list the other runs in the folder, newest first."""
    count = "1 other run" if len(others) == 1 else f"{len(others)} other runs"
    lines = [f"{count} in this folder: cirron show --all, or --run ID"]
    for run_id in [*others][: -MAX_OTHERS - 1 : -1]:
        first = runs[run_id].main
        parts = [moment(first.first_ns), *text.program_in_short(first.program)]
        if first.state != "unknown":
            parts.insert(1, first.state)
        lines.append(f"  {title(runs[run_id])}: {', '.join(parts)}")
    if len(others) > MAX_OTHERS:
        lines.append(f"  and {len(others) - MAX_OTHERS} more")
    return lines


def title(run: Run) -> str:
    """The title of a run: its id, if it has one."""
    return "records of other writers" if run.main.info is None else text.plain(run.id)


# -- as text ------------------------------------------------------------------------------------


def show_run(shown: Selection, name: str | None, last: int | None) -> None:
    """Prints a run: each session with its state and its tree."""
    run = shown.run
    first = run.main.program
    common = text.program(first)
    echo("\n".join([title(run) if run.main.info is None else f"run {title(run)}", *common]))
    is_large = len(shown.sessions) > MAX_TREES
    for session in [shown.main] if is_large else shown.sessions:
        # Only one process of a run asks git for changes.
        program = msgspec.structs.replace(
            session.program, dirty=session.program.dirty or first.dirty
        )
        own = [line for line in text.program(program) if line not in common]
        echo("\n".join(["", *header(shown, session), *own, *story(shown, session)]))
        echo(text.render(trees.select(run.tree_of(session), name, last), is_detailed=True))
    if is_large:
        show_sessions(shown)


def show_sessions(shown: Selection) -> None:
    """Prints the sessions of a large run, those that died first."""
    sessions = sorted(shown.sessions, key=lambda one: one.state in ("running", "clean", "unknown"))
    for session in sessions[:MAX_STORIES]:
        if session is not shown.main and (lines := story(shown, session)):
            echo("\n".join(["", ", ".join(who(session)), *lines]))
    echo("")
    times = shown.step_times()
    rows = [
        [
            "-" if one.rank is None else str(one.rank),
            str(one.attempt),
            one.state,
            text.duration(one.last_ns - one.first_ns),
            times.get(one.key, "-"),
            "-" if one.info is None else text.plain(one.info.host),
            str(one.pid),
        ]
        for one in sessions[:MAX_SESSIONS]
    ]
    left = len(sessions) - len(rows)
    more = f"and {text.plural(left, 'more process')}; " if left else ""
    columns = ("rank", "attempt", "state", "lasted", "median step", "host", "pid")
    output.table(
        columns, rows, f"{more}--rank N shows the tree of a rank, cirron why where each is"
    )


def show_problems(problems: Sequence[str]) -> None:
    """Prints the files that could not be read."""
    for problem in problems[:MAX_PROBLEMS]:
        echo(f"problem: {text.plain(problem, MAX_PROBLEM)}")
    if len(problems) > MAX_PROBLEMS:
        echo(f"and {len(problems) - MAX_PROBLEMS:,} more problems: --format json lists all")


def who(one: Session) -> list[str]:
    """The session's rank, host, pid and state."""
    parts = []
    if one.info is not None:
        if one.rank is not None:
            size = "" if one.info.world_size is None else f" of {one.info.world_size}"
            parts.append(f"rank {one.rank}{size}")
        if one.attempt:
            parts.append(f"attempt {one.attempt}")
        parts += [f"host {text.plain(one.info.host)}", f"pid {one.info.pid}"]
    if one.forked:
        parts.append(f"{len(one.forked)} forked")
    return [*parts, one.state if one.state != "unknown" else "how it ended is unknown"]


def header(shown: Selection, one: Session) -> list[str]:
    """The session's rank, host, pid and state, and the number of its records."""
    what = [
        f"started {moment(one.first_ns)}",
        f"{text.duration(one.last_ns - one.first_ns)} long",
        text.plural(shown.count_of("spans", one), "span"),
        text.plural(shown.count_of("marks", one), "mark"),
    ]
    if snapshots := shown.count_of("snapshots", one):
        what.append(text.plural(snapshots, "snapshot"))
    lines = [", ".join(who(one)), ", ".join(what)]
    if lost := tables.losses(one):
        lines.append(f"lost: {', '.join(lost[:MAX_COUNTERS])}")
    return lines


def story(shown: Selection, run: Session) -> list[str]:
    """What the black box says about a process that runs or did not end normally."""
    if run.box is None or run.state in ("clean", "unknown"):
        return []
    box = run.box.content
    places, more = where(shown, run)
    parts = fate(run, box)
    if places:
        parts.append(f"it {'is' if run.state == 'running' else 'was'} in {places[0]}")
    step = box.get("last_step")
    if step and step.get("end_ns") is not None:  # one that is open is in the places already
        parts.append(f"last step: {text.label(step.get('name', '?'), step.get('index'))}")
    if resident_bytes := box.get("memory_rss_bytes"):
        parts.append(f"memory {text.size(resident_bytes)}")
    lines = [f"{run.state}: {'; '.join(parts)}"] if parts else []
    lines += [f"  also in {place}" for place in places[1:]]
    if more:
        lines.append(f"  and in {more} more")
    return lines + silence(run, box)


def fate(run: Session, box: dict[str, Any]) -> list[str]:
    """How the process ended, or why it is considered dead."""
    beat = moment(box.get("heartbeat_ns"), run.first_ns)
    host = "" if run.info is None else text.plain(run.info.host)
    if run.state == "killed":
        judged = [f"no more is known, since it ran on {host}"] if run.is_judged_by_silence else []
        return [f"no sign of life since {beat}", *judged]
    if run.state == "running":
        if run.is_judged_by_silence:
            return [f"last sign of life from {host} {beat}"]
        age_ns = max(0, clock.wall() - box.get("heartbeat_ns", 0))
        return [f"as of {text.duration(age_ns)} ago"]
    ended = box["ended"]
    detail = text.plain(ended.get("detail") or "no more is known", 200)
    return [f"{detail} at {moment(ended.get('at_ns'), run.first_ns)}"]


def silence(run: Session, box: dict[str, Any]) -> list[str]:
    """How long nothing was recorded inside a scope, and the stacks at that time or at the end."""
    since_ns, heartbeat_ns = box.get("silent_since_ns"), box.get("heartbeat_ns")
    taken = box.get("stacks") or []
    if since_ns is None or heartbeat_ns is None:
        return ["where the threads were:", *stacks(taken)] if taken else []
    lasted = text.duration(heartbeat_ns - since_ns)
    beat = moment(heartbeat_ns, run.first_ns)
    return [f"silent: nothing was recorded for {lasted} up to {beat}", *stacks(taken)]


def where(shown: Selection, run: Session) -> tuple[list[str], int]:
    """The innermost open spans, each with the path to it, and how many more there are.

    The deepest of the main thread comes first.
    """
    boxes = [*([] if run.box is None else [run.box]), *run.forked]
    spans = {span.id: span for box in boxes for span in box.spans}
    # A forked process may have ended long before its parent.
    seen_ns = {span.id: box.content.get("heartbeat_ns") for box in boxes for span in box.spans}
    for span_id in shown.closed(run, list(spans)):  # after the black box was written
        del spans[span_id]
    parents = {span.parent_id for span in spans.values()}
    innermost = [span for span in spans.values() if span.id not in parents]
    if len(innermost) > 1:
        innermost = [span for span in innermost if span.name != ROOT]
    first = next((span.thread_id for span in spans.values() if span.name == ROOT), None)
    innermost.sort(key=lambda span: (span.thread_id != first, span.start_ns))
    places = []
    for span in innermost[:MAX_PLACES]:
        lasted_ns = (seen_ns[span.id] or run.last_ns) - span.start_ns
        places.append(f"{_path(span, spans)}, {text.duration(lasted_ns)} in")
    return places, len(innermost) - len(places)


def _path(span: wire.Span, spans: dict[str, wire.Span]) -> str:
    path = [span]
    while (above := spans.get(path[-1].parent_id or "")) and len(path) < trees.MAX_DEPTH:
        path.append(above)
    if len(path) > 1 and path[-1].name == ROOT:
        path.pop()  # all of them are inside it
    return " > ".join(text.label(one.name, one.index) for one in path[::-1])


def stacks(threads: Sequence[blackboxes.Stack]) -> list[str]:
    """The stacks that were saved during a long silence, innermost call last."""
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
    """A local time; without the date if both are on the same day."""
    day = "%Y-%m-%d"
    is_same_day = tables.moment(ns, day) == tables.moment(same_day_as_ns, day)
    return tables.moment(ns, "%H:%M:%S") if is_same_day else tables.moment(ns)


# -- as JSON ------------------------------------------------------------------------------------


def as_dict(
    shown: Sequence[Selection], name: str | None, last: int | None, problems: Sequence[str]
) -> dict[str, Any]:
    """The runs with all their data, and the files that could not be read."""
    return {
        "runs": [
            {
                "run_id": None if one.run.main.info is None else one.run.id,
                "sessions": [
                    {
                        "session": session.info,
                        "state": session.state,
                        "is_judged_by_silence": session.is_judged_by_silence,
                        "blackbox": None if session.box is None else session.box.content,
                        **trees.to_dict(trees.select(one.run.tree_of(session), name, last)),
                    }
                    for session in one.sessions
                ],
            }
            for one in shown
        ],
        "problems": problems,
    }
