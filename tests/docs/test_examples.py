"""The examples run, from the first line to the last, in an empty folder."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# What a classifier of digits reaches, whatever it is written in.
LEAST_ACCURACY = 0.95
# What needs more than an empty folder, and the tests that give it that.
ELSEWHERE = {"inference_llm_stream.py": "tests/real/test_inference_openai.py"}


def packages(path: Path) -> set[str]:
    """The packages that a script imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize(
    "path",
    [path for path in EXAMPLES if path.name not in ELSEWHERE],
    ids=lambda path: path.stem,
)
def test_examples_run(path: Path, tmp_path: Path) -> None:
    """Each example ends well, and says something."""
    absent = [name for name in packages(path) if find_spec(name) is None]
    if absent:
        pytest.skip(f"{path.name} needs {', '.join(sorted(absent))}")
    ended = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert 0 == ended.returncode, ended.stderr
    assert ended.stdout.strip()
    assert "internal error" not in ended.stderr
    if path.stem.startswith("digits_"):
        assert LEAST_ACCURACY < float(re.findall(r"accuracy:? (0\.\d+)", ended.stdout)[-1])


@pytest.mark.parametrize(
    "path",
    [path for path in EXAMPLES if path.stem.startswith("digits_")],
    ids=lambda path: path.stem,
)
def test_digits_are_short_and_profiled(path: Path) -> None:
    """The same classifier in each framework is a page of code, and shows what it did."""
    text = path.read_text("utf-8")

    assert len(text.splitlines()) < 60
    assert "ci.profile()" in text


@pytest.mark.parametrize(("name", "test"), ELSEWHERE.items())
def test_the_others_are_tested(name: str, test: str) -> None:
    """An example that is left out above is run by the test that is named there."""
    assert name in {path.name for path in EXAMPLES}
    assert name.removesuffix(".py") in (ROOT / test).read_text("utf-8")
