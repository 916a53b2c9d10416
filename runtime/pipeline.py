"""The back-end for pipelines: one controller issues the instructions of all submeshes, in an order that keeps each
list's own.

Everything is dispatched without waiting: JAX starts a stage's executable when its inputs are there, so that stages run
side by side although one thread issues them. An instruction costs one call of a compiled executable or one of a
transfer (`compile_pipeline`); buffers are dropped, or donated, exactly where the program says.

*Errors.* The errors that a compiled executable can raise on a CPU come from the user's callbacks, and name their place
themselves (`callbacks`). Other failures are given the instruction that met them, and the lines that its executable was
made from: it has a name of ours and no line of the user's code. Work that was dispatched before goes on in either case,
and is waited for: its errors would otherwise come up later, where nobody expects them. In a multi-process run no
process waits: what another sends may never come, for it may wait for this one.

*Interrupts.* A run that was dispatched cannot be called back. An interrupt waits for what is under way, then goes on;
arrays that were donated before are gone, and all others can be used.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, assert_never

import jax
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.cluster import Cluster
from alpa_lite.errors import ExecutionError
from alpa_lite.graph import Traced
from alpa_lite.passes.programs.writing import Written
from alpa_lite.program import Run, describe
from alpa_lite.runtime import callbacks, placement, state_aliasing, watchdog
from alpa_lite.runtime.binding import Buffers
from alpa_lite.runtime.compile_pipeline import Drop, Item, Launch, Move, PipelineCompiler
from alpa_lite.runtime.memory_profile import MemoryProfile
from alpa_lite.runtime.remote_outputs import RemoteOutputs
from alpa_lite.runtime.stacked import StackedLeaves
from alpa_lite.runtime.step import Executable, LoadOptions
from alpa_lite.runtime.timeline_recorder import TimelineRecorder
from alpa_lite.timeline import Timeline

Watch = Callable[[int, Sequence[Any]], None]
"""Called after each item of the dispatch loop with its number and all buffers."""

_DISPATCHING = threading.Lock()
"""Held while a pipeline's executables are started, so that all devices get those of two threads in the same order.

