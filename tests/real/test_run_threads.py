"""Many threads ask one run while a process adds to it, and a place that is kept up to date."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from cirron.runs.place import Place

if TYPE_CHECKING:
    from tests.real.conftest import Scripts

EPOCHS, STEPS = 8, 5
WRITER = f"""
import pathlib, time
import cirron as ci
ci.profile(flush_interval=0.05)
for epoch in ci.epochs(range({EPOCHS})):
    for batch in ci.batches(range({STEPS})):
        with ci.scope("forward"):
            ci.mark("loss", 0.5)
    ci.flush()
    print("epoch", epoch, flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.01)
"""


def test_eight_threads_ask_while_a_process_writes(scripts: Scripts) -> None:
    """Each answer is of one moment, and in the end everything is there."""
    script = scripts.start(WRITER)
    script.wait_for("epoch 0")
    place = Place([scripts.folder])
    is_done = False

    def ask() -> int:
        asked = 0
        while not (is_done and asked):
            run = place.runs.latest
            chunks = run.sql("SELECT name FROM spans").batches()
            steps = len(run.steps)
            names = [name for chunk in chunks for (name,) in chunk.rows]
            assert STEPS <= steps <= names.count("forward")
            # The black box, which knows the open epoch, may be a moment older than the batches.
            assert steps - sum(row["steps"] for row in run.query("epochs")) in (0, STEPS)
            asked += 1
        return asked

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask) for _ in range(8)]
        try:
            for epoch in range(1, EPOCHS):
                script.wait_for(f"epoch {epoch}")
                assert place.refresh()
            (scripts.folder / "go").touch()
            assert 0 == script.end().status
            assert place.refresh()
        finally:
            is_done = True
        assert all(one.result() for one in asking)
    run = place.runs.latest
    assert ("clean", EPOCHS * STEPS) == (run.state, len(run.steps))
    assert EPOCHS * STEPS == len(run.series("loss"))


def test_refresh_says_whether_anything_changed(scripts: Scripts) -> None:
    """A process that died counts, files that came count; else it is False, and quick."""
    script = scripts.start(WRITER)
    script.wait_for(f"epoch {EPOCHS - 1}")
    place = Place([scripts.folder])
    running = place.runs.latest
    script.kill(signal.SIGKILL)
    script.end()

    assert place.refresh()
    killed = place.runs.latest
    assert ("running", "killed") == (running.state, killed.state)
    began = time.perf_counter()
    assert [False] * 20 == [place.refresh() for _ in range(20)]
    assert (time.perf_counter() - began) / 20 < 0.05  # a few milliseconds, if the machine is idle
    assert killed is place.runs.latest

    assert 0 == scripts.run("import cirron as ci; ci.profile(); ci.mark('x', 1)").status
    assert place.refresh()
    assert not place.refresh()
    assert 2 == len(place.runs)
    assert EPOCHS * STEPS == len(killed.steps)  # as it was
