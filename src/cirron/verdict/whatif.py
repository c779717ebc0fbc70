"""What a fix would save: the same steps, replayed with one part changed.

A replay adds up the parts of each step. Its error is measured on the unchanged run: the parts of
one half of the steps must predict the time of the other half. Parts that overlap, or that drift
over time, increase the error. Above 5 % no gain is predicted.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from cirron.verdict.facts import MIN_STEPS
from cirron.verdict.findings import Gain, Prediction

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cirron.verdict.facts import Facts, Step

MAX_ERROR = 0.05
NONE: Mapping[int, float] = MappingProxyType({})


def replay(facts: Facts, change: Callable[[Step], float]) -> Prediction:
    """The gain if each step took as long as `change` says, or why it cannot be predicted."""
    return lasting(facts, sum(max(change(step), 0.0) for step in facts.steps))


def lasting(facts: Facts, total: float) -> Prediction:
    """The gain if all steps together took `total` ns. They take at least the device's time."""
    unchanged = sum(step.wall for step in facts.steps)
    return without(facts, unchanged - max(total, min(facts.device_ns, unchanged)))


def without(facts: Facts, ns: float, rare: Mapping[int, float] = NONE) -> Prediction:
    """The gain if `ns` of the window, in steps or between them, were saved.

    `rare` maps the index of a step to its time beyond the other steps.
    """
    if facts.window_ns < sum(step.wall for step in facts.steps):
        return Prediction(None, "steps overlap in time")
    error = error_of(facts.steps, rare)
    if error is None or error > MAX_ERROR:
        known = "" if error is None or error > 1 else f" (replay error {100 * error:.1f}%)"
        return Prediction(None, f"the step times vary too much{known}")
    saved = min(ns, max(facts.window_ns - facts.device_ns, 0.0))
    return Prediction(Gain(saved / facts.window_ns, saved / 1e9, error))


# The parts that `--what-if` accepts.
PARTS = ("data_load", "forward", "backward", "optimizer_step", "self")


def what_if(facts: Facts, part: str, factor: float) -> Prediction:
    """The gain if a part of each step took `factor` times as long, or why it cannot be predicted.

    A factor above 1 gives a negative gain.
    """
    name = {"optimizer_step": "optimizer", "self": "own"}.get(part, part)
    if sum(getattr(step, name) is not None for step in facts.steps) < MIN_STEPS:
        return Prediction(None, f"fewer than {MIN_STEPS} steps have {part}")
    return replay(facts, lambda step: step.wall + (factor - 1) * (getattr(step, name) or 0))


def error_of(steps: Sequence[Step], rare: Mapping[int, float] = NONE) -> float | None:
    """The larger error of predicting one half of the steps from the other.

    Work beside the training has a schedule of its own, so it is taken as it was. So is the extra
    time of a few steps (`rare`): one more of them in a half is not an error.
    """
    half = len(steps) // 2
    apart = [step.beside + rare.get(at, 0.0) for at, step in enumerate(steps)]
    rests = [max(parts(step) - rare.get(at, 0.0), 0.0) for at, step in enumerate(steps)]
    errors = []
    for known, wanted in ((slice(half), slice(half, None)), (slice(half, None), slice(half))):
        took = sum(step.wall for step in steps[wanted])
        if not steps[known] or took <= 0:
            return None
        rebuilt = sum(rests[known]) / len(rests[known]) * len(rests[wanted])
        errors.append(abs(rebuilt + sum(apart[wanted]) - took) / took)
    return max(errors)


def parts(step: Step) -> int:
    """The sum of the parts of a step: more than its time if parts overlap."""
    phases = (step.data_load, step.forward, step.backward, step.optimizer)
    covered = sum(one for one in phases if one is not None) + step.own
    return max(covered, step.wall - step.beside)


def with_workers(
    loads: Sequence[float],
    work: Sequence[float],
    workers: int,
    ahead: int,
    handover: float,
    firsts: Sequence[int] = (),
) -> float:
    """How long the steps take if workers load the batches, each up to `ahead` in advance.

    As in a DataLoader, worker i % workers loads batch i, batches are taken in order, and each batch
    that is taken requests another one. Taking a batch costs `handover`. At `firsts`, where an epoch
    begins, nothing is loaded in advance.
    """
    begins = set(firsts)
    is_free = [0.0] * workers  # when each worker is
    taken: list[float] = []
    now, first = 0.0, 0
    for number, load in enumerate(loads):
        if number in begins:
            is_free, taken, first = [now] * workers, [], number
        at = number - first
        worker, asked = at % workers, at - workers * ahead
        is_free[worker] = max(is_free[worker], taken[asked] if asked >= 0 else 0.0) + load
        # The wait for the very first batches comes once, in any case.
        now = max(now, is_free[worker] if number >= workers else 0.0) + handover
        taken.append(now)
        now += work[number]
    return now
