"""The segments of stages as they are run: what each takes, gives and sends, before any buffer has a number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from alpa_lite.ir.layout import Layout
from alpa_lite.ir.program import Buffer, Executable, Submesh, buffer
from alpa_lite.ir.schedules import Schedule
from alpa_lite.passes.ir.remembered import memoise_method
from alpa_lite.passes.stages.segments import ArrayType, Segment, Segments, Wire

TransferSeconds = Callable[[Buffer, Submesh, Submesh, Layout], float]

SegmentKey = tuple[int, str, int]
"""A stage, and the kind and round of a segment of it."""


class BufferRef(NamedTuple):
    """A value of a stage, by its wire; `microbatch` is -1 where all micro-batches share a buffer."""

    stage: int
    wire: Wire
    microbatch: int = -1


def ref(stage: int, wire: Wire, microbatch: int) -> BufferRef:
    """Returns a value in a micro-batch: carries, and what is made once, have one buffer for all micro-batches."""
    return BufferRef(stage, wire, microbatch if wire.kind in ("number", "crossing", "saved", "piece") else -1)


class Call(NamedTuple):
    """A segment as it is run.

    Attributes:
      function: (stage, position in `Segments.items`).
      received: the wires of values from other stages that it reads.
      reads: the wire of each array that it takes.
      writes: that of each that it gives, with the template of its buffer and its name.
      sends: the wires of values for other stages, with the first segment of each that reads them and its register.
    """

    function: tuple[int, int]
    executable: Executable
    received: Sequence[Wire]
    reads: Sequence[Wire]
    writes: Sequence[tuple[Wire, Buffer, str]]
    sends: Sequence[tuple[Wire, SegmentKey, int]]


@dataclass(frozen=True, eq=False)
class Calls:
    """The calls of all segments, and the templates of buffers.

    Attributes:
      stages: one for each of the schedule.
      submeshes: one for each of its lists.
      seconds: of each segment, predicted.
      transfer_seconds: predicts those of a transfer.
    """

    stages: Sequence[Segments]
    submeshes: Sequence[Submesh]
    schedule: Schedule
    seconds: Mapping[Segment, float]
    transfer_seconds: TransferSeconds

    @cached_property
    def mesh_of(self) -> tuple[int, ...]:
        """The submesh of each stage."""
        return mesh_of(self.schedule)

    @cached_property
    def of_segment(self) -> dict[SegmentKey, Call]:
        """The call of each segment."""
        return {
            (number, segment.kind, segment.round): self._call(number, position)
            for number, parts in enumerate(self.stages)
            for position, segment in enumerate(parts.items)
        }

    @cached_property
    def _readers(self) -> dict[Wire, dict[int, tuple[SegmentKey, int]]]:
        """The first segment of each stage that reads a crossing value, and the register there."""
        found: dict[Wire, dict[int, tuple[SegmentKey, int]]] = defaultdict(dict)
        for number, parts in enumerate(self.stages):
            for segment in parts.items:
                for wire, registers in segment.inputs.items():
                    if wire.kind == "crossing":
                        found[wire].setdefault(number, ((number, segment.kind, segment.round), registers[0]))
        return found

    def _call(self, stage: int, position: int) -> Call:
        """Returns a segment with its inputs and outputs."""
        parts, mesh = self.stages[stage], self.mesh_of[stage]
        segment = parts.items[position]
        # A slice of a register is read from the register's buffer.
        reads = [wire._replace(kind="top") if wire.kind == "slice" else wire for wire in segment.inputs]
        writes = [
            (wire, self.template(mesh, parts.type_of(wire, operands)), _name(parts, wire))
            for wire, operands in segment.outputs.items()
        ]
        sums = {wire for wire, _, _ in writes if wire.kind == "carry" and segment.kind != "update"}
        sliced = self.schedule.num_slices > 1 and segment.kind in ("forward", "backward")
        part = f" {segment.round}" if segment.round or sliced else ""
        executable = Executable(
            f"stage {stage} {segment.kind}{part}" if segment.kind != "step" else "step", mesh, stage, segment.kind,
            tuple(i for i, wire in enumerate(reads) if wire in sums),
            self.seconds[segment], slice=segment.round if sliced else -1,
        )  # fmt: skip
        sends = [(wire, *reader) for wire, _, _ in writes for reader in self._readers.get(wire, {}).values()]
        received = [wire for wire in segment.inputs if wire.kind == "crossing"]
        return Call((stage, position), executable, received, reads, writes, sends)

    def template(self, mesh: int, kind: ArrayType) -> Buffer:
        """Returns the template of all buffers of a shape, dtype and layout on a submesh."""
        shape, dtype, layout = kind
        return buffer(mesh, self.submeshes[mesh], layout, shape, dtype)

    @memoise_method
    def register(self, stage: int, register: int) -> Buffer:
        """Returns the template of the buffers of a stage's register."""
        return self.template(self.mesh_of[stage], self.stages[stage].register_type(register))

    @memoise_method
    def passage(self, mesh: int, layout: Layout, stage: int, register: int) -> tuple[Buffer | None, float]:
        """Returns the template of a register's buffer, and the seconds of sending it there; None where it is in place.

        Args:
          mesh, layout: of the buffer where the value is.
        """
        wanted = self.register(stage, register)
        if mesh == wanted.mesh and layout == wanted.layout:
            return None, 0.0
        sent = self.template(mesh, (wanted.shape, wanted.dtype, layout))
        return wanted, self.transfer_seconds(sent, self.submeshes[mesh], self.submeshes[wanted.mesh], wanted.layout)


def _name(parts: Segments, wire: Wire) -> str:
    if wire in parts.packs:
        return f"{len(parts.packs[wire].members)} packed: {wire.kind}"
    return f"{wire.kind} {wire.number}"


def mesh_of(schedule: Schedule) -> tuple[int, ...]:
    """Returns the submesh of each stage."""
    found = {task.stage: mesh for mesh, tasks in enumerate(schedule.tasks) for task in tasks}
    return tuple(found[stage] for stage in range(schedule.num_stages))
