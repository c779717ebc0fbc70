"""`cirron.open`: each record once, whatever the files are like; a store that is never half done."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import cirron
from cirron import errors, wire
from cirron.runs import derived, engine, ingest, objects, opened, store, untrusted
from cirron.runs.place import Place
from cirron.view import text

if TYPE_CHECKING:
    from collections.abc import Callable

START_NS = 1_790_000_000_000_000_000


def session(rank: int | None = None, run_id: str = "run-a", **given: Any) -> wire.Session:
    number = 1 + (rank or 0) + 1_000 * given.get("attempt", 0)
    fields: dict[str, Any] = {
        "id": f"{number:032x}",
        "run_id": run_id,
        "attempt": 0,
        "host": "node",
        "pid": 10 + number,
        "rank": rank,
        "local_rank": rank,
        "world_size": None if rank is None else 2,
        "clock": wire.Clock(START_NS, 0, 1_000),
    }
    return wire.Session(**fields | given)


class Spool:
    """Writes batches as a program would, with ids that count."""

    def __init__(self, folder: Path, who: wire.Session | None = None, prefix: int = 1) -> None:
        self.path = folder / ".cirron" / "spool"
        self.path.mkdir(parents=True, exist_ok=True)
        self.who = session() if who is None else who
        self.prefix = prefix
        self.numbers = 0
        self.batches = 0

    def id(self) -> str:
        self.numbers += 1
        return f"{self.prefix:016x}{self.numbers:016x}"

    def span(
        self, name: str, parent: str | None, start: int, end: int | None, **given: Any
    ) -> dict[str, Any]:
        one: dict[str, Any] = {
            "id": self.id(),
            "name": name,
            "parent_id": parent,
            "index": None,
            "start_ns": START_NS + start,
            "end_ns": None if end is None else START_NS + end,
            "cpu_ns": None,
            "gpu_ns": None,
            "memory_peak_bytes": None,
            "thread_id": 1,
            "pid": 1,
            "rank": None,
            "attrs": {},
            "mark_ids": [],
        }
        return one | given

    def mark(
        self, span_id: str, name: str, value: Any, at: int = 0, **given: Any
    ) -> dict[str, Any]:
        kind = {float: "float", int: "int", bool: "bool", str: "string"}.get(type(value), "float")
        one = {
            "id": self.id(),
            "span_id": span_id,
            "name": name,
            "value_type": kind,
            "value": value,
        }
        return one | {"attrs": {}, "ts_ns": START_NS + at, "kind": "point"} | given

    def write(self, spans: list[Any], marks: list[Any] = [], **given: Any) -> Path:  # noqa: B006
        self.batches += 1
        created = START_NS + given.pop("created", self.batches)
        batch = {
            "schema_version": 1,
            "sdk_version": "test",
            "batch_id": f"{self.prefix:016x}{self.batches:016x}",
            "created_ns": created,
            "session": msgspec.to_builtins(self.who),
            "spans": spans,
            "marks": marks,
            "snapshots": [],
        } | given
        path = self.path / f"{created:020d}-{batch['batch_id']}.json"
        path.write_text(json.dumps(batch))
        return path

    def training(self, steps: int = 3, first: int = 0) -> list[dict[str, Any]]:
        """A session with an epoch of steps, outermost last, as spans close."""
        root, epoch = self.span("cirron.session", None, 0, 10**9), {}
        epoch = self.span("epoch", root["id"], 10, 10**8, index=0)
        spans = []
        for number in range(first, first + steps):
            at = 1_000 * (number + 1)
            step = self.span("step", epoch["id"], at, at + 900, index=number)
            for name, begin, end in (("data_load", 0, 300), ("forward", 300, 700)):
                spans.append(self.span(name, step["id"], at + begin, at + end))
            spans.append(step)
        return [*spans, epoch, root]


def paths(run: opened.Run) -> dict[str, int]:
    rows = run.sql("SELECT path, count(*) AS n FROM spans GROUP BY path ORDER BY path").fetch().rows
    return dict(rows)


def test_where_each_span_is(tmp_path: Path) -> None:
    """Path, depth, epoch and step are known, and a mark has the step of its span."""
    spool = Spool(tmp_path)
    spans = spool.training(2)
    spool.write(
        spans, [spool.mark(spans[2]["id"], "loss", 0.5), spool.mark(spans[-2]["id"], "acc", 0.9)]
    )

    run = cirron.open(tmp_path)

    found = {(one["path"], one["step"], one["epoch"], one["depth"]) for one in run.spans.rows()}
    assert ("cirron.session/epoch/step/forward", 1, 0, 3) in found
    assert ("cirron.session/epoch", None, 0, 1) in found
    assert [("loss", 0, 0, 0.5), ("acc", None, 0, 0.9)] == [
        (one["name"], one["step"], one["epoch"], one["value"]) for one in run.marks.rows()
    ]


def test_parents_in_other_files(tmp_path: Path) -> None:
    """An ancestor is found in a later batch, and in an earlier one; files may be far apart."""
    spool = Spool(tmp_path)
    spans = spool.training(2)
    late = spool.span("upload", spans[2]["id"], 1_500, 9_000)
    for number, span in enumerate([*spans, late]):
        spool.write([span], created=10**7 * number)

    run = cirron.open(tmp_path)

    assert {
        "cirron.session": 1,
        "cirron.session/epoch": 1,
        "cirron.session/epoch/step": 2,
        "cirron.session/epoch/step/data_load": 2,
        "cirron.session/epoch/step/forward": 2,
        "cirron.session/epoch/step/upload": 1,
    } == paths(run)


def test_many_rounds_give_the_same_store_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spool that is read in many rounds gives what one round gives."""
    spool = Spool(tmp_path)
    spans = spool.training(50)
    for at in range(0, len(spans), 7):
        chunk = spans[at : at + 7]
        spool.write(chunk, created=max(one["end_ns"] for one in chunk) - START_NS)
    whole = cirron.open(tmp_path)
    expected = whole.spans.rows()
    shutil.rmtree(tmp_path / ".cirron" / "store")
    monkeypatch.setattr("cirron.runs.scan.ROUND_BYTES", 1)

    run = cirron.open(tmp_path)

    assert len(spans) == len(expected)
    assert expected == run.spans.rows()


