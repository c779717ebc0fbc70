"""host-bound: Python delays the steps, not the model.

Between steps: 20 % or more of the window is between steps, in nothing that was recorded or in a
scope without steps. There is no gain: the work may be needed.

In a scope: on a CPU, one of the program's scopes in the steps takes half of the time or more
outside the phases, if there are phases. There is no gain, either.

In no phase: 20 % or more is inside steps, but in no phase. A single step counts as at most three
typical ones. The gain is a replay that leaves 7 % of the time of the phases, for losses and
metrics. The loop of a Trainer has an overhead of its own, which is left. On a GPU, the host may
wait for the device: it is a finding only if the device's time fills less than 70 % of the work.
Between the forward passes of a step, an environment or a sampler may need the time: it is a finding
from 75 % on, without a gain.

Small operations: batches have at most 8 samples, and forward, backward and optimizer take less than
150 us per tensor of the model in the fastest tenth of the steps, about the cost of calling the
operations. There is no gain: the largest possible batch is not known.
"""

from __future__ import annotations

import itertools
from statistics import median, quantiles
from typing import TYPE_CHECKING

from cirron.verdict.facts import CROWDED
from cirron.verdict.findings import Abstained, Class, Finding, Prediction
from cirron.verdict.rules import BOOSTERS, MOST, STARVED, Judged, ms, percent, unclear
from cirron.verdict.whatif import replay

if TYPE_CHECKING:
    from cirron.verdict.facts import Facts, Step

KIND: Class = "host-bound"
NEEDED = "the work may be needed"
SHARE = 0.20
IN_SCOPE = 0.5
HICCUP = 3.0
PASSES, BETWEEN_PASSES = "between forward and forward", 0.75
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
    if why := unclear(facts):
        return Abstained(KIND, why)
    return (
        in_outer_scope(facts)
        or between_steps(facts)
        or in_unknown_parts(facts)
        or in_inner_scope(facts)
        or in_no_phase(facts)
        or in_small_calls(facts)
    )


def perhaps_needed(share: float, summary: str, evidence: str, advice: str, blames: str) -> Finding:
    return Finding(KIND, summary, share, None, NEEDED, [evidence], advice, blames)


def in_outer_scope(facts: Facts) -> Judged:
    name, ns = max(facts.outside.items(), key=lambda one: one[1], default=("", 0))
    if ns < max(SHARE * facts.window_ns, facts.account.get("between steps", 0)):
        return None
    share = ns / facts.window_ns
    what, advice = f"{name} takes", f"do {name} less often, or asynchronously"
    if name == OUTSIDE:
        what = "forward passes that no backward pass follows take"
        advice = "if they are an evaluation: do it less often, on less data, or in larger batches"
    summary = f"{what} {percent(share)} of the time, between the steps"
    evidence = f"it takes {ms(ns)} beside {len(facts.steps)} steps, and contains none"
    return perhaps_needed(share, summary, evidence, advice, name)


def between_steps(facts: Facts) -> Judged:
    ns = min(facts.account.get("between steps", 0), facts.window_ns - facts.device_ns)
    share = ns / facts.window_ns
    if share < SHARE:
        return None
    if share < MOST and facts.is_starved(ns):
        return Abstained(KIND, STARVED)
    pairs = enumerate(itertools.pairwise(facts.steps), 1)
    gaps = {at: step.start - before.start - before.wall for at, (before, step) in pairs}
    at_starts = sum(gaps[at] for at in facts.first_of_epochs)
    where, hint = BETWEEN[facts.framework in BOOSTERS][at_starts > sum(gaps.values()) / 2]
    return perhaps_needed(
        share,
        f"the time is between the {where}",
        f"{percent(share)} of the time is between {where}, and nothing was recorded there",
        f'to find it, wrap the code there in `with ci.scope("name"):`{hint}',
        "between steps",
    )


