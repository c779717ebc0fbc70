"""The facts about a run that the rules see: small tables from the queries.

One rank represents the run: the one with the most steps. Warm-up ends where the step times settle.
A value that was not measured is None, never 0.
"""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect
from collections import Counter
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

from cirron.verdict.endings import Ending, endings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cirron.runs.opened import Run, Session

# The newest steps of a long run: enough for any statistic, and fast to fetch.
MAX_STEPS = 20_000
# Of all ranks together.
MAX_RANK_STEPS = 100_000
MAX_VALUES = 5_000  # of each mark
# Fewer settled steps are too few to judge.
MIN_STEPS = 20
# A shorter window holds little but the time that recording takes, and chance.
MIN_WINDOW_NS = 10_000_000
# `ci.batches` itself takes up to this time between two batches.
MIN_WAIT_NS = 50_000
# A delay is no finding if the thread waited for a CPU for this share of it. If that was not
# measured, it is no finding if the process had a CPU for less than this share of its work.
STARVED = 0.5
# Other work had the CPU for this share of the time: noise explains much.
CROWDED = 0.25
# The largest share of the steps that can be warm-up.
WARM_UP_SHARE = 0.5
# If this many steps compile, they are a compile storm, not warm-up.
MAX_COMPILING = 10
# A JAX step that takes less has only been issued: the device computes it later.
ISSUE_NS = 500_000
AWAITED = 0.9  # of the steps must have a device's time
# A step with this many times the usual forward passes, but no longer backward, evaluates the model.
MORE_FORWARDS = 4
SCHEDULED = ("starved_ns", "asleep_ns", "children_ns")


class Step(NamedTuple):
    """A step of the leading rank. Times are in ns; None: not measured, or no such phase."""

    epoch: int | None
    number: int | None
    start: int
    wall: int
    data_load: int | None
    forward: int | None
    backward: int | None
    optimizer: int | None
    beside: int  # evaluations, checkpoints, compilations, starting workers, inside the step
    own: int  # not covered by any child
    gpu: int | None  # of the parts of the step
    memory: int | None
    evaluation: int = 0  # forward passes of an evaluation, part of `beside`
    forwards: int = 1  # number of forward passes
    awaited: int | None = None  # JAX: the most that the device can have taken

    @property
    def work(self) -> int:
        """The step without data loading and the work beside the training."""
        return max(self.wall - (self.data_load or 0) - self.beside, 0)

    def is_before(self, other: Step) -> bool:
        """Whether the other step is the next one of the same epoch."""
        if self.number is None or other.number is None:
            return False
        return self.epoch == other.epoch and self.number + 1 == other.number

    def after(self, wait: int) -> Step:
        """The step with the wait for its data, which came before it."""
        return self._replace(
            start=self.start - wait, wall=self.wall + wait, data_load=(self.data_load or 0) + wait
        )


class RankStep(NamedTuple):
    """A step of one rank, to compare with other ranks. Times are in ns; None: no such phase."""

    rank: int
    epoch: int | None
    number: int | None
    wall: int
    data_load: int | None
    forward: int | None
    backward: int | None
    optimizer: int | None
    own: int

    def after(self, wait: int) -> RankStep:
        """The step with the wait for its data, which came before it."""
        return self._replace(wall=self.wall + wait, data_load=(self.data_load or 0) + wait)


class Value(NamedTuple):
    """A mark's value."""

    name: str
    step: int | None
    epoch: int | None
    at: int
    value: float


