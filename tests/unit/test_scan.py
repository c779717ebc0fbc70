"""The check of a batch before DuckDB reads it: one answer for each layout, and no wide value."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import cirron
from cirron import wire
from cirron.runs import batches, engine, scan, store

if TYPE_CHECKING:
    from pathlib import Path

SPAN: dict[str, Any] = {
    "id": "1",
    "name": "step",
    "parent_id": None,
    "index": 0,
    "start_ns": 10,
    "end_ns": 20,
    "cpu_ns": None,
    "gpu_ns": None,
    "memory_peak_bytes": None,
    "thread_id": 1,
    "pid": 1,
    "rank": None,
    "attrs": {},
    "mark_ids": [],
}
MARK: dict[str, Any] = {
    "id": "2",
    "span_id": "1",
    "name": "loss",
    "value_type": "float",
    "value": 0.5,
    "attrs": {},
    "ts_ns": 15,
    "kind": "point",
}
SESSION = wire.Session(
    id="s",
    run_id="r",
    attempt=0,
    host="h",
    pid=1,
    rank=0,
    local_rank=0,
    world_size=1,
    clock=wire.Clock(1, 1, 1),
)


def encoded(span: dict[str, Any], mark: dict[str, Any], session: wire.Session = SESSION) -> bytes:
    """A batch as our writer lays it out. A number that is written as "#..." stands as it is."""
    header = wire.Header(
        schema_version=1, sdk_version="0", batch_id="b", created_ns=1, session=session
    )
    runs = [json.dumps(one, separators=(",", ":")).encode() for one in (SPAN | span, MARK | mark)]
    pieces, _ = wire.encode_batch(header, wire.Sections([runs[0]], [runs[1]], []))
    return b"".join(pieces).replace(b'"#', b"").replace(b'#"', b"")


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a number for a name": ({"name": 7}, {}),
    "a number for an id": ({"id": 7}, {}),
    "null for an id": ({"id": None}, {}),
    "a float for an index": ({"index": 0.5}, {}),
    "an index of 10^30": ({"index": 10**30}, {}),
    "an index of 401 digits": ({"index": "#" + "9" * 401 + "#"}, {}),
    "a string for a time": ({"start_ns": "now"}, {}),
    "a boolean for a time": ({"start_ns": True}, {}),
    "no time": ({"start_ns": None}, {}),
    "a list for attributes": ({"attrs": [1]}, {}),
    "an attribute of 10^30": ({"attrs": {"a": {"b": [10**30]}}}, {}),
    "attributes 100 deep": ({"attrs": {"a": nested(100)}}, {}),
    "a number for mark ids": ({"mark_ids": 7}, {}),
    "a list for a value": ({}, {"value": [1]}),
    "a value of 1e400": ({}, {"value": "#1e400#"}),
    "a number for a kind": ({}, {"kind": 1}),
}
FINE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing odd": ({}, {}),
    "an index of 64 bits": ({"index": 2**64 - 1}, {}),
    "a value of 64 bits": ({}, {"value": 2**64 - 1, "value_type": "int"}),
    "nested attributes": ({"attrs": {"a": [{"b": 1}, {"c": [2, 3]}]}}, {}),
    "attributes 40 deep": ({"attrs": {"a": nested(40)}}, {}),
    "our own keys in a text": ({"name": '],"marks":[{"},{"'}, {"name": '],"snapshots":['}),
    "our own keys in attributes": ({"attrs": {"a": [1], "marks": [{"x": 1}], "spans": [2]}}, {}),
    "a line break": ({"name": "a\nb"}, {}),
}


@pytest.mark.parametrize("case", [*WRONG, *FINE])
def test_each_layout_is_checked_alike(case: str) -> None:
    """What is wrong with a batch does not depend on how its JSON is laid out."""
    payload = encoded(*(WRONG | FINE)[case])
    _, expected = batches.decode(payload)

    _, arrays, problem = scan.check(payload)
    spaced = payload.replace(b',"spans":[', b', "spans": [')
    _, arrays_of_spaced, problem_of_spaced = scan.check(spaced)

    assert (case in WRONG) is (problem is not None)
    assert (expected, expected) == (problem, problem_of_spaced)
    assert [*map(records, arrays.values())] == [*map(records, arrays_of_spaced.values())]


def records(array: bytes | memoryview) -> Any:
    """What an array holds; all of it fits into DuckDB's columns."""
    found = msgspec.json.decode(array)
    for one in found:
        assert all(-(2**63) <= value < 2**63 for value in one.values() if isinstance(value, int))
    return found


def test_a_plain_batch_is_not_written_anew() -> None:
    """The records of our writer's files are handed on as the bytes that they are."""
    payload = encoded({}, {})

    _, arrays, _ = scan.check(payload)

    assert ["spans", "marks"] == list(arrays)
    assert all(array in payload for array in arrays.values())


def test_a_session_that_is_too_wide() -> None:
    """A rank of 64 bits is cut to 63, as every number is."""
    batch, _, problem = scan.check(encoded({}, {}, wire.changed(SESSION, rank=2**64 - 1)))

    assert problem is None
    assert batch is not None
    assert batch.session is not None
    assert 2**63 - 1 == batch.session.rank


