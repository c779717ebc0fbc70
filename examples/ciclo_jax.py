"""Trains a classifier with JAX: a jitted step with a donated state, evaluation, schedules.

python examples/ciclo_jax.py
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ciclo


class State(NamedTuple):
    w: jax.Array
    b: jax.Array


def logits(state, x):
    return x @ state.w + state.b


def metrics(state, batch):
    log_p = jax.nn.log_softmax(logits(state, batch["x"]))
    loss = -jnp.mean(jnp.take_along_axis(log_p, batch["y"][:, None], -1))
    accuracy = jnp.mean(jnp.argmax(log_p, -1) == batch["y"])
    return loss, {"loss": loss, "accuracy": accuracy}


@partial(jax.jit, donate_argnums=0)
def train_step(state, batch):
    grads, logged = jax.grad(metrics, has_aux=True)(state, batch)
    state = jax.tree.map(lambda value, grad: value - 0.5 * grad, state, grads)
    return {"metrics": logged}, state


@jax.jit
def test_step(state, batch):
    return {"metrics": metrics(state, batch)[1]}


def dataset(seed, count):
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        x = random.normal(size=(64, 8)).astype("float32")
        made.append({"x": x, "y": np.argmax(x[:, :3], -1)})
    return made


def main():
    _, history, elapsed = ciclo.fit(
        State(jnp.zeros((8, 3)), jnp.zeros(3)),
        dataset(0, 50),
        dataset(1, 10),
        epochs=5,
        train_step=train_step,
        test_step=test_step,
        callbacks=[
            ciclo.keras_bar(),
            ciclo.early_stopping("loss_valid", looks=3, restore_best_weights=True),
            {ciclo.every(samples=5000): lambda elapsed: print(f"\n{elapsed.samples} samples")},
        ],
    )
    print(elapsed)
    print("accuracy by epoch:", [f"{value:.3f}" for value in history.collect("accuracy_valid")])


if __name__ == "__main__":
    main()
