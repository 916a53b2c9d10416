"""Cuts an accumulated step into one graph for each stage.

Problem. After `accumulation` a step is [whole ops] [one scan over micro-batches] [update ops], and an `Assignment` says
which stage runs each op of the scan's body and each update op. What must each stage be, so that it can be planned and
lowered by itself, by the same passes as a step on one mesh?

Answer. A stage is again an accumulated step: its own whole ops, a scan over micro-batches whose body holds its own ops,
forward ones first, and its own update ops. What crosses between stages becomes arguments and results:

    a body value that another stage reads     result of the producer's scan, stacked over micro-batches; argument there
    state that several stages read            argument of its owner, which updates it, and received whole by the others
    an update value that another stage reads  result and argument ("late": exchanged between rounds of the update)

The stacks exist only on paper. `segments` cuts each planned stage again, into what runs once, what runs forward for one
micro-batch, and what runs backward; the values then travel one micro-batch at a time.

Whole ops, and ops of the body that the assignment calls shared (masks, positions), are copied into every stage that
reads them. Update ops have *rounds*: an op is one round after a late value that it reads was made; round r of every
stage can run when all of round r - 1 has been exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from alpa_lite.errors import PlanError
from alpa_lite.graph import Argument, Atom, Block, Graph, Op, Traced, Value
from alpa_lite.passes.layers.types import Assignment
from alpa_lite.passes.stages.sums import split_sums

PortKind = Literal["argument", "copy", "crossing", "late"]


@dataclass(frozen=True)
class Port:
    """What an argument or a result of a stage's graph is in the whole step.

    kind / number:
      argument: flat argument `number` of the step; as a result: flat result `number`.
      copy: state argument `number`, owned by another stage.
      crossing: body value `number`, stacked over micro-batches.
      late: update value `number` (of the whole step's top block).
    """

    kind: PortKind
    number: int


@dataclass(frozen=True, eq=False)
class StageGraph:
    """One stage as a step of its own.

    Attributes:
      traced: its graph; value numbers are those of the whole step, new ones above them.
      scan: `Op.index` of its scan over micro-batches, or -1 where nothing of the body is its own.
      inputs, outputs: one for each argument (constants excluded), and each result.
      backward, weight: body ops, by `Op.index` in this graph, as in `Assignment`.
      rounds: for each top-level op after the scan, by `Op.index`, its round.
      late_rounds: for each late result, by value number, the round that makes it.
      constants: for each of the graph's constants its number in the whole step.
    """

    traced: Traced
    scan: int
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    backward: frozenset[int]
    weight: frozenset[int]
    rounds: Mapping[int, int]
    late_rounds: Mapping[int, int]
    constants: tuple[int, ...]


def stage_graphs(traced: Traced, scan: int, assignment: Assignment) -> tuple[StageGraph, ...]:
    """The stages of an accumulated step.

    Args:
      traced, scan: as in `microbatches.loop.Accumulated`.
      assignment: a stage for every op of the scan's body and every op that depends on its results.

    Raises:
      PlanError: a value that is carried from one micro-batch to the next would be carried by two stages.
    """
    step = _Step(*split_sums(traced, scan, assignment), scan)
    return tuple(_Stage(step, number).build() for number in range(assignment.num_stages))


class _Step:
    """What is known of the whole step before any stage is built."""

    def __init__(self, traced: Traced, assignment: Assignment, scan: int) -> None:
        self.traced, self.assignment = traced, assignment
        self.graph, self.block = traced.graph, traced.graph.block
        self.scan = next(op for op in self.block.ops if op.index == scan)
        (self.body,) = self.scan.bodies
        self.num_consts: int = self.scan.params["num_consts"]
        self.num_carry: int = self.scan.params["num_carry"]
        self.stages = assignment.stage
        self.shared = assignment.shared
        self.made_by = {v: op for op in self.body.ops for v in op.results}
        self.port = {v: i for i, v in enumerate(self.body.inputs)}
        self.results = {v: i for i, v in enumerate(self.scan.results)}
        self.argument = {v: i for i, v in enumerate(self.block.inputs[: len(traced.arguments)])}
        self.constant = {v: i for i, v in enumerate(self.block.inputs[len(traced.arguments) :])}
        self._split_top()
        self._place_carries()
        self._place_rounds()
        self._place_outputs()
        self._place_crossings()

    def _split_top(self) -> None:
        """Sorts the top block into ops before the scan and ops that depend on it."""
        late = set(self.scan.results)
        self.before: dict[int, Op] = {}
        self.after: list[Op] = []
        for op in self.block.ops:
            if op is self.scan:
                continue
            if any(a in late for a in op.operands if isinstance(a, int)):
                self.after.append(op)
                late.update(op.results)
            else:
                self.before.update(dict.fromkeys(op.results, op))
        self.late = late

    def body_needs(self, stage: int) -> tuple[list[Op], set[int]]:
        """The body ops of a stage, shared ones that it reads included, in order; and the carries that it holds."""
        wanted = {
            op.index for op in self.body.ops if self.stages.get(op.index) == stage and op.index not in self.shared
        }
        carries: set[int] = set()
        pending = [op for op in self.body.ops if op.index in wanted]

        def demand(atom: Atom) -> None:
            if not isinstance(atom, int):
                return
            if atom in self.port:
                carry = self.port[atom] - self.num_consts
                if 0 <= carry < self.num_carry and carry not in carries:
                    carries.add(carry)
                    demand(self.body.outputs[carry])
            elif self.made_by[atom].index in self.shared and self.made_by[atom].index not in wanted:
                wanted.add(self.made_by[atom].index)
                pending.append(self.made_by[atom])

        for i, atom in enumerate(self.body.outputs[: self.num_carry]):
            if isinstance(atom, int) and atom in self.made_by and self.made_by[atom].index in wanted:
                carries.add(i)
        while pending:
            for atom in pending.pop().operands:
                demand(atom)
        return [op for op in self.body.ops if op.index in wanted], carries

    def _place_carries(self) -> None:
        """Decides who holds each carry and returns each result of the scan."""
        self.body_ops: list[list[Op]] = []
        self.carries: list[set[int]] = []
        for stage in range(self.assignment.num_stages):
            ops, carries = self.body_needs(stage)
            self.body_ops.append(ops)
            self.carries.append(carries)
        self.owner_of_result: dict[int, int] = {}
        for value, i in self.results.items():
            holders = [s for s, carries in enumerate(self.carries) if i in carries] if i < self.num_carry else []
            atom = self.body.outputs[i]
            if i < self.num_carry and len(holders) > 1:
                made = self.made_by.get(atom) if isinstance(atom, int) else None
                if made is not None and made.index not in self.shared:
                    raise PlanError(
                        f"carry {i} of the scan over micro-batches (made by {made.name}) is read by stages "
                        f"{holders}; a value that is carried from one micro-batch to the next must stay on one stage"
                    )
            if not holders and isinstance(atom, int) and atom in self.made_by:
                made = self.made_by[atom]
                holders = [s for s, ops in enumerate(self.body_ops) if any(op is made for op in ops)]
            self.owner_of_result[value] = holders[0] if holders else 0

    def _place_rounds(self) -> None:
        """The round of every op after the scan: one more than that of a value from another stage."""
        self.round_of: dict[int, int] = {}
        self.stage_of: dict[int, int] = dict(self.owner_of_result)
        value_round: dict[int, int] = dict.fromkeys(self.scan.results, 0)
        for op in self.after:
            stage = self.stages[op.index]
            number = 0
            for atom in op.operands:
                if isinstance(atom, int) and atom in value_round:
                    number = max(number, value_round[atom] + (self.stage_of[atom] != stage))
            self.round_of[op.index] = number
            for value in op.results:
                value_round[value] = number
                self.stage_of[value] = stage
        self.value_round = value_round

    def _reach(self, atoms: Iterable[Atom]) -> tuple[list[Op], set[int]]:
        """The ops before the scan that some atoms need, in order, and the inputs of the block that those read."""
        ops: dict[int, Op] = {}
        inputs: set[int] = set()
        pending = [a for a in atoms if isinstance(a, int)]
        seen: set[int] = set()
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            if value in self.before:
                op = self.before[value]
                if op.index not in ops:
                    ops[op.index] = op
                    pending += [a for a in op.operands if isinstance(a, int)]
            elif value in self.argument or value in self.constant:
                inputs.add(value)
        return [op for op in self.block.ops if op.index in ops], inputs

    def reads(self, stage: int) -> list[Atom]:
        """The atoms of the top block that a stage's body and update read, results of other stages excluded."""
        atoms: list[Atom] = []
        used = {a for op in self.body_ops[stage] for a in op.operands if isinstance(a, int)}
        for value, i in self.port.items():
            if value in used:
                atoms.append(self.scan.operands[i])
        atoms += [self.scan.operands[self.num_consts + i] for i in sorted(self.carries[stage])]
        for value, i in self.results.items():  # results that are inputs of the body
            atom = self.body.outputs[i]
            if i >= self.num_carry and self.owner_of_result[value] == stage and atom in self.port:
                atoms.append(self.scan.operands[self.port[atom]])  # type: ignore[index]
        for op in self.after:
            if self.stages[op.index] == stage:
                atoms += [a for a in op.operands if isinstance(a, int) and a not in self.late]
        return atoms

    def _place_outputs(self) -> None:
        """The stage of every flat result, and the owner of every state argument."""
        self.reached = [self._reach(self.reads(stage)) for stage in range(self.assignment.num_stages)]
        new_value = {argument: output for output, argument in self.traced.state}
        readers = {
            value: [s for s, (_, inputs) in enumerate(self.reached) if value in inputs] for value in self.argument
        }
        replaces = dict(self.traced.state)
        self.output_stage: list[int] = []
        for number, atom in enumerate(self.block.outputs):
            if isinstance(atom, int) and atom in self.late:
                self.output_stage.append(self.stage_of[atom])
            elif number in replaces:
                self.output_stage.append(self.assignment.home.get(self.block.inputs[replaces[number]], 0))
            else:
                _, inputs = self._reach([atom])
                states = [v for v in inputs if self.argument.get(v) in new_value]
                first = [readers[v][0] for v in states if readers[v]]
                self.output_stage.append(min(first, default=0))
        self.owner: dict[int, int] = {}
        for argument, output in new_value.items():
            self.owner[argument] = self.output_stage[output]

    def _place_crossings(self) -> None:
        """The body values that other stages read: the producer's stage for each, and the readers'."""
        self.crossing_in: list[list[int]] = []
        self.crossing_out: list[list[int]] = [[] for _ in self.body_ops]
        self.late_out: list[list[int]] = [[] for _ in self.body_ops]
        self.late_in: list[list[int]] = []
        for stage, ops in enumerate(self.body_ops):
            own = {op.index for op in ops}
            found: dict[int, None] = {}
            outputs = [self.body.outputs[i] for i in sorted(self.carries[stage])]
            for atom in [a for op in ops for a in op.operands] + outputs:
                if isinstance(atom, int) and atom in self.made_by and self.made_by[atom].index not in own:
                    found[atom] = None
            self.crossing_in.append(list(found))
            for value in found:
                source = self.crossing_out[self.stages[self.made_by[value].index]]
                if value not in source:
                    source.append(value)
            late: dict[int, None] = {}
            for op in self.after:
                if self.stages[op.index] == stage:
                    for atom in op.operands:
                        if isinstance(atom, int) and atom in self.late and self.stage_of[atom] != stage:
                            late[atom] = None
            self.late_in.append(list(late))
            for value in late:
                if value not in self.late_out[self.stage_of[value]]:
                    self.late_out[self.stage_of[value]].append(value)


class _Stage:
    """Builds the graph of one stage."""

    def __init__(self, step: _Step, number: int) -> None:
        self.step, self.number = step, number
        self.values: list[Value] = list(step.graph.values)
        self.index = 0
        self.backward: set[int] = set()
        self.weight: set[int] = set()
        self.rounds: dict[int, int] = {}

    def build(self) -> StageGraph:
        step, number = self.step, self.number
        outputs = [i for i, stage in enumerate(step.output_stage) if stage == number]
        finals = [step.block.outputs[i] for i in outputs]
        whole, read = step._reach([*step.reads(number), *(a for a in finals if a not in step.late)])
        arguments, ports = self._arguments(read, outputs)
        scan, scan_index, stacks_in, stacks_out = self._scan()
        top = [self._numbered(op) for op in whole]
        if scan is not None:
            scan = self._numbered(scan, body=True)
            scan_index = scan.index
            top.append(scan)
        for op in step.after:
            if step.stages[op.index] == number:
                new = self._numbered(op)
                self.rounds[new.index] = step.round_of[op.index]
                top.append(new)
        late_in, late_out = step.late_in[number], step.late_out[number]
        constants = sorted(v for v in read if v in step.constant)
        inputs = (*arguments, *stacks_in.values(), *late_in, *constants)
        results = (*finals, *stacks_out.values(), *late_out)
        input_ports = (
            *ports,
            *(Port("crossing", v) for v in stacks_in),
            *(Port("late", v) for v in late_in),
        )
        output_ports = (
            *(Port("argument", i) for i in outputs),
            *(Port("crossing", v) for v in stacks_out),
            *(Port("late", v) for v in late_out),
        )
        graph = Graph(
            tuple(self.values),
            Block(tuple(inputs), tuple(top), tuple(results)),
            tuple(step.graph.constants[step.constant[v]] for v in constants),
        )
        return StageGraph(
            traced=self._traced(graph, input_ports, output_ports),
            scan=scan_index,
            inputs=input_ports,
            outputs=output_ports,
            backward=frozenset(self.backward),
            weight=frozenset(self.weight),
            rounds=self.rounds,
            late_rounds={v: step.value_round[v] for v in late_out},
            constants=tuple(step.constant[v] for v in constants),
        )

    def _arguments(self, read: set[int], outputs: Sequence[int]) -> tuple[list[int], list[Port]]:
        """The arguments of the step that this stage takes: what it reads, and the state that it owns."""
        step = self.step
        values, ports = [], []
        for value, argument in step.argument.items():
            owner = step.owner.get(argument)
            if value in read or owner == self.number:
                values.append(value)
                ports.append(Port("argument" if owner in (None, self.number) else "copy", argument))
        return values, ports

    def _scan(self) -> tuple[Op | None, int, dict[int, int], dict[int, int]]:
        """The stage's scan over micro-batches, and the stacked values that it takes and gives."""
        step, number = self.step, self.number
        ops, carries = step.body_ops[number], sorted(step.carries[number])
        own_results = [
            (value, i) for value, i in step.results.items() if step.owner_of_result[value] == number
        ]  # fmt: skip
        stacked = [(value, i) for value, i in own_results if i >= step.num_carry]
        outs, ins = step.crossing_out[number], step.crossing_in[number]
        if not ops and not own_results:
            return None, -1, {}, {}
        used = {a for op in ops for a in op.operands if isinstance(a, int)}
        used |= {a for _, i in stacked if isinstance(a := step.body.outputs[i], int)}
        first_xs = step.num_consts + step.num_carry
        consts = [i for v, i in step.port.items() if v in used and i < step.num_consts]
        xs = [i for v, i in step.port.items() if v in used and i >= first_xs]
        length = int(step.scan.params["length"])
        stacks_in = {v: self._stack(v, length) for v in ins}
        stacks_out = {v: self._stack(v, length) for v in outs}
        ports = step.body.inputs
        body = Block(
            (
                *(ports[i] for i in consts),
                *(ports[step.num_consts + i] for i in carries),
                *(ports[i] for i in xs),
                *ins,
            ),
            tuple(sorted(ops, key=lambda op: op.index in step.assignment.backward)),
            (*(step.body.outputs[i] for i in carries), *(step.body.outputs[i] for _, i in stacked), *outs),
        )
        operands = step.scan.operands
        results_of_carry = {i: value for value, i in step.results.items()}
        owned = {i for _, i in own_results}
        results = [
            results_of_carry[i] if i in owned and i in results_of_carry else self._like(ports[step.num_consts + i])
            for i in carries
        ]
        scan = replace(
            step.scan,
            params={**step.scan.params, "num_consts": len(consts), "num_carry": len(carries)},
            operands=(
                *(operands[i] for i in consts),
                *(operands[step.num_consts + i] for i in carries),
                *(operands[i] for i in xs),
                *stacks_in.values(),
            ),
            results=(*results, *(value for value, _ in stacked), *stacks_out.values()),
            bodies=(body,),
        )
        return scan, scan.index, stacks_in, stacks_out

    def _stack(self, value: int, length: int) -> int:
        """A new value: `value` for every micro-batch."""
        inner = self.values[value]
        shape = (length, *inner.shape)
        self.values.append(Value(shape, inner.dtype, inner.aval.update(shape=shape)))
        return len(self.values) - 1

    def _like(self, value: int) -> int:
        self.values.append(self.values[value])
        return len(self.values) - 1

    def _numbered(self, op: Op, *, body: bool = False) -> Op:
        """The op with numbers in program order; notes the direction of those of the scan's body."""
        bodies = tuple(replace(b, ops=tuple(self._inner(o, note=body) for o in b.ops)) for b in op.bodies)
        new = replace(op, index=self.index, bodies=bodies)
        self.index += 1
        return new

    def _inner(self, op: Op, *, note: bool) -> Op:
        new = self._numbered(op)
        if note:
            if op.index in self.step.assignment.backward:
                self.backward.add(new.index)
            if op.index in self.step.assignment.weight:
                self.weight.add(new.index)
        return new

    def _traced(self, graph: Graph, inputs: Sequence[Port], outputs: Sequence[Port]) -> Traced:
        whole = self.step.traced
        position = {port.number: i for i, port in enumerate(inputs) if port.kind == "argument"}
        where = {port.number: i for i, port in enumerate(outputs) if port.kind == "argument"}
        return Traced(
            graph=graph,
            arguments=tuple(self._argument(port) for port in inputs),
            outputs=tuple(
                whole.outputs[port.number]
                if port.kind == "argument"
                else Argument(f"{port.kind} {port.number}", "other")
                for port in outputs
            ),
            state=tuple(sorted((where[o], position[a]) for o, a in whole.state if o in where and a in position)),
            in_tree=whole.in_tree,
            out_tree=whole.out_tree,
            calling=whole.calling,
            name=whole.name,
            stacked=whole.stacked,
        )

    def _argument(self, port: Port) -> Argument:
        whole = self.step.traced.arguments
        if port.kind == "argument":
            return whole[port.number]
        if port.kind == "copy":
            return Argument(whole[port.number].path, "other")
        return Argument(f"{port.kind} {port.number}", "other")
