"""Compiles functions of flat arrays, and keeps the executables in JAX's compilation cache.

JAX writes the executables of process 0 (`jax_compilation_cache_dir`). An executable of a submesh that process 0 has no
device of is written here by the first process that has one; on CPUs, where each process has keys of its own, by every
process. So a restarted job finds every executable.

An executable takes its arrays in two groups, those that it donates and the rest: JAX gives the buffers of donated
arrays to the outputs of their type in order, so that the order of the group decides which output is written where.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.processes import effects
from alpa_lite.report import progress, summary
from alpa_lite.runtime.debug import callbacks

logger = logging.getLogger(__name__)

Call = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
"""An executable, from the donated and the kept arrays to the results."""

MAX_LAUNCHES_AHEAD = 8
"""Launches of programs with several devices of this process, and of those of one device, between two waits."""

_launched: Counter[Any] = Counter()
_last: dict[Any, Any] = {}  # by queue, the results of the last program


def compile_lowered(
    lowered: jax.stages.Lowered, devices: Iterable[Any], options: Mapping[str, Any] | None = None
) -> jax.stages.Compiled:
    """Returns the executable of a lowered program for these devices, from the cache if it is there."""
    with persistent_cache(devices):
        return _jax.accept_default_layouts(lowered.compile(dict(options or {}) or None))


def persistent_cache(devices: Iterable[Any]) -> contextlib.AbstractContextManager[None]:
    """Returns a context that writes executables for these devices to JAX's compilation cache if there is one."""
    own, users = jax.process_index(), list(devices)
    is_written = own == 0 or (users[0].platform != "cpu" and own != min(device.process_index for device in users))
    if is_written or not effects.is_allowed("jax"):
        return contextlib.nullcontext()
    return _jax.write_executables()


def throttle(call: Callable[..., Any], devices: Iterable[Any]) -> Callable[..., Any]:
    """Returns a compiled program that waits for its results at each `MAX_LAUNCHES_AHEAD`th launch on these devices.

    XLA admits 32 programs to a CPU device. The launch of one more waits on a thread of those that run the programs: if
    one process computes what another sends, that may never end (`docs/processes.md`). Each process launches its
    programs in one order of all: so the first of those that are not done has been launched wherever it has to be.
    Programs of several devices of a process run one after the other, whichever devices these are; so do programs that
    have one device here, for each device. Accelerators queue programs on streams.

    Args:
      devices: of the program, of all processes.

    Returns:
      `call` itself, except on CPU devices in a multi-process run.
    """
    here = [one for one in devices if one.platform == "cpu" and one.process_index == jax.process_index()]
    if jax.process_count() == 1 or not here:
        return call
    queue, is_alone = here[0] if len(here) == 1 else None, jax.local_device_count() == 1

    def launch(*arrays: Any) -> Any:
        results = call(*arrays)
        _launched[queue] += 1
        if not is_alone:
            _last[queue] = results
        return results if _launched[queue] % MAX_LAUNCHES_AHEAD else jax.block_until_ready(results)

    return launch


def drain() -> None:
    """Waits for the programs that were launched on CPU devices in a multi-process run, if there are several here.

    A program that has one device here starts beside those of several. If it waits for another process, it holds a
    thread that an earlier one may need: JAX 0.10 hung so, with a loss that was broadcast before a backward pass.
    """
    last = [x for results in _last.values() for x in jax.tree.leaves(results)]
    _last.clear()
    jax.block_until_ready([x for x in last if not x.is_deleted()])  # else a later program has taken it


def picker(numbers: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Returns a function that takes these items of a list, as a tuple."""
    if len(numbers) > 1:
        return operator.itemgetter(*numbers)
    return lambda items: tuple([items[number] for number in numbers])


@dataclass(frozen=True, eq=False)
class FlatFunction:
    """A function of flat arrays on one mesh, to be compiled.

    If it calls functions of the user's on the host, their `failures` on several devices are noted, and the number of
    the micro-batch, an int32, is one more input at the end.
    """

    name: str
    function: Callable[..., Any]
    mesh: Mesh
    inputs: Sequence[jax.ShapeDtypeStruct]  # with shardings on the mesh, as results
    results: Sequence[jax.ShapeDtypeStruct]
    donated_inputs: Sequence[int]  # in the order of the results that replace them
    failures: callbacks.Failures | None

    @property
    def kept_inputs(self) -> list[int]:
        """The numbers of the inputs that are not donated."""
        return [n for n in range(len(self.inputs)) if n not in set(self.donated_inputs)]

    @_jax.clear_mesh_context()
    def lower(self) -> jax.stages.Lowered:
        """Lowers the function for its mesh, whose devices may be those of a topology that is described alone."""
        inputs, kept, function = list(self.inputs), self.kept_inputs, self.function
        if self.failures is not None:
            function = callbacks.locate_callbacks(function, self.name, self.failures if self.mesh.size > 1 else None)
            everywhere = NamedSharding(self.mesh, PartitionSpec())
            kept.append(len(inputs))
            inputs.append(jax.ShapeDtypeStruct((), np.int32, sharding=everywhere))
        position = np.argsort([*self.donated_inputs, *kept])

        def grouped(donated: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
            arrays = (*donated, *kept)
            weak = [one.weak_type for one in self.results]
            return list(map(_jax.set_weak_type, function(*(arrays[n] for n in position)), weak))

        grouped.__name__ = self.name.replace(" ", "_")
        groups = picker(self.donated_inputs)(inputs), picker(kept)(inputs)
        jitted = jax.jit(
            grouped,
            in_shardings=tuple(tuple(one.sharding for one in group) for group in groups),
            out_shardings=[one.sharding for one in self.results],
            donate_argnums=0,
            keep_unused=True,  # the buffer of a state leaf that is overwritten unread can be reused all the same
        )
        return jitted.lower(*groups)

    def compile(self, options: Mapping[str, Any] | None = None) -> tuple[jax.stages.Compiled, Call]:
        """Returns the executable, and how it is called."""
        devices = list(self.mesh.devices.flat)
        compiled = compile_lowered(self.lower(), devices, options)
        call = throttle(compiled, devices)
        if self.failures is None or self.mesh.size == 1:
            return compiled, call
        lowered = callbacks.lower_failure_check(self.name, self.mesh, self.results, self.failures)
        check = compile_lowered(lowered, devices)
        return compiled, lambda donated, kept: check(kept[-1], *call(donated, kept))[1:]


def compile_all(
    step: str, functions: Sequence[FlatFunction], options: Mapping[str, Any]
) -> list[tuple[jax.stages.Compiled, Call]]:
    """Returns each executable of a step of this name, and how it is called; logs how long it took."""
    start, made = time.perf_counter(), []
    with progress.show_progress(f"compiling {step}") as report:
        for done, function in enumerate(functions):
            report.count("executables compiled", done, len(functions))
            made.append(function.compile(options))
    logger.info(summary.compiled_message(step, len(functions), time.perf_counter() - start))
    return made
