"""A value for each parameter of the questions in `queries/`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from cirron.runs import engine

if TYPE_CHECKING:
    from tests.conftest import Made

    from cirron.runs.opened import Run

GIVEN: dict[str, Any] = {
    "all_ranks": True,
    "at_ns": 0,
    "attempt": 0,
    "axis": "epoch",
    "bins": 5,
    "epoch": 0,
    "every": 1,
    "first": 0,
    "first_ns": 0,
    "forward": True,
    "last": 2**53,
    "last_ns": 2**62,
    "lines": 4,
    "most": 10,
    "name": "loss",
    "number": None,
    "own": True,
    "own_ns": 50,
    "path": "cirron.session/epoch/step",
    "points": 3,
    "rank": 0,
    "since_ns": 0,
    "step": 3,
    "text": "o",
    "width": 7,
}
# Where a name means another thing than elsewhere.
OF_QUERY: dict[str, dict[str, Any]] = {
    "histograms": {"name": "w"},
    "texts": {"name": "text"},
    "mark_lines": {"first": float("-inf"), "last": float("inf")},
}
# Which answer with a row where nothing was recorded.
ONE_ROW = ("goodput", "progress", "root", "search_count", "spent", "step_buckets", "times")

LONG = 2**57  # four years and a half, of which 64 bits cannot hold the sum of 64


def outsize(made: Made) -> None:
    """A run of 70 ranks whose sums and indices do not fit into 64 bits."""
    for rank in (-(2**63), 2**63 - 1, *range(68)):
        of = made(rank=rank, uncertainty_ns=2**63 - 1)
        root = of.span("cirron.session", 0, LONG)
        for index in (-(2**63), 2**63 - 1):
            epoch = of.span("epoch", 0, LONG, root, index)
            step = of.span("step", 0, LONG, epoch, index, gpu_ns=LONG, memory=2**63 - 1)
            for name in ("data_load", "forward", "evaluation", "other"):
                for _ in range(70 if rank == 0 else 1):
                    of.span(name, 0, LONG, step, gpu_ns=LONG)
            of.mark(step, "loss", 1e308, LONG)
            of.span("checkpoint", 0, LONG, epoch)
        of.write()


def given_to(run: Run, query: str) -> dict[str, Any]:
    """What a question is asked with: all of the run, its main session, and one of its steps."""
    window = {"from_ns": run.started_ns, "to_ns": run.ended_ns + 1}
    if query == "timeline":
        return {"width": 20, **window}
    step = run.sql(
        "SELECT id, key FROM spans WHERE session = :session AND name = 'step'"
        " ORDER BY start_ns, id LIMIT 1",
        session=run.main.key,
    )
    known = (
        GIVEN
        | window
        | {"session": run.main.key, "sessions": sum(one.attempt == 0 for one in run.sessions)}
    )
    known |= {"until_ns": run.ended_ns, "zero_ns": run.started_ns, "id": "", "key": 0}
    for one in step:
        known |= one
    known |= OF_QUERY.get(query, {})
    names = re.findall(r"(?<![:\w]):([a-z_]+)", engine.query(query))
    return {name: known[name] for name in names}
