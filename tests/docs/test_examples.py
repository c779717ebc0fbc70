"""The examples run, from the first line to the last, in an empty folder.

Each runs once, whatever is asked of it; those that classify digits are compared.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from tests import spools

import cirron as ci

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.xdist_group("examples")  # in one process: each runs once

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DIGITS = [path.stem for path in EXAMPLES if path.stem.startswith("digits_")]

# What a classifier of digits reaches, whatever it is written in.
LEAST_ACCURACY = 0.95
MOST_APART = 0.03
SAME = ("plain", "numpy", "jax", "linen", "nnx", "equinox", "haiku", "torch")
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


class Ran(NamedTuple):
    """What an example said, and the folder that it ran in."""

    out: str
    err: str
    status: int
    folder: Path

    @property
    def accuracy(self) -> float:
        return float(re.findall(r"accuracy:? (0\.\d+)", self.out)[-1])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ran]:
    """Runs the example of this name, the first time that it is asked for."""

    @functools.cache
    def ran(name: str) -> Ran:
        path, folder = ROOT / "examples" / f"{name}.py", tmp_path_factory.mktemp(name)
        absent = [one for one in packages(path) if find_spec(one) is None]
        if absent:
            pytest.skip(f"{path.name} needs {', '.join(sorted(absent))}")
        ended = subprocess.run(
            [sys.executable, str(path)],
            cwd=folder,
            env={**os.environ, "DEMO_SERVE": "0"},  # the page is there until somebody ends it
            capture_output=True,
            text=True,
            check=False,
        )
        return Ran(ended.stdout, ended.stderr, ended.returncode, folder)

    return ran


@pytest.mark.parametrize("name", [path.stem for path in EXAMPLES if path.name not in ELSEWHERE])
def test_examples_run(run: Callable[[str], Ran], name: str) -> None:
    """Each example ends well, and says something."""
    ran = run(name)

    assert 0 == ran.status, ran.err
    assert ran.out.strip()
    assert "internal error" not in ran.err
    if name in DIGITS:
        assert LEAST_ACCURACY < ran.accuracy


@pytest.mark.parametrize("name", DIGITS)
def test_digits_are_short_and_profiled(run: Callable[[str], Ran], name: str) -> None:
    """The same classifier in each framework is a page of code, and leaves what it did."""
    home = run(name).folder / ".cirron"

    assert len((ROOT / "examples" / f"{name}.py").read_text("utf-8").splitlines()) < 60
    sessions = [one for opened in ci.open(home).runs.values() for one in opened.sessions]
    clean = {one.id for one in sessions if one.state == "clean"}
    assert clean  # one more was killed, in the example of that
    for one in spools.read(home):
        if one.session.id in clean:
            assert {"epoch", "step"} <= {span.name for span in one.spans}


def test_digits_reach_the_same_accuracy(run: Callable[[str], Ran]) -> None:
    """Whatever it is written in, the classifier is as good."""
    found = {name: run(f"digits_{name}").accuracy for name in SAME}

    assert max(found.values()) - min(found.values()) < MOST_APART, found


@pytest.mark.parametrize(("name", "test"), ELSEWHERE.items())
def test_the_others_are_tested(name: str, test: str) -> None:
    """An example that is left out above is run by the test that is named there."""
    assert name in {path.name for path in EXAMPLES}
    assert name.removesuffix(".py") in (ROOT / test).read_text("utf-8")
