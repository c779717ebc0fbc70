"""The verdict on tensors: what the snapshots call sick is named, and nothing else of theirs is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

import cirron as ci
from cirron.verdict.diff import diff

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("is_sick", [True, False])
def test_sick_tensors_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_sick: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 1)
    if is_sick:
        model.weight.data[0, 0] = float("nan")
    ci.profile(snapshots="stats")
    ci.watch(model)
    for _ in ci.epochs(range(2)):
        pass
    ci.shutdown()

    verdict = ci.open().report().verdict

    assert ("numerics" if is_sick else "not-enough-data") == verdict.kind
    assert is_sick == ("weight (epoch 0: not finite)" in " ".join(verdict.evidence))


def test_the_first_tensors_that_part(tmp_path: Path) -> None:
    """`diff` names the epoch in which weights first differ, and which ones, the farthest first."""
    for change in (0.0, 1.0):
        torch.manual_seed(0)
        layers = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        model = torch.nn.Sequential(*layers)
        ci.profile()
        ci.watch(model)
        for epoch in ci.epochs(range(3)):
            if epoch == 1:
                layers[0].bias.data += 10 * change
                layers[1].weight.data += change
        ci.shutdown()
    before, after = ci.open().runs.values()

    found = diff([before], [after]).tensors

    assert [("0.bias", 1), ("1.weight", 1)] == [(one["tensor"], one["epoch"]) for one in found]
    assert [] == diff([before], [before]).tensors


def test_what_snapshots_cost_is_in_the_account(tmp_path: Path) -> None:
    """The time that the loop was held is a part of its own, and all parts add up."""
    model = torch.nn.Linear(1_000, 1_000)
    ci.profile()
    ci.watch(model)
    for _ in ci.epochs(range(40)):
        for _ in ci.batches(range(2)):
            time.sleep(0.0005)
    ci.shutdown()

    found = ci.open().report()
    parts = {part: ns for part, ns, _ in found.account}

    assert parts["snapshot"] > 0
    assert 1.0 == pytest.approx(sum(share for _, _, share in found.account))