def test_a_record_counts_once(tmp_path: Path) -> None:
    """Copies of files, merged files beside their parts, and records in two batches."""
    spool = Spool(tmp_path)
    spans = spool.training(2)
    marks = [spool.mark(spans[2]["id"], "loss", 1.0)]
    first = spool.write(spans[:4], marks)
    second = spool.write(spans[4:])
    shutil.copy(first, first.with_name(f"{START_NS + 99:020d}-{'f' * 32}.json"))
    ids = [msgspec.json.decode(one.read_bytes())["batch_id"] for one in (first, second)]
    spool.write(spans, marks, merged=ids)
    spool.write(spans[1:3])

    run = cirron.open(tmp_path)

    assert (len(spans), 1) == (len(run.spans), len(run.marks))


def test_a_merged_file_of_which_a_part_is_known(tmp_path: Path) -> None:
    """The writer merges while we read: what was read before is not read again."""
    spool = Spool(tmp_path)
    spans = spool.training(2)
    first = spool.write(spans[:4])
    assert 4 == len(cirron.open(tmp_path).spans)
    second_id = f"{1:016x}{99:016x}"
    known = msgspec.json.decode(first.read_bytes())["batch_id"]
    first.unlink()
    spool.write(spans, merged=[known, second_id])

    run = cirron.open(tmp_path)

    assert len(spans) == len(run.spans)
    assert 2 == paths(run)["cirron.session/epoch/step"]


