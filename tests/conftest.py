"""Shared by all tests: our own mistakes are raised, and no session outlives its test."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

import cirron as ci
from cirron import guard, session
from cirron.record import hot

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# What settings and identity are read from.
MACHINE = (
    "CIRRON_",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "SLURM_",
    "TORCHELASTIC_",
    "OMPI_",
    "PMI_",
)


def pytest_sessionstart() -> None:
    """Ctrl-C is what it is in a terminal: pytest-xdist ignores it, and so would our children."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    """Each test starts in an empty folder with no session and no settings of the machine's."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(MACHINE):
            monkeypatch.delenv(name)
    monkeypatch.setattr(guard, "strict", True)
    monkeypatch.setattr(guard, "relay", None)  # warnings of background threads are said at once
    guard.errors.clear()
    yield
    ci.shutdown()
    hot.leave_context()
    hot.ring.clear()
    hot.opened.clear()
    session._memory.clear()
