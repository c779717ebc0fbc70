# shape: keras.io on torch: an own loop after model.evaluate(), which leaves the module in eval mode
# env: KERAS_BACKEND=torch
import keras
import numpy as np
import torch
from common import Counts, digest, result

counts = Counts()
torch.set_num_threads(1)
keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
x = rng.normal(size=(16, 8)).astype("float32")
y = (x.sum(1) > 0).astype("int32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("sgd", loss_fn)
optimizer = keras.optimizers.Adam(0.01)
data = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
loader = torch.utils.data.DataLoader(data, batch_size=8)

model.evaluate(x, y, batch_size=8, verbose=0)
counts["evaluation"] += 1
counts["batch"] += 2
for _ in range(2):
    counts["epoch"] += 1
    for inputs, targets in loader:
        counts["step"] += 1
        loss = loss_fn(targets, model(inputs, training=True))
        model.zero_grad()
        loss.backward()
        weights = model.trainable_weights
        with torch.no_grad():
            optimizer.apply([one.value.grad for one in weights], weights)
    counts["evaluation"] += 1
    with torch.no_grad():
        for inputs, _targets in loader:
            counts["batch"] += 1
            model(inputs, training=False)
score = model.test_on_batch(x, y)
counts["evaluation"] += 1
result(counts, score=float(score), weights=digest(*model.get_weights()))
