"""Functions that programs for Ciclo 0.1.9 import from here."""

from ciclo._compat import get_batch_size, inject, is_scalar

__all__ = ["get_batch_size", "inject", "is_scalar"]
