"""Classifies handwritten digits with a module of Equinox.

python examples/digits_equinox.py
"""

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import ciclo
import cirron as ci


def accuracy(logits, labels):
    return logits.argmax(-1) == labels


ci.profile()
digits = load_digits()
images = (digits.data / 16).astype("float32")
order = np.random.default_rng(0).permutation(1792).reshape(-1, 32)
batches = [(images[rows], digits.target[rows]) for rows in order]
state = ciclo.create_equinox_state(
    eqx.nn.MLP(64, 10, width_size=16, depth=1, key=jax.random.key(0)),
    optax.sgd(0.5),
    losses=optax.softmax_cross_entropy_with_integer_labels,
    metrics=accuracy,
    strategy="jit_donate",
)
_, history, _ = ciclo.fit(state, batches[:44], batches[44:], epochs=15)
print(f"accuracy {history.last('accuracy_valid'):.3f}")
