"""`cirron sql`: runs the user's own queries with the user's permissions, on this machine only."""

from __future__ import annotations

import csv
import io
import sys

import click

from cirron.cli import output
from cirron.view import tables, text

MAX_ROWS = 1_000  # printed as a table


@click.command()
@click.argument("query", metavar="QUERY")
@click.argument("wanted", metavar="[RUN]", required=False)
@output.in_folder
@output.as_json
@click.option("--csv", "is_csv", is_flag=True, help="CSV, with a header line.")
def sql(query: str, wanted: str | None, folder: str | None, is_json: bool, is_csv: bool) -> None:
    """Run QUERY, in DuckDB's SQL, over the tables of a run.

    The tables are spans, marks, snapshots, sessions and training_steps; DESCRIBE spans lists the
    columns of one.
    Times are in nanoseconds since 1970. The total time of each span name, in ms:

    SELECT name, sum(end_ns - start_ns) / 1e6 AS ms FROM spans GROUP BY name

    DuckDB's SQL can read and write files: run only what you
    would run in a shell.
    """
    if is_json and is_csv:
        raise click.UsageError("give --json or --csv, not both")
    run = output.open_run(folder, wanted)
    columns, rows = run.sql(query).fetch()
    if is_json:
        output.echo({"run_id": run.id, "columns": columns, "rows": rows})
    elif is_csv:
        written = io.StringIO()
        writer = csv.writer(written, lineterminator="\n")
        writer.writerows([columns, *rows])
        lines = written.getvalue().removesuffix("\n")
        if text.is_terminal(sys.stdout):
            lines = "\n".join(text.escape(line) for line in lines.split("\n"))
        output.echo(lines)
    else:
        left = len(rows) - MAX_ROWS
        more = f"and {text.plural(left, 'more row')}: --json or --csv has all" if left > 0 else ""
        names = [text.plain(name) for name in columns]
        output.table(names, tables.cells(columns, rows[:MAX_ROWS]), more)
