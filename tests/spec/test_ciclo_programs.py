"""Small programs written for Ciclo 0.1.9, from what its documentation says, run as they are.

Each is in a page of `ciclo_programs/`, under a heading: the program, which asserts what comes of
it. `fails:` has what it stops with instead: the error says what to write. `gives:` has the `result`
that the same program has with 0.1.9 itself, which was run.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

PAGES = Path(__file__).parent / "ciclo_programs"
PROGRAM = re.compile(
    r"^## (?P<title>.+?)\n+(?:fails: (?P<fails>.+?)\n+)?(?:gives: (?P<gives>.+?)\n+)?"
    r"```python\n(?P<code>.*?)```",
    re.M | re.S,
)


class Program(NamedTuple):
    title: str
    code: str
    fails: str | None
    gives: str | None


PROGRAMS = [
    Program(f"{page.stem}: {found['title']}", found["code"], found["fails"], found["gives"])
    for page in sorted(PAGES.glob("*.md"))
    for found in PROGRAM.finditer(page.read_text("utf-8"))
]


def plain(result: Any) -> Any:
    """What a program gives, as JSON has it, to five digits."""
    result = result.tolist() if hasattr(result, "tolist") else result
    if isinstance(result, dict):
        return {str(key): plain(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [plain(one) for one in result]
    return float(f"{result:.5g}") if isinstance(result, float) else result


def test_all_programs_are_read() -> None:
    """Each heading has its program, and no two have one name."""
    headings = [
        line
        for page in PAGES.glob("*.md")
        for line in page.read_text("utf-8").splitlines()
        if line.startswith("## ")
    ]

    assert len(headings) == len(PROGRAMS) == len({program.title for program in PROGRAMS})
    assert len(PROGRAMS) >= 60


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.title for program in PROGRAMS])
def test_program(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs with the results that it asserts, or fails with the line to write."""
    monkeypatch.chdir(tmp_path)
    code = compile(program.code, f"<{program.title}>", "exec", dont_inherit=True)
    module = ModuleType("program")  # dataclasses look for the module of a class
    monkeypatch.setitem(sys.modules, "program", module)
    if "from clu import periodic_actions" in program.code:
        pytest.importorskip("tensorflow")  # which that module of clu needs
    if program.fails is None:
        exec(code, vars(module))
        if program.gives is not None:
            assert json.loads(program.gives) == plain(vars(module)["result"])
        return
    with pytest.raises(Exception, match=program.fails) as raised:
        exec(code, vars(module))
    assert not isinstance(raised.value, (AttributeError, AssertionError, NameError))
