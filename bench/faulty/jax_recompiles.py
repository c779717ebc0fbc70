"""A jitted step meets a new shape every four steps. Mended: padded to one."""

import jax
import jax.numpy as jnp
from common import IS_FIXED, Loop

import cirron as ci

WIDTH = 512


@jax.jit
def step(weights: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss_of(weights: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(jnp.tanh(inputs @ weights) @ weights) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    return weights - 0.1 * gradient, loss


if __name__ == "__main__":
    weights = jnp.eye(WIDTH)
    largest = jnp.ones((128, WIDTH))
    loop = Loop()
    for _ in ci.epochs(range(1)):
        for number in ci.batches(range(80)):
            with loop.step():
                size = 128 if IS_FIXED else 108 + number // 4
                weights, loss = step(weights, largest[:size])
                ci.mark("loss", loss)
                loss.block_until_ready()
    loop.end()
