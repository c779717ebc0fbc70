"""Perfetto's and Chrome's traces, opened by the real trace processor."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cirron as ci

if TYPE_CHECKING:
    from tests.real import export_cases
    from tests.real.export_cases import MARKUP, NAMES, START_NS
    from tests.real.trace_processor import TraceProcessor
else:
    import export_cases
    from export_cases import MARKUP, NAMES, START_NS
    from trace_processor import TraceProcessor

BOTH = pytest.mark.parametrize("form", ["perfetto", "chrome"])
ROOT = Path(__file__).parents[2]


@BOTH
def test_slices_are_the_spans(tmp_path: Path, form: str) -> None:
    """Each span is a slice with its name, its length, and its depth in the tree."""
    run = export_cases.plain(tmp_path)
    run.export(form, tmp_path / "trace")
    wanted = run.sql(
        "SELECT name, depth, count(*), sum(end_ns - start_ns)::BIGINT FROM spans"
        " GROUP BY name, depth ORDER BY name, depth"
    )

    with TraceProcessor(tmp_path / "trace") as trace:
        found = trace.sql(
            "SELECT name, depth, count(*), sum(dur) FROM slice GROUP BY name, depth ORDER BY name"
        )
        assert wanted.fetch().rows == found
        assert [] == trace.sql(
            "SELECT name, value FROM stats WHERE value > 0 AND severity <> 'info'"
        )


@BOTH
def test_a_process_a_rank(tmp_path: Path, form: str) -> None:
    """Processes are named by rank and host; the threads and slices are theirs."""
    export_cases.plain(tmp_path).export(form, tmp_path / "trace")

    with TraceProcessor(tmp_path / "trace") as trace:
        found = trace.sql(
            "SELECT process.name, thread.name, count(*) FROM slice"
            " JOIN thread_track ON thread_track.id = slice.track_id"
            " JOIN thread USING (utid) JOIN process USING (upid) GROUP BY 1, 2 ORDER BY 1"
        )
    assert [("rank 0 (node)", "thread 1", 33), ("rank 1 (node)", "thread 1", 33)] == found


def test_times_are_those_of_the_day(tmp_path: Path) -> None:
    """Perfetto has each slice at its nanosecond; Chrome's begin at 0, to the nanosecond."""
    run = export_cases.plain(tmp_path)
    wanted = [row[0] for row in run.sql("SELECT start_ns FROM spans ORDER BY 1").fetch().rows]
    for form, began_ns in (("perfetto", 0), ("chrome", START_NS)):
        run.export(form, tmp_path / form)
        with TraceProcessor(tmp_path / form) as trace:
            found = [row[0] for row in trace.sql("SELECT ts FROM slice ORDER BY 1")]
        assert [ns - began_ns for ns in wanted] == found


@BOTH
def test_marks_are_counters(tmp_path: Path, form: str) -> None:
    """Each value of a mark is a value of a counter of its process, at its time."""
    run = export_cases.plain(tmp_path)
    run.export(form, tmp_path / "trace")
    wanted = run.sql(
        "SELECT rank, value FROM marks WHERE name = 'loss' ORDER BY rank, ts_ns"
    ).fetch()

    with TraceProcessor(tmp_path / "trace") as trace:
        found = trace.sql(
            "SELECT process.name, value FROM counter"
            " JOIN process_counter_track t ON t.id = counter.track_id JOIN process USING (upid)"
            " WHERE t.name LIKE 'loss%' ORDER BY process.name, ts"
        )
    assert [(f"rank {rank} (node)", value) for rank, value in wanted.rows] == found


@BOTH
def test_attributes_are_arguments(tmp_path: Path, form: str) -> None:
    """What a span says of itself is on its slice."""
    run = export_cases.plain(tmp_path, ranks=1, epochs=1, steps=1)
    run.export(form, tmp_path / "trace")

    with TraceProcessor(tmp_path / "trace") as trace:
        found = dict(
            trace.sql(
                "SELECT replace(replace(a.flat_key, 'debug.', ''), 'args.', ''),"
                " coalesce(string_value, int_value) FROM slice JOIN args a USING (arg_set_id)"
                " WHERE slice.name = 'forward'"
            )
        )
    assert "train" == found["mode"]
    assert 300_000 == found["gpu_ns"]


