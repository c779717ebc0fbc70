# shape: Flax NNX tutorial: nnx.jit train_step and eval_step, nnx.Optimizer, MultiMetric
import jax
import numpy as np
import optax
from common import Counts, digest, result
from flax import nnx


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.linear1 = nnx.Linear(8, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.linear2 = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.linear2(nnx.relu(self.dropout(self.linear1(x))))


def loss_fn(model, batch):
    logits = model(batch["image"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, logits


@nnx.jit
def train_step(model, optimizer, metrics, batch):
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


@nnx.jit
def eval_step(model, metrics, batch):
    loss, logits = loss_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])


def batches(seed):
    rng = np.random.default_rng(seed)
    for _ in range(4):
        image = rng.normal(size=(8, 8)).astype("float32")
        yield {"image": image, "label": np.abs(image[:, :4]).argmax(1)}


model = MLP(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(5e-3, 0.9), wrt=nnx.Param)
metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
history = []
for epoch in range(2):
    model.train()
    for batch in batches(epoch):
        train_step(model, optimizer, metrics, batch)
    history.append({name: float(value) for name, value in metrics.compute().items()})
    metrics.reset()
    model.eval()
    for batch in batches(9):
        eval_step(model, metrics, batch)
    history.append({name: float(value) for name, value in metrics.compute().items()})
    metrics.reset()
weights = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
result(Counts(), history=history, weights=digest(*weights))
