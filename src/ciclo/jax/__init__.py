"""What needs JAX: states and steps of it, strategies, metrics, and a file for each framework."""

from ciclo.errors import need

need("jax", "ciclo.managed")
