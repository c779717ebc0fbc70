"""numerics: the training is numerically sick.

A loss is NaN or infinite; or it spikes to 20 times the median of the 50 values before; or it ends
at 20 times its starting value; or snapshots report tensors as sick (NaN, dead, exploding,
vanishing); or gradients vanish from layer to layer. There is no gain.
"""

from __future__ import annotations

import itertools
import math
from statistics import median
from typing import TYPE_CHECKING

from cirron.verdict.findings import Abstained, Class, Finding

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
# Gradients vanish if the smallest is this part of the largest, and no two neighbours in between are
# further apart. A single gap is between parts of a model that learn different things.
VANISHED, NEIGHBOUR = 1e-6, 1 / 30


def judge(facts: Facts) -> Judged:
    losses = {name: values for name, values in facts.values.items() if "loss" in name.lower()}
    if not losses and not facts.sick and not facts.gradients:
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
    losses_are_sick = bool(evidence)
    if facts.sick:
        tensors: dict[str, str] = {}
        for tensor, epoch, what in facts.sick:
            tensors.setdefault(tensor, f"{tensor} (epoch {epoch}: {what})")
        named = list(tensors.values())
        more = f" and {len(named) - MAX_NAMES} more" if len(named) > MAX_NAMES else ""
        evidence.append("sick tensors: " + ", ".join(named[:MAX_NAMES]) + more)
    shrunk = [found for one in facts.gradients.values() if (found := shrunk_of(one))]
    if len(shrunk) > 1:  # in the first epoch and in the last
        evidence.append(shrunk[-1])
    if not evidence:
        return None
    first = "lower the learning rate, clip gradients, check the first bad batch"
    if "float16" in (facts.model.get("autocast"), facts.model.get("dtype")):
        first = (
            f"use bfloat16, or scale the loss (GradScaler): float16 overflows at 65,504; {first}"
        )
    if not losses_are_sick and {what for *_, what in facts.sick} <= SMALL:
        first = "check activations, initialization, and what is detached from the loss"
    if facts.sick or shrunk:
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


def shrunk_of(gradients: Mapping[str, float]) -> str:
    """How gradients vanish from layer to layer; empty if they do not.

    A bias before a normalization has no gradient but rounding errors, so biases are left out.
    """
    sizes = sorted((size, name) for name, size in gradients.items() if size and "bias" not in name)
    if not sizes or sizes[0][0] > VANISHED * sizes[-1][0]:
        return ""
    if any(one < NEIGHBOUR * other for (one, _), (other, _) in itertools.pairwise(sizes)):
        return ""
    (least, last), (most, first) = sizes[0], sizes[-1]
    return f"gradients vanish: {most:.2g} in {first}, {least:.2g} in {last} (root mean squares)"


def place(value: Value) -> str:
    """The position of a value in the training."""
    parts = [] if value.epoch is None else [f"epoch {value.epoch}"]
    parts += [] if value.step is None else [f"step {value.step}"]
    return ", ".join(parts) or "the run"
