"""The queries of the page, and the function for each.

A function takes the place and the parameters of the request, and returns plain values. The size of
the result depends on what the page can show, not on the size of the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from cirron.server import charts, overview, ranks, tensors, timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cirron.runs.place import Place

View: TypeAlias = "Callable[[Place, Mapping[str, str]], Any]"

# `/api/<name>`, over all runs
VIEWS: dict[str, View] = {"runs": overview.runs, "diff": overview.diff}
# `/api/runs/<id>/<name>`; without a name, the run itself
OF_RUN: dict[str, View] = {
    "": overview.run,
    "brief": overview.brief,
    "report": overview.report,
    "goodput": overview.goodput,
    "why": overview.why,
    "steps": charts.steps,
    "marks": charts.marks,
    "mark": charts.mark,
    "timeline": timeline.timeline,
    "span": timeline.span,
    "flame": timeline.flame,
    "find": timeline.find,
    "ranks": ranks.ranks,
    "tensors": tensors.tensors,
    "tensor": tensors.tensor,
}
