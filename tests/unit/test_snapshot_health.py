"""What the statistics say of the training: each tensor against its own past."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from cirron.snapshot import health, stats
from cirron.snapshot.health import Finding, Judge, find_cleared
from cirron.snapshot.host import Tensor

WEIGHT = Tensor("layer.weight", False, [4], "float32", {})
GRADIENT = Tensor("layer.weight.grad", True, [4], "float32", {}, model="")


def summary(*values: float) -> stats.Summary:
    return stats.summarize(np.array(values))


ZEROS = summary(*[0] * 8)


def history(norms: list[float]) -> list[str | None]:
    """The problem at each epoch of a gradient with these norms."""
    judge = Judge()
    found = [judge.judge(epoch, GRADIENT, summary(norm)) for epoch, norm in enumerate(norms)]
    return [None if finding is None else finding.problem for finding in found]


@pytest.mark.parametrize("tensor", [WEIGHT, GRADIENT], ids=["weight", "gradient"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_found_in_their_first_epoch(tensor: Tensor, value: float) -> None:
    """NaN or infinity in a weight or a gradient is found in the first epoch that has it."""
    found = Judge().judge(3, tensor, summary(1, value, 2, value))

    detail = "2 of 4 values are NaN or infinite"
    assert Finding("not finite", tensor.name, 3, detail, is_new=True) == found


def test_a_lasting_problem_keeps_its_first_epoch() -> None:
    """A problem that lasts keeps the epoch that it began in, and is new only then."""
    judge = Judge()
    found = [judge.judge(epoch, WEIGHT, summary(math.nan)) for epoch in (4, 5, 6)]

    assert [4, 4, 4] == [finding.since for finding in found if finding]
    assert [True, False, False] == [finding.is_new for finding in found if finding]


def test_recovery_is_reported_once() -> None:
    """A tensor that is well again says so once; the same illness again is since then, not new."""
    judge = Judge()
    judge.judge(0, GRADIENT, ZEROS)
    well = judge.judge(1, GRADIENT, summary(1, 2))
    still_well = judge.judge(2, GRADIENT, summary(1, 2))
    again = judge.judge(3, GRADIENT, ZEROS)

    assert Finding("recovered", GRADIENT.name, 0, "it was dead", is_new=False) == well
    assert None is still_well
    assert Finding("dead", GRADIENT.name, 3, "every value of its gradient is 0", False) == again


def test_one_problem_becomes_another() -> None:
    """A dead gradient that turns NaN has a new problem since then."""
    judge = Judge()
    judge.judge(0, GRADIENT, ZEROS)
    found = judge.judge(1, GRADIENT, summary(0, math.nan))

    assert found is not None
    assert ("not finite", 1, True) == (found.problem, found.since, found.is_new)


def test_a_dead_layer() -> None:
    """A gradient that is all zero is dead; a weight that is all zero is a bias that began so."""
    found = Judge().judge(0, GRADIENT, ZEROS)
    assert found is not None
    assert "dead" == found.problem
    assert None is Judge().judge(0, WEIGHT, ZEROS)
    assert None is Judge().judge(0, GRADIENT, summary(0, 1e-300))
    assert None is Judge().judge(0, GRADIENT, summary())


def test_a_few_values_that_are_zero_by_chance() -> None:
    """The gradient of a bias under a mean absolute error is a sum of signs: 0 says nothing."""
    assert [None] * 6 == history([0.0, 1.0, 0.0, 1.0, 2.0, 0.0])


def test_cleared_gradients_are_not_dead() -> None:
    """A model whose gradients are all zero was cleared; one that has another has dead layers."""
    other = replace(GRADIENT, model="Gan.")
    value = replace(GRADIENT, model=None)
    zero, one, empty, broken = summary(0, 0), summary(0, 1), summary(), summary(0, math.nan)

    assert {""} == find_cleared([(GRADIENT, zero), (GRADIENT, zero), (WEIGHT, one)])
    assert {""} == find_cleared([(GRADIENT, zero), (GRADIENT, empty)])
    assert {""} == find_cleared([(GRADIENT, zero), (other, zero), (other, one)])
    assert set() == find_cleared([(GRADIENT, zero), (GRADIENT, broken)])
    assert set() == find_cleared([(GRADIENT, empty), (WEIGHT, zero)])
    assert set() == find_cleared([(value, zero)])


def test_another_model_is_new() -> None:
    """A tensor that another model had the name of has its problem for the first time."""
    judge = Judge()
    judge.judge(0, WEIGHT, summary(math.nan))
    judge.forget([WEIGHT.name])
    found = judge.judge(5, WEIGHT, summary(math.nan))

    assert found is not None
    assert (5, True) == (found.since, found.is_new)


def test_a_norm_100_times_the_median_is_exploding() -> None:
    """A norm a hundred times the usual one is exploding, and is no part of what is usual."""
    assert [None, None, None, "exploding", "exploding", "recovered"] == history(
        [1, 2, 3, 201, 5000, 2]
    )
    assert [None] * 5 == history([1, 2, 3, 199, 100])


def test_a_norm_a_thousandth_of_the_median_is_vanishing() -> None:
    """A norm a thousandth of the usual one is vanishing."""
    assert [None, None, None, "vanishing", "recovered"] == history([1, 2, 3, 0.00199, 1])
    assert [None] * 4 == history([1, 2, 3, 0.0021])


def test_the_past_has_to_be_long_enough() -> None:
    """Two epochs are no history: the first ones of a training differ by more."""
    assert [None] * health.ENOUGH == history([1e-6, 1, 1e6])


def test_a_slow_change() -> None:
    """A norm that falls by a factor of two an epoch, as training converges, is no problem."""
    assert [None] * 40 == history([0.5**epoch for epoch in range(40)])
    assert [None] * 40 == history([2.0**epoch for epoch in range(40)])


def test_each_tensor_has_its_own_past() -> None:
    """Norms of different tensors are never compared."""
    judge = Judge()
    other = replace(GRADIENT, name="other.grad")
    for epoch in range(10):
        assert None is judge.judge(epoch, GRADIENT, summary(1))
        assert None is judge.judge(epoch, other, summary(1e-9))


def test_the_numbers_are_in_the_detail() -> None:
    """An exploding gradient's finding has its norm, and the usual one."""
    judge = Judge()
    for epoch in range(3):
        judge.judge(epoch, GRADIENT, summary(0.5))
    found = judge.judge(3, GRADIENT, summary(1234.5))

    assert found is not None
    assert "its gradient's norm is 1.23e+03, it was 0.5" == found.detail
