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
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from alpa_lite.errors import OrderError
from alpa_lite.ir.graph import Lit, Traced
from alpa_lite.ir.layout import Layout
from alpa_lite.ir.paths import format_path
from alpa_lite.ir.program import (
    Buffer,
    Instruction,
    Program,
    Receive,
    Run,
    Send,
    Transfer,
    check,
)
from alpa_lite.passes.programs.calls import PER_MICROBATCH, BufferKey, Call, Calls, Reader
from alpa_lite.passes.programs.ends import end_buffers
from alpa_lite.passes.programs.simulation import Clocks
from alpa_lite.passes.stages.segments import Segments


@dataclass(frozen=True, eq=False)
class Written:
    """A program and the functions that its executables stand for.

    Attributes:
      mesh_of: the submesh of each stage.
      functions: for each executable, (stage, position in `Segments.items`).
    """

    program: Program
    stages: tuple[Segments, ...]
    mesh_of: tuple[int, ...]
    functions: tuple[tuple[int, int], ...]


def build(traced: Traced, calls: Calls, *, donated: Collection[int]) -> Written:
    """Writes and checks the program.

    Args:
      traced: the accumulated step.
      donated: the flat arguments whose buffers the step may consume.
    """
    writer = _Writer(traced, calls)
    program = end_buffers(writer.program(), donated)
    check(program)
    functions = tuple(calls.of[key].function for key in writer.called)
    return Written(program, tuple(calls.stages), calls.mesh_of, functions)


