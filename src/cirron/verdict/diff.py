"""What changed between two runs: `diff(before, after)`.

By span name: the ratio of medians, with an interval by a seeded bootstrap that draws runs, ranks
and blocks of steps that follow each other (steps are not independent of their neighbours). Few runs
say little of how runs of the same program differ: each draw adds what they do at least, and what
has moved all phases at once is taken for the machine. Over all names the rate of false discoveries
is held at 5 % (Benjamini and Hochberg). A change fails a limit only if all of its interval is past
it.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from statistics import NormalDist, median, median_low, quantiles, stdev, variance
from typing import TYPE_CHECKING, Any, Literal

from cirron.verdict.facts import fetch_steps, gather, leading, settled_from

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cirron.runs.opened import Run

SEED = 20_260_101
DRAWS = 200
LEVEL = 0.05
# The deviation of a program's medians from run to run, on a quiet machine.
RUN_NOISE = 0.007
# Fewer runs a side do not say how much they differ. Then it is a little less, and to that comes:
LEAST_NOISE = 0.0055
FEW_RUNS = 3
# - what the parts of a run differ by beyond chance, taken as so often its variance;
PARTS = 4
BY_CHANCE = 3.0
# - if most other phases have moved by so many deviations, the machine's doing, up to so much;
MOVED = 2.0
MOST_NOISE = 0.2
# - what is common: for a name without others, and for phases of microseconds.
LONE_NOISE = 0.03
FLOOR_NS = 3_000
# No change was found: if the interval is within this, there is none; else it cannot be told.
CLOSE = 0.05
MIN_SPANS = 30  # of a name on each side
MIN_PART = 5  # spans
MAX_SPANS = 500  # of a name and rank: the newest
MAX_RANKS = 8
# Names whose spans are long or few on purpose: their totals are compared by people, not by tests.
OUTER = ("cirron.session", "epoch", "fit", "evaluation", "prediction")

# Values of a mark that differ by this share are no longer the same but for rounding.
FAR = 0.01
MAX_PREDECESSORS = 3
MAX_LOOKED_AT = 50  # runs, for those of the same script

Outcome = Literal["slower", "faster", "same", "unknown"]


@dataclass(frozen=True)
class Change:
    """One name of spans on both sides."""

    name: str
    before_ns: float
    after_ns: float
    ratio: float
    low: float
    high: float
    p: float
    spans: tuple[int, int]
    outcome: Outcome


@dataclass(frozen=True)
class Estimate:
    """One name of spans on both sides, by itself: what a change is judged by."""

    name: str
    before_ns: float
    after_ns: float
    spread: float  # the deviation of the ratio's logarithm
    drift: float  # what the parts of a run differ by beyond chance, as a deviation; else 0
    freedom: float
    spans: tuple[int, int]
    has_few_runs: bool

    @property
    def log(self) -> float:
        return math.log(max(self.after_ns, 1.0) / max(self.before_ns, 1.0))


@dataclass
class Diff:
    """What differs between runs, and whether they can be compared at all."""

    runs: tuple[list[str], list[str]]
    differences: list[str]  # of device, batch size, versions, configuration: said first
    warnings: list[str]
    changes: list[Change]  # the largest first
    marks: list[dict[str, Any]]  # where the values of a mark part
    tensors: list[dict[str, Any]] = field(default_factory=list)  # those that part first

    def exceeds(self, limit: float) -> bool | None:
        """Whether something is slower than the limit allows. None: that cannot be told."""
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
            "marks": self.marks,
            "tensors": self.tensors,
        }


Place = tuple[int, int]  # epoch and step
# The durations of each name, in blocks of one rank of one run.
Sample = dict[str, list[list[list[int]]]]


def diff(before: Sequence[Run], after: Sequence[Run]) -> Diff:
    """Compares runs: those that were with those that are."""
    old, new = sample(before), sample(after)
    names = [name for name in old if name in new]
    found = []
    for name in names:
        counts = tuple(sum(len(rank) for run in side[name] for rank in run) for side in (old, new))
        if min(counts) >= MIN_SPANS:
            found.append(compare(name, old[name], new[name]))
    warnings = []
    if {run.id for run in before} & {run.id for run in after}:
        warnings.append("a run is compared with itself")
    if max(len(before), len(after)) < FEW_RUNS:
        warnings.append(
            "fewer than three runs a side: how much runs of the same program differ by themselves"
            " is not known; what differs in all phases at once is taken for the machine;"
            " --baseline adds runs"
        )
    return Diff(
        runs=([run.id for run in before], [run.id for run in after]),
        differences=differences(before[0], after[0]),
        warnings=warnings,
        changes=judge(found),
        marks=part(before[0], after[0]),
        tensors=part_tensors(before[0], after[0]),
    )


def sample(runs: Sequence[Run]) -> Sample:
    """The durations of spans by name, run and rank, in the order that they ended, after warm-up."""
    found: Sample = {}
    for run in runs:
        sessions = [one for one in run.sessions if one.attempt == run.attempts[-1]][:MAX_RANKS]
        kept: dict[str, list[list[int]]] = {}
        for session in sessions:
            rows = run.query("newest_spans", session=session.key, most=MAX_SPANS).fetch().rows
            walls: dict[str, list[int]] = {}
            for name, mode, wall in rows:
                if name not in OUTER:
                    walls.setdefault(name if mode is None else f"{name} ({mode})", []).append(wall)
            for name, each in walls.items():
                kept.setdefault(name, []).append(each[settled_from(each) :])
        for name, ranks in kept.items():
            found.setdefault(name, []).append(ranks)
    return found


def compare(name: str, old: list[list[list[int]]], new: list[list[list[int]]]) -> Estimate:
    """The medians, and how far their ratio may be off."""
    draw = random.Random(f"{SEED} {name}")  # noqa: S311  not a secret
    noise, freedom = between(old, new)
    noise *= math.sqrt(1 / len(old) + 1 / len(new))
    spread = stdev(
        math.log(max(drawn(draw, new), 1.0) / max(drawn(draw, old), 1.0)) + draw.gauss(0, noise)
        for _ in range(DRAWS)
    )
    counts = [sum(len(rank) for run in side for rank in run) for side in (old, new)]
    return Estimate(
        name,
        middle(old),
        middle(new),
        spread or 1e-12,
        drift([rank for side in (old, new) for run in side for rank in run]),
        freedom,
        spans=(counts[0], counts[1]),
        has_few_runs=max(len(old), len(new)) < FEW_RUNS,
    )


def drift(ranks: list[list[int]]) -> float:
    """The deviation of the medians of a run's parts, beyond what so many spans differ by."""
    seen, by_chance = [], []
    for walls in ranks:
        size = len(walls) // PARTS
        if size >= MIN_PART:
            parts = [median(walls[at * size : (at + 1) * size]) for at in range(PARTS)]
            seen.append(variance(math.log(max(one, 1.0)) for one in parts))
            low, _, high = (max(one, 1.0) for one in quantiles(walls, n=4))
            # Of the median of as many normal values, whose quartiles are 1.35 deviations apart.
            by_chance.append((1.25 * math.log(high / low) / 1.35) ** 2 / size)
    return math.sqrt(max(sum(seen) - BY_CHANCE * sum(by_chance), 0.0) / max(len(seen), 1))


