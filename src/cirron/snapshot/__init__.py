"""What weights and gradients look like at an epoch boundary, without holding the loop.

taker.py   which models, when, and the worker: copy on the user's thread, the rest behind it
base.py    what the taker asks of a framework's reader
torch.py   reads a torch model: names, tensors, one copy
cuda.py    statistics of tensors on the GPU that they are on
keras.py   reads a Keras model on any backend, by its paths
jax.py     reads trees of JAX arrays and NNX modules: one copy on their devices, reduced on the host
stats.py   exact statistics, block by block (NumPy)
blobs.py   raw values on disk, whole or not at all
health.py  what the statistics say of the training: NaN, dead layers, exploding gradients
memory.py  how much a copy may take
pace.py    lets the training have the interpreter lock between two turns of the worker
"""
