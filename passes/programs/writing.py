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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from alpa_lite.errors import OrderError
from alpa_lite.ir.graph import Lit, Traced
from alpa_lite.ir.layout import Layout
from alpa_lite.ir.paths import shown
from alpa_lite.ir.program import (
    Buffer,
    Executable,
    Instruction,
    Program,
    Receive,
    Run,
    Send,
    Submesh,
    Transfer,
    buffer,
    check,
)
from alpa_lite.ir.schedules import Schedule
from alpa_lite.passes.programs.ends import end_buffers
from alpa_lite.passes.programs.simulation import Clocks
from alpa_lite.passes.stages.packing import Slot, slots
from alpa_lite.passes.stages.segments import Segment, Segments

TransferSeconds = Callable[[Buffer, Submesh, Submesh, Layout], float]
SegmentSeconds = Callable[[Segments, Segment], float]


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


def build(
    traced: Traced,
    stages: Sequence[Segments],
    submeshes: Sequence[Submesh],
    schedule: Schedule,
    *,
    donated: Collection[int],
    segment_seconds: SegmentSeconds = lambda stage, segment: 1.0,
    transfer_seconds: TransferSeconds = lambda sent, source, destination, layout: 0.0,
) -> Written:
    """Writes and checks the program.

    Args:
      traced: the accumulated step.
      stages, submeshes: one for each stage, and one for each list, of the schedule.
      donated: the flat arguments whose buffers the step may consume.
      segment_seconds, transfer_seconds: predicted, for the order of tasks and for the simulation.
    """
    writer = _Writer(traced, stages, submeshes, schedule, segment_seconds, transfer_seconds)
    program = end_buffers(writer.program(), donated)
    check(program)
    functions = tuple(writer.calls[key].function for key in writer.called)
    return Written(program, tuple(stages), writer.mesh_of, functions)


_Key = tuple[str, int]
"""The kind of a wire, and its number."""
_Reader = tuple[int, str, int]
"""A stage, and the kind and round of a segment of it."""
_PER_MICROBATCH = ("number", "crossing", "saved", "piece")
"""Wires whose values each micro-batch has for itself; all others have one buffer for all micro-batches."""


class _Crossing(NamedTuple):
    """A value that a segment makes for another stage.

    Attributes:
      value: its number.
      reader: the first segment of the other stage that reads it.
      buffer: the template of its buffer there; None where it is in place.
      seconds: of sending it, predicted.
    """

    value: int
    reader: _Reader
    buffer: Buffer | None
    seconds: float


class _Call(NamedTuple):
    """A segment as it is run.

    Attributes:
      function: (stage, position in `Segments.items`).
      received: the values from other stages that it reads.
      reads: of each array that it takes, whether each micro-batch has its own, and the wire.
      writes: likewise of each that it gives, with the template of its buffer and its name.
      sends: what it makes for other stages.
    """

    function: tuple[int, int]
    executable: Executable
    received: Sequence[int]
    reads: Sequence[tuple[bool, _Key]]
    writes: Sequence[tuple[bool, _Key, Buffer, str]]
    sends: Sequence[_Crossing]


