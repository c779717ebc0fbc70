"""What a run was doing when it died, or is doing while it hangs: `why(run)`.

Ranks at the same place (open spans, last step, innermost call) form a group. The smallest group
comes first: it is most often the cause, and the others wait for it. Ranks that never arrived at the
last step are marked.

Dumps of PyTorch's Flight Recorder tell which collective each rank is in. They are untrusted
pickles, so an unpickler that accepts only plain values reads them.
"""

from __future__ import annotations

import io
import pickle
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from cirron.runs import untrusted
from cirron.verdict.endings import NOWHERE, Ending, endings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cirron.runs.opened import Run, Session

MAX_DUMP_BYTES = 64 * 2**20
MAX_FRAMES = 40
MAX_MISSING = 16  # ranks that are named
COLLECTIVE = "/torch/distributed/"  # the file of a call that waits for other ranks
DUMP = re.compile(r".*?(\d+)(?:\.pickle)?$")


@dataclass
class Group:
    """Ranks at the same place."""

    ranks: list[int | None]
    state: str
    where: str
    last_step: int | None
    step_name: str  # `step`, or `batch`, of `ci.batches`
    frame: str  # the innermost call of the main thread
    has_arrived: bool  # at the last step that any rank has begun
    stack: list[str] = field(default_factory=list)
    collective: str | None = None
    error: str = ""  # the exception or signal that ended the first of them

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class Why:
    """The groups of a run's ranks, the smallest first."""

    run_id: str
    state: str
    groups: list[Group]
    problems: list[str]

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "run": self.run_id,
            "state": self.state,
            "groups": [group.as_dict() for group in self.groups],
            "problems": self.problems,
        }


def why(run: Run, dumps: Path | None = None) -> Why:
    """Where each rank of the last attempt is, or was last."""
    problems: list[str] = []
    collectives = {} if dumps is None else read_dumps(dumps, problems)
    members = [one for one in run.sessions if one.attempt == run.attempts[-1]]
    ended = [trained(run, *pair) for pair in zip(members, endings(run), strict=True)]
    found = list(zip(members, ended, map(stack_of, members), strict=True))
    if any(one.is_hung for _, one, _ in found):  # a rank in a collective waits for the others
        found.sort(key=lambda one: (one[1].awaited, any(COLLECTIVE in call for call in one[2])))
    else:
        found.sort(key=lambda one: one[1].blamed)
    latest = max((one.position for _, one, _ in found), default=NOWHERE)
    missing = missing_of(members)
    if missing:
        problems.append(
            f"no records of rank {missing}: on another machine, or it never started recording"
        )
    groups: dict[tuple[Any, ...], Group] = {}
    for session, ending, stack in found:
        place = re.sub(r"\[\d+\]", "", ending.where)
        collective = collectives.get(session.rank) if session.rank is not None else None
        kind = ending.error.partition(":")[0]
        frame = stack[-1] if stack else ""
        key = (ending.state, kind, place, ending.position, frame, collective)
        group = groups.get(key)
        if group is None:
            group = groups[key] = Group(
                ranks=[],
                state=ending.state,
                where=ending.where,
                last_step=ending.last_step,
                step_name=ending.step_name,
                frame=frame,
                has_arrived=ending.position in (latest, NOWHERE),
                stack=stack[-MAX_FRAMES:],
                collective=collective,
                error=ending.error,
            )
        group.ranks.append(session.rank)
    for group in groups.values():
        group.ranks.sort(key=lambda rank: -1 if rank is None else rank)
    # Groups of the same size stay in order: who ended first, or whom the others wait for.
    ordered = sorted(groups.values(), key=lambda one: (one.state == "clean", len(one.ranks)))
    return Why(run.id, run.state, ordered, problems)


def trained(run: Run, session: Session, ending: Ending) -> Ending:
    """The ending, with the last training step in place of a batch of the final evaluation."""
    if ending.state != "clean" or ending.step_name != "batch":
        return ending
    rows = run.query("newest_steps", session=session.key, most=1).rows()
    if not rows:
        return ending
    (row,) = rows
    return ending._replace(last_step=row["step"], step_name=row["name"], epoch=row["epoch"])


