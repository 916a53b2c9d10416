"""Compiles the executables of a pipeline, and writes the flat list of items that a call walks.

A program has a list of instructions for each submesh. A call must not search in them: it walks one list in an order
that keeps each submesh's own, in which every instruction has its executable or its transfer and the numbers of its
buffers. A receive is in no list: the send has issued the whole transfer.

In a multi-process run each process compiles and lists what its own devices take part in, and no more: runs on submeshes
that it has devices of, and transfers that begin or end on one. All keep the one order of the program, so that none
waits for ever for the others (`processes.ordering`).

Executables with callbacks of the user's take the number of the micro-batch as one more argument, so that an error of
theirs can name it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.cluster import Cluster
from alpa_lite.errors import PlanError
from alpa_lite.graph import Traced
from alpa_lite.passes.lowering.program import spec_of
from alpa_lite.passes.programs import transfers
from alpa_lite.passes.programs.writing import Written
from alpa_lite.passes.stages import functions, segments
from alpa_lite.processes import ordering
from alpa_lite.program import Free, Instruction, Program, Receive, Run, Send
from alpa_lite.runtime import callbacks, global_array, meshes, placement
from alpa_lite.runtime.compile import Call, FlatFunction, compile_all, picker
from alpa_lite.runtime.transfer import Transfer
from alpa_lite.runtime.transfer_multihost import CrossProcessTransfer


@dataclass(frozen=True, eq=False)
class Launch:
    """Calls an executable.

    Attributes:
      source: the instruction.
      call: the executable.
      pick_donated, pick_kept: take its groups of arrays from all buffers.
      donated: the buffers that it consumes.
      outputs: the buffers that it defines.
    """

    source: Run
    call: Call
    pick_donated: Callable[[Sequence[Any]], Sequence[Any]]
    pick_kept: Callable[[Sequence[Any]], Sequence[Any]]
    donated: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Move:
    """Issues a transfer from one submesh to another.

    Attributes:
      source: the instruction.
      call: moves arrays.
      sent: the buffers that it reads; none where this process has no device of the sender.
      outputs: the buffers that it defines; none where this process has no device of the receiver.
    """

    source: Send
    call: Callable[[Sequence[Any]], Sequence[Any]]
    sent: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Drop:
    """Drops buffers."""

    source: Free
    buffers: tuple[int, ...]
    outputs: tuple[int, ...] = ()


Item = Launch | Move | Drop


class PipelineCompiler:
    """The executables of a pipeline on its submeshes.

    Attributes:
      devices: of the cluster, by number.
      meshes: the submeshes.
      here: for each, whether this process has a device of it.
    """

    def __init__(
        self, traced: Traced, written: Written, cluster: Cluster, devices: Sequence[Any] | None,
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Args: as for `PipelineExecutable`; the options are those of XLA.

        Raises:
          PlanError: there are fewer devices than the program needs.
        """
        self._traced, self._written, self._cluster, self._options = traced, written, cluster, options
        self._program: Program = written.program
        self.devices = meshes.available() if devices is None else list(devices)
        needed = max(submesh.devices.stop for submesh in self._program.submeshes)
        if len(self.devices) < needed:
            raise PlanError(
                f"the plan's {len(self._program.submeshes)} submeshes have {needed} devices, but there are "
                f"{len(self.devices)}; plan for a cluster of {len(self.devices)}, or start JAX with more devices"
            )
        self.meshes = [meshes.submesh_of(submesh, self.devices) for submesh in self._program.submeshes]
        here = jax.process_index()
        self.here = [any(device.process_index == here for device in mesh.devices.flat) for mesh in self.meshes]
        self._shardings: dict[Any, NamedSharding] = {}
        self._failures = callbacks.Failures()
        self._movers: dict[Any, Callable[[Sequence[Any]], Sequence[Any]]] = {}
        self._zeros: dict[Any, Any] = {}  # blocks that transfers between processes share
        self._runs = [item for items in self._program.lists for item in items if isinstance(item, Run)]
        outputs = zip(self._program.outputs, traced.outputs, strict=True)
        weak = {buffer for buffer, output in outputs if output.weak}
        self._weak = {
            (run.executable, n) for run in self._runs for n, buffer in enumerate(run.outputs) if buffer in weak
        }  # fmt: skip

    def sharding(self, number: int) -> NamedSharding:
        """The sharding of a buffer; one object for equal ones. Compiled programs replicate what has no elements."""
        item = self._program.buffers[number]
        spec = PartitionSpec() if 0 in item.shape else spec_of(item.layout)
        return self._shardings.setdefault((item.mesh, spec), NamedSharding(self.meshes[item.mesh], spec))

    def unmade_results(self) -> tuple[int, ...]:
        """The results of the step that no executable makes, so that none decides whether their dtype is weak."""
        made = {buffer for run in self._runs for buffer in run.outputs}
        return tuple(n for n, buffer in enumerate(self._program.outputs) if buffer not in made)

    def lowered(self) -> Iterator[jax.stages.Lowered]:
        """Each executable lowered for its submesh, whose devices may be those of a topology that is described alone."""
        for number in range(len(self._program.executables)):
            yield self._function(number).lower()

    def segment(self, number: int) -> segments.Segment:
        """The part of a stage that an executable computes."""
        stage, position = self._written.functions[number]
        return self._written.stages[stage].items[position]

    def _function(self, number: int) -> FlatFunction:
        """An executable, to be compiled."""
        program, executable = self._program, self._program.executables[number]
        run = next(run for run in self._runs if run.executable == number)
        mesh, segment = self.meshes[executable.mesh], self.segment(number)
        parts = self._written.stages[self._written.functions[number][0]]

        def typed(b: int) -> jax.ShapeDtypeStruct:
            one = program.buffers[b]
            return jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=self.sharding(b))

        return FlatFunction(
            executable.name,
            functions.function_of(parts, segment, mesh, program.num_microbatches),
            mesh,
            list(map(typed, run.inputs)),
            list(map(typed, run.outputs)),
            executable.donated,
            [(number, n) in self._weak for n in range(len(run.outputs))],
            callbacks.calls_back(segment.instructions),
            self._failures,
        )

    @_jax.without_mesh()
    def compile(self) -> tuple[tuple[Any, ...], list[Item], list[Any]]:
        """Compiles all executables.

        Returns:
          The `jax.stages.Compiled` of each executable, in the program's order, None for those of other processes; the
          items that the dispatch loop walks; and all buffers before the arguments are placed, None but for constants
          and micro-batch numbers.
        """
        program = self._program
        processes = [device.process_index for device in self.devices]
        order: Any = program.order
        if len(set(processes)) > 1:
            ordering.check_program(program, processes)
            order = ordering.issue_order(program, processes)
        mine = [number for number, one in enumerate(program.executables) if self.here[one.mesh]]
        functions = [self._function(number) for number in mine]
        made, called = compile_all(self._traced.name, functions, self._options)
        calls, compiled = dict(zip(mine, called, strict=True)), dict(zip(mine, made, strict=True))
        numbered = {number for number, one in zip(mine, functions, strict=True) if one.calls_back}
        initial, numbers = self._initial_buffers(numbered)
        items: list[Item] = []
        for mesh, position in order:
            item: Instruction = program.lists[mesh][position]
            match item:
                case Run(executable=number) if self.here[mesh]:
                    kept = [b for n, b in enumerate(item.inputs) if n not in program.executables[number].donated]
                    if number in numbered:
                        kept.append(numbers[mesh, item.microbatch])
                    donated = program.consumed(item)
                    items.append(Launch(item, calls[number], picker(donated), picker(kept), donated, item.outputs))
                case Send(transfer=number):
                    transfer = program.transfers[number]
                    sent = transfer.sent if self.here[transfer.source] else ()
                    received = transfer.received if self.here[transfer.destination] else ()
                    if sent or received:
                        items.append(Move(item, self._mover(number), sent, received))
                case Free(buffers=buffers) if self.here[mesh]:
                    items.append(Drop(item, buffers))
                case Run() | Receive() | Free():
                    pass  # of another process; the whole transfer is issued where it is sent
        return tuple(map(compiled.get, range(len(program.executables)))), items, initial

    def _mover(self, number: int) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """A transfer of the program, within this process or between several; equal plans share one."""
        plans = transfers.plans_of(self._program, number, self._cluster)
        if plans not in self._movers:
            ends = {*plans[0].src_mesh.devices, *plans[0].dst_mesh.devices}
            if all(self.devices[n].process_index == jax.process_index() for n in ends):
                self._movers[plans] = Transfer(plans, self.devices)
            else:
                self._movers[plans] = CrossProcessTransfer(plans, self.devices, self._zeros)
        return self._movers[plans]

    def _initial_buffers(self, numbered: set[int]) -> tuple[list[Any], dict[tuple[int, int], int]]:
        """All buffers, of which there are constants and micro-batch numbers; those that callbacks need come last.

        Args:
          numbered: the executables whose callbacks need the number.

        Returns:
          The buffers, and of each (submesh, micro-batch) that has a number the buffer of it.
        """
        program = self._program
        out: list[Any] = [None] * len(program.buffers)
        for constant, buffers in zip(self._traced.graph.constants, program.constants, strict=False):
            for b in buffers:
                if self.here[program.buffers[b].mesh]:
                    (out[b],) = placement.copies([constant], [self.sharding(b)])
        numbers = {
            (mesh, i): b for mesh, buffers in enumerate(program.numbers) if self.here[mesh]
            for i, b in enumerate(buffers)
        }  # fmt: skip
        for (_, microbatch), b in numbers.items():
            (out[b],) = global_array.put([np.int32(microbatch)], [self.sharding(b)])
        runs = [run for run in self._runs if run.executable in numbered]
        needed = {(program.executables[run.executable].mesh, run.microbatch) for run in runs}
        for mesh, microbatch in sorted(needed - numbers.keys()):
            numbers[mesh, microbatch] = len(out)
            out += global_array.put([np.int32(microbatch)], [NamedSharding(self.meshes[mesh], PartitionSpec())])
        return out, numbers
