"""The back-end for pipelines: one controller issues the instructions of all submeshes, in an order that keeps each
list's own.

A call walks one list of *items*, in which every instruction has its executable or its transfer and the numbers of its
buffers. A receive is in no list: the send has issued the whole transfer. Everything is dispatched without waiting.
Buffers are dropped, or donated, exactly where the program says. In a multi-process run each process compiles and lists
what its own devices take part in, in the one order of the program (`processes.ordering`).

*Errors.* Errors of the user's callbacks name their place themselves (`callbacks`). Other failures are given the
instruction that met them, and the lines that its executable was made from. Work that was dispatched before goes on in
either case, and is waited for: its errors would otherwise come up later, where nobody expects them. In a multi-process
run no process waits: what another sends may never come, for it may wait for this one.

*Interrupts.* A run that was dispatched cannot be called back. An interrupt waits for what is under way, then goes on;
arrays that were donated before are gone, and all others can be used.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import jax
from jax.sharding import NamedSharding

from alpa_lite import _jax
from alpa_lite.cluster import Cluster
from alpa_lite.errors import ExecutionError
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.program import Free, Instruction, Receive, Run, Send, describe
from alpa_lite.ir.timeline import Timeline
from alpa_lite.passes.lowering.program import Instruction as StageInstruction
from alpa_lite.passes.programs import transfers
from alpa_lite.passes.programs.writing import WrittenProgram
from alpa_lite.passes.stages import functions
from alpa_lite.processes import ordering
from alpa_lite.runtime import placement
from alpa_lite.runtime.buffers import ProgramBuffers
from alpa_lite.runtime.compile import Call, picker
from alpa_lite.runtime.debug import callbacks, watchdog
from alpa_lite.runtime.debug.profile import TimelineRecorder
from alpa_lite.runtime.multihost.permute import CrossProcessTransfer
from alpa_lite.runtime.multihost.remote_outputs import RemoteOutputs
from alpa_lite.runtime.step import Executable, LoadOptions
from alpa_lite.runtime.transfer import Transfer

Watch = Callable[[int, Sequence[Any]], None]
"""Called after each item of the dispatch loop with its number and all buffers."""

_DISPATCHING = threading.Lock()
"""Held while a pipeline's executables are started, so that all devices get those of two threads in the same order.

