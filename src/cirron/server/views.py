"""What the page can ask, and the function that answers each question.

Functions take the place and the parameters of path and query, as text, and return plain values.
However large a run is, an answer is as large as what the page can show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from cirron.server import charts, fleet, lanes, overview

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cirron.runs.place import Place

View: TypeAlias = "Callable[[Place, Mapping[str, str]], Any]"

# `/api/<name>`, over all runs
VIEWS: dict[str, View] = {"runs": overview.runs, "diff": overview.diff}
# `/api/runs/<id>/<name>`; the run itself has no name
OF_RUN: dict[str, View] = {
    "": overview.run,
    "brief": overview.brief,
    "report": overview.report,
    "goodput": overview.goodput,
    "why": overview.why,
    "steps": charts.steps,
    "marks": charts.marks,
    "mark": charts.mark,
    "timeline": lanes.timeline,
    "span": lanes.span,
    "flame": lanes.flame,
    "find": lanes.find,
    "ranks": fleet.ranks,
    "tensors": fleet.tensors,
    "tensor": fleet.tensor,
}
