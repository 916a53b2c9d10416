"""Lowers a decided graph to a local program, and the local program to one `jax.shard_map`.

Problem. Left to the partitioner, a plan's shardings come out with other collectives than were planned (DESIGN section
4). So the step is emitted as what each device does: every operation in its local form, every collective spelled out.

`lower` turns a graph, its grouping and one strategy a group into a `LocalProgram`: a list of instructions over
registers, which is data. `collectives` reads the collectives off it, `emit` makes it a function of global arrays. What
the plan lists is thereby what is emitted.

A value is resharded once for each layout that it is wanted in, from the layout that it is made in. With `late_from`
(see `strategies.build`), state is resharded once more for uses at or after that program point, behind an optimization
barrier, so that the compiler does not merge the two copies and keep the first alive.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.graph import Atom, Block, Lit, Op, Traced
from alpa_lite.layout import Axes, Layout, LogicalMesh, Step, replicated, reshard_steps
from alpa_lite.passes import evaluation
from alpa_lite.passes.grouping import Grouping
from alpa_lite.passes.local_forms import LocalForm, local_form, needs_outside
from alpa_lite.passes.strategies import Strategy, layout_of
from alpa_lite.plan import Collective
from alpa_lite.strategy import Rule

Operand = int | Lit
AnyMesh = Mesh | AbstractMesh


@dataclass(frozen=True, eq=False)
class Compute:
    """Runs an operation's local form on registers."""

    op: Op
    form: LocalForm
    operands: tuple[Operand, ...]
    results: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Reshard:
    """Takes a register through the steps of a change of layout. `late`: behind an optimization barrier."""

    value: int
    steps: tuple[Step, ...]
    source: int
    result: int
    late: bool
    used_by: Op | None


@dataclass(frozen=True, eq=False)
class Body:
    """A nested straight line of instructions."""

    inputs: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Operand, ...]


@dataclass(frozen=True, eq=False)
class Loop:
    """A scan, while or cond whose bodies are local programs."""

    op: Op
    operands: tuple[Operand, ...]
    bodies: tuple[Body, ...]
    results: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Outside:
    """An operation that cannot be inside a region: it runs on global arrays, and splits the step into regions."""

    op: Op
    operands: tuple[Operand, ...]
    results: tuple[int, ...]


Instruction = Compute | Reshard | Loop | Outside


