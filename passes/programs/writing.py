"""Writes the program of a pipeline: what each submesh runs, sends, receives and frees, in which order.

Problem. Given the stages in segments and a schedule (a list of tasks for each submesh), write one instruction list for
each submesh, such that every value is where its reader is, buffers end as soon as nothing reads them, and the lists
never wait for each other.

Answer. The tasks are walked in the order in which they would start if runs and transfers took their predicted times:
whenever a task's values from other stages have arrived, it is written down, with the receives that it needs before it
and the sends that it causes after it. Transfers get their numbers in this order, which is thereby one that no list can
contradict. An executable consumes the accumulators that it adds to; other buffers are ended by `programs.ends`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from alpa_lite.errors import OrderError
from alpa_lite.ir.graph import Lit, Traced
from alpa_lite.ir.layout import Layout
from alpa_lite.ir.paths import format_path
from alpa_lite.ir.program import Buffer, Instruction, Program, Receive, Run, Send, Transfer, check
from alpa_lite.passes.programs.calls import BufferRef, Call, Calls, SegmentKey, ref
from alpa_lite.passes.programs.ends import end_buffers
from alpa_lite.passes.programs.simulation import Clocks
from alpa_lite.passes.stages.segments import Segments, Wire


@dataclass(frozen=True, eq=False)
class WrittenProgram:
    """A program and the functions that its executables stand for.

    Attributes:
      mesh_of: the submesh of each stage.
      functions: for each executable, (stage, position in `Segments.items`).
    """

    program: Program
    stages: tuple[Segments, ...]
    mesh_of: tuple[int, ...]
    functions: tuple[tuple[int, int], ...]


def build(traced: Traced, calls: Calls, *, donated: Collection[int]) -> WrittenProgram:
    """Writes and checks the program.

    Args:
      traced: the accumulated step.
      donated: the flat arguments whose buffers the step may consume.
    """
    writer = _Writer(traced, calls)
    program = end_buffers(writer.program(), donated)
    check(program)
    functions = tuple(calls.of_segment[key].function for key in writer.called)
    return WrittenProgram(program, tuple(calls.stages), calls.mesh_of, functions)


Move = tuple[Hashable, BufferRef, BufferRef, int]
"""A group, a value where it is and where it is wanted, and the register that it is for there."""


class _Writer:
    """The tables that one program is written with."""

    def __init__(self, traced: Traced, calls: Calls) -> None:
        self.traced, self.calls, self.stages, self.schedule = traced, calls, calls.stages, calls.schedule
        self.buffers: list[Buffer] = []
        self.transfers: list[Transfer] = []
        self.lists: list[list[Instruction]] = [[] for _ in calls.submeshes]
        self.at: dict[BufferRef, int] = {}  # the buffer of each value at present
        self.called: dict[SegmentKey, int] = {}  # the numbers of the executables, in the order of their first runs
        # When a value from another stage is there, and the transfer that brings it, -1 for what is in place.
        self.arrivals: dict[BufferRef, tuple[float, int]] = {}
        self.received: set[int] = {-1}
        self.clocks = Clocks(len(self.lists))

    def program(self) -> Program:
        """Writes the lists; nothing is freed yet."""
        inputs, constants, numbers = self._place()
        for stage in range(len(self.stages)):
            self._run((stage, "prologue", 0))
        self._tasks()
        for current in range(1 + max((s.round for p in self.stages for s in p.items if s.kind == "update"), default=0)):
            for stage in range(len(self.stages)):
                self._run((stage, "update", current))
            self._exchange(current)
        results = {
            port.number: self.at[self._result(stage, position)]
            for stage, parts in enumerate(self.stages)
            for position, port in enumerate(parts.stage.outputs)
            if port.kind == "argument"
        }
        return Program(
            submeshes=tuple(self.calls.submeshes),
            executables=tuple(self.calls.of_segment[key].executable for key in self.called),
            buffers=tuple(self.buffers),
            transfers=tuple(self.transfers),
            lists=tuple(map(tuple, self.lists)),
            inputs=tuple(map(tuple, inputs)),
            constants=tuple(map(tuple, constants)),
            numbers=tuple(map(tuple, numbers)),
            outputs=tuple(results[i] for i in range(len(self.traced.outputs))),
            schedule=self.schedule.name,
            num_microbatches=self.schedule.num_microbatches,
        )

    # -- buffers and transfers --------------------------------------------------------------------------------------

    def _buffer(self, template: Buffer, name: str, microbatch: int = -1) -> int:
        """Returns a new buffer."""
        self.buffers.append(Buffer(*template[:5], microbatch, name))
        return len(self.buffers) - 1

    def _move(self, moves: Iterable[Move], *, received: bool = False) -> dict[BufferRef, int]:
        """Sends values to other stages, those of one group in one transfer.

        Args:
          received: whether the other stages receive at once.

        Returns:
          For each value where it is wanted, the transfer that brings it, -1 for what is in place.
        """
        groups: dict[Hashable, list[tuple[BufferRef, int, int, float]]] = {}
        brought: dict[BufferRef, int] = {}
        for group, there, here, register in moves:
            sent = made = self.at[there]
            ends = self.buffers[sent].mesh, self.buffers[sent].layout
            template, seconds = self.calls.passage(*ends, here.stage, register)
            if template is not None:
                made = self._buffer(template, self.buffers[sent].name, there.microbatch)
                groups.setdefault(group, []).append((here, sent, made, seconds))
            self.at[here], brought[here] = made, -1
        for some in groups.values():
            values, sents, mades, times = zip(*some, strict=True)
            source, destination, number = self.buffers[sents[0]].mesh, self.buffers[mades[0]].mesh, len(self.transfers)
            self.transfers.append(Transfer(source, destination, sents, mades, sum(times), values[0].microbatch))
            self.lists[source].append(Send(number))
            if received:
                self.lists[destination].append(Receive(number))
            brought |= dict.fromkeys(values, number)
        return brought

    def _copy(self, pairs: Iterable[tuple[BufferRef, BufferRef]]) -> None:
        """Copies values to registers of other stages, once a step; a pair of stages shares a transfer."""
        self._move([((a.stage, b.stage), a, b, b.wire.number) for a, b in pairs], received=True)

    def _place(self) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        """Returns buffers of arguments, constants and micro-batch numbers; state that others read is sent to them."""
        calls, placed, owned = self.calls, dict[tuple[str, int, Buffer], int](), dict[int, BufferRef]()
        inputs, constants, numbers = (
            [[] for _ in some] for some in (self.traced.arguments, self.traced.graph.constants, self.lists)
        )
        copies: list[tuple[int, BufferRef]] = []
        for stage, parts in enumerate(self.stages):
            ports = [(port.kind, port.number) for port in parts.stage.inputs]
            ports += [("constant", number) for number in parts.stage.constants]
            for (kind, number), register in zip(ports, parts.program.body.inputs, strict=True):
                here = BufferRef(stage, Wire("top", register))
                if kind == "copy":
                    copies.append((number, here))
                if kind not in ("argument", "constant"):
                    continue
                key = kind, number, calls.register(stage, register)
                if key not in placed:
                    given = kind == "argument"
                    name = format_path(self.traced.arguments[number].path) if given else f"constant {number}"
                    placed[key] = self._buffer(key[2], name)
                    (inputs if given else constants)[number].append(placed[key])
                self.at[here] = placed[key]
                if kind == "argument":
                    owned[number] = here
        self._copy([(owned[argument], here) for argument, here in copies])
        counting = [n for n, p in enumerate(self.stages) if any(w.kind == "number" for s in p.items for w in s.inputs)]
        for mesh in sorted({calls.mesh_of[stage] for stage in counting}):
            template = calls.template(mesh, ((), np.dtype(np.int32), Layout(())))
            names = [f"micro-batch number {i}" for i in range(self.schedule.num_microbatches)]
            numbers[mesh] = [self._buffer(template, name) for name in names]
        for stage in counting:
            for microbatch, number in enumerate(numbers[calls.mesh_of[stage]]):
                self.at[BufferRef(stage, Wire("number", 0), microbatch)] = number
        return inputs, constants, numbers

    # -- runs -------------------------------------------------------------------------------------------------------

    def _run(self, key: SegmentKey, microbatch: int = -1) -> Call | None:
        """Writes one run, if the stage has such a segment, after the receives that it needs."""
        call = self.calls.of_segment.get(key)
        if call is None:
            return None
        stage, items = key[0], self.lists[call.executable.mesh]
        for wire in call.received:
            _, transfer = self.arrivals[BufferRef(stage, wire, microbatch)]
            if transfer not in self.received:
                self.received.add(transfer)
                items.append(Receive(transfer))
        inputs: list[int] = []
        for wire in call.reads:
            if wire.kind == "pieces":
                pieces = Wire("piece", wire.number)
                inputs += [self.at[BufferRef(stage, pieces, m)] for m in range(self.schedule.num_microbatches)]
            else:
                inputs.append(self.at[ref(stage, wire, microbatch)])
        outputs = tuple([self._buffer(template, name, microbatch) for _, template, name in call.writes])
        for (wire, _, _), made in zip(call.writes, outputs, strict=True):
            self.at[ref(stage, wire, microbatch)] = made
        items.append(Run(self.called.setdefault(key, len(self.called)), microbatch, tuple(inputs), outputs))
        return call

    def _tasks(self) -> None:
        """Writes the tasks in the order in which they would start. Takes time linear in what they read and write."""
        lists = self.schedule.tasks
        positions = [0] * len(lists)
        ready: list[tuple[float, int]] = []  # when the next task of a submesh starts, and the submesh
        waiting: dict[BufferRef, int] = {}  # what the next task of a submesh lacks -> the submesh

        def look(mesh: int) -> None:
            """Finds out when the next task of a submesh starts, or which value it waits for."""
            if positions[mesh] == len(lists[mesh]):
                return
            task = lists[mesh][positions[mesh]]
            call = self.calls.of_segment.get((task.stage, task.kind, task.slice))
            values = [BufferRef(task.stage, wire, task.microbatch) for wire in (call.received if call else ())]
            missing = next((value for value in values if value not in self.arrivals), None)
            if missing is None:
                times = [self.arrivals[value][0] for value in values]
                heapq.heappush(ready, (max([self.clocks.meshes[mesh], *times]), mesh))
            else:
                waiting[missing] = mesh

        for mesh in range(len(lists)):
            look(mesh)
        while ready:
            start, mesh = heapq.heappop(ready)
            task = lists[mesh][positions[mesh]]
            positions[mesh] += 1
            call = self._run((task.stage, task.kind, task.slice), task.microbatch)
            if call is not None:
                _, end = self.clocks.run(mesh, call.executable.seconds, start)
                for arrived in self._send_crossing(call, task.microbatch, end):
                    if arrived in waiting:
                        look(waiting.pop(arrived))
            look(mesh)
        if any(at < len(tasks) for at, tasks in zip(positions, lists, strict=True)):
            raise OrderError(f"schedule {self.schedule.name} cannot run this step: its tasks wait for each other")

    def _send_crossing(self, call: Call, microbatch: int, end: float) -> Iterable[BufferRef]:
        """Sends the outputs of a run that ends at `end` to other stages, those first read by one task in one transfer.

        Returns the values of `arrivals` that this sets.
        """
        stage, _ = call.function
        brought = self._move(
            (reader, BufferRef(stage, wire, microbatch), BufferRef(reader[0], wire, microbatch), register)
            for wire, reader, register in call.sends
        )
        sent = sorted({number for number in brought.values() if number >= 0})
        times = {-1: end} | {number: self.clocks.transfer(self.transfers[number], end)[1] for number in sent}
        self.arrivals.update((value, (times[number], number)) for value, number in brought.items())
        return brought

    # -- the update -------------------------------------------------------------------------------------------------

    def _exchange(self, current: int) -> None:
        """Sends the late values that this round made to the stages that read them."""
        readers: dict[int, list[BufferRef]] = defaultdict(list)
        for stage, parts in enumerate(self.stages):
            for port, register in zip(parts.stage.inputs, parts.program.body.inputs, strict=False):
                if port.kind == "late":
                    readers[port.number].append(BufferRef(stage, Wire("top", register)))
        self._copy([
            (self._result(stage, position), reader)
            for stage, parts in enumerate(self.stages)
            for position, port in enumerate(parts.stage.outputs)
            if port.kind == "late" and parts.stage.late_rounds[port.number] == current
            for reader in readers[port.number]
        ])  # fmt: skip

    def _result(self, stage: int, position: int) -> BufferRef:
        """Returns a result of a stage."""
        operand = self.stages[stage].finals[position]
        assert operand is not None
        return BufferRef(stage, Wire("literal", position) if isinstance(operand, Lit) else Wire("top", operand))
