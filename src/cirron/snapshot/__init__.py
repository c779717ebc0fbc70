"""What weights and gradients look like at an epoch boundary, without holding the loop.

taker.py   which models, when, and the worker: copy on the user's thread, the rest behind it
base.py    what readers yield, and what a copy can do
torch.py   reads torch models
jax.py     reads trees of JAX arrays and NNX modules
keras.py   reads Keras models on any backend
host.py    copies on the host, and how much memory a copy may take
cuda.py    copies on a GPU, and statistics computed there
stats.py   exact statistics, block by block (NumPy)
blobs.py   raw values on disk, whole or not at all
health.py  what the statistics say of the training: NaN, dead layers, exploding gradients
"""
