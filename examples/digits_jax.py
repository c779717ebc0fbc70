"""Classifies handwritten digits with JAX and optax: you write the loss, the state knows the rest.

python examples/digits_jax.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import ciclo
import cirron as ci
from ciclo import managed


def forward(params, x):
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


class Classifier(ciclo.ManagedState):
    @managed.train_step
    def train_step(self, batch):
        x, y = batch
        logits = forward(self.params, x)
        logs = ciclo.logs()
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        logs.add_loss("loss", managed.mean(loss))
        return logs, self

    @managed.step
    def test_step(self, batch):
        x, y = batch
        logs = ciclo.logs()
        logs.add_metric("accuracy", managed.mean(forward(self.params, x).argmax(-1) == y))
        return logs


ci.profile()
digits = load_digits()
images = (digits.data / 16).astype("float32")
order = np.random.default_rng(0).permutation(1792).reshape(-1, 32)
batches = [(images[rows], digits.target[rows]) for rows in order]
first, second = jax.random.split(jax.random.key(0))
params = {
    "w1": jax.random.normal(first, (64, 16)) / 8,
    "b1": jnp.zeros(16),
    "w2": jax.random.normal(second, (16, 10)) / 4,
    "b2": jnp.zeros(10),
}
state = Classifier.create(params=params, tx=optax.sgd(0.5), strategy="jit_donate")
_, history, _ = ciclo.fit(state, batches[:44], batches[44:], epochs=15)
print(f"accuracy {history.last('accuracy_valid'):.3f}")
