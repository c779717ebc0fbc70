"""Classifies handwritten digits in a run that is killed in the middle, and goes on.

python examples/digits_resume.py    starts itself until it has finished
"""

import os
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import ciclo
import cirron as ci

SECOND = os.path.exists("digits-run")


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(16)(x)))


def be_killed(elapsed):
    if not SECOND and elapsed.steps == 400:
        os.kill(os.getpid(), signal.SIGKILL)


def train():
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
        metrics={"accuracy": lambda logits, labels: logits.argmax(-1) == labels},
    )
    saved = ciclo.checkpoint("digits-run", monitor="accuracy_valid", mode="max")
    callbacks = [saved, {ciclo.every(1): be_killed}]
    options = {"callbacks": callbacks, "resume": "digits-run"}
    _, history, elapsed = ciclo.fit(state, batches[:44], batches[44:], epochs=15, **options)
    print(f"{elapsed.steps} steps, {len(history.collect('loss'))} of them in the history")
    print(f"accuracy {history.last('accuracy_valid'):.3f}")


if "train" in sys.argv:
    train()
else:
    while code := subprocess.run([sys.executable, __file__, "train"], check=False).returncode:
        print("killed" if code == -signal.SIGKILL else sys.exit(code), flush=True)
