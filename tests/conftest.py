"""Shared by all tests: our own mistakes are raised, and no session outlives its test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import cirron as ci
from cirron import guard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    """Each test starts in an empty folder with no session and no settings of the machine's."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CIRRON_API_KEY", "CIRRON_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(guard, "strict", True)
    guard.errors.clear()
    yield
    ci.shutdown()
