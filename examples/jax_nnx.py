"""A Flax NNX model, which is an object: watched once, read at the end of each epoch."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import cirron as ci


class Model(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(8, 32, rngs=rngs)
        self.head = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.tanh(self.hidden(x)))


@nnx.jit
def train_step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def main() -> None:
    ci.profile()
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    ci.watch(model)
    random = np.random.default_rng(0)

    for _ in ci.epochs(range(3)):
        for _ in ci.batches(range(20)):
            x = random.normal(size=(64, 8)).astype(np.float32)
            loss = train_step(model, optimizer, x, x.sum(axis=1, keepdims=True))
            ci.mark("loss", loss)

    ci.trace(name="epoch", last=3)
    ci.shutdown()


if __name__ == "__main__":
    main()
