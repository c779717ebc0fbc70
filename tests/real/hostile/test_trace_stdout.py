"""`ci.trace()` prints whatever stdout is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cirron as ci

SOURCE = Path(ci.__file__).parents[1]
BODY = """
import sys
import cirron as ci
{prepare}
with ci.scope("Größe \\x1b[31m\\u202e"):
    pass
ci.trace()
sys.stderr.write("alive")
"""
BROKEN = "import os; r, w = os.pipe(); os.close(r); sys.stdout = os.fdopen(w, 'w', 1)"


@pytest.mark.parametrize(
    ("prepare", "encoding", "expected"),
    [
        ("", "ascii", b"Gr\\xf6\\xdfe \\x1b[31m\\u202e - "),
        ("", "utf-8", "Größe \\x1b[31m\\u202e - ".encode()),
        ("sys.stdout.close()", "ascii", b""),
        ("sys.stdout = None", "ascii", b""),
        (BROKEN, "ascii", b""),
    ],
    ids=["ascii", "utf-8", "closed", "none", "broken"],
)
def test_trace_prints_on_any_stdout(prepare: str, encoding: str, expected: bytes) -> None:
    """On an ASCII, closed, broken or missing stdout the program goes on, and codes are escaped."""
    result = subprocess.run(
        [sys.executable, "-c", BODY.format(prepare=prepare)],
        env={"PYTHONPATH": str(SOURCE), "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=60,
        check=False,
    )

    assert result.stdout.startswith(expected)
    assert result.stderr.startswith(b"alive"), result.stderr.decode()
