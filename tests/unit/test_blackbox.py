"""The black box: what is open, since when, the last step, and how it ended."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cirron as ci
from cirron import testing
from cirron.record import clock
from cirron.ship import blackbox
from cirron.ship.blackbox import BlackBox
from cirron.wire import Clock, Session

if TYPE_CHECKING:
    from collections.abc import Iterator

SESSION = Session(
    id="s",
    run_id="r",
    attempt=0,
    host="h",
    pid=1,
    rank=3,
    local_rank=None,
    world_size=None,
    clock=Clock(1, 1, 1),
)


class Box:
    """A black box over what a test records, with a fake clock."""

    def __init__(self, root: Path, recorded: testing.Captured) -> None:
        self.recorded = recorded
        self.box = BlackBox(
            root,
            SESSION,
            recorded._collector,
            clock.Anchor(0, 0, 0),
            interval_s=1.0,
            silence_s=60.0,
            counters=lambda: {"record_drop_count": 0},
        )

    def read(self) -> dict[str, Any]:
        """What the file says when it is written now."""
        self.recorded._collector.drain()
        self.box.write()
        return self.content()

    def content(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.box.path.read_bytes())
        return found


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    with testing.capture() as recorded:
        monkeypatch.setattr(clock, "now", lambda: recorded.clock.now_ns)
        yield Box(tmp_path, recorded)


def test_where_it_is(box: Box, tmp_path: Path) -> None:
    """The file is named by session and process, and says whose it is."""
    content = box.read()

    assert tmp_path / "blackbox" / f"s-{os.getpid()}.json" == box.box.path
    assert ("s", 3, os.getpid()) == (
        content["session"]["id"],
        content["session"]["rank"],
        content["pid"],
    )
    assert (1, 1.0, None) == (content["schema_version"], content["interval_s"], content["ended"])


def test_open_spans(box: Box) -> None:
    """Open spans are there, outermost first, with start, thread and the last value of each mark."""
    with ci.scope("epoch", index=3):
        ci.mark("loss", 2.0)
        ci.mark("loss", 1.0)
        with ci.scope("backward"):
            content = box.read()
    epoch, backward = content["open"]

    assert (2, "epoch", 3, {"loss": 1.0}) == (
        content["open_count"],
        epoch["name"],
        epoch["index"],
        epoch["latest"],
    )
    assert epoch["id"] == backward["parent_id"]
    assert (None, threading.get_ident(), "MainThread") == (
        backward["end_ns"],
        backward["thread_id"],
        backward["thread_name"],
    )
    assert 0 < epoch["start_ns"] < backward["start_ns"] <= content["heartbeat_ns"]


def test_spans_of_all_threads(box: Box) -> None:
    """What other threads have open is there too."""
    ready, done = threading.Event(), threading.Event()

    def work() -> None:
        with ci.scope("load"):
            ready.set()
            done.wait(10)

    thread = threading.Thread(target=work, name="loader")
    thread.start()
    ready.wait(10)
    content = box.read()
    done.set()
    thread.join()

    assert [("load", "loader")] == [(s["name"], s["thread_name"]) for s in content["open"]]


@pytest.mark.parametrize("name", ["step", "batch"])
def test_the_last_step(name: str, box: Box) -> None:
    """The newest step is the open one, or else the one that closed last."""
    assert box.read()["last_step"] is None

    with ci.scope(name, index=811):
        pass
    closed = box.read()["last_step"]
    with ci.scope(name, index=812), ci.scope("backward"):
        opened = box.read()["last_step"]

    assert (name, 811, True) == (closed["name"], closed["index"], closed["end_ns"] is not None)
    assert (name, 812, None) == (opened["name"], opened["index"], opened["end_ns"])


def test_stacks_after_silence(box: Box) -> None:
    """After a long silence inside a scope the stacks of all threads are kept."""
    ready, done = threading.Event(), threading.Event()

    def stuck() -> None:
        ready.set()
        done.wait(10)

    thread = threading.Thread(target=stuck, name="stuck")
    thread.start()
    ready.wait(10)
    with ci.scope("epoch"), ci.scope("backward") as scope:
        box.recorded.clock.advance(59)
        early = box.read()
        box.recorded.clock.advance(2)
        late = box.read()
    done.set()
    thread.join()
    after = box.read()

    assert (None, None) == (early["silent_since_ns"], early["stacks"])
    assert scope.start == late["silent_since_ns"]
    (stack,) = [stack for stack in late["stacks"] if stack["name"] == "stuck"]
    assert any(" in stuck" in frame for frame in stack["frames"])
    assert (None, None) == (after["silent_since_ns"], after["stacks"])


@pytest.mark.parametrize("action", ["scope", "mark"])
def test_activity_is_no_silence(action: str, box: Box) -> None:
    """A thread that closes scopes or makes marks is not silent, however long its epoch."""
    with ci.scope("epoch"):
        for _ in range(5):
            box.recorded.clock.advance(40)
            if action == "scope":
                with ci.scope("step"):
                    pass
            else:
                ci.mark("loss", 1.0)
            assert box.read()["stacks"] is None


def test_silence_outside_of_scopes(box: Box) -> None:
    """With nothing open there is nothing to be silent in."""
    with ci.scope("done"):
        pass
    box.recorded.clock.advance(1_000)

    assert box.read()["stacks"] is None


@pytest.mark.parametrize(
    ("how", "detail"), [("clean", None), ("signal", "SIGTERM"), ("exception", "ValueError: x")]
)
def test_how_it_ended(how: str, detail: str | None, box: Box) -> None:
    """A box that is closed says how and when."""
    box.box.close(how, detail)
    ended = box.content()["ended"]

    assert (how, detail) == (ended["how"], ended["detail"])
    assert 0 == ended["at_ns"]


def test_strict_json_whatever_is_recorded(box: Box) -> None:
    """Values that JSON cannot hold neither break the file nor are left out."""

    def refuse(token: str) -> None:
        raise AssertionError(token)

    with ci.scope("bad\ud800", attr=math.nan, other=object()):
        ci.mark("nan", math.nan)
        ci.mark("huge", 10**400)
        ci.mark("large", 10**30)
        ci.mark("surrogate", "\ud800")
        box.read()
    content = json.loads(box.box.path.read_text("utf-8"), parse_constant=refuse)

    (span,) = content["open"]
    assert {"nan": "nan", "huge": "inf", "large": 1e30, "surrogate": "?"} == span["latest"]
    assert ("bad?", "nan") == (span["name"], span["attrs"]["attr"])


def test_very_many_open_spans(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with very many requests in flight shows the oldest and says how many there are."""
    monkeypatch.setattr(blackbox, "MAX_OPEN", 3)
    scopes = [ci.scope("request", index=i) for i in range(5)]
    for scope in scopes:
        scope.__enter__()
    content = box.read()

    assert (5, [0, 1, 2]) == (content["open_count"], [span["index"] for span in content["open"]])
    for scope in scopes:
        scope.__exit__(None, None, None)


