"""Records that can be decoded and make no sense: every question and command has an answer."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

import cirron as ci
from cirron.cli import main
from cirron.runs.place import Place
from cirron.server import responses, views

if TYPE_CHECKING:
    from pathlib import Path

NUMBERS: list[Any] = [0, -1, 2**31, 2**53 + 1, 2**62, 2**63 - 1, -(2**63), 2**63, 10**30, None]
TEXTS: list[Any] = [
    "",
    "\x00",
    "\u202e<b>\x1b[31m",
    "x" * 5_000,
    "../..",
    "' OR 1=1 --",
    "a/b",
    "epoch",
]
FLOATS: list[Any] = [0.0, -0.0, 1e308, -1e308, 5e-324, None]
ANYTHING: list[Any] = [None, True, {"a": [1, {"b": [2]}]}, [None] * 50, "x", 10**30, -1.5, {"": ""}]
ATTRIBUTES = ("mode", "error", "device_ns", "ended", "loader_batch_size", "samples", "anything")
COMMANDS = [
    *(["ls", "{dir}"], ["show", "{dir}", "--all"], ["show", "{dir}", "--all", "--json"]),
    *([name, "odd", "--dir", "{dir}"] for name in ("report", "why", "tensors")),
    ["diff", "good", "odd", "--dir", "{dir}"],
    *(
        ["export", "odd", "--format", kind, "-o", "{dir}/" + kind, "--dir", "{dir}"]
        for kind in ("perfetto", "chrome", "otlp", "csv", "json", "html")
    ),
]


@pytest.fixture
def recorded(tmp_path: Path) -> dict[str, Any]:
    """A batch that a session has really written."""
    ci.profile(path=str(tmp_path / "real"))
    for _ in ci.epochs(range(2)):
        for _ in ci.batches(range(4)):
            for name in ("forward", "backward", "optimizer_step"):
                with ci.scope(name, sizes=[1, 2]):
                    ci.mark("loss", 0.5)
    ci.shutdown()
    spool = max((tmp_path / "real" / "spool").glob("*.json"), key=lambda path: path.stat().st_size)
    content: dict[str, Any] = json.loads(spool.read_bytes())
    epoch = next(one for one in content["spans"] if one["name"] == "epoch")
    histogram = {"bins": [float(edge) for edge in range(17)], "counts": [1] * 16}
    stats = {**dict.fromkeys(("mean", "std", "min", "max", "norm"), 1.0), "histogram": histogram}
    content["snapshots"] = [
        {
            "id": f"{number:032x}",
            "span_id": epoch["id"],
            "tensor_name": name,
            "shape": [4, 4],
            "dtype": "float32",
            "mode": "stats",
            "stats": stats,
            "blob_uri": None,
            "ts_ns": epoch["end_ns"],
            "attrs": {},
        }
        for number, name in enumerate(("w", "w.grad"))
    ]
    return content


def change(record: dict[str, Any], pick: random.Random) -> None:
    """Puts something into a field that its type allows and nobody writes."""
    name = pick.choice(sorted(record))
    value = record[name]
    if name == "attrs":
        record[name] = {pick.choice(ATTRIBUTES): pick.choice(ANYTHING + NUMBERS)}
    elif name in ("stats", "clock"):
        change(value, pick)
    elif name == "histogram":
        record[name] = {"bins": pick.choice(([], [0.0] * 17)), "counts": [-1, 2**62] * 8}
    elif name == "shape":
        record[name] = pick.choice(([], [-1], [2**62, 2**62]))
    elif name == "value":
        record[name] = pick.choice(FLOATS + TEXTS + NUMBERS)
    elif isinstance(value, str) and name not in ("id", "run_id"):
        record[name] = pick.choice(TEXTS)
    elif isinstance(value, float):
        record[name] = pick.choice(FLOATS)
    elif isinstance(value, int) or name == "index" or name.endswith(("_ns", "_bytes")):
        record[name] = pick.choice(NUMBERS)


def make_odd(content: dict[str, Any], pick: random.Random) -> None:
    for table in ("spans", "spans", "spans", "marks", "snapshots"):
        change(pick.choice(content[table]), pick)
    change(content["session"], pick)
    one, other = pick.sample(content["spans"], 2)
    what = pick.randrange(4)
    if what == 0:  # a cycle
        one["parent_id"], other["parent_id"] = other["id"], one["id"]
    elif what == 1:  # another record of the same id
        content["spans"].append({**one, "name": "again", "end_ns": other["end_ns"]})
    elif what == 2:  # nothing above it
        one["parent_id"] = "f" * 32


def put(folder: Path, content: dict[str, Any], run_id: str) -> None:
    batch_id = run_id.encode().hex().zfill(32)
    session = {**content["session"], "run_id": run_id}
    path = folder / ".cirron" / "spool" / f"{content['created_ns']:020d}-{batch_id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**content, "batch_id": batch_id, "session": session}))


def ask_all(folder: Path) -> list[str]:
    """What fails."""
    failed = []
    place = Place([folder])
    for run_id in place.runs:
        given = {"run": run_id, "before": "good", "after": run_id, "name": "loss", "tensor": "w"}
        for name, view in (views.VIEWS | views.OF_RUN).items():
            try:
                responses.encode(view(place, {**given, "text": "epoch"}))
            except (responses.Refusal, KeyError):  # the page is told
                pass
            except Exception as error:  # noqa: BLE001  all of them are told
                failed.append(f"{name} of {run_id}: {error!r}")
    return failed


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(6))
def test_every_question_has_an_answer(seed: int, recorded: dict[str, Any], tmp_path: Path) -> None:
    """Whatever numbers and texts a file holds, no view fails, and commands end in a message."""
    pick = random.Random(seed)
    put(tmp_path, recorded, "good")
    odd = json.loads(json.dumps(recorded))
    make_odd(odd, pick)
    put(tmp_path, odd, "odd")

    assert [] == ask_all(tmp_path)
    for command in pick.sample(COMMANDS, 3):
        ended = CliRunner().invoke(main, [one.format(dir=tmp_path) for one in command])
        assert ended.exception is None or isinstance(ended.exception, SystemExit), command
        assert "Overflow" not in ended.output


@pytest.mark.timeout(300)
def test_times_at_both_ends(recorded: dict[str, Any], tmp_path: Path) -> None:
    """Times at the ends of 64 bits, in every place at once."""
    odd = json.loads(json.dumps(recorded))
    for number, one in enumerate(odd["spans"]):
        one["start_ns"], one["end_ns"] = NUMBERS[number % 9], NUMBERS[number // 2 % 9]
        one["cpu_ns"] = one["gpu_ns"] = NUMBERS[number % 7]
    for number, one in enumerate(odd["marks"] + odd["snapshots"]):
        one["ts_ns"] = NUMBERS[number % 7]
    odd["session"]["clock"]["wall_ns"] = -(2**63)
    put(tmp_path, recorded, "good")
    put(tmp_path, odd, "odd")

    assert [] == ask_all(tmp_path)
    for command in COMMANDS[:7]:
        ended = CliRunner().invoke(main, [one.format(dir=tmp_path) for one in command])
        assert ended.exit_code in (0, 5), (command, ended.output, ended.exception)
