"""The queries answer what a plain computation over the tree of spans answers."""

from __future__ import annotations

import json
import math
import random
import shutil
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest
from tests.questions import LONG, ONE_ROW, given_to, outsize

import cirron as ci
from cirron import wire
from cirron.runs import derived, engine, scan, store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Made, MadeSession

    from cirron.runs.opened import Run

ASIDE = {"evaluation", "prediction"}
STEPS = {"step", "batch"}
BASE = 1_790_000_000_000_000_000


def above(of: MadeSession, span: wire.Span) -> Iterator[wire.Span]:
    """The ancestors of a span."""
    by_id = {one.id: one for one in of.spans}
    while span.parent_id is not None:
        span = by_id[span.parent_id]
        yield span


def children(of: MadeSession, span: wire.Span) -> list[wire.Span]:
    """Those in the same thread, that have ended."""
    return [
        one
        for one in of.spans
        if one.parent_id == span.id and one.thread_id == span.thread_id and one.end_ns is not None
    ]


def training_steps(of: MadeSession) -> list[wire.Span]:
    found = [
        span
        for span in of.spans
        if span.name in STEPS
        and span.end_ns is not None
        and not {one.name for one in above(of, span)} & (ASIDE | STEPS)
    ]
    return sorted(found, key=lambda span: span.start_ns)


def wall(span: wire.Span) -> int:
    assert span.end_ns is not None
    return span.end_ns - span.start_ns


def total(spans: list[wire.Span], *names: str) -> int | None:
    found = [wall(one) for one in spans if one.name in names]
    return sum(found) if found else None


def percentile(values: list[int], share: float) -> float:
    values = sorted(values)
    at = share * (len(values) - 1)
    low, high = values[math.floor(at)], values[math.ceil(at)]
    return low + (high - low) * (at - math.floor(at))


def training(made: Made, seed: int = 0, **given: Any) -> MadeSession:
    """A random training: evaluations inside and beside steps, steps inside steps, other threads,
    checkpoints, compilations, loading beside the steps, errors, and an epoch that is still open.
    """
    pick = random.Random(seed)
    of = made(**given)
    now: int = given.get("start", 0)

    def took(low: int = 5, high: int = 60) -> int:
        nonlocal now
        now += pick.randrange(low, high)
        return now

    root = of.span("cirron.session", now, None)
    for epoch_index in range(3):
        began = took()
        epoch = of.span("epoch", began, 0, root, epoch_index, cpu_ns=77, memory=epoch_index)
        of.span("data_setup", now, took(), epoch)
        of.span("data_load", now, took(), epoch)
        for index in range(6):
            began = took()
            step = of.span("step", began, 0, epoch, index)
            of.span("data_load", now, took(), step)
            of.span("data_load", now, now + 500, step, thread=9)  # a prefetching thread's
            gpu = pick.choice([None, 40])
            of.span("forward", now, took(), step, mode="train", gpu_ns=gpu, memory=now % 97)
            of.mark(step, "loss", pick.random(), now)
            of.mark(step, "loss", pick.random(), now)  # at the same moment: the later one counts
            if pick.random() < 0.4:
                failed: dict[str, Any] = {"error": "ValueError"} if pick.random() < 0.3 else {}
                of.span("backward", now, took(), step, **failed)
                of.span("optimizer_step", now, took(), step)
            if pick.random() < 0.3:
                inner = now
                nested = of.span("step", inner, 0, step, 0)
                of.span("forward", now, took(), nested, mode="train")
                nested.end_ns = BASE + took()
            if pick.random() < 0.4:
                evaluation = of.span("evaluation", now, 0, step)
                batch = of.span("batch", took(), 0, evaluation, 0)
                of.span("data_load", now, took(), batch)
                of.span("checkpoint", now, took(), evaluation)
                batch.end_ns = evaluation.end_ns = BASE + took()
                of.mark(evaluation, "loss", 99.0, now)
            if pick.random() < 0.3:
                trace = of.span("compile", now, 0, step)
                of.span("lower", now, took(), trace)
                trace.end_ns = BASE + took()
            of.span("reevaluation/x", now, took(), step)
            step.end_ns = BASE + took()
        evaluation = of.span("evaluation", now, took(), epoch)
        of.span("snapshot", now, took(), epoch)
        of.snapshot(epoch, "fc.weight", 2.0 + epoch_index, now)
        of.snapshot(epoch, "fc.weight.grad", 0.5 + epoch_index, now)
        of.snapshot(epoch, "fc.bias", None if epoch_index == 1 else 0.0, now)
        of.span("checkpoint", now, now + 1_000, epoch, thread=9)  # written behind the loop
        epoch.end_ns = BASE + took()
        of.span("checkpoint", took(), took(), root)
    epoch = of.span("epoch", now, None, root, 3)
    of.span("step", took(), None, epoch, 0)
    of.span("my evaluation", took(), took(), epoch)
    return of.write()