def test_what_is_added_is_all_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second look opens the new files alone."""
    spool = Spool(tmp_path)
    spans = spool.training(30)
    for span in spans[:-2]:
        spool.write([span])
    cirron.open(tmp_path)
    spool.write(spans[-2:])
    read: list[str] = []
    real = untrusted.read_file

    def spy(path: Any, limit: int) -> bytes:
        read.append(str(path))
        return real(path, limit)

    monkeypatch.setattr("cirron.runs.untrusted.read_file", spy)
    run = cirron.open(tmp_path)

    assert 1 == len([one for one in read if "spool" in one])
    assert len(spans) == len(run.spans)
    # What came before its parents was not placed wrongly for that.
    assert 30 == paths(run)["cirron.session/epoch/step"]


def test_runs_and_sessions_are_kept_apart(tmp_path: Path) -> None:
    """Neither a repeated id of a session nor a claim to replace another file takes records away."""
    first = Spool(tmp_path, session(0)).write([Spool(tmp_path, session(0)).span("a", None, 0, 1)])
    taken = msgspec.json.decode(first.read_bytes())["batch_id"]
    for number, who in enumerate([session(1), session(0, run_id="run-b")]):
        other = Spool(tmp_path, who, prefix=number + 2)
        other.write([other.span("b", None, 0, 1)], merged=[taken])
    runs = cirron.open(tmp_path).runs

    assert {("run-a", 2, 2), ("run-b", 1, 1)} == {
        (run.id, len(run.sessions), len(run.spans)) for run in runs.values()
    }


def test_a_merge_while_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that vanish between listing and opening are found again where they went."""
    spool = Spool(tmp_path)
    spans = spool.training(1)
    files = [spool.write(spans[:2]), spool.write(spans[2:])]
    (tmp_path / ".cirron" / "spool" / "half.json.tmp").write_text("{")  # not there yet
    read_file = untrusted.read_file

    def merge_and_read(path: str, limit_bytes: int) -> bytes:
        if files:
            spool.write(spans, merged=["a", "b"])
            while files:
                files.pop().unlink()
        return read_file(path, limit_bytes)

    monkeypatch.setattr(untrusted, "read_file", merge_and_read)
    run = cirron.open(tmp_path)

    assert (len(spans), []) == (len(run.spans), run.problems)


def test_a_listing_that_missed_a_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing that saw a file under neither name is not believed until a second agrees."""
    spool = Spool(tmp_path)
    spool.write(spool.training(1))
    list_files = untrusted.list_files
    listings: list[Path] = []

    def miss_the_first(folder: Path, suffix: str, limit: int) -> list[str]:
        listings.append(folder)
        return [] if listings.count(spool.path) == 1 else list_files(folder, suffix, limit)

    monkeypatch.setattr(untrusted, "list_files", miss_the_first)

    assert 5 == len(cirron.open(tmp_path).spans)


def test_a_spool_that_never_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading ends even when files go between every two listings, and says so."""
    spool = Spool(tmp_path)
    spool.write(spool.training(1))
    list_files = untrusted.list_files
    numbers = itertools.count()

    def never_the_same(folder: Path, suffix: str, limit: int) -> list[str]:
        found = list_files(folder, suffix, limit)
        return [*found, f"{next(numbers):020d}-gone.json"] if folder == spool.path else found

    monkeypatch.setattr(untrusted, "list_files", never_the_same)
    run = cirron.open(tmp_path)

    assert 5 == len(run.spans)
    assert ["files keep changing" in one for one in run.problems] == [True]


@pytest.mark.parametrize("name", ["step", 7])
def test_a_newer_version_is_named(tmp_path: Path, name: Any) -> None:
    """Records of a newer format are read as far as they go; the problem says what to do."""
    spool = Spool(tmp_path)
    spool.write(spool.training(1))
    path = spool.write([spool.span(name, None, 0, 1)], schema_version=2)
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes())))  # as ours are
    run = cirron.open(tmp_path)
    (problem,) = run.problems

    assert (6 if name == "step" else 5) == len(run.spans)
    assert "is of schema version 2, newer than the 1" in problem
    assert ("what could be read" if name == "step" else "it was left out") in problem
    assert "pip install -U cirron" in problem


@pytest.mark.parametrize(("levels", "is_read"), [(64, True), (65, False)])
def test_nesting_has_a_limit(tmp_path: Path, levels: int, is_read: bool) -> None:
    """Attributes nested as deep as no writer of ours does it are refused."""
    value: Any = 1
    for _ in range(levels):
        value = [value]
    spool = Spool(tmp_path)
    spool.write(spool.training(1))
    spool.write([spool.span("deep", None, 0, 1, attrs={"a": value})])
    run = cirron.open(tmp_path)

    assert is_read == (len(run.spans) == 6) == (not run.problems)


