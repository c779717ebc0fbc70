"""What `faults.py` found, as tables in `docs/verdict.md`."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

DOC = Path(__file__).parents[1] / "docs" / "verdict.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
QUIET = ("compute-bound", "healthy")
PEERS = ("traceml", "gpuprof")


def write(found: dict[str, Any]) -> None:
    """Puts the tables between the markers of the page, and prints them."""
    text = "\n\n".join(
        one for one in (summary(found), cases(found), classes(found), gains(found)) if one
    )
    page = DOC.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    DOC.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    print(text)


def summary(found: dict[str, Any]) -> str:
    cases, healthy = found["cases"].values(), found["healthy"]
    right = sum(one["is_right"] for one in cases)
    alarms = [one for one in healthy if one["alarms"]]
    errors = [error for one in cases if (error := error_of(one)) is not None]
    said = f"{right} of {len(cases)} cases right."
    if healthy:
        rate = 100 * len(alarms) / len(healthy)
        said += f" {len(alarms)} false alarms on {len(healthy)} healthy trainings ({rate:.1f} %)."
    if errors:
        said += (
            f" Gains: {len(errors)} predicted, median error {100 * statistics.median(errors):.0f} %"
            f" of the measured gain, worst {100 * max(errors):.0f} %."
        )
    loads = [one["load"] for one in (*cases, *healthy) if "load" in one]
    at = f", at a load of {statistics.median(loads):.0f}" if loads else ""
    return f"{said} Measured on {found['machine']}{at}."


def error_of(one: dict[str, Any]) -> float | None:
    """The error of a predicted gain, as a share of the measured one."""
    if one.get("predicted") is None or one.get("measured") is None:
        return None
    return float(abs(one["predicted"] - one["measured"]) / one["measured"])


def cases(found: dict[str, Any]) -> str:
    has_peers = any(peer in one for one in found["cases"].values() for peer in PEERS)
    head = ["case", "expected", "verdict", "mended"]
    head += ["TraceML", "gpuprof"] if has_peers else []
    rows = []
    for name, one in found["cases"].items():
        mark = "" if one["is_right"] else " (wrong)"
        row = [name, f"`{one['expected']}`", f"`{one['class']}`{mark}"]
        row.append(f"`{one['mended']}`" if "mended" in one else "")
        row += [one.get(peer, "") for peer in PEERS] if has_peers else []
        rows.append(row)
    return table(head, rows)


def classes(found: dict[str, Any]) -> str:
    """Precision, recall and F1 by class: over faulty, mended and healthy runs."""
    pairs = [
        (one["expected"], one["class"] if one["is_right"] else f"{one['class']} (wrong)")
        for one in found["cases"].values()
    ]
    pairs += [("quiet", one["mended"]) for one in found["cases"].values() if "mended" in one]
    pairs += [("quiet", one["class"]) for one in found["healthy"]]
    merged = [tuple("quiet" if one in QUIET else one for one in pair) for pair in pairs]
    rows = []
    for kind in sorted({wanted for wanted, _ in merged} | {said for _, said in merged}):
        if kind.endswith("(wrong)"):
            continue
        hits = sum(wanted == said == kind for wanted, said in merged)
        named = sum(said.removesuffix(" (wrong)") == kind for _, said in merged)
        there = sum(wanted == kind for wanted, _ in merged)
        precision = hits / named if named else 0.0
        recall = hits / there if there else 0.0
        f1 = 2 * precision * recall / (precision + recall) if hits else 0.0
        shown = "`compute-bound` or `healthy`" if kind == "quiet" else f"`{kind}`"
        rows.append([shown, str(there), *(f"{one:.2f}" for one in (precision, recall, f1))])
    return table(["class", "runs", "precision", "recall", "F1"], rows)


def gains(found: dict[str, Any]) -> str:
    rows = []
    for name, one in found["cases"].items():
        if one.get("measured") is None:
            continue
        error = error_of(one)
        predicted = "none given" if one["predicted"] is None else percent(one["predicted"])
        replay = "" if one["replay_error"] is None else f"{100 * one['replay_error']:.1f} %"
        rows.append([name, predicted, percent(one["measured"])])
        rows[-1] += ["" if error is None else percent(error), replay]
    return table(["case", "predicted gain", "measured gain", "error", "replay error"], rows)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
