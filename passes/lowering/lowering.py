"""Lowers a graph, its grouping and one strategy a group to a `LocalProgram`: instructions over registers, as data.

Left to the partitioner, a plan's shardings come out with other collectives than were planned (DESIGN section 4). So the
step is emitted as the program of each device: every operation in its local form, every collective spelled out.

A value is resharded once for each layout that it is wanted in, from the layout that it is made in. With `late_from`
(see `sharding.strategies.build`), state is resharded once more for uses at or after that program point, behind an
optimization barrier, so that the compiler does not merge the two copies and keep the first alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alpa_lite.ir.graph import Atom, Block, Lit, Op, Traced
from alpa_lite.ir.layout import Axes, Layout, LogicalMesh, replicated_layout, reshard_steps
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.ir.loops import ports
from alpa_lite.passes.ir.remembered import Memo
from alpa_lite.passes.local.effects import needs_outside
from alpa_lite.passes.local.forms import local_form
from alpa_lite.passes.local.types import LocalForm
from alpa_lite.passes.lowering.program import Body, Compute, GlobalOp, Instruction, LocalProgram, Loop, Operand, Reshard
from alpa_lite.passes.sharding.groups import Grouping
from alpa_lite.passes.sharding.kinds import find_regathered
from alpa_lite.passes.sharding.space import Strategy, layout_of


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


@dataclass(eq=False)
class _Lowering:
    """A walk over the graph in program order that writes instructions. The fields are the arguments of `lower`."""

    traced: Traced
    grouping: Grouping
    rules: Mapping[Any, Rule]
    mesh: LogicalMesh
    choice: Sequence[Strategy]
    late_from: int | None

    def __post_init__(self) -> None:
        grouping, self.values = self.grouping, self.traced.graph.values
        self.state = frozenset() if self.late_from is None else find_regathered(self.traced, grouping)
        self.member = {op: (g, f) for g in grouping.groups for op, f in zip(g.ops, g.op_factors, strict=True)}
        self.made: dict[int, int] = {}  # value -> its register in the layout in which it is made
        self.where: dict[tuple[int, Layout, bool], int] = {}  # in others; of lazy values in any
        self.known = Memo()
        self.out: list[Instruction] = []
        self.registers: list[Layout] = []
        self.clock = 0
        self.user: Op | None = None

    def program(self) -> LocalProgram:
        block, choice = self.traced.graph.block, self.choice
        registers = tuple(self.home(value) for value in block.inputs)
        inputs = tuple(self.registers[r] for r in registers)
        self.block(block)
        self.clock, self.user = self.grouping.points, None
        layouts = tuple(
            self.whole_layout(atom) if isinstance(atom, Lit) or place is None else layout_of(place[1], choice[place[0]])
            for atom, place in zip(block.outputs, self.grouping.outputs, strict=True)
        )
        outputs = self.fetch_all(block.outputs, layouts)
        return LocalProgram(
            self.mesh, Body(registers, tuple(self.out), outputs), inputs, layouts, tuple(self.registers)
        )

    # -- values ---------------------------------------------------------------------------------------------------

    def new_register(self, layout: Layout) -> int:
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

    def whole_layout(self, atom: Atom) -> Layout:
        """Returns the layout of a value whole on every device."""
        return replicated_layout(len((atom.aval if isinstance(atom, Lit) else self.values[atom]).shape))

    def define(self, value: int, layout: Layout) -> int:
        """Gives a value the register in which it is made."""
        register = self.made[value] = self.new_register(layout)
        return register

    def define_all(self, values: Iterable[int], layouts: Iterable[Layout]) -> tuple[int, ...]:
        return tuple([self.define(value, layout) for value, layout in zip(values, layouts, strict=True)])

    def fetch_all(self, atoms: Iterable[Atom], layouts: Iterable[Layout]) -> tuple[Operand, ...]:
        return tuple([self.fetch(atom, layout) for atom, layout in zip(atoms, layouts, strict=True)])

    def fetch(self, atom: Atom, layout: Layout) -> Operand:
        """Returns the register that holds a value in a layout, resharding it if need be."""
        if isinstance(atom, Lit):
            return atom
        if atom in self.grouping.lazy_sources:
            return self.make(atom, layout)
        base = self.registers[self.made[atom]]
        if layout is base or layout == base:
            return self.made[atom]
        is_late = self.late_from is not None and self.clock >= self.late_from and atom in self.state
        key = (atom, layout, is_late)
        if key not in self.where:
            self.where[key] = self.reshard(atom, self.made[atom], self.new_register(layout), is_late)
        return self.where[key]

    def reshard(self, value: int, source: int, result: int, is_late: bool = False) -> int:
        """Takes a value from the layout of one register to that of another."""
        before, after = self.registers[source], self.registers[result]
        steps = reshard_steps(before, after)
        assert steps is not None, f"no way from {before} to {after}"
        is_late = is_late and any(step.kind != "slice" for step in steps)
        self.out.append(Reshard(value, steps, source, result, is_late, self.user))
        return result

    def make(self, value: int, layout: Layout) -> int:
        """Computes the block of a lazy value that a layout asks for. Zeros are also partial sums over any axes."""
        key = (value, layout, False)
        if key in self.where:
            return self.where[key]
        number, result = self.grouping.lazy_sources[value]
        op = self.grouping.ops[number]
        rule = self.rules[op.key]
        axes: list[Axes] = [()] * len(rule.factors)
        for dim, wanted in zip(rule.results[result], layout.dims, strict=True):
            if dim:
                axes[dim[0]] = wanted
        form = local_form(op, rule, tuple(axes), self.values, self.mesh)
        if form is None or form.results[result].dims != layout.dims:
            assert not layout.is_replicated, (op.name, layout)
            self.where[key] = self.reshard(
                value, self.make(value, replicated_layout(len(layout.dims))), self.new_register(layout)
            )
            return self.where[key]
        operands = self.fetch_all(op.operands, form.operands)
        self.where[key] = self.new_register(layout)
        self.out.append(Compute(op, form, operands, (self.where[key],)))
        return self.where[key]

    # -- operations -----------------------------------------------------------------------------------------------

    def block(self, block: Block) -> None:
        positions, lazy = self.grouping.positions, self.grouping.lazy_sources
        for op in block.ops:
            self.clock, self.user = positions[op.index], op
            if self.known.get_or_make(("outside", op.key), lambda op=op: needs_outside(op)):
                # Whole values go out of the region, and whole values come back.
                operands = self.fetch_all(op.operands, map(self.whole_layout, op.operands))
                self.out.append(GlobalOp(op, operands, self.define_all(op.results, map(self.whole_layout, op.results))))
            elif op.bodies:
                self.lower_control_flow(op)
            elif op.name == "optimization_barrier":
                self.barrier(op)
            elif not (op.results and lazy.keys() >= set(op.results)):
                self.lower_op(op)

    def compute(self, op: Op, form: LocalForm) -> None:
        operands = self.fetch_all(op.operands, form.operands)
        self.out.append(Compute(op, form, operands, self.define_all(op.results, form.results)))

    def lower_op(self, op: Op) -> None:
        group, factors = self.member[op.index]
        strategy = self.choice[group.index]
        rule = self.rules[op.key]
        axes = tuple([strategy.axes[f] for f in factors]) if factors else ((),) * len(rule.factors)
        form = self.known.get(("form", op.key, axes)) or local_form(op, rule, axes, self.values, self.mesh)
        if form is None:
            self.lower_whole(op, strategy)
            return
        if form.own is None:  # of forms that bind their primitive again there is one a key
            self.known["form", op.key, axes] = form
            form = replace(form, op=op)
        if strategy.partial:
            operands, results = (
                tuple(Layout(la.dims, strategy.partial) for la in side) for side in (form.operands, form.results)
            )
            form = replace(form, operands=operands, results=results)
        self.compute(op, form)

    def lower_whole(self, op: Op, strategy: Strategy) -> None:
        """Runs a follower without a local form in its group's strategy whole on every device, and cuts its results."""
        rule = self.rules[op.key]
        form = local_form(op, rule, ((),) * len(rule.factors), self.values, self.mesh)
        assert form is not None, f"{op.name} cannot run whole"
        operands = self.fetch_all(op.operands, form.operands)
        results = tuple(self.new_register(la) for la in form.results)
        self.out.append(Compute(op, form, operands, results))
        for value, register in zip(op.results, results, strict=True):
            wanted = layout_of(self.grouping.homes[value].dims, strategy)
            self.reshard(value, register, self.define(value, wanted))

    def barrier(self, op: Op) -> None:
        """Values pass a barrier in the layout that they have; lazy ones need none."""
        pairs = [(a, v) for a, v in zip(op.operands, op.results, strict=True) if v not in self.grouping.lazy_sources]
        if not pairs:
            return
        op = replace(op, operands=tuple(a for a, _ in pairs), results=tuple(v for _, v in pairs))
        layouts = tuple(
            self.whole_layout(a) if isinstance(a, Lit) else self.registers[self.made[a]] for a in op.operands
        )
        self.compute(op, LocalForm(op, layouts, layouts, own=lambda *blocks: list(op.primitive.bind(*blocks))))

    def lower_control_flow(self, op: Op) -> None:
        """Lowers a loop or branches: operands, bodies and results are in the layouts of their homes."""
        border, scalar = ports(op), replicated_layout(0)
        layouts = [scalar] if op.name == "cond" else []
        for port in border:
            if port.operand is not None:
                own = self.home_layout(port.inputs[0])
                layouts.append(Layout(((), *own.dims), own.partial) if port.role == "xs" else own)  # a stack of slices
        wanted = [self.home_layout(p.result, int(p.role == "ys")) for p in border if p.result is not None]
        operands = self.fetch_all(op.operands, layouts)
        outputs = [wanted] * len(op.bodies)
        if op.name == "while":
            outputs[0] = [scalar]
        bodies = tuple(self.lower_body(*body) for body in zip(op.bodies, outputs, strict=True))
        self.out.append(Loop(op, operands, bodies, self.define_all(op.results, map(self.home_layout, op.results))))

    def lower_body(self, block: Block, wanted: Sequence[Layout]) -> Body:
        saved, self.out = self.out, []
        inputs = tuple(self.home(value) for value in block.inputs)
        self.block(block)
        self.user = None
        outputs = self.fetch_all(block.outputs, wanted)
        body = Body(inputs, tuple(self.out), outputs)
        self.out = saved
        return body