HOSTILE: dict[str, Callable[[Path, Spool], object]] = {
    "empty": lambda path, spool: path.write_bytes(b""),
    "truncated": lambda path, spool: path.write_bytes(spool.write([]).read_bytes()[:-20]),
    "foreign": lambda path, spool: path.write_text('{"hello": [1, 2]}'),
    "not JSON": lambda path, spool: path.write_bytes(b"\x00\xff\xfe" * 100),
    "a folder": lambda path, spool: path.mkdir(),
    "a FIFO": lambda path, spool: os.mkfifo(path),
    "a link out": lambda path, spool: path.symlink_to("/etc/passwd"),
    "a deep one": lambda path, spool: path.write_text(
        '{"spans":' + "[" * 100_000 + "]" * 100_000 + "}"
    ),
    "huge": lambda path, spool: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 50 * 2**30),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_bad_file_is_named_and_skipped(tmp_path: Path, kind: str) -> None:
    """A damaged file is named in the problems, and the other files are read."""
    """A damaged file is named in the problems, and the other files are read."""
    spool = Spool(tmp_path)
    spans = spool.training(2)
    spool.write(spans)
    bad = spool.path / f"{START_NS + 10**6:020d}-{'b' * 32}.json"
    HOSTILE[kind](bad, Spool(tmp_path / "other"))

    run = cirron.open(tmp_path)

    assert len(spans) == len(run.spans)
    assert [] != [one for one in run.problems if bad.name in one]


