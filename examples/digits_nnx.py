"""Classifies handwritten digits with a module of Flax NNX.

python examples/digits_nnx.py
"""

import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import ciclo
import cirron as ci


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 16, rngs=rngs)
        self.out = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def accuracy(logits, labels):
    return logits.argmax(-1) == labels


ci.profile()
digits = load_digits()
images = (digits.data / 16).astype("float32")
order = np.random.default_rng(0).permutation(1792).reshape(-1, 32)
batches = [(images[rows], digits.target[rows]) for rows in order]
state = ciclo.create_nnx_state(
    Classifier(nnx.Rngs(0)),
    optax.sgd(0.5),
    losses=optax.softmax_cross_entropy_with_integer_labels,
    metrics=accuracy,
    strategy="jit_donate",
)
_, history, _ = ciclo.fit(state, batches[:44], batches[44:], epochs=15)
print(f"accuracy {history.last('accuracy_valid'):.3f}")