def test_a_run_without_its_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are below the topmost that is there, in whichever round; and below the root later."""
    monkeypatch.setattr("cirron.runs.scan.ROUND_BYTES", 1)
    spool = tmp_path / ".cirron" / "spool"
    spool.mkdir(parents=True)

    def write(number: int, *spans: dict[str, Any]) -> None:
        header = wire.Header(
            schema_version=1,
            sdk_version="0",
            batch_id=f"{number:032x}",
            created_ns=number,
            session=SESSION,
        )
        joined = wire.encode_records([SPAN | span for span in spans])
        pieces, _ = wire.encode_batch(header, wire.Sections([joined], [], []))
        (spool / f"{number:020d}-{number:032x}.json").write_bytes(b"".join(pieces))

    def paths() -> list[str]:
        rows = cirron.open(tmp_path).sql("SELECT path FROM spans ORDER BY path").rows()
        return [row["path"] for row in rows]

    hour_ns = 3_600 * 10**9
    epoch = {"name": "epoch", "id": "e", "parent_id": "root", "end_ns": 3 * hour_ns}
    for number in (1, 2):
        at = {"start_ns": number * hour_ns, "end_ns": number * hour_ns + 1}
        write(number * hour_ns, {"id": f"s{number}", "parent_id": "e"} | at)
    write(3 * hour_ns, epoch)
    assert ["epoch", "epoch/step", "epoch/step"] == paths()

    write(4 * hour_ns, {"name": "run", "id": "root", "start_ns": 0, "end_ns": 4 * hour_ns})
    assert ["run", "run/epoch", "run/epoch/step", "run/epoch/step"] == paths()


@pytest.mark.parametrize("created_ns", [2**63, 2**64 - 1, 10**30])
def test_a_batch_from_the_far_future(tmp_path: Path, created_ns: int) -> None:
    """A time that no 64 bits hold costs nothing but itself, and no other file."""
    spool = tmp_path / ".cirron" / "spool"
    spool.mkdir(parents=True)
    planted = encoded({"id": "3"}, {"id": "4"}).replace(
        b'"created_ns":1,', f'"created_ns":{created_ns},'.encode()
    )
    for number, payload in enumerate((encoded({}, {}), planted)):
        name = f"{number:032x}"
        content = payload.replace(b'"batch_id":"b"', f'"batch_id":"{name}"'.encode())
        (spool / f"{created_ns if number else 1:020d}-{name}.json").write_bytes(content)

    run = cirron.open(tmp_path)

    assert (2, 2) == (len(run.spans), len(run.marks))


@pytest.mark.parametrize("rank", [None, 3])
def test_columns_have_their_types(tmp_path: Path, rank: int | None) -> None:
    """A store's files have the columns that it says, also where no value is known."""
    spool = tmp_path / ".cirron" / "spool"
    spool.mkdir(parents=True)
    payload = encoded({}, {}, wire.changed(SESSION, rank=rank))
    (spool / f"{1:020d}-{'b' * 32}.json").write_bytes(payload)
    cirron.open(tmp_path)

    for table in ("spans", "marks"):
        (path,) = (tmp_path / ".cirron" / "store").glob(f"run-*/*-{table}.parquet")
        rows = engine.duckdb().execute("DESCRIBE FROM read_parquet($1)", [str(path)]).fetchall()
        assert store.TABLES[table] == {name: kind for name, kind, *_ in rows}


def test_what_only_duckdb_refuses(tmp_path: Path) -> None:
    """A key that nobody reads, with bytes that are no text, costs no record, and no other file."""
    spool = tmp_path / ".cirron" / "spool"
    spool.mkdir(parents=True)
    good, odd = encoded({}, {}), encoded({"id": "3", "extra": "text"}, {"id": "4"})
    for number, payload in enumerate((good, odd.replace(b"text", b"\xff\xfe"))):
        name = f"{number:032x}"
        content = payload.replace(b'"batch_id":"b"', f'"batch_id":"{name}"'.encode())
        (spool / f"{number:020d}-{name}.json").write_bytes(content)

    run = cirron.open(tmp_path)

    assert (2, 2) == (len(run.spans), len(run.marks))
    assert [] == run.problems


def test_rounds_that_nobody_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stops early leaves no file of the rounds that were read ahead."""
    monkeypatch.setattr(scan, "ROUND_BYTES", 1)
    spool, scratch = tmp_path / "spool", tmp_path / "scratch"
    spool.mkdir()
    scratch.mkdir()
    for number in range(5):
        payload = encoded({}, {}).replace(b'"batch_id":"b"', b'"batch_id":"b%d"' % number)
        (spool / f"{number:020d}-b.json").write_bytes(payload)
    look = scan.Scan(store.Store.open(tmp_path / "store", scratch), set(), set())
    rounds = look.rounds(look.fresh([scan.SpoolSource(spool, [])]))

    next(rounds).remove()
    while not any(scratch.iterdir()):
        time.sleep(0.01)  # until the next one is read
    rounds.close()  # type: ignore[attr-defined]

    assert [] == list(scratch.iterdir())
