"""kill -9: what is on disk afterwards, and what the black box tells."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.real.conftest import Scripts

INTERVAL_S = 0.3
# On top of the interval: a flush under way, on a machine that also runs the other tests.
SLACK_S = 0.4

TRAIN = f"""
    import time
    import cirron as ci

    ci.profile(flush_interval={INTERVAL_S})
    for epoch in ci.epochs(range(1_000)):
        for batch in ci.batches(range(100)):
            ci.mark("loss", 1 / (epoch * 100 + batch + 1))
            time.sleep(0.002)
            if batch:  # the one before has closed by now
                print("closed", epoch * 100 + batch - 1, time.time_ns())
"""


def test_what_is_older_than_a_flush_interval_survives(scripts: Scripts) -> None:
    """kill -9 loses nothing that was recorded longer ago than a flush interval."""
    script = scripts.start(TRAIN)
    script.wait_for("closed 420 ")
    killed_ns = time.time_ns()
    script.kill(signal.SIGKILL)

    assert -signal.SIGKILL == script.end().status
    # A span is in the spool under its epoch; number them as the script does.
    run = scripts.session()
    epochs = {span.id: span.index for span in run.spans if span.name == "epoch"}
    box = scripts.box()
    epochs |= {span["id"]: span["index"] for span in box["open"] + box["closed"]}
    stored = {
        (epochs[span.parent_id or ""] or 0) * 100 + (span.index or 0)
        for span in run.spans
        if span.name == "batch"
    }
    lines = [line.split() for line in script.out.split("\n")[:-1]]
    closed = {int(number): int(closed_ns) for _, number, closed_ns in lines}
    old = {
        number
        for number, closed_ns in closed.items()
        if closed_ns < killed_ns - (INTERVAL_S + SLACK_S) * 1e9
    }

    assert len(old) > 50
    assert set() == old - stored
    assert {1 / (number + 1) for number in old} <= {mark.value for mark in run.marks}


def test_killed_within_the_first_interval(scripts: Scripts) -> None:
    """A process that is killed before its first flush has a black box all the same."""
    script = scripts.start("""
        import time
        import cirron as ci

        ci.profile(flush_interval=3600)
        while not list(__import__("pathlib").Path(".cirron").glob("blackbox/*.json")):
            time.sleep(0.01)
        print("ready")
        time.sleep(600)
    """)
    script.wait_for("ready")
    script.kill(signal.SIGKILL)
    script.end()

    assert "killed" == scripts.state()


def test_the_black_box_tells_what_was_open(scripts: Scripts) -> None:
    """After kill -9 a reader knows what was open, since when, the last step and its marks."""
    script = scripts.start(
        """
        import time
        import cirron as ci

        ci.profile(flush_interval=0.05)
        for epoch in ci.epochs(range(10)):
            for batch in ci.batches(range(10)):
                if (epoch, batch) == (3, 7):
                    ci.mark("loss", 0.25)
                    with ci.scope("backward"):
                        print("stuck", time.time_ns())
                        time.sleep(600)
        """
    )
    stuck_ns = int(script.wait_for("stuck").split()[1])
    scripts.wait_for_box(lambda box: box["open_count"] == 4, "the inner scope")
    assert "running" == scripts.state()
    script.kill(signal.SIGKILL)
    script.end()

    box = scripts.box()
    assert None is box["ended"]
    assert script.pid == box["pid"]
    assert [("cirron.session", None), ("epoch", 3), ("batch", 7), ("backward", None)] == [
        (span["name"], span["index"]) for span in box["open"]
    ]
    assert [None] * 4 == [span["end_ns"] for span in box["open"]]
    assert abs(box["open"][3]["start_ns"] - stuck_ns) < 50e6
    assert {"loss": 0.25} == box["open"][2]["latest"]
    assert ("batch", 7, None) == tuple(box["last_step"][key] for key in ("name", "index", "end_ns"))
    assert "killed" == scripts.state()
    assert 37 == len(scripts.spans("batch"))
    shown = scripts.show()
    assert "killed" in shown
    assert "epoch[3] > batch[7] > backward" in shown


def test_the_last_step_is_known_between_steps(scripts: Scripts) -> None:
    """A process that dies outside of any step has its last closed step in the black box."""
    script = scripts.start(
        """
        import time
        import cirron as ci

        ci.profile(flush_interval=0.05)
        for batch in ci.batches(range(5)):
            pass
        print("between")
        time.sleep(600)
        """
    )
    script.wait_for("between")
    box = scripts.wait_for_box(lambda box: box["last_step"], "a last step")
    script.kill(signal.SIGKILL)
    script.end()

    assert ("batch", 4) == (box["last_step"]["name"], box["last_step"]["index"])
    assert box["last_step"]["end_ns"] > box["last_step"]["start_ns"]
    assert "last step: batch[4]" in scripts.show()


def test_os_exit_is_a_kill(scripts: Scripts) -> None:
    """os._exit() runs no code of ours: older batches are on disk and the run counts as killed."""
    ended = scripts.run(
        """
        import os, time
        import cirron as ci

        ci.profile(flush_interval=0.1)
        for batch in ci.batches(range(200)):
            time.sleep(0.005)
        os._exit(5)
        """
    )

    assert 5 == ended.status
    assert len(scripts.spans("batch")) > 100
    assert None is scripts.box()["ended"]
    assert "killed" == scripts.state()


def test_names_that_are_no_unicode_keep_the_black_box_alive(scripts: Scripts) -> None:
    """The black box is written whatever the names and values of open scopes hold."""
    script = scripts.start(
        r"""
        import time
        import cirron as ci

        ci.profile(flush_interval=0.05)
        with ci.scope("lone \ud800 surrogate", path="\udcff", where={"\udcfe": float("nan")}):
            ci.mark("huge", 10**400)
            ci.mark("nan", float("nan"))
            ci.mark("text", "\udcff")
            print("open")
            time.sleep(600)
        """
    )
    script.wait_for("open")
    box = scripts.wait_for_box(lambda box: box["open_count"] == 2, "the scope")
    script.kill(signal.SIGKILL)
    script.end()

    assert "lone ? surrogate" == box["open"][1]["name"]
    assert {"huge": "inf", "nan": "nan", "text": "?"} == box["open"][1]["latest"]
    assert "killed" in scripts.show()
