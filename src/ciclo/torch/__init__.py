"""What needs torch: a state of a module and an optimizer, its strategies, metrics and batches."""
