"""Runs that are killed with SIGKILL and started again end as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("resume_cases.py")


@pytest.mark.parametrize(("name", "kills"), [("plain", 3), ("numpy", 2), ("torch", 2), ("jax", 2)])
def test_killed_runs_end_alike(name: str, kills: int, tmp_path: Path) -> None:
    """State, history, elapsed and what fired are those of a run that nobody killed, to the bit."""
    if name not in ("plain", "numpy"):
        pytest.importorskip(name)
    ended = subprocess.run(
        [sys.executable, str(CASES), name, str(kills)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert 0 == ended.returncode, ended.stderr[-3000:]
    assert kills == json.loads(ended.stdout.splitlines()[-1])["kills"]
    assert list(tmp_path.glob("killed/step-*"))


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """A run that does not go on where it was is found."""
    (tmp_path / "whole.json").write_text('{"state": 1, "history": {}}')
    (tmp_path / "killed.json").write_text('{"state": 2, "history": {}}')
    ended = subprocess.run(
        [sys.executable, "-c", "import resume_cases; resume_cases.check()"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CASES.parent)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert 1 == ended.returncode
    assert "state differs" in ended.stderr
