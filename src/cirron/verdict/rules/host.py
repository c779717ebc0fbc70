"""host-bound: Python delays the steps, not the model.

Between steps: 20 % or more of the window is between steps, in nothing that was recorded or in a
scope without steps. There is no gain: the work may be needed.

In a scope: on a CPU, one of the program's scopes in the steps takes half of the time or more
outside the phases, if there are phases. There is no gain, either.

In no phase: 20 % or more is inside steps, but in no phase. A single step counts as at most three
typical ones. The gain is a replay that leaves 7 % of the time of the phases, for losses and
metrics. The loop of a Trainer has an overhead of its own, which is left. On a GPU, the host may
wait for the device: it is a finding only if the device's time fills less than 70 % of the work.

Small operations: batches have at most 8 samples, and forward, backward and optimizer take less than
150 us per tensor of the model in the fastest tenth of the steps, about the cost of calling the
operations. There is no gain: the largest possible batch is not known.
"""

from __future__ import annotations

from statistics import median, quantiles
from typing import TYPE_CHECKING

from cirron.verdict.facts import CROWDED, MIN_STEPS
from cirron.verdict.findings import Abstained, Class, Finding
from cirron.verdict.rules import BOOSTERS, MOST, STARVED, Judged, ms, percent
from cirron.verdict.whatif import replay

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cirron.verdict.facts import Facts, Step

KIND: Class = "host-bound"
SHARE = 0.20
IN_SCOPE = 0.5
HICCUP = 3.0
LEFT = 0.07  # of the time of the phases: losses, zero_grad, logs
# The overhead of a Trainer's own loop per step: about 1 ms in Lightning, 1.6 ms in transformers.
TRAINERS = ("transformers", "lightning", "pytorch_lightning")
TRAINER_NS = 2_000_000
GPU_BUSY = 0.7
GROWTH = 1.5  # times as long in the last quarter of the steps as in the first
# Usual causes of time that grows, of waiting, and of computing.
GROWING = "a list or history that each step copies or goes through, a file that it rewrites"
WAITING = "files, logging over a network, reading data in the loop, locks, sleep"
COMPUTING = (
    ".item(), prints, loops over parameters, metrics in Python, augmentation in the loop,"
    " callbacks, tokenizing, an RL environment"
)
SMALL_BATCH = 8
OUTSIDE = "forward outside steps"  # as the query `account` calls them
CALLS = 0.7  # of the time, on a GPU
CALL_NS = 150_000
CALLING = ("forward", "backward", "optimizer_step")
# What the time is between, and what may be there: for a loop, and for a booster; for each, between
# steps, and between epochs.
BETWEEN = (
    (
        ("steps", "; if batches are loaded there, write: for batch in ci.batches(loader)"),
        ("epochs", " (validation, saving, shuffling, creating the loader)"),
    ),
    (
        ("boosting rounds", " (callbacks, metrics in Python)"),
        ("fits", " (preparing the data, predicting, saving)"),
    ),
)


