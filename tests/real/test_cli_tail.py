"""`cirron tail` beside a real process."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.real.conftest import Scripts

RUNNING = """
import pathlib, time
import cirron as ci

ci.profile(flush_interval=0.05)
for batch in ci.batches(range(3)):
    ci.mark("loss", 0.5)
ci.flush()
print("ready", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.01)
for batch in ci.batches(range(3, 5)):
    ci.mark("loss", 0.25)
"""


def test_it_follows_a_run_to_its_end(scripts: Scripts) -> None:
    """What is recorded while it looks is told, then how the run ended; and it ends itself."""
    script = scripts.start(RUNNING)
    script.wait_for("ready")
    tail = subprocess.Popen(
        [sys.executable, "-m", "cirron", "tail", "--interval", "0.1"],
        cwd=scripts.folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert tail.stdout is not None
    said = []
    for line in tail.stdout:
        said.append(line.strip())
        if line.strip().endswith("running"):
            (scripts.folder / "go").touch()
    tail.stdout.close()

    assert 0 == tail.wait(30)
    assert 0 == script.end().status
    assert f"pid {script.pid}: running" in said
    assert f"pid {script.pid}: clean" == said[-1]
    assert ["batch[0]", "batch[1]", "batch[2]"] == [one.split()[0] for one in said[:3]]
    assert any("{loss=0.25}" in line for line in said)