@pytest.mark.parametrize(
    "wrong",
    [
        {"index": 10**30},
        {"start_ns": 10**400},
        {"name": "\x1b[31m\u202e<script>alert(1)</script>"},
        {"attrs": {"deep": [[[[1]]]], "id": [{"id": 1}, {"id": 2}], "text": 'a},{"id":"x'}},
        {"name": "line\nbreak"},
        {"thread_id": 2**64},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_bad_value_costs_itself(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """The batch is read as far as it can be, and the others as they are."""
    spool = Spool(tmp_path)
    spans = spool.training(2)
    spool.write(spans)
    spool.write(
        [
            spool.span(
                "odd", spans[-1]["id"], 5, 6, **{k: v for k, v in wrong.items() if k != "name"}
            )
            | wrong
        ]
    )

    run = cirron.open(tmp_path)

    assert len(spans) + 1 == len(run.spans)
    assert "\x1b" not in repr(run.spans) + repr(run)
    assert "<script>" not in run.spans._repr_html_()


def test_cycles_of_parents(tmp_path: Path) -> None:
    """A span that is its own ancestor is there, at the top."""
    spool = Spool(tmp_path)
    one = spool.span("one", None, 0, 10)
    two = spool.span("two", one["id"], 1, 9)
    one["parent_id"] = two["id"]
    spool.write([one, two, *spool.training(1)])

    run = cirron.open(tmp_path)

    assert 2 + 5 == len(run.spans)
    assert run.tree() is not None


def test_marks_of_every_type(tmp_path: Path) -> None:
    """Marks of every type are read back with their value and type."""
    """Marks of every type are read back with their value and type."""
    spool = Spool(tmp_path)
    spans = spool.training(1)
    step = spans[2]["id"]
    marks = [spool.mark(step, "a", 1.5), spool.mark(step, "b", 3), spool.mark(step, "c", True)]
    marks += [spool.mark(step, "d", "text"), spool.mark(step, "e", None, value_nonfinite="nan")]
    marks += [spool.mark(step, "f", None, value_nonfinite="-inf")]
    spool.write(spans, marks)

    run = cirron.open(tmp_path)

    rows = {one["name"]: (one["value"], one["text"]) for one in run.marks.rows()}
    assert (1.5, None) == rows["a"]
    assert (3.0, None) == rows["b"]
    assert (1.0, None) == rows["c"]
    assert (None, "text") == rows["d"]
    assert rows["e"][0] != rows["e"][0]
    assert float("-inf") == rows["f"][0]
    on_step = next(one["marks"] for one in run.spans.rows() if one["id"] == step)
    assert {"a", "b", "c", "d", "e", "f"} == {one["name"] for one in json.loads(on_step)}
    assert marks[2]["value"] is next(
        one.value for one in run.tree().roots[0].children[0].children[0].marks if one.name == "c"
    )


def test_runs_by_the_start_of_an_id(tmp_path: Path) -> None:
    """A run is found by a unique start of its id; an ambiguous or unknown start is an error."""
    """A run is found by a unique start of its id; an ambiguous or unknown start is an error."""
    for run_id in ("alpha-1", "alpha-2", "beta"):
        spool = Spool(
            tmp_path,
            session(run_id=run_id, id=f"{len(run_id) + int(run_id[-1:] == '2'):032x}"),
            ord(run_id[-1]),
        )
        spool.write(spool.training(1))

    run = cirron.open(tmp_path, run="be")

    assert "beta" == run.id
    assert {"alpha-1", "alpha-2", "beta"} == set(run.runs)
    assert 5 == len(run.runs["alpha-2"].spans)
    with pytest.raises(
        errors.UnknownRunError,
        match=r"several runs have .* starts with 'alpha'; choose one of: alpha-[12], alpha-[12]$",
    ):
        cirron.open(tmp_path, run="alpha")
    with pytest.raises(
        errors.UnknownRunError,
        match=r"no run here has an id that starts with 'nope'; choose one of: ",
    ):
        run.runs["nope"]


def test_a_relation_outlives_its_run(tmp_path: Path) -> None:
    """`ci.open().spans` is asked later, when nothing else is left of what was opened."""
    spool = Spool(tmp_path)
    spool.write(spool.training(1))
    spans = cirron.open(tmp_path).spans
    gc.collect()

    assert 5 == len(spans.rows())


def test_a_folder_a_rank(tmp_path: Path) -> None:
    """Folders on a shared disk, given as a list or by the folder above them, are one run."""
    for rank in range(3):
        spool = Spool(tmp_path / f"rank{rank}", session(rank), rank + 1)
        spool.write(spool.training(2))
    below = [tmp_path / f"rank{rank}" for rank in range(3)]

    for where in (tmp_path, below):
        run = cirron.open(where)
        assert [0, 1, 2] == run.ranks
        assert 6 == len(run.steps)


def test_a_folder_without_records_is_an_error(tmp_path: Path) -> None:
    """A folder without a spool, and a spool without records, are errors that say so."""
    with pytest.raises(errors.SettingError, match="no run found"):
        cirron.open(tmp_path)
    Spool(tmp_path)
    with pytest.raises(errors.SettingError, match="has no records yet"):
        cirron.open(tmp_path)


def test_a_misspelt_name_out_of_many(tmp_path: Path) -> None:
    """The most similar names are shown, the best first, and how many more there are."""
    spool = Spool(tmp_path)
    marks = [spool.mark("root", f"layer{number}.loss", 0.5) for number in range(1_000)]
    spool.write(spool.training(1), marks)
    run = cirron.open(tmp_path)

    with pytest.raises(
        errors.SettingError, match=r"use one of 'steps', (.*?), or of \d+ more$"
    ) as query:
        run.query("stesp")
    with pytest.raises(
        errors.SettingError, match=r"use one of .*'layer77\.loss'.* 990 more$"
    ) as mark:
        run.series("layr77.loss")

    assert (9, 9) == (str(query.value).count("', '"), str(mark.value).count("', '"))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda run: cirron.open(3), "where=3 is not valid; it must be a folder"),  # type: ignore[arg-type]
        (lambda run: cirron.open([None]), "it must be a folder, a store, or a list"),  # type: ignore[list-item]
        (lambda run: cirron.open([]), "where=[] is not valid; it must be a folder"),
        (lambda run: cirron.open(engine="spark"), "it must be a Spark session"),
        (lambda run: run.runs[3], "run=3 is not valid; it must be the id of a run"),
        (lambda run: run.sql(3), "it must be a query in SQL"),
        (lambda run: run.series(3), "it must be the name of a mark"),
        (lambda run: run.tensor(3), "it must be the name of a tensor"),
        (lambda run: run.series("lss"), "mark='lss' is not valid; use one of 'loss', 'lr'"),
        (lambda run: run.tensor("fc"), "tensor='fc' is not valid; there is no tensor yet"),
        (lambda run: run.tree(rank=3), "the processes of this run have no ranks"),
        (lambda run: run.export("json", 3), "it must be the path of a file"),
        (lambda run: run.query("series"), "write run.query('series', name=...)"),
        (lambda run: run.query("series", name="a", step=1), "does not take step=: write"),
        (lambda run: run.steps.head(-1), "rows=-1 is not valid; it must be a whole number"),
        (lambda run: run.spans.head("1; DROP VIEW spans"), "it must be a whole number"),
        (lambda run: run.query("timeline", width=3), "also needs from_ns=, to_ns=: write"),
    ],
)
def test_what_cannot_be_asked(
    tmp_path: Path, wrong: Callable[[opened.Run], object], told: str
) -> None:
    """An argument of a wrong type, or one that is missing, is named, with what is allowed."""
    spool = Spool(tmp_path)
    marks = [spool.mark("root", name, 0.5) for name in ("loss", "lr", "loss")]
    spool.write(spool.training(1), marks)
    with pytest.raises(errors.SettingError, match=re.escape(told)):
        wrong(cirron.open(tmp_path))