class _Writer:
    """The tables that one program is written with."""

    def __init__(
        self,
        traced: Traced,
        stages: Sequence[Segments],
        submeshes: Sequence[Submesh],
        schedule: Schedule,
        segment_seconds: SegmentSeconds,
        transfer_seconds: TransferSeconds,
    ) -> None:
        self.traced, self.stages, self.submeshes, self.schedule = traced, stages, submeshes, schedule
        self.segment_seconds, self.transfer_seconds = segment_seconds, transfer_seconds
        self.mesh_of = mesh_of(schedule)
        self.buffers: list[Buffer] = []
        self.transfers: list[Transfer] = []
        self.lists: list[list[Instruction]] = [[] for _ in submeshes]
        self.inputs: list[list[int]] = [[] for _ in traced.arguments]
        self.constants: list[list[int]] = [[] for _ in traced.graph.constants]
        self.numbers: list[list[int]] = [[] for _ in submeshes]
        # The buffers of each stage: of what all micro-batches share, and of what each has for itself.
        self.shared: list[dict[_Key, int]] = [{} for _ in stages]
        self.own: list[dict[int, dict[_Key, int]]] = [defaultdict(dict) for _ in stages]
        self.readers = self._readers()
        self.calls: dict[_Reader, _Call] = {
            (number, segment.kind, segment.round): self._call(number, position)
            for number, parts in enumerate(stages)
            for position, segment in enumerate(parts.items)
        }
        self.called: dict[_Reader, int] = {}  # the numbers of the executables, in the order of their first runs
        # When (stage, value, micro-batch) is there, and the transfer that brings it, -1 for what is in place.
        self.arrivals: dict[tuple[int, int, int], tuple[float, int]] = {}
        self.received: set[int] = {-1}
        self.clocks = Clocks(len(submeshes))

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
            executables=tuple(self.calls[key].executable for key in self.called),
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

    # -- what is known before ---------------------------------------------------------------------------------------

    def _readers(self) -> dict[int, list[tuple[_Reader, int]]]:
        """For each crossing value the first segment of each stage that reads it, and the register there."""
        found: dict[int, dict[int, tuple[_Reader, int]]] = defaultdict(dict)
        for number, parts in enumerate(self.stages):
            for segment in parts.items:
                for wire, binds in zip(segment.inputs, segment.binds, strict=True):
                    if wire.kind == "crossing":
                        found[wire.number].setdefault(number, ((number, segment.kind, segment.round), binds[0]))
        return {value: list(by_stage.values()) for value, by_stage in found.items()}

    def _call(self, stage: int, position: int) -> _Call:
        """Returns a segment with its inputs and outputs."""
        parts, mesh = self.stages[stage], self.mesh_of[stage]
        segment = parts.items[position]
        reads = [_key(slot) for slot in slots(parts, segment)]
        given = slots(parts, segment, output=True)
        writes = [(*_key(slot), self._template(mesh, slot.kind), _name(slot)) for slot in given]
        sums = {key for _, key, _, _ in writes if key[0] == "carry" and segment.kind != "update"}
        sliced = self.schedule.num_slices > 1 and segment.kind in ("forward", "backward")
        part = f" {segment.round}" if segment.round or sliced else ""
        executable = Executable(
            f"stage {stage} {segment.kind}{part}", mesh, stage, segment.kind,
            tuple(i for i, (_, key) in enumerate(reads) if key in sums),
            self.segment_seconds(parts, segment), slice=segment.round if sliced else -1,
        )  # fmt: skip
        sends = []
        for _, (kind, value), sent, _ in writes:
            for reader, register in self.readers.get(value, ()) if kind == "crossing" else ():
                there = self._register(reader[0], register)
                sends.append(_Crossing(value, reader, *self._passage(sent, there)))
        received = [wire.number for wire in segment.inputs if wire.kind == "crossing"]
        return _Call((stage, position), executable, received, reads, writes, sends)

    def _template(self, mesh: int, kind: tuple[tuple[int, ...], Any, Layout]) -> Buffer:
        """Returns the template of all buffers of a shape, dtype and layout on a submesh."""
        shape, dtype, layout = kind
        return buffer(mesh, self.submeshes[mesh], layout, shape, dtype)

    def _register(self, stage: int, register: int) -> Buffer:
        """Returns the template of the buffers of a stage's register."""
        return self._template(self.mesh_of[stage], self.stages[stage].register_type(register))

    def _passage(self, sent: Buffer, wanted: Buffer) -> tuple[Buffer | None, float]:
        """Returns the template of the buffer that a transfer defines, and its seconds; None where none is needed."""
        if sent.mesh == wanted.mesh and sent.layout == wanted.layout:
            return None, 0.0
        ends = self.submeshes[sent.mesh], self.submeshes[wanted.mesh]
        return wanted, self.transfer_seconds(sent, *ends, wanted.layout)

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
            template, seconds = self._passage(sent, self._register(destination, register))
            here = there if template is None else self._buffer(template, sent.name)
            self.shared[destination]["top", register] = here
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
            template = self._register(stage, register)
            key = kind, number, template
            if key not in placed:
                placed[key] = self._buffer(template, name)
                into[number].append(placed[key])
            self.shared[stage]["top", register] = placed[key]

        copies: list[tuple[int, int, int]] = []
        for stage, parts in enumerate(self.stages):
            ports, registers = parts.stage.inputs, parts.program.body.inputs
            for port, register in zip(ports, registers, strict=False):
                if port.kind == "argument":
                    name = shown(self.traced.arguments[port.number].path)
                    place("argument", port.number, name, stage, register, self.inputs)
                    owned[port.number] = stage, self.shared[stage]["top", register]
                elif port.kind == "copy":
                    copies.append((port.number, stage, register))
            for constant, register in zip(parts.stage.constants, registers[len(ports) :], strict=True):
                place("constant", constant, f"constant {constant}", stage, register, self.constants)
        self._copy([(*owned[argument], stage, register) for argument, stage, register in copies])
        counting = [n for n, p in enumerate(self.stages) if any(w.kind == "number" for s in p.items for w in s.inputs)]
        for mesh in sorted({self.mesh_of[stage] for stage in counting}):
            template = self._template(mesh, ((), np.dtype(np.int32), Layout(())))
            names = [f"micro-batch number {i}" for i in range(self.schedule.num_microbatches)]
            self.numbers[mesh] = [self._buffer(template, name) for name in names]
        for stage in counting:
            for microbatch, number in enumerate(self.numbers[self.mesh_of[stage]]):
                self.own[stage][microbatch]["number", 0] = number

    # -- runs -------------------------------------------------------------------------------------------------------

    def _run(self, key: _Reader, microbatch: int) -> None:
        """Writes one run, if the stage has such a segment, after the receives that it needs."""
        call = self.calls.get(key)
        if call is None:
            return
        stage = key[0]
        items = self.lists[self.mesh_of[stage]]
        for value in call.received:
            _, transfer = self.arrivals[stage, value, microbatch]
            if transfer not in self.received:
                self.received.add(transfer)
                items.append(Receive(transfer))
        tables = self.shared[stage], self.own[stage][microbatch]
        inputs: list[int] = []
        for own, wire in call.reads:
            if wire[0] == "pieces":
                inputs += [self.own[stage][m]["piece", wire[1]] for m in range(self.schedule.num_microbatches)]
            else:
                inputs.append(tables[own][wire])
        outputs = tuple([self._buffer(template, name, microbatch) for _, _, template, name in call.writes])
        for (own, wire, _, _), made in zip(call.writes, outputs, strict=True):
            tables[own][wire] = made
        items.append(Run(self.called.setdefault(key, len(self.called)), microbatch, tuple(inputs), outputs))

    def _tasks(self) -> None:
        """Writes the tasks in the order in which they would start. Takes time linear in what they read and write."""
        lists = self.schedule.tasks
        positions = [0] * len(lists)
        ready: list[tuple[float, int]] = []  # when the next task of a submesh starts, and the submesh
        waiting: dict[tuple[int, int, int], int] = {}  # what the next task of a submesh lacks -> the submesh

        def look(mesh: int) -> None:
            """Finds out when the next task of a submesh starts, or which value it waits for."""
            if positions[mesh] == len(lists[mesh]):
                return
            task = lists[mesh][positions[mesh]]
            call = self.calls.get((task.stage, task.kind, task.slice))
            keys = [(task.stage, value, task.microbatch) for value in call.received] if call is not None else []
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
            call = self.calls.get(key)
            _, end = self.clocks.run(mesh, call.executable.seconds if call is not None else 0.0, start)
            for arrived in self._send_crossing(call, task.microbatch, end) if call is not None else ():
                if arrived in waiting:
                    look(waiting.pop(arrived))
            look(mesh)
        if any(at < len(tasks) for at, tasks in zip(positions, lists, strict=True)):
            raise OrderError(f"schedule {self.schedule.name} cannot run this step: its tasks wait for each other")

    def _send_crossing(self, call: _Call, microbatch: int, end: float) -> list[tuple[int, int, int]]:
        """Sends the outputs of a run that ends at `end` to other stages, those first read by one task in one transfer.

        Returns the keys of `arrivals` that this sets.
        """
        stage, _ = call.function
        groups: dict[_Reader, list[tuple[int, tuple[int, int, float]]]] = {}
        keys = [(one.reader[0], one.value, microbatch) for one in call.sends]
        for key, one in zip(keys, call.sends, strict=True):
            here = there = self.own[stage][microbatch]["crossing", one.value]
            if one.buffer is not None:
                here = self._buffer(one.buffer, self.buffers[there].name, microbatch)
                groups.setdefault(one.reader, []).append((one.value, (there, here, one.seconds)))
            self.own[key[0]][microbatch]["crossing", one.value] = here
            self.arrivals[key] = end, -1
        for (reader, _, _), values in groups.items():
            number = self._send(stage, reader, [passage for _, passage in values], microbatch)
            _, arrival = self.clocks.transfer(self.transfers[number], end)
            self.arrivals.update(((reader, value, microbatch), (arrival, number)) for value, _ in values)
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
        """The buffer of a stage's result."""
        operand = self.stages[stage].finals[position]
        assert operand is not None
        return self.shared[stage][("literal", position) if isinstance(operand, Lit) else ("top", operand)]

    def _outputs(self) -> tuple[int, ...]:
        found = {
            port.number: self._final(number, position)
            for number, parts in enumerate(self.stages)
            for position, port in enumerate(parts.stage.outputs)
            if port.kind == "argument"
        }
        return tuple(found[i] for i in range(len(self.traced.outputs)))


def _key(slot: Slot) -> tuple[bool, _Key]:
    """Whether each micro-batch has its own buffer, and the wire; a slice of a register is read from the register's."""
    kind = "top" if slot.wire.kind == "slice" else slot.wire.kind
    return kind in _PER_MICROBATCH, (kind, slot.wire.number)


def _name(slot: Slot) -> str:
    if slot.pack is not None:
        return f"{len(slot.pack.members)} packed: {slot.wire.kind}"
    return f"{slot.wire.kind} {slot.wire.number}"


def mesh_of(schedule: Schedule) -> tuple[int, ...]:
    """The submesh of each stage."""
    found = {task.stage: mesh for mesh, tasks in enumerate(schedule.tasks) for task in tasks}
    return tuple(found[stage] for stage in range(schedule.num_stages))
