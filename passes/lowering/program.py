"""The program of each device in a step, as data: instructions over registers, and their communication.

`lowering.lowering.lower` makes a `LocalProgram`, `lowering.emission.emit` makes it a function of global arrays, and
`collectives` reads the plan's list off it, so that what the plan lists is what is emitted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from alpa_lite import _jax
from alpa_lite.ir.graph import Lit, Op, Traced
from alpa_lite.ir.layout import Layout, LogicalMesh, Step
from alpa_lite.passes.ir.loops import body_runs
from alpa_lite.passes.local.types import LocalForm, sort_axes
from alpa_lite.plan.records import Collective

Operand = int | Lit


class HasOperands:
    """An instruction with operands."""

    operands: tuple[Operand, ...]

    @functools.cached_property
    def reads(self) -> tuple[int, ...]:
        """The registers among its operands."""
        return tuple([o for o in self.operands if not isinstance(o, Lit)])


@dataclass(frozen=True, eq=False)
class Compute(HasOperands):
    """Runs an operation's local form on registers."""

    op: Op
    form: LocalForm
    operands: tuple[Operand, ...]
    results: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Reshard:
    """Takes a register through the steps of a change of layout. `is_late`: behind an optimization barrier."""

    value: int
    steps: tuple[Step, ...]
    source: int
    result: int
    is_late: bool
    used_by: Op | None

    @property
    def reads(self) -> tuple[int, ...]:
        """The register that is resharded."""
        return (self.source,)

    @property
    def results(self) -> tuple[int, ...]:
        """The register that it is written to."""
        return (self.result,)


@dataclass(frozen=True, eq=False)
class Body:
    """A nested straight line of instructions."""

    inputs: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Operand, ...]


@dataclass(frozen=True, eq=False)
class Loop(HasOperands):
    """A scan, while or cond whose bodies are local programs."""

    op: Op
    operands: tuple[Operand, ...]
    bodies: tuple[Body, ...]
    results: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class GlobalOp(HasOperands):
    """An operation that cannot be inside a region: it runs on global arrays, and splits the step into regions."""

    op: Op
    operands: tuple[Operand, ...]
    results: tuple[int, ...]


Instruction = Compute | Reshard | Loop | GlobalOp


@dataclass(frozen=True, eq=False)
class LocalProgram:
    """The program of each device in a step.

    Attributes:
      body: its inputs are the flat arguments and constants, in `inputs` layouts; its outputs are in `outputs` layouts.
      registers: the layout of each register.
    """

    mesh: LogicalMesh
    body: Body
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    registers: tuple[Layout, ...]

    @property
    def boundary_ops(self) -> tuple[Op, ...]:
        """The operations that split the step into regions."""
        return tuple(item.op for item in self.body.instructions if isinstance(item, GlobalOp))


def spec_of(layout: Layout) -> PartitionSpec:
    """Returns the PartitionSpec of a layout without partial sums."""
    assert not layout.partial, layout
    dims = [axes if len(axes) > 1 else axes[0] if axes else None for axes in layout.dims]
    while dims and dims[-1] is None:
        dims.pop()
    return PartitionSpec(*dims)


IssuedCollective = tuple[Collective, tuple[int, int] | None, Op | None]
"""A collective, (value, phase) of the resharding that it belongs to or None where an operation issues it, and the
operation that waits for it or issues it, None for an output of the step."""


def collectives(
    program: LocalProgram, traced: Traced, items: Iterable[Instruction] | None = None, trips: int = 1
) -> Iterator[IssuedCollective]:
    """Yields every logical collective of a local program, loop trip counts multiplied in, in program order.

    Args:
      items: instructions of the program, by default all of them.
      trips: how often they run.
    """
    mesh, values = program.mesh, traced.graph.values
    for item in program.body.instructions if items is None else items:
        match item:
            case Reshard(value=value, steps=steps, used_by=op, is_late=late):
                for step in steps:
                    if step.kind != "slice":
                        size = step.payload(values[value].shape, values[value].itemsize, mesh)
                        axes = sort_axes(step.communication_axes(mesh), mesh)
                        yield Collective(step.kind, axes, size, trips, 0, source_line_of(op)), (value, int(late)), op
            case Compute(op=op, form=form):
                for c in form.collectives:
                    axes = sort_axes(c.axes, mesh)
                    yield Collective(c.kind, axes, c.bytes, trips, 0, source_line_of(op)), None, op
            case Loop(op=op, bodies=bodies):
                for inner in bodies:
                    yield from collectives(program, traced, inner.instructions, trips * body_runs(op))


def computes(items: Iterable[Instruction]) -> Iterator[Compute]:
    """Yields the operations among some instructions, those in loops included, in program order."""
    for item in items:
        if isinstance(item, Compute):
            yield item
        elif isinstance(item, Loop):
            for body in item.bodies:
                yield from computes(body.instructions)


def read_before(instructions: Iterable[Instruction]) -> set[int]:
    """Returns the registers that some instructions read before they write them themselves."""
    found: set[int] = set()
    written: set[int] = set()
    for item in instructions:
        found.update(o for o in item.reads if o not in written)
        written.update(item.results)
    return found


def source_line_of(op: Op | None) -> str:
    """Returns the source line of the op that uses a value; None is an output of the step."""
    return _jax.describe_location(op.source) if op is not None else "output"
