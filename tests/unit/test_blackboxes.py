"""What black boxes add to a run: how each process stands or ended, and what it had open."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cirron
from cirron import system, wire
from cirron.record import clock
from cirron.runs import tree as trees

if TYPE_CHECKING:
    from tests.conftest import Made, MadeSession

SECOND_NS = 10**9


@pytest.fixture
def one(made: Made) -> MadeSession:
    """A session whose process is dead."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    found = made()
    found.info = wire.changed(found.info, pid=process.pid, host=platform.node())
    return found


def write_box(who: wire.Session, **more: Any) -> None:
    content: dict[str, Any] = {
        "schema_version": 1,
        "session": who,
        "pid": who.pid,
        "process_start": None,
        "heartbeat_ns": who.clock.wall_ns + 50 * SECOND_NS,
        "interval_s": 1.0,
        "ended": None,
        "open": [],
    }
    folder = Path(".cirron/blackbox")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{who.id}-{who.pid}.json").write_bytes(wire.encode(content | more))


def entry(span: wire.Span, **more: Any) -> dict[str, Any]:
    """A span as a black box has it that was written while it was open."""
    return {"id": span.id, "name": span.name, "start_ns": span.start_ns, **more}


def state() -> str:
    return cirron.open().state


@pytest.mark.parametrize("how", ["clean", "exception", "signal"])
def test_a_process_that_said_how_it_ended(one: MadeSession, how: str) -> None:
    """What the black box was closed with is the state."""
    write_box(one.info, ended={"how": how, "detail": None, "at_ns": 1})

    assert how == state()


def test_a_way_to_end_that_we_do_not_know(one: MadeSession) -> None:
    """A newer writer's word for its end is not taken for a kill."""
    write_box(one.info, ended={"how": "abducted"})

    assert "unknown" == state()


def test_a_reused_process_id(one: MadeSession) -> None:
    """Another process with the same id does not make a dead one run."""
    write_box(wire.changed(one.info, pid=os.getpid()), process_start="1")

    assert "killed" == state()


def test_remains_do_not_run(one: MadeSession) -> None:
    """A killed process whose parent has not looked yet still has an id, and is dead."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        start = system.process_start(process.pid)
        write_box(wire.changed(one.info, pid=process.pid), process_start=start)
        assert "running" == state()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

        assert "killed" == state()
    finally:
        process.communicate()


@pytest.mark.parametrize(
    ("interval_s", "silence_s", "expected"),
    [(1.0, 29, "running"), (1.0, 31, "killed"), (10.0, 99, "running"), (10.0, 101, "killed")],
)
def test_on_another_host(
    one: MadeSession,
    monkeypatch: pytest.MonkeyPatch,
    interval_s: float,
    silence_s: int,
    expected: str,
) -> None:
    """There the heartbeat decides: silent for 10 intervals, at least 30 s, is dead."""
    now_ns = one.START_NS + 1_000 * SECOND_NS
    monkeypatch.setattr(clock, "wall", lambda: now_ns)
    write_box(
        wire.changed(one.info, host="elsewhere"),
        interval_s=interval_s,
        heartbeat_ns=now_ns - silence_s * SECOND_NS,
    )
    main = cirron.open().main

    assert (expected, True) == (main.state, main.is_judged_by_silence)


def test_a_black_box_with_nothing_in_it(one: MadeSession) -> None:
    """Missing keys are no error."""
    write_box(one.info)
    (path,) = Path(".cirron/blackbox").iterdir()
    path.write_bytes(wire.encode({"session": wire.changed(one.info, host="elsewhere")}))
    run = cirron.open()

    assert ("killed", 0) == (run.state, run.tree().span_count)


def test_open_spans_join_the_tree(one: MadeSession) -> None:
    """The path to where a killed process was is there, up to its last heartbeat."""
    epoch = one.span("epoch", 0, None)
    one.spans.clear()
    one.span("step", 0, 10, epoch)
    one.write()
    write_box(one.info, open=[entry(epoch, index=3)])
    tree = cirron.open().tree()
    (root,) = tree.roots

    assert (True, 3, ["step"]) == (root.is_open, root.index, [one.name for one in root.children])
    assert 50 * SECOND_NS == root.wall_ns(tree.now_ns)


def test_the_latest_values_that_no_batch_has(one: MadeSession) -> None:
    """A value that was only in memory when the process died is known from the black box."""
    epoch, step = one.span("epoch", 0, None), one.span("step", 0, None)
    one.mark(epoch, "loss", 0.9, 1)
    one.mark(step, "loss", 0.7, 1)
    one.spans.clear()
    one.write()
    latest = [{"loss": 0.5, "infinite": None}, {"loss": 0.7}]
    write_box(one.info, open=[entry(epoch, latest=latest[0]), entry(step, latest=latest[1])])
    run = cirron.open()
    nodes = {node.name: node for node in trees.walk(run.tree().roots)}

    assert [0.9, 0.5] == [found.value for found in nodes["epoch"].marks]
    assert [0.7] == [found.value for found in nodes["step"].marks]
    assert 3 == len(run.marks)


def test_forked_processes_add_theirs(one: MadeSession) -> None:
    """The black box of a forked process is not the session's own."""
    epoch, worker = one.span("epoch", 0, None), one.span("worker", 1, None)
    write_box(one.info, open=[entry(epoch)])
    later = wire.changed(one.info, pid=one.info.pid + 1)
    write_box(later, open=[entry(worker, parent_id=epoch.id)], ended={"how": "clean"})
    run = cirron.open()

    assert ("killed", 1) == (run.state, len(run.main.forked))
    assert ["worker"] == [node.name for node in run.tree().roots[0].children]
