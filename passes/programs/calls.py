"""The segments of stages as they are run: what each takes, gives and sends, before any buffer has a number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from alpa_lite.ir.layout import Layout
from alpa_lite.ir.program import Buffer, Executable, Submesh, buffer
from alpa_lite.ir.schedules import Schedule
from alpa_lite.passes.stages.packing import Slot, slots
from alpa_lite.passes.stages.segments import Segment, Segments

TransferSeconds = Callable[[Buffer, Submesh, Submesh, Layout], float]

Wired = tuple[str, int]
"""The kind of a wire, and its number."""
BufferKey = tuple[int, str, int, int]
"""A stage, the kind of a wire and its number, and a micro-batch; -1 where all micro-batches share a buffer."""
Reader = tuple[int, str, int]
"""A stage, and the kind and round of a segment of it."""
PER_MICROBATCH = ("number", "crossing", "saved", "piece")
"""Wires whose values each micro-batch has for itself; all others have one buffer for all micro-batches."""


class Crossing(NamedTuple):
    """A value that a segment makes for another stage.

    Attributes:
      value: its number.
      reader: the first segment of the other stage that reads it.
      buffer: the template of its buffer there; None where it is in place.
      seconds: of sending it, predicted.
    """

    value: int
    reader: Reader
    buffer: Buffer | None
    seconds: float


class Call(NamedTuple):
    """A segment as it is run.

    Attributes:
      function: (stage, position in `Segments.items`).
      received_values: the values from other stages that it reads.
      reads: the wire of each array that it takes.
      writes: that of each that it gives, with the template of its buffer and its name.
      sends: what it makes for other stages.
    """

    function: tuple[int, int]
    executable: Executable
    received_values: Sequence[int]
    reads: Sequence[Wired]
    writes: Sequence[tuple[Wired, Buffer, str]]
    sends: Sequence[Crossing]


class Calls:
    """The calls of all segments, and the templates of buffers.

    Attributes:
      mesh_of: the submesh of each stage.
      of: the call of a segment.
    """

    def __init__(
        self,
        stages: Sequence[Segments],
        submeshes: Sequence[Submesh],
        schedule: Schedule,
        seconds: Mapping[Segment, float],
        transfer_seconds: TransferSeconds,
    ) -> None:
        """One stage for each of the schedule, and one submesh for each of its lists; seconds are predicted."""
        self.stages, self.submeshes, self.schedule = stages, submeshes, schedule
        self.seconds, self.transfer_seconds = seconds, transfer_seconds
        self.mesh_of = mesh_of(schedule)
        self.readers = self._readers()
        self.of: dict[Reader, Call] = {
            (number, segment.kind, segment.round): self._call(number, position)
            for number, parts in enumerate(stages)
            for position, segment in enumerate(parts.items)
        }

    def _readers(self) -> dict[int, list[tuple[Reader, int]]]:
        """For each crossing value the first segment of each stage that reads it, and the register there."""
        found: dict[int, dict[int, tuple[Reader, int]]] = defaultdict(dict)
        for number, parts in enumerate(self.stages):
            for segment in parts.items:
                for wire, binds in zip(segment.inputs, segment.binds, strict=True):
                    if wire.kind == "crossing":
                        found[wire.number].setdefault(number, ((number, segment.kind, segment.round), binds[0]))
        return {value: list(by_stage.values()) for value, by_stage in found.items()}

    def _call(self, stage: int, position: int) -> Call:
        """Returns a segment with its inputs and outputs."""
        parts, mesh = self.stages[stage], self.mesh_of[stage]
        segment = parts.items[position]
        reads = [_wired(slot) for slot in slots(parts, segment)]
        given = slots(parts, segment, output=True)
        writes = [(_wired(slot), self.template(mesh, slot.kind), _name(slot)) for slot in given]
        sums = {wired for wired, _, _ in writes if wired[0] == "carry" and segment.kind != "update"}
        sliced = self.schedule.num_slices > 1 and segment.kind in ("forward", "backward")
        part = f" {segment.round}" if segment.round or sliced else ""
        executable = Executable(
            f"stage {stage} {segment.kind}{part}" if segment.kind != "step" else "step", mesh, stage, segment.kind,
            tuple(i for i, wired in enumerate(reads) if wired in sums),
            self.seconds[segment], slice=segment.round if sliced else -1,
        )  # fmt: skip
        sends = []
        for (kind, value), sent, _ in writes:
            for reader, register in self.readers.get(value, ()) if kind == "crossing" else ():
                there = self.register(reader[0], register)
                sends.append(Crossing(value, reader, *self.passage(sent, there)))
        received = [wire.number for wire in segment.inputs if wire.kind == "crossing"]
        return Call((stage, position), executable, received, reads, writes, sends)

    def template(self, mesh: int, kind: tuple[tuple[int, ...], Any, Layout]) -> Buffer:
        """Returns the template of all buffers of a shape, dtype and layout on a submesh."""
        shape, dtype, layout = kind
        return buffer(mesh, self.submeshes[mesh], layout, shape, dtype)

    def register(self, stage: int, register: int) -> Buffer:
        """Returns the template of the buffers of a stage's register."""
        return self.template(self.mesh_of[stage], self.stages[stage].register_type(register))

    def passage(self, sent: Buffer, wanted: Buffer) -> tuple[Buffer | None, float]:
        """Returns the template of the buffer that a transfer defines, and its seconds; None where none is needed."""
        if sent.mesh == wanted.mesh and sent.layout == wanted.layout:
            return None, 0.0
        ends = self.submeshes[sent.mesh], self.submeshes[wanted.mesh]
        return wanted, self.transfer_seconds(sent, *ends, wanted.layout)


def _wired(slot: Slot) -> Wired:
    """Returns the wire of an array; a slice of a register is read from the register's."""
    return "top" if slot.wire.kind == "slice" else slot.wire.kind, slot.wire.number


def _name(slot: Slot) -> str:
    if slot.pack is not None:
        return f"{len(slot.pack.members)} packed: {slot.wire.kind}"
    return f"{slot.wire.kind} {slot.wire.number}"


def mesh_of(schedule: Schedule) -> tuple[int, ...]:
    """Returns the submesh of each stage."""
    found = {task.stage: mesh for mesh, tasks in enumerate(schedule.tasks) for task in tasks}
    return tuple(found[stage] for stage in range(schedule.num_stages))
