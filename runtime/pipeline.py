"""The back-end for pipelines: one controller issues the instructions of all submeshes, in an order that keeps each
list's own.

A program has a list of instructions for each submesh. A call must not search in them: it walks one list of *items*, in
which every instruction has its executable or its transfer and the numbers of its buffers. A receive is in no list: the
send has issued the whole transfer. Everything is dispatched without waiting: JAX starts a stage's executable when its
inputs are there, so that stages run side by side although one thread issues them. Buffers are dropped, or donated,
exactly where the program says.

*Several processes.* Each compiles and lists what its own devices take part in, and no more: runs on submeshes that it
has devices of, and transfers that begin or end on one. All keep the one order of the program, so that none waits for
ever for the others (`processes.ordering`).

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.cluster import Cluster
from alpa_lite.errors import ExecutionError, PlanError
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.program import Free, Instruction, Receive, Run, Send, describe
from alpa_lite.ir.timeline import Timeline
from alpa_lite.passes.lowering.program import Instruction as StageInstruction
from alpa_lite.passes.lowering.program import spec_of
from alpa_lite.passes.programs import transfers
from alpa_lite.passes.programs.writing import Written
from alpa_lite.passes.stages import functions
from alpa_lite.processes import ordering
from alpa_lite.runtime import callbacks, meshes, ownership, placement
from alpa_lite.runtime.binding import Buffers
from alpa_lite.runtime.compile import Call, FlatFunction, compile_all, picker, with_number
from alpa_lite.runtime.debug import watchdog
from alpa_lite.runtime.debug.profile import MemoryProfile, TimelineRecorder
from alpa_lite.runtime.multihost import global_array
from alpa_lite.runtime.multihost.permute import CrossProcessTransfer
from alpa_lite.runtime.multihost.remote_outputs import RemoteOutputs
from alpa_lite.runtime.stacked import StackedLeaves
from alpa_lite.runtime.step import Executable, LoadOptions
from alpa_lite.runtime.transfer import Transfer

Watch = Callable[[int, Sequence[Any]], None]
"""Called after each item of the dispatch loop with its number and all buffers."""

Mover = Callable[[Sequence[Any]], Sequence[Any]]
"""From arrays on one submesh to arrays on another."""

_DISPATCHING = threading.Lock()
"""Held while a pipeline's executables are started, so that all devices get those of two threads in the same order.