class _Writer:
    """The tables that one program is written with."""

    def __init__(self, traced: Traced, calls: Calls) -> None:
        self.traced, self.stages, self.submeshes, self.schedule = traced, calls.stages, calls.submeshes, calls.schedule
        self.known, self.mesh_of = calls, calls.mesh_of
        self.buffers: list[Buffer] = []
        self.transfers: list[Transfer] = []
        self.lists: list[list[Instruction]] = [[] for _ in self.submeshes]
        self.inputs: list[list[int]] = [[] for _ in traced.arguments]
        self.constants: list[list[int]] = [[] for _ in traced.graph.constants]
        self.numbers: list[list[int]] = [[] for _ in self.submeshes]
        self.at: dict[BufferKey, int] = {}  # the buffer that a stage has of a value at present
        self.called: dict[Reader, int] = {}  # the numbers of the executables, in the order of their first runs
        # When a value from another stage is there, and the transfer that brings it, -1 for what is in place.
        self.arrivals: dict[BufferKey, tuple[float, int]] = {}
        self.received: set[int] = {-1}
        self.clocks = Clocks(len(self.submeshes))

    def program(self) -> Program:
        """Writes the lists; nothing is freed yet."""
        self._place()
        for stage in range(len(self.stages)):
            self._run((stage, "prologue", 0), -1)
        self._tasks()
        for current in range(1 + max((s.round for p in self.stages for s in p.items if s.kind == "update"), default=0)):
            for stage in range(len(self.stages)):
                self._run((stage, "update", current), -1)
            self._exchange(current)
        return Program(
            submeshes=tuple(self.submeshes),
            executables=tuple(self.known.of[key].executable for key in self.called),
            buffers=tuple(self.buffers),
            transfers=tuple(self.transfers),
            lists=tuple(map(tuple, self.lists)),
            inputs=tuple(map(tuple, self.inputs)),
            constants=tuple(map(tuple, self.constants)),
            numbers=tuple(map(tuple, self.numbers)),
            outputs=self._outputs(),
            schedule=self.schedule.name,
            num_microbatches=self.schedule.num_microbatches,
        )

    # -- buffers and transfers --------------------------------------------------------------------------------------

    def _buffer(self, template: Buffer, name: str, microbatch: int = -1) -> int:
        """Returns a new buffer."""
        self.buffers.append(Buffer(*template[:5], microbatch, name))
        return len(self.buffers) - 1

    def _send(
        self, source: int, destination: int, passages: Sequence[tuple[int, int, float]], microbatch: int = -1
    ) -> int:
        """Writes a transfer of (buffer there, buffer here, seconds) between stages; returns its number."""
        sent, received, seconds = zip(*passages, strict=True)
        ends = self.mesh_of[source], self.mesh_of[destination]
        self.transfers.append(Transfer(*ends, sent, received, sum(seconds), microbatch))
        self.lists[ends[0]].append(Send(len(self.transfers) - 1))
        return len(self.transfers) - 1

    def _copy(self, copies: Sequence[tuple[int, int, int, int]]) -> None:
        """Copies (stage, buffer) to (another stage, its register), once a step; a pair of stages shares a transfer."""
        groups: dict[tuple[int, int], list[tuple[int, int, float]]] = {}
        for source, there, destination, register in copies:
            sent = self.buffers[there]
            template, seconds = self.known.passage(sent, self.known.register(destination, register))
            here = there if template is None else self._buffer(template, sent.name)
            self.at[destination, "top", register, -1] = here
            if here != there:
                groups.setdefault((source, destination), []).append((there, here, seconds))
        for (source, destination), passages in groups.items():
            number = self._send(source, destination, passages)
            self.lists[self.mesh_of[destination]].append(Receive(number))

    def _place(self) -> None:
        """Buffers of arguments, constants and micro-batch numbers; state that others read is sent to them."""
        placed: dict[tuple[str, int, Buffer], int] = {}
        owned: dict[int, tuple[int, int]] = {}

        def place(kind: str, number: int, name: str, stage: int, register: int, into: list[list[int]]) -> None:
            template = self.known.register(stage, register)
            key = kind, number, template
            if key not in placed:
                placed[key] = self._buffer(template, name)
                into[number].append(placed[key])
            self.at[stage, "top", register, -1] = placed[key]

        copies: list[tuple[int, int, int]] = []
        for stage, parts in enumerate(self.stages):
            ports, registers = parts.stage.inputs, parts.program.body.inputs
            for port, register in zip(ports, registers, strict=False):
                if port.kind == "argument":
                    name = format_path(self.traced.arguments[port.number].path)
                    place("argument", port.number, name, stage, register, self.inputs)
                    owned[port.number] = stage, self.at[stage, "top", register, -1]
                elif port.kind == "copy":
                    copies.append((port.number, stage, register))
            for constant, register in zip(parts.stage.constants, registers[len(ports) :], strict=True):
                place("constant", constant, f"constant {constant}", stage, register, self.constants)
        self._copy([(*owned[argument], stage, register) for argument, stage, register in copies])
        counting = [n for n, p in enumerate(self.stages) if any(w.kind == "number" for s in p.items for w in s.inputs)]
        for mesh in sorted({self.mesh_of[stage] for stage in counting}):
            template = self.known.template(mesh, ((), np.dtype(np.int32), Layout(())))
            names = [f"micro-batch number {i}" for i in range(self.schedule.num_microbatches)]
            self.numbers[mesh] = [self._buffer(template, name) for name in names]
        for stage in counting:
            for microbatch, number in enumerate(self.numbers[self.mesh_of[stage]]):
                self.at[stage, "number", 0, microbatch] = number

    # -- runs -------------------------------------------------------------------------------------------------------

    def _run(self, key: Reader, microbatch: int) -> None:
        """Writes one run, if the stage has such a segment, after the receives that it needs."""
        call = self.known.of.get(key)
        if call is None:
            return
        stage = key[0]
        items = self.lists[self.mesh_of[stage]]
        for value in call.received_values:
            _, transfer = self.arrivals[stage, "crossing", value, microbatch]
            if transfer not in self.received:
                self.received.add(transfer)
                items.append(Receive(transfer))
        inputs: list[int] = []
        for kind, number in call.reads:
            if kind == "pieces":
                inputs += [self.at[stage, "piece", number, m] for m in range(self.schedule.num_microbatches)]
            else:
                inputs.append(self.at[stage, kind, number, microbatch if kind in PER_MICROBATCH else -1])
        outputs = tuple([self._buffer(template, name, microbatch) for _, template, name in call.writes])
        for ((kind, number), _, _), made in zip(call.writes, outputs, strict=True):
            self.at[stage, kind, number, microbatch if kind in PER_MICROBATCH else -1] = made
        items.append(Run(self.called.setdefault(key, len(self.called)), microbatch, tuple(inputs), outputs))

    def _tasks(self) -> None:
        """Writes the tasks in the order in which they would start. Takes time linear in what they read and write."""
        lists = self.schedule.tasks
        positions = [0] * len(lists)
        ready: list[tuple[float, int]] = []  # when the next task of a submesh starts, and the submesh
        waiting: dict[BufferKey, int] = {}  # what the next task of a submesh lacks -> the submesh

        def look(mesh: int) -> None:
            """Finds out when the next task of a submesh starts, or which value it waits for."""
            if positions[mesh] == len(lists[mesh]):
                return
            task = lists[mesh][positions[mesh]]
            call = self.known.of.get((task.stage, task.kind, task.slice))
            received = call.received_values if call is not None else ()
            keys = [(task.stage, "crossing", value, task.microbatch) for value in received]
            missing = next((key for key in keys if key not in self.arrivals), None)
            if missing is None:
                times = [self.arrivals[key][0] for key in keys]
                heapq.heappush(ready, (max([self.clocks.meshes[mesh], *times]), mesh))
            else:
                waiting[missing] = mesh

        for mesh in range(len(lists)):
            look(mesh)
        while ready:
            start, mesh = heapq.heappop(ready)
            task = lists[mesh][positions[mesh]]
            positions[mesh] += 1
            key = task.stage, task.kind, task.slice
            self._run(key, task.microbatch)
            call = self.known.of.get(key)
            _, end = self.clocks.run(mesh, call.executable.seconds if call is not None else 0.0, start)
            for arrived in self._send_crossing(call, task.microbatch, end) if call is not None else ():
                if arrived in waiting:
                    look(waiting.pop(arrived))
            look(mesh)
        if any(at < len(tasks) for at, tasks in zip(positions, lists, strict=True)):
            raise OrderError(f"schedule {self.schedule.name} cannot run this step: its tasks wait for each other")

    def _send_crossing(self, call: Call, microbatch: int, end: float) -> list[BufferKey]:
        """Sends the outputs of a run that ends at `end` to other stages, those first read by one task in one transfer.

        Returns the keys of `arrivals` that this sets.
        """
        stage, _ = call.function
        groups: dict[Reader, list[tuple[BufferKey, tuple[int, int, float]]]] = {}
        keys: list[BufferKey] = [(one.reader[0], "crossing", one.value, microbatch) for one in call.sends]
        for key, one in zip(keys, call.sends, strict=True):
            here = there = self.at[stage, "crossing", one.value, microbatch]
            if one.buffer is not None:
                here = self._buffer(one.buffer, self.buffers[there].name, microbatch)
                groups.setdefault(one.reader, []).append((key, (there, here, one.seconds)))
            self.at[key] = here
            self.arrivals[key] = end, -1
        for (reader, _, _), values in groups.items():
            number = self._send(stage, reader, [passage for _, passage in values], microbatch)
            _, arrival = self.clocks.transfer(self.transfers[number], end)
            self.arrivals.update((key, (arrival, number)) for key, _ in values)
        return keys

    # -- the update -------------------------------------------------------------------------------------------------

    def _exchange(self, current: int) -> None:
        """Sends the late values that this round made to the stages that read them."""
        readers: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, parts in enumerate(self.stages):
            for port, register in zip(parts.stage.inputs, parts.program.body.inputs, strict=False):
                if port.kind == "late":
                    readers[port.number].append((number, register))
        self._copy([
            (number, self._final(number, position), *reader)
            for number, parts in enumerate(self.stages)
            for position, port in enumerate(parts.stage.outputs)
            if port.kind == "late" and parts.stage.late_rounds[port.number] == current
            for reader in readers[port.number]
        ])  # fmt: skip

    def _final(self, stage: int, position: int) -> int:
        """Returns the buffer of a stage's result."""
        operand = self.stages[stage].finals[position]
        assert operand is not None
        return self.at[(stage, "literal", position, -1) if isinstance(operand, Lit) else (stage, "top", operand, -1)]

    def _outputs(self) -> tuple[int, ...]:
        found = {
            port.number: self._final(number, position)
            for number, parts in enumerate(self.stages)
            for position, port in enumerate(parts.stage.outputs)
            if port.kind == "argument"
        }
        return tuple(found[i] for i in range(len(self.traced.outputs)))
