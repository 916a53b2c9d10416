"""The parts of a stage that a schedule runs, as values: segments, and the wires between them (`cutting` makes them)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
      inputs: the arrays that it takes, with the registers that each sets: of a pack, that of each member. For "pieces"
        the function takes one array for each micro-batch.
      outputs: the arrays that it gives, with the register or literal on each: of a pack, that of each member.
      instructions: what it does.
      preset: registers that hold literals.
    """

    kind: Kind
    round: int
    inputs: Mapping[Wire, tuple[int, ...]]
    outputs: Mapping[Wire, tuple[Operand, ...]]
    instructions: tuple[Instruction, ...]
    preset: tuple[tuple[int, Lit], ...] = ()


@dataclass(frozen=True)
class Pack:
    """Small values of one dtype that go between segments in one buffer: on each device its blocks, end to end.

    Attributes:
      members: what it holds.
      sizes: elements of each member's block.
      dtype: of all.
    """

    members: tuple[Wire, ...]
    sizes: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True, eq=False)
class Segments:
    """A stage in segments.

    Attributes:
      stage, program: what was cut.
      items: in the order prologue, forward, backward, weight, update rounds; kinds that have nothing to do are absent.
      finals: for each result of the stage's graph, its top register or literal; None for crossing ones.
      packs: by wire, which has the kind of the members and a negative number; see `packing`.
    """

    stage: StageGraph
    program: LocalProgram
    items: tuple[Segment, ...]
    finals: tuple[Operand | None, ...]
    packs: Mapping[Wire, Pack] = field(default_factory=dict)

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

    def members(self, wire: Wire) -> tuple[Wire, ...]:
        """Returns the values on a wire: those of a pack, or itself."""
        return self.packs[wire].members if wire in self.packs else (wire,)

    def type_of(self, wire: Wire, operands: Sequence[Operand]) -> ArrayType:
        """Shape, dtype and layout of the global array on a wire; a partial sum has a leading dim for its summands.

        Args:
          operands: what a segment that takes or gives it has on it.
        """
        if wire in self.packs:
            pack, mesh = self.packs[wire], self.program.mesh
            axes = tuple(name for name in mesh.axis_names if mesh.axis_size(name) > 1)
            return (mesh.size * sum(pack.sizes),), pack.dtype, Layout((axes,))
        if wire.kind == "number":
            return (), np.dtype("int32"), Layout(())
        if wire.kind == "carry":
            operand: Operand = self.carry_registers[wire.number]
        else:
            operand = wire.number if wire.kind in ("top", "slice") else operands[0]
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
