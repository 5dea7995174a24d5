"""Planning: pure arithmetic on a config, before any device is touched. Imports no JAX."""
