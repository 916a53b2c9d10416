"""Cuts an accumulated step into one graph for each stage.

Problem. After `accumulation` a step is [whole ops] [one scan over micro-batches] [update ops], and an `Assignment`
gives the stage that runs each op of the scan's body and each update op. Each stage must be defined so that it can be
planned and lowered by itself, by the same passes as a step on one mesh.

Answer. A stage is again an accumulated step: its own whole ops, a scan over micro-batches whose body holds its own ops,
forward ones first, and its own update ops. Values that cross between stages become arguments and results:

    a body value that another stage reads     result of the producer's scan, stacked over micro-batches; argument there
    state that several stages read            argument of its owner, which updates it, and received whole by the others
    an update value that another stage reads  result and argument ("late": exchanged between rounds of the update)

The stacks exist only on paper. `cutting` cuts each planned stage again, into the parts that run once, forward for one
micro-batch, and backward; the values then travel one micro-batch at a time.

Whole ops, and ops of the body that the assignment calls shared (masks, positions), are copied into every stage that
reads them. Update ops have *rounds*: an op is one round after a late value that it reads was made; round r of every
stage can run when all of round r - 1 has been exchanged.

A step without a loop, whose arguments are on submeshes (`owners`), is all update: its whole ops are the shared ones,
each in the first round in which something reads what it makes, so that it does not wait in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from alpa_lite import _jax
from alpa_lite.errors import InfeasibleError, PlanError
from alpa_lite.ir.graph import Argument, Atom, Block, Graph, Op, Traced
from alpa_lite.passes.ir import flow, primitives
from alpa_lite.passes.ir.flow import producers, values_in
from alpa_lite.passes.ir.loops import ScanView, scan_op
from alpa_lite.passes.ir.pruning import number_ops
from alpa_lite.passes.ir.rewriting import Rewriter
from alpa_lite.passes.layers.types import Assignment
from alpa_lite.passes.stages import ordering
from alpa_lite.passes.stages.owners import first_readers, rounds_of
from alpa_lite.passes.stages.stage_graph import Port, StageGraph
from alpa_lite.passes.stages.sums import split_sums

_IN_PASSING = primitives.ELEMENTWISE | primitives.RESHAPES
"""Operations that cost nothing more in the round that reads them: a compiler computes them within what reads them."""

_NO_SCAN = Op(-1, None, {"length": 1, "num_consts": 0, "num_carry": 0}, (), (), (Block((), (), ()),), None, None)
"""The loop of a step without one: it takes, does and gives nothing."""


def stage_graphs(traced: Traced, scan: int, assignment: Assignment) -> tuple[StageGraph, ...]:
    """Returns the stages of an accumulated step.

    Args:
      traced, scan: as in `microbatches.loop.Accumulated`; `scan` is -1 for a step without a loop.
      assignment: a stage for every op of the scan's body and every op that depends on its results; without a loop, for
        every op that is not shared.

    Raises:
      PlanError: a value that is carried from one micro-batch to the next would be carried by two stages.
      InfeasibleError: several stages need the result of a callback.
    """
    step = _Step(*split_sums(traced, scan, assignment), scan)
    return tuple(_Stage(step, number).build() for number in range(assignment.num_stages))


class _Step:
    """Facts of the whole step, collected before any stage is built."""

    def __init__(self, traced: Traced, assignment: Assignment, scan: int) -> None:
        self.traced, self.assignment = traced, assignment
        self.graph, self.block = traced.graph, traced.graph.block
        self.has_loop = scan >= 0
        self.scan = scan_op(traced, scan) if self.has_loop else _NO_SCAN
        self.view = ScanView(self.scan)
        self.body = self.view.body
        self.stages = assignment.stage
        self.shared = assignment.shared_ops
        self.made_by = producers(self.body.ops)
        self.carry_of = {v: i for i, v in enumerate(self.view.inputs.carry)}
        self.outer = dict(zip(self.body.inputs, self.scan.operands, strict=True))
        self.argument = {v: i for i, v in enumerate(self.block.inputs[: len(traced.arguments)])}
        self.constants = {v: i for i, v in enumerate(self.block.inputs[len(traced.arguments) :])}
        self.effects: dict[int, int] = {}  # op with effects before the scan -> its stage
        self._split_top()
        self._place_carries()
        self._place_rounds()
        self._place_outputs()
        self._place_crossings()

    def _split_top(self) -> None:
        """Sorts the top block into ops before the scan and ops that depend on it.

        Ops with effects that the scan does not need, and what depends on them, are among the latter: those before the
        scan are copied to every stage that reads them.
        """
        others = [op for op in self.block.ops if op is not self.scan]
        if self.has_loop:
            begun = {op for op in self.block.ops[self.block.ops.index(self.scan) + 1 :] if op.has_effects}
        else:
            begun = {op for op in others if op.index not in self.shared}
        self.late = flow.find_dependents(others, [*self.scan.results, *(value for op in begun for value in op.results)])
        after = {op for op in others if op in begun or not self.late.isdisjoint(op.reads)}
        self.after = [op for op in others if op in after]
        self.early = [op for op in others if op not in after]
        self.before = producers(self.early)

    def body_needs(self, stage: int) -> tuple[list[Op], set[int]]:
        """The body ops of a stage, shared ones that it reads included, in order; and the carries that it holds."""
        own = [op for op in self.body.ops if op.index not in self.shared and self.stages.get(op.index) == stage]
        outputs = self.view.outputs.carry

        def demanded(value: int) -> tuple[int, ...]:
            if value in self.carry_of:
                return values_in([outputs[self.carry_of[value]]])
            op = self.made_by.get(value)
            return op.reads if op is not None and op.index in self.shared else ()

        reached = flow.reach((value for op in own for value in op.reads), demanded)
        carries = {i for op in own for value in op.results for i in self.carried_as.get(value, ())}
        carries |= {self.carry_of[value] for value in reached if value in self.carry_of}
        copies = {self.made_by[value].index for value in reached if value in self.made_by} & self.shared
        run = copies.union(op.index for op in own)
        return ordering.body([op for op in self.body.ops if op.index in run], copies, self.view.inputs.consts), carries

    def _place_carries(self) -> None:
        """Decides who holds each carry and returns each result of the scan."""
        self.carried_as: dict[int, list[int]] = {}  # body value -> the carries that it is the next value of
        for i, atom in enumerate(self.view.outputs.carry):
            if isinstance(atom, int):
                self.carried_as.setdefault(atom, []).append(i)
        self.body_ops: list[list[Op]] = []
        self.carries: list[list[int]] = []  # as the body reads them
        for stage in range(self.assignment.num_stages):
            ops, carries = self.body_needs(stage)
            self.body_ops.append(ops)
            read = dict.fromkeys(self.carry_of[v] for op in ops for v in op.reads if v in self.carry_of)
            self.carries.append([*(i for i in read if i in carries), *sorted(carries - read.keys())])
        self.owner_of_result: dict[int, int] = {}
        for i, (value, atom) in enumerate(zip(self.scan.results, self.body.outputs, strict=True)):
            is_carry = i < self.view.num_carry
            holders = [s for s, carries in enumerate(self.carries) if is_carry and i in carries]
            if len(holders) > 1:
                made = self.made_by.get(atom) if isinstance(atom, int) else None
                if made is not None and made.index not in self.shared:
                    raise PlanError(
                        f"carry {i} of the scan over micro-batches (made by {made.name}) is read by stages "
                        f"{holders}; a value that is carried from one micro-batch to the next must stay on one stage; "
                        "use one mesh (Sharded())"
                    )
            if not holders and isinstance(atom, int) and atom in self.made_by:
                made = self.made_by[atom]
                holders = [s for s, ops in enumerate(self.body_ops) if any(op is made for op in ops)]
            self.owner_of_result[value] = holders[0] if holders else 0

    def _place_rounds(self) -> None:
        """The round of every op after the scan: one more than that of a value from another stage.

        Values that are made of state and sums in passing wait for the round that reads them: they would be held from
        one round to the other, in addition to their operands or in place of them.
        """
        held, outputs = self.assignment.delayed_ops, set(values_in(self.block.outputs))
        cheap = flow.label_by_operands(
            self.after, lambda op, known: op.name in _IN_PASSING and not op.has_effects and all(known), {}
        )
        late = {op.index for op, is_cheap in zip(self.after, cheap, strict=True) if is_cheap or op.index in held}
        self.round_of = rounds_of(
            self.after, self.stages, lambda op: op.index in late and outputs.isdisjoint(op.results),
            self.owner_of_result,
        )  # fmt: skip
        made = [(value, op.index) for op in self.after for value in op.results]
        self.stage_of = self.owner_of_result | {value: self.stages[index] for value, index in made}
        self.value_round = dict.fromkeys(self.scan.results, 0) | {value: self.round_of[index] for value, index in made}
        self.update: list[list[Op]] = []
        for stage, carries in enumerate(self.carries):
            ops = [op for op in self.after if self.stages.get(op.index) == stage]
            self.update.append(ordering.update(ops, self.round_of, [self.view.results.carry[i] for i in carries]))

    def run_once(self, ops: Iterable[Op], stage: int) -> None:
        """Notes that a stage runs some ops before its scan; raises InfeasibleError if another runs one with effects."""
        for op in ops:
            if op.has_effects and self.effects.setdefault(op.index, stage) != stage:
                where = _jax.source_line(op.source)
                raise InfeasibleError(
                    f"the callback {op.name}{f' at {where}' if where else ''} runs once in a step, and stages "
                    f"{self.effects[op.index]} and {stage} of a pipeline need its result; use one mesh, or call it "
                    "before the step and pass the result as an argument"
                )

    def atoms_read_by(self, stage: int) -> list[Atom]:
        """Returns the atoms of the top block that a stage's body and update read, results of other stages excluded."""
        used = dict.fromkeys(value for op in self.body_ops[stage] for value in op.reads)
        atoms = [self.outer[value] for value in used if value in self.outer]
        atoms += [self.view.operands.carry[i] for i in self.carries[stage]]
        for atom, result in self.view.ys:  # results that are inputs of the body
            if self.owner_of_result[result] == stage and isinstance(atom, int) and atom in self.outer:
                atoms.append(self.outer[atom])
        for op in self.update[stage]:
            atoms += [value for value in op.reads if value not in self.late]
        return atoms

    def _place_outputs(self) -> None:
        """The stage of every flat result, and the owner of every argument that has one."""
        stages = range(self.assignment.num_stages)
        needed = [ordering.order_needed_ops(self.atoms_read_by(stage), self.before) for stage in stages]
        self.reached = [dict.fromkeys(inputs) for _, inputs in needed]
        new_value = {argument: output for output, argument in self.traced.state}
        readers = {value: [s for s, inputs in enumerate(self.reached) if value in inputs] for value in self.argument}
        replaces, fixed = dict(self.traced.state), self.assignment.owner
        self.output_stage: list[int] = []
        for number, atom in enumerate(self.block.outputs):
            argument = replaces.get(number, -1)
            if argument in fixed:
                self.output_stage.append(fixed[argument])
            elif isinstance(atom, int) and atom in self.late:
                self.output_stage.append(self.stage_of[atom])
            elif argument >= 0:
                self.output_stage.append(self.assignment.home.get(self.block.inputs[argument], 0))
            else:
                arguments = [(v, self.argument.get(v, -1)) for v in ordering.order_needed_ops([atom], self.before)[1]]
                first = [fixed[a] for _, a in arguments if a in fixed]
                first += [readers[v][0] for v, a in arguments if a in new_value and a not in fixed and readers[v]]
                self.output_stage.append(min(first, default=0))
        self.owner = {**fixed, **{argument: self.output_stage[output] for argument, output in new_value.items()}}

    def _place_crossings(self) -> None:
        """The values of the body, and those of the update, that stages take from others and give to them."""
        stages = range(self.assignment.num_stages)
        own = {v: self.stages[op.index] for v, op in self.made_by.items() if op.index not in self.shared}
        outputs = [[self.view.outputs.carry[i] for i in self.carries[stage]] for stage in stages]
        body = [values_in([*(a for op in self.body_ops[s] for a in op.operands), *outputs[s]]) for s in stages]
        self.crossing_in, self.crossing_out = _exchanged(body, own)
        update = [[value for op in self.update[stage] for value in op.reads] for stage in stages]
        for atom, stage in zip(self.block.outputs, self.output_stage, strict=True):
            update[stage] += values_in([atom])
        self.late_in, self.late_out = _exchanged(update, self.stage_of)


