"""The verdict on a run: `report(run)`.

Queries give facts, and pure rules turn facts into findings. This file puts the findings in order.
There is one verdict: what ended the run, else what makes it worthless, else the largest gain.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from cirron.verdict.diff import since
from cirron.verdict.facts import CROWDED, MIN_STEPS, MIN_WINDOW_NS, Facts, gather
from cirron.verdict.findings import Abstained, Finding, Report
from cirron.verdict.rules import (
    ESTIMATORS,
    beside,
    compiling,
    ending,
    host,
    input,  # noqa: A004
    memory,
    ms,
    numerics,
    percent,
    ranks,
    uneven,
)
from cirron.view.text import duration, plural

if TYPE_CHECKING:
    from cirron.runs.opened import Run
    from cirron.verdict.rules import Rule

# The order of findings with equal gains, or without any.
RULES: tuple[Rule, ...] = (
    ending.judge_death,
    ending.judge_hang,
    numerics.judge,
    compiling.judge,
    input.judge,
    beside.rule_of("evaluation-heavy"),
    beside.rule_of("checkpoint-heavy"),
    beside.rule_of("snapshot-heavy"),
    beside.rule_of("logging-heavy"),
    host.judge,
    uneven.judge,
    ranks.judge,
    memory.judge,
)
COMPUTE, COMPUTING = 0.7, ("forward", "backward", "optimizer_step")  # of the window
MOST = 0.5  # of the window: a scope of the program that takes so much is named
ALL_RANKS = 2.0  # times the gain of a slow rank: not only that rank is slow
BUSY = 0.1  # of the time: the report mentions that the training waited for a CPU


def report(run: Run) -> Report:
    """The verdict on a run, with its evidence."""
    facts = gather(run)
    found = judge(facts)
    return Report(
        run={
            "id": run.id,
            "state": run.state,
            "ranks": len(run.ranks) or 1,
            "rank": facts.rank,
            "attempts": len(run.attempts),
            "script": run.program.script,
            "device": facts.device,
            "steps": len(facts.steps),
            "step_name": facts.step_name,
        },
        basis=basis(facts, run),
        account=account(facts),
        verdict=found[0],
        findings=found[1],
        abstained=found[2],
        before=since(run, [step.wall - step.beside for step in facts.steps]),
    )


def nothing(why: str) -> Report:
    """The report if there is nothing to judge."""
    verdict = Finding(
        "not-enough-data", f"nothing to judge: {why}", None, None, "", [], "record a run"
    )
    return Report({"id": "none", "state": "unknown", "script": None}, [], [], verdict)


def judge(facts: Facts) -> tuple[Finding, list[Finding], list[Abstained]]:
    """The verdict, all findings by gain, and the classes that were not judged."""
    findings: list[Finding] = []
    abstained: list[Abstained] = []
    for rule in RULES:
        judged = rule(facts)
        if isinstance(judged, Finding):
            findings.append(judged)
        elif judged is not None:
            abstained.append(judged)
    urgent = [one for one in findings if one.is_urgent]
    rest = sorted(
        (one for one in findings if not one.is_urgent),
        key=lambda one: -weight(one),
    )
    findings = [*urgent, *blame_rank_first(rest)]
    if urgent:
        return urgent[0], findings, abstained
    if len(facts.steps) < MIN_STEPS:
        return too_little(facts), findings, abstained
    if facts.window_ns < MIN_WINDOW_NS:
        return too_little(facts), [], abstained
    if rest:
        return findings[0], findings, abstained
    bound = compute_bound(facts)
    if bound is not None:
        return bound, [bound], abstained
    return healthy(facts), findings, abstained


def too_little(facts: Facts) -> Finding:
    why = f"{plural(len(facts.steps), 'step')} after warm-up; {MIN_STEPS} are needed"
    advice = "let it run longer"
    if len(facts.steps) >= MIN_STEPS:
        why = f"the steps compared take {ms(facts.window_ns)}; {ms(MIN_WINDOW_NS)} are needed"
    if not facts.steps and facts.unwritten:
        why = f"its records could not be written: {facts.unwritten}"
        advice = "use a folder with space: ci.profile(path=...) or CIRRON_OUTPUT_DIR"
    elif not facts.steps:
        why = "no training steps were recorded"
        advice = (
            "cirron show lists the fits of a model that was given to ci.wrap(model)"
            if facts.framework in ESTIMATORS
            else "write the loop as: for batch in ci.batches(loader); cirron show lists what"
            " was recorded"
        )
    summary = f"too little to judge: {why}"
    return Finding("not-enough-data", summary, None, None, "", [], advice)


def compute_bound(facts: Facts) -> Finding | None:
    """The model's own work takes most of the time."""
    work = float(sum(facts.account.get(part, 0) for part in COMPUTING))
    where = ""
    if facts.device_times and facts.device_ns > work:  # the host waits for it outside the phases
        work, where = facts.device_ns, " on the device"
    share = min(work / facts.window_ns, 1.0)
    if share < COMPUTE:
        return None
    each = ms(work / len(facts.steps))
    evidence = [f"forward, backward and optimizer{where}: {each} per step (mean)"]
    advice = "only a faster model, device or precision will help"
    starved = facts.starved_share or 0.0
    if starved >= CROWDED:
        evidence.append(f"the training waited for a CPU for {percent(starved)} of the time")
        advice = f"run it on a quiet machine; then {advice}"
    threads, cores = facts.model.get("threads"), facts.cores
    if isinstance(threads, int) and cores and threads > cores and not facts.is_on_gpu:
        evidence.append(f"PyTorch computes with {threads} threads on {plural(cores, 'core')}")
        advice = f"torch.set_num_threads({cores}): more threads than cores delay each other"
    elif facts.model.get("dtype") == "float64":
        evidence.append("the model computes in float64")
        advice = "use float32, unless the model needs that precision: model.float()"
    summary = f"the model's own work takes {percent(share)} of the time"
    return Finding("compute-bound", summary, share, None, "", evidence, advice)


