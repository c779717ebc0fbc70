"""Where batches go. One file a destination, one method to implement: `emit` (see `base.py`)."""
