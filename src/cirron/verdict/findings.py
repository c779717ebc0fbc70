"""The contents of a report: the verdict, findings, and what was not judged and why."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

SCHEMA = 1

Class = Literal[
    "input-bound",
    "host-bound",
    "compute-bound",
    "evaluation-heavy",
    "checkpoint-heavy",
    "snapshot-heavy",
    "logging-heavy",
    "compile-storm",
    "uneven-steps",
    "memory-growth",
    "numerics",
    "slow-rank",
    "died",
    "hung",
    "healthy",
    "not-enough-data",
]


@dataclass(frozen=True)
class Gain:
    """What a fix would save, as a share of the time of the compared steps."""

    share: float
    seconds: float
    replay_error: float  # error of the same replay on the unchanged run


class Prediction(NamedTuple):
    """A gain, or why none can be predicted."""

    gain: Gain | None
    no_gain: str = ""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or that takes the time."""

    kind: Class
    summary: str  # a sentence without its full stop
    share: float | None  # of the time; None: it is not about time
    gain: Gain | None
    no_gain: str  # why no gain is predicted, if the finding is about time
    evidence: list[str]
    advice: str
    blames: str = ""  # the part of the account to mark
    is_urgent: bool = False  # takes precedence over findings about speed

    def as_dict(self) -> dict[str, Any]:
        return {
            "class": self.kind,
            "summary": self.summary,
            "share": self.share,
            "gain": None if self.gain is None else vars(self.gain),
            "no_gain": self.no_gain,
            "evidence": self.evidence,
            "advice": self.advice,
        }


@dataclass(frozen=True)
class Abstained:
    """A class that was not judged."""

    kind: Class
    why: str


@dataclass(repr=False)
class Report:
    """The verdict on a run, with its evidence."""

    run: dict[str, Any]
    basis: list[str]  # what was compared, and what was not measured
    account: list[tuple[str, int, float]]  # part, ns, share: adds up to the whole
    verdict: Finding
    findings: list[Finding] = field(default_factory=list)  # in order of gain
    abstained: list[Abstained] = field(default_factory=list)
    before: dict[str, Any] | None = None  # earlier runs of the script, and the change since

    def __repr__(self) -> str:
        from cirron.view import report

        return report.render(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "run": self.run,
            "basis": self.basis,
            "account": [
                {"part": part, "ns": ns, "share": share} for part, ns, share in self.account
            ],
            "verdict": {"class": self.verdict.kind, "summary": self.verdict.summary},
            "findings": [one.as_dict() for one in self.findings],
            "abstained": [{"class": one.kind, "why": one.why} for one in self.abstained],
            "before": self.before and {**self.before, "change": vars(self.before["change"])},
        }
