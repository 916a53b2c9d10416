"""Compiles, so that a restarted job finds every executable in JAX's compilation cache (`jax_compilation_cache_dir`).

JAX writes what process 0 compiles. An executable of a submesh that process 0 has no device of is written here by the
first process that has one; on CPUs, where each process has keys of its own, by every process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from alpa_lite import _jax


def compiled(
    lowered: jax.stages.Lowered, devices: Iterable[Any], options: Mapping[str, Any] | None = None
) -> jax.stages.Compiled:
    """The executable of a lowered program for these devices, from the cache if it is there.

    Args:
      options: what the compiler is asked for.
    """
    with kept(devices):
        return _jax.accept_default_layouts(lowered.compile(dict(options or {}) or None))


def kept(devices: Iterable[Any]) -> contextlib.AbstractContextManager[None]:
    """What is compiled within, for these devices, is kept in JAX's compilation cache if there is one."""
    own, users = jax.process_index(), list(devices)
    if own == 0 or (users[0].platform != "cpu" and own != min(device.process_index for device in users)):
        return contextlib.nullcontext()
    return _jax.writing_executables()
