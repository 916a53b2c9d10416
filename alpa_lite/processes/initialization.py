"""Joins the processes of a job: `jax.distributed.initialize`, with errors that name the address, and in time.

Without it, stock JAX (0.10.2 and 0.12, measured) ends process 0 with a segmentation fault or "Failed to start RPC
server" where the coordinator's port is in use, and aborts a process that cannot reach the coordinator after the whole
time with "DEADLINE_EXCEEDED ... RegisterTask", which names neither the address nor who is missing.

A process that its launcher started as one of several, and that has not joined the others, trains by itself, and
overwrites the files of the others. So `check_joined` reads the variables that launchers set for their processes.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping

import jax

from alpa_lite import _jax
from alpa_lite.errors import OptionError, ProcessError

logger = logging.getLogger(__name__)

ALONE_VARIABLE = "ALPA_LITE_ALONE"
"""The environment variable that lets each process of a launcher train by itself."""

COUNT_VARIABLES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables that `srun`, Open MPI and MPICH set to the number of processes that they have started together."""

ADDRESS_VARIABLE = "JAX_COORDINATOR_ADDRESS"
"""The variable that JAX reads, and `alpa-lite launch` sets."""

_RETRY_SECONDS = 0.2


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = 300.0,
    heartbeat_timeout_seconds: int = 100,
    shutdown_timeout_seconds: int = 60,
) -> int:
    """Joins this process to the others of its job, if there is a job; else it does nothing.

    Arguments that are None come from where `jax.distributed` looks: SLURM, Kubernetes, Open MPI, TPU pods, and the
    variables of `alpa-lite launch`. Call it before anything that needs devices.

    Args:
      coordinator_address: host and port of process 0.
      num_processes, process_id: the number of processes, and the index of this one.
      timeout: seconds to wait for the other processes.
      heartbeat_timeout_seconds: JAX's own: a process without a heartbeat for so long is lost, and every other one is
        ended with a message that names it.
      shutdown_timeout_seconds: JAX's own: how long a process that ends waits for the others to end.

    Returns:
      The number of processes.

    Raises:
      OptionError: the port of the coordinator is in use, or the coordinator cannot be reached; some of the three are
        known and not all are.
      RuntimeError: of JAX, if it has been used before.
    """
    job = _jax.job_of(coordinator_address, num_processes, process_id, timeout)
    address, count, number = job
    if job == (None, None, None):
        logger.info("no job found in the environment: this process is alone")
        return 1
    if address is None or count is None or number is None:
        raise OptionError(
            f"coordinator_address={address!r}, num_processes={count!r}, process_id={number!r}: the environment "
            "defines only some of these; pass the missing ones explicitly"
        )
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise OptionError(f"coordinator_address={address!r} is not HOST:PORT; write it as 10.0.0.1:8476")
    until = time.monotonic() + timeout
    if number == 0:
        _check_free(address, int(port))
    else:
        failure = f"process {number} cannot reach the coordinator at {address} after {timeout:g} s"
        _wait_for((host.strip("[]"), int(port)), until, failure)
    logger.info("process %d of %d: waiting for the others at %s, at most %g s", number, count, address, timeout)
    jax.distributed.initialize(
        address, count, number, initialization_timeout=max(1, int(until - time.monotonic())),
        heartbeat_timeout_seconds=heartbeat_timeout_seconds, shutdown_timeout_seconds=shutdown_timeout_seconds,
    )  # fmt: skip
    return count


def detected_launcher(environment: Mapping[str, str]) -> str | None:
    """Returns `NAME=value` of the launcher variable that announces several processes, or None."""
    for name in COUNT_VARIABLES:
        if environment.get(name, "").isdigit() and int(environment[name]) > 1:
            return f"{name}={environment[name]}"
    address = environment.get(ADDRESS_VARIABLE)
    return f"{ADDRESS_VARIABLE}={address}" if address else None


def check_joined(name: str) -> None:
    """Raises ProcessError if this process, which calls the step `name`, should have joined others and has not."""
    if _jax.coordination_client() is not None or os.environ.get(ALONE_VARIABLE):
        return
    found = detected_launcher(os.environ)
    if found is not None:
        raise ProcessError(
            f"{name}: {found} announces several processes, but this one has not joined the others: call "
            "alpa_lite.initialize() or jax.distributed.initialize() at the start of the program; if each is to train "
            f"by itself, set {ALONE_VARIABLE}=1"
        )


def _check_free(address: str, port: int) -> None:
    """Raises OptionError if the port, on which this process is about to start the coordinator, is in use."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a job before may be closing
        try:
            listener.bind(("", port))
        except OSError as error:
            raise OptionError(
                f"process 0 cannot start the coordinator at {address}: {error.strerror}; end the program that uses "
                f"port {port}, or give all processes another port"
            ) from error


def _wait_for(address: tuple[str, int], until: float, failure: str) -> None:
    """Returns as soon as the coordinator listens; raises OptionError, which begins with `failure`, if it does not."""
    while True:
        try:
            wait = max(_RETRY_SECONDS, min(5.0, until - time.monotonic()))
            socket.create_connection(address, timeout=wait).close()
            return
        except OSError as error:
            if time.monotonic() >= until:
                raise OptionError(
                    f"{failure}: {error.strerror or error}; check that process 0 runs and has not failed, and that its "
                    "host and port can be reached from here"
                ) from error
            time.sleep(_RETRY_SECONDS)
