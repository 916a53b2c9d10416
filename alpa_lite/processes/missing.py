"""A process that its launcher has started as one of several, and that has not joined the others.

Without `jax.distributed.initialize` every process is alone with its own devices, trains by itself, and writes over what
the others write. Nothing fails; so it is looked for what launchers tell their processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from alpa_lite import _jax
from alpa_lite.errors import ProcessError

ALONE = "ALPA_LITE_ALONE"
"""The environment variable that says that a launcher's processes are to train by themselves, each on its own."""

COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""What `srun`, Open MPI and MPICH set to the number of processes that they have started together."""

ADDRESS = "JAX_COORDINATOR_ADDRESS"
"""What JAX reads, and `alpa-lite launch` sets."""


def said(environment: Mapping[str, str]) -> str | None:
    """The variable that says that there are several processes, with its value; None if none does."""
    for name in COUNTS:
        if environment.get(name, "").isdigit() and int(environment[name]) > 1:
            return f"{name}={environment[name]}"
    return f"{ADDRESS}={environment[ADDRESS]}" if environment.get(ADDRESS) else None


def check_joined(name: str) -> None:
    """Raises ProcessError if this process should have joined others and has not.

    Args:
      name: of the step.
    """
    if _jax.coordination_client() is not None or os.environ.get(ALONE):
        return
    found = said(os.environ)
    if found is not None:
        raise ProcessError(
            f"{name}: {found} says that this is one process of several, but it has not joined them: call "
            "alpa_lite.initialize() or jax.distributed.initialize() at the start of the program; if each is to train "
            f"by itself, set {ALONE}=1"
        )
