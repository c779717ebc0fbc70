"""Which steps are measured: as many as a share of their time pays for."""

from __future__ import annotations

from cirron.record.budget import FIRST, LEAST, Budget

STEP_NS = 1_000_000


def run(budget: Budget, steps: int, cost_ns: int) -> list[bool]:
    found = []
    for step in range(steps):
        found.append(budget.begin_step((step + 1) * STEP_NS))
        if found[-1]:
            budget.spend(cost_ns)
    return found


def test_what_costs_too_much_is_thinned_out() -> None:
    """Past the first steps, measuring takes its share of their time and no more."""
    budget = Budget(0.01)
    found = run(budget, 1_000, cost_ns=100_000)

    assert [True] * FIRST == found[:FIRST]
    assert 90 <= sum(found[FIRST:]) <= 110  # 1 % of 1 ms pays for one in ten
    assert budget.health()["steps_thinned"] == found.count(False)


def test_one_in_a_hundred_whatever_it_costs() -> None:
    """At least one step in a hundred is measured, however expensive measuring is."""
    """At least one step in a hundred is measured, however expensive measuring is."""
    found = run(Budget(0.0), FIRST + 10 * LEAST, cost_ns=STEP_NS)

    assert 10 == sum(found[FIRST:])


def test_what_costs_little_is_always_measured() -> None:
    """If measuring is cheap, every step is measured."""
    """If measuring is cheap, every step is measured."""
    assert all(run(Budget(0.01), 500, cost_ns=1_000))
    assert all(run(Budget(1.0), 500, cost_ns=STEP_NS))


def test_the_first_steps_are_paid_for_too() -> None:
    """The whole cost stays within the share, with the first steps and what other spans cost."""
    budget = Budget(0.01)
    for step in range(1, 1_001):
        if budget.begin_step(step * STEP_NS):
            budget.spend(120_000)
        if step % 20 == 0:
            budget.spend(16_000)  # as the event behind the losses

    share = budget.health()["measuring_share"]
    assert isinstance(share, float)
    assert 0.009 <= share <= 0.0102  # the last measured step is not paid for yet
