# shape: Equinox train_rnn.py: filter_jit make_step, optax, a dataloader that is a generator
from itertools import islice

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jrandom
import numpy as np
import optax
from common import Counts, digest, result


def dataloader(arrays, batch_size):
    rng = np.random.default_rng(0)
    while True:
        perm = rng.permutation(len(arrays[0]))
        for start in range(0, len(perm), batch_size):
            yield tuple(array[perm[start : start + batch_size]] for array in arrays)


class RNN(eqx.Module):
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear

    def __init__(self, key):
        one, other = jrandom.split(key)
        self.cell = eqx.nn.GRUCell(2, 8, key=one)
        self.linear = eqx.nn.Linear(8, 1, key=other)

    def __call__(self, inputs):
        def f(carry, x):
            return self.cell(x, carry), None

        out, _ = jax.lax.scan(f, jnp.zeros(8), inputs)
        return jax.nn.sigmoid(self.linear(out))[0]


@eqx.filter_value_and_grad
def compute_loss(model, x, y):
    pred_y = jax.vmap(model)(x)
    return -jnp.mean(y * jnp.log(pred_y) + (1 - y) * jnp.log(1 - pred_y))


optim = optax.adam(1e-2)


@eqx.filter_jit
def make_step(model, x, y, opt_state):
    loss, grads = compute_loss(model, x, y)
    updates, opt_state = optim.update(grads, opt_state)
    return loss, eqx.apply_updates(model, updates), opt_state


xs = np.random.default_rng(1).normal(size=(32, 5, 2)).astype("float32")
ys = (xs.sum((1, 2)) > 0).astype("float32")
model = RNN(jrandom.PRNGKey(0))
opt_state = optim.init(eqx.filter(model, eqx.is_array))
losses = []
for x, y in islice(dataloader((xs, ys), 8), 8):
    loss, model, opt_state = make_step(model, x, y, opt_state)
    losses.append(loss.item())
accuracy = float(jnp.mean((jax.vmap(model)(xs) > 0.5) == ys))
weights = jax.tree.leaves(eqx.filter(model, eqx.is_array))
result(Counts(), losses=losses, accuracy=accuracy, weights=digest(*weights))
