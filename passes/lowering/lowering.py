"""Lowers a decided graph to a local program, and the local program to one `jax.shard_map`.

Problem. Left to the partitioner, a plan's shardings come out with other collectives than were planned (DESIGN section
4). So the step is emitted as the program of each device: every operation in its local form, every collective spelled
out.

`lower` turns a graph, its grouping and one strategy a group into a `LocalProgram`: a list of instructions over
registers, which is data. `collectives` reads the collectives off it, `emit` makes it a function of global arrays. The
plan thereby lists the collectives that are emitted.

A value is resharded once for each layout that it is wanted in, from the layout that it is made in. With `late_from`
(see `sharding.strategies.build`), state is resharded once more for uses at or after that program point, behind an
optimization barrier, so that the compiler does not merge the two copies and keep the first alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from alpa_lite.graph import Atom, Block, Lit, Op, Traced
from alpa_lite.layout import Axes, Layout, LogicalMesh, replicated, reshard_steps
from alpa_lite.passes.ir.loops import ScanView, WhileView
from alpa_lite.passes.local.effects import NeedsOutside
from alpa_lite.passes.local.forms import local_form
from alpa_lite.passes.local.types import Changes, LocalForm, changes_of, rebound
from alpa_lite.passes.lowering.program import (
    Body,
    Compute,
    Instruction,
    LocalProgram,
    Loop,
    Operand,
    Outside,
    Reshard,
)
from alpa_lite.passes.sharding.groups import Grouping
from alpa_lite.passes.sharding.kinds import served_again
from alpa_lite.passes.sharding.space import Strategy, layout_of
from alpa_lite.strategy import Rule


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


class _Lowering:
    """Walks the graph in program order and writes instructions."""

    def __init__(
        self,
        traced: Traced,
        grouping: Grouping,
        rules: Mapping[Any, Rule],
        mesh: LogicalMesh,
        choice: Sequence[Strategy],
        late_from: int | None,
    ) -> None:
        self.traced = traced
        self.values = traced.graph.values
        self.grouping = grouping
        self.rules = rules
        self.mesh = mesh
        self.choice = choice
        self.late_from = late_from
        self.state = served_again(traced, grouping) if late_from is not None else frozenset()
        self.member = {op: (g, f) for g in grouping.groups for op, f in zip(g.ops, g.op_factors, strict=True)}
        self.base: dict[int, Layout] = {}
        self.made: dict[int, int] = {}  # value -> its register in the layout of `base`
        self.where: dict[tuple[int, Layout, bool], int] = {}  # in others; of lazy values in any
        self.forms: dict[tuple[Any, tuple[Axes, ...]], tuple[LocalForm, Changes]] = {}
        self.needs_outside = NeedsOutside()
        self.out: list[Instruction] = []
        self.registers: list[Layout] = []
        self.clock = 0
        self.user: Op | None = None

    def program(self) -> LocalProgram:
        block = self.traced.graph.block
        for value in block.inputs:
            self.home(value)
        inputs = tuple(self.base[v] for v in block.inputs)
        registers = tuple(self.made[v] for v in block.inputs)
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
        register = self.made[value] = self.new(layout)
        return register

    def fetch(self, atom: Atom, layout: Layout) -> Operand:
        """The register that holds a value in a layout, resharding it if need be."""
        if isinstance(atom, Lit):
            return atom
        if atom in self.grouping.lazy:
            return self.make(atom, layout)
        base = self.base[atom]
        if layout is base or layout == base:
            return self.made[atom]
        late = self.late_from is not None and self.clock >= self.late_from and atom in self.state
        key = (atom, layout, late)
        if key not in self.where:
            steps = reshard_steps(base, layout)
            assert steps is not None, f"no way from {base} to {layout}"
            communicates = any(step.kind != "slice" for step in steps)
            self.where[key] = self.new(layout)
            self.out.append(Reshard(atom, steps, self.made[atom], self.where[key], late and communicates, self.user))
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
        positions, lazy = self.grouping.positions, self.grouping.lazy
        for op in block.ops:
            self.clock = positions[op.index]
            self.user = op
            if self.needs_outside(op):
                self.outside(op)
            elif op.bodies:
                self.structured(op)
            elif op.name == "optimization_barrier":
                self.barrier(op)
            elif not (op.results and lazy.keys() >= set(op.results)):
                self.straight(op)

    def straight(self, op: Op) -> None:
        group, factors = self.member[op.index]
        strategy = self.choice[group.index]
        rule = self.rules[op.key]
        axes = tuple([strategy.axes[f] for f in factors]) if factors else ((),) * len(rule.factors)
        form = self.form(op, rule, axes)
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
        operands = tuple([self.fetch(a, la) for a, la in zip(op.operands, form.operands, strict=True)])
        results = tuple([self.define(v, la) for v, la in zip(op.results, form.results, strict=True)])
        self.out.append(Compute(op, form, operands, results))

    def form(self, op: Op, rule: Rule, axes: tuple[Axes, ...]) -> LocalForm | None:
        """The local form of an operation; of those that bind its primitive again there is one a key."""
        key = op.key, axes
        if (known := self.forms.get(key)) is not None:
            return rebound(op, *known)
        form = local_form(op, rule, axes, self.values, self.mesh)
        if form is not None and (changes := changes_of(op, form)) is not None:
            self.forms[key] = form, changes
        return form

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
        op = replace(op, operands=tuple(a for a, _ in pairs), results=tuple(v for _, v in pairs))
        layouts = tuple(replicated(len(a.aval.shape)) if isinstance(a, Lit) else self.base[a] for a, _ in pairs)
        operands = tuple(self.fetch(a, la) for (a, _), la in zip(pairs, layouts, strict=True))
        results = tuple(self.define(v, la) for (_, v), la in zip(pairs, layouts, strict=True))
        form = LocalForm(layouts, layouts, (), lambda *blocks: list(op.primitive.bind(*blocks)))
        self.out.append(Compute(op, form, operands, results))

    def structured(self, op: Op) -> None:
        operands: list[Operand] = []
        if op.name == "scan":
            view = ScanView(op)
            layouts = [self.home_layout(v) for v in (*view.inputs.consts, *view.inputs.carry)]
            layouts += [self.stacked_layout(v) for v in view.inputs.xs]
            operands += map(self.fetch, op.operands, layouts)
            carry, ys = view.results
            wanted = [*(self.home_layout(v) for v in carry), *(self.home_layout(v, skip=1) for v in ys)]
            bodies = (self.nested(view.body, wanted),)
        elif op.name == "while":
            cond, body = op.bodies
            view = WhileView(op)
            inner = (*view.cond(cond.inputs)[0], *body.inputs)
            for atom, value in zip(op.operands, inner, strict=True):
                operands.append(self.fetch(atom, self.home_layout(value)))
            carried = [self.home_layout(v) for v in view.body(body.inputs)[1]]
            bodies = (self.nested(cond, [replicated(0)]), self.nested(body, carried))
        else:
            operands.append(self.fetch(op.operands[0], replicated(0)))
            for atom, value in zip(op.operands[1:], op.bodies[0].inputs, strict=True):
                operands.append(self.fetch(atom, self.home_layout(value)))
            wanted = [self.home_layout(v) for v in op.results]
            bodies = tuple(self.nested(branch, wanted) for branch in op.bodies)
        results = tuple(self.define(v, self.home_layout(v)) for v in op.results)
        self.out.append(Loop(op, tuple(operands), bodies, results))

    def stacked_layout(self, value: int) -> Layout:
        """The layout of a stack of which a scan's body has one slice in its home layout."""
        layout = self.home_layout(value)
        return Layout(((), *layout.dims), layout.partial)

    def nested(self, block: Block, wanted: Sequence[Layout]) -> Body:
        saved, self.out = self.out, []
        inputs = tuple(self.home(value) for value in block.inputs)
        self.block(block)
        self.user = None
        outputs = tuple(self.fetch(a, la) for a, la in zip(block.outputs, wanted, strict=True))
        body = Body(inputs, tuple(self.out), outputs)
        self.out = saved
        return body