@pytest.mark.parametrize(
    "query", ["SELECT 1 AS one -- why", "SELECT 1 AS one;", "\nSELECT 1 AS one\n"]
)
def test_a_query_as_people_type_it(tmp_path: Path, query: str) -> None:
    """A comment or a semicolon at the end does no harm, however the result is used."""
    spool = Spool(tmp_path)
    spool.write(spool.training(1))
    found = cirron.open(tmp_path).sql(query)

    assert (["one"], 1, "one\n1") == (found.columns, len(found), repr(found))


def test_only_parameters_are_replaced(tmp_path: Path) -> None:
    """A colon in quotes, in a comment or in a cast is not a parameter."""
    spool = Spool(tmp_path)
    spool.write(spool.training(1))
    query = """SELECT ':x' AS ":x", 'it''s :x' AS b, :x AS c, 1::x AS d -- :x"""
    found = cirron.open(tmp_path).sql(query.replace("1::x", "1::INTEGER"), x=3)

    assert [{":x": ":x", "b": "it's :x", "c": 3, "d": 1}] == found.rows()


def test_a_parameter_without_a_value(tmp_path: Path) -> None:
    """DuckDB's error about the colon says what to write."""
    spool = Spool(tmp_path)
    spool.write(spool.training(1))
    with pytest.raises(engine.QueryError, match=r":name has no value: write run.sql\(..., name="):
        cirron.open(tmp_path).sql("SELECT * FROM marks WHERE name = :name").rows()


def test_a_folder_of_many_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second look at runs that ended normally writes nothing, however many there are."""
    for _ in range(5):
        cirron.profile(path=str(tmp_path / ".cirron"), report=False)
        with cirron.scope("work"):
            cirron.mark("loss", 0.5)
        cirron.shutdown()
    found = cirron.open(tmp_path).runs
    monkeypatch.setattr(store.Store, "write", None)
    again = cirron.open(tmp_path).runs

    assert (5, {2}) == (len(again), {len(run.spans) for run in again.values()})
    assert list(found) == list(again)


def test_a_process_sees_its_own_records_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ci.open()` looks where this process writes, and has what was recorded before the call."""
    monkeypatch.setenv("CIRRON_OUTPUT_DIR", str(tmp_path / "elsewhere"))
    cirron.profile(flush_interval=60.0)
    for _ in cirron.batches(range(3)):
        cirron.mark("loss", 0.5)

    assert [0.5] * 3 == [row["loss"] for row in cirron.open().steps]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """The store is kept elsewhere for as long as it is used."""
    spool = Spool(tmp_path)
    spool.write(spool.training(1))
    (tmp_path / ".cirron" / "store").write_text("in the way")

    assert 5 == len(cirron.open(tmp_path).spans)
    assert "in the way" == (tmp_path / ".cirron" / "store").read_text()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on a full disk is read into a temporary store, and the problem names the disk."""
    spool = Spool(tmp_path)
    spool.write(spool.training(3))
    real = objects.LocalObjects.add

    def add(self: objects.LocalObjects, name: str, file: Path) -> bool:
        if self.root.is_relative_to(tmp_path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, name, file)

    monkeypatch.setattr(objects.LocalObjects, "add", add)
    run = cirron.open(tmp_path)

    assert 3 == len(run.steps)
    assert ["No space left on device; a temporary store is used instead"] == [
        one.partition(": ")[2] for one in run.problems
    ]


def test_a_store_that_leads_out(tmp_path: Path) -> None:
    """A manifest that names files elsewhere is refused; the spool is read all the same."""
    spool = Spool(tmp_path)
    spool.write(spool.training(1))
    folder = tmp_path / ".cirron" / "store"
    (folder / "manifest").mkdir(parents=True)
    segment = {"id": "../../../etc/passwd", "run_id": "x", "rows": {"spans": 1}}
    (folder / "manifest" / f"{1:020d}.json").write_text(json.dumps({"segments": [segment]}))

    run = cirron.open(tmp_path)

    assert 5 == len(run.spans)
    assert "names a file with an invalid name" in run.problems[0]


@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "foreign"])
@pytest.mark.parametrize("table", ["batches", "spans"])
def test_a_damaged_store(tmp_path: Path, table: str, damage: str) -> None:
    """The spool is the truth: it is read anew, and what is damaged is named."""
    spool = Spool(tmp_path)
    spool.write(spool.training(1))
    cirron.open(tmp_path)
    for path in (tmp_path / ".cirron" / "store").glob(f"run-*/*-{table}.parquet"):
        content = path.read_bytes()
        path.unlink()
        if damage != "gone":
            path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
        if damage == "foreign":
            path.unlink()
            engine.duckdb().execute(f"COPY (SELECT 1 AS x) TO '{path}' (FORMAT parquet)")

    run = cirron.open(tmp_path)

    assert 5 == len(run.spans)
    assert "store" in run.problems[0]


def test_a_store_that_is_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who removes a store that is being written loses nothing but the store."""
    spool = Spool(tmp_path)
    spans = spool.training(4)
    for at in range(3):  # the same time in each
        spool.write(spans[at::3])
    monkeypatch.setattr("cirron.runs.scan.ROUND_BYTES", 1)
    where = tmp_path / ".cirron" / "store"
    load = ingest.Ingest._load

    def load_and_lose(self: ingest.Ingest, *given: Any) -> None:
        load(self, *given)
        shutil.rmtree(where, ignore_errors=True)

    monkeypatch.setattr(ingest.Ingest, "_load", load_and_lose)

    run = cirron.open(tmp_path)

    assert len(spans) == len(run.spans)
    assert [True] == [problem.startswith(str(where)) for problem in run.problems]