@dataclass(frozen=True, eq=False)
class LocalProgram:
    """What each device does in a step.

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
    def outside(self) -> tuple[Op, ...]:
        """The operations that split the step into regions."""
        return tuple(item.op for item in self.body.instructions if isinstance(item, Outside))


def lower(
    traced: Traced,
    grouping: Grouping,
    rules: Mapping[Any, Rule],
    mesh: LogicalMesh,
    choice: Sequence[Strategy],
    late_from: int | None = None,
) -> LocalProgram:
    """Lowers a traced step to a local program. `choice` holds the strategy of each group."""
    return _Lowering(traced, grouping, rules, mesh, choice, late_from).program()


def spec_of(layout: Layout) -> PartitionSpec:
    """The PartitionSpec of a layout without partial sums."""
    assert not layout.partial, layout
    dims = [axes if len(axes) > 1 else axes[0] if axes else None for axes in layout.dims]
    while dims and dims[-1] is None:
        dims.pop()
    return PartitionSpec(*dims)


def collectives(program: LocalProgram, traced: Traced) -> tuple[tuple[Collective, tuple[int, int] | None], ...]:
    """Every logical collective of a local program, loop trip counts multiplied in, in program order.

    With each comes (value, phase) of the resharding that it belongs to, or None where an operation issues it.
    """
    out: list[tuple[Collective, tuple[int, int] | None]] = []
    values = traced.graph.values

    def visit(body: Body, trips: int) -> None:
        for item in body.instructions:
            match item:
                case Reshard(value=value, steps=steps, used_by=op, late=late):
                    for step in steps:
                        if step.kind != "slice":
                            size = step.payload(values[value].shape, values[value].itemsize, program.mesh)
                            axes = _sorted(step.axes, program.mesh)
                            found = Collective(step.kind, axes, size, trips, 0, _where(op))
                            out.append((found, (value, int(late))))
                case Compute(op=op, form=form):
                    for c in form.collectives:
                        axes = _sorted(c.axes, program.mesh)
                        out.append((Collective(c.kind, axes, c.bytes, trips, 0, _where(op)), None))
                case Loop(op=op, bodies=bodies):
                    times = trips * int(op.params["length"]) if op.name == "scan" else trips
                    for inner in bodies:
                        visit(inner, times)

    visit(program.body, 1)
    return tuple(out)


def emit(program: LocalProgram, traced: Traced, mesh: AnyMesh) -> Callable[..., list[Any]]:
    """A function of the flat global arguments and constants that returns the flat global outputs.

    It is one `shard_map`, unless operations outside split it into several. A partial sum that crosses from one to the
    next travels with a leading dim that is sharded over its partial axes.
    """
    pieces = _pieces(program.body.instructions)

    def fun(*leaves: Any) -> list[Any]:
        registers: dict[int, Any] = dict(zip(program.body.inputs, leaves, strict=True))
        for number, (outside, instructions) in enumerate(pieces):
            if outside is not None:
                operands = [o.value if isinstance(o, Lit) else registers[o] for o in outside.operands]
                registers.update(zip(outside.results, evaluation.bind(outside.op, operands), strict=True))
            later = [_reads(rest, before) for before, rest in pieces[number + 1 :]]
            finals = [o for o in program.body.outputs if not isinstance(o, Lit)]
            wanted = sorted(set(finals).union(*later) & _writes(instructions))
            taken = sorted(_reads(instructions, None) & registers.keys())
            region = functools.partial(_region, program, traced, instructions, taken, wanted)
            run = jax.shard_map(
                region,
                mesh=mesh,
                in_specs=tuple(_crossing_spec(program.registers[r]) for r in taken),
                out_specs=[_crossing_spec(program.registers[r]) for r in wanted],
                check_vma=False,
            )
            if instructions:
                registers.update(zip(wanted, run(*(registers[r] for r in taken)), strict=True))
        return [o.value if isinstance(o, Lit) else registers[o] for o in program.body.outputs]

    return fun


def _pieces(instructions: Sequence[Instruction]) -> list[tuple[Outside | None, tuple[Instruction, ...]]]:
    """Maximal runs of instructions inside a region, each after the outside operation that comes before it."""
    pieces: list[tuple[Outside | None, list[Instruction]]] = [(None, [])]
    for item in instructions:
        if isinstance(item, Outside):
            pieces.append((item, []))
        else:
            pieces[-1][1].append(item)
    return [(outside, tuple(run)) for outside, run in pieces]


def _region(
    program: LocalProgram,
    traced: Traced,
    instructions: tuple[Instruction, ...],
    taken: Sequence[int],
    wanted: Sequence[int],
    *blocks: Any,
) -> list[Any]:
    """What each device does in one region."""
    layouts = program.registers
    inputs = [b[0] if layouts[r].partial else b for r, b in zip(taken, blocks, strict=True)]
    body = Body(tuple(taken), instructions, tuple(wanted))
    outputs = _run(body, inputs, [None] * len(layouts), program.mesh, traced)
    return [b[None] if layouts[r].partial else b for r, b in zip(wanted, outputs, strict=True)]


def _crossing_spec(layout: Layout) -> PartitionSpec:
    """The spec of a value between regions: a partial sum has a leading dim for its summands."""
    if not layout.partial:
        return spec_of(layout)
    return spec_of(Layout((layout.partial, *layout.dims)))


def _reads(instructions: Sequence[Instruction], outside: Outside | None) -> set[int]:
    """The registers that some instructions read and do not write themselves."""
    found = {o for o in outside.operands if not isinstance(o, Lit)} if outside is not None else set()
    written: set[int] = set()
    for item in instructions:
        operands = (item.source,) if isinstance(item, Reshard) else item.operands
        found |= {o for o in operands if not isinstance(o, Lit) and o not in written}
        written |= _writes([item])
    return found


def _writes(instructions: Sequence[Instruction]) -> set[int]:
    return {r for i in instructions for r in ((i.result,) if isinstance(i, Reshard) else i.results)}


def emit_constrained(program: LocalProgram, traced: Traced, mesh: AnyMesh) -> Callable[..., list[Any]]:
    """The same function with the plan's layouts as constraints, its collectives left to the compiler."""
    layouts: dict[int, Layout] = {}

    def visit(body: Body) -> None:
        for item in body.instructions:
            match item:
                case Compute(op=op, form=form):
                    layouts.update(zip(op.results, form.results, strict=False))
                case Loop(bodies=bodies):
                    for inner in bodies:
                        visit(inner)

    visit(program.body)

    def place(value: int, array: Any) -> Any:
        layout = layouts.get(value)
        if layout is None or layout.partial or layout.is_replicated:
            return array
        return lax.with_sharding_constraint(array, NamedSharding(mesh, spec_of(layout)))

    def fun(*leaves: Any) -> list[Any]:
        count = len(leaves) - len(traced.graph.constants)
        outputs = evaluation.evaluate(traced.graph, leaves[:count], leaves[count:], place)
        return [
            lax.with_sharding_constraint(x, NamedSharding(mesh, spec_of(layout)))
            for x, layout in zip(outputs, program.outputs, strict=True)
        ]

    return fun