def healthy(facts: Facts) -> Finding:
    summary, advice = "nothing stands out", "nothing to fix"
    name, (_, ns) = max(facts.scopes.items(), key=lambda one: one[1][1], default=("", (0, 0)))
    if not facts.scopes and not any(step.forward is not None for step in facts.steps):
        summary += ", but what the steps do was not recorded"
        advice = 'to see more, wrap parts of the step in `with ci.scope("name"):`'
    elif ns >= MOST * facts.window_ns:
        summary += f" but {name}, with {percent(ns / facts.window_ns)} of the time"
        advice = f"if that is not the model's own work, wrap parts of {name} in"
        advice += ' `with ci.scope("name"):`'
    starved = facts.starved_share or 0.0
    if starved >= CROWDED:
        summary += f"; the training waited for a CPU for {percent(starved)} of the time"
        advice = "run it on a quiet machine: the wait hides smaller faults"
    evidence = [f"no rule finds a fault in the {len(facts.steps)} steps compared"]
    return Finding("healthy", summary, None, None, "", evidence, advice)


def weight(finding: Finding) -> float:
    """What a finding is worth: its gain, or if that is not known, its share of the time."""
    return finding.gain.share if finding.gain else finding.share or 0.0


def blame_rank_first(findings: list[Finding]) -> list[Finding]:
    """Puts a slow rank before the findings about the phase in which it is slow.

    They are the same delay, which is saved once, unless they would save twice as much: then all
    ranks are slow there.
    """
    slow = next((one for one in findings if one.kind == "slow-rank"), None)
    if slow is None:
        return findings
    most = ALL_RANKS * weight(slow)
    same = [
        one for one in findings if one.blames == slow.blames and weight(one) < most and one != slow
    ]
    others = [one for one in findings if one not in same]
    at = others.index(slow) + 1
    counted = [replace(one, gain=None, no_gain="it is the delay of the slow rank") for one in same]
    return [*others[:at], *counted, *others[at:]]


def account(facts: Facts) -> list[tuple[str, int, float]]:
    """The parts of the window with their shares, which add up to 1."""
    total = sum(facts.account.values())
    parts = sorted(facts.account.items(), key=lambda pair: -pair[1])
    return [(part, ns, ns / total) for part, ns in parts] if total else []


def basis(facts: Facts, run: Run) -> list[str]:
    """What the verdict is based on, and what was not measured."""
    said = [f"{len(run.ranks) or 1} rank{'s' if len(run.ranks) > 1 else ''} on {facts.device}"]
    stopped = ending.interrupted(facts.endings)
    if stopped is not None:
        said.insert(0, f"stopped by Ctrl-C {ending.placed(stopped)}")
    if facts.steps:
        typical = median(step.wall for step in facts.steps)
        said.append(
            f"{len(facts.steps)} steps compared (median {ms(typical)}), after"
            f" {plural(facts.warm_up, 'warm-up step')}"
        )
    if len(run.ranks) > 1:
        said.append(f"clock error at least {duration(facts.clock_ns)}")
    timed = sum(step.gpu is not None for step in facts.steps)
    if facts.is_on_gpu:
        said.append(f"device time on {timed} of {len(facts.steps)} steps")
    if facts.steps and not facts.loader:
        said.append("no loader settings")
    if run.problems:
        said.append("some records could not be read (cirron show lists them)")
    if (facts.starved_share or 0.0) >= BUSY:
        said.append(
            f"the training waited for a CPU for {percent(facts.starved_share or 0.0)} of the time"
        )
    return said
