"""A JAX loop over a generator that waits for each batch. Mended: so many at once, in threads."""

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
from common import IS_FIXED, WORKERS, Loop

import cirron as ci

WIDTH, STEPS, SECONDS = 384, 150, 0.02


@jax.jit
def step(weights: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss_of(weights: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(jnp.tanh(inputs @ weights) @ weights) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    return weights - 0.1 * gradient, loss


def read(number: int) -> jax.Array:
    time.sleep(SECONDS)
    return jnp.full((128, WIDTH), number / STEPS)


def batches() -> Iterable[jax.Array]:
    if IS_FIXED:
        return ThreadPoolExecutor(WORKERS).map(read, range(STEPS))
    return map(read, range(STEPS))


if __name__ == "__main__":
    weights = jnp.eye(WIDTH)
    loop = Loop()
    for batch in ci.batches(batches()):
        with loop.step():
            weights, loss = step(weights, batch)
            ci.mark("loss", loss)
            loss.block_until_ready()
    loop.end()
