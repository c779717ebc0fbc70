"""The parameters of a query: checks them, and finds the run and the process that they name.

Times are nanoseconds since the start of the run, because nanoseconds since 1970 do not fit into a
JavaScript number. Session keys are text for the same reason.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from cirron.server.responses import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from cirron.runs.opened import Run, Session
    from cirron.runs.place import Place

Answer = TypeVar("Answer")

MAX_WIDTH = 4_000  # pixels of a chart
MAX_TEXT = 1_000  # names of marks and spans are no longer
MAX_COMPARED = 64  # runs of one diff
MAX_KEPT = 128  # cached results of all runs; the least recently used goes first


class BadRequest(Refusal):
    """A parameter is missing, or its value is not allowed."""

    def __init__(self, detail: str) -> None:
        super().__init__(400, detail)


def text(params: Mapping[str, str], name: str) -> str:
    """A required parameter."""
    given = params.get(name)
    if given is None or len(given) > MAX_TEXT:
        raise BadRequest(f"the parameter {name!r} is missing, or longer than {MAX_TEXT} characters")
    return given


def number(params: Mapping[str, str], name: str, low: int, high: int, default: int) -> int:
    """An integer, clamped to the limits."""
    given = params.get(name)
    if given is None:
        return default
    try:
        found = float(given)
        return round(min(max(found, low), high))
    except ValueError:  # not a number, or NaN
        raise BadRequest(f"the parameter {name!r} must be a number: {given[:80]!r}") from None


def width(params: Mapping[str, str], default: int = 600) -> int:
    """The width of the chart in pixels."""
    return number(params, "width", 1, MAX_WIDTH, default)


def window(params: Mapping[str, str], run: Run) -> tuple[int, int]:
    """The time range, in ns since 1970; by default the whole run."""
    whole = max(run.ended_ns - run.started_ns, 1)
    start = number(params, "from", -whole, 2 * whole, 0)
    end = number(params, "to", -whole, 2 * whole, whole)
    if end <= start:
        raise BadRequest("the parameter 'to' must be greater than 'from'")
    return run.started_ns + start, run.started_ns + end


def runs_of(place: Place, params: Mapping[str, str], name: str) -> list[Run]:
    """The runs with these ids, percent-encoded and separated by commas."""
    ids = params.get(name, "").split(",")
    if len(ids) > MAX_COMPARED:
        raise BadRequest(f"the parameter {name!r} has more than {MAX_COMPARED} runs")
    known = place.runs
    return [known[unquote(one)] for one in ids]


def run_of(place: Place, params: Mapping[str, str]) -> Run:
    """The run with this id, or with an id that starts with it."""
    return place.runs[text(params, "run")]


def session_of(run: Run, params: Mapping[str, str]) -> Session:
    """The given process; by default the main one."""
    given = params.get("session")
    if given is None:
        return run.main
    for one in run.sessions:
        if str(one.key) == given:
            return one
    raise BadRequest("the run has no process with this 'session'")


def since_start(run: Run, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with times since the start of the run."""
    names = {"start_ns": "start", "end_ns": "end", "ts_ns": "at"}
    found = [dict(row) for row in rows]
    for row in found:
        for name in names.keys() & row.keys():
            at_ns = row.pop(name)
            row[names[name]] = None if at_ns is None else at_ns - run.started_ns
    return found


def attributes(text: str | None) -> dict[str, Any]:
    """Attributes from a store; empty if they are not a JSON object."""
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


_kept: dict[tuple[Any, ...], Future[Any]] = {}
_lock = threading.Lock()


def kept(run: Run, key: tuple[Any, ...], ask: Callable[[], Answer]) -> Answer:
    """The result of a slow query, cached until the run changes.

    The key contains the state of the run's sessions, so results of ended runs stay cached while
    other runs go on.
    """
    state = hash(tuple((one.key, one.last_ns, one.state) for one in run.sessions))
    key = (*key, run.id, state)
    with _lock:
        known = _kept.pop(key, None)
        answer = _kept[key] = known or Future()  # the newest is last
        while len(_kept) > MAX_KEPT:
            del _kept[next(iter(_kept))]
    if known is None:  # other threads with the same query wait for this result
        try:
            answer.set_result(ask())
        except BaseException as error:  # the waiting threads must get it, whatever it is
            with _lock:
                _kept.pop(key, None)
            answer.set_exception(error)
            raise
    return answer.result()  # type: ignore[no-any-return]