def test_compaction_changes_nothing(tmp_path: Path) -> None:
    """Compacting a store leaves every answer as it was."""
    """Compacting a store leaves every answer as it was."""
    spool = Spool(tmp_path)
    for span in spool.training(3):
        spool.write([span], [spool.mark(span["id"], "loss", 1.0)])
        cirron.open(tmp_path)
    before = cirron.open(tmp_path)
    expected = before.spans.rows(), before.marks.rows()
    folder = tmp_path / ".cirron" / "store"

    done = opened.compact(tmp_path)
    after = cirron.open(tmp_path)

    assert done["merged"] > 1
    assert expected == (after.spans.rows(), after.marks.rows())
    assert 1 == len(store.Store.open(folder).manifest.segments)
    assert expected[0] == before.spans.rows(), "one who reads the old files goes on"
    assert 0 < store.Store.open(folder).clean(grace_s=0.0)
    assert expected[0] == cirron.open(tmp_path).spans.rows()


def test_a_run_that_is_looked_at_again_and_again(tmp_path: Path) -> None:
    """Each look at a growing run adds a segment; many small ones become one by themselves."""
    spool = Spool(tmp_path)
    spool.write([spool.span("step", None, 0, 1, index=0)])
    place = Place([tmp_path])
    count = 5 * store.MANY
    for number in range(1, count):
        spool.write([spool.span("step", None, number, number + 1, index=number)])
        assert place.refresh()

    assert count == len(place.run("run-a").spans) == len(cirron.open(tmp_path).spans)
    kept = store.Store.open(tmp_path / ".cirron" / "store").manifest.segments
    assert len(kept) < 2 * store.MANY


