"""Where Ciclo 0.1.9 has its states; here they are in `ciclo` itself."""

raise ImportError(
    "ciclo.states is not here; write from ciclo import FlaxState, create_flax_state, ManagedState"
)