def test_the_file_is_replaced_whole(box: Box) -> None:
    """No half-written file is left beside it, and a removed folder comes back."""
    box.read()
    box.box.path.unlink()
    box.box.path.parent.rmdir()
    box.read()

    assert [box.box.path.name] == os.listdir(box.box.path.parent)


def test_a_folder_that_cannot_be_written(tmp_path: Path, box: Box) -> None:
    """A box that cannot be written is counted and is nobody's error."""
    (tmp_path / "blackbox").write_text("a file")
    box.box.write()

    assert 1 == box.box.failures


def test_memory_and_counters(box: Box) -> None:
    """Resident memory and the counters of the session are in it."""
    content = box.read()

    assert {"record_drop_count": 0} == content["counters"]
    assert content["memory_rss_bytes"] > 1_000_000


class TestInASession:
    def boxes(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_bytes()) for path in Path(".cirron/blackbox").iterdir()]

    def test_it_is_written_and_closed(self) -> None:
        """A session writes its box at each flush and closes it at the end."""
        ci.profile()
        with ci.scope("epoch", index=1):
            ci.flush()
            (running,) = self.boxes()
        ci.shutdown()
        (ended,) = self.boxes()

        assert ["cirron.session", "epoch"] == [span["name"] for span in running["open"]]
        assert running["ended"] is None
        assert ("clean", []) == (ended["ended"]["how"], ended["open"])
        assert running["session"]["id"] == ended["session"]["id"]

    def test_none_without_a_spool(self, tmp_path: Path) -> None:
        """Who writes nothing to disk has no box either."""
        ci.profile(output="none")
        ci.flush()
        ci.shutdown()

        assert [] == list(tmp_path.iterdir())
