"""numerics: the training is numerically sick.

A loss is NaN or infinite; or it spikes to 20 times the median of the 50 values before; or it ends
at 20 times its starting value; or snapshots report tensors as sick (NaN, dead, exploding,
vanishing). There is no gain.
"""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

from cirron.verdict.findings import Abstained, Class, Finding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cirron.verdict.facts import Facts, Value
    from cirron.verdict.rules import Judged

KIND: Class = "numerics"
PAST = 50
SPIKE = 20.0
NEW = 2.0
FIRST = 5  # values whose median is the start, or the end, of a loss
# A term of a loss may grow, such as the KL divergence of a VAE. The whole loss must not.
WHOLE = ("loss", "train_loss", "training_loss")
MAX_NAMES = 5
SMALL = {"dead", "vanishing"}  # a smaller learning rate does not help these


def judge(facts: Facts) -> Judged:
    losses = {name: values for name, values in facts.values.items() if "loss" in name.lower()}
    if not losses and not facts.sick:
        return Abstained(KIND, "no loss was marked and no snapshots were taken")
    evidence = []
    for name, values in losses.items():
        bad = next((one for one in values if not math.isfinite(one.value)), None)
        if bad is not None:
            evidence.append(f"{name} is {bad.value} from {place(bad)} on")
        elif (spike := spike_of(values)) is not None:
            evidence.append(f"{name} jumps to {spike.value:.4g} at {place(spike)}")
        elif name.lower().rpartition("/")[2] in WHOLE and (growth := growth_of(values)) > SPIKE:
            evidence.append(f"{name} ends at {growth:.3g} times its starting value")
    if facts.sick:
        tensors: dict[str, str] = {}
        for tensor, epoch, what in facts.sick:
            tensors.setdefault(tensor, f"{tensor} (epoch {epoch}: {what})")
        named = list(tensors.values())
        more = f" and {len(named) - MAX_NAMES} more" if len(named) > MAX_NAMES else ""
        evidence.append("sick tensors: " + ", ".join(named[:MAX_NAMES]) + more)
    if not evidence:
        return None
    first = "lower the learning rate, clip gradients, check the first bad batch"
    if "float16" in (facts.model.get("autocast"), facts.model.get("dtype")):
        first = (
            f"use bfloat16, or scale the loss (GradScaler): float16 overflows at 65,504; {first}"
        )
    if facts.sick and len(evidence) == 1 and {what for *_, what in facts.sick} <= SMALL:
        first = "check activations, initialization, and what is detached from the loss"
    if facts.sick:
        advice = f"{first}; cirron tensors shows the history of these layers"
    else:
        advice = f"{first}; ci.watch(model) records weights and gradients, and names sick layers"
    summary = "the training is numerically sick"
    return Finding(KIND, summary, None, None, "", evidence, advice, is_urgent=True)


def spike_of(values: Sequence[Value]) -> Value | None:
    """The first value far above those before it, and above the starting value.

    A loss that crosses 0 has no spikes. The losses of a GAN's two parts alternate and may be far
    apart, so a value is no spike if one of those before it was half as large.
    """
    began = median(one.value for one in values[:FIRST]) if values else 0.0
    for number in range(PAST, len(values)):
        before = [one.value for one in values[number - PAST : number]]
        usual = median(before)
        least = max(SPIKE * usual, NEW * max(before), began)
        if min(before) > 0 and values[number].value > least:
            return values[number]
    return None


def growth_of(values: Sequence[Value]) -> float:
    """The last values of a loss as a multiple of the first; 0 if it crosses 0 or has few values."""
    every = [one.value for one in values]
    if len(every) < PAST or min(every) <= 0:
        return 0.0
    return median(every[-FIRST:]) / median(every[:FIRST])


def place(value: Value) -> str:
    """The position of a value in the training."""
    parts = [] if value.epoch is None else [f"epoch {value.epoch}"]
    parts += [] if value.step is None else [f"step {value.step}"]
    return ", ".join(parts) or "the run"