@dataclass
class Facts:
    """All facts that the rules see."""

    device: str
    world_size: int
    framework: str = "unknown"
    steps: list[Step] = field(default_factory=list)  # settled ones
    step_name: str = "step"  # or `batch`, of `ci.batches`
    warm_up: int = 0  # steps cut off
    warm_up_ns: int = 0  # their time
    is_fetched_between: bool = False  # `ci.batches` fetches data between the steps
    account: dict[str, int] = field(default_factory=dict)  # part -> ns, adds up to `window_ns`
    window_ns: int = 0  # from the first settled step to the end of the last
    loader: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    cpu_share: float | None = None  # CPU time of the process per second, in cores
    # The shares of the time in which the thread waited for a CPU, and was asleep.
    starved_share: float | None = None
    asleep_share: float | None = None
    children_share: float | None = None  # CPU time of child processes per second, in cores
    loading_ns: int = 0  # for all steps, in TensorFlow's own threads
    cores: int | None = None
    ranks: list[RankStep] = field(default_factory=list)  # of all ranks, if there are several
    clock_ns: int = 0
    values: dict[str, list[Value]] = field(default_factory=dict)  # of marks, by name
    sick: list[tuple[str, int | None, str]] = field(default_factory=list)  # tensor, epoch, what
    gradients: dict[int, dict[str, float]] = field(
        default_factory=dict
    )  # of the first and the last epoch: tensor -> root mean square
    compiles: list[tuple[int, int, str]] = field(
        default_factory=list
    )  # after warm-up: start, ns, and why
    epochs: list[tuple[int | None, int, int | None]] = field(
        default_factory=list
    )  # index, ns, memory
    endings: list[Ending] = field(default_factory=list)
    asides: dict[str, int] = field(default_factory=dict)  # name -> how many in the window
    scopes: dict[str, tuple[int, int]] = field(
        default_factory=dict
    )  # the program's own scopes in steps: name -> count, ns
    outside: dict[str, int] = field(default_factory=dict)  # and between steps: name -> ns
    gap: tuple[str, int] = ("", 0)  # where most of the time in no phase is, and its ns
    rank: int | None = None  # the leading rank, if there are several
    unwritten: str = ""  # why records were lost before they reached the disk

    @property
    def is_on_gpu(self) -> bool:
        return self.device not in ("cpu", "unknown")

    @property
    def device_times(self) -> list[tuple[int, int]]:
        """For steps in which the device was timed: its time, and the work of the step."""
        timed = [(one.gpu, one.work) for one in self.steps if one.gpu is not None and one.work]
        return timed if len(timed) >= MIN_STEPS else []

    @property
    def device_share(self) -> float | None:
        """The median share of a step's work that the device is busy; None: not measured."""
        shares = [min(gpu / work, 1.0) for gpu, work in self.device_times]
        return median(shares) if shares else None

    @property
    def device_ns(self) -> float:
        """The device's time for all steps: a lower bound, however fast the host becomes."""
        times = [gpu for gpu, _ in self.device_times]
        awaited = [one.awaited for one in self.steps if one.awaited is not None]
        if awaited and len(awaited) >= AWAITED * len(self.steps):  # some were ready at once
            return float(sum(awaited))
        return len(self.steps) * median(times) if times else 0.0

    @property
    def is_only_issued(self) -> bool:
        """Whether JAX computes steps after they have ended, in what comes after them."""
        works = [one.work for one in self.steps]
        return self.framework == "jax" and quantiles(works, n=10)[0] < ISSUE_NS

    @property
    def first_of_epochs(self) -> list[int]:
        """The indices of steps that begin an epoch, except for the first step of all."""
        pairs = enumerate(itertools.pairwise(self.steps), 1)
        return [at for at, (one, step) in pairs if one.epoch != step.epoch or step.number == 0]

    @property
    def workers(self) -> int | None:
        """The number of loader workers; None: not recorded as a number."""
        found = self.loader.get("workers")
        return found if isinstance(found, int) else None

    def is_starved(self, ns: float, is_own_wait: bool = False) -> bool:
        """Whether other work on the machine may explain a delay of `ns`.

        A thread that loads its own data and waits for a disk sleeps: it does not want a CPU. The
        shares include the warm-up, in which all the sleep may be, and none of the waits for a CPU.
        """
        lasted = self.window_ns + self.warm_up_ns
        asleep_ns = (self.asleep_share or 0.0) * lasted - self.warm_up_ns
        if is_own_wait and asleep_ns >= STARVED * ns:
            return False
        if self.starved_share is not None:
            return self.starved_share * lasted > STARVED * ns
        if self.cpu_share is None or self.is_on_gpu:
            return False
        return self.cpu_share * self.window_ns < STARVED * sum(step.work for step in self.steps)


def unwritten(run: Run) -> str:
    """Why a process lost records that it could not write; empty if none did."""
    for session in run.sessions:
        content = {} if session.box is None else session.box.content
        counters = content.get("counters") or {}
        if counters.get("records_lost"):
            return str(counters.get("flush_problem") or "")
    return ""


