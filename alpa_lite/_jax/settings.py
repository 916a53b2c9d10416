"""The state of JAX in a process: settings, context meshes, checks of values, the coordination service, and caches."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import clusters as _clusters
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import distributed as _distributed
from jax._src import mesh as _mesh
from jax.sharding import AbstractMesh, AxisType

trace_context: Callable[[], tuple[Any, ...]] = _config.trace_context
"""The settings under which a function is traced: x64, promotion, precision, random streams, the mesh of the context.

JAX's own notion: it is part of the key of every trace that `jit` keeps. Takes 0.4 us (0.10.2) to 1.1 us (0.12). The
default PRNG and the checks for NaN are not in it: `jit` does not trace again when they change.
"""


def name_settings(context: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the values of a `trace_context` by the names that JAX has for them.

    Modules that are imported after it was taken, such as those of Pallas with JAX 0.12, append settings of their own.
    """
    return dict(zip(_config.trace_context_names(), context, strict=False))


def settings_text(context: tuple[Any, ...]) -> dict[str, str]:
    """Returns the options of `jax.config` in a `trace_context`, as text that is equal in every process: no devices."""
    values = {name: getattr(value, "value", value) for name, value in name_settings(context).items()}
    plain = {name: value for name, value in values.items() if isinstance(value, str | int | float | None)}
    return {name: str(value) for name, value in plain.items() if name.startswith("jax_")}


def carry_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` under the settings that this thread has now, for another thread.

    JAX's context managers, such as `jax.enable_x64`, set values of one thread. Nothing public hands them on.
    """
    unset = _config.config_ext.unset
    known = [one for one in vars(_config).values() if isinstance(one, _config.config_ext.Config)]
    own = [(one, value) for one in known if (value := one.get_local()) is not unset]

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before = [(one, one.swap_local(value)) for one, value in own]
        try:
            return function(*args, **kwargs)
        finally:
            for one, value in before:
                one.set_local(value)

    return wrapper


def is_x64_in_all_threads() -> bool:
    """Returns whether threads without a setting of their own have 64 bits. JAX publishes that of the caller alone."""
    return bool(_config.enable_x64.get_global())


def context_mesh() -> Any:
    """Returns the mesh of `jax.set_mesh`, `use_abstract_mesh` or `with mesh:` around the caller; None without one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        mesh = _mesh.thread_resources.env.physical_mesh  # that of `with mesh:`, which no public function returns
    return None if mesh.empty else mesh


@contextlib.contextmanager
def clear_mesh_context() -> Iterator[None]:
    """Runs its body as if no `jax.set_mesh` were around it: `shard_map` takes no mesh but that of the context."""
    if jax.sharding.get_abstract_mesh().empty:
        yield
        return
    with jax.set_mesh(None):
        yield


@contextlib.contextmanager
def trace_under_mesh(mesh: Any) -> Iterator[None]:
    """Traces its body under a mesh of a context (None: without one), all its axes `Auto`, whatever types they have."""
    if not isinstance(mesh, AbstractMesh):  # that of `with mesh:` is still around
        yield
        return
    with jax.sharding.use_abstract_mesh(mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))):
        yield


def checked_values() -> tuple[str, ...]:
    """Returns the kinds of values that JAX raises for: "nan" with `jax_debug_nans`, "inf" with `jax_debug_infs`."""
    return ("nan",) * bool(jax.config.jax_debug_nans) + ("inf",) * bool(jax.config.jax_debug_infs)


@contextlib.contextmanager
def skip_value_checks() -> Iterator[None]:
    """Within it, JAX does not look at results."""
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


_writing = threading.RLock()


@contextlib.contextmanager
def write_executables() -> Iterator[None]:
    """Writes executables compiled in its body to JAX's compilation cache, whichever number this process has.

    JAX leaves writing to process 0, which has no program for the devices of others alone; and on CPUs, where the key of
    a program depends on the process, no other process can use the entries of process 0. There is no option for it.
    """
    state = _distributed.global_state

    def write(*args: Any) -> None:
        own, state.process_id = state.process_id, 0
        try:
            original(*args)
        finally:
            state.process_id = own

    with _writing:
        original, _compiler._cache_write = _compiler._cache_write, write
        try:
            yield
        finally:
            _compiler._cache_write = original


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
    """Returns the client of the coordinator's key-value store; None in a process that is alone.

    No public name leads to it.
    """
    return _distributed.global_state.client
