"""The black box: what is open, since when, the last step, and how it ended."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cirron as ci
from cirron import files, guard, testing
from cirron.record import clock
from cirron.ship import blackbox
from cirron.ship.blackbox import BlackBox
from cirron.wire import Clock, Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NEVER_NS = 10**18

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
        self.folder = files.Folder(root / "blackbox", files.BLACK_BOX)
        self.box = BlackBox(
            self.folder,
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
        found: dict[str, Any] = json.loads(self.path.read_bytes())
        return found

    @property
    def path(self) -> Path:
        return self.folder.path / self.box.name


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    with testing.capture() as recorded:
        monkeypatch.setattr(clock, "now", lambda: recorded.clock.now_ns)
        yield Box(tmp_path, recorded)


def test_a_parent_that_closed_after_its_children_were_taken_is_kept(box: Box) -> None:
    """After a kill, every span on disk has its parent on disk or in the black box."""
    collector = box.recorded._collector
    with ci.scope("step"):
        with ci.scope("inside"):
            pass
        collector.note_open()
        collector.drain()
    with ci.scope("later"):
        pass
    box.box.write()

    assert ["step"] == [span["name"] for span in box.content()["closed"]]


def test_where_it_is(box: Box, tmp_path: Path) -> None:
    """The file is named by session and process, and says whose it is."""
    content = box.read()

    assert tmp_path / "blackbox" / f"s-{os.getpid()}.json" == box.path
    assert ("s", 3, os.getpid()) == (
        content["session"]["id"],
        content["session"]["rank"],
        content["pid"],
    )
    assert (1, 1.0, None) == (content["schema_version"], content["interval_s"], content["ended"])


def test_open_spans_are_in_the_black_box(box: Box) -> None:
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
    """After a long silence inside a scope the stacks of the program's threads are kept."""
    ready, done = threading.Event(), threading.Event()

    def stuck() -> None:
        ready.set()
        done.wait(10)

    thread = threading.Thread(target=stuck, name="stuck")
    thread.start()
    ours = threading.Thread(target=stuck, name="cirron-values")
    ours.start()
    ready.wait(10)
    with ci.scope("epoch"), ci.scope("backward") as scope:
        box.recorded.clock.advance(59)
        early = box.read()
        box.recorded.clock.advance(2)
        late = box.read()
    done.set()
    thread.join()
    ours.join()
    after = box.read()

    assert (None, None) == (early["silent_since_ns"], early["stacks"])
    assert scope.start == late["silent_since_ns"]
    assert [] == [one for one in late["stacks"] if one["name"].startswith("cirron-")]
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
    box.box.start()
    assert box.box.close(NEVER_NS, how, detail)
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
    content = json.loads(box.path.read_text("utf-8"), parse_constant=refuse)

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