def gather(run: Run) -> Facts:
    """The facts of a run."""
    lead = leading(run)
    rows = run.query("root").fetch().rows
    root = _attrs(rows[0][0]) if rows else {}
    device = run.program.gpus[0] if run.program.gpus else root.get("device")
    facts = Facts(str(device or "unknown"), world_size=max(len(run.ranks), 1))
    facts.framework = str(root.get("framework") or "unknown")
    cores = root.get("cpu_count")
    facts.cores = cores if isinstance(cores, int) and cores > 0 else None
    facts.endings = endings(run)
    facts.unwritten = unwritten(run)
    facts.clock_ns = max((s.info.clock.uncertainty_ns for s in run.sessions if s.info), default=0)
    if lead is None:
        return facts
    facts.rank = lead.rank if len(run.ranks) > 1 else None
    given = {"session": lead.key}
    steps = fetch_steps(run, given)
    facts.step_name = next((one[-2] for one in newest(run, given, 1)), facts.step_name)
    if facts.step_name == "batch" and facts.framework != "keras":  # Keras fetches inside the step
        steps = [one.after(0) for one in steps]
    if facts.step_name == "step" and facts.framework == "keras":
        facts.framework = "torch"  # TensorBoard imports Keras, whose own steps are batches
    compiles = fetch_compiles(run, given)
    facts.warm_up = settled_from([one.wall - one.beside for one in steps])
    starts = [one.start for one in steps]
    compiling = {bisect(starts, start) for start, *_ in compiles}
    while facts.warm_up + 1 in compiling and facts.warm_up < MAX_COMPILING:
        facts.warm_up += 1
    if sum(0 < at <= facts.warm_up for at in compiling) >= MAX_COMPILING:
        facts.warm_up = 1
    facts.steps = steps[facts.warm_up :]
    first = facts.steps[0].start if facts.steps else 0
    facts.warm_up_ns = first - steps[0].start if facts.steps else 0
    facts.compiles = [one for one in compiles if one[0] >= first]
    describe(facts, run, given)
    gather_values(facts, run, given)
    if facts.steps:
        first, last = facts.steps[0].start, facts.steps[-1].start + facts.steps[-1].wall
        facts.window_ns = last - first
        make_account(facts, run, {**given, "first_ns": first, "last_ns": last})
        facts.ranks = fetch_ranks(run, lead, facts)
    return facts


def leading(run: Run) -> Session | None:
    """The session with the most steps, of the last attempt that has any."""
    counted = dict(run.query("step_counts").fetch().rows)
    with_steps = [one for one in run.sessions if counted.get(one.key)]
    if not with_steps:
        return run.main if run.sessions else None
    return max(with_steps, key=lambda one: (one.attempt, counted[one.key], -(one.rank or 0)))


def newest(run: Run, given: dict[str, Any], most: int) -> list[tuple[Any, ...]]:
    return run.query("newest_steps", most=most, **given).fetch().rows


def fetch_steps(run: Run, given: dict[str, Any], most: int = MAX_STEPS) -> list[Step]:
    rows = newest(run, given, most)[::-1]
    steps = with_evaluations([Step(*values) for *values, _, _ in rows])
    if any(name != "batch" for *_, name, _ in rows):
        return steps
    attrs = [_attrs(text) for *_, text in rows]
    steps = [
        step._replace(awaited=its.get("device_ns")) for step, its in zip(steps, attrs, strict=True)
    ]
    # `ci.batches` does nothing but fetch between its batches. For the first batch of an epoch, the
    # wait is known if it comes from a DataLoader.
    waits = []
    for before, step, its in zip([None, *steps], steps, attrs, strict=False):
        if before is not None and before.is_before(step):
            waits.append(max(step.start - before.start - before.wall, 0))
        else:
            waits.append(its.get("data_load_ns") or 0)
    if sum(waits) < MIN_WAIT_NS * len(steps):
        return steps
    return [step.after(wait) for step, wait in zip(steps, waits, strict=True)]


def with_evaluations(steps: list[Step]) -> list[Step]:
    """Counts forward passes that evaluate the model inside training steps as `beside`.

    Those are forward passes in eval mode. Many more passes than usual on a batch of a loader, with
    no longer backward, are an evaluation too. In half of the steps or more, such passes are part of
    the training: a teacher, or a frozen model.
    """
    usual = max(median(one.forwards for one in steps), 1) if steps else 1
    backward = median(one.backward or 0 for one in steps) if steps else 0
    found: dict[int, int] = {}
    for at, one in enumerate(steps):
        is_loaded = one.data_load is not None and (one.backward or 0) <= 2 * backward
        if one.evaluation:
            found[at] = one.evaluation
        elif is_loaded and one.forwards >= MORE_FORWARDS * usual:
            found[at] = round((one.forward or 0) * (1 - usual / one.forwards))
    if 2 * len(found) >= len(steps):
        found = {}
    return [
        one._replace(
            forward=None if one.forward is None else one.forward - found.get(at, 0),
            beside=one.beside + found.get(at, 0),
            evaluation=found.get(at, 0),
        )
        for at, one in enumerate(steps)
    ]


