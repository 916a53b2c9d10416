"""Several processes: their job, the coordination service, and the writer of compiled programs."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax._src import clusters as _clusters
from jax._src import compilation_cache as _compilation_cache
from jax._src import compiler as _compiler
from jax._src import distributed as _distributed

_writing = threading.RLock()


@contextlib.contextmanager
def writing_executables() -> Iterator[None]:
    """Writes executables compiled in its body to JAX's compilation cache, whichever number this process has.

    JAX leaves writing to process 0, which has no program for the devices of others alone; and on CPUs, where the key of
    a program depends on the process, no other process can use the entries of process 0. There is no option for it.
    """
    with _writing:
        original = _compiler._cache_write
        _compiler._cache_write = _write_executable
        try:
            yield
        finally:
            _compiler._cache_write = original


def _write_executable(
    key: str, seconds: float, name: str, backend: Any, executable: Any, host_callbacks: Sequence[Any] = ()
) -> None:
    """JAX's own `_cache_write` but for the number of the process. Up to 0.10 it is given the callbacks of the host."""
    if host_callbacks or seconds < jax.config.jax_persistent_cache_min_compile_time_secs:
        return
    try:
        _compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))
    except Exception as error:  # a full or read-only disk must not end a job that can go on
        warnings.warn(f"the compiled program {name!r} cannot be kept: {type(error).__name__}: {error}", stacklevel=2)


def job_of(
    address: str | None, count: int | None, number: int | None, timeout: float
) -> tuple[str | None, int | None, int | None]:
    """Returns the coordinator, the process count and this process's number, as `jax.distributed.initialize` finds them.

    Given values are kept; one neither given nor found is None. JAX's detection is private, and `initialize` starts at
    once.
    """
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    detect = _clusters.ClusterEnv.auto_detect_unset_distributed_params
    return detect(address, count, number, None, None, int(timeout))[:3]


def coordination_client() -> Any:
    """The client of the coordinator's key-value store; None in a process that is alone. No public name leads to it."""
    return _distributed.global_state.client
