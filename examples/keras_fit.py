"""Keras on any backend: one line, and every epoch, batch and validation is there."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # or torch, or tensorflow

import cirron as ci

ci.profile()

import keras  # noqa: E402
import numpy as np  # noqa: E402

rows = np.random.default_rng(0).random((256, 8))
target = rows.sum(axis=1, keepdims=True)

model = keras.Sequential([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
model.compile(optimizer="adam", loss="mse", metrics=["mae"])
model.fit(rows, target, batch_size=32, epochs=3, validation_split=0.25, verbose=0)

ci.trace(name="epoch")
