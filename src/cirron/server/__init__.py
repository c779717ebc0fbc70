"""Serves runs to browsers and takes batches from programs. Loaded by `cirron serve` alone."""
