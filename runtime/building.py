"""Compiles the executables of a pipeline, and writes the flat list of steps that a call walks.

A program has a list of instructions for each submesh. A call must not search in them: what it walks is one list in an
order that keeps each submesh's own, in which every instruction has its compiled function or its mover, the buffers that
it reads and writes, and those that end with it. A receive is in no list: the send has issued the whole transfer.

Of several processes, each compiles and lists what its own devices take part in, and no more: runs on submeshes that it
has devices of, and transfers that begin or end on one. All keep the one order of the program, so that none waits for
ever for the others (`processes.ordering`).

Executables with callbacks of the user's take the number of the micro-batch as one more argument, so that an error of
theirs can name it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from alpa_lite import _jax
from alpa_lite.cluster import Cluster
from alpa_lite.errors import PlanError
from alpa_lite.graph import Traced
from alpa_lite.passes.lowering.program import spec_of
from alpa_lite.passes.programs import transfers
from alpa_lite.passes.programs.writing import Written
from alpa_lite.passes.stages import functions, segments
from alpa_lite.processes import ordering
from alpa_lite.program import Free, Program, Run, Send
from alpa_lite.report import log_messages, progress
from alpa_lite.runtime import callbacks, compiling, meshes, pacing, placement, presence, relabelling
from alpa_lite.runtime.across import MoverAcross
from alpa_lite.runtime.meshes import mesh_of
from alpa_lite.runtime.transfer import Mover

logger = logging.getLogger(__name__)

Step = tuple[bool, Any, Sequence[int], Sequence[int], Sequence[int], Sequence[int]]
"""Whether it is a run; what is called; the buffers that it reads, makes, consumes, and that are dropped after it."""

Numbered = tuple[int, int]
"""A submesh and a micro-batch."""


@dataclass(frozen=True, eq=False)
class Built:
    """What a call walks.

    Attributes:
      compiled: the `jax.stages.Compiled` of each executable, in the program's order; None for those of other processes.
      steps: of the dispatch loop.
      items: the instruction of each step, which drops what the instructions that free buffers after it name: they are
        no steps of their own.
      empty: all buffers before the arguments are placed: constants and micro-batch numbers, else None.
    """

    compiled: list[Any]
    steps: list[Step]
    items: list[Run | Send]
    empty: list[Any]


class Builder:
    """The executables of a pipeline on its submeshes.

    Attributes:
      devices: of the cluster, by number.
      meshes: the submeshes.
      here: for each, whether this process has a device of it.
    """

    def __init__(
        self, traced: Traced, written: Written, cluster: Cluster, devices: Sequence[Any] | None = None,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Args: as for `PipelineExecutable`.

        Raises:
          PlanError: there are fewer devices than the program needs.
        """
        self._traced, self._written, self._cluster = traced, written, cluster
        self._compiler_options = cluster.compiler_options if compiler_options is None else compiler_options
        self._program: Program = written.program
        self.devices = meshes.available() if devices is None else list(devices)
        needed = max(submesh.devices.stop for submesh in self._program.submeshes)
        if len(self.devices) < needed:
            raise PlanError(
                f"the plan's {len(self._program.submeshes)} submeshes have {needed} devices, but there are "
                f"{len(self.devices)}; plan for a cluster of {len(self.devices)}, or start JAX with more devices"
            )
        self.meshes = [
            mesh_of(s.mesh, self.devices[s.first : s.first + s.mesh.size]) for s in self._program.submeshes
        ]  # fmt: skip
        here = jax.process_index()
        self.here = [any(device.process_index == here for device in mesh.devices.flat) for mesh in self.meshes]
        self._shardings: dict[Any, NamedSharding] = {}
        self._sharding_of: dict[int, NamedSharding] = {}  # by buffer, since a call asks for those of its arguments
        self._zeros: dict[Any, Any] = {}  # what transfers between processes share
        self._failures = callbacks.Failures()
        self._weak = self._weak_results()

    def unlabelled_results(self) -> tuple[int, ...]:
        """The results of the step that no executable makes, so that none decides whether their dtype is weak."""
        items = (item for items in self._program.lists for item in items if isinstance(item, Run))
        made = {buffer for item in items for buffer in item.outputs}
        return tuple(n for n, buffer in enumerate(self._program.outputs) if buffer not in made)

    def _weak_results(self) -> frozenset[tuple[int, int]]:
        """(executable, position) of every result with a weak dtype, for a run that makes a result of the step."""
        outputs = zip(self._program.outputs, self._traced.outputs, strict=True)
        weak = {buffer for buffer, output in outputs if output.weak}
        return frozenset(
            (item.executable, position)
            for items in self._program.lists for item in items if isinstance(item, Run)
            for position, buffer in enumerate(item.outputs) if buffer in weak
        )  # fmt: skip

    @_jax.without_mesh()
    def build(self, told: Mapping[int, NamedSharding]) -> Built:
        """Compiles all executables.

        Args:
          told: the shardings of the buffers that all processes are told.
        """
        program = self._program
        processes = [device.process_index for device in self.devices]
        several = len(set(processes)) > 1
        if several:
            ordering.check_program(program, processes)
        steps: list[tuple[bool, Any, Sequence[int], Sequence[int], Sequence[int]]] = []
        freed: dict[int, list[int]] = {}  # after which step; what is free before the first, after that
        items: list[Run | Send] = []
        made = self._executables()
        empty, numbers = self._kept({
            (program.executables[item.executable].mesh, item.microbatch)
            for own, here in zip(program.lists, self.here, strict=True) for item in own
            if here and isinstance(item, Run) and made[item.executable][2]
        })  # fmt: skip
        movers: dict[Any, Mover | MoverAcross] = {}
        others = {*program.outputs, *(buffer for transfer in program.transfers for buffer in transfer.sent)}
        labels: dict[int, Sequence[Any]] = {}  # of the arrays of each transfer to other processes
        for mesh, position in ordering.issue_order(program, processes) if several else program.order:
            item = program.lists[mesh][position]
            match item:
                case Run() if self.here[mesh]:
                    _, call, numbered = made[item.executable]
                    read = (*item.inputs, numbers[mesh, item.microbatch]) if numbered else item.inputs
                    steps.append((True, call, read, item.outputs, program.consumed(item)))
                case Send(transfer=number) if self.here[mesh] or self.here[program.transfers[number].destination]:
                    transfer = program.transfers[number]
                    plans = transfers.plans_of(program, number, self._cluster)
                    for_runs = [n for n, buffer in enumerate(transfer.received) if several and buffer not in others]
                    key = plans, tuple(for_runs)
                    if key not in movers:
                        movers[key] = self._mover(*key, mesh, transfer.destination)
                    mover = movers[key]
                    if isinstance(mover, MoverAcross):
                        labels[number] = mover.labels
                    sent = transfer.sent if self.here[mesh] else ()
                    received = transfer.received if self.here[transfer.destination] else ()
                    steps.append((False, mover if isinstance(mover, Mover) else mover.call, sent, received, ()))
                case Free(buffers=buffers) if self.here[mesh]:
                    freed.setdefault(max(0, len(steps) - 1), []).extend(buffers)
                    continue
                case _:
                    continue  # of another process, or a receive: the whole transfer was issued where it was sent
            items.append(item)
        self._label([compiled for compiled, _, _ in made], labels, told)
        whole: list[Step] = [(*step, tuple(freed.get(number, ()))) for number, step in enumerate(steps)]
        return Built([compiled for compiled, _, _ in made], whole, items, empty)

    def _label(
        self, compiled: Sequence[Any], labels: Mapping[int, Sequence[Any]], told: Mapping[int, NamedSharding]
    ) -> None:
        """Has executables make arrays as transfers to other processes want them, and take them as these bring them.

        Args:
          compiled: each executable; None for those of other processes.
          labels: of the arrays of each such transfer.
          told: as for `build`.
        """
        program = self._program
        results = relabelling.of_results(program, labels, told)
        received = {buffer for number in labels for buffer in program.transfers[number].received}
        taken: dict[int, dict[int, NamedSharding]] = {}
        for item in (item for items in program.lists for item in items if isinstance(item, Run)):
            own = taken.setdefault(item.executable, {})
            own.update({n: self.sharding(b) for n, b in enumerate(item.inputs) if b in received})
        for number, one in enumerate(compiled):
            if one is not None:
                _jax.call_results(one, results.get(number, {}))
                _jax.taking_results(one, taken.get(number, {}))

    def _executables(self) -> list[tuple[Any, Any, bool]]:
        """`_compile` of each executable; of other processes' nothing."""
        executables, first_run = self._program.executables, self._first_runs()
        mine = [number for number, one in enumerate(executables) if self.here[one.mesh]]
        made: list[tuple[Any, Any, bool]] = [(None, None, False)] * len(executables)
        start = time.perf_counter()
        with progress.planning(f"compiling {self._traced.name}") as report:
            for done, number in enumerate(mine):
                report.count("executables compiled", done, len(mine))
                made[number] = self._compile(number, first_run[number])
        logger.info(log_messages.compiled(self._traced.name, len(mine), time.perf_counter() - start))
        return made

    def _mover(
        self, plans: tuple[Any, ...], for_runs: Collection[int], source: int, destination: int
    ) -> Mover | MoverAcross:
        """What moves arrays between two submeshes, of one process or of several.

        Args:
          for_runs: those that are neither sent on nor results of the step.
        """
        here = jax.process_index()
        ends = (self.meshes[source].devices.flat, self.meshes[destination].devices.flat)
        alone = all(device.process_index == here for end in ends for device in end)
        return Mover(plans, self.devices) if alone else MoverAcross(plans, self.devices, self._zeros, for_runs)

    def lowered(self) -> Iterator[jax.stages.Lowered]:
        """Each executable lowered for its submesh, whose devices may be those of a topology that is described alone."""
        first_run = self._first_runs()
        for number in range(len(self._program.executables)):
            yield self._lowered(number, first_run[number])[0]

    def _first_runs(self) -> dict[int, Run]:
        return {item.executable: item for items in self._program.lists for item in items if isinstance(item, Run)}

    def _compile(self, number: int, run: Run) -> tuple[Any, Callable[..., Any], bool]:
        """An executable, how it is called, and whether with the number of the micro-batch: only if it calls back."""
        executable = self._program.executables[number]
        lowered, results, numbered = self._lowered(number, run)
        mesh = self.meshes[executable.mesh]
        compiled = compiling.compiled(lowered, mesh.devices.flat, self._compiler_options)
        launch = pacing.paced(compiled, mesh.devices.flat)
        if numbered and mesh.size > 1:
            look = callbacks.looking(executable.name, mesh, results, self._failures)
            return compiled, lambda *arrays: look(arrays[-1], launch(*arrays)), True
        return compiled, launch, numbered

    @_jax.without_mesh()
    def _lowered(self, number: int, run: Run) -> tuple[jax.stages.Lowered, list[jax.ShapeDtypeStruct], bool]:
        """An executable lowered, its results, and whether it takes the number of the micro-batch."""
        program, executable = self._program, self._program.executables[number]
        mesh, function = self.meshes[executable.mesh], self._function(number)

        def spec(b: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                program.buffers[b].shape, program.buffers[b].dtype, sharding=self.sharding(b)
            )  # fmt: skip

        inputs, results = [spec(b) for b in run.inputs], [spec(b) for b in run.outputs]
        numbered = callbacks.calls_back(self.segment(number).instructions)
        if numbered:
            function = callbacks.located(function, executable.name, self._failures if mesh.size > 1 else None)
            everywhere = NamedSharding(mesh, jax.sharding.PartitionSpec())
            inputs.append(jax.ShapeDtypeStruct((), np.int32, sharding=everywhere))
        function.__name__ = executable.name.replace(" ", "_")
        jitted = jax.jit(
            function,
            in_shardings=tuple(one.sharding for one in inputs),
            out_shardings=[one.sharding for one in results],
            donate_argnums=executable.donated,
            keep_unused=True,
        )
        return jitted.lower(*inputs), results, numbered

    def _function(self, number: int) -> Callable[..., Any]:
        """An executable as a function of flat arrays."""
        parts, segment = self._written.stages[self._written.functions[number][0]], self.segment(number)
        mesh, count = self.meshes[self._program.executables[number].mesh], self._program.num_microbatches
        function = functions.function_of(parts, segment, mesh, count)

        def labelled(*arrays: Any) -> list[Any]:
            results = enumerate(function(*arrays))
            return [_jax.with_weak_type(result, (number, position) in self._weak) for position, result in results]

        return labelled

    def segment(self, number: int) -> segments.Segment:
        """What an executable does."""
        stage, position = self._written.functions[number]
        return self._written.stages[stage].items[position]

    def sharding(self, number: int) -> NamedSharding:
        """Where a buffer lies; one object for all buffers that lie so.

        What has no elements is asked for as replicated: compiled programs return it so.
        """
        found = self._sharding_of.get(number)
        if found is not None:
            return found
        item = self._program.buffers[number]
        key = item.mesh, None if 0 in item.shape else item.layout
        if key not in self._shardings:
            spec = jax.sharding.PartitionSpec() if 0 in item.shape else spec_of(item.layout)
            self._shardings[key] = NamedSharding(self.meshes[item.mesh], spec)
        self._sharding_of[number] = self._shardings[key]
        return self._shardings[key]

    def _kept(self, numbered: set[Numbered]) -> tuple[list[Any], dict[Numbered, int]]:
        """All buffers, of which there are constants and micro-batch numbers; those that callbacks need come last.

        Args:
          numbered: the submeshes and micro-batches whose callbacks need the number.

        Returns:
          The buffers, and of each (submesh, micro-batch) that has a number the buffer of it.
        """
        program = self._program
        out: list[Any] = [None] * len(program.buffers)
        numbers: dict[Numbered, int] = {}
        for constant, buffers in zip(self._traced.graph.constants, program.constants, strict=False):
            for number in buffers:
                if self.here[program.buffers[number].mesh]:
                    (out[number],) = placement.copies([constant], [self.sharding(number)])
        for mesh, buffers in enumerate(program.numbers):
            for i, number in enumerate(buffers):
                if self.here[mesh]:
                    (out[number],) = presence.put([np.int32(i)], [self.sharding(number)])
                    numbers[mesh, i] = number
        for mesh, microbatch in sorted(numbered - numbers.keys()):
            numbers[mesh, microbatch] = len(out)
            sharding = NamedSharding(self.meshes[mesh], jax.sharding.PartitionSpec())
            out += presence.put([np.int32(microbatch)], [sharding])
        return out, numbers