def function_of(program: LocalProgram, traced: Traced, mesh: AnyMesh, communication: str) -> Callable[..., list[Any]]:
    """The step as a function of flat global arrays, as `communication` says; on one device just the traced program."""
    if program.mesh.size == 1:
        return lambda *leaves: evaluation.evaluate_block(traced.graph.block, leaves)
    return emit(program, traced, mesh) if communication == "explicit" else emit_constrained(program, traced, mesh)


def _sorted(axes: Axes, mesh: LogicalMesh) -> Axes:
    return tuple(a for a in mesh.axis_names if a in axes)


def _where(op: Op | None) -> str:
    return _jax.where(op.source) if op is not None else "output"


class _Lowering:
    """Walks the graph in program order and writes instructions."""

    def __init__(self, traced, grouping, rules, mesh, choice, late_from):
        self.traced: Traced = traced
        self.values = traced.graph.values
        self.grouping: Grouping = grouping
        self.rules = rules
        self.mesh: LogicalMesh = mesh
        self.choice = choice
        self.late_from = late_from
        self.state = set(traced.graph.block.inputs)
        self.member = {op: (g, f) for g in grouping.groups for op, f in zip(g.ops, g.op_factors, strict=True)}
        self.base: dict[int, Layout] = {}
        self.where: dict[tuple[int, Layout, bool], int] = {}
        self.out: list[Instruction] = []
        self.registers: list[Layout] = []
        self.clock = 0
        self.user: Op | None = None

    def program(self) -> LocalProgram:
        block = self.traced.graph.block
        for value in block.inputs:
            self.home(value)
        inputs = tuple(self.base[v] for v in block.inputs)
        registers = tuple(self.where[v, self.base[v], False] for v in block.inputs)
        self.block(block)
        self.clock, self.user = self.grouping.points, None
        outputs, layouts = [], []
        for atom, place in zip(block.outputs, self.grouping.outputs, strict=True):
            layout = self.outer_layout(atom, place)
            outputs.append(self.fetch(atom, layout))
            layouts.append(layout)
        body = Body(registers, tuple(self.out), tuple(outputs))
        return LocalProgram(self.mesh, body, inputs, tuple(layouts), tuple(self.registers))

    def outer_layout(self, atom: Atom, place: Any) -> Layout:
        if isinstance(atom, Lit) or place is None:
            return replicated(len(atom.aval.shape) if isinstance(atom, Lit) else len(self.values[atom].shape))
        group, dims = place
        return layout_of(dims, self.choice[group])

    # -- values ---------------------------------------------------------------------------------------------------

    def new(self, layout: Layout) -> int:
        self.registers.append(layout)
        return len(self.registers) - 1

    def home(self, value: int) -> int:
        """Gives an input of a block its register, in its home's layout."""
        return self.define(value, self.home_layout(value))

    def home_layout(self, value: int, skip: int = 0) -> Layout:
        """The layout that a value's home gives it, without its first `skip` dims; not for results of heavy groups."""
        home = self.grouping.homes[value]
        strategy = self.choice[home.group]
        return layout_of(home.dims[skip:], strategy, strategy.partial)

    def define(self, value: int, layout: Layout) -> int:
        self.base[value] = layout
        register = self.new(layout)
        self.where[value, layout, False] = register
        return register

    def fetch(self, atom: Atom, layout: Layout) -> Operand:
        """The register that holds a value in a layout, resharding it if need be."""
        if isinstance(atom, Lit):
            return atom
        if atom in self.grouping.lazy:
            return self.make(atom, layout)
        base = self.base[atom]
        late = self.late_from is not None and atom in self.state and self.clock >= self.late_from and layout != base
        key = (atom, layout, late)
        if key not in self.where:
            steps = reshard_steps(base, layout)
            assert steps is not None, f"no way from {base} to {layout}"
            communicates = any(step.kind != "slice" for step in steps)
            self.where[key] = self.new(layout)
            source = self.where[atom, base, False]
            self.out.append(Reshard(atom, steps, source, self.where[key], late and communicates, self.user))
        return self.where[key]

    def make(self, value: int, layout: Layout) -> int:
        """Computes the block of a lazy value that a layout asks for. Zeros are also partial sums over any axes."""
        key = (value, layout, False)
        if key in self.where:
            return self.where[key]
        number, result = self.grouping.lazy[value]
        op = self.grouping.ops[number]
        rule = self.rules[op.key]
        axes: list[Axes] = [()] * len(rule.factors)
        for dim, wanted in zip(rule.results[result], layout.dims, strict=True):
            if dim:
                axes[dim[0]] = wanted
        form = local_form(op, rule, tuple(axes), self.values, self.mesh)
        if form is None or form.results[result].dims != layout.dims:
            whole = replicated(len(layout.dims))
            source = self.make(value, whole)
            steps = reshard_steps(whole, layout)
            assert steps is not None and whole != layout, (op.name, layout)
            self.where[key] = self.new(layout)
            self.out.append(Reshard(value, steps, source, self.where[key], False, self.user))
            return self.where[key]
        operands = tuple(self.fetch(a, la) for a, la in zip(op.operands, form.operands, strict=True))
        register = self.new(layout)
        self.where[key] = register
        self.out.append(Compute(op, form, operands, (register,)))
        return register

    # -- operations -----------------------------------------------------------------------------------------------

    def block(self, block: Block) -> None:
        for op in block.ops:
            self.clock = self.grouping.positions[op.index]
            self.user = op
            if needs_outside(op):
                self.outside(op)
            elif op.bodies:
                self.structured(op)
            elif op.name == "optimization_barrier":
                self.barrier(op)
            elif not (op.results and all(v in self.grouping.lazy for v in op.results)):
                self.straight(op)

    def straight(self, op: Op) -> None:
        group, factors = self.member[op.index]
        strategy = self.choice[group.index]
        rule = self.rules[op.key]
        axes = tuple(strategy.axes[f] for f in factors) if factors else ((),) * len(rule.factors)
        form = local_form(op, rule, axes, self.values, self.mesh)
        if form is None:
            self.whole(op, strategy)
            return
        if strategy.partial:
            form = LocalForm(
                tuple(Layout(la.dims, strategy.partial) for la in form.operands),
                tuple(Layout(la.dims, strategy.partial) for la in form.results),
                form.collectives,
                form.run,
            )
        operands = tuple(self.fetch(a, la) for a, la in zip(op.operands, form.operands, strict=True))
        results = tuple(self.define(v, la) for v, la in zip(op.results, form.results, strict=True))
        self.out.append(Compute(op, form, operands, results))

    def whole(self, op: Op, strategy: Strategy) -> None:
        """Runs a follower without a local form in its group's strategy whole on every device, and cuts its results."""
        rule = self.rules[op.key]
        form = local_form(op, rule, ((),) * len(rule.factors), self.values, self.mesh)
        assert form is not None, f"{op.name} cannot run whole"
        operands = tuple(self.fetch(a, la) for a, la in zip(op.operands, form.operands, strict=True))
        results = tuple(self.new(la) for la in form.results)
        self.out.append(Compute(op, form, operands, results))
        for value, register, layout in zip(op.results, results, form.results, strict=True):
            wanted = layout_of(self.grouping.homes[value].dims, strategy)
            steps = reshard_steps(layout, wanted)
            assert steps is not None
            self.out.append(Reshard(value, steps, register, self.define(value, wanted), False, op))

    def outside(self, op: Op) -> None:
        """Whole values go out of the region, and whole values come back."""
        ranks = [len((a.aval if isinstance(a, Lit) else self.values[a]).shape) for a in op.operands]
        operands = tuple(self.fetch(a, replicated(rank)) for a, rank in zip(op.operands, ranks, strict=True))
        results = tuple(self.define(v, replicated(len(self.values[v].shape))) for v in op.results)
        self.out.append(Outside(op, operands, results))

    def barrier(self, op: Op) -> None:
        """Values pass a barrier in the layout that they have; lazy ones need none."""
        pairs = [(a, v) for a, v in zip(op.operands, op.results, strict=True) if v not in self.grouping.lazy]
        if not pairs:
            return
        layouts = tuple(replicated(len(a.aval.shape)) if isinstance(a, Lit) else self.base[a] for a, _ in pairs)
        operands = tuple(self.fetch(a, la) for (a, _), la in zip(pairs, layouts, strict=True))
        results = tuple(self.define(v, la) for (_, v), la in zip(pairs, layouts, strict=True))
        form = LocalForm(layouts, layouts, (), lambda *blocks: list(op.primitive.bind(*blocks)))
        self.out.append(Compute(op, form, operands, results))

    def structured(self, op: Op) -> None:
        operands: list[Operand] = []
        if op.name == "scan":
            (body,) = op.bodies
            stacked = op.params["num_consts"] + op.params["num_carry"]
            for i, (atom, value) in enumerate(zip(op.operands, body.inputs, strict=True)):
                operands.append(self.fetch(atom, self.port_layout(value, stacked=i >= stacked)))
            bodies = (self.nested(body, [self.result_layout(op, i) for i in range(len(op.results))]),)
        elif op.name == "while":
            cond, body = op.bodies
            cond_n, body_n = op.params["cond_nconsts"], op.params["body_nconsts"]
            ports = (*cond.inputs[:cond_n], *body.inputs)
            for atom, value in zip(op.operands, ports, strict=True):
                operands.append(self.fetch(atom, self.port_layout(value)))
            carried = [self.port_layout(v) for v in body.inputs[body_n:]]
            bodies = (self.nested(cond, [replicated(0)]), self.nested(body, carried))
        else:
            operands.append(self.fetch(op.operands[0], replicated(0)))
            for atom, value in zip(op.operands[1:], op.bodies[0].inputs, strict=True):
                operands.append(self.fetch(atom, self.port_layout(value)))
            wanted = [self.home_layout(v) for v in op.results]
            bodies = tuple(self.nested(branch, wanted) for branch in op.bodies)
        results = tuple(self.define(v, self.home_layout(v)) for v in op.results)
        self.out.append(Loop(op, tuple(operands), bodies, results))

    def port_layout(self, value: int, *, stacked: bool = False) -> Layout:
        layout = self.home_layout(value)
        return Layout(((), *layout.dims), layout.partial) if stacked else layout

    def result_layout(self, op: Op, number: int) -> Layout:
        """The layout in which a scan's body delivers output `number`: a stacked result without its first dim."""
        return self.home_layout(op.results[number], skip=0 if number < op.params["num_carry"] else 1)

    def nested(self, block: Block, wanted: Sequence[Layout]) -> Body:
        saved, self.out = self.out, []
        inputs = tuple(self.home(value) for value in block.inputs)
        self.block(block)
        self.user = None
        outputs = tuple(self.fetch(a, la) for a, la in zip(block.outputs, wanted, strict=True))
        body = Body(inputs, tuple(self.out), outputs)
        self.out = saved
        return body


