# shape: tensorflow tutorials: tf.data, a subclassed model, fit with validation_data
# env: KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3
# heavy
import keras
import numpy as np
import tensorflow as tf
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


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(16, activation="relu")
        self.head = keras.layers.Dense(1)

    def call(self, x):
        return self.head(self.hidden(x))


tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.experimental.enable_op_determinism()
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
y = x.sum(1, keepdims=True)
train = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(32, seed=0).batch(8).prefetch(2)
test = tf.data.Dataset.from_tensor_slices((x[:16], y[:16])).batch(8)
model = Net()
model.compile(optimizer="adam", loss="mse", metrics=["mae"])
history = model.fit(train, epochs=2, validation_data=test, callbacks=[Count()], verbose=0)
result(counts, history=history.history, weights=digest(*model.get_weights()))
