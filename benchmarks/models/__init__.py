"""Models in plain JAX, as a user would write them: nothing here knows autopar."""
