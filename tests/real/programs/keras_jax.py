# shape: keras.io on JAX: functional model, fit with validation_split, predict
# env: KERAS_BACKEND=jax
import keras
import numpy as np
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

    def on_predict_begin(self, logs=None):
        counts["prediction"] += 1

    def on_predict_batch_begin(self, batch, logs=None):
        counts["batch"] += 1


keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
x = rng.normal(size=(32, 8)).astype("float32")
y = (x.sum(1) > 0).astype("int32")
inputs = keras.Input((8,))
hidden = keras.layers.Dense(16, activation="relu")(inputs)
outputs = keras.layers.Dense(2)(hidden)
model = keras.Model(inputs, outputs)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
history = model.fit(
    x, y, batch_size=8, epochs=2, validation_split=0.25, callbacks=[Count()], verbose=0
)
logits = model.predict(x, batch_size=16, callbacks=[Count()], verbose=0)
result(counts, history=history.history, weights=digest(logits, *model.get_weights()))