# -- emission -----------------------------------------------------------------------------------------------------


def _run(body: Body, inputs: Sequence[Any], registers: list[Any], mesh: LogicalMesh, traced: Traced) -> list[Any]:
    """Executes a body's instructions inside `shard_map`."""

    def read(operand: Operand) -> Any:
        return operand.value if isinstance(operand, Lit) else registers[operand]

    for register, block in zip(body.inputs, inputs, strict=True):
        registers[register] = block
    for item in body.instructions:
        match item:
            case Compute():
                results = item.form.run(*(read(o) for o in item.operands))
                for register, block in zip(item.results, results, strict=True):
                    registers[register] = block
            case Reshard():
                with _jax.under(item.used_by.source) if item.used_by is not None else contextlib.nullcontext():
                    block = registers[item.source]
                    if item.late:
                        block = lax.optimization_barrier(block)
                    shape = traced.graph.values[item.value].shape
                    for step in item.steps:
                        block = _step(block, step, shape, mesh)
                registers[item.result] = block
            case Loop():
                with _jax.under(item.op.source):
                    results = _loop(item, [read(o) for o in item.operands], registers, mesh, traced)
                for register, block in zip(item.results, results, strict=True):
                    registers[register] = block
            case Outside():
                raise AssertionError("an operation that must be outside is inside a region")
    return [read(o) for o in body.outputs]


