"""Several processes: each saves its part, all stop at the same step, and they go on together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.real.conftest import Scripts

PROGRAM = Path(__file__).with_name("resume_ranks.py")


def start(kind: str, folder: Path, name: str, **environ: str) -> list[subprocess.Popen[str]]:
    meet = str(folder / f"meet-{name}")
    if kind == "jax":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meet = f"127.0.0.1:{free.getsockname()[1]}"
    processes = []
    for rank in range(2):
        with (
            (folder / f"{name}-{rank}.txt").open("w") as out,
            (folder / f"{name}-{rank}.err").open("w") as err,
        ):
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(PROGRAM), kind, str(rank)],
                    cwd=folder,
                    env={**os.environ, "MEET": meet, "OMP_NUM_THREADS": "1", **environ},
                    stdout=out,
                    stderr=err,
                    text=True,
                )
            )
    return processes


def ends(processes: list[subprocess.Popen[str]]) -> list[int]:
    try:
        return [process.wait(80) for process in processes]
    finally:
        for process in processes:
            process.kill()


def said(folder: Path, name: str) -> list[list[str]]:
    return [(folder / f"{name}-{rank}.txt").read_text().splitlines() for rank in range(2)]


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_go_on_together(kind: str, tmp_path: Path, scripts: Scripts) -> None:
    """One process is sent SIGTERM: both stop at the same step, and end as if they had not."""
    pytest.importorskip(kind)
    cut = start(kind, tmp_path, "cut", SLOW="1")
    scripts.wait_until(
        lambda: (
            all("step 5" in lines for lines in said(tmp_path, "cut"))
            or any(process.poll() is not None for process in cut)
        ),
        "the fifth step",
        60,
    )
    cut[0].send_signal(signal.SIGTERM)

    assert [143, 143] == ends(cut), (tmp_path / "cut-0.err").read_text()[-3000:]
    first, second = said(tmp_path, "cut")
    assert first[-1] == second[-1]
    errors = tmp_path / "again-0.err"
    assert [0, 0] == ends(start(kind, tmp_path, "again")), errors.read_text()[-3000:]
    for lines in said(tmp_path, "again"):
        resumed, whole = (line for line in lines if line.startswith("finished"))
        assert whole == resumed
        assert lines.count("step 0") == 1
