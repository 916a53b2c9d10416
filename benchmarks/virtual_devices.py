"""The virtual devices on which scripts compare what is computed with plain `jit`."""

from __future__ import annotations

import warnings

import jax


def prepare() -> None:
    """Gives this process eight CPU devices, for which programs are compiled quickly; no warning is shown.

    To be called before JAX is used.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)
    warnings.simplefilter("ignore")
