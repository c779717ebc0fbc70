"""What weights and gradients look like at an epoch boundary, without holding the loop.

On the user's thread: taker.py asks a reader for the tensors of each model, and copiers for copies.
torch.py, jax.py, keras.py   readers: yield names, arrays and flags
host.py                      what a tensor, a reader and a copier are; copies on the host
cuda.py                      copies on a GPU, and statistics computed there

On the worker: records.py makes of the copies what a boundary leaves.
stats.py                     exact statistics, block by block (NumPy)
health.py                    what they say of the training: NaN, dead layers, exploding gradients
records.py                   records, marks of health, and raw values on disk
"""
