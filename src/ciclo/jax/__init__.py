"""Everything that needs JAX: managed states, strategies, metrics, and a file per framework."""

from ciclo.errors import need

need("jax", "ciclo.managed")
