"""How JAX traces a step, and all that walks jaxprs."""
