"""What changed between runs: `diff(before, after)`.

Settings that make runs hard to compare come first, then the times by span name (`ratios.py`), and
where marks and tensors first differ. A change exceeds a limit only if its whole interval does.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cirron.verdict.facts import Facts, describe, fetch_steps, gather, leading, settled_from
from cirron.verdict.ratios import (
    CLOSE,
    FEW_RUNS,
    WHOLE,
    Change,
    Estimate,
    Runs,
    compare,
    judge,
    starvation,
)
from cirron.verdict.rules import percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cirron.runs.opened import Run

MIN_SPANS = 30  # of a name on each side
MAX_SPANS = 500  # of a name and rank: the newest
MAX_RANKS = 8
# Outer spans are too few to test.
OUTER = ("cirron.session", "epoch", "fit", "evaluation", "prediction")

# A larger difference between values of a mark is more than rounding.
FAR = 0.01
# An evaluation or a checkpoint this many times as often is a difference of the programs.
OFTEN, MIN_ASIDES = 1.5, 5
MAX_PREDECESSORS = 3
MAX_LOOKED_AT = 50  # runs that are searched for the same script


@dataclass
class Diff:
    """The differences between runs, and whether the runs are comparable."""

    runs: tuple[list[str], list[str]]
    differences: list[str]  # of device, batch size, versions and configuration
    warnings: list[str]
    changes: list[Change]  # the largest first
    marks: list[dict[str, Any]]  # where the values of each mark first differ
    tensors: list[dict[str, Any]] = field(default_factory=list)  # the first that differ
    not_compared: list[str] = field(default_factory=list)  # names with too few spans

    @property
    def is_inconclusive(self) -> bool:
        """Whether nothing has changed for certain, and something may have."""
        outcomes = {one.outcome for one in self.changes}
        return outcomes.isdisjoint(("slower", "faster")) and outcomes != {"same"}

    def exceeds(self, limit: float) -> bool | None:
        """Whether something is slower than the limit allows. None: inconclusive."""
        if not self.changes:
            return None
        if any(one.outcome == "slower" and one.low > 1 + limit for one in self.changes):
            return True
        is_open = any(one.high > 1 + limit for one in self.changes)
        return None if is_open else False

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "runs": {"before": self.runs[0], "after": self.runs[1]},
            "differences": self.differences,
            "warnings": self.warnings,
            "changes": [vars(one) for one in self.changes],
            "not_compared": self.not_compared,
            "marks": self.marks,
            "tensors": self.tensors,
        }


Place = tuple[int, int, int]  # epoch, step, and which of the values there; -1: outside any


def diff(before: Sequence[Run], after: Sequence[Run]) -> Diff:
    """Compares runs from before a change with runs from after it."""
    old, new = sample(before), sample(after)
    found, not_compared = compared(old, new)
    warnings = []
    if {run.id for run in before} & {run.id for run in after}:
        warnings.append("a run is compared with itself")
    if max(len(before), len(after)) < FEW_RUNS:
        warnings.append(
            "fewer than three runs on each side: the noise between runs is unknown, and a change in"
            " all phases at once is attributed to the machine; add runs (cirron diff --baseline)"
        )
    starved = starvation([waited(run) for run in before], [waited(run) for run in after])
    if starved > CLOSE / 2:
        warnings.append(
            f"the runs waited for a CPU: changes of less than {limit(math.exp(2 * starved))} cannot"
            " be told from that; use a quiet machine, or add runs (cirron diff --baseline)"
        )
    return Diff(
        runs=([run.id for run in before], [run.id for run in after]),
        differences=differences(before[0], after[0]),
        warnings=warnings,
        changes=judge(found, starved),
        marks=part(before[0], after[0]),
        tensors=part_tensors(before[0], after[0]),
        not_compared=not_compared,
    )


def compared(old: dict[str, Runs], new: dict[str, Runs]) -> tuple[list[Estimate], list[str]]:
    """The names in both samples, compared, and those with too few spans."""
    found, left = [], []
    for name in (one for one in old if one in new):
        counts = [sum(len(rank) for run in side[name] for rank in run) for side in (old, new)]
        if min(counts) >= MIN_SPANS:
            found.append(compare(name, old[name], new[name]))
        else:
            left.append(name)
    return found, left


def limit(ratio: float) -> str:
    """A ratio of times as a percentage, or from 2 on as a factor.

    >>> limit(1.35), limit(8.08)
    ('35%', '8.1x')
    """
    return percent(ratio - 1) if ratio < 2 else f"{ratio:.1f}x"


def waited(run: Run) -> float:
    """The share of its time that the leading rank waited for a CPU; 0: not measured."""
    lead, facts = leading(run), Facts("unknown", 1)
    if lead is not None:
        describe(facts, run, {"session": lead.key})
    return facts.starved_share or 0.0


def sample(runs: Sequence[Run]) -> dict[str, Runs]:
    """Durations after warm-up by span name, run and rank, in the order in which spans ended.

    Two parts of steps have no span: the wait between the batches of `ci.batches`, and the time in
    no phase.
    """
    found: dict[str, Runs] = {}
    for run in runs:
        sessions = [one for one in run.sessions if one.attempt == run.attempts[-1]][:MAX_RANKS]
        kept: dict[str, list[list[int]]] = {}
        for session in sessions:
            rows = run.query("newest_spans", session=session.key, most=MAX_SPANS).fetch().rows
            walls: dict[str, list[int]] = {}
            for name, mode, wall in rows:
                if name not in OUTER:
                    walls.setdefault(name if mode is None else f"{name} ({mode})", []).append(wall)
            steps = fetch_steps(run, {"session": session.key}, MAX_SPANS)
            if any(step.forward is not None for step in steps):
                walls["in no phase"] = [step.own for step in steps]
            if any(step.data_load for step in steps):
                walls.setdefault("data_load", [step.data_load or 0 for step in steps])
            for name, each in walls.items():
                kept.setdefault(name, []).append(each[settled_from(each) :])
        for name, ranks in kept.items():
            found.setdefault(name, []).append(ranks)
    return found


def differences(before: Run, after: Run) -> list[str]:
    """The settings that differ and may explain a change."""
    facts = gather(before), gather(after)
    old, new = setting(before, facts[0]), setting(after, facts[1])
    return [
        f"{name}: {old.get(name, 'unknown')} before, {new.get(name, 'unknown')} after"
        for name in sorted({*old, *new})
        # Details that only one run has are left out: "loader" or "model" differs already.
        if old.get(name) != new.get(name) and (name in old) == (name in new)
    ] + often(*facts)


def often(old: Facts, new: Facts) -> list[str]:
    """What is done more or less often beside the steps: its own time may be the same."""
    found = []
    for name in sorted({*old.asides, *new.asides}):
        counts = [one.asides.get(name, 0) for one in (old, new)]
        rates = [
            100 * count / max(len(one.steps), 1)
            for count, one in zip(counts, (old, new), strict=True)
        ]
        if max(counts) >= MIN_ASIDES and max(rates) > OFTEN * min(rates):
            texts = [f"{rate:.3g} in 100 steps" for rate in rates]
            found.append(f"{name}: {texts[0]} before, {texts[1]} after")
    return found


def setting(run: Run, facts: Facts) -> dict[str, str]:
    program = run.program
    found = {
        "script": program.script or "unknown",
        "arguments": " ".join(program.arguments)[:200] or "none",
        "ended": run.state,
        "framework": facts.framework,
        "device": facts.device,
        "world size": str(facts.world_size),
        "processors": str(facts.cores or "unknown"),
        "loader": "known" if facts.loader else "unknown",
        "model": "known" if facts.model else "unknown",
    }
    found |= {f"loader {name}": str(value) for name, value in facts.loader.items()}
    found |= {f"model {name}": str(value) for name, value in facts.model.items()}
    found |= {f"config {name}": str(value)[:200] for name, value in program.config.items()}
    found |= {f"version of {name}": text for name, text in program.versions.items()}
    if program.python:
        found["version of Python"] = program.python
    if program.commit:
        found["commit"] = program.commit[:10]
    return found


def part(before: Run, after: Run) -> list[dict[str, Any]]:
    """For each mark in both runs, where by time it first differs at all, and by more than 1 %.

    Several values at one place, as outside any epoch, are compared in their order. The first
    difference may be rounding: some kernels add in a different order each time.
    """
    found = []
    old, new = values(before), values(after)
    for name in sorted(set(old) & set(new)):
        pairs = [(at, old[name][at], new[name][at]) for at in old[name] if at in new[name]]
        if pairs:
            found.append(
                {
                    "name": name,
                    "compared": len(pairs),
                    "parts_at": first_apart(pairs, 1e-9),
                    "far_at": first_apart(pairs, FAR),
                    "before": pairs[-1][1],
                    "after": pairs[-1][2],
                }
            )
    return found


def first_apart(pairs: list[tuple[Place, float, float]], share: float) -> dict[str, int] | None:
    """The first position at which two values differ by more than this share of the larger."""
    for (epoch, step, nth), one, other in pairs:
        if not alike(one, other, share):
            at = {"epoch": epoch, "step": step}
            is_alone = (epoch, step, 1) not in (place for place, *_ in pairs)
            return at if is_alone else {**at, "value": nth}
    return None


def values(run: Run) -> dict[str, dict[Place, float]]:
    """The values of each mark by place, in the order of time."""
    found: dict[str, dict[Place, float]] = {}
    counts: Counter[tuple[str, int, int]] = Counter()
    for name, epoch, step, value in run.query("values", session=run.main.key).fetch().rows:
        at = (-1 if epoch is None else epoch, -1 if step is None else step)
        found.setdefault(name, {})[*at, counts[name, *at]] = value
        counts[name, *at] += 1
    return found


def part_tensors(before: Run, after: Run) -> list[dict[str, Any]]:
    """The tensors that differ in the first epoch with a difference, largest difference first."""
    old, new = tensors(before), tensors(after)
    found: list[dict[str, Any]] = []
    for epoch, name in sorted(set(old) & set(new)):
        if found and epoch > found[0]["epoch"]:
            break
        one, other = old[epoch, name], new[epoch, name]
        if not all(alike(*pair, 1e-6) for pair in zip(one, other, strict=True)):
            found.append({"tensor": name, "epoch": epoch, "before": one[0], "after": other[0]})
    return sorted(found, key=lambda one: -apart(one["before"], one["after"]))


def tensors(run: Run) -> dict[tuple[int, str], tuple[float, float, float]]:
    """Norm, mean and deviation of each tensor by epoch; NaN where it is not finite."""
    rows = run.query("norms", session=run.main.key).fetch().rows
    return {
        (epoch, name): tuple(math.nan if one is None else one for one in stats)  # type: ignore[misc]
        for epoch, name, *stats in rows
    }


def alike(one: float, other: float, share: float) -> bool:
    return (
        one == other or (one != one and other != other) or math.isclose(one, other, rel_tol=share)
    )


def apart(one: float, other: float) -> float:
    """The difference as a share of the larger value; infinite if one is not finite."""
    if not math.isfinite(one) or not math.isfinite(other):
        return 0.0 if alike(one, other, 0.0) else math.inf
    return abs(one - other) / (max(abs(one), abs(other)) or 1.0)


# -- the runs before this one ----------------------------------------------------------------


def predecessors(run: Run) -> list[Run]:
    """Earlier runs of the same script, newest first."""
    ids = list(run.runs)
    before = ids[: ids.index(run.id)] if run.id in ids and run.program.script else []
    found: list[Run] = []
    for one in reversed(before[-MAX_LOOKED_AT:]):
        other = run.runs[one]
        if other.program.script == run.program.script and len(found) < MAX_PREDECESSORS:
            found.append(other)
    return found


def since(run: Run, steps: Sequence[int]) -> dict[str, Any] | None:
    """The steps of a run compared with its predecessors; None: not comparable.

    The phases are compared, too: if all have moved, that is attributed to the machine.
    """
    old: dict[str, list[list[int]]] = {}
    shares = []
    for one in predecessors(run) if len(steps) >= MIN_SPANS else ():
        lead = leading(one)
        if lead is not None and one.ranks == run.ranks:
            newest = fetch_steps(one, {"session": lead.key}, MAX_SPANS)
            walls = [step.wall - step.beside for step in newest]
            walls = walls[settled_from(walls) :]
            if len(walls) >= MIN_SPANS:
                old[one.id] = [walls]
                shares.append(waited(one))
    if not old:
        return None
    before, after = sample([run.runs[one] for one in old]), sample([run])
    for side, walls_of in ((before, list(old.values())), (after, [[list(steps[-MAX_SPANS:])]])):
        for name in WHOLE:
            side.pop(name, None)
        side["step"] = walls_of
    found, _ = compared(before, after)
    changes = judge(found, starvation(shares, [waited(run)]))
    return {"runs": list(old), "change": next(one for one in changes if one.name == "step")}