Where devices get them in different orders, each waits in a collective for devices that wait in the other's.
"""


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
    call: Mover
    sent: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Drop:
    """Drops buffers."""

    source: Free
    buffers: tuple[int, ...]
    outputs: tuple[int, ...] = ()


Item = Launch | Move | Drop


class PipelineExecutable(Executable):
    """A pipelined step on the submeshes of its stages."""

    def __init__(self, traced: Traced, written: Written, cluster: Cluster, options: LoadOptions | None = None) -> None:
        """Prepares the executables; they are compiled by the first call, or by `compiled`.

        Args:
          cluster: that transfers were planned for.
          options: how the step is put on devices. `donate` has been planned for.

        Raises:
          PlanError: there are fewer devices than the program needs.
        """
        options = options or LoadOptions(compiler_options=cluster.compiler_options)
        self._written, self._cluster, self._compiler_options = written, cluster, options.compiler_options
        program = self._program = written.program
        self._devices = meshes.available() if options.devices is None else list(options.devices)
        needed = max(submesh.devices.stop for submesh in program.submeshes)
        if len(self._devices) < needed:
            raise PlanError(
                f"the plan's {len(program.submeshes)} submeshes have {needed} devices, but there are "
                f"{len(self._devices)}; plan for a cluster of {len(self._devices)}, or start JAX with more devices"
            )
        self._meshes = [meshes.submesh_of(submesh, self._devices) for submesh in program.submeshes]
        owners = [{device.process_index for device in mesh.devices.flat} for mesh in self._meshes]
        self._here = [jax.process_index() in one for one in owners]
        self._is_local = [one == {jax.process_index()} for one in owners]
        self._shardings: dict[Any, NamedSharding] = {}
        self._failures = callbacks.Failures()
        self._runs = [item for items in program.lists for item in items if isinstance(item, Run)]
        weak = {b for b, output in zip(program.outputs, traced.outputs, strict=True) if output.weak}
        self._weak = {(run.executable, n) for run in self._runs for n, b in enumerate(run.outputs) if b in weak}
        self._items: list[Item] = []
        self._initial: list[Any] = []  # all buffers before the arguments are placed
        self._shared = ownership.shared_outputs(program, traced)
        self._remote = RemoteOutputs(traced, program, self._devices, self._here, self._sharding)
        # No executable makes these results, so that none decides whether their dtype is weak.
        made = {buffer for run in self._runs for buffer in run.outputs}
        self._unlabelled = [n for n, buffer in enumerate(program.outputs) if buffer not in made]
        self._unlabelled += self._remote.broadcast_results
        in_place = ownership.in_place_state(program, traced) if all(self._is_local) or not traced.stacked else {}
        buffers = Buffers(program.inputs, self._sharding, ownership.owned_inputs(program), in_place)
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
        profile = MemoryProfile(self._meshes, [x for x in self._initial if x is not None])
        buffers = self._buffers_of_copies(args, kwargs)
        profile(-1, buffers)
        self._dispatch(buffers, profile)
        return tuple(profile.most)

    # -- the back-end -----------------------------------------------------------------------------------------

    def _compile(self) -> tuple[Any, ...]:
        program, processes = self._program, [device.process_index for device in self._devices]
        order: Any = program.order if len(set(processes)) == 1 else ordering.issue_order(program, processes)
        with _jax.without_mesh():
            functions = {n: self._function(n) for n, one in enumerate(program.executables) if self._here[one.mesh]}
            made = compile_all(self._traced.name, list(functions.values()), self._compiler_options)
            numbered = {n for n, function in functions.items() if function.failures is not None}
            calls = {n: call for n, (_, call) in zip(functions, made, strict=True)}
            self._initial, self._items = self._initial_buffers(), self._list_items(order, calls, numbered)
        compiled = {n: one for n, (one, _) in zip(functions, made, strict=True)}
        return tuple(map(compiled.get, range(len(program.executables))))

    def lowered(self) -> Iterator[jax.stages.Lowered]:
        """Each executable lowered for its submesh, whose devices may be those of a topology that is described alone."""
        for number in range(len(self._program.executables)):
            yield self._function(number).lower()

    @property
    def _program_shardings(self) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """As of `Executable`. An argument that no stage reads is replicated on the first submesh."""
        anywhere = NamedSharding(self._meshes[0], PartitionSpec())
        arguments = [self._sharding(group[0]) if group else anywhere for group in self._program.inputs]
        results = self._remote.shardings(list(map(self._sharding, self._program.outputs)))
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
        return self._remote.complete(outputs)

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
        for array in buffers if all(self._is_local) else ():
            if array is not None and not array.is_deleted():
                with contextlib.suppress(Exception):
                    array.block_until_ready()

    def _located(self, error: Exception, item: Item) -> Exception:
        """The error with the stage, the micro-batch and the source line of the item that met it in front."""
        text = str(error)
        if callbacks.MARKER in text:  # of a callback, in the last line of the trace that JAX made of it
            return ExecutionError(text.rsplit(callbacks.MARKER, 1)[1].strip())
        operations = self._instructions(item.source.executable) if isinstance(item.source, Run) else ()
        found = list(dict.fromkeys(filter(None, map(_line_of, operations))))
        lines = f" (made from {' to '.join(dict.fromkeys((found[0], found[-1])))})" if found else ""
        where = describe(self._program, item.source)
        return ExecutionError(f"{where}{lines} failed: {type(error).__name__}: {text}")

    # -- compiling --------------------------------------------------------------------------------------------

    def _sharding(self, number: int) -> NamedSharding:
        """The sharding of a buffer; one object for equal ones. Compiled programs replicate what has no elements."""
        item = self._program.buffers[number]
        spec = PartitionSpec() if 0 in item.shape else spec_of(item.layout)
        return self._shardings.setdefault((item.mesh, spec), NamedSharding(self._meshes[item.mesh], spec))

    def _function(self, number: int) -> FlatFunction:
        """An executable, to be compiled."""
        program, executable = self._program, self._program.executables[number]
        run = next(run for run in self._runs if run.executable == number)
        stage, position = self._written.functions[number]
        parts, mesh = self._written.stages[stage], self._meshes[executable.mesh]

        def typed(b: int, weak: bool = False) -> jax.ShapeDtypeStruct:
            one = program.buffers[b]
            return jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=self._sharding(b), weak_type=weak)

        function = functions.function_of(parts, parts.items[position], mesh, program.num_microbatches)
        inputs = list(map(typed, run.inputs))
        results = [typed(b, (number, n) in self._weak) for n, b in enumerate(run.outputs)]
        failures = self._failures if callbacks.calls_back(self._instructions(number)) else None
        return FlatFunction(executable.name, function, mesh, inputs, results, executable.donated, failures)

    def _instructions(self, number: int) -> Sequence[StageInstruction]:
        """The part of a stage that an executable computes."""
        stage, position = self._written.functions[number]
        return self._written.stages[stage].items[position].instructions

    def _initial_buffers(self) -> list[Any]:
        """All buffers, of which there are constants and the micro-batch numbers that functions compute with."""
        program = self._program
        out: list[Any] = [None] * len(program.buffers)
        numbers = [(np.int32(n), [b]) for some in program.numbers for n, b in enumerate(some)]
        for value, buffers in (*zip(self._traced.graph.constants, program.constants, strict=False), *numbers):
            for b in buffers:  # one by one: processes that share a mesh copy the same arrays together
                if self._here[program.buffers[b].mesh]:
                    (out[b],) = placement.copies([value], [self._sharding(b)])
        return out

    def _list_items(self, order: Any, calls: Mapping[int, Call], numbered: set[int]) -> list[Item]:
        """The items that a call walks.

        Args:
          order: (submesh, position in its list) of each instruction.
          calls: how each executable is called.
          numbered: the executables whose callbacks need the number of the micro-batch.
        """
        program = self._program
        movers: dict[Any, Mover] = {}
        numbers: dict[tuple[int, int], Any] = {}  # by submesh and micro-batch
        out: list[Item] = []
        for mesh, position in order:
            item: Instruction = program.lists[mesh][position]
            match item:
                case Run(executable=number) if self._here[mesh]:
                    kept = [b for n, b in enumerate(item.inputs) if n not in program.executables[number].donated]
                    call, donated, key = calls[number], program.consumed(item), (mesh, item.microbatch)
                    if number in numbered:
                        if key not in numbers:
                            everywhere = NamedSharding(self._meshes[mesh], PartitionSpec())
                            everywhere = self._shardings.setdefault((mesh, PartitionSpec()), everywhere)
                            (numbers[key],) = global_array.put([np.int32(item.microbatch)], [everywhere])
                        call = with_number(call, numbers[key])
                    out.append(Launch(item, call, picker(donated), picker(kept), donated, item.outputs))
                case Send(transfer=number):
                    transfer = program.transfers[number]
                    sent = transfer.sent if self._here[transfer.source] else ()
                    received = transfer.received if self._here[transfer.destination] else ()
                    if sent or received:
                        plans = transfers.plans_of(program, number, self._cluster)
                        if plans not in movers:  # equal plans share one
                            is_local = self._is_local[transfer.source] and self._is_local[transfer.destination]
                            movers[plans] = (Transfer if is_local else CrossProcessTransfer)(plans, self._devices)
                        out.append(Move(item, movers[plans], sent, received))
                case Free(buffers=buffers) if self._here[mesh]:
                    out.append(Drop(item, buffers))
                case Run() | Receive() | Free():
                    pass  # of another process; the whole transfer is issued where it is sent
        return out


def _line_of(instruction: Any) -> str:
    op = getattr(instruction, "op", None) or getattr(instruction, "used_by", None)
    return _jax.source_line(op.source) if op is not None else ""