@BOTH
def test_whatever_a_file_holds_is_a_trace(tmp_path: Path, form: str) -> None:
    """Odd names, times and values are in the trace, with the reader content."""
    run = export_cases.hostile(tmp_path)
    run.export(form, tmp_path / "trace")

    with TraceProcessor(tmp_path / "trace") as trace:
        named = trace.sql(
            "SELECT s.name, s.dur, s.depth FROM slice s JOIN thread_track t ON t.id = s.track_id"
        )
        slices = trace.sql("SELECT name, dur FROM slice")
        odd = trace.sql(
            "SELECT value FROM counter JOIN process_counter_track t ON t.id = track_id"
            " WHERE t.name LIKE 'odd%' ORDER BY value"
        )
        problems = trace.sql("SELECT name FROM stats WHERE value > 0 AND severity <> 'info'")
        instants = trace.sql("SELECT count(*) FROM slice WHERE name = 'odd'")
    names = {name for name, _ in slices}
    assert {MARKUP, NAMES[1], "=HYPERLINK(1)", "rocket \U0001f680"} <= names
    assert {"open": -1, "open inside": -1, "backwards": 0}.items() <= dict(slices).items()
    assert 3 == sum(name == "task" for name, _ in slices)
    assert [-1e308, 1.0, 2.0**62, 1e308] == [value for (value,) in odd if abs(value) >= 1]
    assert [(3,)] == instants  # NaN and the infinities, which a counter cannot be
    assert {"empty parent": 0, "empty": 1}.items() <= {n: depth for n, _, depth in named}.items()
    assert [] == problems


def test_overlapping_tasks_have_tracks_of_their_own(tmp_path: Path) -> None:
    """Scopes of asyncio tasks overlap in one thread: each has its children, and no other's."""

    async def task(number: int) -> None:
        with ci.scope("task", number):
            await asyncio.sleep(0.01)
            with ci.scope("inside", number):
                await asyncio.sleep(0.01)

    async def tasks() -> None:
        await asyncio.gather(*(task(number) for number in range(5)))

    ci.profile()
    asyncio.run(tasks())
    ci.shutdown()
    ci.open(tmp_path).export("perfetto", tmp_path / "trace")

    with TraceProcessor(tmp_path / "trace") as trace:
        found = trace.sql(
            "SELECT a.int_value, b.int_value FROM slice s JOIN slice p ON p.id = s.parent_id"
            " JOIN args a ON a.arg_set_id = s.arg_set_id AND a.key = 'debug.index'"
            " JOIN args b ON b.arg_set_id = p.arg_set_id AND b.key = 'debug.index'"
            " WHERE s.name = 'inside' AND p.name = 'task' ORDER BY 1"
        )
    assert [(number, number) for number in range(5)] == found


def test_a_real_training(tmp_path: Path) -> None:
    """A profiled torch program is a trace with its epochs, steps and phases."""
    subprocess.run(
        [sys.executable, ROOT / "examples" / "digits_torch.py"], cwd=tmp_path, check=True
    )
    run = ci.open(tmp_path)
    run.export("perfetto", tmp_path / "trace")

    with TraceProcessor(tmp_path / "trace") as trace:
        found = dict(trace.sql("SELECT name, count(*) FROM slice GROUP BY name"))
    counts = run.sql("SELECT name, count(*) FROM spans GROUP BY name").fetch().rows
    assert counts
    assert dict(counts) == {name: found.get(name) for name, _ in counts}


def test_chrome_is_strict_json(tmp_path: Path) -> None:
    """Any reader of JSON takes it, whatever was recorded."""
    export_cases.hostile(tmp_path).export("chrome", tmp_path / "trace")

    def refuse(token: str) -> None:
        raise AssertionError(token)

    content = json.loads((tmp_path / "trace").read_text("utf-8"), parse_constant=refuse)
    assert {"X", "B", "C", "i", "M"} == {event["ph"] for event in content["traceEvents"]}


@pytest.mark.heavy
def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    """What was written is forgotten: 200,000 spans need no more than the reader itself."""
    generate = f"{ROOT}/bench/spools.py {tmp_path} --spans 200000 --ranks 8".split()
    subprocess.run([sys.executable, *generate], check=True, capture_output=True)
    ci.open(tmp_path)
    code = (
        "import resource, cirron as ci\n"
        "run = ci.open()\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "before = peak()\n"
        "run.export('perfetto', 'trace')\n"
        "print(peak() - before)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
    )

    assert int(said.stdout) < 200