def judge(facts: Facts) -> Judged:
    if len(facts.steps) < MIN_STEPS:
        return Abstained(KIND, "too few steps")
    between = facts.account.get("between steps", 0) / facts.window_ns
    name, ns = max(facts.outside.items(), key=lambda one: one[1], default=("", 0))
    if ns >= max(SHARE, between) * facts.window_ns:
        share = ns / facts.window_ns
        if name == OUTSIDE:
            return Finding(
                KIND,
                f"forward passes outside the training steps take {percent(share)} of the time",
                share,
                None,
                "the work may be needed",
                [f"{ns / 1e9:.3g} s are in forward passes that no backward pass follows"],
                "if they are an evaluation: do it less often, on less data, or in larger batches",
                name,
            )
        return Finding(
            KIND,
            f"{name} takes {percent(share)} of the time, between the steps",
            share,
            None,
            "the work may be needed",
            [f"the scope {name} takes {ns / 1e9:.3g} s and contains no step"],
            f"do {name} less often, or asynchronously",
            name,
        )
    if between >= SHARE:
        if between < MOST and facts.is_starved(between * facts.window_ns):
            return Abstained(KIND, STARVED)
        ends = [step.start + step.wall for step in facts.steps]
        gaps = {at: facts.steps[at].start - ends[at - 1] for at in range(1, len(ends))}
        at_starts = sum(gaps[at] for at in facts.first_of_epochs)
        is_at_starts = at_starts > sum(gaps.values()) / 2
        where, hint = BETWEEN[facts.framework in BOOSTERS][is_at_starts]
        return Finding(
            KIND,
            f"the time is between the {where}",
            between,
            None,
            "the work may be needed",
            [f"{percent(between)} of the time is between {where}, and nothing was recorded there"],
            f'to find it, wrap the code there in: with ci.scope("name"):{hint}',
            "between steps",
        )
    if not any(step.forward is not None for step in facts.steps):
        return Abstained(KIND, "no phases were recorded, so the parts of a step are not known")
    inside = {
        name: ns for name, (count, ns) in facts.scopes.items() if 2 * count >= len(facts.steps)
    }
    name, ns = max(inside.items(), key=lambda one: one[1], default=("", 0))
    if ns >= IN_SCOPE * facts.window_ns and not facts.is_on_gpu:
        share = ns / facts.window_ns
        return Finding(
            KIND,
            f"{name} takes {percent(share)} of the time, in the steps",
            share,
            None,
            "the work may be needed",
            [f"the scope {name} takes {ms(ns / len(facts.steps))} per step, outside the phases"],
            f"make {name} faster, or do it less often; if it prepares data, let the workers of a"
            " loader do it",
            name,
        )
    usual = median(step.own for step in facts.steps)
    share = sum(min(step.own, HICCUP * usual) for step in facts.steps) / facts.window_ns
    least = TRAINER_NS if facts.framework in TRAINERS else 0
    if share < SHARE or quantiles((step.own for step in facts.steps), n=10)[0] < least:
        return judge_calls(facts)
    evidence = [
        f"{percent(share)} of the time is in steps, in no phase: {ms(usual)} per step (median)"
    ]
    where, ns = facts.gap
    if ns > facts.account["in no phase"] / 2:
        evidence.append(f"most of it is {where}")
    levels = [median(step.own for step in part) for part in quarters(facts.steps)]
    is_growing = levels == sorted(levels) and levels[-1] > GROWTH * levels[0]
    is_growing = is_growing and (facts.starved_share or 0.0) < CROWDED
    if is_growing:
        evidence.append(
            f"it grows from {ms(levels[0])} to {ms(levels[-1])} (first and last quarter)"
        )
    if facts.is_on_gpu:
        busy = facts.device_share
        if busy is None:
            return Abstained(KIND, "the device's time was not measured, and Python may wait for it")
        if busy >= GPU_BUSY:
            return Abstained(KIND, f"kernels fill {percent(busy)} of a step: the device is busy")
        evidence.append(f"kernels fill {percent(busy)} of a step (median): the device waits")
    loading = facts.account.get("data_load", 0) / facts.window_ns
    is_asleep = (facts.asleep_share or 0.0) - loading >= share / 2 and not facts.is_on_gpu
    if is_asleep:
        evidence.append("the thread sleeps for most of it: it waits instead of computing")
    causes = GROWING if is_growing else WAITING if is_asleep else COMPUTING
    has_loader = any(step.data_load is not None for step in facts.steps)

    def mended(step: Step) -> float:
        left = LEFT * sum(one or 0 for one in (step.forward, step.backward, step.optimizer))
        left = max(left, least)
        return step.wall - max(min(step.own, HICCUP * usual) - left, 0.0)

    return Finding(
        KIND,
        "the GPU waits for the host"
        if facts.is_on_gpu
        else "Python code in the steps takes the time",
        share,
        *replay(facts, mended),
        evidence,
        f'to find it, wrap parts of the loop in: with ci.scope("name"): Usual causes: {causes}'
        + (", copies to and from the device (pin_memory, non_blocking)" if facts.is_on_gpu else "")
        + ("" if has_loader else "; if batches are loaded there: for batch in ci.batches(loader)"),
        "in no phase",
    )


def quarters(steps: Sequence[Step]) -> list[Sequence[Step]]:
    size = len(steps) // 4
    return [steps[at * size : (at + 1) * size] for at in range(4)]


def judge_calls(facts: Facts) -> Judged:
    """Whether the operations are so small that calling them takes the time."""
    size, tensors = facts.loader.get("batch_size"), facts.model.get("tensors")
    if not isinstance(tensors, int) or facts.model.get("compiled"):
        return None  # not known in many loops, and most of them are fine
    phases = [
        sum(one or 0 for one in (step.forward, step.backward, step.optimizer))
        for step in facts.steps
    ]
    # On a GPU, calls matter only if they take the host's time.
    is_small = (
        sum(phases) >= CALLS * facts.window_ns
        if facts.is_on_gpu
        else isinstance(size, int) and size <= SMALL_BATCH
    )
    # The fastest steps: those that other work on the machine did not interrupt.
    each = quantiles(phases, n=10)[0] / max(tensors, 1)
    if not is_small or each > CALL_NS:
        return None
    batches = "" if size is None else f"batches of {size}; "
    return Finding(
        KIND,
        "the operations are so small that calling them takes the time",
        sum(phases) / facts.window_ns,
        None,
        "the largest possible batch is not known",
        [
            f"{batches}forward, backward and optimizer take {each / 1e3:.0f} us for each of the"
            f" {tensors} tensors of the model"
        ],
        "use larger batches, which cost little more; or torch.compile, CUDA graphs, a fused"
        " optimizer",
        max(CALLING, key=lambda phase: facts.account.get(phase, 0)),
    )
