"""The parts of a stage that a schedule runs, as values: segments, and the wires between them (`cutting` makes them)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from alpa_lite.ir.graph import Lit, Value
from alpa_lite.ir.layout import Layout
from alpa_lite.ir.program import Kind
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.lowering.program import Instruction, LocalProgram, Loop, Operand, Reshard
from alpa_lite.passes.stages.stage_graph import StageGraph

ArrayType = tuple[tuple[int, ...], Any, Layout]
"""Shape, dtype and layout of a global array."""

WireKind = Literal["top", "slice", "number", "carry", "crossing", "saved", "piece", "pieces", "literal"]


class Wire(NamedTuple):
    """A value between segments, or between a segment and the step.

    kind / number:
      top: a register of the top level: an argument of the stage, or what the prologue or a round of the update made.
      slice: such a register, stacked over micro-batches, of which the segment takes one micro-batch.
      number: the number of the micro-batch, an int32 scalar.
      carry: carry `number` of the loop, before or after the segment.
      crossing: body value `number`, from or for another stage.
      saved: a register of the loop's body, for a later segment of the same micro-batch.
      literal: result `number` of the stage, which is a literal.
      piece: what this micro-batch adds to stacked result `number` of the loop; "pieces", all of them.
    """

    kind: WireKind
    number: int


@dataclass(frozen=True, eq=False)
class Segment:
    """One function of a stage.

    Attributes:
      kind, round: what it is; the round counts those of the update, and slices of the sequence forward and backward.
      inputs, outputs: wires. For "pieces" the function takes one array for each micro-batch.
      binds: for each input, the registers that it sets.
      preset: registers that hold literals.
      reads: for each output, the register or literal.
      instructions: what it does.
    """

    kind: Kind
    round: int
    inputs: tuple[Wire, ...]
    binds: tuple[tuple[int, ...], ...]
    preset: tuple[tuple[int, Lit], ...]
    outputs: tuple[Wire, ...]
    reads: tuple[Operand, ...]
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True)
class Pack:
    """Small values of one dtype that go between segments in one buffer: on each device its blocks, end to end.

    Attributes:
      wire: of the buffer: the kind of its members, and a negative number.
      members: what it holds.
      sizes: elements of each member's block.
      dtype: of all.
      readers: the kinds of segments that read the members here; others read them where they were before.
    """

    wire: Wire
    members: tuple[Wire, ...]
    sizes: tuple[int, ...]
    dtype: Any
    readers: frozenset[Kind]


@dataclass(frozen=True, eq=False)
class Segments:
    """A stage in segments.

    Attributes:
      stage, program: what was cut.
      items: in the order prologue, forward, backward, weight, update rounds; kinds that have nothing to do are absent.
      finals: for each result of the stage's graph, its top register or literal; None for crossing ones.
      packs: see `packing`.
    """

    stage: StageGraph
    program: LocalProgram
    items: tuple[Segment, ...]
    finals: tuple[Operand | None, ...]
    packs: tuple[Pack, ...] = ()

    @functools.cached_property
    def value_of(self) -> Mapping[int, int]:
        """The value that each register holds."""
        found = dict(zip(self.program.body.inputs, self.stage.traced.graph.block.inputs, strict=True))

        def visit(items: Iterable[Instruction]) -> None:
            for item in items:
                if isinstance(item, Reshard):
                    found[item.result] = item.value
                    continue
                found.update(zip(item.results, item.op.results, strict=True))
                if isinstance(item, Loop):
                    for block, body in zip(item.op.bodies, item.bodies, strict=True):
                        found.update(zip(body.inputs, block.inputs, strict=True))
                        visit(body.instructions)

        visit(self.program.body.instructions)
        return found

    @functools.cached_property
    def carry_registers(self) -> tuple[int, ...]:
        """The loop body's registers of its carries."""
        loops = [i for i in self.program.body.instructions if isinstance(i, Loop) and i.op.index == self.stage.scan]
        return ScanView(loops[0].op).split_operands(loops[0].bodies[0].inputs).carry

    def find(self, kind: Kind, number: int = 0) -> Segment | None:
        """Returns the segment of a kind, of one slice of the sequence; there is at most one."""
        return next((s for s in self.items if s.kind == kind and s.round == number), None)

    def type_of(self, segment: Segment, position: int, *, output: bool = False) -> ArrayType:
        """Shape, dtype and layout of the global array on a wire; a partial sum has a leading dim for its summands."""
        wire = (segment.outputs if output else segment.inputs)[position]
        if wire.kind == "number":
            return (), np.dtype("int32"), Layout(())
        if wire.kind == "carry":
            operand = self.carry_registers[wire.number]
        elif output:
            operand = segment.reads[position]
        else:
            operand = wire.number if wire.kind in ("top", "slice") else segment.binds[position][0]
        if isinstance(operand, Lit):
            return tuple(operand.aval.shape), operand.aval.dtype, Layout(((),) * len(operand.aval.shape))
        return self.register_type(operand, stacked=wire.kind == "pieces")

    def register_type(self, register: int, *, stacked: bool = False) -> ArrayType:
        """As `type_of`, of a register. `stacked`: without the leading dim of micro-batches."""
        value: Value = self.stage.traced.graph.values[self.value_of[register]]
        layout, shape = self.program.registers[register], value.shape
        if stacked:
            layout, shape = Layout(layout.dims[1:], layout.partial), shape[1:]
        if layout.partial:
            summands = self.program.mesh.product(layout.partial)
            return (summands, *shape), value.dtype, Layout((layout.partial, *layout.dims))
        return shape, value.dtype, layout
