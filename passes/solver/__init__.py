"""The solver of the sharding problem: plain numbers behind `solve.solve`, which knows neither JAX nor shardings."""
