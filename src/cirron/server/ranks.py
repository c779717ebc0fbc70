"""Compares ranks: a heat map of their steps, and which one is slow.

In data-parallel training, ranks wait for each other in backward, so their steps take equally long.
The time outside of backward (`own`) shows which rank is slow. A cell of the heat map is the mean of
its steps; a row for several ranks shows the slowest of them.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from cirron.server import query
from cirron.verdict.endings import silent_s
from cirron.verdict.rules.ranks import CHANCE, MIN_COMPARED, tail

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cirron.runs.opened import Run
    from cirron.runs.place import Place

MAX_ROWS = 1_000
MAX_COMPARED = 100_000  # compared steps, of all ranks together


def ranks(place: Place, params: Mapping[str, str]) -> dict[str, Any]:
    """Step time, or with `own` the time outside of backward, by rank and time, and a line per rank.

    Of the last attempt by default.
    """
    run = query.run_of(place, params)
    wide = query.width(params, 300)
    high = query.number(params, "rows", 1, MAX_ROWS, 400)
    attempt = query.number(params, "attempt", 0, 2**31, run.attempts[-1])
    own = "own" in params
    key = ("ranks", wide, high, attempt, own)
    return query.kept(run, key, lambda: _ranks(run, wide, high, attempt, own))


def _ranks(run: Run, wide: int, high: int, attempt: int, own: bool) -> dict[str, Any]:
    members = [one for one in run.sessions if one.attempt == attempt]
    by_rank = {row["session"]: row for row in run.query("step_times", attempt=attempt).rows()}
    answer: dict[str, Any] = {"own": own, "attempt": attempt, "attempts": run.attempts, "ranks": []}
    if by_rank:
        from_ns = min(row["first_ns"] for row in by_rank.values())
        to_ns = max(row["last_ns"] for row in by_rank.values())
        typical = median(row["own" if own else "median"] for row in by_rank.values())
        with_steps = [one for one in members if one.key in by_rank]
        # Fewer cells than steps, so that no cell is empty.
        cells = max(row["steps"] * 2 // 3 for row in by_rank.values()) or 1
        answer |= {
            "from": from_ns - run.started_ns,
            "to": to_ns - run.started_ns,
            "median": typical,
            **_heat(run, with_steps, (from_ns, to_ns, min(wide, cells), high), attempt, own),
        }
    last, compared = _slowest(run, by_rank, attempt)
    for one in members:
        row = by_rank.get(one.key, {})
        times = last.get(one.key, 0)
        chance = None
        if compared >= MIN_COMPARED and len(by_rank) > 1:
            chance = min(tail(times, compared, 1 / len(by_rank)) * len(by_rank), 1.0)
        answer["ranks"].append(
            {
                "session": str(one.key),
                "rank": one.rank,
                "host": None if one.info is None else one.info.host,
                "pid": one.pid,
                "state": one.state,
                "silent_s": silent_s(one) if one.state == "running" else None,
                "steps": row.get("steps", 0),
                "median": row.get("median"),
                "own": row.get("own"),
                "worst": row.get("worst"),
                "slowest_in": times,
                "chance": chance,
                "is_odd": chance is not None and chance < CHANCE,
            }
        )
    return {**answer, "compared": compared}


def _heat(
    run: Run, members: list[Any], shape: tuple[int, int, int, int], attempt: int, own: bool
) -> Any:
    """The heat map. A row has several ranks if there are more ranks than rows; None: no step."""
    from_ns, to_ns, wide, high = shape
    each = -(-len(members) // high)
    at = {one.key: number // each for number, one in enumerate(members)}
    count = -(-len(members) // each)
    walls: list[list[int | None]] = [[None] * wide for _ in range(count)]
    steps: list[int | None] = [None] * wide
    given = {"from_ns": from_ns, "to_ns": to_ns, "width": wide, "attempt": attempt, "own": own}
    for session, bucket, wall, step in run.query("heat", **given).fetch().rows:
        row = at.get(session)
        if row is None:
            continue
        known = walls[row][bucket]
        if known is None or wall > known:
            walls[row][bucket] = wall
        if row == 0:
            steps[bucket] = step
    labels = [
        {"session": str(members[number * each].key), "rank": members[number * each].rank}
        for number in range(count)
    ]
    return {"rows": labels, "each": each, "walls": walls, "steps": steps}


def _slowest(run: Run, by_rank: Mapping[int, Any], attempt: int) -> tuple[dict[int, int], int]:
    """How often each process had the longest own time, in the steps that all of them have."""
    if len(by_rank) < 2:
        return {}, 0
    total = sum(row["steps"] for row in by_rank.values())
    given = {"every": total // MAX_COMPARED + 1, "sessions": len(by_rank)}
    rows = run.query("slowest", attempt=attempt, **given).fetch().rows
    return dict(rows), sum(count for _, count in rows)