def rows(name: str, /, **given: Any) -> list[dict[str, Any]]:
    return ci.open(".").query(name, **given).rows()


def last_ns(of: MadeSession) -> int:
    return max(one.end_ns or one.start_ns for one in of.spans)


@pytest.mark.parametrize("seed", range(5))
def test_steps_have_phases_self_time_and_loss(made: Made, seed: int) -> None:
    """Steps have their phases, what no child of their thread covers, and their last loss."""
    of = training(made, seed)
    found = rows("steps")

    steps = training_steps(of)
    assert [one.start_ns for one in steps] == [row["start_ns"] for row in found]
    for step, row in zip(steps, found, strict=True):
        inside = children(of, step)
        known = {"data_load", "forward", "backward", "optimizer_step"}
        losses = [one.value for one in of.marks if one.span_id == step.id]
        measured = [one.gpu_ns for one in inside if one.gpu_ns is not None]
        assert wall(step) == row["wall_ns"]
        for name in known:
            assert total(inside, name) == row[f"{name}_ns"]
        assert total(inside, *ASIDE) == row["evaluation_ns"]
        others = {one.name for one in inside} - known - ASIDE
        assert total(inside, *others) == row["other_ns"]
        assert wall(step) - sum(map(wall, inside)) == row["self_ns"]
        assert (sum(measured) if measured else None) == row["gpu_ns"]
        assert losses[-1] == row["loss"]
        assert step.index == row["step"]


