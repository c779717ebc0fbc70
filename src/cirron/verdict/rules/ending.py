"""died and hung: the run did not end by itself, or it stopped making progress.

died: a process was killed, or ended by a signal or an error. Ctrl-C is the user's own stop, and no
finding if nothing else ended a process.

hung: a process recorded nothing for `silence_after` (60 s) inside a span. It is still running, or a
signal ended it: a run that hangs is killed in the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cirron.verdict.endings import brief
from cirron.verdict.findings import Finding
from cirron.verdict.rules import memory
from cirron.view import text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cirron.verdict.endings import Ending
    from cirron.verdict.facts import Facts
    from cirron.verdict.rules import Judged

MAX_RANKS = 4
MAX_ERROR = 100  # characters of an error in the summary, which is one line
OUT_OF_MEMORY = "; its memory kept growing, so it may have run out of memory: check dmesg"
NO_MEMORY = ("out of memory", "allocate memory", "memoryerror", "resource_exhausted", "bad_alloc")
NO_ANSWER = (
    "; a loader worker does not answer: check what __getitem__ waits for (locks, files, network);"
    " DataLoader(timeout=60) raises an error instead"
)
UNEVEN = (
    "; other ranks had ended before it: give every rank the same number of batches"
    " (DistributedSampler, drop_last=True), or use DistributedDataParallel's join()"
)
STATES = {"killed": "ended without notice", "signal": "was ended", "exception": "failed"}


def split(endings: Sequence[Ending]) -> tuple[list[Ending], list[Ending]]:
    """The processes that died, the cause first, and those that hung.

    Whoever ends a hanging run sends a signal to all ranks, also to those that do not hang.
    """
    hung = [one for one in endings if one.is_hung]
    dead = [one for one in endings if one.state in STATES and one not in hung]
    if hung:
        dead = [one for one in dead if one.state != "signal"]
    return sorted(dead, key=lambda one: one.blamed), hung


def interrupted(endings: Sequence[Ending]) -> Ending | None:
    """The process that Ctrl-C ended, if only signals ended processes, and none hung."""
    dead, hung = split(endings)
    if hung or any(one.state != "signal" for one in dead):
        return None
    return next((one for one in dead if one.error == "SIGINT"), None)


def judge_death(facts: Facts) -> Judged:
    dead, _ = split(facts.endings)
    if not dead or interrupted(facts.endings):
        return None
    first, count = dead[0], len(facts.endings)
    who = "the run" if count == 1 else "a process" if first.rank is None else f"rank {first.rank}"
    where = placed(first)
    error = brief(first.error)
    if len(error) > MAX_ERROR:
        error = f"{error[:MAX_ERROR]}..."
    how = {
        "killed": f"was killed or crashed, last seen {where}",
        "signal": f"was ended by {error or 'a signal'} {where}",
        "exception": f"failed with {error or 'an error'} {where}",
    }[first.state]
    advice = {
        "killed": "check the system log (dmesg) and the job scheduler for who ended it: out of"
        " memory, a time limit, a crash in native code"
        + (OUT_OF_MEMORY if isinstance(memory.judge(facts), Finding) else ""),
        "signal": "check who sent the signal: a time limit, a scheduler, a user",
        "exception": advice_on_error(facts, first.error),
    }[first.state]
    ended = [one for one in facts.endings if one.state == "clean" and one.position < first.position]
    others = "" if count == 1 else f"; {len(dead)} of {count} processes died"
    if len(dead) > 1:
        others += ", this one first"
    return Finding(
        "died",
        f"{who} {how}{others}",
        None,
        None,
        "",
        [told(one) for one in [*dead, *ended][:MAX_RANKS]],
        advice + (UNEVEN if ended else ""),
        is_urgent=True,
    )


def advice_on_error(facts: Facts, error: str) -> str:
    if not any(one in error.lower() for one in NO_MEMORY):
        return "fix the error; cirron why shows where each process was"
    growth = memory.judge(facts)
    if isinstance(growth, Finding):
        return f"it ran out of memory, which kept growing: {growth.advice}"
    return "it ran out of memory: use smaller batches or models, bfloat16, activation checkpointing"


def judge_hang(facts: Facts) -> Judged:
    _, hung = split(facts.endings)
    if not hung:
        return None
    halted = [one for one in facts.endings if one in hung or one.state in ("running", "signal")]
    halted.sort(key=lambda one: one.awaited)
    late, first = halted[0], next(one for one in halted if one in hung)
    where = placed(first)
    is_loading = first.where.endswith("data_load") and facts.workers
    end = "" if first.state == "running" else f", then {brief(first.error) or 'it was killed'}"
    return Finding(
        "hung",
        ("" if len(facts.endings) == 1 or first.rank is None else f"rank {first.rank}: ")
        + f"nothing happened for {lasted(first)} {where}{end}"
        + ("" if late.position == first.position else f"; rank {late.rank} never got there"),
        None,
        None,
        "",
        [told(one) for one in halted[:MAX_RANKS]],
        "cirron why shows the stacks" + (NO_ANSWER if is_loading else ""),
        is_urgent=True,
    )


def lasted(one: Ending) -> str:
    return text.duration(int((one.silent_s or 0.0) * 1e9))


def placed(one: Ending) -> str:
    """Where a process was. An error in the body of a loop over `ci.batches` closes the batch."""
    if one.where or one.last_step is None:
        return f"in {one.where}" if one.where else "outside any span"
    return f"during or after {one.step_name} {one.last_step}"


def told(one: Ending) -> str:
    """How a process ended, in one line."""
    who = "the process" if one.rank is None else f"rank {one.rank}"
    state = STATES.get(one.state, "ended by itself" if one.state == "clean" else "is running")
    where = f", last seen in {one.where}" if one.where else ""
    epoch = "" if one.epoch is None else f" of epoch {one.epoch}"
    step = "" if one.last_step is None else f"; last {one.step_name} {one.last_step}{epoch}"
    silent = "" if one.silent_s is None else f"; nothing happened for {lasted(one)}"
    error = f": {brief(one.error)}" if one.error else ""
    return f"{who} {state}{where}{step}{silent}{error}"
