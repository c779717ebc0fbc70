# shape: keras.io on torch: Sequential, fit with validation_data, EarlyStopping, evaluate
# env: KERAS_BACKEND=torch
import keras
import numpy as np
import torch
from common import Counts, digest, result

counts = Counts()


class Count(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        counts["epoch"] += 1

    def on_train_batch_begin(self, batch, logs=None):
        counts["batch"] += 1

    def on_test_begin(self, logs=None):
        counts["evaluation"] += 1

    def on_test_batch_begin(self, batch, logs=None):
        counts["batch"] += 1


torch.set_num_threads(1)
keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
x = rng.normal(size=(40, 8)).astype("float32")
y = x.sum(1, keepdims=True)
model = keras.Sequential(
    [
        keras.Input((8,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(1),
    ]
)
model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
stop = keras.callbacks.EarlyStopping("val_loss", min_delta=1e6, patience=1)
history = model.fit(
    x[:24],
    y[:24],
    batch_size=8,
    epochs=5,
    validation_data=(x[24:], y[24:]),
    validation_batch_size=8,
    callbacks=[Count(), stop],
    verbose=0,
)
scores = model.evaluate(x[24:], y[24:], batch_size=8, verbose=0, callbacks=[Count()])
result(counts, history=history.history, scores=scores, weights=digest(*model.get_weights()))
