"""`cirron tail`: follows a run live. Each update reads only new records."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from cirron.cli import output
from cirron.runs import engine
from cirron.view import text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cirron.runs.opened import Run

FIRST_LINES = 10  # of the records from before the start
MAX_LINES = 20  # per update and process: of a fast loop, only the last steps are shown


@click.command()
@click.argument("wanted", metavar="[RUN]", required=False)
@output.in_folder
@click.option(
    "--interval",
    type=output.Seconds(0.05, 60),
    default=1.0,
    show_default=True,
    help="Seconds between updates.",
)
@output.as_json
def tail(wanted: str | None, folder: str | None, interval: float, is_json: bool) -> None:
    """Follow a run, the newest by default: its steps, values and process states.

    Ends when the run does, or with Ctrl-C. With --json each line is an object.
    """
    seen = Seen()
    folder, wanted = output.folder_or_run(folder, wanted)
    with output.naming(wanted):
        place = output.open_place(folder)
        run = output.chosen(place, wanted)
    try:
        while True:
            for event in seen.look(run):
                output.echo(event if is_json else line(event))
            if run.state != "running":
                return
            time.sleep(interval)
            while not place.refresh():
                time.sleep(interval)
            run = place.runs[run.id]
    except KeyboardInterrupt:
        return


class Seen:
    """The newest step, mark and state of each session that was printed."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        self._marks: dict[str, int] = {}
        self._states: dict[str, str] = {}
        self._names: dict[str, str] = {}  # of its steps: `step`, or `batch`

    def look(self, run: Run) -> Iterator[dict[str, Any]]:
        """New events by time, with state changes last."""
        limit = MAX_LINES if self._states else FIRST_LINES
        events = [
            *_newest("step", run, self._steps, limit),
            *_newest("mark", run, self._marks, limit),
        ]
        for event in sorted(events, key=lambda event: event["end_ns"]):
            whose = event["session_id"]
            if event["event"] == "step":
                self._names[whose] = event["step_name"]
            elif event["event"] == "mark":
                is_in_step = event["span_name"] in ("step", "batch")
                event["step_name"] = (
                    event["span_name"] if is_in_step else self._names.get(whose, "step")
                )
            yield event
        for session in run.sessions:
            if self._states.get(session.id) != session.state:
                self._states[session.id] = session.state
                yield {
                    "event": "state",
                    "session_id": session.id,
                    "rank": session.rank,
                    "pid": session.pid,
                    "state": session.state,
                    "end_ns": session.last_ns,
                }


# Fetches only the rows that are printed: a long run has millions.
NEWEST = """
SELECT * FROM (
    SELECT *, row_number() OVER (PARTITION BY session_id ORDER BY end_ns DESC) AS place,
        count(*) OVER (PARTITION BY session_id) AS total
    FROM ({query}) q WHERE end_ns > COALESCE(map(:sessions, :ends)[session_id], 0)
) n
WHERE place <= :limit
ORDER BY end_ns, place DESC
"""


def _newest(what: str, run: Run, told: dict[str, int], limit: int) -> Iterator[dict[str, Any]]:
    """The newest rows of each session, and how many others were skipped."""
    rows = run.sql(
        NEWEST.format(query=engine.query(f"{what}s_since")),
        since_ns=min(told.values(), default=0),
        sessions=["", *told],  # not empty: DuckDB needs the types
        ends=[0, *told.values()],
        limit=limit,
    )
    for row in rows:
        place, total = row.pop("place"), row.pop("total")
        if place == limit < total:
            first = {name: row[name] for name in ("session_id", "rank", "end_ns")}
            named = row.get("step_name", what)
            yield {"event": "skipped", "what": named, "count": total - limit, **first}
        told[row["session_id"]] = row["end_ns"]
        yield {"event": what, **row}


def line(event: dict[str, Any]) -> str:
    rank = "" if event["rank"] is None else f"rank {event['rank']} "
    if event["event"] == "state":
        return f"{rank}pid {event['pid']}: {event['state']}"
    if event["event"] == "skipped":
        return f"{rank}... {text.plural(event['count'], event['what'])}"
    names = {"epoch": "epoch", "step": event["step_name"]}
    places = [text.label(names[one], event[one]) for one in names if event[one] is not None]
    if event["event"] == "mark":
        where = " > ".join(places) or text.plain(event["span_name"] or "outside any span")
        value = text.value(event["value"] if event["text"] is None else event["text"])
        return f"{rank}{where} {{{text.plain(event['name'])}={value}}}"
    parts = [text.duration(event["wall_ns"])]
    if event["data_load_ns"] is not None:
        parts.append(f"data {text.duration(event['data_load_ns'])}")
    if event["error"] is not None:
        parts.append(f"error={text.plain(event['error'])}")
    loss = "" if event["loss"] is None else f" {{loss={text.value(event['loss'])}}}"
    return f"{rank}{' > '.join(places) or event['step_name']} - {', '.join(parts)}{loss}"
