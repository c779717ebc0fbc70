"""Classifies handwritten digits with modules of Haiku.

python examples/digits_haiku.py
"""

import haiku as hk
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import ciclo
import cirron as ci


def classifier(x):
    return hk.nets.MLP([16, 10])(x)


def accuracy(logits, labels):
    return logits.argmax(-1) == labels


ci.profile()
digits = load_digits()
images = (digits.data / 16).astype("float32")
order = np.random.default_rng(0).permutation(1792).reshape(-1, 32)
batches = [(images[rows], digits.target[rows]) for rows in order]
state = ciclo.create_haiku_state(
    classifier,
    jnp.zeros((1, 64)),
    optax.sgd(0.5),
    losses=optax.softmax_cross_entropy_with_integer_labels,
    metrics=accuracy,
    strategy="jit_donate",
)
_, history, _ = ciclo.fit(state, batches[:44], batches[44:], epochs=15)
print(f"accuracy {history.last('accuracy_valid'):.3f}")
