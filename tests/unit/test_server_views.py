"""What the page asks, over a run that was really recorded: right, and no larger than its pixels."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import msgspec
import pytest

import cirron as ci
from cirron.runs.place import Place
from cirron.server import query
from cirron.server.app import App
from cirron.server.events import Hub
from cirron.server.query import BadRequest
from cirron.server.views import OF_RUN, VIEWS
from cirron.verdict import report as verdict_on

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Made

STEPS = 40
MS = 1_000_000


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Two epochs of a loop with a long step, a value that is not finite, and an error."""
    ci.profile(config={"epochs": 2}, tags={"team": "<b>vision</b>"})
    for epoch in ci.epochs(range(2)):
        for step in ci.batches(range(STEPS)):
            with ci.scope("forward"):
                sum(range(200_000 if (epoch, step) == (1, 7) else 200))
            ci.mark("train/loss", float("nan") if step == 5 else 1 / (1 + step))
        with pytest.raises(OSError, match="full"), ci.scope("save"):
            raise OSError("full")
        ci.mark("accuracy", 0.5 + epoch / 4, kind="summary")
    ci.shutdown()
    return Place([tmp_path])


def ask(place: Place, what: str, **params: object) -> Any:
    """The answer as the page gets it: through JSON."""
    given = {"run": place.runs.latest.id, **{name: str(value) for name, value in params.items()}}
    return json.loads(msgspec.json.encode((VIEWS | OF_RUN)[what](place, given)))


def test_a_run_is_described(place: Place) -> None:
    """The list and the run say what ran, how it stands and how far it came."""
    (line,) = ask(place, "runs")["runs"]
    run = ask(place, "")

    assert ("clean", {"team": "<b>vision</b>"}) == (line["state"], line["tags"])
    assert (2 * STEPS, 1, 2) == tuple(run["progress"][key] for key in ("steps", "epoch", "epochs"))
    assert 1.0 == run["progress"]["share"]
    assert [run["main"]] == [one["session"] for one in run["sessions"]]
    assert [] == ask(place, "runs", search="team=text")["runs"]
    assert 1 == len(ask(place, "runs", search="team=<b>vision epochs=2")["runs"])


