"""`ciclo.jax.managed` by its public name."""

import sys

from ciclo.jax import managed
from ciclo.jax.managed import *  # noqa: F403  for type checkers

sys.modules[__name__] = managed
