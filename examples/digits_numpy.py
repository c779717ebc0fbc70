"""Classifies handwritten digits with NumPy.

python examples/digits_numpy.py
"""

import numpy as np
from sklearn.datasets import load_digits

import ciclo
import cirron as ci


def forward(state, x):
    hidden = np.maximum(x @ state["w1"] + state["b1"], 0)
    scores = hidden @ state["w2"] + state["b2"]
    exps = np.exp(scores - scores.max(1, keepdims=True))
    return hidden, exps / exps.sum(1, keepdims=True)


def train_step(state, batch):
    x, y = batch
    hidden, chances = forward(state, x)
    rows = np.arange(len(y))
    loss = -np.log(chances[rows, y]).mean()
    chances[rows, y] -= 1
    inner = chances @ state["w2"].T * (hidden > 0)
    slopes = {"w1": x.T @ inner, "b1": inner.sum(0), "w2": hidden.T @ chances, "b2": chances.sum(0)}
    state = {name: value - 0.5 / len(y) * slopes[name] for name, value in state.items()}
    return {"losses": {"loss": loss}}, state


def test_step(state, batch):
    x, y = batch
    return {"metrics": {"accuracy": (forward(state, x)[1].argmax(1) == y).mean()}}


ci.profile()
digits = load_digits()
rng = np.random.default_rng(0)
order = rng.permutation(1792).reshape(-1, 32)
batches = [(digits.data[rows] / 16, digits.target[rows]) for rows in order]
state = {
    "w1": rng.normal(0, 64**-0.5, (64, 16)),
    "b1": np.zeros(16),
    "w2": rng.normal(0, 16**-0.5, (16, 10)),
    "b2": np.zeros(10),
}
steps = {"train_step": train_step, "test_step": test_step}
_, history, _ = ciclo.fit(state, batches[:44], batches[44:], epochs=15, **steps)
print(f"accuracy {history.last('accuracy_valid'):.3f}")
