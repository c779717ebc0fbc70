"""For all hostile tests: where their own modules are, and what is on a disk under attack."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def importable() -> dict[str, str]:
    """The environment in which a script can import the modules beside these tests."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(HERE), *([before] if before else [])])}