def test_a_large_segment_has_its_pyramid_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first timeline of a large run is drawn from it, and compaction has nothing to add."""
    monkeypatch.setattr(derived, "MIN_SPANS", 100)
    spool = Spool(tmp_path)
    spool.write(spool.training(1_000))

    run = cirron.open(tmp_path)

    assert 0 < len(run.sql("SELECT level FROM cells"))
    assert {"merged": 0, "removed": 0} == opened.compact(tmp_path)


def test_several_folders_into_one_store(tmp_path: Path) -> None:
    """Several folders can be read into one store."""
    """Several folders can be read into one store."""
    for rank in range(2):
        spool = Spool(tmp_path / f"rank{rank}", session(rank), rank + 1)
        spool.write(spool.training(2))
    target = tmp_path / "all"

    for _ in range(2):  # the second time there is nothing new
        opened.compact([tmp_path / "rank0", tmp_path / "rank1"], store=target)
    spool.write([spool.span("more", None, 1, 2)])
    opened.compact(tmp_path / "rank1")  # merges what the target has in part
    opened.compact(tmp_path / "rank1", store=target)

    run = cirron.open(target)
    assert [0, 1] == run.ranks
    assert 2 * 8 + 1 == len(run.spans)


def test_orphans_are_copied_to_another_store(tmp_path: Path) -> None:
    """Children of spans that never ended, as in a killed run; once, however often."""
    spool = Spool(tmp_path)
    lost = [spool.span("step", "f" * 32, at, at + 1, index=at) for at in range(5)]
    spool.write(lost, [spool.mark(lost[0]["id"], "loss", 1.0)])
    target = tmp_path / "copy"

    for _ in range(2):
        opened.compact(tmp_path, store=target)
    opened.compact(target)

    run = cirron.open(target)
    assert (5, 1) == (len(run.spans), len(run.marks))
    assert all(one.rows for one in store.Store.open(target).manifest.segments)


@pytest.mark.parametrize("only_in_folder", [True, False])
@pytest.mark.parametrize("only_in_store", [True, False])
def test_records_in_a_folder_and_in_a_store_count_once(
    tmp_path: Path, only_in_folder: bool, only_in_store: bool
) -> None:
    """A server may have received what is in a folder: all of it, a part, or more."""
    folder, target = tmp_path / "folder", tmp_path / "received"
    spool = Spool(folder)
    spans = spool.training(6)
    spool.write(spans[:10], [spool.mark(spans[0]["id"], "loss", 1.0)])
    if only_in_store:
        path = spool.write(spans[10:15])
    opened.compact(folder, store=target)
    if only_in_store:
        path.unlink()
        shutil.rmtree(folder / ".cirron" / "store")
    if only_in_folder:
        spool.write(spans[15:])
    count = 10 + 5 * only_in_store + len(spans[15:]) * only_in_folder

    for where in ([folder, target], [target, folder]):
        run = cirron.open(where)
        assert (count, 1) == (len(run.spans), len(run.marks))
        assert {one["id"] for one in run.spans.rows()} <= {one["id"] for one in spans}


WRITER = """
import sys
import cirron
from cirron.runs import opened
while True:
    cirron.open(sys.argv[1])
    opened.compact(sys.argv[1])
"""


def test_killed_and_started_again(tmp_path: Path) -> None:
    """Two processes bring a store up to date and merge it, and are killed again and again."""
    seed = random.Random(7)
    spool = Spool(tmp_path)
    spans = spool.training(60)
    waiting = list(spans)
    workers: list[subprocess.Popen[bytes]] = []
    environment = {**os.environ, "PYTHONPATH": str(Path(cirron.__file__).parent.parent)}
    try:
        for _ in range(8):
            chunk, waiting = waiting[:20], waiting[20:]
            if chunk:
                spool.write(chunk)
            for _ in range(2):
                command = [sys.executable, "-c", WRITER, str(tmp_path)]
                workers.append(
                    subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
                )
            time.sleep(0.4 + 0.4 * seed.random())
            for worker in workers:
                worker.send_signal(signal.SIGKILL)
            for worker in workers:
                worker.wait()
            workers.clear()
    finally:
        for worker in workers:
            worker.kill()
    spool.write(waiting)

    run = cirron.open(tmp_path)

    assert len(spans) == len(run.spans)
    assert 60 == paths(run)["cirron.session/epoch/step"]


def test_a_spool_of_the_published_sdk(tmp_path: Path) -> None:
    """What version 0.3.0 wrote opens with the tree that it printed, indices and marks included."""
    golden = Path(__file__).parent / "golden" / "published-sdk"
    shutil.copytree(golden / "spool", tmp_path / ".cirron" / "spool")

    run = cirron.open(tmp_path)

    def outline(text: str) -> list[str]:
        """Names and indices by depth, and the names of marks."""
        lines = [line.replace("\u2014", "-") for line in text.splitlines()]
        return [
            line.partition(" - ")[0] + "".join(re.findall(r" \{(\w+)=", line)) for line in lines
        ]

    assert outline((golden / "tree.txt").read_text()) == outline(text.render(run.tree()))
    assert [None, None] != [one["loss"] for one in run.steps.rows()][:2]
    assert [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)] == [
        (one["epoch"], one["step"]) for one in run.steps.rows()
    ]


def test_questions_are_files() -> None:
    """Each question says what it answers, and has no value spliced in."""
    for name in engine.queries():
        sql = engine.query(name)
        assert sql.startswith("-- "), name
        assert "{" not in sql, name