def settled_from(walls: Sequence[int]) -> int:
    """How many of the first steps are warm-up.

    Warm-up ends at the change point that explains most of the variance, if the mean falls there.
    """
    count = len(walls)
    if count < MIN_STEPS:
        return 0
    typical = median(walls[count // 2 :])
    if typical <= 0:
        return 0
    # Clipped: a compilation of a minute counts as much as one of a second.
    clipped = [min(wall / typical, 4.0) for wall in walls]
    best, at = 0.0, 0
    before, total = 0.0, sum(clipped)
    for number in range(1, int(count * WARM_UP_SHARE)):
        before += clipped[number - 1]
        left = before / number
        right = (total - before) / (count - number)
        explained = (left - right) ** 2 * number * (count - number) / count
        if left > 1.3 * right and explained > best:
            best, at = explained, number
    spread = sum((one - total / count) ** 2 for one in clipped)
    if at and best > 0.1 * spread:
        return at
    return 1 if clipped[0] > 2 else 0


def describe(facts: Facts, run: Run, given: dict[str, Any]) -> None:
    """Adds the recorded settings of loader and model, and how busy the CPU was."""
    epochs: list[tuple[int, list[int | None]]] = []
    session: list[tuple[int, list[int | None]]] = []
    for name, index, wall, cpu, memory, attrs in run.query("settings", **given).fetch().rows:
        settings = _attrs(attrs)
        for key, value in settings.items():
            if value is not None and key.startswith("loader_"):
                facts.loader.setdefault(key.removeprefix("loader_"), value)
            elif value is not None and (key.startswith("model_") or key == "autocast"):
                facts.model.setdefault(key.removeprefix("model_"), value)
        kept = session if name == "cirron.session" else epochs
        kept.append((wall, [cpu, *map(settings.get, SCHEDULED)]))
        facts.loading_ns += settings.get("loading_ns") or 0
        if name == "epoch" and wall is not None:
            facts.epochs.append((index, wall, memory))
    # If no epoch was measured, use the session.
    rows = epochs if any(cpu is not None for _, (cpu, *_) in epochs) else session
    facts.cpu_share, facts.starved_share, facts.asleep_share, facts.children_share = (
        share_of(rows, at) for at in range(4)
    )


def share_of(rows: Sequence[tuple[int, list[int | None]]], at: int) -> float | None:
    """The sum of a measurement, as a share of the time in which it was taken."""
    known = [(wall, ns) for wall, all_ in rows if wall and isinstance(ns := all_[at], int)]
    return sum(ns for _, ns in known) / sum(wall for wall, _ in known) if known else None


PHASES = ("data_load", "forward", "backward", "optimizer_step")
ASIDES = {
    "evaluation": "evaluation",
    "prediction": "evaluation",
    # Common names for scopes in programs.
    **dict.fromkeys(
        ("evaluate", "eval", "validation", "validate", "valid", "val", "test"), "evaluation"
    ),
    "checkpoint": "checkpoint",
    "compile": "compile",
    "trace": "compile",
    "lower": "compile",
    "logging": "logging",
    "data_setup": "loader set-up",
    "data_teardown": "loader set-up",
}


# A scope of the program gets its own line from this share on, up to this many lines in all.
MAX_PARTS, MIN_PART = 9, 0.01
RESTS = ("between steps", "in no phase")


def make_account(facts: Facts, run: Run, given: dict[str, Any]) -> None:
    """Splits the window into parts. Time without a span is in no phase, or between steps.

    The time of a snapshot is an attribute of its epoch: no span covers it.
    """
    account: dict[str, int] = {}
    steps = in_steps = beside = 0
    names = set()
    nested: list[tuple[str, str, int, int]] = []
    for name, place, count, ns in run.query("account", **given).fetch().rows:
        if name in ("step", "batch") and place == "beside":
            steps += ns
            names.add(name)
            continue
        part = name if name in PHASES else ASIDES.get(name)
        if part is None and place == "beside":
            facts.outside[name] = ns
            beside += ns
            continue
        if part is None:
            facts.scopes[name] = count, ns
            in_steps += ns
            continue
        account[part] = account.get(part, 0) + ns
        if name in ASIDES:
            facts.asides[part] = facts.asides.get(part, 0) + count
        if place == "in step":
            in_steps += ns
        elif place == "beside":
            beside += ns
        else:
            nested.append((part, place, count, ns))
    # Nested in another part: subtract it there.
    for part, place, count, ns in nested:
        scope = place.removeprefix("beside/")
        if scope != place and scope in facts.outside:
            facts.outside[scope] -= ns
        elif scope != place and scope not in ASIDES:  # the scope also contains steps
            beside += ns
        elif place in account:
            account[place] -= ns
        elif place in facts.scopes:
            known, all_ns = facts.scopes[place]
            facts.scopes[place] = known, all_ns - ns
        else:  # nested in its own kind, or in something unknown
            account[part] -= ns
            facts.asides[part] = facts.asides.get(part, 0) - count
    own = Counter(facts.outside) + Counter({name: ns for name, (_, ns) in facts.scopes.items()})
    for name, ns in own.most_common():
        is_named = len(account) < MAX_PARTS and ns >= MIN_PART * facts.window_ns
        part = name if is_named and name not in (*account, *RESTS) else "other scopes"
        account[part] = account.get(part, 0) + ns
    evaluations = [step.evaluation for step in facts.steps if step.evaluation]
    if evaluations:  # in steps
        account["forward"] -= sum(evaluations)
        account["evaluation"] = account.get("evaluation", 0) + sum(evaluations)
        facts.asides["evaluation"] = facts.asides.get("evaluation", 0) + len(evaluations)
    facts.is_fetched_between = names == {"batch"}
    account["in no phase"] = max(steps - in_steps, 0)
    between = max(facts.window_ns - steps - beside, 0)
    waited = min(max(sum(step.wall for step in facts.steps) - steps, 0), between)
    account["data_load"] = account.get("data_load", 0) + waited
    account["between steps"] = between - waited
    held = snapshots(run, given)
    facts.asides["snapshot"] = len(held)
    account["snapshot"] = 0
    for part in RESTS:  # snapshots of gradients are taken inside steps
        ns = min(sum(held) - account["snapshot"], account[part])
        account["snapshot"] += ns
        account[part] -= ns
    facts.account = {part: ns for part, ns in account.items() if ns > 0}
    rows = run.query("gaps", **given).fetch().rows if account["in no phase"] else []
    for before, after, ns in rows[:1]:
        facts.gap = f"between {before} and {after}", ns or 0


def snapshots(run: Run, given: dict[str, Any]) -> list[int]:
    """How long each snapshot in the window delayed the loop."""
    rows = run.query("ended_epochs", **given).fetch().rows
    found = (_attrs(attrs).get("snapshot_ns") for _, attrs in rows)
    return [ns for ns in found if isinstance(ns, int)]


def fetch_ranks(run: Run, lead: Session, facts: Facts) -> list[RankStep]:
    """The steps of all ranks; every n-th if there are many."""
    if len(run.ranks) < 2:
        return []
    given = {
        "attempt": lead.attempt,
        "first_ns": facts.steps[0].start,
        "every": max(len(facts.steps) * len(run.ranks) // MAX_RANK_STEPS, 1),
    }
    rows = run.query("rank_steps", **given).fetch().rows
    is_fetched = facts.is_fetched_between
    return [RankStep(*row).after(wait or 0 if is_fetched else 0) for *row, wait in rows]


def gather_values(facts: Facts, run: Run, given: dict[str, Any]) -> None:
    """The values of marks, and the sick tensors."""
    for row in run.query("newest_values", most=MAX_VALUES, **given).fetch().rows:
        facts.values.setdefault(row[0], []).append(Value(*row))
    for epoch, tensor, mean, std in run.query("gradients", **given).fetch().rows:
        if mean is not None and std is not None:
            facts.gradients.setdefault(epoch, {})[tensor] = math.hypot(mean, std)
    for epoch, attrs in run.query("health", **given).fetch().rows:
        found = _attrs(attrs)
        if found.get("problem") != "recovered":
            for tensor in found.get("tensors") or ():
                facts.sick.append((str(tensor), epoch, str(found.get("problem"))))


def fetch_compiles(run: Run, given: dict[str, Any]) -> list[tuple[int, int, str]]:
    """Start, duration and cause of all compilations."""
    rows = run.query("compiles", first_ns=0, **given).fetch().rows
    return [(start, ns, str(_attrs(attrs).get("cause", ""))) for start, ns, attrs in rows]


def _attrs(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
