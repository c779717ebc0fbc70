"""Everything at once, for a few seconds; `make soak` does it for ten minutes. See `soak.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_everything_at_once() -> None:
    """Threads, tasks, forks, odd values, a full disk, a bad endpoint and signals: every record is
    on disk or counted as lost, once, in whole files, and memory does not grow.
    """
    ended = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("soak.py")), "--seed", "12"],
        env={**os.environ, "SECONDS": "8"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )

    assert 0 == ended.returncode, ended.stdout + ended.stderr