def test_the_list_asks_no_store(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of hundreds of runs, failed ones too, is made of what is known without a query."""
    engine_of = Mock(side_effect=AssertionError)
    monkeypatch.setattr(Place, "engine_of", engine_of)
    (session,) = place.run(place.runs.latest.id).sessions
    assert session.box is not None
    session.box.content["ended"] = {"how": "exception", "detail": "OSError: full"}

    assert 1 == ask(place, "runs")["total"]
    engine_of.assert_not_called()


def test_the_same_question_is_worked_on_once(place: Place) -> None:
    """Who asks while another is being answered waits for that answer; a failure is not kept."""
    run = place.runs.latest
    is_asked, may_answer = threading.Event(), threading.Event()
    asks = []

    def slow() -> str:
        asks.append(1)
        is_asked.set()
        assert may_answer.wait(60)
        return "slow"

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(query.kept, run, ("slow",), slow)
        assert is_asked.wait(60)
        second = pool.submit(query.kept, run, ("slow",), slow)
        may_answer.set()
        assert ["slow", "slow"] == [first.result(60), second.result(60)]
    assert [1] == asks

    with pytest.raises(OSError, match="gone"):
        query.kept(run, ("fails",), Mock(side_effect=OSError("gone")))
    assert "well" == query.kept(run, ("fails",), lambda: "well")


def test_verdict_has_its_next_step(place: Place) -> None:
    """The report says what it is about and which command tells more; the list has it in short."""
    report = ask(place, "report")

    assert (
        report["primary"]["class"] == report["verdict"]["class"] == ask(place, "brief")["verdict"]
    )
    assert report["command"].startswith("cirron ")
    assert (
        json.loads(json.dumps(verdict_on(place.runs.latest).as_dict()["account"]))
        == (report["account"])
    )
    assert {one["part"] for one in report["account"]} == report["colours"].keys()


def test_steps_are_buckets(place: Place) -> None:
    """Steps are as many buckets as asked for; phases add up; a long step is told apart."""
    found = ask(place, "steps", width=10)
    part = ask(place, "steps", width=10, first=STEPS, last=STEPS + 5)

    assert (2 * STEPS, 10) == (found["total"], len(found["buckets"]))
    for bucket in found["buckets"]:
        phases = (
            "data_load",
            "forward",
            "backward",
            "optimizer_step",
            "evaluation",
            "other",
            "self",
        )
        assert bucket["wall"] == pytest.approx(sum(bucket[phase] for phase in phases))
    assert (1, 7) in [(one["epoch"], one["step"]) for one in found["outliers"]]
    assert (STEPS, STEPS + 4) == (part["buckets"][0]["first"], part["buckets"][-1]["last"])


@pytest.mark.parametrize(("axis", "last"), [("step", 2 * STEPS - 1), ("epoch", 2), ("time", 60)])
def test_marks_keep_their_peaks(place: Place, axis: str, last: float) -> None:
    """Thinned to a few points, a mark still has its highest value, and says what is not finite."""
    names = {one["name"]: one for one in ask(place, "marks")["names"]}
    (line,) = ask(place, "mark", name="train/loss", x=axis, width=4)["lines"]

    assert (2, True) == (names["train/loss"]["nonfinite"], names["accuracy"]["is_summary"])
    assert (2 * STEPS, 2) == (sum(line["points"]), sum(line["nonfinite"]))
    assert len(line["x"]) <= 4
    assert 1.0 == max(line["high"])
    assert 0 <= line["x"][0] <= line["until"][-1] <= last


def test_mean_of_values_near_the_largest_float(tmp_path: Path) -> None:
    """Their sum is infinite; their mean is not."""
    ci.profile()
    for _ in ci.batches(range(8)):
        ci.mark("huge", 1.7e308)
    ci.shutdown()

    (line,) = ask(Place([tmp_path]), "mark", name="huge", width=2)["lines"]

    assert [1.7e308, 1.7e308] == line["mean"]


def test_timeline_and_its_spans(place: Place) -> None:
    """A window has a row for each bucket and depth; each span that is whole can be looked at."""
    found = ask(place, "timeline", width=20)
    whole = {found["names"][row[5]]: row[11] for row in found["rows"] if row[11] is not None}
    detail = ask(place, "span", id=ask(place, "find", text="save")["found"]["id"])

    assert "cirron.session" == ask(place, "span", id=whole["cirron.session"])["name"]
    assert 2 * STEPS <= sum(row[3] for row in found["rows"])
    assert len(found["rows"]) <= 20 * 4
    assert len(found["names"]) == len(found["colours"])
    assert ("save", "cirron.session/epoch/save") == (detail["name"], detail["path"])
    assert "OSError: full" == detail["error"]
    assert 2 == sum(one["spans"] for one in detail["alike"])


def test_flame_graph_adds_up(place: Place) -> None:
    """Each path has its time, and what its children leave of it."""
    paths = {one["path"]: one for one in ask(place, "flame")["paths"]}
    batch = paths["cirron.session/epoch/batch"]

    assert 2 * STEPS == batch["spans"] == paths["cirron.session/epoch/batch/forward"]["spans"]
    assert batch["self"] == batch["ns"] - paths["cirron.session/epoch/batch/forward"]["ns"]


def test_flame_graph_of_names_with_a_slash(tmp_path: Path) -> None:
    """A slash in a span's name makes no level of its own."""
    ci.profile()
    with ci.scope("load/train"), ci.scope("read/decode"):
        pass
    ci.shutdown()
    paths = ask(Place([tmp_path]), "flame")["paths"]

    assert [
        ("cirron.session", ""),
        ("load/train", "cirron.session"),
        ("read/decode", "cirron.session/load/train"),
    ] == [(one["name"], one["parent"]) for one in paths]


def test_search_finds_by_name_and_number(place: Place) -> None:
    """`batch 7` is found in both epochs, forwards and backwards."""
    first = ask(place, "find", text="batch 7")
    second = ask(place, "find", text="BATCH[7]", at=first["found"]["start"])
    back = ask(place, "find", text="batch 7", at=second["found"]["start"], back=1)

    assert (2, 7) == (first["total"], first["found"]["index"])
    assert first["found"]["id"] == back["found"]["id"] != second["found"]["id"]
    assert None is ask(place, "find", text="nothing")["found"]


def test_a_run_with_one_process_answers_every_view(place: Place) -> None:
    """Ranks, reasons, tensors and goodput of a run with one process and no snapshots."""
    ranks = ask(place, "ranks", width=8)

    assert (1, 8) == (len(ranks["walls"]), len(ranks["walls"][0]))
    assert [2 * STEPS] == [one["steps"] for one in ranks["ranks"]]
    assert ["clean"] == [one["state"] for one in ask(place, "why")["groups"]]
    assert 0 == ask(place, "tensors")["total"]
    assert [] == ask(place, "tensor", name="fc.weight")["weights"]
    assert 0 < ask(place, "goodput")["goodput"] <= 1


def test_compilation_inside_of_steps_is_not_goodput(tmp_path: Path) -> None:
    """A run that compiles in every step does not train in that time."""
    ci.profile()
    for _ in ci.batches(range(5)):
        with ci.scope("compile"), ci.scope("lower"):
            time.sleep(0.02)
    ci.shutdown()

    found = ask(Place([tmp_path]), "goodput")

    assert found["goodput"] < 0.5
    assert 5 * 20 * MS <= found["times"]["compile_ns"] <= found["wall_ns"]


def test_diff_of_a_run_with_itself(place: Place) -> None:
    """Nothing differs, and no span is called slower."""
    run_id = place.runs.latest.id
    found = ask(place, "diff", before=run_id, after=run_id)

    assert [] == found["differences"]
    assert {"same", "unknown"} >= {one["outcome"] for one in found["changes"]}


@pytest.mark.parametrize(
    ("what", "params"),
    [
        ("mark", {}),
        ("mark", {"name": "x", "x": "moon"}),
        ("mark", {"name": "x", "first": "a"}),
        ("steps", {"width": "nan"}),
        ("steps", {"session": "1"}),
        ("timeline", {"from": 5, "to": 5}),
        ("span", {"id": "x" * 501}),
        ("span", {"id": "none"}),
    ],
)
def test_bad_parameters_are_refused(place: Place, what: str, params: dict[str, object]) -> None:
    """A parameter that is missing or cannot be is the asker's mistake, and named."""
    with pytest.raises(BadRequest, match=r"\w+"):
        ask(place, what, **params)


def test_an_unknown_run_is_an_error(place: Place) -> None:
    """A run that is not there is said to be so."""
    with pytest.raises(ci.UnknownRunError):
        ask(place, "report", run="nothing")


@pytest.mark.parametrize("waits", [True, False], ids=["between steps", "in its forward"])
def test_a_slow_rank_is_seen_outside_of_backward(made: Made, tmp_path: Path, waits: bool) -> None:
    """Ranks wait for each other in backward, so that their steps are equally long: who is slow is
    said by what they do outside of it, as the verdict says it.
    """
    for rank in range(3):
        session = made(rank=rank)
        own = 6 * MS if rank == 1 else 2 * MS
        epoch = session.span("epoch", 0, STEPS * 10 * MS, index=0)
        for number in range(STEPS):
            at = number * 10 * MS
            name = "batch" if waits else "step"
            step = session.span(name, at + waits * own, at + 10 * MS, epoch, number)
            session.span("backward", at + own, at + 10 * MS, step)
        session.write()
    place = Place([tmp_path])
    found = ask(place, "ranks", width=10, own=1)

    assert [False, True, False] == [one["is_odd"] for one in found["ranks"]]
    assert [2 * MS, 6 * MS, 2 * MS] == [one["own"] for one in found["ranks"]]
    assert [2 * MS, 6 * MS, 2 * MS] == [one[5] for one in found["walls"]]
    assert "rank 1 slows the others down" == ask(place, "report")["primary"]["summary"]


def test_diff_names_the_settings_that_differ(tmp_path: Path) -> None:
    """Configuration and arguments among them: who compares two runs wants to know these first."""
    for rate in (0.1, 0.2):
        ci.profile(config={"lr": rate, "epochs": 1})
        for _ in ci.batches(range(3)):
            pass
        ci.shutdown()
    place = Place([tmp_path])
    before, after = place.runs

    assert ["config lr: 0.1 before, 0.2 after"] == ask(place, "diff", before=before, after=after)[
        "differences"
    ]


@pytest.mark.parametrize("has_left", [True, False])
def test_query_of_a_page_that_has_left(has_left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages cancel queries while the user zooms; those must not hold up the ones that follow."""
    query = Mock(return_value={}, __name__="query")
    monkeypatch.setitem(VIEWS, "runs", query)
    access: Any = SimpleNamespace(
        around=lambda app: app, check=lambda request, needs: SimpleNamespace(id="key")
    )
    served: Any = SimpleNamespace(versions={}, boot="boot", is_read=threading.Event(), place=None)
    served.is_read.set()
    intake: Any = SimpleNamespace(get_blob=None)
    app = App("page", intake, access, served, Hub()).asgi
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/api/runs",
        "raw_path": b"/api/runs",
        "query_string": b"",
        "headers": [],
    }

    async def receive() -> dict[str, object]:
        return {"type": "http.disconnect" if has_left else "http.request"}

    async def send(message: dict[str, object]) -> None:
        pass

    asyncio.run(app(scope, receive, send))

    assert (not has_left) == query.called