def missing_of(sessions: Sequence[Session]) -> str:
    """The ranks, of as many as the launcher has started, that recorded nothing."""
    sizes = [one.info.world_size or 0 for one in sessions if one.info is not None]
    known = {one.rank for one in sessions}
    missing = [rank for rank in range(max(sizes, default=0)) if rank not in known]
    more = f" and {len(missing) - MAX_MISSING} more" if len(missing) > MAX_MISSING else ""
    return ", ".join(map(str, missing[:MAX_MISSING])) + more


def stack_of(session: Session) -> list[str]:
    """The main thread's calls, innermost last, if the black box has them."""
    stacks = [] if session.box is None else session.box.content.get("stacks") or []
    named = [one for one in stacks if one.get("name") == "MainThread"] or stacks
    return list(named[0].get("frames", [])) if named else []


# The operations of a pickle that build plain values. The others import, call or hash things.
PLAIN = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE),
    *(pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2),
    *(pickle.LONG1, pickle.LONG4, pickle.BINFLOAT, pickle.SHORT_BINBYTES, pickle.BINBYTES),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.EMPTY_LIST, pickle.APPEND),
    *(pickle.APPENDS, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2),
    *(pickle.TUPLE3, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS, pickle.MEMOIZE),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
)


OPERATIONS: dict[int, Any] = dict(pickle._Unpickler.dispatch)


class _Plain(pickle._Unpickler):
    """Reads plain values.

    It is the unpickler in Python: nine bytes can make the one in C allocate 64 GB for its memo.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = {op[0]: OPERATIONS[op[0]] for op in PLAIN}

    def load_setitem(self) -> None:
        self._check(self.stack[-2:-1])
        OPERATIONS[pickle.SETITEM[0]](self)

    def load_setitems(self) -> None:
        self._check(self.stack[::2])
        OPERATIONS[pickle.SETITEMS[0]](self)

    def _check(self, keys: list[Any]) -> None:
        # The hash of a tuple that contains another one twice, and so on, would take years.
        if not all(isinstance(key, (str, int)) for key in keys):
            raise pickle.UnpicklingError("a key is neither a string nor a number")

    dispatch |= {pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems}


def read_dumps(folder: Path, problems: list[str]) -> dict[int, str]:
    """The last collective of each rank, from its Flight Recorder dump."""
    found: dict[int, str] = {}
    for path in sorted(folder.iterdir()):
        match = DUMP.fullmatch(path.name)
        if match is None:
            continue
        try:
            payload = untrusted.read_file(path, MAX_DUMP_BYTES)
            content = _Plain(io.BytesIO(payload)).load()
            found[int(match[1])] = last_collective(content)
        except (untrusted.UnreadableError, OSError) as error:
            problems.append(f"{untrusted.shown(path.name)}: {error}")
        except KeyError:
            problems.append(f"{untrusted.shown(path.name)}: contains more than plain values")
        except Exception as error:  # noqa: BLE001  unpickling may raise anything
            problems.append(f"{untrusted.shown(path.name)}: is not a readable dump ({error})")
    return found


def last_collective(dump: Any) -> str:
    """The first entry that has not completed, else the last one. Gloo never reports completion."""
    entries = [one for one in dump.get("entries", []) if isinstance(one, dict)]
    waiting = [one for one in entries if one.get("state") != "completed" and not is_of_gloo(one)]
    waiting = waiting or entries[-1:]
    if not waiting:
        return "no collective"
    known = {key: one for key, one in waiting[0].items() if isinstance(one, (str, int))}
    number = known.get("collective_seq_id", known.get("seq_id", "?"))
    return f"{known.get('profiling_name', '?')} #{number} ({known.get('state', '?')})"


def is_of_gloo(entry: dict[str, Any]) -> bool:
    name = entry.get("profiling_name")
    return isinstance(name, str) and name.startswith("gloo")
