"""How each process of a run ended, or where it is, from black boxes and failed spans."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from cirron.runs.opened import Run, Session

NOWHERE = (-1, -1)
MAX_FAILED = 16  # nested spans that an error ended


class Ending(NamedTuple):
    """How a process ended, or that it is running."""

    rank: int | None
    state: str
    where: str  # path of the innermost open span
    last_step: int | None
    silent_s: float | None  # seconds without progress; None: less than `silence_after`
    error: str = ""  # the exception or the signal that ended it
    last_ns: int = 0  # its last sign of life
    step_name: str = "step"  # or `batch`, of `ci.batches`
    epoch: int | None = None  # of the last step

    @property
    def blamed(self) -> tuple[bool, int]:
        """Sorts by who is to blame: a launcher ends the other ranks with a signal."""
        return self.state == "signal", self.last_ns

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and number of the last step that it began. Each epoch counts its steps anew."""
        if self.last_step is None:
            return NOWHERE
        return -1 if self.epoch is None else self.epoch, self.last_step

    @property
    def awaited(self) -> tuple[tuple[int, int], bool]:
        """Sorts by whom the others wait for: the rank behind them, or the one not in backward."""
        return self.position, self.where.endswith("backward")

    @property
    def is_hung(self) -> bool:
        """Whether the process stopped making progress before it ended, if it did end."""
        return self.silent_s is not None and self.state in ("running", "signal", "killed")


def brief(error: str) -> str:
    r"""An error in one line. What a loader worker passes on ends with its own error.

    >>> brief("KeyError: 'a'"), brief("E: Caught E.\nOriginal Traceback (most...\nE: bad file\n")
    ("KeyError: 'a'", 'E: bad file')
    """
    # A KeyError's text is a repr: its newlines are escaped.
    lines = [one for one in error.replace("\\n", "\n").splitlines() if one.strip()]
    is_passed_on = any(one.startswith("Original Traceback") for one in lines)
    return lines[-1 if is_passed_on else 0] if lines else ""


def endings(run: Run) -> list[Ending]:
    """The endings of all processes of the last attempt."""
    found = []
    for one in run.sessions:
        if one.attempt != run.attempts[-1]:
            continue
        box = one.box
        where, error, epoch = "", "", None
        step: dict[str, Any] = {}
        if box is not None:
            spans = {span.id: span for span in box.spans}
            parents = {span.parent_id for span in box.spans}
            inner = [span for span in box.spans if span.id not in parents]
            if inner:
                path: list[str] = []
                span = inner[0]
                while span is not None and len(path) < 64:
                    path.append(placed(span.name, span.index))
                    span = spans.get(span.parent_id or "")  # type: ignore[assignment]
                where = " > ".join(path[::-1])
            step = box.content.get("last_step") or {}
            epochs = [span.index for span in box.spans if span.name == "epoch"]
            if step and not epochs:  # no epoch is open: ask the last step that was recorded
                rows = run.query("newest_steps", session=one.key, most=1).fetch().rows
                epochs = [row[0] for row in rows]
            epoch = epochs[-1] if epochs else None
            error = str((box.content.get("ended") or {}).get("detail") or "")
            if error:
                where = failed_in(run, one) or where
        found.append(
            Ending(
                one.rank,
                one.state,
                re.sub(r"^cirron\.session( > |$)", "", where),
                step.get("index"),
                silent_s(one),
                error,
                one.last_ns,
                step.get("name", "step"),
                epoch,
            )
        )
    return found


def silent_s(session: Session) -> float | None:
    """How long a process with an open span has recorded nothing; None: it has."""
    content = {} if session.box is None else session.box.content
    since, beat = content.get("silent_since_ns"), content.get("heartbeat_ns")
    return None if since is None or beat is None else float(beat - since) / 1e9


def failed_in(run: Run, session: Session) -> str:
    """The path of the innermost span that the last error ended."""
    where, latest = "", 0
    rows = run.query("failed", session=session.key, most=MAX_FAILED).fetch().rows
    for path, epoch, step, index, start in rows:  # an error leaves the innermost span first
        if start >= latest:  # else an earlier error, which was caught
            latest = start
            *above, name = path.split("/")
            known = {"epoch": epoch, "step": step, "batch": step}
            where = " > ".join(
                [*(placed(one, known.get(one)) for one in above), placed(name, index)]
            )
    return where


def placed(name: str, index: int | None) -> str:
    return name if index is None else f"{name}[{index}]"
