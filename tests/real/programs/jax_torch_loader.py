# shape: JAX tutorial with PyTorch data loading: a DataLoader that gives numpy, @jit update
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import torch
from common import Counts, digest, points, result
from jax import grad, jit, vmap
from jax.scipy.special import logsumexp
from torch.utils.data import DataLoader, default_collate

counts = Counts()


def numpy_collate(batch):
    return jax.tree.map(np.asarray, default_collate(batch))


class NumpyLoader(DataLoader):
    def __init__(self, dataset, batch_size=1, shuffle=False):
        super().__init__(dataset, batch_size, shuffle, collate_fn=numpy_collate)


def init_network_params(sizes):
    rng = np.random.default_rng(0)
    return [(rng.normal(0, 0.1, (n, m)), np.zeros(n)) for m, n in pairwise(sizes)]


def predict(params, image):
    activations = image
    for w, b in params[:-1]:
        activations = jax.nn.relu(jnp.dot(w, activations) + b)
    final_w, final_b = params[-1]
    logits = jnp.dot(final_w, activations) + final_b
    return logits - logsumexp(logits)


batched_predict = vmap(predict, in_axes=(None, 0))


@jit
def correct(params, images, labels):
    return jnp.sum(jnp.argmax(batched_predict(params, images), axis=1) == labels)


def loss(params, images, targets):
    return -jnp.mean(batched_predict(params, images) * targets)


@jit
def update(params, x, y):
    grads = grad(loss)(params, x, jax.nn.one_hot(y, 4))
    return [(w - 0.1 * dw, b - 0.1 * db) for (w, b), (dw, db) in zip(params, grads, strict=True)]


torch.manual_seed(0)
torch.set_num_threads(1)
params = init_network_params([8, 16, 4])
training_generator = NumpyLoader(points(32), batch_size=8, shuffle=True)
test_generator = NumpyLoader(points(16, seed=1), batch_size=8)
scores = []
for epoch in range(2):
    for x, y in training_generator:
        counts["data_load"] += 1
        params = update(params, x, y)
    score = 0
    for x, y in test_generator:
        counts["data_load"] += 1
        score += int(correct(params, x, y))
    scores.append(score)
result(counts, scores=scores, weights=digest(*jax.tree.leaves(params)))