def in_unknown_parts(facts: Facts) -> Judged:
    if any(step.forward is not None for step in facts.steps):
        return None
    return Abstained(KIND, "no phases were recorded, so the parts of a step are not known")


def in_inner_scope(facts: Facts) -> Judged:
    usual = {
        name: ns for name, (count, ns) in facts.scopes.items() if 2 * count >= len(facts.steps)
    }
    name, ns = max(usual.items(), key=lambda one: one[1], default=("", 0))
    share = ns / facts.window_ns
    if share < IN_SCOPE or facts.is_on_gpu:
        return None
    return perhaps_needed(
        share,
        f"{name} takes {percent(share)} of the time, in the steps",
        f"the scope {name} takes {ms(ns / len(facts.steps))} per step, outside the phases",
        f"make {name} faster, or do it less often; if it prepares data, let the workers of a"
        " loader do it",
        name,
    )


def in_no_phase(facts: Facts) -> Judged:
    own = [step.own for step in facts.steps]
    usual = median(own)
    share = sum(min(one, HICCUP * usual) for one in own) / facts.window_ns
    least = TRAINER_NS if facts.framework in TRAINERS else 0
    if share < SHARE or quantiles(own, n=10)[0] < least:
        return None
    busy = facts.device_share if facts.is_on_gpu else 0.0
    if busy is None:
        return Abstained(KIND, "the device's time was not measured, and Python may wait for it")
    if busy >= GPU_BUSY:
        return Abstained(KIND, f"kernels fill {percent(busy)} of a step: the device is busy")
    summary = "Python code in the steps takes the time"
    each = f"{ms(usual)} per step (median)"
    evidence = [f"{percent(share)} of the time is in steps, in no phase: {each}"]
    where, ns = facts.gap
    prediction = replay(
        facts,
        lambda step: (
            step.wall - max(min(step.own, HICCUP * usual) - max(LEFT * phases_of(step), least), 0.0)
        ),
    )
    if ns > facts.account["in no phase"] / 2:
        evidence.append(f"most of it is {where}")
        if where == PASSES and share < BETWEEN_PASSES:
            return Abstained(KIND, f"{evidence[0]}, {where}, where {NEEDED}")
        if where == PASSES:
            prediction = Prediction(None, NEEDED)
    causes = COMPUTING
    loading = facts.account.get("data_load", 0) / facts.window_ns
    if facts.is_on_gpu:
        summary = "the GPU waits for the host"
        evidence.append(f"kernels fill {percent(busy)} of a step (median): the device waits")
        causes += ", copies to and from the device (pin_memory, non_blocking)"
    elif (facts.asleep_share or 0.0) - loading >= share / 2:
        evidence.append("the thread sleeps for most of it: it waits instead of computing")
        causes = WAITING
    size = len(own) // 4
    levels = [median(own[at : at + size]) for at in range(0, 4 * size, size)]
    is_growing = levels == sorted(levels) and levels[-1] > GROWTH * levels[0]
    if is_growing and (facts.starved_share or 0.0) < CROWDED:
        evidence.append(f"it grows from {ms(levels[0])} (first quarter) to {ms(levels[-1])} (last)")
        causes = GROWING
    if not any(step.data_load is not None for step in facts.steps):
        causes += "; if batches are loaded there: for batch in ci.batches(loader)"
    advice = (
        f'to find it, wrap parts of the loop in `with ci.scope("name"):`; usual causes: {causes}'
    )
    return Finding(KIND, summary, share, *prediction, evidence, advice, "in no phase")


def phases_of(step: Step) -> int:
    return sum(one or 0 for one in (step.forward, step.backward, step.optimizer))


def in_small_calls(facts: Facts) -> Judged:
    size, tensors = facts.loader.get("batch_size"), facts.model.get("tensors")
    if not isinstance(tensors, int) or facts.model.get("compiled"):
        return None  # not known in many loops, and most of them are fine
    phases = [phases_of(step) for step in facts.steps]
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