def between(*sides: list[list[list[int]]]) -> tuple[float, float]:
    """How much runs of the same program differ, and the degrees of freedom of a comparison.

    As on a quiet machine, unless three runs of a side differ by more than twice that: then what is
    known are so few runs, else the blocks of steps.
    """
    blocks = sum(len(rank) / block_of(rank) for side in sides for run in side for rank in run)
    freedom = max(blocks - 2, 2.0)
    seen = [
        stdev(math.log(max(middle([run]), 1.0)) for run in side)
        for side in sides
        if len(side) >= FEW_RUNS
    ]
    if not seen:
        return LEAST_NOISE, freedom
    if max(seen) <= 2 * RUN_NOISE:
        return RUN_NOISE, freedom
    return max(seen), max(min(freedom, sum(map(len, sides)) - len(sides)), 2.0)


def chance(t: float, freedom: float) -> float:
    """The chance of a ratio so many deviations from 1: Student's, by Wallace's approximation."""
    z = math.sqrt(freedom * math.log1p(t * t / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
    return math.erfc(z / 2**0.5)


def quantile(p: float, freedom: float) -> float:
    """Student's quantile, by the same approximation: 4 % too far for 2 degrees of freedom."""
    z = NormalDist().inv_cdf(p) * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(z * z / freedom))


def block_of(rank: list[int]) -> int:
    """How many steps that follow each other are drawn together."""
    return max(math.isqrt(len(rank)), 1)


def middle(side: list[list[list[int]]]) -> float:
    return float(median(wall for run in side for rank in run for wall in rank))


def drawn(draw: random.Random, side: list[list[list[int]]]) -> float:
    """The median of one draw: of runs, of their ranks, of blocks of steps."""
    walls: list[int] = []
    for _ in side:
        run = draw.choice(side)
        for _ in run:
            rank = draw.choice(run)
            size = block_of(rank)
            for _ in range(-(-len(rank) // size)):
                at = draw.randrange(max(len(rank) - size, 0) + 1)
                walls += rank[at : at + size]
    return float(median(walls)) if walls else 1.0


def judge(found: list[Estimate]) -> list[Change]:
    """Says which changes are there, with the rate of false discoveries held."""
    spreads = [widened(one, found) if one.has_few_runs else one.spread for one in found]
    chances = [
        chance(one.log / spread, one.freedom) for one, spread in zip(found, spreads, strict=True)
    ]
    allowed = max(
        (p for place, p in enumerate(sorted(chances), 1) if p <= LEVEL * place / len(chances)),
        default=-1.0,
    )
    judged = []
    for one, spread, p in zip(found, spreads, chances, strict=True):
        half = spread * quantile(1 - LEVEL / 2, one.freedom)
        low, high = math.exp(one.log - half), math.exp(one.log + half)
        outcome: Outcome = "same" if low > 1 - CLOSE and high < 1 + CLOSE else "unknown"
        if p <= allowed:
            outcome = "slower" if one.log > 0 else "faster"
        ratio = one.after_ns / max(one.before_ns, 1.0)
        judged.append(
            Change(one.name, one.before_ns, one.after_ns, ratio, low, high, p, one.spans, outcome)
        )
    return sorted(judged, key=lambda one: -abs(math.log(max(one.ratio, 1e-9))))


def widened(one: Estimate, found: list[Estimate]) -> float:
    """The deviation of a name's ratio where few runs say how much runs differ.

    What changes in a program changes some of its phases; a machine that is slower for a while, or a
    process that lies elsewhere in memory, changes all of them. So where most of the other phases
    have moved, a name has to move by more than they did.
    """
    others = [each for each in found if each.name not in (one.name, "step")]
    moved = median_low([abs(each.log) / each.spread for each in others] or [0.0])
    spread = one.spread
    if moved > MOVED:
        spread = max(min(spread * moved, MOST_NOISE), spread)
    noise = math.hypot(one.drift, FLOOR_NS / max(one.before_ns, 1.0), 0 if others else LONE_NOISE)
    return math.hypot(spread, noise * 2**0.5)


def differences(before: Run, after: Run) -> list[str]:
    """What differs of the things that runs must have in common to be compared."""
    old, new = setting(before), setting(after)
    return [
        f"{name}: {old.get(name, 'unknown')} before, {new.get(name, 'unknown')} after"
        for name in sorted({*old, *new})
        # Of what is known of one run only, its kind says enough.
        if old.get(name) != new.get(name) and (name in old) == (name in new)
    ]


def setting(run: Run) -> dict[str, str]:
    facts, program = gather(run), run.program
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
    """For each mark that both have, the first step at which its values differ, and are far apart.

    The first may be rounding: kernels that add in another order each time part runs at once.
    """
    found = []
    old, new = values(before), values(after)
    for name in sorted(set(old) & set(new)):
        same = sorted(set(old[name]) & set(new[name]))
        pairs = [(at, old[name][at], new[name][at]) for at in same]
        if pairs:
            found.append(
                {
                    "name": name,
                    "compared": len(same),
                    "parts_at": first_apart(pairs, 1e-9),
                    "far_at": first_apart(pairs, FAR),
                    "before": pairs[-1][1],
                    "after": pairs[-1][2],
                }
            )
    return found


def first_apart(pairs: list[tuple[Place, float, float]], share: float) -> dict[str, int] | None:
    """The first epoch and step at which two values differ by more than this share of the larger."""
    for (epoch, step), one, other in pairs:
        if not alike(one, other, share):
            return {"epoch": epoch, "step": step}
    return None


def values(run: Run) -> dict[str, dict[Place, float]]:
    """The values of each mark by epoch and step; -1 where there is none."""
    found: dict[str, dict[Place, float]] = {}
    for name, epoch, step, value in run.query("values", session=run.main.key).fetch().rows:
        at = (-1 if epoch is None else epoch, -1 if step is None else step)
        found.setdefault(name, {})[at] = value
    return found


def part_tensors(before: Run, after: Run) -> list[dict[str, Any]]:
    """The tensors that differ in the first epoch in which any do, the farthest apart first."""
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
    """How far apart two values are, as a share of the larger; not finite is farthest."""
    if not math.isfinite(one) or not math.isfinite(other):
        return 0.0 if alike(one, other, 0.0) else math.inf
    return abs(one - other) / (max(abs(one), abs(other)) or 1.0)


# -- the runs before this one ----------------------------------------------------------------


def predecessors(run: Run) -> list[Run]:
    """The newest runs of the same script that began before this one, newest first."""
    ids = list(run.runs)
    before = ids[: ids.index(run.id)] if run.id in ids and run.program.script else []
    found: list[Run] = []
    for one in reversed(before[-MAX_LOOKED_AT:]):
        other = run.runs[one]
        if other.program.script == run.program.script and len(found) < MAX_PREDECESSORS:
            found.append(other)
    return found


def since(run: Run, steps: Sequence[int]) -> dict[str, Any] | None:
    """The steps of a run beside those of its predecessors; None: they cannot be compared."""
    old: dict[str, list[list[int]]] = {}
    for one in predecessors(run) if len(steps) >= MIN_SPANS else ():
        lead = leading(one)
        if lead is not None and one.ranks == run.ranks:
            newest = fetch_steps(one, {"session": lead.key}, MAX_SPANS)
            walls = [step.wall - step.beside for step in newest]
            walls = walls[settled_from(walls) :]
            if len(walls) >= MIN_SPANS:
                old[one.id] = [walls]
    if not old:
        return None
    change = compare("step", list(old.values()), [[list(steps[-MAX_SPANS:])]])
    return {"runs": list(old), "change": judge([change])[0]}
