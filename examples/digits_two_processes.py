"""Classifies handwritten digits in two processes of JAX, each with half of every batch.

python examples/digits_two_processes.py    starts both, on this machine

On several machines each runs the same program with its own number: all that is changed is the
address in `jax.distributed.initialize`, which a cluster's scheduler gives by itself.
"""

import socket
import subprocess
import sys

import jax
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


def train(address, rank):
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    ci.profile()
    digits = load_digits()
    images = (digits.data / 16).astype("float32")
    order = np.random.default_rng(0).permutation(1792).reshape(-1, 32)
    batches = [(images[rows], digits.target[rows]) for rows in order[:, rank::2]]
    state = ciclo.create_nnx_state(
        Classifier(nnx.Rngs(0)),
        optax.sgd(0.5),
        losses=optax.softmax_cross_entropy_with_integer_labels,
        metrics={"accuracy": lambda logits, labels: logits.argmax(-1) == labels},
        strategy="data_parallel_donate",
    )
    _, history, _ = ciclo.fit(state, batches[:44], batches[44:], epochs=15)
    if rank == 0:
        print(f"accuracy {history.last('accuracy_valid'):.3f}")


if len(sys.argv) == 3:
    train(sys.argv[1], int(sys.argv[2]))
else:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    started = [subprocess.Popen([sys.executable, __file__, address, rank]) for rank in "01"]
    sys.exit(max(process.wait() for process in started))
