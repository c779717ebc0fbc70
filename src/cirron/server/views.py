"""What the page can ask: patterns of addresses below `/api/`, and the function that answers each.

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

# A run's id is anything, so it may hold a slash; the shortest pattern comes last.
VIEWS: dict[str, View] = {
    "runs": overview.runs,
    "diff": overview.diff,
    "runs/{run:path}/brief": overview.brief,
    "runs/{run:path}/report": overview.report,
    "runs/{run:path}/goodput": overview.goodput,
    "runs/{run:path}/why": overview.why,
    "runs/{run:path}/steps": charts.steps,
    "runs/{run:path}/marks": charts.marks,
    "runs/{run:path}/mark": charts.mark,
    "runs/{run:path}/timeline": lanes.timeline,
    "runs/{run:path}/span": lanes.span,
    "runs/{run:path}/flame": lanes.flame,
    "runs/{run:path}/find": lanes.find,
    "runs/{run:path}/ranks": fleet.ranks,
    "runs/{run:path}/tensors": fleet.tensors,
    "runs/{run:path}/tensor": fleet.tensor,
    "runs/{run:path}": overview.run,
}
