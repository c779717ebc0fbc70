"""died and hung: the run did not end by itself, or nothing has happened in it for long.

died: a process was killed, ended by a signal, or in an exception. hung: a running process has
recorded nothing for `silence_after` (60 s) inside of a span; its black box says since when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cirron.verdict.findings import Finding

if TYPE_CHECKING:
    from cirron.verdict.facts import Ending, Facts
    from cirron.verdict.rules import Judged

DEAD = ("killed", "signal", "exception")
MAX_RANKS = 4


def judge_death(facts: Facts) -> Judged:
    dead = [one for one in facts.endings if one.state in DEAD]
    if not dead:
        return None
    how = {"killed": "was killed", "signal": "ended by a signal", "exception": "ended in an error"}
    who = "the run" if len(facts.endings) == 1 else f"{len(dead)} of {len(facts.endings)} processes"
    return Finding(
        "died",
        f"{who} {how[dead[0].state]}" + (f" in {dead[0].where}" if dead[0].where else ""),
        None,
        None,
        [told(one) for one in dead[:MAX_RANKS]],
        "cirron why says what each process was doing",
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
        "cirron why shows the stacks",
        is_urgent=True,
    )


def told(one: Ending) -> str:
    rank = "" if one.rank is None else f"rank {one.rank} "
    step = "" if one.last_step is None else f"; last step {one.last_step}"
    error = f": {one.error}" if one.error else ""
    return f"{rank}{one.state} in {one.where or 'no open span'}{step}{error}"
