"""Runs for the tests of exports: a plain one, and one with everything that a file may hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cirron as ci
from cirron import wire

if TYPE_CHECKING:
    from pathlib import Path

    from cirron.runs.opened import Run

SECOND_NS = 10**9
START_NS = 1_790_000_000 * SECOND_NS
MARKUP = "<script>alert(1)</script><img src=x onerror=alert(1)>"
NAMES = (
    MARKUP,
    "quotes \"'` & more",
    "lines\r\nand\ttabs",
    "codes \x00\x07\x1b[31m\x7f\x85",
    "\u202ereversed\u2028",
    "=HYPERLINK(1)",
    "+1",
    "-1",
    "@SUM(1)",
    "\tstart",
    "a/b",
    "",
    "rocket \U0001f680",
    "long " * 200,  # as long as a name may be
)


def session(number: int = 1, **more: Any) -> wire.Session:
    facts: dict[str, Any] = {
        "run_id": "run",
        "attempt": 0,
        "host": "node",
        "pid": 4242,
        "rank": None,
        "local_rank": None,
        "world_size": None,
        "clock": wire.Clock(START_NS, 0, 10),
    }
    return wire.Session(id=f"{number:032x}", **(facts | more))


class Writer:
    """Writes batches of one session, with ids that count up."""

    def __init__(self, folder: Path, who: wire.Session) -> None:
        self._folder = folder / ".cirron" / "spool"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._who = who
        self._number = 0
        self.spans: list[wire.Span] = []
        self.marks: list[wire.Mark] = []
        self.snapshots: list[wire.Snapshot] = []

    def id(self) -> str:
        self._number += 1
        return f"{self._who.id[-16:]}{self._number:016x}"

    def span(
        self,
        name: str,
        start_ns: int,
        end_ns: int | None,
        parent: wire.Span | None = None,
        **more: Any,
    ) -> wire.Span:
        """Times are from the start of the run, unless they are long ago or far ahead."""
        facts: dict[str, Any] = {"index": None, "cpu_ns": None, "gpu_ns": None, "attrs": {}}
        facts |= {"memory_peak_bytes": None, "thread_id": 1, "pid": self._who.pid}
        facts |= {"rank": self._who.rank, "mark_ids": []}
        one = wire.Span(
            id=self.id(),
            name=name,
            parent_id=None if parent is None else parent.id,
            start_ns=START_NS + start_ns,
            end_ns=None if end_ns is None else START_NS + end_ns,
            **(facts | more),
        )
        self.spans.append(one)
        return one

    def mark(self, span: wire.Span, name: str, value: Any, at_ns: int, **attrs: Any) -> None:
        kind = {float: "float", int: "int", bool: "bool", str: "string"}[type(value)]
        odd = None
        if isinstance(value, float) and (value != value or abs(value) == float("inf")):
            value, odd = None, str(value)
        at_ns += START_NS
        self.marks.append(
            wire.Mark(self.id(), span.id, name, kind, value, attrs, at_ns, "point", odd)
        )

    def snapshot(self, span: wire.Span, tensor: str, at_ns: int, **stats: Any) -> None:
        edges = [number / 8 - 1 for number in range(17)]
        facts: dict[str, Any] = {"mean": 0.5, "std": 1.0, "min": -1.0, "max": 1.0, "norm": 2.0}
        facts["histogram"] = wire.Histogram(edges, list(range(16)))
        self.snapshots.append(
            wire.Snapshot(
                id=self.id(),
                span_id=span.id,
                tensor_name=tensor,
                shape=[4, 4],
                dtype="float32",
                mode="stats",
                stats=wire.Stats(**(facts | stats)),
                blob_uri=None,
                ts_ns=START_NS + at_ns,
                attrs={},
            )
        )

    def seal(self) -> None:
        batch_id = self.id()
        batch = wire.Batch(
            schema_version=1,
            sdk_version="0",
            batch_id=batch_id,
            created_ns=START_NS,
            session=self._who,
            spans=self.spans,
            marks=self.marks,
            snapshots=self.snapshots,
        )
        (self._folder / f"{START_NS:020d}-{batch_id}.json").write_bytes(wire.encode(batch))


def plain(folder: Path, ranks: int = 2, epochs: int = 2, steps: int = 5) -> Run:
    """A run of two ranks: steps of a millisecond with a forward and a backward, a loss each."""
    for rank in range(ranks):
        writer = Writer(folder, session(rank + 1, rank=rank, pid=100 + rank, world_size=ranks))
        root = writer.span("cirron.session", 0, SECOND_NS)
        for epoch in range(epochs):
            begun = epoch * 100_000_000
            whole = writer.span("epoch", begun, begun + steps * 1_000_000, root, index=epoch)
            for step in range(steps):
                at = begun + step * 1_000_000
                one = writer.span("step", at, at + 1_000_000, whole, index=step)
                attrs = {"mode": "train", "sizes": [1, 2], "deep": {"a": {"b": None}}}
                writer.span("forward", at, at + 400_000, one, attrs=attrs, gpu_ns=300_000)
                writer.span("backward", at + 400_000, at + 900_000, one)
                writer.mark(one, "loss", 1 / (1 + epoch * steps + step) + rank, at + 950_000)
            writer.mark(whole, "accuracy", epoch / 2, begun + steps * 1_000_000)
            for tensor in ("fc.weight", "fc.weight.grad"):
                writer.snapshot(whole, tensor, begun + steps * 1_000_000, norm=2.0 + epoch)
        writer.seal()
    return ci.open(folder)


def hostile(folder: Path) -> Run:
    """A session without a rank, whose records hold whatever a file may."""
    writer = Writer(folder, session(host=MARKUP, run_id=f"run {MARKUP}"))
    root = writer.span("cirron.session", 0, SECOND_NS)
    epoch = writer.span("epoch", 0, SECOND_NS, root, index=2**62)
    step = writer.span("step", 0, SECOND_NS, epoch, index=-1)
    for number, name in enumerate(NAMES):
        writer.span(
            name, number * 1000, number * 1000 + 500, step, attrs={name: name, "error": name}
        )
        writer.mark(step, name, 0.5, number * 1000)
        writer.mark(step, f"text {name}", name, number * 1000)
        writer.snapshot(epoch, name, number * 1000)
    for value in (float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 5e-324, True, 2**62):
        writer.mark(step, "odd", value, 77)
    deep: Any = "bottom"
    for _ in range(30):  # two levels each; deeper ones are left out when they are read
        deep = {"in": [deep]}
    writer.span("attributes", 0, 10, root, attrs={"deep": deep, "large": 2**63 - 1, "none": None})
    writer.span("open", 5_000, None, step)
    writer.span("open inside", 6_000, None, writer.spans[-1], thread_id=7)
    writer.span("backwards", 900, 100, root)
    writer.span(
        "empty", 700, 700, writer.span("empty parent", 700, 700, root, thread_id=9), thread_id=9
    )
    writer.span("long ago", -START_NS - 5, 10, root, thread_id=11)
    writer.span("far ahead", 7 * 10**18, 7 * 10**18 + 5, root, thread_id=12)
    for task in range(3):  # of asyncio: they overlap in one thread
        writer.span("task", task * 10, 1_000 + task * 10, root, thread_id=13)
    nothing = wire.Histogram([], [])
    writer.snapshot(
        epoch, "no values", 5, mean=None, std=None, min=None, max=None, norm=None, histogram=nothing
    )
    writer.snapshot(epoch, "huge", 5, mean=1e308, norm=1e308)
    writer.seal()
    return ci.open(folder)
