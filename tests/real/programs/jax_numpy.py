# shape: jax/examples mnist_classifier_fromscratch.py: numpy batches, the last one is smaller
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import numpy.random as npr
from common import Counts, digest, result
from jax import grad, jit
from jax.scipy.special import logsumexp


def init_random_params(scale, sizes, rng):
    return [(scale * rng.randn(m, n), scale * rng.randn(n)) for m, n in pairwise(sizes)]


def predict(params, inputs):
    activations = inputs
    for w, b in params[:-1]:
        activations = jnp.tanh(jnp.dot(activations, w) + b)
    final_w, final_b = params[-1]
    logits = jnp.dot(activations, final_w) + final_b
    return logits - logsumexp(logits, axis=1, keepdims=True)


def loss(params, batch):
    inputs, targets = batch
    return -jnp.mean(jnp.sum(predict(params, inputs) * targets, axis=1))


def accuracy(params, batch):
    inputs, targets = batch
    return jnp.mean(jnp.argmax(predict(params, inputs), axis=1) == jnp.argmax(targets, axis=1))


@jit
def update(params, batch):
    grads = grad(loss)(params, batch)
    return [(w - 0.1 * dw, b - 0.1 * db) for (w, b), (dw, db) in zip(params, grads, strict=True)]


rng = npr.RandomState(0)
images = rng.randn(40, 8).astype("float32")
labels = np.eye(4, dtype="float32")[np.abs(images[:, :4]).argmax(1)]
batch_size, num_batches = 16, 3


def data_stream():
    while True:
        perm = rng.permutation(len(images))
        for i in range(num_batches):
            batch_idx = perm[i * batch_size : (i + 1) * batch_size]
            yield images[batch_idx], labels[batch_idx]


batches = data_stream()
params = init_random_params(0.1, [8, 16, 4], rng)
scores = []
for epoch in range(3):
    for _ in range(num_batches):
        params = update(params, next(batches))
    scores.append(float(accuracy(params, (images, labels))))
result(Counts(), scores=scores, weights=digest(*(one for pair in params for one in pair)))
