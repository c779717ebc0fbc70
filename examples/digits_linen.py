"""Classifies handwritten digits with a module of Flax linen.

python examples/digits_linen.py
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import ciclo
import cirron as ci


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16)(x))
        return nn.Dense(10)(x)


def accuracy(logits, labels):
    return logits.argmax(-1) == labels


ci.profile()
digits = load_digits()
images = (digits.data / 16).astype("float32")
order = np.random.default_rng(0).permutation(1792).reshape(-1, 32)
batches = [(images[rows], digits.target[rows]) for rows in order]
state = ciclo.create_flax_state(
    Classifier(),
    jnp.zeros((1, 64)),
    optax.sgd(0.5),
    losses=optax.softmax_cross_entropy_with_integer_labels,
    metrics=accuracy,
    strategy="jit_donate",
)
_, history, _ = ciclo.fit(state, batches[:44], batches[44:], epochs=15)
print(f"accuracy {history.last('accuracy_valid'):.3f}")