def _exchanged(reads: Sequence[Iterable[int]], home: Mapping[int, int]) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the values that each stage takes from others, and gives to others, in the order of their first readers.

    Args:
      reads: of each stage.
      home: value -> the stage that makes it; others are wherever they are read.
    """
    taken = [[v for v in dict.fromkeys(some) if home.get(v, stage) != stage] for stage, some in enumerate(reads)]
    given: list[dict[int, None]] = [{} for _ in reads]
    for value in (v for some in taken for v in some):
        given[home[value]][value] = None
    return taken, list(map(list, given))


class _Stage:
    """Builds the graph of one stage."""

    def __init__(self, step: _Step, number: int) -> None:
        self.step, self.number = step, number
        self.rewriter = Rewriter(step.graph)

    def build(self) -> StageGraph:
        step, number = self.step, self.number
        outputs = self._outputs()
        finals = [step.block.outputs[i] for i in outputs]
        needed = [*step.atoms_read_by(number), *(atom for atom in finals if atom not in step.late)]
        whole, read = ordering.order_needed_ops(needed, step.before)
        step.run_once(whole, number)
        inputs = self._arguments(read)
        scan, stacks_in, stacks_out = self._scan()
        inputs |= {stack: Port("crossing", v) for v, stack in stacks_in.items()}
        inputs |= {v: Port("late", v) for v in step.late_in[number]}
        results = [(atom, Port("argument", i)) for atom, i in zip(finals, outputs, strict=True)]
        results += [(stack, Port("crossing", v)) for v, stack in stacks_out.items()]
        results += [(v, Port("late", v)) for v in step.late_out[number]]
        ops, rounds = [*whole, *scan, *step.update[number]], step.round_of
        if not step.has_loop:
            ops = flow.before_readers(ops, set(whole))
        rounds = rounds | first_readers(ops, {op.index for op in whole}, rounds)
        traced, place = self._traced(ops, inputs, results, [v for v in read if v in step.constants])
        phases = step.assignment.phases
        return StageGraph(
            traced=traced,
            scan=place[step.scan.index] if scan else -1,
            inputs=tuple(inputs.values()),
            outputs=tuple(port for _, port in results),
            constants=tuple(step.constants[v] for v in read if v in step.constants),
            rounds={place[op.index]: rounds[op.index] for op in ops if op.index in rounds},
            late_rounds={v: step.value_round[v] for v in (*step.late_in[number], *step.late_out[number])},
            phases=replace(phases, number={place[i]: phase for i, phase in phases.number.items() if i in place}),
            runs_apart=True,
        )

    def _traced(
        self, ops: Sequence[Op], inputs: Mapping[int, Port], results: Sequence[tuple[Atom, Port]], constants: list[int]
    ) -> tuple[Traced, Mapping[int, int]]:
        """The stage as a step of its own, its arguments and results described as those of the whole; new op indices."""
        whole = self.step.traced
        block, place = number_ops(Block((*inputs, *constants), tuple(ops), tuple(atom for atom, _ in results)))
        values = tuple(whole.graph.constants[self.step.constants[v]] for v in constants)
        position = {port.number: i for i, port in enumerate(inputs.values()) if port.kind == "argument"}
        where = {port.number: i for i, (_, port) in enumerate(results) if port.kind == "argument"}
        traced = replace(
            whole,
            graph=Graph(tuple(self.rewriter.values), block, values, self.rewriter.keys),
            arguments=tuple(_described(whole.arguments, port) for port in inputs.values()),
            outputs=tuple(_described(whole.outputs, port) for _, port in results),
            state=tuple(sorted((where[o], position[a]) for o, a in whole.state if o in where and a in position)),
            notes=(),
            has_named_batch=False,
            returned_arguments=(),
            placements=(),
        )
        return traced, place

    def _outputs(self) -> list[int]:
        """Returns the results of the step that this stage gives, as they are made."""
        step, number = self.step, self.number
        own = [i for i, stage in enumerate(step.output_stage) if stage == number]
        ends = [carried.end for carried in step.view.carries]
        made = [*step.reached[number], *(ends[i] for i in step.carries[number]), *step.view.results.ys]
        made += [value for op in step.update[number] for value in op.results]
        place: dict[Atom, int] = {value: n for n, value in enumerate(made)}
        atoms = step.block.outputs
        return sorted(own, key=lambda i: place.get(atoms[i], -1) if isinstance(atoms[i], int) else -1)

    def _arguments(self, read: Iterable[int]) -> dict[int, Port]:
        """Returns the arguments of the step that this stage takes: what it reads, and the state that it owns."""
        step = self.step
        owned = [value for value, argument in step.argument.items() if step.owner.get(argument) == self.number]
        ports = {}
        for value in dict.fromkeys((*read, *owned)):
            if (argument := step.argument.get(value)) is not None:
                owner = step.owner.get(argument)
                ports[value] = Port("argument" if owner in (None, self.number) else "copy", argument)
        return ports

    def _scan(self) -> tuple[list[Op], dict[int, int], dict[int, int]]:
        """The stage's scan over micro-batches, if it has one, and the stacked values that it takes and gives."""
        step, number, view = self.step, self.number, self.step.view
        ops, held = step.body_ops[number], step.carries[number]
        owned = {value for value in step.scan.results if step.owner_of_result[value] == number}
        if not ops and not owned:
            return [], {}, {}
        ys = [(atom, result) for atom, result in view.ys if result in owned]
        ops = sorted(ops, key=lambda op: step.assignment.phases.phase_of(op.index, split_weights=False))
        used = dict.fromkeys(values_in([*(a for op in ops for a in op.operands), *(atom for atom, _ in ys)]))
        place = {value: i for i, value in enumerate(used)}  # in this order, so that identical layers are equal
        every = view.carries
        carries = [every[i] for i in held]
        carries = [c if c.end in owned else c._replace(end=self.rewriter.new_value(c.input)) for c in carries]
        stacks_in, stacks_out = (
            {
                value: self.rewriter.new_value_of_shape(value, (view.length, *step.graph.values[value].shape))
                for value in values
            }
            for values in (step.crossing_in[number], step.crossing_out[number])
        )
        scan = view.rebuild(
            ops,
            sorted((pair for pair in view.consts if pair[1] in used), key=lambda pair: place[pair[1]]),
            carries,
            [
                *sorted((pair for pair in view.xs if pair[1] in used), key=lambda pair: place[pair[1]]),
                *((stack, v) for v, stack in stacks_in.items()),
            ],
            [*ys, *stacks_out.items()],
        )
        return [replace(scan, key=step.scan.key)], stacks_in, stacks_out


def _described(known: Sequence[Argument], port: Port) -> Argument:
    """Returns the record of an argument or a result."""
    if port.kind == "argument":
        return known[port.number]
    return Argument(known[port.number].path if port.kind == "copy" else f"{port.kind} {port.number}", "other")
