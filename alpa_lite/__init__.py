"""alpa_lite: automatic parallelisation of JAX train steps on stock JAX."""
