"""died and hung: the run did not end by itself, or nothing has happened in it for long.

died: a process was killed, ended by a signal, or in an exception. hung: a running process has
recorded nothing for `silence_after` (60 s) inside of a span; its black box says since when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cirron.verdict.findings import Finding
from cirron.verdict.rules import memory

if TYPE_CHECKING:
    from cirron.verdict.endings import Ending
    from cirron.verdict.facts import Facts
    from cirron.verdict.rules import Judged

DEAD = ("killed", "signal", "exception")
MAX_RANKS = 4
OUT_OF_MEMORY = "; its memory went up all the time: it may have run out of it (dmesg says so)"
NO_ANSWER = (
    "; a loader worker does not answer: look at what __getitem__ waits for (locks, files, network);"
    " DataLoader(timeout=60) raises an error instead"
)
MAX_ERROR = 100  # characters of an exception in the summary, which is one line


def judge_death(facts: Facts) -> Judged:
    dead = sorted((one for one in facts.endings if one.state in DEAD), key=lambda one: one.blamed)
    if not dead:
        return None
    first = dead[0]
    # A KeyError has its text as repr, with newlines written out.
    what = first.error.replace("\\n", "\n").partition("\n")[0][:MAX_ERROR]
    how = {
        # Its black box may be a flush interval older.
        "killed": "was killed, last seen",
        "signal": f"ended by {what + ',' if what else 'a signal'}",
        "exception": f"ended in {what + ',' if what else 'an error'}",
    }
    who = "a process" if first.rank is None else f"rank {first.rank}"
    others = f", the first of {len(dead)} of {len(facts.endings)} processes"
    return Finding(
        "died",
        f"{'the run' if len(facts.endings) == 1 else who} {how[first.state]}"
        f" in {first.where or 'no open span'}" + (others if len(facts.endings) > 1 else ""),
        None,
        None,
        [told(one) for one in dead[:MAX_RANKS]],
        "cirron why says what each process was doing"
        + (OUT_OF_MEMORY if isinstance(memory.judge(facts), Finding) else ""),
        is_urgent=True,
    )


def judge_hang(facts: Facts) -> Judged:
    silent = [one for one in facts.endings if one.state == "running" and one.silent_s is not None]
    if not silent:
        return None
    longest = max(silent, key=lambda one: one.silent_s or 0)
    return Finding(
        "hung",
        f"nothing has happened for {longest.silent_s:.0f} s in {longest.where or 'the program'}",
        None,
        None,
        [told(one) for one in silent[:MAX_RANKS]],
        "cirron why shows the stacks"
        + (NO_ANSWER if longest.where.endswith("data_load") and facts.workers else ""),
        is_urgent=True,
    )


def told(one: Ending) -> str:
    rank = "" if one.rank is None else f"rank {one.rank} "
    step = "" if one.last_step is None else f"; last {one.step_name} {one.last_step}"
    error = f": {one.error}" if one.error else ""
    is_late = one.silent_s is not None and one.state in DEAD
    silent = f"; nothing happened for {one.silent_s:.0f} s before" if is_late else ""
    state = "killed, last seen" if one.state == "killed" else one.state
    return f"{rank}{state} in {one.where or 'no open span'}{step}{silent}{error}"
