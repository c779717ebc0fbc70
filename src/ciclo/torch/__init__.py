"""Everything that needs torch: the state, its strategies, metrics and batches."""