def _step(block: Any, step: Step, shape: tuple[int, ...], mesh: LogicalMesh) -> Any:
    """One elementary change of layout of a local block."""
    match step.kind:
        case "slice":
            sizes = list(block.shape)
            sizes[step.dim] = shape[step.dim] // mesh.product(step.after.dims[step.dim])
            starts: list[Any] = [np.int32(0)] * len(sizes)
            starts[step.dim] = lax.mul(_block_number(step.axes, mesh), np.int32(sizes[step.dim]))
            return lax.dynamic_slice(block, starts, sizes, allow_negative_indices=False)
        case "all_reduce":
            return lax.psum(block, step.axes)
        case "reduce_scatter":
            return lax.psum_scatter(block, step.axes, scatter_dimension=step.dim, tiled=True)
        case "all_gather":
            return lax.all_gather(block, step.axes, axis=step.dim, tiled=True)
        case "all_to_all":
            return lax.all_to_all(block, step.axes, step.to_dim, step.dim, tiled=True)
        case "collective_permute":
            before = step.before.dims[step.dim]
            return lax.ppermute(block, _sorted(before, mesh), _reorder(before, step.axes, mesh))


def _block_number(axes: Axes, mesh: LogicalMesh) -> Any:
    """This device's number along the axes, major to minor; in plain `lax`, which traces faster than operators."""
    number = lax.axis_index(axes[0])
    for axis in axes[1:]:
        number = lax.add(lax.mul(number, np.int32(mesh.axis_size(axis))), lax.axis_index(axis))
    return number


