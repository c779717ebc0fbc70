"""Where batches go: one file per destination, one method to implement: `emit` (see `base.py`)."""
