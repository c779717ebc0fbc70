"""Programs of the kinds that people write: the same results as without us, and the right tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import harness
import pytest

if TYPE_CHECKING:
    from pathlib import Path

PROGRAMS = [
    pytest.param(one, id=one.name, marks=[pytest.mark.heavy] if one.is_heavy else [])
    for one in harness.programs()
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program: harness.Program, tmp_path: Path) -> None:
    plain = harness.run(program, profiled=False, folder=tmp_path / "plain")
    ours = harness.run(program, profiled=True, folder=tmp_path / "profiled")

    assert plain.result == ours.result
    assert program.expected == harness.tree(ours.folder), ours.log
    assert 1 == len({one["run_id"] for one in harness.records(ours.folder)[2].values()})
    counts = harness.counted(ours.folder)
    assert plain.result["counts"] == {name: counts[name] for name in plain.result["counts"]}
    assert "internal error" not in ours.log