@pytest.mark.parametrize("what", ["attributes", "latest values", "ids of marks", "thread's name"])
def test_open_spans_are_bounded(what: str, box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much the open spans hold, the file has a limit, and all of them are in it."""
    scopes = []
    if what == "thread's name":
        monkeypatch.setattr(threading.current_thread(), "name", "x" * 1_000_000)
    attrs: dict[str, Any] = {f"a{i}": "x" * 15_000 for i in range(4)}
    for _ in range(60):
        scopes.append(ci.scope("s", **attrs).__enter__())
        if what == "latest values":
            for i in range(200):
                ci.mark(f"{i:0900}", "x" * 256)
        if what == "ids of marks":
            for _ in range(2_000):
                ci.mark("loss", 0.5)
    content = box.read()
    for scope in reversed(scopes):
        scope.__exit__(None, None, None)

    assert box.path.stat().st_size < 1.2 * blackbox.MAX_BYTES
    assert [scope.id for scope in scopes] == [span["id"] for span in content["open"]]
    assert attrs.items() <= content["open"][0]["attrs"].items()
    assert {"...": "left out"} == content["open"][-1]["attrs"]


def test_stacks_are_bounded(box: Box) -> None:
    """However long the names of files and functions, the stacks have a limit; the end is kept."""
    ready, done = threading.Event(), threading.Event()

    def stuck() -> None:
        ready.set()
        done.wait(10)

    call: Callable[[], None] = stuck
    for _ in range(60):
        space: dict[str, Any] = {"inner": call}
        code = f"def {'f' * 100_000}(): inner()"
        exec(compile(code, "x" * 1_000_000 + "/model.py", "exec"), space)
        call = space["f" * 100_000]
    threads = [threading.Thread(target=call, name="n" * 100_000) for _ in range(20)]
    for thread in threads:
        thread.start()
    ready.wait(10)
    with ci.scope("epoch"), ci.scope("backward"):
        box.recorded.clock.advance(100)
        content = box.read()
    done.set()
    for thread in threads:
        thread.join()

    assert box.path.stat().st_size < 1.2 * blackbox.MAX_BYTES
    assert any(
        "x/model.py:1 in fff" in call for stack in content["stacks"] for call in stack["frames"]
    )


def test_signals_are_bounded(box: Box) -> None:
    """A program that is sent signals all the time has the newest in its box."""
    for i in range(1_000):
        box.box.signals.append({"name": "SIGINT", "at_ns": i})
    signals = box.read()["signals"]

    assert list(range(900, 1_000)) == [signal["at_ns"] for signal in signals]


def test_the_file_is_replaced_whole(box: Box) -> None:
    """No half-written file is left beside it, and a removed folder comes back."""
    box.read()
    shutil.rmtree(box.path.parent)
    box.read()

    assert [box.path.name] == sorted(os.listdir(box.path.parent))


def test_a_folder_that_cannot_be_written(tmp_path: Path, box: Box) -> None:
    """A box that cannot be written says why, and is nobody's error; later it is written again."""
    (tmp_path / "blackbox").write_text("a file")
    box.box.write()
    assert "Not a directory" == box.box.problem

    (tmp_path / "blackbox").unlink()
    box.read()
    assert box.box.problem is None


def test_a_link_is_not_followed(tmp_path: Path, box: Box) -> None:
    """A link that was planted where the box is written leads nowhere."""
    (tmp_path / "mine").write_text("precious")
    box.folder.make()
    box.path.symlink_to(tmp_path / "mine")
    Path(f"{box.path}.tmp").symlink_to(tmp_path / "mine")
    box.read()

    assert "precious" == (tmp_path / "mine").read_text()
    assert (False, 0o600) == (box.path.is_symlink(), box.path.stat().st_mode & 0o777)


class TestThread:
    """The box has a thread to itself, which writes when it is woken, and also when it is not."""

    @pytest.fixture
    def started(self, box: Box) -> Iterator[Box]:
        box.box.start()
        yield box
        box.box.close(NEVER_NS, "clean")

    def test_the_first_state_at_once(self, started: Box) -> None:
        """A process that dies in its first second has a box too."""
        wait_until(started.path.exists)

        assert started.content()["ended"] is None

    def test_refresh_returns_when_the_file_is_current(self, started: Box) -> None:
        """A refresh returns when the file is as new as the call."""
        for i in range(20):
            with ci.scope(str(i)):
                started.box.refresh(NEVER_NS)
                assert [str(i)] == [span["name"] for span in started.content()["open"]]

    def test_wake_writes_soon(self, started: Box) -> None:
        """Woken, it writes soon."""
        wait_until(started.path.exists)
        with ci.scope("new"):
            started.box.wake()
            wait_until(lambda: started.content()["open_count"] == 1)

    def test_it_needs_nobody(self, started: Box, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is written although no flush wakes it: the worker may be stuck."""
        started.box._interval_s = 0.01
        started.box.wake()
        with ci.scope("new"):
            wait_until(lambda: started.path.exists() and started.content()["open_count"] == 1)

    def test_refresh_has_a_deadline(self, box: Box) -> None:
        """A refresh does not wait for a disk that hangs, nor for a box that was never started."""
        release, began = threading.Event(), time.monotonic()
        box.folder.put = lambda *_: release.wait(10)  # type: ignore[assignment]
        box.box.refresh(NEVER_NS)
        box.box.start()
        box.box.refresh(0)
        release.set()
        box.box.close(NEVER_NS, "clean")

        assert time.monotonic() - began < 5

    @pytest.mark.parametrize("error", [RuntimeError, SystemExit])
    def test_a_failure_does_not_end_it(
        self, error: type[BaseException], box: Box, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever is raised while it writes, the next state is written."""
        monkeypatch.setattr(guard, "strict", False)
        failing = iter([True])

        def counters() -> dict[str, Any]:
            if next(failing, False):
                raise error("broken")
            return {}

        box.box._counters = counters
        box.box.start()
        box.box.refresh(NEVER_NS)
        box.box.close(NEVER_NS, "clean")

        assert "clean" == box.content()["ended"]["how"]
        assert 1 == guard.errors[f"black box: {error.__name__}"]


def test_memory_and_counters(box: Box) -> None:
    """Resident memory and the counters of the session are in it."""
    content = box.read()

    assert {"record_drop_count": 0} == content["counters"]
    assert content["memory_rss_bytes"] > 1_000_000


class TestInASession:
    def boxes(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_bytes()) for path in Path(".cirron/blackbox").glob("*.json")]

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

    def test_it_is_closed_last(self) -> None:
        """While sinks still close, the box says that the process runs."""
        seen: list[Any] = []

        class Closing(testing.MemorySink):
            def close(_, deadline_ns: int) -> None:  # noqa: N805  `self` is the test
                seen.extend(box["ended"] for box in self.boxes())

        ci.profile(sinks=[Closing()])
        ci.flush()
        ci.shutdown()

        assert [None] == seen
        assert "clean" == self.boxes()[0]["ended"]["how"]

    def test_its_problem_is_in_health(self, tmp_path: Path) -> None:
        """Why it cannot be written is in `ci.health()`."""
        (tmp_path / ".cirron").mkdir()
        (tmp_path / ".cirron" / "blackbox").write_text("a file")
        ci.profile()
        ci.flush()

        assert "Not a directory" == ci.health()["blackbox_problem"]

    def test_none_without_a_spool(self, tmp_path: Path) -> None:
        """Who writes nothing to disk has no box either."""
        ci.profile(output="none")
        ci.flush()
        ci.shutdown()

        assert [] == list(tmp_path.iterdir())