def test_steps_in_several_segments(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose children and losses were written in other files is as one that was not cut."""
    of = training(made)
    names = ("steps", "stalls", "epochs", "ranks", "goodput")
    whole = {name: rows(name) for name in names}
    spool = tmp_path / "cut" / ".cirron" / "spool"
    spool.mkdir(parents=True)
    end = last_ns(of)
    timed: list[tuple[int, wire.Span | wire.Mark]] = [
        *((one.end_ns or end, one) for one in of.spans),
        *((one.ts_ns, one) for one in of.marks),
    ]
    records = [one for _, one in sorted(timed, key=lambda pair: pair[0])]
    for at in range(0, len(records), 11):
        part = records[at : at + 11]
        batch = wire.Batch(
            schema_version=1,
            sdk_version="made",
            batch_id=f"{at:032x}",
            created_ns=BASE + at,
            session=of.info,
            spans=[one for one in part if isinstance(one, wire.Span)],
            marks=[one for one in part if isinstance(one, wire.Mark)],
            snapshots=[],
        )
        path = spool / f"{batch.created_ns:020d}-{batch.batch_id}.json"
        path.write_bytes(wire.encode(batch))
    monkeypatch.setattr(derived, "MIN_SPANS", 1)
    monkeypatch.setattr(scan, "ROUND_BYTES", 1)
    monkeypatch.setattr(store, "MANY", 10**6)  # they stay as they are

    cut = ci.open(tmp_path / "cut")
    assert cut.sql("SELECT key FROM steps WHERE start_ns IS NULL").rows()
    assert whole == {name: cut.query(name).rows() for name in names}


def test_stalls_count_the_wait_of_training_steps(made: Made) -> None:
    """What a rank waited for its data is what its training steps waited, in their own thread."""
    of = training(made)
    of.span("step", 90_000, 90_100, of.spans[0], 0)
    slow = of.span("step", 90_200, 90_300, of.spans[0], 1)
    of.span("data_load", 90_200, 90_260, slow)
    of.write()

    steps = training_steps(of)
    waits = [total(children(of, one), "data_load") or 0 for one in steps]
    (row,) = rows("stalls")
    assert len(steps) == row["steps"]
    assert sum(waits) == row["data_load_ns"]
    assert max(waits) == row["worst_ns"]
    assert sum(waits) / sum(map(wall, steps)) == pytest.approx(row["share"], rel=1e-12)
    stalled = [1 for step, wait in zip(steps, waits, strict=True) if 2 * wait > wall(step)]
    assert len(stalled) == row["stalled_steps"] >= 1


def test_phases_have_exact_percentiles(made: Made) -> None:
    """Phases are the spans that have ended by name and mode, with exact percentiles."""
    of = training(made)
    found = {(row["name"], row["mode"]): row for row in rows("phases")}

    ended = [one for one in of.spans if one.end_ns is not None]
    assert {(one.name, one.attrs.get("mode")) for one in ended} == set(found)
    for (name, mode), row in found.items():
        mine = [one for one in ended if (one.name, one.attrs.get("mode")) == (name, mode)]
        times = [wall(one) for one in mine]
        assert (len(mine), sum(times), max(times)) == (
            row["spans"],
            row["total_ns"],
            row["worst_ns"],
        )
        assert median(times) == row["median_ns"]
        assert percentile(times, 0.95) == pytest.approx(row["p95_ns"], rel=1e-12)
        assert percentile(times, 0.99) == pytest.approx(row["p99_ns"], rel=1e-12)
        assert sum("error" in one.attrs for one in mine) == row["errors"]
        assert sum(one.gpu_ns is not None for one in mine) == row["gpu_spans"]
        session_ns = last_ns(of) - of.info.clock.wall_ns
        assert sum(times) / session_ns == pytest.approx(row["share"], rel=1e-12)


def test_the_outline_separates_paths_and_open_spans(made: Made) -> None:
    """The outline has open spans, keeps a path's time apart from that of its children in the same
    thread, and lists parents before children.
    """
    of = training(made)
    found = {row["path"]: row for row in rows("outline")}

    end = last_ns(of)
    paths: dict[str, list[wire.Span]] = {}
    for span in of.spans:
        names = [one.name for one in above(of, span)][::-1]
        paths.setdefault("/".join([*names, span.name]), []).append(span)
    assert set(paths) == set(found)
    for name, spans in paths.items():
        row = found[name]
        times = [(one.end_ns or end) - one.start_ns for one in spans]
        inside = [
            (one.end_ns or end) - one.start_ns
            for one in of.spans
            for parent in spans
            if one.parent_id == parent.id and one.thread_id == parent.thread_id
        ]
        assert (len(spans), sum(times), max(times)) == (
            row["spans"],
            row["total_ns"],
            row["worst_ns"],
        )
        assert sum(one.end_ns is None for one in spans) == row["open_spans"]
        assert sum(times) - sum(inside) == row["self_ns"]
        assert median(times) == row["median_ns"]
    order = list(found)
    for at, name in enumerate(order):
        parent, _, _ = name.rpartition("/")
        if parent in found:
            assert order.index(parent) < at


def test_outline_keeps_subtrees_together(made: Made) -> None:
    """A name that sorts between another and its children is not listed between them."""
    of = made()
    one = of.span("a", 0, 10)
    of.span("b", 0, 5, one)
    of.span("a b", 20, 30)
    of.write()

    assert ["a", "a/b", "a b"] == [row["path"] for row in rows("outline")]


@pytest.mark.parametrize("seed", range(5))
def test_times_count_each_moment_once(made: Made, seed: int) -> None:
    """Each moment of the training thread counts once: for the outermost evaluation, checkpoint,
    compilation or snapshot that it is in, else for the step, else for the loading.
    """
    of = training(made, seed)
    (row,) = rows("times")
    parts = {
        "evaluation": ASIDE,
        "checkpoint": {"checkpoint"},
        "compile": {"compile", "trace", "lower"},
        "snapshot": {"snapshot"},
        "step": STEPS,
        "loading": {"data_load", "data_setup", "data_teardown"},
    }
    special = [part for part in parts if part not in ("step", "loading")]
    first, end = of.info.clock.wall_ns, last_ns(of)
    expected = dict.fromkeys([*parts, "other", "idle"], 0)
    mine = [one for one in of.spans if one.thread_id == 1]
    for moment in range(first, end):
        covering = [one for one in mine if one.start_ns <= moment < (one.end_ns or end)]
        names = [one.name for one in covering]  # outermost first: they were recorded so
        part = next((p for name in names for p in special if name in parts[p]), None)
        part = part or next((p for p in ("step", "loading") if parts[p] & set(names)), None)
        part = part or ("idle" if names == ["cirron.session"] else "other")
        expected[part] += 1
    assert expected == {part: row[f"{part}_ns"] for part in expected}
    assert row["wall_ns"] == sum(expected.values())


def test_times_of_a_session_without_spans_below(made: Made) -> None:
    """A session that did nothing was idle."""
    made().write()
    of = made()
    of.span("cirron.session", 0, 50)
    of.write()

    assert [(0, 0), (50, 50)] == [(row["wall_ns"], row["idle_ns"]) for row in rows("times")]


def test_epochs_have_their_steps_waits_and_evaluations(made: Made) -> None:
    """An epoch has its steps, what they waited, its evaluations and the last loss of its steps; a
    second training in the same process has epochs of its own.
    """
    of = training(made)
    again = of.span("epoch", 50_000, 50_100, of.spans[0], 0)
    step = of.span("step", 50_010, 50_050, again, 0)
    of.mark(step, "loss", 7.0, 50_040)
    of.write()
    found = rows("epochs")

    epochs = sorted(
        (one for one in of.spans if one.name == "epoch"), key=lambda one: (one.start_ns, one.id)
    )
    assert [one.start_ns for one in epochs] == [row["start_ns"] for row in found]
    for epoch, row in zip(epochs, found, strict=True):
        steps = [one for one in training_steps(of) if epoch in above(of, one)]
        inside = [
            one
            for one in of.spans
            if epoch in above(of, one)
            and one.thread_id == epoch.thread_id
            and one.end_ns is not None
            and not {up.name for up in above(of, one)} & ASIDE
        ]
        losses = [m.value for m in of.marks if m.span_id in {one.id for one in steps}]
        assert (epoch.end_ns or last_ns(of)) - epoch.start_ns == row["wall_ns"]
        assert (len(steps), sum(map(wall, steps))) == (row["steps"], row["step_ns"])
        assert total(inside, "data_load") == row["data_load_ns"]
        assert total(inside, *ASIDE) == row["evaluation_ns"]
        assert (losses[-1] if losses else None) == row["loss"]
        assert (epoch.cpu_ns, epoch.memory_peak_bytes) == (row["cpu_ns"], row["memory_peak_bytes"])
    assert 7.0 == found[-1]["loss"]


def length(span: wire.Span, end: int) -> int:
    return (span.end_ns or end) - span.start_ns


@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize(
    ("low", "high", "width"), [(0, 4_000, 7), (300, 900, 11), (1_000, 1_001, 3)]
)
def test_timeline_buckets_hide_no_error(
    made: Made, monkeypatch: pytest.MonkeyPatch, low: int, high: int, width: int, is_merged: bool
) -> None:
    """A bucket has the longest of the spans that begin in it, and hides no error; a span that began
    before the window is in the first bucket if it is as long as one.
    """
    of = training(made, 3)
    if is_merged:
        monkeypatch.setattr(derived, "MIN_SPANS", 1)
        monkeypatch.setattr(derived, "MIN_MERGED", 1)
        monkeypatch.setattr(derived, "LEVELS", range(3, 47))
    found = rows("timeline", width=width, from_ns=BASE + low, to_ns=BASE + high)

    end = last_ns(of)
    sizes = (2**at for at in range(64))
    size = next(one for one in sizes if -(-(BASE + high) // one) - (BASE + low) // one <= width)
    first, last = (BASE + low) // size * size, -(-(BASE + high) // size * size)
    buckets: dict[tuple[int, int, int], list[wire.Span]] = {}
    for span in of.spans:
        is_early = span.start_ns < first
        if span.start_ns < last and (
            not is_early or (length(span, end) >= size and (span.end_ns or end) > first)
        ):
            at = (max(span.start_ns, first) - first) // size
            depth = len(list(above(of, span)))
            buckets.setdefault((span.thread_id, depth, at), []).append(span)
    assert sorted(buckets) == [(row["thread_id"], row["depth"], row["bucket"]) for row in found]
    for row in found:
        spans = buckets[row["thread_id"], row["depth"], row["bucket"]]
        longest = max(spans, key=lambda one: (length(one, end), -one.start_ns))
        assert first + size * row["bucket"] == row["bucket_start_ns"]
        assert length(longest, end) == row["longest_end_ns"] - row["longest_start_ns"]
        assert longest.start_ns == row["longest_start_ns"]
        assert row["longest_id"] in {one.id for one in spans}
        assert len(spans) == row["spans"]
        assert max(one.end_ns or end for one in spans) == row["last_end_ns"]
        inside = [
            min(one.end_ns or end, last) - max(one.start_ns, first)
            if length(one, end) >= size
            else length(one, end)
            for one in spans
        ]
        assert sum(inside) == row["busy_ns"]
        errors = sorted(one.attrs["error"] for one in spans if "error" in one.attrs)
        assert (len(errors), errors[0] if errors else None) == (row["errors"], row["error"])


def test_pyramid_answers_as_the_spans_do(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the window, the ranks and the depth: with levels, without, and with a part that came
    after they were written.
    """
    pick = random.Random(7)
    for rank in (0, 1, None):
        training(made, rank or 0, rank=rank, run_id="r")
    monkeypatch.setattr(derived, "LEVELS", range(3, 47))
    plain = ci.open(".")
    shutil.copytree(".cirron/spool", "levels/.cirron/spool")
    monkeypatch.setattr(derived, "MIN_SPANS", 1)
    monkeypatch.setattr(derived, "MIN_MERGED", 1)
    with_levels = ci.open("levels")
    levels = with_levels.sql("SELECT DISTINCT level FROM cells").fetch().rows
    assert len(levels) > 5
    assert not plain.sql("SELECT level FROM cells").fetch().rows

    def windows(run: Run) -> Iterator[dict[str, int]]:
        for _ in range(40):
            low, high = sorted(pick.choices(range(run.started_ns - 50, run.ended_ns + 50), k=2))
            yield {
                "from_ns": low,
                "to_ns": high,
                "width": pick.choice([1, 3, 20, 500]),
                "first_rank": pick.choice([-1, 0]),
                "last_rank": pick.choice([0, 9]),
                "max_depth": pick.choice([1, 9]),
            }

    for given in windows(plain):
        assert (
            plain.query("timeline", **given).rows() == with_levels.query("timeline", **given).rows()
        )
    late = made(rank=2, run_id="r", start=500)
    late.span("late", 500, 900, None)
    late.write()
    monkeypatch.setattr(derived, "MIN_SPANS", 10**9)
    shutil.copytree(".cirron/spool", "levels/.cirron/spool", dirs_exist_ok=True)
    after, again = ci.open("levels"), ci.open(".")
    assert after.sql("SELECT level FROM cells").fetch().rows
    assert not again.sql("SELECT level FROM cells").fetch().rows
    for given in windows(again):
        assert again.query("timeline", **given).rows() == after.query("timeline", **given).rows()


def test_curves_lose_no_peak(made: Made) -> None:
    """No peak is lost, whatever the width; NaN and infinities are counted and hide none."""
    of = made()
    root = of.span("cirron.session", 0, 10_000)
    pick = random.Random(1)
    values = [pick.gauss(0, 1) for _ in range(1_000)]
    values[417], values[418], values[700] = float("nan"), 1e9, float("-inf")
    for at, value in enumerate(values):
        of.mark(root, "loss", value, 10 * at)
        of.mark(root, "same", 1.0, 10 * at)
    of.mark(root, "note", "text", 5)
    of.write()

    found = rows("curves", width=10)
    assert {"loss", "same"} == {row["name"] for row in found}
    losses = [row for row in found if row["name"] == "loss"]
    assert [100] * 10 == [row["points"] for row in losses]
    for row in losses:
        mine = values[100 * row["bucket"] : 100 * row["bucket"] + 100]
        finite = [one for one in mine if math.isfinite(one)]
        assert (min(finite), max(finite)) == (row["lowest"], row["highest"])
        assert BASE + 10 * values.index(row["lowest"]) == row["lowest_ns"]
        assert BASE + 10 * values.index(row["highest"]) == row["highest_ns"]
        assert (mine[0], mine[-1]) == (row["first_value"], row["last_value"])
        assert 100 - len(finite) == row["nonfinite"]
    for row in found:
        if row["name"] == "same":  # of equal values the first
            assert row["first_ns"] == row["lowest_ns"] == row["highest_ns"]


def test_tensors_have_their_gradient_and_relative_change(made: Made) -> None:
    """A weight stands beside its gradient; `change` is relative to the norm before."""
    training(made)
    found = {(row["tensor"], row["epoch"]): row for row in rows("tensors")}

    assert 6 == len(found)
    assert [None, 0.5, pytest.approx(1 / 3)] == [
        found["fc.weight", epoch]["change"] for epoch in range(3)
    ]
    assert [0.5, 1.5, 2.5] == [found["fc.weight", epoch]["gradient_norm"] for epoch in range(3)]
    assert [None] * 3 == [found["fc.bias", epoch]["gradient_norm"] for epoch in range(3)]
    assert [None] * 3 == [found["fc.bias", epoch]["change"] for epoch in range(3)]


def test_two_snapshots_in_one_epoch_stay_two(made: Made) -> None:
    """The first of each belongs to the first gradient, the second to the second."""
    of = made()
    epoch = of.span("epoch", 0, 100, None, 0)
    for at, norm in ((10, 1.0), (20, 2.0)):
        of.snapshot(epoch, "w", norm, at)
        of.snapshot(epoch, "w.grad", 10 * norm, at + 1)
    of.write()

    assert [(1.0, 10.0), (2.0, 20.0)] == [
        (row["norm"], row["gradient_norm"]) for row in rows("tensors")
    ]


def test_ranks_name_the_slowest_of_each_step(made: Made) -> None:
    """The slowest rank of a step, the lowest of those that tie, and how far clocks may be apart."""
    lengths = {0: (50, 40, 70), 1: (60, 40, 70), None: (10, 40, 70), 2: (60, 30, 80)}
    for rank, took in lengths.items():
        of = made(rank=rank, uncertainty_ns=3 if rank is None else 5 + rank)
        root = of.span("cirron.session", 0, 1_000)
        for index, one in enumerate(took):  # the last one is step 0 of a second training
            of.span(
                "step", 100 * index + (rank or 0), 100 * index + (rank or 0) + one, root, index % 2
            )
        of.write()

    found = {(row["step"], row["nth"]): row for row in rows("ranks")}
    assert [(0, 1), (0, 2), (1, 1)] == list(found)
    assert [1, 2, 0] == [row["slowest_rank"] for row in found.values()]
    assert [2, 2, 1] == [row["last_rank"] for row in found.values()]
    assert {4} == {row["ranks"] for row in found.values()}
    assert {14} == {row["uncertainty_ns"] for row in found.values()}
    first = found[0, 1]
    assert (10, 60, 62 - 10) == (first["fastest_ns"], first["slowest_ns"], first["spread_ns"])


def test_repeated_and_failed_steps_are_not_goodput(made: Made) -> None:
    """Steps that a later attempt repeats do not count as good, nor does one that failed; an attempt
    without steps has a row, and the row is of the rank with the most steps.
    """
    for attempt, (first, last) in enumerate([(0, 5), (0, 0), (3, 7)]):
        start = 1_000 * attempt
        for rank in (1, 0):
            of = made(attempt=attempt, rank=rank, start=start)
            root = of.span("cirron.session", start, start + 400)
            epoch = of.span("epoch", start, start + 400, root, 0)
            for index in range(first, last):
                at = start + 10 + 50 * (index - first)
                failed: dict[str, Any] = {"error": "Boom"} if (attempt, index) == (2, 6) else {}
                of.span("step", at, at + 40 + attempt, epoch, index, **failed)
            of.write()

    found = rows("goodput")
    assert [0, 1, 2] == [row["attempt"] for row in found]
    assert [0, 0, 0] == [row["rank"] for row in found]
    assert [5, 0, 4] == [row["steps"] for row in found]
    assert [2, 0, 0] == [row["steps_done_again"] for row in found]
    assert [200, 0, 168] == [row["step_ns"] for row in found]
    assert [120, 0, 126] == [row["good_ns"] for row in found]
    assert [0.3, 0.0, 0.315] == [pytest.approx(row["goodput"]) for row in found]
    assert [None, 600, 600] == [row["gap_ns"] for row in found]


def test_marks_and_series(made: Made) -> None:
    """Marks come back as they were made, NaN, infinities, texts and booleans too."""
    of = made(rank=None)
    root = of.span('it\'s "quoted" 名前', 0, 100)
    values: list[float | str] = [0.5, 3, True, float("nan"), float("inf"), -float("inf"), "naïve"]
    for at, value in enumerate(values):
        of.mark(root, "x", value, at)
    of.write()

    found = rows("marks")
    numbers = [row["value"] for row in found]
    assert [0.5, 3.0, 1.0] == numbers[:3]
    assert math.isnan(numbers[3])
    assert [math.inf, -math.inf, None] == numbers[4:]
    assert [None] * 6 + ["naïve"] == [row["text"] for row in found]
    assert 6 == len(rows("series", name="x"))
    (span,) = rows("spans")
    assert 'it\'s "quoted" 名前' == span["name"]
    assert ["nan", "inf", "-inf", "naïve"] == [
        one["text"] for one in json.loads(span["marks"]) if one["text"] is not None
    ]


@pytest.mark.parametrize("name", ["spans", "marks", "steps"])
def test_the_first_rows(made: Made, name: str) -> None:
    """The head of an answer is its beginning, with all that the whole answer says of these rows."""
    training(made)
    run = ci.open()

    whole = run.query(name).rows()
    assert len(whole) > 7
    assert whole[:7] == run.query(name).head(7).rows()
    assert whole == run.query(name).head(10_000).rows()


def test_rank_steps_align_the_steps_of_all_ranks(made: Made) -> None:
    """The same steps on each rank, by phase: from a moment on, and every second one.

    With the time since the step before, of those that are left out, too.
    """
    for rank in range(2):
        of = made(rank=rank)
        epoch = of.span("epoch", 0, 100, index=0)
        for number in range(4):
            at = 20 * number
            step = of.span("step", at, at + 15, epoch, number)
            of.span("data_load", at, at + 2 + rank, step)
            of.span("backward", at + 5, at + 12, step)
        of.write()

    rows = ci.open(".").query("rank_steps", attempt=0, first_ns=BASE + 20, every=2).rows()

    assert [(0, 0, 2, 15, 2, None, 7, None, 6, 5), (1, 0, 2, 15, 3, None, 7, None, 5, 5)] == [
        tuple(row.values()) for row in rows
    ]


def test_a_compile_inside_a_forward_is_not_part_of_it(made: Made) -> None:
    """Neither in the newest steps nor in the account."""
    of = made()
    epoch = of.span("epoch", 0, 100, index=0)
    step = of.span("step", 0, 90, epoch, 0)
    forward = of.span("forward", 0, 60, step, mode="train")
    of.span("compile", 10, 50, forward)
    of.write()
    run = ci.open(".")

    newest = run.query("newest_steps", session=run.main.key, most=10).rows()
    account = run.query("account", session=run.main.key, first_ns=0, last_ns=2**62).rows()

    assert [(90, 20, 40, 30)] == [
        (one["wall_ns"], one["forward_ns"], one["beside_ns"], one["self_ns"]) for one in newest
    ]
    assert {"name": "compile", "place": "forward", "spans": 1, "ns": 40} in account


def test_an_empty_run_answers_every_query(made: Made) -> None:
    """A session that has recorded nothing answers every query, most of them with no row."""
    made().write()
    run = ci.open(".")

    counts = {name: len(run.query(name, **given_to(run, name))) for name in engine.queries()}
    assert dict.fromkeys(ONE_ROW, 1) == {name: count for name, count in counts.items() if count}


def test_sums_that_64_bits_cannot_hold(made: Made) -> None:
    """Every query answers, with null for such a sum; what stands beside it is right."""
    outsize(made)
    run = ci.open(".")

    assert all(run.query(name, **given_to(run, name)).fetch().columns for name in engine.queries())
    phases = {row["name"]: row for row in run.phases.rows()}
    root = phases["cirron.session"]
    assert (None, float(LONG), 1.0) == (root["total_ns"], root["median_ns"], root["share"])
    outline = {row["path"]: row for row in run.query("outline").rows()}
    root = outline["cirron.session"]
    assert (None, None, LONG) == (root["total_ns"], root["self_ns"], root["worst_ns"])
    one = next(row for row in run.steps.rows() if row["rank"] == 0)
    assert (LONG, None, 2**63 - 1) == (one["wall_ns"], one["forward_ns"], one["memory_peak_bytes"])


def test_whole_numbers_stay_whole_in_frames(made: Made) -> None:
    """A sum of nanoseconds is an integer in pandas, too."""
    training(made)
    run = ci.open(".")

    for name, column in (("phases", "total_ns"), ("stalls", "data_load_ns"), ("times", "step_ns")):
        assert "int64" == str(run.query(name).df()[column].dtype)


def test_footers_are_read_once(made: Made) -> None:
    """The files of a store never change: what a cursor knows of them, the next one knows, too."""
    made().write()

    rows = ci.open(".").sql("SELECT current_setting('parquet_metadata_cache') AS on_").rows()
    assert [{"on_": True}] == rows


def test_runs_do_not_share_their_tables(made: Made) -> None:
    """Two runs that are open at once each answer for themselves."""
    for run_id, count in (("first", 1), ("second", 2)):
        of = made(run_id=run_id)
        for _ in range(count):
            of.span("x", 0, 10)
        of.write()

    first, second = (ci.open(".", run=one) for one in ("first", "second"))
    assert (1, 2, 1) == (len(first.spans), len(second.spans), len(first.spans))
    runs = first.runs
    assert (2, 1) == (len(runs["second"].spans), len(runs["first"].spans))
