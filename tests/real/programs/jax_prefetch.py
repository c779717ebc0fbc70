# shape: JAX research code: a torch DataLoader behind flax's prefetch to the device; optax
import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from common import Counts, digest, points, result
from torch.utils.data import DataLoader

counts = Counts()


def prefetch(iterator, size):
    queue = collections.deque()

    def enqueue(n):
        for data in itertools.islice(iterator, n):
            counts["data_load"] += 1
            counts["transfer"] += 1
            queue.append(jax.device_put(data))

    enqueue(size)
    while queue:
        yield queue.popleft()
        enqueue(1)


def collate(rows):
    x, y = zip(*rows, strict=True)
    return {"x": np.stack(x), "y": np.stack(y)}


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w1"])
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ params["w2"], batch["y"])
    return losses.mean()


tx = optax.adam(1e-2)


@jax.jit
def train_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


torch.manual_seed(0)
torch.set_num_threads(1)
rng = np.random.default_rng(0)
shapes = {"w1": (8, 16), "w2": (16, 4)}
params = {name: rng.normal(0, 0.1, shape).astype("float32") for name, shape in shapes.items()}
opt_state = tx.init(params)
loader = DataLoader(points(32), batch_size=8, shuffle=True, collate_fn=collate)
losses = []
for epoch in range(2):
    for batch in prefetch(iter(loader), 2):
        params, opt_state, loss = train_step(params, opt_state, batch)
        losses.append(loss)
losses, params = jax.device_get((losses, params))
counts["transfer"] += 1
losses = [float(one) for one in losses]
result(counts, losses=losses, weights=digest(*params.values()))
