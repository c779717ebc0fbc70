"""Snapshots of weights and gradients at an epoch boundary, without blocking the loop.

On the user's thread, `taker.py` gets the tensors of each model from a reader, and has copiers copy
them.
torch.py, jax.py, keras.py   readers: yield names, arrays and flags; copies on devices
host.py                      the types of tensors, readers and copiers; copies on the host

On the worker, `records.py` turns the copies into records.
stats.py                     exact statistics, block by block (NumPy)
health.py                    finds problems: NaN, dead layers, exploding gradients
records.py                   records, marks of health, and raw values on disk
"""
