"""Classifies handwritten digits in plain Python, without an array library.

python examples/digits_plain.py
"""

import random
from math import exp, log
from operator import mul

from sklearn.datasets import load_digits

import ciclo
import cirron as ci


def layer(rng, inputs, outputs):
    return [[rng.gauss(0, inputs**-0.5) for _ in range(inputs)] + [0.0] for _ in range(outputs)]


def forward(state, pixels):
    hidden = [max(0.0, sum(map(mul, w, pixels)) + w[-1]) for w in state[0]]
    scores = [sum(map(mul, w, hidden)) + w[-1] for w in state[1]]
    exps = [exp(score - max(scores)) for score in scores]
    return hidden, [value / sum(exps) for value in exps]


def train_step(state, batch):
    loss, gradients = 0.0, [[[0.0] * len(row) for row in weights] for weights in state]
    for pixels, digit in batch:
        hidden, chances = forward(state, pixels)
        loss -= log(chances[digit]) / len(batch)
        errors = [chance - (i == digit) for i, chance in enumerate(chances)]
        back = [sum(map(mul, errors, column)) for column in zip(*state[1], strict=True)]
        inner = [error if value > 0 else 0.0 for error, value in zip(back, hidden, strict=False)]
        for rows, errs, given in ((gradients[1], errors, hidden), (gradients[0], inner, pixels)):
            for row, error in zip(rows, errs, strict=True):
                if error:
                    row[:] = [g + error * x for g, x in zip(row, [*given, 1.0], strict=True)]
    for weights, slopes in zip(state, gradients, strict=True):
        for row, slope in zip(weights, slopes, strict=True):
            row[:] = [w - 0.5 / len(batch) * g for w, g in zip(row, slope, strict=True)]
    return {"losses": {"loss": loss}}, state


def test_step(state, batch):
    chances = [(forward(state, pixels)[1], digit) for pixels, digit in batch]
    right = sum(chance[digit] == max(chance) for chance, digit in chances)
    return {"metrics": {"accuracy": right / len(batch)}}


ci.profile()
digits = load_digits()
rows = list(zip((digits.data / 16).tolist(), digits.target.tolist(), strict=True))
(rng := random.Random(0)).shuffle(rows)
batches = [rows[i : i + 32] for i in range(0, 1792, 32)]
state = [layer(rng, 64, 16), layer(rng, 16, 10)]
steps = {"train_step": train_step, "test_step": test_step}
_, history, _ = ciclo.fit(state, batches[:44], batches[44:], epochs=15, **steps)
print(f"accuracy {history.last('accuracy_valid'):.3f}")