Where devices get them in different orders, each waits in a collective for devices that wait in the other's.
"""


@dataclass(frozen=True, eq=False)
class Launch:
    """Calls an executable."""

    source: Run
    call: Call
    pick_donated: Callable[[Sequence[Any]], Sequence[Any]]  # takes its group of arrays from all buffers
    pick_kept: Callable[[Sequence[Any]], Sequence[Any]]
    donated_buffers: tuple[int, ...]  # that it consumes
    outputs: tuple[int, ...]  # buffers that it defines


@dataclass(frozen=True, eq=False)
class Move:
    """Issues a transfer from one submesh to another."""

    source: Send
    call: Callable[[Sequence[Any]], Sequence[Any]]  # from arrays on one submesh to arrays on another
    sent_buffers: tuple[int, ...]  # none where this process has no device of the sender
    outputs: tuple[int, ...]  # none where this process has no device of the receiver


@dataclass(frozen=True, eq=False)
class Drop:
    """Drops buffers."""

    source: Free
    buffers: tuple[int, ...]
    outputs: tuple[int, ...] = ()


Item = Launch | Move | Drop


class PipelineExecutable(Executable):
    """The program of a pipeline on devices."""

    def __init__(
        self, traced: Traced, written: WrittenProgram, cluster: Cluster, options: LoadOptions | None = None
    ) -> None:
        """Prepares the program; its executables are compiled by the first call, or by `compiled`.

        Args:
          cluster: that transfers were planned for.
          options: how the step is put on devices. `donate` has been planned for.

        Raises:
          PlanError: there are fewer devices than the program needs.
        """
        options = options or LoadOptions(compiler_options=cluster.compiler_options)
        self._written, self._program, self._cluster = written, written.program, cluster
        buffers = ProgramBuffers(traced, written.program, options.devices)
        self._items: list[Item] = []
        self._initial: list[Any] = [None] * len(self._program.buffers)  # before the arguments are placed
        self._shared = buffers.shared_outputs(traced)
        self._remote = RemoteOutputs(traced, buffers)
        # No executable makes these results, so that none decides whether their dtype is weak.
        self._unlabelled = [*buffers.unmade, *self._remote.broadcast_results]
        super().__init__(traced, buffers, options, self._emit_part)

    takes_uncommitted = False

    def trace(self, *args: Any, **kwargs: Any) -> Timeline:
        """Runs the step once on copies of the arguments, and returns when everything of it ran. Results are dropped.

        The step is dispatched as by a call. Its arguments are neither donated nor, if they are modules, updated.
        """
        buffers = self._buffers_of_copies(args, kwargs)
        jax.block_until_ready([x for x in buffers if x is not None])
        with TimelineRecorder(self._program, self._items, self._buffers.sharding) as recorder:
            self._dispatch(buffers, recorder)
        return recorder.timeline()

    # -- the back-end -----------------------------------------------------------------------------------------

    def _emit_part(self, number: int) -> tuple[Callable[..., Sequence[Any]], Sequence[StageInstruction]]:
        """Returns the part of a stage that an executable computes."""
        stage, position = self._written.functions[number]
        parts, mesh = self._written.stages[stage], self._buffers.meshes[self._program.executables[number].mesh]
        part = parts.items[position]
        return functions.function_of(parts, part, mesh, self._program.num_microbatches), part.instructions

    def _load(self, calls: Mapping[int, Call], numbered: Collection[int]) -> None:
        """Copies the constants, and lists the items."""
        for buffer, array in self._buffers.constants(self._traced).items():
            self._initial[buffer] = array
        self._items = self._list_items(calls, numbered)

    def _output_shardings(self) -> list[NamedSharding]:
        """Returns those of the buffers, but for results that are broadcast."""
        return self._remote.shardings(super()._output_shardings())

    def _start(self, leaves: Sequence[Any] | None) -> list[Any]:
        """Returns the constants, and the state in its buffers."""
        buffers = list(self._initial)
        if leaves is not None:
            for argument, part, buffer in self._in_place:
                buffers[buffer] = leaves[argument] if part is None else leaves[argument].parts[part]
        return buffers

    def _execute(self, buffers: list[Any]) -> list[Any]:
        """Walks the items; copies results that share buffers with state, and completes those of other processes."""
        watch = None
        if watchdog.active:
            items, program = self._items, self._program
            watch = watchdog.track_instructions(
                lambda number: describe(program, items[number].source), [item.outputs for item in items]
            )
        self._dispatch(buffers, watch)
        outputs = [buffers[i] for i in self._program.outputs]
        shared = [n for n in self._shared if outputs[n] is not None]
        for n, copied in zip(shared, placement.copy_arrays([outputs[n] for n in shared]), strict=True):
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
                            for i in item.donated_buffers:
                                buffers[i] = None
                        case Move():
                            results = item.call([buffers[i] for i in item.sent_buffers])
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
        for array in buffers if all(self._buffers.is_local) else ():
            if array is not None and not array.is_deleted():
                with contextlib.suppress(Exception):
                    array.block_until_ready()

    def _located(self, error: Exception, item: Item) -> Exception:
        """Returns the error with the stage, the micro-batch and the source line of the item that met it in front."""
        text = str(error)
        if callbacks.MARKER in text:  # of a callback, in the last line of the trace that JAX made of it
            return ExecutionError(text.rsplit(callbacks.MARKER, 1)[1].strip())
        operations = self._emit(item.source.executable)[1] if isinstance(item.source, Run) else ()
        ops = [getattr(one, "op", None) or getattr(one, "used_by", None) for one in operations]
        found = list(dict.fromkeys(filter(None, (_jax.source_line(op.source) for op in ops if op is not None))))
        lines = f" (made from {' to '.join(dict.fromkeys((found[0], found[-1])))})" if found else ""
        where = describe(self._program, item.source)
        return ExecutionError(f"{where}{lines} failed: {type(error).__name__}: {text}")

    # -- compiling --------------------------------------------------------------------------------------------

    def _list_items(self, calls: Mapping[int, Call], numbered: Collection[int]) -> list[Item]:
        """Returns the items that a call walks.

        Args:
          calls: how each executable is called.
          numbered: the executables whose callbacks need the number of the micro-batch.
        """
        program, here, is_local = self._program, self._buffers.here, self._buffers.is_local
        devices = self._buffers.devices
        processes = [device.process_index for device in devices]
        order: Any = program.order if len(set(processes)) == 1 else ordering.issue_order(program, processes)
        movers: dict[Any, Transfer | CrossProcessTransfer] = {}
        out: list[Item] = []
        for mesh, position in order:
            item: Instruction = program.lists[mesh][position]
            match item:
                case Run(executable=number) if here[mesh]:
                    kept = [b for n, b in enumerate(item.inputs) if n not in program.executables[number].donated_inputs]
                    call, donated = calls[number], program.consumed_buffers(item)
                    if number in numbered:
                        call = self._bind_number(call, mesh, item.microbatch)
                    out.append(Launch(item, call, picker(donated), picker(kept), donated, item.outputs))
                case Send(transfer=number):
                    transfer = program.transfers[number]
                    sent = transfer.sent_buffers if here[transfer.source] else ()
                    received = transfer.received_buffers if here[transfer.destination] else ()
                    if sent or received:
                        plans = transfers.plans_of(program, number, self._cluster)
                        if plans not in movers:  # equal plans share one
                            within = is_local[transfer.source] and is_local[transfer.destination]
                            movers[plans] = (Transfer if within else CrossProcessTransfer)(plans, devices)
                        out.append(Move(item, movers[plans], sent, received))
                case Free(buffers=buffers) if here[mesh]:
                    out.append(Drop(item, buffers))
                case Run() | Receive() | Free():
                    pass  # of another process; the whole transfer is issued where it is sent
        return out
