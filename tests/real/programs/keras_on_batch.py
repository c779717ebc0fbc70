# shape: Keras GANs and agents: train_on_batch, test_on_batch, predict_on_batch in a loop
# env: KERAS_BACKEND=torch
import keras
import numpy as np
import torch
from common import Counts, digest, result

counts = Counts()
torch.set_num_threads(1)
keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
model = keras.Sequential(
    [keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)]
)
model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
losses = []
for epoch in range(2):
    for _ in range(3):
        x = rng.normal(size=(8, 8)).astype("float32")
        losses.append(float(model.train_on_batch(x, x[:, :1])))
        counts["batch"] += 1
        counts["optimizer_step"] += 1
    x = rng.normal(size=(8, 8)).astype("float32")
    losses.append(float(model.test_on_batch(x, x[:, :1])))
    counts["evaluation"] += 1
    predicted = model.predict_on_batch(x)
    counts["prediction"] += 1
result(counts, losses=losses, weights=digest(predicted, *model.get_weights()))
