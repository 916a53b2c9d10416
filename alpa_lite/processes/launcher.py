"""Detection of a process that its launcher started as one of several, and that has not joined the others.

Without `jax.distributed.initialize` every process has its own devices alone, trains by itself, and overwrites the files
of the others. Nothing fails; so the variables that launchers set for their processes are read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from alpa_lite import _jax
from alpa_lite.errors import ProcessError

ALONE_VARIABLE = "ALPA_LITE_ALONE"
"""The environment variable that lets each process of a launcher train by itself."""

COUNT_VARIABLES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables that `srun`, Open MPI and MPICH set to the number of processes that they have started together."""

ADDRESS_VARIABLE = "JAX_COORDINATOR_ADDRESS"
"""The variable that JAX reads, and `alpa-lite launch` sets."""


def detected_launcher(environment: Mapping[str, str]) -> str | None:
    """Returns `NAME=value` of the launcher variable that announces several processes, or None."""
    for name in COUNT_VARIABLES:
        if environment.get(name, "").isdigit() and int(environment[name]) > 1:
            return f"{name}={environment[name]}"
    address = environment.get(ADDRESS_VARIABLE)
    return f"{ADDRESS_VARIABLE}={address}" if address else None


def check_joined(name: str) -> None:
    """Raises ProcessError if this process should have joined others and has not.

    Args:
      name: of the step.
    """
    if _jax.coordination_client() is not None or os.environ.get(ALONE_VARIABLE):
        return
    found = detected_launcher(os.environ)
    if found is not None:
        raise ProcessError(
            f"{name}: {found} announces several processes, but this one has not joined the others: call "
            "alpa_lite.initialize() or jax.distributed.initialize() at the start of the program; if each is to train "
            f"by itself, set {ALONE_VARIABLE}=1"
        )
