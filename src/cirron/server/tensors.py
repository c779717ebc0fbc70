"""Weights and gradients at the end of each epoch: statistics and histograms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cirron.server import query

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cirron.runs.opened import Run
    from cirron.runs.place import Place

MAX_TENSORS = 300
SPARK_POINTS = 60
MAX_SNAPSHOTS = 240


def tensors(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """The newest statistics of each tensor, and norms by epoch; unhealthy tensors first."""
    run = query.run_of(place, params)
    session = query.session_of(run, params)
    search = params.get("search", "").lower()
    sick = _sick(run, session.key)
    lines: dict[str, dict[str, Any]] = {}
    for row in run.query("tensor_lines", session=session.key, points=SPARK_POINTS).rows():
        name = row["tensor"]
        if search not in name.lower():
            continue
        line = lines.setdefault(name, {"norms": [], "gradients": [], "changes": []})
        line["norms"].append(row["norm"])
        line["gradients"].append(row["gradient_norm"])
        line["changes"].append(row["change"])
        if row["is_last"]:
            attrs = query.attributes(row.pop("attrs"))
            line |= {**row, "nonfinite": attrs.get("nonfinite_count", 0)}
            line["problems"] = list(
                {
                    one["problem"]: one
                    for its in (f"{name}.grad", name)
                    for one in sick.get(its, [])
                }.values()
            )
            lines[name] = line
    ordered = sorted(
        lines.values(),
        key=lambda one: (not one["problems"], not one["nonfinite"], -(one["change"] or 0.0)),
    )
    return {"tensors": ordered[:MAX_TENSORS], "total": len(ordered)}


def _sick(run: Run, session: int) -> dict[str, list[dict[str, Any]]]:
    """The problems of each tensor, with the epoch in which each was first seen."""
    found: dict[str, list[dict[str, Any]]] = {}
    for epoch, attrs in run.query("health", session=session).fetch().rows:
        said = query.attributes(attrs)
        for tensor in said.get("tensors") or ():
            problem = {"problem": str(said.get("problem")), "epoch": epoch}
            known = found.setdefault(str(tensor), [])
            if problem["problem"] not in [one["problem"] for one in known]:
                known.append(problem)
    return found


def tensor(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """Histograms and statistics of a tensor and of its gradient, by epoch."""
    run = query.run_of(place, params)
    session = query.session_of(run, params)
    name = query.text(params, "name").removesuffix(".grad")
    rows = run.query("histograms", session=session.key, name=name, most=MAX_SNAPSHOTS)
    found: dict[str, Any] = {"name": name, "weights": [], "gradients": []}
    for row in query.since_start(run, rows):
        found["gradients" if row.pop("is_gradient") else "weights"].append(row)
    return found