Where devices get them in different orders, each waits in a collective for devices that wait in the other's.
"""


class PipelineExecutable(Executable):
    """A pipelined step on the submeshes of its stages."""

    def __init__(
        self, traced: Traced, written: Written, cluster: Cluster, devices: Sequence[Any] | None = None,
        options: LoadOptions | None = None,
    ) -> None:  # fmt: skip
        """Prepares the executables; they are compiled by the first call, or by `compiled`.

        Args:
          traced: the step as the user wrote it.
          written: the program of the same step.
          cluster: that transfers were planned for.
          devices: in the order of the cluster; by default those of the options.
          options: how the step is put on devices. `donate` has been planned for.

        Raises:
          PlanError: there are fewer devices than the program needs.
        """
        options = options or LoadOptions(compiler_options=cluster.compiler_options)
        devices = options.devices if devices is None else devices
        program = self._program = written.program
        self._compiler = PipelineCompiler(traced, written, cluster, devices, options.compiler_options)
        self._sharding = self._compiler.sharding
        self._items: list[Item] = []
        self._initial: list[Any] = []  # all buffers before the arguments are placed
        self._shared = state_aliasing.shared_outputs(program, traced)
        self._unlabelled = self._compiler.unmade_results()
        self._remote: RemoteOutputs | None = None
        if any(device.process_index != jax.process_index() for device in self._compiler.devices):
            self._remote = RemoteOutputs(traced, program, self._compiler.devices, self._compiler.here, self._sharding)
            self._unlabelled += self._remote.broadcast_results
        in_place, absent = state_aliasing.in_place_state(program, traced), {}
        if self._remote is not None:
            absent = self._remote.absent_state
            in_place = {} if traced.stacked else {n: b for n, b in in_place.items() if n not in absent}
        donated = state_aliasing.owned_inputs(program)
        buffers = Buffers(program.inputs, self._sharding, donated, in_place, absent=absent)
        stacked = StackedLeaves(traced, program, self._sharding) if traced.stacked else None
        super().__init__(traced, buffers, options, stacked)

    def trace(self, *args: Any, **kwargs: Any) -> Timeline:
        """Runs the step once on copies of the arguments, and returns when everything of it ran. Results are dropped.

        The step is dispatched as by a call. Its arguments are neither donated nor, if they are modules, updated.
        """
        buffers = self._buffers_of_copies(args, kwargs)
        jax.block_until_ready([x for x in buffers if x is not None])
        with TimelineRecorder(self._program, self._items, self._sharding) as recorder:
            self._dispatch(buffers, recorder)
        return recorder.timeline()

    def measure_peak(self, *args: Any, **kwargs: Any) -> tuple[int, ...]:
        """Runs the step once on copies of the arguments, and returns the most bytes that live arrays took of it.

        Every array of the process counts that was not there before, and constants of the step; it waits for each
        instruction. `program.peak_bytes` predicts it.

        Returns:
          For each submesh, bytes of the device that holds most.
        """
        self.compiled()
        profile = MemoryProfile(self._compiler.meshes, [x for x in self._initial if x is not None])
        buffers = self._buffers_of_copies(args, kwargs)
        profile(-1, buffers)
        self._dispatch(buffers, profile)
        return tuple(profile.most)

    # -- the back-end -----------------------------------------------------------------------------------------

    def _compile(self) -> tuple[Any, ...]:
        compiled, self._items, self._initial = self._compiler.compile()
        return compiled

    def lowered(self) -> Iterator[jax.stages.Lowered]:
        """Each executable lowered for its submesh, whose devices may be those of a topology that is described alone."""
        return self._compiler.lowered()

    @property
    def _program_shardings(self) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """As of `Executable`. An argument that no stage reads is replicated on the first submesh."""
        anywhere = NamedSharding(self._compiler.meshes[0], PartitionSpec())
        arguments = [self._sharding(group[0]) if group else anywhere for group in self._program.inputs]
        results = list(map(self._sharding, self._program.outputs))
        if self._remote is not None:
            results = self._remote.shardings(results)
        return (arguments, results) if self._stacked is None else self._stacked.shardings(arguments, results, anywhere)

    def _start(self, leaves: Sequence[Any]) -> list[Any]:
        buffers = list(self._initial)
        for argument, buffer in self._in_place:
            buffers[buffer] = leaves[argument]
        return buffers

    def _execute(self, buffers: list[Any]) -> list[Any]:
        watch = None
        if watchdog.active:
            items, program = self._items, self._program
            watch = watchdog.track_instructions(
                lambda number: describe(program, items[number].source), [item.outputs for item in items]
            )
        self._dispatch(buffers, watch)
        outputs = [buffers[i] for i in self._program.outputs]
        shared = [n for n in self._shared if outputs[n] is not None]
        for n, copied in zip(shared, placement.fresh([outputs[n] for n in shared]), strict=True):
            outputs[n] = copied
        for n in self._unlabelled:
            outputs[n] = _jax.array_with_weak_type(outputs[n], self._traced.outputs[n].weak)
        return outputs if self._remote is None else self._remote.complete(outputs)

    def _dispatch(self, buffers: list[Any], watch: Watch | None = None) -> None:
        """Walks the items. Nothing but `buffers` holds a buffer, so that what is dropped there is free."""
        number = 0
        with _DISPATCHING:
            try:
                for number, item in enumerate(self._items):
                    match item:
                        case Launch():
                            results = item.call(item.pick_donated(buffers), item.pick_kept(buffers))
                            for i in item.donated:
                                buffers[i] = None
                        case Move():
                            results = item.call([buffers[i] for i in item.sent])
                        case Drop():
                            results = ()
                            for i in item.buffers:
                                buffers[i] = None
                        case _:
                            assert_never(item)
                    for k, i in enumerate(item.outputs):
                        buffers[i] = results[k]
                    results = None
                    if watch is not None:
                        watch(number, buffers)
            except KeyboardInterrupt:
                self._wait_for_inflight(buffers)
                raise
            except Exception as error:
                self._wait_for_inflight(buffers)
                raise self._located(error, self._items[number]) from error

    def _wait_for_inflight(self, buffers: Sequence[Any]) -> None:
        """Waits for the arrays in flight, whether they fail or not; not in a multi-process run."""
        for array in buffers if self._remote is None else ():
            if array is not None and not array.is_deleted():
                with contextlib.suppress(Exception):
                    array.block_until_ready()

    def _located(self, error: Exception, item: Item) -> Exception:
        """The error with the stage, the micro-batch and the source line of the item that met it in front."""
        text = str(error)
        if callbacks.MARKER in text:  # of a callback, in the last line of the trace that JAX made of it
            return ExecutionError(text.rsplit(callbacks.MARKER, 1)[1].strip())
        operations = self._compiler.segment(item.source.executable).instructions if isinstance(item.source, Run) else ()
        found = list(dict.fromkeys(filter(None, map(_line_of, operations))))
        lines = f" (made from {' to '.join(dict.fromkeys((found[0], found[-1])))})" if found else ""
        where = describe(self._program, item.source)
        return ExecutionError(f"{where}{lines} failed: {type(error).__name__}: {text}")


def _line_of(instruction: Any) -> str:
    op = getattr(instruction, "op", None) or getattr(instruction, "used_by", None)
    return _jax.source_line(op.source) if op is not None else ""
