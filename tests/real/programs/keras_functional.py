# shape: a functional Keras model on the torch backend, trained with a loop of the program's own
# env: KERAS_BACKEND=torch
# heavy
import keras
import torch
from common import Counts, digest, points, result

counts = Counts()
torch.set_num_threads(1)
keras.utils.set_random_seed(0)

inputs = keras.Input((8,))
hidden = keras.layers.Dense(8, activation="relu")(inputs)
left = keras.layers.Dense(4)(hidden)
right = keras.layers.Dense(4)(hidden)
model = keras.Model(inputs, keras.layers.Add()([left, right]))
twice = keras.Sequential([model, keras.layers.Dense(4)])  # it is built in its first step

loader = torch.utils.data.DataLoader(points(), batch_size=16)
optimizer = keras.optimizers.SGD(0.1)
measure = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

losses = []
for _ in range(2):
    counts["epoch"] += 1
    for x, y in loader:
        counts["step"] += 1
        counts["forward"] += 1
        loss = measure(y, twice(x, training=True))
        twice.zero_grad()
        loss.backward()
        weights = list(twice.trainable_weights)
        with torch.no_grad():
            optimizer.apply([weight.value.grad for weight in weights], weights)
        losses.append(loss.item())

result(counts, losses=losses, weights=digest(*(weight.value for weight in twice.weights)))