def _reorder(before: Axes, after: Axes, mesh: LogicalMesh) -> list[tuple[int, int]]:
    """(source, destination) pairs that move block b from its place along `before` to its place along `after`.

    Devices are numbered along the axes in mesh order: `ppermute` does not follow another order of its axis names.
    """
    axes = _sorted(before, mesh)

    def device(block: int, order: Axes) -> int:
        place = {}
        for axis in reversed(order):
            place[axis] = block % mesh.axis_size(axis)
            block //= mesh.axis_size(axis)
        number = 0
        for axis in axes:
            number = number * mesh.axis_size(axis) + place[axis]
        return number

    return [(device(block, before), device(block, after)) for block in range(mesh.product(before))]


def _loop(item: Loop, operands: list[Any], registers: list[Any], mesh: LogicalMesh, traced: Traced) -> list[Any]:
    """Emits a scan, while or cond over local bodies."""

    def function(body: Body) -> Callable[[Sequence[Any]], list[Any]]:
        return lambda inputs: _strong(_run(body, inputs, registers, mesh, traced))

    return evaluation.control_flow(item.op, _strong(operands), [function(body) for body in item.bodies])


def _strong(blocks: Sequence[Any]) -> list[Any]:
    """Drops weak types: carries and branch results must agree in them, and primitives do not look at them."""
    return [_jax.strong(block) for block in blocks]


def block_count(layout: Layout, mesh: LogicalMesh) -> int:
    """Into how many distinct blocks a layout cuts a tensor."""
    return math.prod(mesh.product(axes) for axes in layout.dims)
