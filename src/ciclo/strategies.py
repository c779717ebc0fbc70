"""`ciclo.jax.strategies` by its public name."""

import sys

from ciclo.jax import strategies
from ciclo.jax.strategies import *  # noqa: F403  for type checkers

sys.modules[__name__] = strategies
