"""A report as text: verdict, why, next step, gain, where the time went. One screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cirron.verdict.endings import brief
from cirron.view import text

if TYPE_CHECKING:
    from cirron.verdict.diff import Diff
    from cirron.verdict.findings import Finding, Prediction, Report
    from cirron.verdict.ratios import Change
    from cirron.verdict.why import Why

BAR = 24
MAX_OTHERS = 4
MAX_RATIO = 100  # a larger ratio of two times means that nothing is known


def render(report: Report) -> str:
    run, verdict = report.run, report.verdict
    lines = [f"VERDICT  {verdict.kind}: {text.plain(verdict.summary, 200)}", *told(verdict)]
    if "ranks" not in run:  # nothing was recorded
        return "\n".join(lines)
    lines = [
        f"run {text.plain(str(run['id']))}: {run['state']}"
        + (f", {text.plain(str(run['script']))}" if run["script"] else ""),
        "; ".join(text.plain(one, 200) for one in report.basis),
        "",
        *lines,
    ]
    if report.account:
        rank = report.run.get("rank")
        of_rank = "" if rank is None else f" on rank {rank}"
        lines += ["", f"where the time went{of_rank}"]
        widest = max(len(part) for part, _, _ in report.account)
        for part, ns, share in report.account:
            mark = "  <--" if part == verdict.blames else ""
            bar = "#" * round(BAR * share)
            name, took = text.plain(part).ljust(widest), text.duration(ns)
            lines.append(f"  {name}  {took:>9}  {100 * share:5.1f}%  {bar}{mark}")
    if report.before is not None:
        lines += since(report, report.before)
    others = [one for one in report.findings if one is not verdict]
    if others:
        lines += ["", "also"]
        for other in others[:MAX_OTHERS]:
            lines.append(f"  {other.kind}: {text.plain(other.summary, 200)}{gain(other)}")
            if verdict.is_urgent:  # what ended the run says nothing about its speed
                lines.append(f"    do   {text.plain(other.advice, 150)}")
    if report.abstained and verdict.kind != "not-enough-data":
        lines += ["", "not judged"]
        reasons: dict[str, list[str]] = {}
        for one in report.abstained:
            reasons.setdefault(one.why, []).append(one.kind)
        lines += [f"  {', '.join(kinds)}: {text.plain(why, 200)}" for why, kinds in reasons.items()]
    lines += ["", f"next: {following(report)}"]
    return "\n".join(lines)


def since(report: Report, before: dict[str, Any]) -> list[str]:
    """Compares the steps of a run with earlier runs of the same script."""
    runs, change = before["runs"], before["change"]
    how = {
        "same": "steps take as long as in",
        "unknown": "no clear change of the step time since",
    }.get(change.outcome, f"steps are {100 * abs(change.ratio - 1):.1f}% {change.outcome} than in")
    who = "the previous run" if len(runs) == 1 else f"the previous {len(runs)} runs"
    took = f"{text.duration(round(change.before_ns))} -> {text.duration(round(change.after_ns))}"
    lines = ["", f"{how} {who} of this script: {took} ({interval(change)})"]
    if change.outcome in ("slower", "faster"):
        lines.append(
            f"  see: cirron diff {text.plain(runs[0])} {text.plain(str(report.run['id']))}"
        )
    return lines


def interval(change: Change) -> str:
    high = f"{100 * (change.high - 1):+.1f}%" if change.high < MAX_RATIO else "any"
    return f"{100 * (change.low - 1):+.1f}% to {high}"


def line(report: Report) -> str:
    """The verdict in one line, and the command that shows the report."""
    verdict = report.verdict
    said = f"cirron: {verdict.kind}: {text.plain(verdict.summary, 200)}{gain(verdict)}"
    return f"{said}; see: cirron report {text.plain(str(report.run['id']))}"


def told(finding: Finding) -> list[str]:
    lines = [f"  why    {text.plain(one, 300)}" for one in finding.evidence]
    lines.append(f"  do     {text.plain(finding.advice, 300)}")
    found = finding.gain
    if finding.no_gain:
        lines.append(f"  gain   not predicted: {text.plain(finding.no_gain, 200)}")
    elif found is not None:
        lines.append(
            f"  gain   {100 * found.share:.0f}% of the time, {lasted(found.seconds)} of"
            f" these steps (replay error {100 * found.replay_error:.1f}%)"
        )
    return lines


def lasted(seconds: float) -> str:
    return text.duration(round(1e9 * abs(seconds)))


def gain(finding: Finding) -> str:
    return "" if finding.gain is None else f"; gain {100 * finding.gain.share:.0f}%"


def following(report: Report) -> str:
    """The command that shows more about this run."""
    if report.run.get("is_in_memory"):  # no command could read it
        return "ci.trace()"
    run_id = text.plain(str(report.run["id"]))
    steps = f"cirron show --run {run_id} --name {report.run.get('step_name', 'step')} --last 20"
    tensors = f"cirron tensors {run_id}"
    return {
        "died": f"cirron why {run_id}",
        "hung": f"cirron why {run_id}",
        "numerics": tensors if "cirron tensors" in report.verdict.advice else steps,
        "not-enough-data": steps if report.run.get("steps") else f"cirron show --run {run_id}",
    }.get(report.verdict.kind, steps)


def what_if(part: str, factor: float, predicted: Prediction) -> str:
    """The predicted effect of changing one part of a step."""
    found = predicted.gain
    if found is None:
        return f"no prediction: {predicted.no_gain}"
    saved = f"{100 * abs(found.share):.1f}% of the time, {lasted(found.seconds)} of these steps"
    return (
        f"{part} at {factor:g}x its time: {saved} {'more' if found.share < 0 else 'less'}"
        f" (replay error {100 * found.replay_error:.1f}%)"
    )


MAX_TENSORS = 5
MAX_NAMES = 12  # of spans that are not compared
MAX_RANKS = 16
MAX_STACK = 8  # calls, besides the last one of the program's own before them
LIBRARIES = ("/site-packages/", "/lib/python", "/cirron/")


def reasons(found: Why) -> str:
    """Where the ranks of a run are; ranks that differ come first."""
    lines = [f"run {text.plain(found.run_id)}: {found.state}"]
    for group in found.groups:
        ranks = ", ".join(str(one) for one in group.ranks[:MAX_RANKS] if one is not None)
        more = f" and {len(group.ranks) - MAX_RANKS} more" if len(group.ranks) > MAX_RANKS else ""
        who = f"rank {ranks}{more}" if ranks else "the process"
        name = text.plain(group.step_name)
        step = "" if group.last_step is None else f", last {name} {group.last_step}"
        late = "" if group.has_arrived else f": never arrived at the last {name}"
        lines += ["", f"{who} ({group.state}{step}){late}"]
        where = f"in {text.plain(group.where, 300)}" if group.where else "no span was open"
        lines.append(f"  {where}")
        if group.error:
            lines.append(f"  {text.plain(brief(group.error), 300)}")
        if group.collective is not None:
            lines.append(f"  collective: {text.plain(group.collective, 200)}")
        own = [one for one in group.stack[:-MAX_STACK] if not any(map(one.__contains__, LIBRARIES))]
        lines += [f"    {text.plain(one, 200)}" for one in own[-1:] + group.stack[-MAX_STACK:]]
    lines += [f"problem: {text.plain(one, 300)}" for one in found.problems]
    return "\n".join(lines)


def changes(found: Diff) -> str:
    """The differences between runs: settings first, then times by span name, marks and tensors."""
    before, after = (", ".join(text.plain(one) for one in side) for side in found.runs)
    lines = [f"before: {before}", f"after:  {after}"]
    if found.differences:
        lines += ["", "the runs differ in these settings, which may explain a change:"]
        lines += [f"  {text.plain(one, 200)}" for one in found.differences]
    lines += [f"note: {one}" for one in found.warnings]
    lines.append("")
    widest = max((len(one.name) for one in found.changes), default=0)
    for one in found.changes:
        lines.append(
            f"  {text.plain(one.name).ljust(widest)}  {text.duration(round(one.before_ns)):>9} ->"
            f" {text.duration(round(one.after_ns)):>9}  {100 * (one.ratio - 1):+6.1f}%"
            f"  ({interval(one)})  {one.outcome}"
        )
    if not found.changes:
        lines.append("  no span name has enough spans in both runs")
    if found.not_compared:
        names = ", ".join(text.plain(one) for one in found.not_compared[:MAX_NAMES])
        more = len(found.not_compared) - MAX_NAMES
        lines.append(
            f"  not compared: {names}{f' and {more} more' if more > 0 else ''} (too few spans)"
        )
    lines += ["", f"result: {result(found)}", ""]
    for mark in found.marks:
        at = mark["parts_at"]
        where = "identical" if at is None else f"first differs in {place(at)}"
        if mark["far_at"] not in (None, at):
            where += f", by more than 1% in {place(mark['far_at'])}"
        lines.append(
            f"  {text.plain(mark['name'])}: {where};"
            f" last value {mark['before']:.6g} -> {mark['after']:.6g}"
        )
    if found.tensors:
        epoch, count = found.tensors[0]["epoch"], len(found.tensors)
        lines.append(f"  {count} tensors differ in epoch {epoch}; largest differences (norms):")
        lines += [
            f"    {text.plain(one['tensor'], 200)}: {one['before']:.6g} -> {one['after']:.6g}"
            for one in found.tensors[:MAX_TENSORS]
        ]
    return "\n".join(lines)


def result(found: Diff) -> str:
    """The outcome of a comparison in one line."""
    named = {
        outcome: ", ".join(text.plain(one.name) for one in found.changes if one.outcome == outcome)
        for outcome in ("slower", "faster", "unknown")
    }
    if found.is_inconclusive:
        return "inconclusive: the runs vary too much, or have too few spans, to tell a change"
    told = "; ".join(f"{outcome}: {names}" for outcome, names in named.items() if names)
    return told or "no change"


def place(at: dict[str, int]) -> str:
    parts = [f"{name} {at[name]}" for name in ("epoch", "step") if at[name] >= 0]
    nth = f", value {at['value']}" if "value" in at else ""
    return (", ".join(parts) or "the session itself") + nth
