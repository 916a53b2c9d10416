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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from alpa_lite.errors import OrderError
from alpa_lite.graph import Lit, Traced
from alpa_lite.layout import Layout
from alpa_lite.passes.programs.ends import end_buffers
from alpa_lite.passes.stages.packing import Slot, slots
from alpa_lite.passes.stages.segments import Segment, Segments
from alpa_lite.paths import shown
from alpa_lite.program import (
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
from alpa_lite.schedules import Schedule, Task

TransferSeconds = Callable[[Buffer, Submesh, Submesh, Layout], float]
SegmentSeconds = Callable[[Segments, Segment], float]


@dataclass(frozen=True, eq=False)
class Written:
    """A program and the functions that its executables stand for.

    Attributes:
      program: the lists.
      stages: in segments.
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
      stages: one for each stage of the schedule.
      submeshes: one for each list of the schedule.
      schedule: the tasks.
      donated: the flat arguments whose buffers the step may consume.
      segment_seconds, transfer_seconds: predicted, for the order of tasks and for the simulation.
    """
    return _Writer(traced, stages, submeshes, schedule, donated, segment_seconds, transfer_seconds).pipeline()


class _Call(NamedTuple):
    """A segment as it is run: what it takes and gives, and where that is found.

    Attributes:
      received: the values from other stages that it reads.
      reads, writes: (kind of wire, number) of each array that it takes or gives.
      pieces: whether it takes the pieces of all micro-batches.
      outputs: the kinds of the buffers that it gives, and their names.
    """

    received: Sequence[int]
    reads: Sequence[tuple[str, int]]
    pieces: bool
    writes: Sequence[tuple[str, int]]
    outputs: Sequence[tuple[Buffer, str]]


class _Writer:
    """The tables that one program is written with."""

    def __init__(self, traced, stages, submeshes, schedule, donated, segment_seconds, transfer_seconds) -> None:
        self.traced: Traced = traced
        self.stages: Sequence[Segments] = stages
        self.submeshes: Sequence[Submesh] = submeshes
        self.schedule: Schedule = schedule
        self.donatable: Collection[int] = donated
        self.segment_seconds: SegmentSeconds = segment_seconds
        self.transfer_seconds: TransferSeconds = transfer_seconds
        self.mesh_of = mesh_of(schedule)
        self.buffers: list[Buffer] = []
        self.transfers: list[Transfer] = []
        self.lists: list[list[Instruction]] = [[] for _ in submeshes]
        self.inputs: list[list[int]] = [[] for _ in traced.arguments]
        self.constants: list[list[int]] = [[] for _ in traced.graph.constants]
        self.numbers: list[list[int]] = [[] for _ in submeshes]
        self.top: list[dict[int, int]] = [{} for _ in stages]  # register -> buffer
        self.carry: list[dict[int, int]] = [{} for _ in stages]
        self.tables: dict[tuple[int, int], Mapping[str, dict[int, int]]] = {}  # see `_tables`
        self.arriving: dict[tuple[int, int, int], int] = {}  # the same keys: the transfer that brings it
        self.brought: dict[int, list[tuple[int, int, int]]] = {}  # transfer -> the keys of `arriving`
        self.arrival: dict[tuple[int, int, int], float] = {}  # the same keys: predicted seconds
        self.links: dict[tuple[int, int], float] = {}  # (source, destination): when its last transfer ends
        self.literals: list[dict[int, int]] = [{} for _ in stages]  # result -> buffer
        self.executables: list[Executable] = []
        self.functions: list[tuple[int, int]] = []
        self.made: dict[tuple[int, int], int] = {}  # (stage, position) -> executable
        self.kinds: dict[tuple[int, tuple], Buffer] = {}  # (mesh, shape and the like) -> a buffer of that kind
        self.kind_of: list[Buffer] = []  # buffer -> that of `kinds`
        self.kind_there: dict[tuple[int, int], Buffer] = {}  # (stage, register) -> that of `kinds`
        self.seconds_between: dict[tuple[int, int], float] = {}  # identities of two kinds -> those of a transfer
        self.calls: dict[tuple[int, int], _Call] = {}  # (stage, position)
        self.runs_of: dict[tuple[int, str, int], list[int]] = {}  # (stage, kind, round) -> positions

    def pipeline(self) -> Written:
        self._place()
        for stage in range(len(self.stages)):
            self._run_all(stage, "prologue")
        self._tasks()
        self._updates()
        program = Program(
            submeshes=tuple(self.submeshes),
            executables=tuple(self.executables),
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
        program = end_buffers(program, self.donatable)
        check(program)
        return Written(program, tuple(self.stages), self.mesh_of, tuple(self.functions))

    # -- buffers --------------------------------------------------------------------------------------------------

    def _kind(self, mesh: int, kind: tuple) -> Buffer:
        """Returns the template of all buffers of a shape, dtype and layout on a submesh."""
        if (mesh, kind) not in self.kinds:
            shape, dtype, layout = kind
            self.kinds[mesh, kind] = buffer(mesh, self.submeshes[mesh], layout, shape, dtype)
        return self.kinds[mesh, kind]

    def _buffer(self, kind: Buffer, name: str, microbatch: int = -1) -> int:
        """A new buffer of a kind."""
        self.buffers.append(Buffer(kind.mesh, kind.layout, kind.shape, kind.dtype, kind.bytes, microbatch, name))
        self.kind_of.append(kind)
        return len(self.buffers) - 1

    def _place(self) -> None:
        """Buffers of arguments, constants and micro-batch numbers; state that others read is sent to them."""
        placed: dict[tuple[str, int, int, Layout], int] = {}
        owned: dict[int, tuple[int, int]] = {}
        copies: list[tuple[int, int, int]] = []
        for number, stage in enumerate(self.stages):
            mesh = self.mesh_of[number]
            registers = stage.program.body.inputs
            for port, register in zip(stage.stage.inputs, registers, strict=False):
                kind = stage.register_type(register)
                if port.kind == "argument":
                    key = ("argument", port.number, mesh, kind[2])
                    if key not in placed:
                        placed[key] = self._buffer(
                            self._kind(mesh, kind), shown(self.traced.arguments[port.number].path)
                        )
                        self.inputs[port.number].append(placed[key])
                    self.top[number][register] = placed[key]
                    owned[port.number] = number, placed[key]
                elif port.kind == "copy":
                    copies.append((number, port.number, register))
            for constant, register in zip(stage.stage.constants, registers[len(stage.stage.inputs) :], strict=True):
                kind = stage.register_type(register)
                key = ("constant", constant, mesh, kind[2])
                if key not in placed:
                    placed[key] = self._buffer(self._kind(mesh, kind), f"constant {constant}")
                    self.constants[constant].append(placed[key])
                self.top[number][register] = placed[key]
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for number, argument, register in copies:
            owner, there = owned[argument]
            here = self._landed(there, number, register, -1)
            self.top[number][register] = here
            if here != there:
                groups.setdefault((owner, number), []).append((there, here))
        for (owner, number), pairs in groups.items():
            transfer = self._send(self.mesh_of[owner], self.mesh_of[number], pairs, -1)
            self.lists[self.mesh_of[number]].append(Receive(transfer))
        needs = {
            self.mesh_of[number]
            for number, stage in enumerate(self.stages)
            for segment in stage.items
            if any(wire.kind == "number" for wire in segment.inputs)
        }
        for mesh in sorted(needs):
            for i in range(self.schedule.num_microbatches):
                kind = ((), np.dtype(np.int32), Layout(()))
                self.numbers[mesh].append(self._buffer(self._kind(mesh, kind), f"micro-batch number {i}"))

    def _landed(self, there: int, stage: int, register: int, microbatch: int) -> int:
        """The buffer of a stage's register for a value: the same one, if it is there in the right layout."""
        kind = self.kind_there.get((stage, register))
        if kind is None:
            kind = self._kind(self.mesh_of[stage], self.stages[stage].register_type(register))
            self.kind_there[stage, register] = kind
        sent = self.buffers[there]
        if sent.mesh == kind.mesh and sent.layout == kind.layout:
            return there
        return self._buffer(kind, sent.name, microbatch)

    def _seconds(self, there: int, here: int) -> float:
        """Predicted seconds of sending a buffer to another submesh."""
        sent, received = self.kind_of[there], self.kind_of[here]
        key = id(sent), id(received)  # `kinds` keeps them
        if key not in self.seconds_between:
            source, destination = self.submeshes[sent.mesh], self.submeshes[received.mesh]
            self.seconds_between[key] = self.transfer_seconds(sent, source, destination, received.layout)
        return self.seconds_between[key]

    def _send(self, source: int, destination: int, pairs: Sequence[tuple[int, int]], microbatch: int) -> int:
        """Writes a transfer down and starts it; returns its number."""
        seconds = sum(self._seconds(there, here) for there, here in pairs)
        sent, received = zip(*pairs, strict=True)
        self.transfers.append(Transfer(source, destination, sent, received, seconds, microbatch))
        self.lists[source].append(Send(len(self.transfers) - 1))
        return len(self.transfers) - 1

    # -- runs -----------------------------------------------------------------------------------------------------

    def _executable(self, stage: int, position: int) -> int:
        key = stage, position
        if key not in self.made:
            segment = self.stages[stage].items[position]
            call = self._call(stage, position)
            donated = tuple(
                i
                for i, read in enumerate(call.reads)
                if segment.kind != "update" and read[0] == "carry" and read in call.writes
            )
            slices = self.schedule.num_slices > 1 and segment.kind in ("forward", "backward")
            part = f" {segment.round}" if segment.round or slices else ""
            self.executables.append(
                Executable(
                    f"stage {stage} {segment.kind}{part}", self.mesh_of[stage], stage, segment.kind, donated,
                    self.segment_seconds(self.stages[stage], segment), slice=segment.round if slices else -1,
                )
            )  # fmt: skip
            self.functions.append(key)
            self.made[key] = len(self.executables) - 1
        return self.made[key]

    def _run(self, stage: int, position: int, microbatch: int) -> None:
        """Writes one run: receives that it needs, the run, and what becomes of its outputs."""
        call, tables = self._call(stage, position), self._tables(stage, microbatch)
        self._receive(stage, call.received, microbatch)
        if call.pieces:
            count = self.schedule.num_microbatches
            parts = [self._tables(stage, m)["piece"] for m in range(count)]
            inputs = [
                buffer
                for kind, number in call.reads
                for buffer in ([part[number] for part in parts] if kind == "pieces" else [tables[kind][number]])
            ]
        else:
            inputs = [tables[kind][number] for kind, number in call.reads]
        outputs = tuple([self._buffer(kind, name, microbatch) for kind, name in call.outputs])
        for (kind, number), made in zip(call.writes, outputs, strict=True):
            tables[kind][number] = made
        run = Run(self._executable(stage, position), microbatch, tuple(inputs), outputs)
        self.lists[self.mesh_of[stage]].append(run)

    def _call(self, stage: int, position: int) -> _Call:
        """Returns the inputs and outputs of a segment."""
        key = stage, position
        if key not in self.calls:
            parts, mesh = self.stages[stage], self.mesh_of[stage]
            segment = parts.items[position]
            taken, given = slots(parts, segment), slots(parts, segment, output=True)
            self.calls[key] = _Call(
                received=[wire.number for wire in segment.inputs if wire.kind == "crossing"],
                reads=[(slot.wire.kind, slot.wire.number) for slot in taken],
                pieces=any(slot.wire.kind == "pieces" for slot in taken),
                writes=[(slot.wire.kind, slot.wire.number) for slot in given],
                outputs=[(self._kind(mesh, slot.kind), _name(slot)) for slot in given],
            )
        return self.calls[key]

    def _tables(self, stage: int, microbatch: int) -> Mapping[str, dict[int, int]]:
        """Returns the locations of a stage's values for a micro-batch: kind of wire -> its number -> buffer.

        Values that all micro-batches share are in the same table for all: of the top level, accumulators and literals.
        """
        key = stage, microbatch
        if key not in self.tables:
            numbers = self.numbers[self.mesh_of[stage]]
            self.tables[key] = {
                "top": self.top[stage],
                "slice": self.top[stage],
                "carry": self.carry[stage],
                "literal": self.literals[stage],
                "number": {0: numbers[microbatch]} if numbers and microbatch >= 0 else {},
                "crossing": {},
                "saved": {},
                "piece": {},
            }
        return self.tables[key]

    def _receive(self, stage: int, values: Sequence[int], microbatch: int) -> None:
        for value in values:
            transfer = self.arriving.pop((stage, value, microbatch), None)
            if transfer is not None:
                self.lists[self.mesh_of[stage]].append(Receive(transfer))
                for key in self.brought.pop(transfer):
                    self.arriving.pop(key, None)

    def _run_all(self, stage: int, kind: str, round_: int = 0, microbatch: int = -1) -> None:
        key = stage, kind, round_
        if key not in self.runs_of:
            items = enumerate(self.stages[stage].items)
            self.runs_of[key] = [i for i, segment in items if (segment.kind, segment.round) == (kind, round_)]
        for position in self.runs_of[key]:
            self._run(stage, position, microbatch)

    # -- tasks ----------------------------------------------------------------------------------------------------

    def _tasks(self) -> None:
        """Writes the tasks in the order in which they would start. Takes time linear in what they read and write."""
        needed = {
            (number, segment.kind, segment.round): [w.number for w in segment.inputs if w.kind == "crossing"]
            for number, stage in enumerate(self.stages)
            for segment in stage.items
        }
        readers = self._readers()
        lists = self.schedule.tasks
        clocks, positions = [0.0] * len(lists), [0] * len(lists)
        ready: list[tuple[float, int]] = []  # when the next task of a submesh starts, and the submesh
        waiting: dict[tuple[int, int, int], int] = {}  # what the next task of a submesh lacks -> the submesh

        def look(mesh: int) -> None:
            """Finds out when the next task of a submesh starts, or which value it waits for."""
            if positions[mesh] == len(lists[mesh]):
                return
            task = lists[mesh][positions[mesh]]
            keys = [
                (task.stage, value, task.microbatch) for value in needed.get((task.stage, task.kind, task.slice), ())
            ]
            missing = next((key for key in keys if key not in self.arrival), None)
            if missing is None:
                heapq.heappush(ready, (max([clocks[mesh], *(self.arrival[key] for key in keys)]), mesh))
            else:
                waiting[missing] = mesh

        for mesh in range(len(lists)):
            look(mesh)
        while ready:
            start, mesh = heapq.heappop(ready)
            task = lists[mesh][positions[mesh]]
            positions[mesh] += 1
            segment = self.stages[task.stage].of(task.kind, task.slice)
            seconds = self.segment_seconds(self.stages[task.stage], segment) if segment is not None else 0.0
            clocks[mesh] = start + seconds
            self._run_all(task.stage, task.kind, task.slice, task.microbatch)
            for key in self._send_crossing(task, readers, clocks[mesh]):
                if key in waiting:
                    look(waiting.pop(key))
            look(mesh)
        if any(at < len(tasks) for at, tasks in zip(positions, lists, strict=True)):
            raise OrderError(f"schedule {self.schedule.name} cannot run this step: its tasks wait for each other")

    def _readers(self) -> dict[int, list[tuple[int, str, int]]]:
        """For each crossing value, (stage, the first segment that reads it, register there)."""
        found: dict[int, dict[int, tuple[int, str, int]]] = {}
        for number, stage in enumerate(self.stages):
            for segment in stage.items:
                for wire, binds in zip(segment.inputs, segment.binds, strict=True):
                    if wire.kind == "crossing":
                        found.setdefault(wire.number, {}).setdefault(
                            number, (number, f"{segment.kind} {segment.round}", binds[0])
                        )
        return {value: list(by_stage.values()) for value, by_stage in found.items()}

    def _send_crossing(
        self, task: Task, readers: dict[int, list[tuple[int, str, int]]], end: float
    ) -> list[tuple[int, int, int]]:
        """Sends the outputs of a task that ends at `end` to other stages, those first read by one task in one transfer.

        Returns the keys of `arrival` that this sets.
        """
        segment = self.stages[task.stage].of(task.kind, task.slice)
        groups: dict[tuple[int, str], list[tuple[int, int, int]]] = {}
        found = []
        for wire in segment.outputs if segment is not None else ():
            if wire.kind != "crossing":
                continue
            there = self._tables(task.stage, task.microbatch)["crossing"][wire.number]
            for stage, kind, register in readers.get(wire.number, []):
                key = stage, wire.number, task.microbatch
                here = self._landed(there, stage, register, task.microbatch)
                self._tables(stage, task.microbatch)["crossing"][wire.number] = here
                self.arrival[key] = end
                found.append(key)
                if here != there:
                    groups.setdefault((stage, kind), []).append((wire.number, there, here))
        for (stage, _), values in groups.items():
            pairs = [(there, here) for _, there, here in values]
            link = self.mesh_of[task.stage], self.mesh_of[stage]
            transfer = self._send(*link, pairs, task.microbatch)
            arrival = max(end, self.links.get(link, 0.0)) + self.transfers[transfer].seconds
            self.links[link] = arrival
            self.brought[transfer] = [(stage, value, task.microbatch) for value, _, _ in values]
            for key in self.brought[transfer]:
                self.arriving[key], self.arrival[key] = transfer, arrival
        return found

    # -- the update -----------------------------------------------------------------------------------------------

    def _updates(self) -> None:
        rounds = 1 + max((s.round for stage in self.stages for s in stage.items if s.kind == "update"), default=0)
        for current in range(rounds):
            for number in range(len(self.stages)):
                self._run_all(number, "update", current)
            self._exchange(current)

    def _exchange(self, current: int) -> None:
        """Sends the late values that this round made to the stages that read them."""
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for number, stage in enumerate(self.stages):
            for value, made in stage.stage.late_rounds.items():
                if made != current:
                    continue
                position = next(
                    i for i, p in enumerate(stage.stage.outputs) if p.kind == "late" and p.number == value
                )  # fmt: skip
                operand = stage.finals[position]
                assert operand is not None
                there = self.literals[number][position] if isinstance(operand, Lit) else self.top[number][operand]
                for other, reader in enumerate(self.stages):
                    ports = zip(reader.stage.inputs, reader.program.body.inputs, strict=False)
                    for port, register in ports:
                        if port.kind == "late" and port.number == value:
                            here = self._landed(there, other, register, -1)
                            self.top[other][register] = here
                            if here != there:
                                groups.setdefault((number, other), []).append((there, here))
        for (number, other), pairs in groups.items():
            transfer = self._send(self.mesh_of[number], self.mesh_of[other], pairs, -1)
            self.lists[self.mesh_of[other]].append(Receive(transfer))

    def _outputs(self) -> tuple[int, ...]:
        found: dict[int, int] = {}
        for number, stage in enumerate(self.stages):
            for position, (port, operand) in enumerate(zip(stage.stage.outputs, stage.finals, strict=True)):
                if port.kind == "argument":
                    assert operand is not None
                    literal = isinstance(operand, Lit)
                    found[port.number] = (
                        self.literals[number][position] if literal else self.top[number][operand]  # type: ignore[index]
                    )
        return tuple(found[i] for i in range(len(self.traced.outputs)))


def _name(slot: Slot) -> str:
    if slot.pack is not None:
        return f"{len(slot.pack.members)} packed: {slot.wire.kind}"
    return f"{slot.wire.kind} {slot.wire.number}"


def mesh_of(schedule: Schedule) -> tuple[int, ...]:
    """The submesh of each stage."""
    found = {task.stage: mesh for mesh, tasks in enumerate(schedule.tasks) for task in tasks}
    return tuple(found[stage] for stage in range(schedule.num_stages))
