"""kill -9 under load, a few times; `make soak` does it 200 times. See `kills.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("kills.py")


def kill(shape: str, interval_s: float) -> str:
    """One kill of a process that records in this shape; returns what was measured."""
    ended = subprocess.run(
        [
            *(sys.executable, str(PROGRAM), "--kills", "1", "--seed", "12", "--latest", "2.2"),
            *("--shapes", shape, "--intervals", str(interval_s)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert 0 == ended.returncode, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    ("shape", "interval_s"),
    [("one", 1.0), ("tight", 0.2), ("busy", 0.2), ("busy", 1.0), ("waiting", 0.2)],
)
def test_what_is_older_than_the_interval_survives(shape: str, interval_s: float) -> None:
    """At 100,000 spans a second, kill -9 loses nothing older than the interval plus 0.25 s."""
    assert "0 of 1 kills broke the promise" in kill(shape, interval_s)


def test_a_worker_that_cannot_keep_up_says_so() -> None:
    """16 threads that spin leave whole files and bounded memory, and health() tells the lag."""
    assert "0 of 1 kills broke the promise" in kill("spin", 0.2)
