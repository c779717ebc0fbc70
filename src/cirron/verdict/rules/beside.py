"""evaluation-, checkpoint-, snapshot- and logging-heavy: work beside the training takes too long.

It is a finding if it takes 10 % of the window or more. The gain is that of doing it a tenth as
often.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cirron.verdict.findings import Abstained, Class, Finding
from cirron.verdict.rules import Judged, Rule, ms, percent, unclear
from cirron.verdict.whatif import without
from cirron.view.text import plural

if TYPE_CHECKING:
    from cirron.verdict.facts import Facts

SHARE = 0.10
LEFT = 0.1  # of its time remains if it is done a tenth as often
ADVICE: dict[Class, tuple[str, str, str]] = {
    "evaluation-heavy": (
        "evaluation",
        "evaluate a tenth as often",
        ", on less data, or in larger batches",
    ),
    "checkpoint-heavy": (
        "checkpoint",
        "save a tenth as often",
        ", or asynchronously",
    ),
    "snapshot-heavy": (
        "snapshot",
        "watch only a part of the model, or take snapshots less often",
        "",
    ),
    "logging-heavy": (
        "logging",
        "log a tenth as often",
        ", and avoid values that wait for the device",
    ),
}
# The option of each framework that sets how often.
LIGHTNING = {
    "evaluation": "val_check_interval, check_val_every_n_epoch",
    "checkpoint": "ModelCheckpoint's every_n_train_steps",
    "logging": "log_every_n_steps",
}
OPTIONS: dict[str, dict[str, str]] = {
    "transformers": {
        "evaluation": "eval_steps",
        "checkpoint": "save_steps",
        "logging": "logging_steps",
    },
    "lightning": LIGHTNING,
    "pytorch_lightning": LIGHTNING,
    "keras": {
        "evaluation": "validation_freq",
        "checkpoint": "ModelCheckpoint's save_freq",
        "logging": "TensorBoard's update_freq",
    },
}


def rule_of(kind: Class) -> Rule:
    part, advice, otherwise = ADVICE[kind]

    def judge(facts: Facts) -> Judged:
        # It may wait for the device to finish the steps before it.
        ns = min(facts.account.get(part, 0), facts.window_ns - facts.device_ns)
        if ns < SHARE * facts.window_ns:
            return None
        if why := unclear(facts):
            return Abstained(kind, why)
        share = ns / facts.window_ns
        count = facts.asides.get(part, 0)
        option = OPTIONS.get(facts.framework, {}).get(part)
        return Finding(
            kind,
            f"{part} takes {percent(share)} of the time",
            share,
            *without(facts, (1 - LEFT) * ns),
            [f"{plural(count, 'time')} in {len(facts.steps)} steps, {ms(ns / count)} each"],
            advice + (f" ({option})" if option else "") + otherwise,
            part,
        )

    return judge
