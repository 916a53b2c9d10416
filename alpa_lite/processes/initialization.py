"""Joins the processes of a job: `jax.distributed.initialize`, with errors that name the address, and in time.

Without it, stock JAX (0.10.2 and 0.12, measured) ends process 0 with a segmentation fault or "Failed to start RPC
server" where the coordinator's port is in use, and aborts a process that cannot reach the coordinator from C++ after
the whole time with "DEADLINE_EXCEEDED ... RegisterTask", which names neither the address nor who is missing.
"""

from __future__ import annotations

import logging
import socket
import time

import jax

from alpa_lite import _jax
from alpa_lite.errors import OptionError

logger = logging.getLogger(__name__)

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
    until = time.monotonic() + timeout
    if number == 0:
        _check_free(address)
    else:
        _wait_for(address, timeout, number)
    logger.info("process %d of %d: waiting for the others at %s, at most %g s", number, count, address, timeout)
    jax.distributed.initialize(
        address,
        count,
        number,
        initialization_timeout=max(1, int(until - time.monotonic())),
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
        shutdown_timeout_seconds=shutdown_timeout_seconds,
    )
    return count


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise OptionError(f"coordinator_address={address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _check_free(address: str) -> None:
    """Raises OptionError if the port, on which this process is about to start the coordinator, is in use."""
    _, port = _host_and_port(address)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a job before may be closing
        try:
            listener.bind(("", port))
        except OSError as error:
            raise OptionError(
                f"process 0 cannot start the coordinator at {address}: {error.strerror}; end the program that uses "
                f"port {port}, or give all processes another port"
            ) from error


def _wait_for(address: str, timeout: float, number: int) -> None:
    """Waits until the coordinator listens.

    Raises:
      OptionError: it does not within the time.
    """
    host, port = _host_and_port(address)
    until = time.monotonic() + timeout
    while True:
        try:
            wait = max(_RETRY_SECONDS, min(5.0, until - time.monotonic()))
            socket.create_connection((host, port), timeout=wait).close()
            return
        except OSError as error:
            if time.monotonic() >= until:
                raise OptionError(
                    f"process {number} cannot reach the coordinator at {address} after {timeout:g} s: "
                    f"{error.strerror or error}; check that process 0 runs and has not failed, and that its host and "
                    "port can be reached from here"
                ) from error
            time.sleep(_RETRY_SECONDS)
